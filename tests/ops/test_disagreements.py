"""Agents that ask for different things all find out at once, and the error names both sides.

"At once" is a second or two on a busy machine, far below the deadline of 20 s that the fleets here have.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import networkx as nx
import pytest
import torch

import shoal
from shoal.runtime.agent import current
from support import PROCESS_GROUP
from support.leftovers import descriptors, wait_until
from support.limits import scaled

Fleets = Callable[..., shoal.Fleet]
SOON = 2.0
Call = Callable[[], Any]


def refused(call: Call) -> tuple[shoal.Mismatch, float]:
    """The Mismatch that the call raises, and after how many seconds."""
    started = time.monotonic()
    with pytest.raises(shoal.Mismatch) as caught:
        call()
    return caught.value, time.monotonic() - started


def mismatch_of(call: Call) -> tuple[shoal.Mismatch, float]:
    """The Mismatch that the call raises, or the first call after it: its own operation may end before the refusal."""
    started = time.monotonic()

    def call_until_refused() -> None:
        call()
        while time.monotonic() - started < 2 * SOON:
            shoal.neighbor_allreduce(
                torch.ones(1), 1.0, {}, {}, name="probe"
            )  # has no partners, so nothing else can fail it
            time.sleep(0.001)

    return refused(call_until_refused)


def assert_all_raise(fleet: Fleets, size: int, call: Call, ranks: tuple[int, ...], *texts: str) -> None:
    """Every agent's call ends in a Mismatch about ``ranks``, soon, and afterwards the fleet works as before."""

    def run() -> str:
        error, seconds = refused(call)
        assert seconds < scaled(SOON), error
        assert error.ranks == ranks, error
        agree_again()
        return str(error)

    for message in fleet(size).run(run):
        for text in texts:
            assert text in message, message


def call_by_rank(calls: tuple[Call, Call]) -> Any:
    """Agent 0 makes the first call and agent 1 the second."""
    return calls[shoal.rank()]()


def agree_again() -> None:
    """One refused operation spoils no other: the next ones work, several of them, since a refusal might come late."""
    for step in range(3):
        assert shoal.allreduce(torch.ones(3), name=f"after {step}").tolist() == [1.0] * 3
        assert shoal.neighbor_allreduce(torch.ones(2)).tolist() == [1.0] * 2
        time.sleep(0.01)


@pytest.mark.parametrize("numel", [3, 9000], ids=["inline", "region"])
@pytest.mark.parametrize("name", [None, "x"])
def test_shapes_that_differ(fleet: Fleets, numel: int, name: str | None) -> None:
    calls: list[Call] = [
        lambda: shoal.neighbor_allreduce(torch.ones(numel + shoal.rank()), name=name),
        lambda: shoal.neighbor_allreduce(torch.ones(*[(numel, 2), (2, numel)][shoal.rank()]), name=name),
        lambda: shoal.allreduce(torch.ones(numel + shoal.rank()), name=name),
        lambda: shoal.allreduce(torch.ones(*[(numel, 2), (2, numel)][shoal.rank()]), name=name),
        lambda: shoal.bluefog.hierarchical_neighbor_allreduce(torch.ones(numel + shoal.rank()), name=name),
        lambda: shoal.broadcast(torch.ones(numel + shoal.rank()), 0, name),
        lambda: shoal.pair_gossip(torch.ones(numel + shoal.rank()), 1 - shoal.rank(), name=name),
        lambda: shoal.neighbor_allreduce(torch.ones(numel + shoal.rank()), 1.0, {1 - shoal.rank(): 1.0}, name=name),
        lambda: shoal.neighbor_allreduce(torch.ones(numel + shoal.rank()), 1.0, None, [1 - shoal.rank()], name=name),
    ]
    for call in calls:
        assert_all_raise(fleet, 2, call, (0, 1), "shape")


