"""The agents' functions with windows in tests: the same in a thread of a fleet and in a process of a world.

:func:`record_history` does random operations and records them for :mod:`support.histories`. :func:`move_mass` does
random operations that keep the total and counts it in between. A plain value configures each.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import networkx as nx
import torch

import shoal
from shoal.runtime.agent import bind
from support.histories import (
    Accumulate,
    Collect,
    Edge,
    Effect,
    Fetch,
    Look,
    Put,
    Read,
    Record,
    Recorder,
    Register,
    Slot,
    Store,
    common_value,
    merged,
)

Steps = list[tuple[Edge, Effect]]
WRITES = ("put", "accumulate")
READS = ("read", "collect", "look")
_get_numbers = itertools.count()


def in_threads(count: int, function: Callable[[int], object]) -> None:
    """Call ``function(0)`` to ``function(count - 1)`` in as many threads of this agent; the first is the caller's."""
    with ThreadPoolExecutor(count) as pool:
        others = [pool.submit(bind(function), index) for index in range(1, count)]
        try:
            function(0)
        finally:
            for one in others:
                one.result()


# One operation after the other


def every_operation(numel: int) -> dict[str, list[float]]:
    """The content of this agent's slots after each operation of all agents, in the order of its in-neighbours."""
    shoal.set_topology(shoal.topology.FullyConnectedGraph(shoal.size()))
    me = shoal.rank()
    x = torch.full((numel,), me + 1.0)
    shoal.bluefog.win_create(x, "x", zero_init=True)
    result = {}

    def record(what: str) -> None:
        shoal.barrier()
        result[what] = [
            common_value(shoal.bluefog.win_update("x", 0.0, {source: 1.0}, clone=True))
            for source in shoal.in_neighbor_ranks()
        ]
        shoal.barrier()

    shoal.bluefog.win_put(x * 10, "x", dst_weights={to: to + 1 for to in shoal.out_neighbor_ranks()})
    record("put")
    shoal.bluefog.win_accumulate(x, "x", require_mutex=True)
    record("accumulate")
    shoal.bluefog.win_update_then_collect("x")
    record("collect")
    shoal.bluefog.win_get("x", src_weights=dict.fromkeys(shoal.in_neighbor_ranks(), 0.5))
    record("get")
    shoal.bluefog.win_free("x")
    return result


def times_in_mutex(rounds: int) -> list[tuple[int, int]]:
    """From when to when, in ``time.monotonic_ns()``, this agent had the mutex of agent 0 each time."""
    shoal.set_topology(shoal.topology.FullyConnectedGraph(shoal.size()))
    shoal.bluefog.win_create(torch.zeros(1), "x")
    results = []
    for _ in range(rounds):
        with shoal.bluefog.win_mutex("x", for_self=shoal.rank() == 0, ranks=[0]):
            began = time.monotonic_ns()
            time.sleep(0.0002)
            results.append((began, time.monotonic_ns()))
    shoal.barrier()
    shoal.bluefog.win_free("x")
    return results


# Histories


@dataclass(frozen=True)
class Program:
    """Random operations of all agents on one window, every agent a neighbour of every other.

    Attributes:
        numel: elements of the tensor.
        operations: of each thread.
        threads: of each agent.
        kinds: what they do, of WRITES, READS, ``get``, and ``update`` (in place, by the first thread only; between two
            agents only).
        require_mutex: for each operation that takes it.
        in_place: the registered tensor comes from ``shoal.windows.empty``.
        with_p: associated weights are on. Then agent 0 only reads and the others only write, as an agent's own
            associated weight changes when it reads.
        seed: of the random choices.
        dtype: float64 or int64.
    """

    numel: int = 1
    operations: int = 60
    threads: int = 2
    kinds: tuple[str, ...] = (*WRITES, *READS)
    require_mutex: bool = False
    in_place: bool = False
    with_p: bool = False
    seed: int = 0
    dtype: torch.dtype = torch.float64


