"""A window as an object: what its methods leave where, over every transport, and BlueFog's functions beside them."""

from __future__ import annotations

import errno
import gc
import inspect
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.kernels.sums import add_scaled
from shoal.runtime.agent import bind, current
from shoal.windows import SlotState, Window, by_name, registry
from shoal.windows.locks import ByteLocks
from shoal.windows.window_memory import OWN
from support.leftovers import wait_until

Fleets = Callable[..., shoal.Fleet]


def ring_of_two() -> int:
    """The other agent."""
    shoal.set_topology(shoal.topology.RingGraph(2))
    return 1 - shoal.rank()


def test_put_and_get_of_a_scalar_between_three_agents(fleet: Fleets) -> None:
    """The BlueFog paper's figure 4."""

    def run() -> tuple[float, float]:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(3))
        window = shoal.windows.create(torch.tensor(float(shoal.rank())), "x", zero_init=True)
        ones = dict.fromkeys(window.sources, 1.0)
        if shoal.rank() == 0:
            window.put(torch.tensor(10.0))
        shoal.barrier()
        put = window.update(0.0, ones, clone=True).item()
        shoal.barrier()
        if shoal.rank() == 0:
            window.get()
        got = window.update(0.0, ones, clone=True).item()
        shoal.barrier()
        return put, got

    assert fleet(3).run(run) == [(0.0, 3.0), (10.0, 10.0), (10.0, 10.0)]


def test_put_accumulate_and_collect_use_the_registered_tensor_by_default(fleet: Fleets) -> None:
    def run() -> list[float]:
        other = ring_of_two()
        x = torch.full((5,), shoal.rank() + 1.0)
        window = shoal.windows.create(x, "x", zero_init=True)
        window.put()
        window.accumulate(dst_weights={other: 3})
        shoal.barrier()
        assert window.collect() is x is window.tensor
        results = [x[0].item()]
        shoal.barrier()
        window.accumulate(self_weight=0.5)  # now the registered tensor keeps half
        results.append(x[-1].item())
        shoal.barrier()
        return [*results, window.collect()[0].item()]

    # 1 + 4 * 2, and 2 + 4 * 1; then half of it, and the other's whole.
    assert fleet(2).run(run) == [[9.0, 4.5, 10.5], [6.0, 3.0, 12.0]]


def test_nonblocking_calls_take_effect_in_call_order(fleet: Fleets) -> None:
    def run() -> tuple[float, float]:
        other = ring_of_two()
        window = shoal.windows.create(torch.zeros(4), "x")
        tensors = [torch.full((4,), float(number)) for number in range(20)]
        handles = [window.put_nonblocking(tensor) for tensor in tensors]
        handles.append(window.accumulate_nonblocking(tensors[1], dst_weights=[other]))
        assert all(handle.wait() for handle in handles)
        shoal.barrier()
        put = window.update(0.0, {other: 1.0}, clone=True)[0].item()
        window.tensor.fill_(7.0)
        window.put(dst_weights={})  # nobody's slot; a get sees what is in the tensor now
        shoal.barrier()
        window.get_nonblocking({other: 2}).wait()
        shoal.barrier()  # the other has got it, too, and may go
        return put, window.update(0.0, {other: 1.0}, clone=True)[0].item()

    assert fleet(2).run(run) == [(20.0, 14.0)] * 2


def test_an_update_uses_the_topologys_weights_and_empties_the_slots_it_has_read(fleet: Fleets) -> None:
    def run() -> list[float]:
        ring_of_two()
        window = shoal.windows.create(torch.tensor([float(shoal.rank())]), "x", zero_init=True)
        window.put()
        shoal.barrier()
        return [window.update(clone=True).item(), window.update(reset=True).item(), window.update(clone=True).item()]

    assert fleet(2).run(run) == [[0.5, 0.5, 0.25]] * 2


def test_the_associated_weight_is_sent_with_the_tensor(fleet: Fleets) -> None:
    def run() -> tuple[float, float]:
        shoal.set_topology(shoal.topology.RingGraph(3, connect_style=2))
        shoal.windows.turn_on_associated_p()
        x = torch.tensor([float(shoal.rank())], dtype=torch.float64)
        window = shoal.windows.create(x, "x", zero_init=True)
        for _ in range(50):
            window.accumulate(self_weight=0.5, dst_weights=dict.fromkeys(window.destinations, 0.5))
            window.collect()
        shoal.barrier()
        window.collect()
        shoal.windows.turn_off_associated_p()
        p = window.p
        window.accumulate(self_weight=0.5, dst_weights={})
        assert window.p == p
        shoal.barrier()
        return 2 * x.item(), window.p

    results = fleet(3).run(run)
    assert sum(x for x, _ in results) == pytest.approx(3.0, abs=1e-12)
    assert sum(p for _, p in results) == pytest.approx(3.0, abs=1e-12)