@pytest.mark.parametrize("numel", [3, 9000], ids=["inline", "region"])
def test_dtypes_that_differ(fleet: Fleets, numel: int) -> None:
    def tensor_by_rank() -> torch.Tensor:
        return torch.ones(numel, dtype=[torch.float32, torch.float64][shoal.rank()])

    def bits() -> torch.Tensor:
        """Two dtypes of one size, which only the header tells apart."""
        return torch.ones(numel, dtype=[torch.float16, torch.bfloat16][shoal.rank()])

    operations: list[Callable[[torch.Tensor], torch.Tensor]] = [
        shoal.neighbor_allreduce,
        shoal.allreduce,
        shoal.allgather,
        shoal.neighbor_allgather,
        lambda x: shoal.broadcast(x, 1),
        lambda x: shoal.pair_gossip(x, 1 - shoal.rank()),
    ]

    def call(operation: Callable[[torch.Tensor], torch.Tensor], make: Call) -> torch.Tensor:
        return operation(make())

    for operation in operations:
        for make in (tensor_by_rank, bits):
            assert_all_raise(fleet, 2, partial(call, operation, make), (0, 1), "float")


def test_different_operations_under_one_name(fleet: Fleets) -> None:
    x = torch.ones(4)
    pairs: list[tuple[Call, Call]] = [
        (lambda: shoal.allreduce(x, name="n"), lambda: shoal.neighbor_allreduce(x, "n")),
        (lambda: shoal.allreduce(x, name="n"), lambda: shoal.allreduce(x, average=False, name="n")),
        (lambda: shoal.allreduce(x, name="n"), lambda: shoal.allgather(x, "n")),
        (lambda: shoal.allreduce(x, name="n"), lambda: shoal.allreduce(x, is_hierarchical_local=True, name="n")),
        (lambda: shoal.neighbor_allreduce(x, "n"), lambda: shoal.neighbor_allgather(x, "n")),
        (lambda: shoal.barrier("n"), lambda: shoal.allreduce(x, name="n")),
    ]
    for pair in pairs:
        assert_all_raise(fleet, 2, partial(call_by_rank, pair), (0, 1), "called")


def test_static_and_dynamic_calls_of_one_operation(fleet: Fleets) -> None:
    x = torch.ones(4)

    def other() -> int:
        return 1 - shoal.rank()

    static: Call = lambda: shoal.neighbor_allreduce(x, "n")  # noqa: E731
    forms: list[Call] = [
        lambda: shoal.neighbor_allreduce(x, 1.0, {other(): 1.0}, name="n"),
        lambda: shoal.neighbor_allreduce(x, 1.0, None, {other(): 1.0}, name="n"),
        lambda: shoal.neighbor_allreduce(x, 1.0, {other(): 1.0}, {other(): 1.0}, name="n"),
        lambda: shoal.neighbor_allreduce(x, 1.0, {other(): 1.0}, name="n", enable_topo_check=False),
        lambda: shoal.neighbor_allreduce(x, 1.0, None, {other(): 1.0}, name="n", enable_topo_check=False),
    ]
    for form in forms:
        assert_all_raise(fleet, 2, partial(call_by_rank, (static, form)), (0, 1))


@pytest.mark.parametrize("size", [2, 4])
def test_topologies_that_differ_in_an_edge_or_a_weight(fleet: Fleets, size: int) -> None:
    def run(change: Callable[[nx.DiGraph], None], is_weighted: bool) -> None:
        graph = nx.DiGraph(shoal.topology.FullyConnectedGraph(size))
        if shoal.rank() == 0:
            change(graph)
        shoal.set_topology(graph, is_weighted)
        for call in (shoal.neighbor_allreduce, shoal.neighbor_allgather):
            error, seconds = mismatch_of(partial(call, torch.ones(3)))
            assert seconds < scaled(SOON)
            assert 0 in error.ranks
        shoal.set_topology(shoal.topology.FullyConnectedGraph(size))
        agree_again()

    fleet(size).run(run, lambda graph: graph.remove_edge(1, 0), False)
    fleet(size).run(run, lambda graph: graph.edges[1, 0].update(weight=0.123), True)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_broadcast_roots_that_differ(fleet: Fleets, size: int) -> None:
    """At least one agent raises before the deadline, and all calls end."""

    def run(odd: int, kind: str) -> bool:
        root = 1 if shoal.rank() == odd else 0
        started = time.monotonic()
        try:
            if kind == "tensor":
                shoal.broadcast(torch.ones(3), root)
            else:
                shoal.broadcast_object(3, root)
            result = False
        except shoal.Mismatch:
            result = True
        assert time.monotonic() - started < scaled(SOON)
        try:
            shoal.barrier()
        except shoal.Mismatch:  # its own broadcast had ended when the refusal came; the barrier has not begun
            result = True
            shoal.barrier()
        return result

    for kind in ("tensor", "object"):
        for odd in range(size):
            results = fleet(size).run(run, odd, kind)
            assert any(results), (kind, odd)
            assert results[odd] or any(results[other] for other in (0, 1)), (kind, odd, results)


