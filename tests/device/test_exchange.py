"""Averages of tensors that stay on their device: the caller's options during one, and its errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

import shoal
from shoal.device import Unshareable
from shoal.execution import devices
from shoal.ops import device_ops
from shoal.transport import shared_regions
from support.leftovers import wait_until
from support.limits import scaled
from support.slow_device import Slow, SlowDevice, current_device, empty, in_use, to_device, without_memory

Fleets = Callable[..., shoal.Fleet]
NUMEL = 10_000
"""Enough not to travel inside messages."""


@pytest.fixture
def device(transport: str) -> Iterator[SlowDevice]:
    with in_use() as one:
        yield one


def numbers(rank: int, numel: int = NUMEL) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def average_of_two() -> torch.Tensor:
    return shoal.neighbor_allreduce(to_device(numbers(shoal.rank())), 0.5, {1 - shoal.rank(): 0.5}, [1 - shoal.rank()])


def expected_of_two(rank: int) -> torch.Tensor:
    return (numbers(rank) * 0.5).add_(numbers(1 - rank), alpha=0.5)


def test_the_result_is_on_the_device_and_has_the_bits_of_the_cpu(fleet: Fleets, device: SlowDevice) -> None:
    def run() -> tuple[torch.Tensor, torch.Tensor]:
        own = numbers(shoal.rank())
        on_device = shoal.neighbor_allreduce(to_device(own))
        assert isinstance(on_device, Slow)
        return on_device.cpu(), shoal.neighbor_allreduce(own)

    for on_device, on_cpu in fleet(5).run(run):
        assert torch.equal(on_device, on_cpu)


@pytest.mark.parametrize("strided", [False, True])
def test_out_gets_the_result_also_if_it_is_the_input(fleet: Fleets, device: SlowDevice, strided: bool) -> None:
    def run() -> None:
        rank = shoal.rank()
        out = empty((NUMEL // 2, 2) if strided else (2, NUMEL // 2), torch.float32)
        out = out.t() if strided else out
        x = to_device(numbers(rank).view(2, -1))
        result = shoal.neighbor_allreduce(x, 0.5, {1 - rank: 0.5}, [1 - rank], out=out)
        assert result is out
        assert torch.equal(out.cpu().reshape(-1), expected_of_two(rank))
        assert shoal.neighbor_allreduce(x, 0.5, {1 - rank: 0.5}, [1 - rank], out=x) is x
        assert torch.equal(x.cpu().view(-1), expected_of_two(rank))

    fleet(2).run(run)


def test_a_tensor_may_change_once_the_call_has_returned(fleet: Fleets, device: SlowDevice) -> None:
    def run() -> None:
        rank = shoal.rank()
        x = to_device(numbers(rank))
        handle = shoal.nonblocking.neighbor_allreduce(x, 0.5, {1 - rank: 0.5}, [1 - rank])
        x.mul_(0)
        x.copy_(torch.full((NUMEL,), torch.nan))
        assert torch.equal(handle.wait().cpu(), expected_of_two(rank))

    fleet(2).run(run)


def test_memory_is_not_reused_while_a_neighbour_reads_it(fleet: Fleets, device: SlowDevice) -> None:
    def run() -> None:
        rank = shoal.rank()
        handles = [
            shoal.nonblocking.neighbor_allreduce(
                to_device(numbers(rank).mul_(number)), 0.5, {1 - rank: 0.5}, [1 - rank], name=f"{number}"
            )
            for number in range(12)
        ]
        for number, handle in enumerate(handles):
            expected = (numbers(rank).mul_(number) * 0.5).add_(numbers(1 - rank).mul_(number), alpha=0.5)
            assert torch.equal(handle.wait().cpu(), expected), number
        for _ in range(12):
            assert torch.equal(average_of_two().cpu(), expected_of_two(rank))

    fleet(2).run(run)


def test_other_calls_continue_while_the_device_is_busy(fleet: Fleets, device: SlowDevice) -> None:
    busy = threading.Event()

    def run() -> float:
        rank = shoal.rank()
        x = to_device(numbers(rank))
        current_device().current().queue(partial(busy.wait, 30.0))  # type: ignore[arg-type]
        handle = shoal.nonblocking.neighbor_allreduce(x, 0.5, {1 - rank: 0.5}, [1 - rank])
        for _ in range(5):
            assert shoal.allreduce(torch.ones(1)).item() == 1.0
        assert not handle.poll()
        shoal.barrier()
        busy.set()
        assert torch.equal(handle.wait().cpu(), expected_of_two(rank))
        return 0.0

    fleet(2).run(run)


def test_a_tensor_on_the_cpu_of_one_agent_only_is_a_mismatch_on_both(fleet: Fleets, device: SlowDevice) -> None:
    def run() -> str:
        own = numbers(shoal.rank())
        with pytest.raises(shoal.Mismatch) as caught:
            shoal.neighbor_allreduce(to_device(own) if shoal.rank() else own)
        assert torch.equal(average_of_two().cpu(), expected_of_two(shoal.rank()))  # and both continue
        return str(caught.value)

    for output in fleet(2).run(run):
        assert "rank 1" in output and "rank 0" in output and "a device" in output and "the CPU" in output, output


def test_small_tensors_mismatch_as_well(fleet: Fleets, device: SlowDevice) -> None:
    def run() -> None:
        with pytest.raises(shoal.Mismatch):
            shoal.neighbor_allreduce(to_device(torch.ones(3)) if shoal.rank() else torch.ones(3))

    fleet(2).run(run)


@pytest.mark.parametrize(
    "arguments",
    [{"robust": shoal.robust.FiniteOnly()}, {"compression": shoal.compression.Sign()}],
    ids=["robust", "compression"],
)
def test_operations_that_inspect_tensors_use_the_cpu_with_the_same_bits(
    fleet: Fleets, device: SlowDevice, arguments: dict[str, Any]
) -> None:
    def run() -> tuple[torch.Tensor, torch.Tensor]:
        own = numbers(shoal.rank())
        on_device = shoal.neighbor_allreduce(to_device(own), **arguments)
        assert isinstance(on_device, Slow)
        return on_device.cpu(), shoal.neighbor_allreduce(own, **arguments)

    for on_device, on_cpu in fleet(3).run(run):
        assert torch.equal(on_device, on_cpu)


def test_a_device_without_memory_fails_the_call_and_not_the_agent(fleet: Fleets, device: SlowDevice) -> None:
    def run() -> tuple[str, float]:
        assert torch.equal(average_of_two().cpu(), expected_of_two(shoal.rank()))
        shoal.barrier()
        x = to_device(torch.ones(500_000))
        began = time.monotonic()
        with (
            without_memory() if shoal.rank() else nullcontext(),
            pytest.raises(MemoryError if shoal.rank() else shoal.ShoalError) as caught,
        ):
            shoal.neighbor_allreduce(x, name="large")
        took = time.monotonic() - began
        shoal.barrier()
        assert torch.equal(average_of_two().cpu(), expected_of_two(shoal.rank()))
        return f"{type(caught.value).__name__}: {caught.value}", took

    output = fleet(2).run(run)
    assert all("no memory left" in one for one, _ in output), output
    assert all(took < scaled(5.0) for _, took in output)


def test_memory_that_cannot_be_mapped_is_an_error_that_names_its_owner(
    fleet: Fleets, device: SlowDevice, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if transport != "shared_memory":
        return  # nothing is mapped

    def raise_unshareable(fd: int, size: int) -> torch.Tensor:
        raise Unshareable("these devices do not reach each other")

    monkeypatch.setattr(shared_regions, "map_memory", raise_unshareable)

    def run() -> str:
        with pytest.raises((RuntimeError, shoal.ShoalError)) as caught:
            average_of_two()
        assert shoal.allreduce(torch.ones(1)).item() == 1.0
        return str(caught.value)

    for output in fleet(2).run(run):
        assert "cannot be mapped" in output and "SHOAL_DEVICE_MEMORY" in output, output


def test_a_device_error_is_raised_and_the_others_are_notified(fleet: Fleets, device: SlowDevice) -> None:
    def broken() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    def run() -> str:
        x = to_device(numbers(shoal.rank()))
        shoal.barrier()
        if shoal.rank():
            with device.stream().working():
                x = to_device(numbers(1))
                current_device().current().queue(broken)
                with pytest.raises(RuntimeError) as raised:
                    shoal.neighbor_allreduce(x, 0.5, {0: 0.5}, [0], name="broken")
            shoal.barrier()
            return str(raised.value)
        with pytest.raises(shoal.ShoalError) as caught:
            shoal.neighbor_allreduce(x, 0.5, {1: 0.5}, [1], name="broken")
        shoal.barrier()
        return str(caught.value)

    zero, one = fleet(2).run(run)
    assert "illegal memory access" in one
    assert "rank 1" in zero and "illegal memory access" in zero, zero


def test_a_device_that_hangs_is_abandoned_at_the_deadline(fleet: Fleets, device: SlowDevice) -> None:
    stopped = threading.Event()

    def run() -> float:
        rank = shoal.rank()
        x = to_device(numbers(rank))
        if rank:
            device_of_one = device.stream()
            with device_of_one.working():
                device_of_one.queue(partial(stopped.wait, 30.0))  # type: ignore[arg-type]
                began = time.monotonic()
                with pytest.raises(shoal.DeadlineExceeded):
                    shoal.neighbor_allreduce(x, 0.5, {0: 0.5}, [0], timeout=1.0)
        else:
            began = time.monotonic()
            with pytest.raises(shoal.ShoalError):
                shoal.neighbor_allreduce(x, 0.5, {1: 0.5}, [1], timeout=3.0)
        took = time.monotonic() - began
        stopped.set()
        return took

    assert max(fleet(2).run(run)) < 8.0


def test_no_thread_of_an_agent_is_left_on_the_device(fleet: Fleets, device: SlowDevice) -> None:
    fleet(2).run(average_of_two)
    assert wait_until(lambda: not [one for one in threading.enumerate() if one.name.startswith("shoal-")])


def test_by_default_tensors_are_sent_through_the_cpu(
    fleet: Fleets, device: SlowDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOAL_DEVICE_MEMORY")

    def fail_if_opened(one: torch.device) -> SlowDevice:
        raise AssertionError("the device was opened")

    monkeypatch.setattr(devices, "open_device", fail_if_opened)

    def run() -> None:
        result = average_of_two()
        assert isinstance(result, Slow)
        assert torch.equal(result.cpu(), expected_of_two(shoal.rank()))

    fleet(2).run(run)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_sum_that_fails_or_hangs_fails_its_call_and_the_next_works(
    fleet: Fleets, device: SlowDevice, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """The thread that waits for sums, and the progress thread, are available for the next."""
    released = threading.Event()

    def fail_or_hang() -> None:
        if hangs:
            released.wait(30.0)
        else:
            raise RuntimeError("an illegal memory access was encountered")

    def run() -> float:
        rank = shoal.rank()
        x = to_device(numbers(rank))
        shoal.barrier()
        began = time.monotonic()
        with pytest.raises(shoal.DeadlineExceeded if hangs else RuntimeError):
            shoal.neighbor_allreduce(x, 0.5, {1 - rank: 0.5}, [1 - rank], name="wrong", timeout=1.0)
        took = time.monotonic() - began
        assert shoal.allreduce(torch.ones(1)).item() == 1.0
        released.set()
        return took

    monkeypatch.setattr(device_ops, "weighted_sum", lambda *_: current_device().current().queue(fail_or_hang))
    assert max(fleet(2).run(run)) < 8.0