def test_a_window_lists_its_neighbours_and_their_versions(fleet: Fleets) -> None:
    def run() -> None:
        shoal.set_topology(shoal.topology.RingGraph(3, connect_style=2))
        rank = shoal.rank()
        x, began = torch.zeros(2), time.monotonic()
        window = shoal.windows.create(x, "x")
        before, after = (rank - 1) % 3, (rank + 1) % 3
        assert 0 <= window.slots()[before].age <= time.monotonic() - began
        shoal.barrier()
        assert (window.name, window.sources, window.destinations) == ("x", (before,), (after,))
        assert window.tensor is x
        assert repr(window) == f"<Window 'x' of rank {rank}: float32 [2], from [{before}] to [{after}]>"
        window.put()
        window.put()
        window.accumulate()
        shoal.barrier()
        slot = window.slots()[before]
        assert isinstance(slot, SlotState)
        assert (slot.puts, slot.accumulates, slot.gets) == (2, 1, 0)
        assert 0 <= slot.age < 20
        assert window.version() == {before: 2}
        window.update(reset=True)
        assert window.version() == {before: 0}
        shoal.barrier()

    fleet(3).run(run)


def test_the_mutex_excludes_all_others_and_is_reentrant(fleet: Fleets) -> None:
    inside: list[int] = []

    def run() -> bool:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(3))
        window, rank = shoal.windows.create(torch.zeros(1), "x"), shoal.rank()
        alone = True
        for _ in range(20):
            with window.mutex([0], for_self=rank == 0), window.mutex([0], for_self=rank == 0):
                inside.append(rank)
                window.put(dst_weights=[value for value in (0,) if value != rank])  # gives others their chance
                alone = alone and inside == [rank]
                inside.remove(rank)
        shoal.barrier()
        return alone

    assert fleet(3).run(run) == [True] * 3


def test_a_held_mutex_raises_at_the_deadline_and_its_holder_is_named(fleet: Fleets) -> None:
    def run() -> None:
        ring_of_two()
        window = shoal.windows.create(torch.zeros(2), "x")
        if shoal.rank() == 0:
            with window.mutex(for_self=True):
                shoal.barrier()
                shoal.barrier()
        else:
            shoal.barrier()
            with (
                pytest.raises(shoal.DeadlineExceeded, match="'x'") as caught,
                window.mutex([0], timeout=0.1),
            ):
                raise AssertionError("two agents have it")
            assert caught.value.ranks == (0,)
            with pytest.raises(shoal.DeadlineExceeded):
                window.put(require_mutex=True, timeout=0.1)
            shoal.barrier()
        shoal.barrier()
        window.put(require_mutex=True)
        shoal.barrier()

    fleet(2).run(run)


def test_an_update_acquires_its_own_mutex_on_request(fleet: Fleets) -> None:
    def run() -> None:
        ring_of_two()
        window = shoal.windows.create(torch.zeros(2), "x")
        if shoal.rank() == 1:
            with window.mutex([0]):
                shoal.barrier()
                shoal.barrier()
        else:
            shoal.barrier()
            for call in (window.update, window.collect):
                with pytest.raises(shoal.DeadlineExceeded, match="'x'"):
                    call(require_mutex=True, timeout=0.05)
                call()  # without it nobody has to be waited for
            shoal.barrier()
        shoal.barrier()
        window.update(require_mutex=True)
        shoal.barrier()

    fleet(2).run(run)