@pytest.mark.parametrize("form", ["allreduce", "allgather"])
@pytest.mark.parametrize("numel", [3, 9000], ids=["inline", "region"])
def test_a_source_that_does_not_send(fleet: Fleets, form: str, numel: int) -> None:
    """Agent 0 expects from agent 1, which takes part without sending to it."""

    def call() -> torch.Tensor:
        x = torch.ones(numel)
        sources = [1] if shoal.rank() == 0 else []
        if form == "allgather":
            return shoal.neighbor_allgather(x, "n", src_ranks=sources, dst_ranks=[])
        return shoal.neighbor_allreduce(x, 1.0, dict.fromkeys(sources, 1.0), {}, name="n")

    both = threading.Barrier(2)

    def run() -> tuple[str, tuple[int, ...]]:
        error, seconds = mismatch_of(call)
        both.wait(30)
        assert seconds < scaled(SOON)
        agree_again()
        return str(error), error.ranks

    for message, ranks in fleet(2).run(run):
        assert ranks == (0, 1)
        assert "'n' round 0" in message


@pytest.mark.parametrize("form", ["allreduce", "allgather"])
@pytest.mark.parametrize("numel", [3, 9000], ids=["inline", "region"])
def test_a_header_that_the_receiver_does_not_expect(fleet: Fleets, form: str, numel: int) -> None:
    """Agent 0 sends to agent 1, which takes part without expecting anything. With the check on, both raise at once."""

    def call() -> torch.Tensor:
        x = torch.ones(numel)
        destinations = [1] if shoal.rank() == 0 else []
        if form == "allgather":
            return shoal.neighbor_allgather(x, "n", src_ranks=[], dst_ranks=destinations)
        return shoal.neighbor_allreduce(x, 1.0, {}, destinations, name="n")

    both = threading.Barrier(2)

    def run() -> tuple[str, tuple[int, ...]]:
        error, seconds = mismatch_of(call)
        both.wait(30)
        assert seconds < scaled(SOON)
        agree_again()
        return str(error), error.ranks

    for message, ranks in fleet(2).run(run):
        assert ranks == (0, 1)
        assert "'n' round 0" in message


def test_an_agent_that_skips_the_call_of_a_round_is_detected(fleet: Fleets) -> None:
    """Rounds are counted by calls. An agent without a partner must still call, or its next message mismatches."""

    def run() -> None:
        rank = shoal.rank()
        if rank < 2:
            shoal.neighbor_allreduce(torch.ones(3), 0.5, {1 - rank: 0.5}, {1 - rank: 1.0}, name="x")
            shoal.barrier()
        else:
            shoal.barrier()
        if rank > 0:
            error, seconds = mismatch_of(
                lambda: shoal.neighbor_allreduce(torch.ones(3), 0.5, {3 - rank: 0.5}, {3 - rank: 1.0}, name="x")
            )
            assert seconds < scaled(SOON)
            assert error.ranks == (1, 2)
        shoal.barrier()

    fleet(3).run(run)


def test_an_agent_with_one_call_less_is_detected(fleet: Fleets) -> None:
    """At the latest when the others make the call that has no counterpart."""

    def run() -> bool:
        for step in range(6):
            if step == 3 and shoal.rank() == 1:
                continue
            try:
                shoal.neighbor_allreduce(torch.tensor(float(step)), "x", timeout=1.0)
            except (shoal.Mismatch, shoal.DeadlineExceeded, shoal.PeerLost) as error:
                return bool(error.ranks)
        return False

    assert fleet(3).run(run) == [True, False, True]