def record_history(program: Program) -> dict[Edge, list[Record]]:
    """Be one agent of a program. The histories of the slots, as far as this agent took part in them."""
    shoal.set_topology(shoal.topology.FullyConnectedGraph(shoal.size()))
    if program.with_p:
        shoal.bluefog.turn_on_win_ops_with_associated_p()
    x = (shoal.windows.empty if program.in_place else torch.empty)(program.numel, dtype=program.dtype).fill_(
        shoal.rank() + 1
    )
    shoal.bluefog.win_create(x, "x", zero_init=True)
    recorders = [Recorder(f"rank {shoal.rank()} thread {thread}") for thread in range(program.threads)]
    shoal.barrier()
    in_threads(program.threads, lambda thread: _Thread(program, thread, x, recorders[thread]).run())
    shoal.barrier()
    last = _Thread(program, 0, x, recorders[0])
    for _ in range(2):  # no returned operation may be missing at the end
        last.look()
        last.read()
    shoal.barrier()
    shoal.bluefog.win_free("x")
    shoal.bluefog.turn_off_win_ops_with_associated_p()
    return dict(merged(one.histories for one in recorders))


def starts(size: int) -> dict[Edge, Slot]:
    """The slots of a program when its window is made."""
    return {(j, i): Slot(registered=j + 1) for i in range(size) for j in range(size) if i != j}


class _Thread:
    """One thread of an agent.

    A sum over slots must show the content of each slot, so each in-neighbour has its own bits: its writes are shifted
    by the associated weight, and reads are split into bits again.
    """

    def __init__(self, program: Program, thread: int, x: torch.Tensor, recorder: Recorder) -> None:
        self._program = program
        self._x = x
        self._recorder = recorder
        self._me = shoal.rank()
        self._sources = shoal.in_neighbor_ranks()
        self._lane_bits = (52 if program.dtype == torch.float64 else 62) // len(self._sources)
        self._chance = random.Random(f"{program.seed} {self._me} {thread}")
        self._pause = self._chance.choice([0.0, 0.0, 0.0005 * (1 + self._me)])
        kinds = program.kinds
        if program.with_p:
            kinds = tuple(kind for kind in kinds if (kind in WRITES) == (self._me != 0))
        self._kinds = tuple(kind for kind in kinds if kind != "update" or thread == 0)

    def run(self) -> None:
        for _ in range(self._program.operations):
            if self._pause and self._chance.random() < 0.3:
                time.sleep(self._pause)
            getattr(self, self._chance.choice(self._kinds))()

    def _shift(self, source: int, owner: int) -> int:
        lanes = [rank for rank in range(shoal.size()) if rank != owner]
        return int(2 ** (self._lane_bits * lanes.index(source)))

    def _written(self) -> tuple[torch.Tensor, int, dict[int, int]]:
        value = self._chance.randrange(1, 1 << (self._lane_bits - 10))
        destinations = shoal.out_neighbor_ranks()
        some = self._chance.sample(destinations, self._chance.randint(1, len(destinations)))
        tensor = torch.full_like(self._x, value)
        return tensor, value, {to: self._shift(self._me, to) for to in some}

    def put(self) -> None:
        tensor, value, weights = self._written()
        p = self._program.with_p
        effects: Steps = [((self._me, to), Put(value, float(weights[to]) if p else None)) for to in weights]
        self._recorder.run(
            lambda: shoal.bluefog.win_put(tensor, "x", dst_weights=weights, require_mutex=self._program.require_mutex),
            lambda _: effects,
        )

    def accumulate(self) -> None:
        tensor, value, weights = self._written()
        p = self._program.with_p
        effects: Steps = [((self._me, to), Accumulate(value, float(weights[to]) if p else 0.0)) for to in weights]
        self._recorder.run(
            lambda: shoal.bluefog.win_accumulate(
                tensor, "x", dst_weights=weights, require_mutex=self._program.require_mutex
            ),
            lambda _: effects,
        )

    def get(self) -> None:
        some = self._chance.sample(self._sources, self._chance.randint(1, len(self._sources)))
        weights = {source: self._shift(source, self._me) for source in some}
        effects: Steps = []
        for source in weights:
            number = next(_get_numbers)
            effects += [((source, self._me), Fetch(number)), ((source, self._me), Store(number))]
        mutex = self._program.require_mutex
        self._recorder.run(
            lambda: shoal.bluefog.win_get("x", src_weights=weights, require_mutex=mutex), lambda _: effects
        )

    def read(self) -> None:
        self._recorder.run(
            lambda: self._update(reset=False), lambda found: [] if found is None else self._split(Read, found)
        )

    def collect(self) -> None:
        def effects(found: torch.Tensor | None) -> Steps:
            if found is None:
                return [((source, self._me), Collect(None)) for source in self._sources]
            return self._split(Collect, found)

        self._recorder.run(lambda: self._update(reset=True), effects)

    def update(self) -> None:
        """Make what is in the only slot the registered tensor, in place."""
        [source] = self._sources

        def effects(found: float | None) -> Steps:
            assert found is not None
            return [((source, self._me), Read(found)), ((self._me, source), Register(found))]

        def update() -> float:
            shoal.bluefog.win_update("x", 0.0, {source: 1.0}, require_mutex=self._program.require_mutex)
            return common_value(self._x)

        self._recorder.run(update, effects)

    def _update(self, reset: bool) -> torch.Tensor:
        ones = dict.fromkeys(self._sources, 1)
        return shoal.bluefog.win_update(
            "x", 0, ones, reset=reset, clone=True, require_mutex=self._program.require_mutex
        )

    def _split(self, kind: type[Read] | type[Collect], found: torch.Tensor) -> Steps:
        total = common_value(found)
        steps: Steps = []
        for source in self._sources:
            shift = self._shift(source, self._me)
            value = total if math.isnan(total) else int(total) // shift % 2**self._lane_bits
            steps.append(((source, self._me), kind(value)))
        return steps

    def look(self) -> None:
        def effects(found: dict[int, shoal.windows.SlotState] | None) -> Steps:
            assert found is not None
            return [
                ((source, self._me), Look(one.puts, one.gets, one.accumulates, one.p)) for source, one in found.items()
            ]

        self._recorder.run(lambda: shoal.bluefog.win_slots("x"), effects)