def test_invalid_calls_raise_and_send_nothing(fleet: Fleets) -> None:
    def run() -> None:
        shoal.set_topology(shoal.topology.RingGraph(4, connect_style=2))
        before, after = (shoal.rank() - 1) % 4, (shoal.rank() + 1) % 4
        window = shoal.windows.create(torch.zeros(2), "x")
        full = shoal.windows.create(torch.zeros(2, dtype=torch.int64), "whole")
        for error, what, call in (
            (ValueError, "has a window 'x' already", lambda: shoal.windows.create(torch.zeros(2), "x")),
            (ValueError, "name", lambda: shoal.windows.create(torch.zeros(2), None)),  # type: ignore[arg-type]
            (ValueError, "name", lambda: shoal.windows.create(torch.zeros(2), "~x")),
            (TypeError, "bool", lambda: shoal.windows.create(torch.zeros(2, dtype=torch.bool), "y")),
            (KeyError, "no window 'y'.*'whole', 'x'", lambda: shoal.windows.named("y")),
            (TypeError, "torch.Tensor", lambda: window.put([0.0, 0.0])),  # type: ignore[arg-type]
            (ValueError, "shape", lambda: window.put(torch.zeros(3))),
            (ValueError, "float64", lambda: window.accumulate(torch.zeros(2, dtype=torch.float64))),
            (ValueError, "out-neighbours", lambda: window.put(dst_weights=[before])),
            (ValueError, "in-neighbours", lambda: window.get([after])),
            (ValueError, "in-neighbours", lambda: window.update(0.5, {after: 0.5})),
            (ValueError, "both", lambda: window.update(0.5)),
            (ValueError, "both", lambda: window.update(src_weights={before: 0.5})),
            (ValueError, "neighbours", lambda: window.mutex([(shoal.rank() + 2) % 4]).__enter__()),
            (ValueError, "finite|nan", lambda: window.put(self_weight=float("nan"))),
            (ValueError, "timeout", lambda: window.put(timeout=-1.0)),
            (TypeError, "whole numbers", lambda: full.update()),
            (TypeError, "whole numbers", lambda: full.put(dst_weights={after: 0.5})),
        ):
            with pytest.raises(error, match=what):
                call()
        shoal.barrier()
        assert set(window.version().values()) == {0}
        assert shoal.windows.names() == ["whole", "x"]

    fleet(4).run(run)


@pytest.mark.parametrize(
    ("dtype", "beyond"),
    [
        (torch.float32, 1e39),
        (torch.bfloat16, -1e39),
        (torch.int32, 1 << 40),
        (torch.uint8, 300),
        (torch.int64, 1 << 63),
    ],
)
def test_a_weight_beyond_the_range_of_the_dtype_changes_nothing(
    fleet: Fleets, dtype: torch.dtype, beyond: float
) -> None:
    """torch refuses it within the sum, after the tensor has been multiplied by its own weight, or the product wraps."""

    def run() -> None:
        other = ring_of_two()
        shoal.windows.turn_on_associated_p()
        window = shoal.windows.create(torch.full((3,), 2, dtype=dtype), "x")
        for argument, call in (
            (f"src_weights\\[{other}\\]", lambda: window.update(2, {other: beyond})),
            ("self_weight", lambda: window.update(beyond, {other: 1})),
            (f"dst_weights\\[{other}\\]", lambda: window.put(dst_weights={other: beyond})),
            (f"dst_weights\\[{other}\\]", lambda: window.accumulate(dst_weights={other: beyond})),
            ("self_weight", lambda: window.accumulate(self_weight=beyond)),
            (f"src_weights\\[{other}\\]", lambda: window.get({other: beyond})),
        ):
            with pytest.raises(ValueError, match=rf"'x': {argument}=.* holds {dtype}; give a weight from"):
                call()
        shoal.barrier()
        assert window.p == 1.0 and window.tensor.tolist() == [2, 2, 2]
        assert window.version() == {other: 0} and window.slots()[other].accumulates == 0
        assert window.update(0, {other: 1}).tolist() == [2, 2, 2]

    fleet(2).run(run)


def test_of_two_threads_that_make_a_window_one_does(fleet: Fleets) -> None:
    """Both pass the check of the name; the second would wait for a window that no neighbour makes."""

    def run() -> tuple[list[bool], float]:
        other, made = ring_of_two(), list[bool]()
        for _ in range(20):
            x = torch.full((2,), shoal.rank() + 1.0)
            together = threading.Barrier(2)

            def make(x: torch.Tensor = x, together: threading.Barrier = together) -> None:
                together.wait()
                made.append(by_name.win_create(x, "x", timeout=5.0))

            second = threading.Thread(target=bind(make))
            second.start()
            make()
            second.join()
            shoal.barrier()
            by_name.win_put(x, "x")
            shoal.barrier()
            found = by_name.win_update("x", 0.0, {other: 1.0})[0].item()
            by_name.win_free("x")
            shoal.barrier()
        return sorted(made), found

    assert fleet(2).run(run) == [([False] * 20 + [True] * 20, 2.0), ([False] * 20 + [True] * 20, 1.0)]


