"""A fleet of agents as the rows of one tensor: thousands of them in one process, on a CPU or a GPU.

Averaging with the neighbours is then one operation on ``[n, d]``. Topologies in which every agent looks alike (rings,
exponential graphs, one peer at a time) mix by slices, block by block, so that a block stays in the cache; all others by
a sparse product.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable

import networkx as nx
import numpy as np
import torch

from ..algorithms.algorithm import Algorithm, Gradient
from ..algorithms.mix import Everybody, Machine, Mix
from ..algorithms.needs import check
from ..algorithms.run import Measure, Run, steps_of
from ..algorithms.weights import Rounds, RoundWeights, Weights
from ..topology.schedule import Schedule
from ..transport.memory import ResultPool

Product = Callable[[torch.Tensor, torch.Tensor], None]
"""Writes ``W x`` to its first argument."""

_BLOCK_BYTES = 1 << 20
_MOST_HOPS = 64
_KEPT_ROUNDS = 64


class StackedMix(Mix):
    """The verbs of :class:`~shoal.algorithms.Mix` on rows.

    Args:
        topology: A graph with its weights, or a schedule.
        seed: Of the algorithm's random numbers.
        agents_per_machine: Who is together in the group ``"machine"``: the first so many ranks, and so on.
    """

    def __init__(self, topology: nx.Graph | Schedule, seed: int = 0, agents_per_machine: int = 1) -> None:
        super().__init__(seed)
        self._rounds = Rounds(topology)
        self.size = self._rounds.size
        self._per_machine = agents_per_machine
        self._products: OrderedDict[tuple[int, str, torch.dtype, torch.device], Product] = OrderedDict()
        self._pool = ResultPool()

    def __call__(self, x: torch.Tensor, *, nbytes: int | None = None) -> torch.Tensor:
        return self._weigh("mix", x, nbytes)

    def pull(self, x: torch.Tensor) -> torch.Tensor:
        return self._weigh("pull", x, None)

    def push(self, x: torch.Tensor) -> torch.Tensor:
        return self._weigh("push", x, None)

    def _weigh(self, form: str, x: torch.Tensor, nbytes: int | None) -> torch.Tensor:
        self._check(x)
        weights = self._rounds[self.round]
        messages = len(weights.own) - int(weights.own.sum())
        self.sent += messages * (x[0].nbytes if nbytes is None else nbytes)
        x = x.contiguous()
        out = self._pool.empty(tuple(x.shape), x.dtype) if x.is_cpu else torch.empty_like(x)
        self._product(form, x)(out, x)
        return out

    def _product(self, form: str, x: torch.Tensor) -> Product:
        key = self._rounds.turn(self.round), form, x.dtype, x.device
        if key not in self._products:
            weights = self._rounds[self.round]
            self._products[key] = product(weights, getattr(weights, form), x.dtype, x.device)
            if len(self._products) > _KEPT_ROUNDS:
                self._products.popitem(last=False)
        return self._products[key]

    def average(self, x: torch.Tensor, group: str = Everybody) -> torch.Tensor:
        self._check(x)
        self.sent += x.nbytes
        if group == Everybody:
            return x.mean(0, keepdim=True).expand_as(x).contiguous()
        if group != Machine:
            raise ValueError(f"group={group!r}: pass {Everybody!r} or {Machine!r}")
        rows = x.view(-1, self._per_machine, *x.shape[1:])
        return rows.mean(1, keepdim=True).expand_as(rows).reshape(x.shape)

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        here, _ = self._rounds[self.round].neighbours
        return x[torch.from_numpy(here).to(x.device)]

    def gather(self, messages: torch.Tensor) -> torch.Tensor:
        here, _ = self._rounds[self.round].neighbours
        out = messages.new_zeros((self.size, *messages.shape[1:]))
        return out.index_add_(0, torch.from_numpy(here).to(messages.device), messages)

    def edges(self, messages: torch.Tensor, *, nbytes: int | None = None) -> torch.Tensor:
        reverse = torch.from_numpy(self._rounds[self.round].reverse).to(messages.device)
        self.sent += messages.nbytes if nbytes is None else nbytes * len(messages)
        return messages[reverse]

    def sign(self, like: torch.Tensor) -> torch.Tensor:
        here, there = self._rounds[self.round].neighbours
        return torch.from_numpy(np.sign(there - here)).to(like.device, like.dtype).unsqueeze(1)

    def _agents(self, like: torch.Tensor) -> torch.Tensor:
        return torch.arange(self.size, device=like.device).unsqueeze(1)

    def _check(self, x: torch.Tensor) -> None:
        if x.dim() < 2 or len(x) != self.size:
            raise ValueError(f"a tensor of shape {list(x.shape)}: a fleet of {self.size} agents has [{self.size}, d]")


def product(weights: RoundWeights, values: Weights, dtype: torch.dtype, device: torch.device) -> Product:
    """The fastest way to multiply by the sparse matrix of a round, with these weights on its edges."""
    shares = _shares(weights, values)
    if shares is not None:
        return lambda out, x: _shift(out, x, shares)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls its sparse layouts a beta
        rows = np.concatenate([[0], np.cumsum(np.bincount(weights.destination, minlength=weights.size))])
        matrix = torch.sparse_csr_tensor(
            torch.from_numpy(rows),
            torch.from_numpy(weights.source.copy()),
            torch.from_numpy(values.copy()).to(dtype),
            (weights.size, weights.size),
            device=device,
        )

    def multiply(out: torch.Tensor, x: torch.Tensor) -> None:
        torch.mm(matrix, x.reshape(len(x), -1), out=out.view(len(x), -1))

    return multiply


def _shares(weights: RoundWeights, values: Weights) -> dict[int, float] | None:
    """{hop: weight} where every agent weighs the one so many ranks behind it alike; None where they differ."""
    hops = (weights.destination - weights.source) % weights.size
    distinct, first, counts = np.unique(hops, return_index=True, return_counts=True)
    if len(distinct) > _MOST_HOPS or (counts != weights.size).any():
        return None
    found = values[first]
    if not np.array_equal(values, found[np.searchsorted(distinct, hops)]):
        return None
    return dict(zip(distinct.tolist(), found.tolist(), strict=True))


def _shift(out: torch.Tensor, x: torch.Tensor, shares: dict[int, float]) -> None:
    """``out[i] = sum over hops of share x[i - hop]``, block by block."""
    size = len(x)
    rows = max(1, _BLOCK_BYTES // max(1, x[0].nbytes))
    for begin in range(0, size, rows):
        end = min(begin + rows, size)
        block, fresh = out[begin:end], True
        for hop, weight in shares.items():
            for target, source in _pieces(block, x, (begin - hop) % size):
                if fresh:
                    torch.mul(source, weight, out=target)
                else:
                    target.add_(source, alpha=weight)
            fresh = False


def _pieces(block: torch.Tensor, x: torch.Tensor, start: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The rows of ``x`` from ``start``, around the end, that go with the rows of ``block``."""
    here = min(len(block), len(x) - start)
    pieces = [(block[:here], x[start : start + here])]
    if here < len(block):
        pieces.append((block[here:], x[: len(block) - here]))
    return pieces


