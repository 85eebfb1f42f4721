"""Programs that agents run, drawn from a seed, and what each call must give, computed with NumPy.

Inputs are small whole numbers and weights are sums of powers of two, so that most results are exact.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch

import shoal
from shoal import clock
from shoal.compression import Identity

from . import optimizers
from .optimizers import STYLES, Style

Array = Any
SIZES = (1, 1, 2, 7, 300, 1100, 5000)
LARGE = 20_000
"""Elements, of 8 bytes, that travel as a stream."""
WEIGHTS = (0.25, 0.5, 0.75, 1.0, -0.5)
KINDS = (
    *("static", "static", "push", "pull", "push-pull", "compressed", "grouped", "average", "sum", "max"),
    *("broadcast", "allgather", "neighbor_allgather", "barrier", "object", "group", "window"),
    "optimizer",
)
ONE_EXCHANGE = ("static", "static", "push", "pull", "push-pull", "grouped")
"""Of which an agent has sent its part once it has begun them."""
FUSIBLE = ("static", "average", "sum", "push-pull")
OPERATIONS = {"window": 9, "optimizer": 5}
"""How many operations of the engine a call makes, where it is not one."""
BLOCKING = frozenset({"barrier", "object", "window", "neighbor_allgather", "optimizer"})
TOPOLOGIES: dict[str, Callable[[int], Any]] = {
    "exponential": shoal.topology.ExponentialTwoGraph,
    "ring": shoal.topology.RingGraph,
    "full": shoal.topology.FullyConnectedGraph,
}


@lru_cache(maxsize=64)
def graph_of(topology: str, size: int) -> Any:
    """One graph for all agents and runs, which only read it."""
    return TOPOLOGIES[topology](size)


@dataclass(frozen=True)
class Call:
    """One call of all agents, or of a group.

    Attributes:
        spans: In a training: all agents but one begin it before a step ends, that one after it, and all wait then.
    """

    number: int
    kind: str
    elements: int
    blocking: bool
    sends: tuple[dict[int, float], ...] = ()
    root: int = 0
    members: tuple[int, ...] = ()
    style: Style = STYLES[0]
    spans: bool = False

    @property
    def name(self) -> str:
        return f"call {self.number}"

    def __str__(self) -> str:
        how = ", across the end of a step" if self.spans else "" if self.blocking else ", nonblocking"
        more = {"group": f" of ranks {list(self.members)}", "optimizer": f" ({self.style})"}.get(self.kind, "")
        return f"{self.name}: {self.kind}{more} of {self.elements} numbers{how}"


@dataclass
class Program:
    """The calls of the agents of a run, by rank and in order.

    Attributes:
        order: By rank: the numbers of the calls as it makes them, and -n - 1 where it waits for call n.
    """

    size: int
    topology: str
    calls: list[Call]
    seed: int
    kinds: tuple[str, ...] = KINDS
    _drawn: dict[tuple[int, ...], Array] = field(default_factory=dict, init=False, repr=False, compare=False)
    _stepped: dict[int, Array] = field(default_factory=dict, init=False, repr=False, compare=False)

    @staticmethod
    def draw(chance: random.Random, size: int, length: int, kinds: tuple[str, ...] = KINDS) -> Program:
        """Args: ``length``: How many operations of the engine each agent makes, about."""
        calls: list[Call] = []
        while length > 0:
            number, kind = len(calls), chance.choice(kinds)
            length -= OPERATIONS.get(kind, 1)
            sends = tuple(
                {other: chance.choice(WEIGHTS) for other in range(size) if other != rank and chance.random() < 0.5}
                for rank in range(size)
            )
            members = tuple(sorted(chance.sample(range(size), chance.randint(min(2, size), size))))
            small = kinds == FUSIBLE
            elements = chance.randint(1, 9) if small else LARGE if chance.random() < 0.02 else chance.choice(SIZES)
            blocking = kind in BLOCKING or chance.random() < (0.1 if small else 0.5)
            style = chance.choice(STYLES)
            calls.append(Call(number, kind, elements, blocking, sends, chance.randrange(size), members, style))
        return Program(size, chance.choice(list(TOPOLOGIES)), calls, chance.randrange(1 << 30), kinds)

    def order(self, rank: int) -> list[tuple[str, Call]]:
        """The schedule of one agent: it begins a call, or waits for a call that it has begun."""
        chance = random.Random(f"{self.seed} {rank}")
        done: list[tuple[str, Call]] = []
        waiting: list[Call] = []
        burst: list[Call] = []
        for call in [*(call for call in self.calls if not call.spans), None]:
            if call is not None and not call.blocking:
                burst.append(call)  # calls of one group may begin in any order
                continue
            chance.shuffle(burst)
            for one in burst:
                done.append(("begin", one))
                waiting.append(one)
            burst = []
            if call is not None:
                done.append(("call", call))
                while waiting and chance.random() < 0.4:
                    done.append(("wait", waiting.pop(chance.randrange(len(waiting)))))
        chance.shuffle(waiting)
        return [*done, *(("wait", one) for one in waiting)]

    @property
    def graph(self) -> Any:
        return graph_of(self.topology, self.size)

    @cached_property
    def sources(self) -> list[list[int]]:
        return [sorted(set(self.graph.predecessors(rank)) - {rank}) for rank in range(self.size)]

    def numbers(self, call: Call, rank: int) -> Array:
        """The tensor that an agent gives to a call. To be read only."""
        drawn: Array = self.drawn(call)[rank]
        return drawn

    def gradient(self, call: Call, rank: int, step: int) -> Array:
        return self.drawn(call, step)[rank].copy()

    def drawn(self, call: Call, *more: int) -> Array:
        """Small whole numbers for a call, one row for each agent. To be read only."""
        key = call.number, *more
        if key not in self._drawn:  # all rows at once: a generator costs more than its numbers
            chance = np.random.default_rng((self.seed, *key))
            self._drawn[key] = chance.integers(-8, 9, (self.size, call.elements)).astype(np.float64)
        return self._drawn[key]

    def expected(self, call: Call, rank: int, participants: tuple[int, ...] = ()) -> Array:
        """The expected result of a call on an agent, when ``there`` take part (all, by default)."""
        ranks = participants or tuple(range(self.size))
        x = {index: self.numbers(call, index) for index in range(self.size)}
        kind, own = call.kind, x[rank]
        if kind in ("static", "compressed", "window"):
            return sum((x[source] for source in self.sources[rank]), own) / (len(self.sources[rank]) + 1)
        if kind == "grouped":
            both = sum((x[source] for source in self.sources[rank]), own) / (len(self.sources[rank]) + 1)
            return np.concatenate([both, 2 * both])
        if kind in ("push", "pull", "push-pull"):
            weight = {one: call.sends[one].get(rank) for one in ranks}
            power = 2 if kind == "push-pull" else 1
            return sum((w**power * x[one] for one, w in weight.items() if w is not None), 0.5 * own)
        if kind == "group":
            return sum(x[member] for member in call.members) / len(call.members)
        if kind in ("average", "sum"):
            total = sum(x[rank] for rank in ranks)
            return total / len(ranks) if kind == "average" else total
        if kind == "max":
            return np.max([x[rank] for rank in ranks], axis=0)
        if kind in ("broadcast", "object"):
            return x[call.root]
        if kind == "allgather":
            return np.concatenate([x[rank] for rank in ranks])
        if kind == "optimizer":
            if call.number not in self._stepped:
                gradients = [self.drawn(call, step) for step in range(optimizers.STEPS)]
                self._stepped[call.number] = optimizers.after(call.style, self.graph, self.drawn(call), gradients)
            return self._stepped[call.number][rank]
        if kind == "neighbor_allgather":
            return np.concatenate([np.zeros(0), *(x[source] for source in self.sources[rank])])
        return np.zeros(0)

    def begin(self, call: Call, rank: int, tensor: torch.Tensor) -> Any:
        """Make a call; its result, or a handle where it is nonblocking."""
        kind, name = call.kind, call.name
        average = shoal.neighbor_allreduce if call.blocking else shoal.nonblocking.neighbor_allreduce
        reduce = shoal.allreduce if call.blocking else shoal.nonblocking.allreduce
        sends = call.sends[rank]
        receives = {source: to[rank] for source, to in enumerate(call.sends) if rank in to}
        if kind == "static":
            return average(tensor, name=name)
        if kind == "compressed":
            return average(tensor, compression=Identity(), name=name)
        if kind == "push":
            return average(tensor, 0.5, dst_weights=sends, name=name)
        if kind == "pull":
            return average(tensor, 0.5, src_weights=receives, name=name)
        if kind == "push-pull":
            return average(tensor, 0.5, src_weights=receives, dst_weights=sends, name=name)
        if kind == "grouped":
            several = (
                shoal.grouped_neighbor_allreduce if call.blocking else shoal.nonblocking.grouped_neighbor_allreduce
            )
            return several([tensor, 2 * tensor], name=name)
        if kind == "average":
            return reduce(tensor, name=name)
        if kind == "sum":
            return reduce(tensor, average=False, name=name)
        if kind == "max":
            return reduce(tensor, op="max", name=name)
        if kind == "group":
            return reduce(tensor, name=name, group=list(call.members))
        if kind == "broadcast":
            return (shoal.broadcast if call.blocking else shoal.nonblocking.broadcast)(tensor, call.root, name=name)
        if kind == "allgather":
            return (shoal.allgather if call.blocking else shoal.nonblocking.allgather)(tensor, name=name)
        if kind == "neighbor_allgather":
            return shoal.neighbor_allgather(tensor, name=name)
        if kind == "object":
            return shoal.broadcast_object(tensor.tolist(), call.root, name=name)
        if kind == "window":
            return _window(tensor, name)
        if kind == "optimizer":
            return self._optimize(call, rank, tensor)
        shoal.barrier(name=name)
        return torch.zeros(0)

    def _optimize(self, call: Call, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        model = optimizers.Point(tensor)
        optimizer = optimizers.optimizer_of(call.style, model, call.name)
        try:
            for step in range(optimizers.STEPS):
                gradient = self.gradient(call, rank, step)
                optimizers.take_step(optimizer, model, gradient, lambda: clock.sleep(0.0))
            return model.x.detach().clone()
        finally:
            optimizer.close()


def _window(tensor: torch.Tensor, name: str) -> torch.Tensor:
    shoal.bluefog.win_create(tensor.clone(), name)
    shoal.bluefog.win_put(tensor, name, require_mutex=True)
    shoal.barrier(name=f"{name}: all have put")
    result = shoal.bluefog.win_update(name, clone=True)
    shoal.barrier(name=f"{name}: all have read")
    shoal.bluefog.win_free(name)
    return result


def as_array(result: Any) -> Array:
    """The result of a call, as one flat array."""
    if isinstance(result, torch.Tensor):
        return result.detach().numpy().reshape(-1).astype(np.float64, copy=False)
    if isinstance(result, list) and result and isinstance(result[0], torch.Tensor):
        return np.concatenate([one.detach().numpy().reshape(-1) for one in result])
    return np.asarray(result, dtype=np.float64).reshape(-1)