def test_a_registered_tensor_that_was_given_other_memory_is_refused(fleet: Fleets) -> None:
    """Neighbours have mapped the memory of ``shoal.windows.empty``, and would get its old numbers for ever."""

    def run() -> None:
        other = ring_of_two()
        x = shoal.windows.empty(2).fill_(1.0)
        window = shoal.windows.create(x, "x")
        first = x.data
        x.data = torch.full((2,), 3.0)
        for call in (window.update, window.collect, window.put, lambda: window.accumulate(torch.zeros(2))):
            with pytest.raises(ValueError, match=rf"'x' on rank {1 - other} has other memory now"):
                call()  # type: ignore[operator]
        x.data = first
        shoal.barrier()
        assert window.version() == {other: 0} and window.update().tolist() == [1.0, 1.0]
        shoal.barrier()
        copied = shoal.windows.create(torch.ones(2), "y")
        copied.tensor.data = torch.full((2,), 3.0)  # of this one neighbours read a copy
        copied.put()
        copied.tensor.resize_(5)
        with pytest.raises(ValueError, match=r"win_put: the window 'y' holds a tensor of shape \[2\]"):
            copied.put(torch.zeros(2))
        shoal.barrier()
        copied.get()  # the copy that the put has renewed
        copied.tensor.resize_(2)
        assert copied.update(0.0, {other: 1.0}, clone=True).tolist() == [3.0, 3.0]
        shoal.barrier()

    fleet(2).run(run)


