"""How long a call waits: as long as it says, from when it was made; and what no number of seconds is, is refused."""

from __future__ import annotations

import inspect
import math
import threading
import time
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal.runtime.agent import bind, current
from shoal.windows.registry import windows_of
from shoal.windows.window_memory import OWN
from support.leftovers import wait_until
from support.limits import scaled

Fleets = Callable[..., shoal.Fleet]
Calls = dict[str, Callable[..., object]]
NONSENSE: list[tuple[object, type[Exception]]] = [
    (0, ValueError),
    (-1.0, ValueError),
    (math.nan, ValueError),
    (-math.inf, ValueError),
    (-(10**400), ValueError),
    (np.float32("nan"), ValueError),
    (True, TypeError),
    ("5", TypeError),
    ([5], TypeError),
    (1j, TypeError),
]
LONG: list[object] = [math.inf, 1e300, 10**400, 1e10, np.float32(5), np.int64(5), Fraction(9, 2), Decimal("5.5")]
LONG += [torch.tensor(5.0), None]
HANDLES = ("wait", "synchronize", "win_wait", "Handle.wait")


def calls_with_a_timeout(folder: Path) -> Calls:
    """Every public function that takes one, with the rest of its arguments; all agents make the calls together."""
    x, other = torch.ones(2), 1 - shoal.rank()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def finished() -> shoal.Handle[Any]:
        handle = shoal.nonblocking.allreduce(x)
        handle.wait()
        return handle

    def create(**timeout: Any) -> None:
        shoal.bluefog.win_create(x, "made", **timeout)
        shoal.barrier()
        shoal.bluefog.win_free("made")

    def mutex(**timeout: Any) -> None:
        with shoal.bluefog.win_mutex("x", for_self=True, **timeout):
            pass

    def consensus(**timeout: Any) -> None:
        with shoal.consensus(model, **timeout):
            pass

    calls: Calls = {
        "AgentSampler.__init__": lambda **t: shoal.data.AgentSampler(range(4), **t),
        "Checkpoint.save": lambda **t: shoal.Checkpoint(model=model, optimizer=optimizer).save(folder, 1, **t),
        "Checkpoint.load": lambda **t: shoal.Checkpoint(model=model, optimizer=optimizer).load(
            folder, missing_ok=True, **t
        ),
        "Fleet.__init__": lambda **t: shoal.Fleet(2, **t),
        "allreduce_parameters": lambda **t: shoal.bluefog.allreduce_parameters({"x": x}, **t),
        "barrier": shoal.barrier,
        "broadcast_object": lambda **t: shoal.broadcast_object(1, **t),
        "broadcast_optimizer_state": lambda **t: shoal.bluefog.broadcast_optimizer_state(optimizer, **t),
        "broadcast_parameters": lambda **t: shoal.broadcast_parameters({"x": x}, **t),
        "consensus": consensus,
        "consensus_distance": lambda **t: shoal.consensus_distance(model, **t),
        "metrics": lambda **t: shoal.metrics({"loss": 1.0}, **t),
        "neighbor_alltoall": lambda **t: shoal.neighbor_alltoall(torch.ones(1, 2), [other], **t),
        "save": lambda **t: shoal.save(model, folder / f"model of {shoal.rank()}.pt", **t),
        "win_create": create,
        "win_mutex": mutex,
        "win_update": lambda **t: shoal.bluefog.win_update("x", **t),
        "win_update_then_collect": lambda **t: shoal.bluefog.win_update_then_collect("x", **t),
        **{name: lambda **t: finished().wait(**t) for name in HANDLES},
    }
    for name in ("allreduce", "broadcast", "allgather", "neighbor_allgather", "neighbor_allreduce", "pair_gossip"):
        arguments = {"broadcast": [x, 0], "pair_gossip": [x, other]}.get(name, [x])
        _with_variants(calls, name, *arguments)
    for name in ("grouped_allreduce", "grouped_neighbor_allreduce", "grouped_allgather"):
        _with_variants(calls, name, [x])
    _with_variants(calls, "grouped_broadcast", [x], 0)
    for name in ("win_put", "win_accumulate", "win_get"):
        _with_variants(calls, name, x, "x")
        _with_variants(calls, f"neighbor_{name}", x, "x")
    return calls