@pytest.mark.parametrize("name", [None, "a name"])
def test_an_absent_agent_is_named_at_the_deadline(fleet: Fleets, name: str | None) -> None:
    def run() -> None:
        if shoal.rank() == 2:
            assert done.wait(30)
            return
        calls: dict[str, Call] = {
            "neighbor_allreduce": lambda: shoal.neighbor_allreduce(torch.ones(3), name=name, timeout=0.2),
            "allreduce": lambda: shoal.allreduce(torch.ones(3), name=name and name + "2", timeout=0.2),
            "allgather": lambda: shoal.allgather(torch.ones(3), name and name + "3", timeout=0.2),
            "neighbor_allgather": lambda: shoal.neighbor_allgather(
                torch.ones(3), name and name + "4", src_ranks=[2], dst_ranks=[], timeout=0.2
            ),
            "broadcast": lambda: shoal.broadcast(torch.ones(3), 2, name and name + "5", timeout=0.2),
        }
        for op, call in calls.items():
            started = time.monotonic()
            with pytest.raises(shoal.DeadlineExceeded) as caught:
                call()
            waited[op].append(time.monotonic() - started)
            message = str(caught.value)
            assert 2 in caught.value.ranks, message
            assert f"{op} " in message
            assert "round 0" in message
            assert f"rank {shoal.rank()}" in message
            assert name is None or name in message
        both.wait()
        done.set()
        for op, seconds in waited.items():
            # Over a process group the deadline of the agent that began first ends the call of the other, too.
            assert max(seconds) > 0.15 and max(seconds) < scaled(SOON), (op, seconds)

    done, both, waited = threading.Event(), threading.Barrier(2), defaultdict[str, list[float]](list)

    def start() -> None:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(3))
        run()

    fleet(3).run(start)


def test_after_a_deadline_the_late_messages_are_dropped_and_the_next_round_works(fleet: Fleets, transport: str) -> None:
    late = threading.Event()

    def run() -> list[float]:
        x = torch.full((9000,), float(shoal.rank()))
        if shoal.rank() == 0:
            with pytest.raises(shoal.DeadlineExceeded):
                shoal.neighbor_allreduce(x, "x", timeout=0.1)
            late.set()
        elif transport == PROCESS_GROUP:  # what one gives up, all give up
            assert late.wait(30)
            with pytest.raises((shoal.DeadlineExceeded, shoal.Mismatch), match=r"rank 0, whose own call failed there"):
                shoal.neighbor_allreduce(x, "x")
        else:
            assert late.wait(30)
            shoal.neighbor_allreduce(x, "x")  # what agent 0 sent is there; what goes back is dropped there
        return [shoal.neighbor_allreduce(x + step, "x")[0].item() for step in range(5)]

    assert fleet(2).run(run) == [[0.5 + step for step in range(5)]] * 2


def test_a_fleets_timeout_is_the_deadline_of_every_call(fleet: Fleets) -> None:
    def run() -> None:
        if shoal.rank() == 0:
            started = time.monotonic()
            with pytest.raises(shoal.DeadlineExceeded, match=r"waited 0\.3 s for ranks \[1\]"):
                shoal.neighbor_allreduce(torch.ones(2))
            assert 0.25 < time.monotonic() - started < scaled(SOON)
            done.set()
        assert done.wait(30)

    done = threading.Event()
    fleet(2, timeout=0.3).run(run)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_an_invalid_timeout_is_refused(fleet: Fleets, timeout: float) -> None:
    def run() -> None:
        with pytest.raises(ValueError, match="timeout"):
            shoal.neighbor_allreduce(torch.ones(1), timeout=timeout)

    fleet(1).run(run)