class StackedFleet:
    """Simulated agents, all in one process.

    Args:
        topology: A graph with its weights, or a schedule; it says how many agents there are.
        seed: Of all random numbers of a run.
        agents_per_machine: For algorithms that average within a machine.
    """

    def __init__(self, topology: nx.Graph | Schedule, *, seed: int = 0, agents_per_machine: int = 1) -> None:
        self.topology, self.seed, self.agents_per_machine = topology, seed, agents_per_machine
        self.size = Rounds(topology).size
        if agents_per_machine < 1 or self.size % agents_per_machine:
            raise ValueError(f"{self.size} agents do not fill machines of {agents_per_machine}")

    def run(
        self,
        algorithm: Algorithm,
        x: torch.Tensor,
        gradient: Gradient | Callable[[torch.Tensor], torch.Tensor],
        steps: int,
        *,
        measure: Measure | None = None,
        every: int = 1,
        progress: bool = False,
        resume: Run | None = None,
    ) -> Run:
        """Take some steps of an algorithm on all agents.

        Args:
            algorithm: From :mod:`shoal.algorithms`, or your own.
            x: Where the agents begin: ``[n, d]``, or ``[d]`` for all the same.
            gradient: ``[n, d]`` to ``[n, d]``, row i the gradient of agent i at its own row: a function, or what
                :func:`~shoal.sim.per_agent` makes of one agent's loss.
            steps: How many.
            measure: Takes the estimates ``[n, d]``, gives ``{name: figure}``; recorded before the first step, every
                ``every`` steps, and after the last.
            every: How often to record.
            progress: Show a bar.
            resume: A run of this fleet to go on with.

        Raises:
            ValueError: A shape, or a mixing that is not what the algorithm needs; the message says which condition
                fails and what to use instead.
        """
        check(type(algorithm).__name__, algorithm.needs, self.topology)
        mix = StackedMix(self.topology, self.seed, self.agents_per_machine)
        x = x.expand(self.size, -1) if x.dim() == 1 else x
        return steps_of(
            algorithm, x, gradient, mix, steps, measure=measure, every=every, progress=progress, resume=resume
        )