def _with_variants(calls: Calls, name: str, *arguments: object) -> None:
    for one in (name, f"{name}_", f"{name}_nonblocking", f"{name}_nonblocking_"):
        function = getattr(shoal.bluefog, one, getattr(shoal, one, None))
        if function is None and one.startswith("grouped_"):
            function = getattr(shoal.nonblocking, one.removesuffix("_nonblocking"), None)
        if function is not None:
            calls[one] = lambda function=function, **t: (  # type: ignore[misc]
                result.wait() if isinstance(result := function(*arguments, **t), shoal.Handle) else result
            )


def public_functions_with_a_timeout() -> set[str]:
    result = set()
    named = {name: getattr(place, name) for place in (shoal.bluefog, shoal) for name in dir(place) if name[0] != "_"}
    named |= {f"{name}_nonblocking": getattr(shoal.nonblocking, name) for name in shoal.nonblocking.__all__}
    named["AgentSampler"] = shoal.data.AgentSampler
    for name, one in named.items():
        methods = inspect.getmembers(one, inspect.isfunction) if inspect.isclass(one) else []
        functions = {f"{name}.{method}": function for method, function in methods} or {name: one}
        for called, function in functions.items():
            public = "._" not in called or called.endswith(".__init__")
            if public and inspect.isfunction(function) and "timeout" in inspect.signature(function).parameters:
                result.add(called)
    return result


def test_every_function_accepts_any_number_of_seconds_and_refuses_others_with_a_message(
    fleet: Fleets, tmp_path: Path
) -> None:
    def run() -> None:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(2))
        shoal.bluefog.win_create(torch.ones(2), "x")
        calls = calls_with_a_timeout(tmp_path)
        hierarchical = {"hierarchical_neighbor_allreduce", "hierarchical_neighbor_allreduce_nonblocking"}
        assert set(calls) == public_functions_with_a_timeout() - hierarchical  # those two begin as the others do
        for name, call in calls.items():
            for timeout, error in NONSENSE:
                if timeout == 0 and name in HANDLES:
                    continue  # to look, without waiting
                with pytest.raises(error, match="timeout="):
                    call(timeout=timeout)
            for timeout in LONG:
                call(timeout=timeout)
        shoal.barrier()

    fleet(2).run(run)


def test_polling_a_handle_does_not_block(fleet: Fleets) -> None:
    def run() -> None:
        if shoal.rank() == 0:
            handle = shoal.nonblocking.allreduce(torch.ones(2))
            with pytest.raises(shoal.DeadlineExceeded):
                handle.wait(0)
            shoal.barrier("now")
        else:
            shoal.barrier("now")
            handle = shoal.nonblocking.allreduce(torch.ones(2))
        handle.wait(math.inf)

    fleet(2).run(run)


def test_an_infinite_wait_for_a_mutex_ends_when_it_is_released(fleet: Fleets) -> None:
    """Also if a second thread of the agent waits behind the first."""
    let_go = threading.Event()

    def take() -> None:
        with shoal.bluefog.win_mutex("x", ranks=[0], timeout=math.inf):
            pass

    def run() -> None:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(2))
        shoal.bluefog.win_create(torch.zeros(2), "x")
        if shoal.rank() == 0:
            with shoal.bluefog.win_mutex("x", for_self=True):
                shoal.barrier()
                let_go.wait(30)
        else:
            shoal.barrier()
            threads = [threading.Thread(target=bind(take)) for _ in range(2)]
            for thread in threads:
                thread.start()
            time.sleep(0.1)
            assert all(thread.is_alive() for thread in threads)
            let_go.set()
            for thread in threads:
                thread.join(30)
            assert not any(thread.is_alive() for thread in threads)
        shoal.barrier()

    fleet(2).run(run)