def test_a_name_in_flight_twice_is_refused_locally(fleet: Fleets) -> None:
    go = threading.Event()

    def run() -> float:
        if shoal.rank() == 1:
            assert go.wait(30)
            return shoal.neighbor_allreduce(torch.tensor(1.0), "x").item()
        handle = shoal.nonblocking.neighbor_allreduce(torch.tensor(0.0), "x")
        calls: list[Call] = [
            lambda: shoal.nonblocking.neighbor_allreduce(torch.tensor(0.0), "x"),
            lambda: shoal.neighbor_allreduce(torch.tensor(0.0), 0.5, {1: 0.5}, {1: 1.0}, name="x"),
        ]
        for call in calls:  # of another kind it may be, as tests/ops/test_handles.py has it
            with pytest.raises(ValueError, match=r"'x' is still in flight"):
                call()
        go.set()
        return handle.wait().item()

    assert fleet(2).run(run) == [0.5, 0.5]


NEEDED = (
    r"rank 2 has left \(it called shoal.shutdown\(\), or its script ended\), and is still needed. .*join.*; the agents"
)


def test_an_agent_that_has_left_is_named_by_agents_that_need_it(fleet: Fleets) -> None:
    together = threading.Barrier(2)

    def run() -> None:
        shoal.barrier()
        if shoal.rank() == 2:
            shoal.shutdown()
            return
        assert wait_until(lambda: 2 in shoal.observability.membership().left)
        assert shoal.pair_gossip(torch.tensor(float(shoal.rank())), other()).item() == 0.5  # the survivor continues
        together.wait(30)
        started = time.monotonic()
        # Detected here, or reported by the other agent, which detected it first: with the same text.
        with pytest.raises(shoal.PeerLost, match=NEEDED) as caught:
            shoal.allreduce(torch.ones(3))
        assert time.monotonic() - started < scaled(SOON)
        assert caught.value.ranks == (2,)
        view = shoal.observability.membership()
        assert view.epoch > 0
        assert 2 not in view.alive

    def other() -> int:
        return 1 - shoal.rank()

    fleet(3).run(run)


def test_the_departure_of_an_agent_ends_the_calls_that_wait_for_it(fleet: Fleets) -> None:
    def run() -> None:
        if shoal.rank() == 0:
            assert waiting.wait(30)
            shoal.shutdown()
            return
        handle = shoal.nonblocking.allreduce(torch.ones(9000))
        waiting.set()
        started = time.monotonic()
        with pytest.raises(shoal.PeerLost, match=NEEDED.replace("2", "0")):
            handle.wait()
        assert time.monotonic() - started < scaled(SOON)

    waiting = threading.Event()
    fleet(2).run(run)


@pytest.mark.links("who sends may go on, and leave, before who reads has come")
def test_messages_sent_before_a_shutdown_still_arrive(fleet: Fleets) -> None:
    left = threading.Event()
    names = [f"early {i}" for i in range(5)]

    def run() -> list[float]:
        shoal.set_topology(nx.DiGraph([(0, 1)]))
        for name in names:
            shoal.neighbor_allreduce(torch.ones(3), name)
        shoal.barrier()
        x = torch.full((3,), float(shoal.rank() + 1))
        if shoal.rank() == 0:
            for name in names:
                shoal.neighbor_allreduce(x, name)
            shoal.shutdown()
            left.set()
            return []
        assert left.wait(30)
        return [shoal.neighbor_allreduce(x, name)[0].item() for name in names]

    assert fleet(2).run(run) == [[], [1.5] * 5]