def test_an_agent_that_names_itself_holds_its_own_mutex(fleet: Fleets) -> None:
    """So that all agents can run one program: ``with window.mutex([0])``."""
    inside: list[int] = []

    def run() -> bool:
        ring_of_two()
        window, alone = shoal.windows.create(torch.zeros(1), "x"), True
        for _ in range(20):
            with window.mutex([0]):
                inside.append(shoal.rank())
                time.sleep(0.001)
                alone = alone and inside == [shoal.rank()]
                inside.remove(shoal.rank())
        shoal.barrier()
        with pytest.raises(TypeError, match="ranks must be a list of ranks, not 0"), window.mutex(0):  # type: ignore[arg-type]
            pass
        shoal.barrier()
        return alone

    assert fleet(2).run(run) == [True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
def test_an_accumulated_product_has_the_same_bits_over_each_transport(fleet: Fleets, dtype: torch.dtype) -> None:
    def run() -> torch.Tensor:
        other, rank = ring_of_two(), shoal.rank()
        x, y = (torch.randn(1001, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (1, 2))
        window = shoal.windows.create(x, "x", zero_init=True)
        shoal.barrier()
        if rank == 0:
            window.put(x, dst_weights={1: 1 / 3})
            window.accumulate(y, dst_weights={1: 0.7})
        shoal.barrier()
        return window.update(0, {other: 1}, clone=True)

    expected = torch.empty(1001, dtype=dtype)
    x, y = (torch.randn(1001, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (1, 2))
    add_scaled(expected, x * (1 / 3), y, 0.7)
    assert torch.equal(fleet(2).run(run)[1], expected)


def test_the_switch_of_the_writer_decides_whether_p_moves(fleet: Fleets) -> None:
    """The writer has given its share away: an owner that turns p on later would lose it."""

    def run() -> list[float]:
        other, rank = ring_of_two(), shoal.rank()
        window = shoal.windows.create(torch.ones(2), "x", zero_init=True)
        if rank == 0:
            shoal.windows.turn_on_associated_p()
            window.accumulate(self_weight=0.5, dst_weights={1: 0.5})
        shoal.barrier()
        results = [window.p + window.slots()[other].p]
        shoal.barrier()
        shoal.windows.turn_on_associated_p()
        if rank == 0:
            shoal.windows.turn_off_associated_p()
            window.put()  # without p: what is in the slot stays
        shoal.barrier()
        return [*results, window.slots()[other].p]

    assert fleet(2).run(run) == [[0.5, 0.0], [1.5, 0.5]]


def test_a_freed_window_raises_and_a_new_one_of_its_name_is_independent(fleet: Fleets) -> None:
    def run() -> float:
        other = ring_of_two()
        with shoal.windows.create(torch.zeros(2), "x") as window:
            window.put()
            shoal.barrier()
        shoal.barrier()
        assert shoal.windows.names() == []
        for call in (window.put, window.accumulate, window.get, window.update, window.collect, window.slots):
            with pytest.raises(ValueError, match=r"'x'.*freed"):
                call()  # type: ignore[operator]
        with pytest.raises(ValueError, match=r"'x'.*freed"):
            window.put_nonblocking()
        with pytest.raises(ValueError, match=r"'x'.*freed"):
            window.mutex().__enter__()
        again = shoal.windows.create(torch.ones(2), "x")
        window.free()  # the old one, for which there is nothing left to do
        assert shoal.windows.names() == ["x"]
        shoal.barrier()
        again.put()
        shoal.barrier()
        assert again == shoal.windows.named("x") != window
        assert len({again, window, shoal.windows.named("x")}) == 2
        return again.update(0.0, {other: 1.0})[0].item()

    assert fleet(2).run(run) == [1.0, 1.0]


@pytest.mark.parametrize("numel", [3, 70_000])
@pytest.mark.parametrize("make", [torch.empty, shoal.windows.empty])
def test_a_window_made_in_inference_mode_is_written_to_outside_of_it(
    fleet: Fleets, make: Callable[[int], torch.Tensor], numel: int
) -> None:
    """The slots outlive that mode. Between machines an error of a write would end the owner's exchange."""

    def run() -> list[float]:
        other = ring_of_two()
        with torch.inference_mode():
            window = shoal.windows.create(make(numel).fill_(shoal.rank() + 1.0), "x", zero_init=True)
        shoal.barrier()
        window.put()
        window.accumulate_nonblocking(dst_weights={other: 2}).wait()
        shoal.barrier()
        results = [window.update(0, {other: 1}, clone=True)[-1].item()]
        with torch.inference_mode():
            window.get_nonblocking().wait()
        shoal.barrier()
        results.append(window.collect()[0].item())
        shoal.barrier()
        # Memory that was taken in that mode is used again.
        return [*results, shoal.neighbor_allreduce(torch.full((numel,), shoal.rank() + 1.0))[0].item()]

    assert fleet(2).run(run) == [[6.0, 3.0, 1.5], [3.0, 3.0, 1.5]]


def test_a_call_that_waits_for_a_mutex_ends_when_its_own_agent_frees_the_window(fleet: Fleets) -> None:
    """Between machines it waits for a reply. Until its deadline no nonblocking call on another window would begin."""

    def run() -> None:
        ring_of_two()
        window, other = (shoal.windows.create(torch.zeros(2), name) for name in "xy")
        if shoal.rank():
            with window.mutex(for_self=True):
                shoal.barrier()
                shoal.barrier()
        else:
            shoal.barrier()
            put = window.put_nonblocking(require_mutex=True)
            behind = other.put_nonblocking()
            with pytest.raises(shoal.DeadlineExceeded):
                put.wait(0.1)
            window.free()
            with pytest.raises(shoal.Mismatch, match=r"'x' on rank 0.*rank 0 has freed this window"):
                put.wait(5.0)
            behind.wait(5.0)
            shoal.barrier()
        shoal.barrier()
        with window.mutex(for_self=True) if shoal.rank() else nullcontext():  # it was given back
            shoal.barrier()
        assert other.version() == {1 - shoal.rank(): shoal.rank()}

    fleet(2).run(run)


@pytest.mark.transport("network")
def test_an_owner_gives_its_mutex_to_neighbours_only() -> None:
    """Window.mutex checks the ranks as well; an owner does not trust the check of another agent."""

    def run() -> list[int]:
        shoal.set_topology(shoal.topology.RingGraph(4, connect_style=1))
        window, rank = shoal.windows.create(torch.zeros(2), "x"), shoal.rank()
        shoal.barrier()  # create() waits for neighbours only: an agent that is none could ask before there is a window
        part, refused = window._part, []
        for owner in range(4):
            if owner != rank:
                try:
                    with part.mutex([owner], time.monotonic() + 20.0, "win_mutex"):
                        pass
                except shoal.Mismatch as error:
                    assert f"rank {owner} has no edge for win_lock from rank {rank}" in str(error)
                    refused.append(owner)
        shoal.barrier()
        return refused

    assert shoal.Fleet(4, transport="network").run(run) == [[2], [3], [0], [1]]


def test_a_put_that_cannot_scale_its_tensor_does_not_scale_p_either(fleet: Fleets) -> None:
    """The tensor is locked until after the deadline: with another p, all later estimates x / p would be wrong."""

    def run() -> None:
        other, rank = ring_of_two(), shoal.rank()
        shoal.windows.turn_on_associated_p()
        window = shoal.windows.create(shoal.windows.empty(3).fill_(8.0), "x", zero_init=True)
        if rank == 0:
            part = window._part
            # As a neighbour does that gets the tensor, and is stopped.
            send = part._send

            def send_first(*args: Any) -> None:
                send(*args)
                part.memory.acquire(OWN, other, time.monotonic() + 10.0)

            part._send = send_first  # type: ignore[method-assign]
            with pytest.raises(shoal.DeadlineExceeded, match="kept locked"):
                window.put(self_weight=0.5, dst_weights={other: 0.5}, timeout=0.2)
            part.memory.locks.release(OWN)
            assert window.tensor.tolist() == [8.0 * window.p] * 3
        shoal.barrier()

    fleet(2).run(run)


def test_a_window_that_finds_too_many_open_files_opens_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(fd: int) -> ByteLocks:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def run() -> None:
        before = sorted(Path("/proc/self/fd").iterdir())
        monkeypatch.setattr(registry, "ByteLocks", fails)
        with pytest.raises(OSError, match="Too many open files"):
            shoal.windows.create(torch.zeros(3), "x")
        monkeypatch.undo()
        assert sorted(Path("/proc/self/fd").iterdir()) == before
        shoal.windows.create(torch.zeros(3), "x").free()

    shoal.Fleet(1).run(run)


def test_a_freed_window_lets_the_memory_of_its_neighbours_go() -> None:
    def run() -> bool:
        other = ring_of_two()
        window = shoal.windows.create(torch.zeros(3), "x")
        theirs = weakref.ref(window._part.direct[other])
        shoal.barrier()
        window.free()
        gc.collect()
        assert window.name == "x"  # it is still there
        return theirs() is None

    assert shoal.Fleet(2, transport="shared_memory").run(run) == [True, True]


@pytest.mark.transport("network")
def test_a_mutex_that_was_waited_for_in_vain_leaves_no_unread_message() -> None:
    def run() -> bool:
        ring_of_two()
        window, rank, drained = shoal.windows.create(torch.zeros(3), "x"), shoal.rank(), True
        with window.mutex(for_self=True) if rank == 0 else nullcontext():
            shoal.barrier()
            if rank == 1:
                with pytest.raises(shoal.DeadlineExceeded, match="win_lock"), window.mutex([0], timeout=0.1):
                    pass
                drained = wait_until(lambda: current().engine.sender.drained)
            shoal.barrier()
        return drained

    assert shoal.Fleet(2, transport="network", timeout=20.0).run(run) == [True, True]


@pytest.mark.transport("network")
def test_a_put_does_not_wait_for_the_mutex_that_another_thread_waits_for() -> None:
    def run() -> float:
        other, rank = ring_of_two(), shoal.rank()
        window = shoal.windows.create(torch.full((3,), rank + 1.0), "x", zero_init=True)
        waits = threading.Event()

        def take() -> None:
            waits.set()
            with window.mutex([0]):
                pass

        with window.mutex(for_self=True) if rank == 0 else nullcontext():
            shoal.barrier()
            if rank == 1:
                taker = threading.Thread(target=take)
                taker.start()
                waits.wait()
                assert wait_until(lambda: any(one.op == "win_lock" for one in current().engine.in_flight()))
                window.put()
            shoal.barrier()
        if rank == 1:
            taker.join()
        shoal.barrier()
        return float(window.update(0.0, {other: 1.0}, clone=True)[0])

    assert shoal.Fleet(2, transport="network", timeout=10.0).run(run) == [2.0, 0.0]


@pytest.mark.transport("network")
def test_the_mutex_of_a_freed_window_is_not_that_of_its_successor() -> None:
    def run() -> bool | None:
        ring_of_two()
        rank, found = shoal.rank(), None
        before = shoal.windows.create(torch.zeros(2), "x")
        stale = before.mutex([0]) if rank == 1 else nullcontext()
        with stale:
            shoal.barrier()
            before.free()
            shoal.barrier()
            window = shoal.windows.create(torch.zeros(2), "x")
            holds, done = threading.Event(), threading.Event()

            def hold() -> None:
                with window.mutex([0]):
                    holds.set()
                    done.wait(20.0)

            if rank == 1:
                holder = threading.Thread(target=hold)
                holder.start()
                assert holds.wait(30)
        shoal.barrier()
        if rank == 0:
            try:
                with window.mutex(for_self=True, timeout=0.2):
                    found = True
            except shoal.DeadlineExceeded:
                found = False
        shoal.barrier()
        if rank == 1:
            done.set()
            holder.join()
        return found

    assert shoal.Fleet(2, transport="network", timeout=10.0).run(run) == [False, None]


def test_a_window_is_used_from_any_thread_of_its_agent(fleet: Fleets) -> None:
    def run() -> float:
        other = ring_of_two()
        window = shoal.windows.create(torch.full((3,), shoal.rank() + 1.0), "x", zero_init=True)

        def help_out() -> None:  # in a thread that has no agent of its own in a fleet
            window.put()
            window.accumulate_nonblocking().wait()

        helper = threading.Thread(target=help_out)
        helper.start()
        helper.join()
        shoal.barrier()
        return window.update(0.0, {other: 1.0}, clone=True)[0].item()

    assert fleet(2).run(run) == [4.0, 2.0]


def test_after_shutdown_calls_raise_that_the_agent_has_left(fleet: Fleets) -> None:
    def run() -> None:
        ring_of_two()
        window = shoal.windows.create(torch.zeros(2), "x")
        shoal.barrier()
        shoal.shutdown()
        with pytest.raises(shoal.NotInitialized, match="'x'"):
            window.put()

    fleet(2).run(run)


def test_bluefogs_functions_and_the_methods_are_one_window(fleet: Fleets) -> None:
    def run() -> list[float]:
        other = ring_of_two()
        x = torch.tensor([shoal.rank() + 1.0])
        assert shoal.bluefog.win_create(x, "x", zero_init=True)
        window = shoal.windows.named("x")
        window.put()
        shoal.bluefog.win_accumulate(x, "x", dst_weights={other: 2.0})
        shoal.barrier()
        assert window.slots()[other].puts == shoal.bluefog.win_slots("x")[other].puts == 1
        assert window.version() == shoal.bluefog.get_win_version("x")
        assert window.p == shoal.bluefog.win_associated_p("x")
        results = [
            window.update(0.0, {other: 1.0}, clone=True).item(),
            shoal.bluefog.win_update_then_collect("x").item(),
        ]
        shoal.barrier()
        assert shoal.bluefog.win_free("x")
        with pytest.raises(ValueError, match="freed"):
            window.put()
        return results

    assert fleet(2).run(run) == [[6.0, 7.0], [3.0, 5.0]]


def test_calls_of_both_forms_have_equal_events(fleet: Fleets) -> None:
    """So a trace has one name for one operation."""

    def run() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        ring_of_two()
        x = torch.zeros(2)
        window = shoal.windows.create(x, "x")
        seen: list[tuple[str, str]] = []
        unsubscribe = shoal.observability.events().subscribe(
            lambda event: seen.append((event.kind, event.operation)) if event.operation.startswith("win_") else None
        )
        window.put()
        window.update()
        window.collect()
        window.put_nonblocking().wait()
        shoal.barrier()
        methods, seen[:] = list(seen), []
        shoal.bluefog.win_put(x, "x")
        shoal.bluefog.win_update("x")
        shoal.bluefog.win_update_then_collect("x", require_mutex=False)
        shoal.bluefog.win_wait(shoal.bluefog.win_put_nonblocking(x, "x"))
        shoal.barrier()
        unsubscribe()
        return methods, list(seen)

    for methods, functions in fleet(2).run(run):
        ours = [method for method in methods if method[0] in ("submitted", "finished")]
        assert ours == [function for function in functions if function[0] in ("submitted", "finished")]
        assert ("finished", "win_update_then_collect") in ours


def test_every_nonblocking_form_has_the_arguments_of_its_blocking_form() -> None:
    for where in (Window, by_name):
        twins = [name for name in dir(where) if name.endswith("_nonblocking")]
        assert len(twins) >= 3
        for name in twins:
            waits = inspect.signature(getattr(where, name.removesuffix("_nonblocking")))
            assert inspect.signature(getattr(where, name)).parameters == waits.parameters


def test_a_tensor_that_cannot_be_written_is_refused_and_loses_nothing(fleet: Fleets) -> None:
    """Otherwise the slots are emptied, or p is multiplied, before torch refuses to write: mass is lost."""

    def run() -> tuple[float, float, float]:
        ring_of_two()
        shoal.windows.turn_on_associated_p()
        with pytest.raises(ValueError, match=r"elements of the tensor share memory .* pass its clone\(\)"):
            shoal.windows.create(torch.ones(1).expand(3), "expanded")
        x = torch.ones(3)
        window = shoal.windows.create(x, "x", zero_init=True)
        with pytest.raises(ValueError, match="elements of the tensor share memory"):
            window.accumulate(
                torch.ones(1).expand(3), self_weight=0.5, dst_weights=dict.fromkeys(window.destinations, 0.5)
            )
        window.accumulate(self_weight=0.5, dst_weights=dict.fromkeys(window.destinations, 0.5))
        shoal.barrier()
        x.resize_(5)
        with pytest.raises(ValueError, match=r"'x' holds a tensor of shape \[3\].*, not one of shape \[5\]"):
            window.collect()
        x.resize_(3)
        window.collect()
        result = x.sum().item(), window.p, float(len(shoal.windows.names()))
        shoal.barrier()
        window.free()
        return result

    assert fleet(2).run(run) == [(3.0, 1.0, 1.0)] * 2


def test_a_tensor_of_inference_mode_can_be_a_window(fleet: Fleets) -> None:
    def run() -> float:
        ring_of_two()
        with torch.inference_mode():
            x = torch.full((3,), float(shoal.rank()))
        window = shoal.windows.create(x, "x")
        window.put(self_weight=1.0)
        shoal.barrier()
        window.update()
        shoal.barrier()
        window.free()
        return x.mean().item()

    assert fleet(2).run(run) == [0.5, 0.5]


@pytest.mark.parametrize("numel", [5, 8192, 1 << 20])
@pytest.mark.parametrize("inference", [False, True])
def test_conjugate_and_negative_views_are_sent_and_registered_by_value(
    fleet: Fleets, numel: int, inference: bool
) -> None:
    """Their memory holds other numbers than their values."""

    def run() -> None:
        ring_of_two()
        with torch.inference_mode() if inference else nullcontext():
            conjugate = torch.full((numel,), 1 + 2j, dtype=torch.complex64).conj()
            negative, registered = torch._neg_view(torch.ones(numel)), torch._neg_view(torch.full((numel,), 3.0))
            registered_conjugate = torch.full((numel,), 2j, dtype=torch.complex64).conj()
        sent = {
            "conjugate": (torch.zeros(numel, dtype=torch.complex64), conjugate, 1 - 2j),
            "negative": (torch.zeros(numel), negative, -1.0),
            "registered": (registered, None, -3.0),
            "registered conjugate": (registered_conjugate, None, -2j),
        }
        for name, (tensor, value, number) in sent.items():
            window = shoal.windows.create(tensor, name, zero_init=True)
            (source,) = window.sources
            for send, weight, slot in [("put", 1.0, 1.0), ("put", 0.5, 0.5), ("accumulate", 2.0, 2.5)]:
                getattr(window, send)(value, dst_weights={source: weight})
                shoal.barrier()
                assert (window.update(0.0, {source: 1.0}, clone=True) == slot * number).all(), (name, send, weight)
                shoal.barrier()
            window.put(value, self_weight=1.0)
            shoal.barrier()
            window.update(1.0, {source: 1.0})
            assert (tensor == number * (2 if value is None else 1)).all(), name
            shoal.barrier()
            window.get()
            assert (window.update(0.0, {source: 1.0}, clone=True) == tensor).all(), name
            shoal.barrier()
            window.free()

    fleet(2).run(run)


def test_a_window_that_is_freed_during_an_accumulate_raises_for_the_neighbours_without_it() -> None:
    """By another thread, between the copies to two neighbours: the second one's would be skipped silently."""

    def run() -> str | int:
        rank = shoal.rank()
        shoal.set_topology(shoal.topology.FullyConnectedGraph(3))
        window = shoal.windows.create(torch.full((4,), float(rank)), "x", zero_init=True)
        shoal.barrier()
        result: str | int = ""
        if rank == 0:
            part = window._part
            memory = part.direct[part._order[0]]
            write = memory.write

            def write_and_free(*arguments: Any) -> None:
                write(*arguments)
                thread = threading.Thread(target=part._owner.free, args=("x",))  # type: ignore[attr-defined]
                thread.start()
                thread.join()

            memory.write = write_and_free  # type: ignore[method-assign]
            with pytest.raises(shoal.Mismatch) as raised:
                window.accumulate(torch.ones(4))
            result = str(raised.value)
        shoal.barrier()
        if rank:
            result = window.slots()[0].accumulates
        shoal.barrier()
        return result

    message, first, second = shoal.Fleet(3).run(run)
    assert "rank 0 has freed this window" in str(message) and (first, second) == (1, 0)