def test_the_deadline_of_a_nonblocking_call_counts_from_the_call(fleet: Fleets) -> None:
    """It does not count from the start of the transfer, which may never come. A late transfer has no effect."""
    over = threading.Event()

    def run() -> int:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(2))
        shoal.bluefog.win_create(torch.zeros(2), "x")
        if shoal.rank() == 1:
            with shoal.bluefog.win_mutex("x", for_self=True):
                shoal.barrier()
                over.wait(30)
            shoal.barrier()
            return shoal.bluefog.win_slots("x")[0].puts
        shoal.barrier()
        x = torch.ones(2)
        first = shoal.bluefog.win_put_nonblocking(x, "x", require_mutex=True, timeout=15)
        began = time.monotonic()
        second = shoal.bluefog.win_put_nonblocking(x, "x", timeout=0.3)
        third = shoal.bluefog.win_put_nonblocking(x, "x", timeout=math.inf)
        with pytest.raises(shoal.DeadlineExceeded, match=r"win_put 'x'.* waits for ranks \[1\]") as looked:
            second.wait(0.05)
        assert looked.value.ranks == (1,)
        with pytest.raises(
            shoal.DeadlineExceeded, match=r"win_put 'x' on rank 0 waited 0\.[23]\d* s for its turn"
        ) as caught:
            second.wait()
        assert 0.2 < time.monotonic() - began < scaled(5)
        assert caught.value.ranks == (1,)
        assert not first.poll() and not third.poll()
        over.set()
        assert first.wait() and third.wait()
        shoal.barrier()
        return 0

    assert fleet(2).run(run)[1] == 2


def test_a_deadline_without_a_waiting_thread_ends_the_call_too(fleet: Fleets) -> None:
    over = threading.Event()

    def run() -> None:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(2))
        shoal.bluefog.win_create(torch.zeros(2), "x")
        if shoal.rank() == 1:
            with shoal.bluefog.win_mutex("x", for_self=True):
                shoal.barrier()
                over.wait(30)
        else:
            shoal.barrier()
            waiting = threading.Event()
            first = shoal.bluefog.win_put_nonblocking(torch.ones(2), "x", require_mutex=True, timeout=15)
            second = shoal.bluefog.win_get_nonblocking("x", timeout=0.2)
            second.add_done_callback(lambda _: waiting.set())
            assert waiting.wait(30) and second.poll() and not first.poll()
            over.set()
            first.wait()
        shoal.barrier()

    fleet(2).run(run)


@pytest.mark.parametrize("second", ["win_update", "win_put"])
def test_a_second_thread_waits_for_the_first_until_its_own_deadline(fleet: Fleets, second: str) -> None:
    def run() -> None:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(2))
        x = torch.zeros(2)
        shoal.bluefog.win_create(x, "x")
        shoal.barrier()
        if shoal.rank() == 0:
            window = windows_of(current()).get("test", "x")
            ended: list[object] = []
            thread = threading.Thread(target=bind(lambda: ended.append(shoal.bluefog.win_update("x", timeout=15))))
            with window.memory.hold([OWN], 1, math.inf):  # as a neighbour does that reads the tensor
                thread.start()
                assert wait_until(lambda: not window._turn.acquire(blocking=False) or window._turn.release())
                began = time.monotonic()
                with pytest.raises(shoal.DeadlineExceeded, match="another thread of rank 0") as caught:
                    if second == "win_update":
                        shoal.bluefog.win_update("x", timeout=0.2)
                    else:
                        shoal.bluefog.win_put(x, "x", timeout=0.2)
                assert time.monotonic() - began < scaled(5)
                assert caught.value.ranks == (0,)
            thread.join(30)
            assert ended
        shoal.barrier()

    fleet(2).run(run)