def test_every_call_before_init_or_after_shutdown_raises(fleet: Fleets) -> None:
    x = torch.ones(2)
    calls: list[Call] = [
        lambda: shoal.neighbor_allreduce(x),
        lambda: shoal.neighbor_allgather(x),
        lambda: shoal.bluefog.hierarchical_neighbor_allreduce(x),
        lambda: shoal.pair_gossip(x, 0),
        lambda: shoal.allreduce(x),
        lambda: shoal.bluefog.allreduce_(x),
        lambda: shoal.broadcast(x, 0),
        lambda: shoal.bluefog.broadcast_(x, 0),
        lambda: shoal.allgather(x),
        lambda: shoal.barrier(),
        lambda: shoal.broadcast_object(3),
        lambda: shoal.broadcast_parameters({"x": x}),
        lambda: shoal.bluefog.allreduce_parameters({"x": x}),
        lambda: shoal.bluefog.broadcast_optimizer_state(torch.optim.SGD([torch.nn.Parameter(x)], lr=0.1)),
        lambda: shoal.bluefog.InferSourceFromDestinationRanks([]),
        lambda: shoal.bluefog.InferDestinationFromSourceRanks([]),
        shoal.rank,
        shoal.size,
        shoal.local_rank,
        shoal.local_size,
        shoal.bluefog.machine_rank,
        shoal.bluefog.machine_size,
        shoal.bluefog.is_homogeneous,
        shoal.load_topology,
        shoal.bluefog.load_machine_topology,
        shoal.in_neighbor_ranks,
        shoal.out_neighbor_ranks,
        shoal.bluefog.in_neighbor_machine_ranks,
        shoal.bluefog.out_neighbor_machine_ranks,
        shoal.observability.membership,
        shoal.observability.events,
        shoal.observability.bytes_sent,
        lambda: shoal.windows.empty(3),
    ]

    def all_refused() -> None:
        assert not shoal.is_initialized()
        for call in calls:
            with pytest.raises(shoal.NotInitialized, match=r"shoal\.init\(\)"):
                call()
            with pytest.raises(ValueError, match="agent"):  # what scripts written for BlueFog catch
                call()

    def run() -> None:
        shoal.barrier()
        shoal.shutdown()
        all_refused()

    all_refused()
    fleet(2).run(run)
    all_refused()


@pytest.mark.links("what a process group moves, both have, or nobody")
def test_a_handle_raises_after_shutdown_and_its_message_arrives(fleet: Fleets) -> None:
    def run() -> float:
        if shoal.rank() == 1:
            # A message before that would still complete the operation of rank 0.
            assert wait_until(lambda: bool(engines) and engines[0].lifecycle.gate.closing)
            return shoal.neighbor_allreduce(torch.tensor(1.0)).item()
        handle = shoal.nonblocking.neighbor_allreduce(torch.tensor(0.0))
        engines.append(current().engine)
        shoal.shutdown()
        with pytest.raises(shoal.NotInitialized, match="shut down while the operation was in flight"):
            handle.wait()
        return -1.0

    engines: list[Any] = []
    assert fleet(2).run(run) == [-1.0, 0.5]


def test_the_handle_of_a_failed_operation_keeps_no_memory_file_open() -> None:
    """The caller may keep the handle, and so the engine, long after the agent's shutdown."""

    def run() -> shoal.Handle[torch.Tensor] | None:
        if shoal.rank() == 0:
            assert waiting.wait(30)
            return None
        handle = shoal.nonblocking.allreduce(torch.ones(9000))
        waiting.set()
        with pytest.raises(shoal.PeerLost):
            handle.wait()
        return handle

    waiting = threading.Event()
    before = set(descriptors().items())
    held = shoal.Fleet(2, timeout=20.0).run(run)
    gc.collect()
    left = set(descriptors().items()) - before
    assert held[1] is not None
    assert not left


def test_a_refusal_of_the_last_call_is_logged_at_the_shutdown(fleet: Fleets, caplog: pytest.LogCaptureFixture) -> None:
    """Rank 0 needs nothing of rank 1, so its call has ended when rank 1 refuses it; not so over a backend."""

    def run() -> bool:
        shoal.set_topology(nx.DiGraph([(0, 1)]))
        if shoal.rank() == 1:
            refused(lambda: shoal.neighbor_allreduce(torch.ones(3), name="x"))
            return True
        try:
            shoal.neighbor_allreduce(torch.ones(2), name="x")
        except shoal.Mismatch:
            return True
        return False

    if fleet(2).run(run)[0]:
        assert not [record for record in caplog.records if "earlier call" in record.getMessage()]
        return
    [logged] = [record.getMessage() for record in caplog.records if "earlier call" in record.getMessage()]
    assert logged.startswith("rank 0 shuts down with an error of an earlier call: neighbor_allreduce 'x' round 0")
    assert "shape" in logged