# Mass

QUANTUM_BITS = 46
"""Shares are multiples of 2**-46, so that values up to 64 and their sums have a float64 each."""


@dataclass(frozen=True)
class Flow:
    """Random pushes and collections of all agents on one window, which conserve the total mass.

    Attributes:
        phases: after each, when all agents have done its operations, the mass is counted.
        operations: of each thread in a phase.
        threads: of each agent. Several take turns through the agent's own mutex, as they change one tensor.
        numel: elements of the tensor.
        dyadic: all shares are powers of two, large enough that their sums are exact.
        in_place: the tensor comes from ``shoal.windows.empty``.
        seed: of the random choices.
    """

    phases: int = 4
    operations: int = 150
    threads: int = 1
    numel: int = 3
    dyadic: bool = True
    in_place: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Mass:
    """What one agent has: the sum of its tensor and its slots, element by element, and of the associated weights."""

    values: tuple[float, ...]
    p: float


def flow_graph(size: int) -> nx.DiGraph:
    """A directed ring and a few edges across, so that degrees differ."""
    graph = nx.DiGraph([(rank, (rank + 1) % size) for rank in range(size)])
    graph.add_edges_from((rank, rank // 2) for rank in range(size) if rank != rank // 2)
    return graph


def first_mass(rank: int, numel: int) -> list[float]:
    """The first value of an agent's tensor, when its window is made."""
    return [float((rank + 1) * (1 + 2 * (k % 3))) for k in range(numel)]


def move_mass(flow: Flow) -> list[Mass]:
    """Be one agent of a flow. Returns its mass after each phase, when no operation was in progress."""
    shoal.set_topology(flow_graph(shoal.size()))
    shoal.bluefog.turn_on_win_ops_with_associated_p()
    first = torch.tensor(first_mass(shoal.rank(), flow.numel), dtype=torch.float64)
    x = shoal.windows.empty(flow.numel, dtype=torch.float64).copy_(first) if flow.in_place else first
    shoal.bluefog.win_create(x, "x", zero_init=True)
    movers = [_Mover(flow, x, thread) for thread in range(flow.threads)]
    results = []
    for _ in range(flow.phases):
        in_threads(flow.threads, lambda thread: movers[thread].run())
        shoal.barrier()
        results.append(_count())
        shoal.barrier()
    shoal.bluefog.win_free("x")
    shoal.bluefog.turn_off_win_ops_with_associated_p()
    return results


def _count() -> Mass:
    p = shoal.bluefog.win_associated_p("x") + sum(one.p for one in shoal.bluefog.win_slots("x").values())
    shoal.bluefog.turn_off_win_ops_with_associated_p()  # else the update below would count them a second time
    values = shoal.bluefog.win_update("x", 1.0, dict.fromkeys(shoal.in_neighbor_ranks(), 1.0), clone=True)
    shoal.bluefog.turn_on_win_ops_with_associated_p()
    return Mass(tuple(values.tolist()), p)


class _Mover:
    """One thread of an agent of a flow."""

    def __init__(self, flow: Flow, x: torch.Tensor, thread: int) -> None:
        self._flow = flow
        self._x = x
        self._chance = random.Random(f"{flow.seed} {shoal.rank()} {thread}")
        self._pause = 1e-4 * 10 ** (shoal.rank() / max(1, shoal.size() - 1))  # the slowest is ten times slower

    def run(self) -> None:
        alone = self._flow.threads == 1
        for _ in range(self._flow.operations):
            if self._chance.random() < 0.2:
                time.sleep(self._pause)
            if self._chance.random() < 0.4:
                self._collect(require_mutex=not alone or self._chance.random() < 0.5)
            elif alone:
                self._push(require_mutex=self._chance.random() < 0.5)
            else:
                with shoal.bluefog.win_mutex("x", for_self=True):
                    self._push(require_mutex=False)

    def _collect(self, require_mutex: bool) -> None:
        if self._chance.random() < 0.5:
            shoal.bluefog.win_update_then_collect("x", require_mutex)
        else:
            ones = dict.fromkeys(shoal.in_neighbor_ranks(), 1.0)
            shoal.bluefog.win_update("x", 1.0, ones, reset=True, require_mutex=require_mutex)

    def _push(self, require_mutex: bool) -> None:
        neighbours = shoal.out_neighbor_ranks()
        some = self._chance.sample(neighbours, self._chance.randint(1, len(neighbours)))
        kept, sent = self._shares(some)
        if self._chance.random() < 0.5:
            shoal.bluefog.win_accumulate(self._x, "x", kept, sent, require_mutex)
        else:
            shoal.bluefog.win_wait(shoal.bluefog.win_accumulate_nonblocking(self._x, "x", kept, sent, require_mutex))

    def _shares(self, some: list[int]) -> tuple[float, dict[int, float]]:
        """The share that is kept and the shares of the receivers; their sum is one."""
        if not self._flow.dyadic:
            return 1 / (1 + len(some)), dict.fromkeys(some, 1 / (1 + len(some)))
        shares = [2.0 ** -(k + 1) for k in range(len(some))]
        parts = torch.cat([self._x, self._x.new_tensor([shoal.bluefog.win_associated_p("x")])]) * shares[-1]
        units = parts * 2.0**QUANTUM_BITS
        if bool((units == units.round()).all()):
            return shares[0], dict(zip(some, [*shares[1:], shares[-1]], strict=True))
        return 0.0, {some[0]: 1.0}  # too little to be divided: all of it moves
