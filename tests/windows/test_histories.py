"""Each slot is linearizable: what agents saw of it at the same time could have happened one step at a time."""

from __future__ import annotations

import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal.runtime.agent import bind, current
from shoal.windows.owner_requests import PREFIX
from shoal.windows.registry import Windows
from shoal.windows.window_memory import EDGES
from support.histories import (
    NEVER,
    Accumulate,
    Collect,
    Edge,
    Effect,
    Fetch,
    Look,
    NotLinearizable,
    Put,
    Read,
    Record,
    Recorder,
    Register,
    Slot,
    Store,
    check_all,
    common_value,
    find_order,
    merged,
)
from support.window_agents import READS, WRITES, Program, record_history, starts
from support.world import World

Fleets = Callable[..., shoal.Fleet]
Step = tuple[float, float, Effect]
SHORT = 0.03
"""Seconds: a deadline that is to be missed."""
OVER = [
    pytest.param({}, id="shared_memory", marks=pytest.mark.transport("shared_memory")),
    pytest.param({"SHOAL_TRANSPORT": "network"}, id="network", marks=pytest.mark.transport("network")),
]


@pytest.fixture
def crowd(fleet: Fleets) -> Iterator[Fleets]:
    """Fleets whose threads take the interpreter from each other in the middle of an operation, not after many."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield fleet
    sys.setswitchinterval(before)


def history(*steps: Step) -> list[Record]:
    return [Record(effect, "somebody", called, returned) for called, returned, effect in steps]


# The checker

FINE: dict[str, list[Record]] = {
    "one after the other": history((0, 1, Put(1)), (2, 3, Accumulate(2)), (4, 5, Read(3)), (6, 7, Collect(3))),
    "a read during a put, of the old": history((0, 5, Put(1)), (1, 2, Read(0))),
    "a read during a put, of the new": history((0, 5, Put(1)), (1, 2, Read(1)), (3, 4, Read(1))),
    "two puts at once, the later call first": history((0, 5, Put(1)), (1, 4, Put(2)), (6, 7, Read(1))),
    "a collect between two accumulates at once": history(
        (0, 9, Accumulate(1)), (0, 9, Accumulate(2)), (3, 4, Collect(2)), (10, 11, Read(1))
    ),
    "unknown, and never": history((0, NEVER, Accumulate(1)), (2, 3, Read(0)), (4, 5, Read(0))),
    "unknown, and late": history((0, NEVER, Accumulate(1)), (2, 3, Read(0)), (4, 5, Read(1)), (6, 7, Read(1))),
    "a collect that failed and had its effect": history(
        (0, 1, Accumulate(1)), (2, NEVER, Collect(None)), (3, 4, Read(1)), (5, 6, Read(0))
    ),
    "a get of the new during its change": history(
        (0, 5, Register(4)), (1, 2, Fetch(0)), (1, 2, Store(0)), (3, 4, Read(4)), (6, 7, Look(0, 1, 0, 0.0))
    ),
    "a get that stores what has changed since": history(
        (0, 9, Fetch(0)), (0, 9, Store(0)), (2, 3, Register(4)), (4, 5, Put(1)), (6, 7, Read(1)), (10, 11, Read(0))
    ),
    "counts and the associated weight": history(
        (0, 1, Put(1, 0.5)), (2, 3, Accumulate(1, 0.25)), (4, 5, Look(1, 0, 1, 0.75)), (6, 7, Put(1)), (8, 9, Read(1))
    ),
}
WRONG: dict[str, tuple[list[Record], int]] = {
    "a lost accumulate": (history((0, 5, Accumulate(1)), (1, 4, Accumulate(2)), (6, 7, Read(2))), 2),
    "a torn read": (history((0, 5, Put(1)), (1, 2, Read(common_value(torch.tensor([0.0, 1.0]))))), 1),
    "a stale read after the response": (history((0, 1, Put(1)), (2, 3, Put(2)), (4, 5, Read(1))), 2),
    "a read that goes back": (history((0, 9, Put(1)), (1, 2, Read(1)), (3, 4, Read(0))), 2),
    "a read of what was never written": (history((0, 5, Put(1)), (1, 2, Read(2))), 1),
    "a read before its write": (history((0, 1, Read(1)), (2, 3, Put(1))), 0),
    "a double effect": (history((0, 1, Accumulate(1)), (2, 3, Read(2))), 1),
    "a double effect of what is unknown": (
        history((0, NEVER, Accumulate(1)), (2, 3, Read(1)), (4, 5, Read(2)), (6, 7, Read(2))),
        2,
    ),
    "an unknown effect before its call": (history((0, 1, Read(1)), (2, NEVER, Accumulate(1))), 0),
    "collected twice": (history((0, 1, Accumulate(1)), (2, 5, Collect(1)), (3, 4, Collect(1))), 1),
    "collected and kept": (history((0, 1, Accumulate(1)), (2, 3, Collect(1)), (4, 5, Read(1))), 2),
    "what came during a collect is lost": (
        history((0, 1, Accumulate(1)), (2, 5, Accumulate(2)), (3, 4, Collect(1)), (6, 7, Read(0))),
        3,
    ),
    "a get of the old after its change": (
        history((0, 1, Register(4)), (2, 3, Fetch(0)), (2, 3, Store(0)), (4, 5, Read(0))),
        3,
    ),
    "a get without effect": (history((0, 1, Put(1)), (2, 3, Fetch(0)), (2, 3, Store(0)), (4, 5, Read(1))), 3),
    "an accumulate that nobody counted": (history((0, 1, Accumulate(1)), (2, 3, Look(0, 0, 0, 0.0))), 1),
    "a weight without its value": (history((0, 9, Put(1, 0.5)), (1, 2, Look(1, 0, 0, 0.5)), (3, 4, Read(0))), 2),
}


@pytest.mark.parametrize("name", FINE)
def test_the_checker_finds_an_order(name: str) -> None:
    order = find_order(FINE[name])
    slot: Slot | None = Slot()
    for record in order:
        assert slot is not None
        slot = record.effect.after(slot)
    assert slot is not None
    for earlier, later in itertools.combinations(order, 2):
        assert not later.returned < earlier.called


@pytest.mark.parametrize("name", WRONG)
def test_the_checker_names_the_operation_without_a_valid_position(name: str) -> None:
    records, culprit = WRONG[name]
    with pytest.raises(NotLinearizable, match="somebody") as caught:
        find_order(records)
    assert caught.value.record == records[culprit]


def any_order(records: list[Record]) -> bool:
    """By brute force: whether some choice of the unknown steps, in some order, keeps to the times and the model."""
    known = [record for record in records if record.returned != NEVER]
    unknown = [record for record in records if record.returned == NEVER]
    for count in range(len(unknown) + 1):
        for some in itertools.combinations(unknown, count):
            for order in itertools.permutations([*known, *some]):
                slot: Slot | None = Slot()
                for index, record in enumerate(order):
                    slot = None if slot is None else record.effect.after(slot)
                    if any(later.returned < record.called for later in order[index + 1 :]):
                        slot = None
                if slot is not None:
                    return True
    return False


effects = st.one_of(
    st.builds(Put, st.sampled_from([1, 2])),
    st.builds(Accumulate, st.sampled_from([1, 2])),
    st.builds(Register, st.sampled_from([1, 2])),
    st.builds(Read, st.sampled_from([0, 1, 2, 3])),
    st.builds(Collect, st.sampled_from([None, 0, 1, 2, 3])),
    st.builds(Look, st.sampled_from([0, 1]), st.just(0), st.sampled_from([0, 1]), st.just(0.0)),
    st.sampled_from([Fetch(0), Store(0)]),
)
steps = st.builds(
    lambda effect, called, length: Record(effect, "somebody", called, called + length),
    effects,
    st.integers(0, 8),
    st.sampled_from([1, 2, 4, NEVER]),
)


@given(st.lists(steps, max_size=5))
def test_the_checker_agrees_with_brute_force(records: list[Record]) -> None:
    try:
        find_order(records)
    except NotLinearizable:
        assert not any_order(records)
    else:
        assert any_order(records)


@given(st.lists(steps, max_size=6))
def test_the_named_operation_is_where_the_history_is_violated(records: list[Record]) -> None:
    def as_it_was(known: Callable[[Record], bool]) -> list[Record]:
        return [record if known(record) else replace(record, returned=NEVER) for record in records]

    try:
        find_order(records)
    except NotLinearizable as error:
        limit = error.record.returned
        find_order(as_it_was(lambda one: one.returned < limit))
        with pytest.raises(NotLinearizable):
            find_order(as_it_was(lambda one: one.returned <= limit))


# Histories of agents

MIXES = {
    "puts and accumulates": (*WRITES, *READS),
    "accumulates and collects": ("accumulate", "collect", "look"),
    "puts and gets": ("put", "get", "read", "look"),
    "everything": (*WRITES, "get", *READS),
}


@pytest.mark.parametrize(
    ("kinds", "require_mutex"),
    [
        *(pytest.param(kinds, False, id=name) for name, kinds in MIXES.items()),
        pytest.param(MIXES["everything"], True, id="everything-mutex"),
    ],
)
def test_slots_of_three_agents_are_linearizable(crowd: Fleets, kinds: tuple[str, ...], require_mutex: bool) -> None:
    program = Program(numel=16, operations=100, kinds=kinds, require_mutex=require_mutex)
    assert check_all(merged(crowd(3).run(record_history, program)), starts(3)) > 3 * program.operations


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
@pytest.mark.parametrize(("numel", "operations"), [(1, 100), (5_000, 60), (300_000, 12)])
def test_reads_see_complete_writes_of_any_size(crowd: Fleets, numel: int, operations: int, dtype: torch.dtype) -> None:
    program = Program(numel, operations, threads=2, kinds=MIXES["everything"], dtype=dtype, seed=numel)
    check_all(merged(crowd(2).run(record_history, program)), starts(2))


@pytest.mark.parametrize("in_place", [False, True], ids=["copied", "in place"])
@pytest.mark.parametrize(("numel", "operations"), [(10, 120), (300_000, 40)])
def test_gets_see_the_registered_tensor_as_updates_leave_it(
    crowd: Fleets, numel: int, operations: int, in_place: bool
) -> None:
    program = Program(numel, operations, kinds=("accumulate", "get", "update", "read"), in_place=in_place)
    check_all(merged(crowd(2).run(record_history, program)), starts(2))


def test_associated_weights_change_in_the_same_step_as_values(crowd: Fleets) -> None:
    check_all(merged(crowd(3).run(record_history, Program(numel=64, with_p=True))), starts(3))


@pytest.mark.slow  # as the slots of threads, with more kinds of memory
@pytest.mark.parametrize("environment", OVER)
def test_slots_of_processes_are_linearizable(environment: dict[str, str]) -> None:
    with World(3, environment=environment) as world:
        for seed, (numel, operations) in enumerate([(1, 120), (2_000, 60), (300_000, 10)]):
            for require_mutex in (False, True):
                program = Program(numel, operations, 2, MIXES["everything"], require_mutex, seed=seed)
                check_all(merged(world.results(record_history, program)), starts(3))
        check_all(merged(world.results(record_history, Program(numel=64, with_p=True))), starts(3))


# Operations that end in their deadline


@contextmanager
def locked_now_and_then(name: str, held: threading.Event) -> Iterator[None]:
    """A thread that locks this agent's slot for agent 1 for longer than a deadline, lets go, and again, until the end.

    ``held`` is set while it has the lock.
    """
    windows = current().engine.services.get(PREFIX)
    assert isinstance(windows, Windows)
    locks = windows.get("test", name).memory.locks
    stop = threading.Event()

    def hold() -> None:
        while not stop.is_set():
            locks.acquire(EDGES, time.monotonic() + 20.0)
            held.set()
            stop.wait(3 * SHORT)
            held.clear()
            locks.release(EDGES)
            stop.wait(SHORT)

    holder = threading.Thread(target=bind(hold))
    holder.start()
    try:
        yield
    finally:
        stop.set()
        holder.join()


def test_a_call_that_timed_out_takes_effect_at_most_once(fleet: Fleets) -> None:
    rounds = range(4)
    held, written = threading.Event(), [threading.Event() for _ in rounds]

    def write(name: str, recorder: Recorder) -> None:
        chance = random.Random(name)
        for k in range(12):
            tensor = torch.full((50,), 2.0**k)
            adds = chance.random() < 0.5
            call = shoal.bluefog.win_accumulate if adds else shoal.bluefog.win_put
            steps: list[tuple[Edge, Effect]] = [((1, 0), Accumulate(2.0**k) if adds else Put(2.0**k))]
            if k % 2:
                assert held.wait(20.0)
            recorder.run(partial(call, tensor, name, timeout=SHORT), partial(lambda steps, _: steps, steps))

    def read(name: str, recorder: Recorder) -> None:
        recorder.run(
            lambda: common_value(shoal.bluefog.win_update(name, 0.0, {1: 1.0}, clone=True)),
            lambda read_value: [] if read_value is None else [((1, 0), Read(read_value))],
        )

    def run() -> list[list[Record]]:
        shoal.set_topology(shoal.topology.RingGraph(2))
        results = []
        for number in rounds:
            name, recorder = f"x{number}", Recorder(f"rank {shoal.rank()}")
            shoal.bluefog.win_create(torch.zeros(50), name, zero_init=True)
            if shoal.rank() == 1:
                write(name, recorder)
                written[number].set()
                shoal.barrier()
            else:
                with locked_now_and_then(name, held):
                    while not written[number].wait(SHORT / 10):
                        read(name, recorder)
                shoal.barrier()
                read(name, recorder)
            shoal.barrier()
            shoal.bluefog.win_free(name)
            results.append(recorder.histories[1, 0])
        return results

    for ours, remote in zip(*fleet(2).run(run), strict=True):
        history = [*ours, *remote]
        assert any(one.returned == NEVER for one in history), "no write ran into its deadline"
        find_order(history)
