"""Arenas, what peers map of them, and the pool of results: bounds hold, memory is used again, nothing grows."""

from __future__ import annotations

import fcntl
import gc
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal.errors import ProtocolError
from shoal.transport.shared_regions import MOST_OF_DEVICE, SMALL, Arena, PeerMemory, Region, ResultPool, size_class
from support.leftovers import descriptors, resident_bytes
from support.samples import sample

Fleets = Callable[..., shoal.Fleet]
F_GET_SEALS, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE = 1034, 2, 4, 8


@pytest.fixture
def arena() -> Iterator[Arena]:
    one = Arena()
    yield one
    one.close()


@given(nbytes=st.integers(0, 1 << 40))
@settings(max_examples=300)
def test_a_size_class_holds_the_request_and_wastes_at_most_a_quarter(nbytes: int) -> None:
    size = size_class(nbytes)
    assert size >= nbytes
    assert size % 64 == 0
    assert size <= max(64, nbytes * 1.25 + 64)
    assert size_class(size) == size


def test_a_released_region_is_reused(arena: Arena) -> None:
    for nbytes in (100, 20_000, SMALL, SMALL + 1, 1 << 20):
        one = arena.allocate(nbytes)
        before = arena.nbytes
        arena.release(one)
        again = arena.allocate(nbytes)
        assert (again.segment.ident, again.offset) == (one.segment.ident, one.offset)
        assert arena.nbytes == before


def test_allocated_regions_do_not_overlap(arena: Arena) -> None:
    acquired: list[tuple[Region, int]] = []
    for step, nbytes in enumerate([100, 17_000, 17_000, 300_000, 64, 100, 1 << 20, 300_000, 17_000] * 4):
        region = arena.allocate(nbytes)
        region.as_tensor(torch.uint8, nbytes).fill_(step % 251)
        acquired.append((region, nbytes))
    for step, (region, nbytes) in enumerate(acquired):
        assert bool((region.as_tensor(torch.uint8, nbytes) == step % 251).all())


def test_a_thousand_rounds_of_varying_sizes_need_no_more_than_the_peak(arena: Arena) -> None:
    sizes = [17_000, 70_000, 300_000, 900_000]
    for step in range(1000):
        arena.release(arena.allocate(sizes[step % 4]))
    assert arena.nbytes < 12e6


def test_changing_sizes_do_not_accumulate() -> None:
    arena = Arena(keep=8 << 20)
    for step in range(40):
        arena.release(arena.allocate((1 << 20) + step * (1 << 18)))
    assert arena.nbytes <= (8 << 20) + (12 << 20)
    assert arena.retired, "the readers must be told which memory files are gone"
    arena.close()


def test_threads_may_allocate_and_release_concurrently(arena: Arena) -> None:
    def work(number: int) -> bool:
        for step in range(200):
            region = arena.allocate(20_000)
            data = region.as_tensor(torch.int32, 5000)
            data.fill_(number * 1000 + step)
            fine = bool((data == number * 1000 + step).all())
            arena.release(region)
            if not fine:
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_a_memory_file_can_be_neither_shrunk_nor_grown(arena: Arena) -> None:
    segment = arena.allocate(1 << 20).segment
    seals = fcntl.fcntl(segment.fd, F_GET_SEALS)
    assert seals & F_SEAL_SHRINK
    assert seals & F_SEAL_GROW
    for size in (0, 1 << 10, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment.fd, 1033, F_SEAL_WRITE)  # nor can a reader freeze it under the writer


def test_closing_an_arena_closes_its_files_and_refuses_more() -> None:
    before = set(descriptors().items())
    arena = Arena()
    region = arena.allocate(1 << 20)
    arena.close()
    with pytest.raises(RuntimeError, match="closed"):
        arena.allocate(10)
    arena.release(region)  # the answer of a reader may come late
    del region, arena
    gc.collect()
    assert set(descriptors().items()) <= before


def share(region: Region, memory: PeerMemory) -> int:
    memory.add(region.segment.ident, os.dup(region.segment.fd))
    return region.segment.ident


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.complex128, torch.bfloat16], ids=str)
def test_a_reader_sees_the_owners_writes(arena: Arena, dtype: torch.dtype) -> None:
    memory = PeerMemory()
    for nbytes in (320, 160_000, 1_600_000):
        region = arena.allocate(nbytes)
        ident = share(region, memory)
        numel = nbytes // dtype.itemsize
        written = region.as_tensor(dtype, numel)
        for seed in (1, 2):
            written.copy_(sample(0, (numel,), dtype, seed))
            seen = memory.view(ident, region.offset, nbytes, dtype)
            assert torch.equal(seen, written)


def test_a_reader_keeps_its_view_after_the_owner_closed(arena: Arena) -> None:
    memory = PeerMemory()
    region = arena.allocate(1 << 20)
    region.as_tensor(torch.float32, 1 << 18).fill_(3.0)
    seen = memory.view(share(region, memory), 0, 1 << 20, torch.float32)
    arena.close()
    del region
    gc.collect()
    assert seen.sum().item() == 3.0 * (1 << 18)


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(0, (1 << 20) + 1), (1 << 20, 4), ((1 << 20) - 4, 8), (2**63, 4), (0, 2**63), (2**62, 2**62)],
)
def test_a_reference_beyond_a_memory_file_is_refused(arena: Arena, offset: int, nbytes: int) -> None:
    memory = PeerMemory()
    region = arena.allocate(1 << 20)
    ident = share(region, memory)
    with pytest.raises(ProtocolError):
        memory.view(ident, offset, nbytes, torch.uint8)


@pytest.mark.parametrize("offset", [1, 2, 3, 5])
def test_a_misaligned_reference_is_refused(arena: Arena, offset: int) -> None:
    memory = PeerMemory()
    region = arena.allocate(1 << 20)
    ident = share(region, memory)
    with pytest.raises(ProtocolError):
        memory.view(ident, offset, 8, torch.float32)


def test_a_reference_to_memory_that_was_never_shared_or_is_released_is_refused(arena: Arena) -> None:
    memory = PeerMemory()
    region = arena.allocate(1 << 20)
    with pytest.raises(ProtocolError, match="never shared"):
        memory.view(7, 0, 4, torch.float32)
    ident = share(region, memory)
    memory.forget(ident)
    memory.forget(ident)
    with pytest.raises(ProtocolError, match="never shared"):
        memory.view(ident, 0, 4, torch.float32)


def unsealed() -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 8192)
    return fd


def empty() -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, 1033, F_SEAL_SHRINK)
    return fd


@pytest.mark.parametrize(
    "make", [unsealed, empty, lambda: os.open("/dev/null", os.O_RDWR), lambda: os.open("/", os.O_RDONLY)]
)
def test_a_descriptor_without_sealed_memory_is_refused_and_closed(make: Callable[[], int]) -> None:
    fd = make()
    with pytest.raises(ProtocolError):
        PeerMemory().add(1, fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_results_reuse_the_memory_of_freed_results() -> None:
    pool = ResultPool()
    first = pool.empty((300, 1000), torch.float32)
    address = first.data_ptr()
    view = first[3:5]
    del first
    gc.collect()
    assert pool.empty((300, 1000), torch.float32).data_ptr() != address, "a view keeps the memory"
    del view
    gc.collect()
    again = [pool.empty((150, 1000), torch.float64) for _ in range(2)]
    assert address in [one.data_ptr() for one in again], "for another dtype too, if the size is the same"


def test_two_results_never_share_memory() -> None:
    pool = ResultPool()
    chance = torch.Generator().manual_seed(3)
    held: list[tuple[torch.Tensor, int]] = []
    for step in range(60):
        tensor = pool.empty((100_000 + 20_000 * (step % 3),), torch.int32)
        tensor.fill_(step)
        held.append((tensor, step))
        if len(held) > 5:
            held.pop(int(torch.randint(0, len(held), (1,), generator=chance)))
        assert all(bool((one == number).all()) for one, number in held)


def test_a_pool_keeps_no_more_than_its_limit() -> None:
    pool = ResultPool(keep=4 << 20)
    before = resident_bytes()
    for _ in range(3):
        tensors = [pool.empty((1 << 20,), torch.float32).fill_(1.0) for _ in range(16)]
        del tensors
        gc.collect()
    pool.tidy()  # as the driving thread does, at least once a second
    assert resident_bytes() - before < 24 << 20


def test_pooled_memory_is_evicted_for_requested_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("shoal.transport.shared_regions.clock.monotonic", lambda: now)
    pool = ResultPool(keep=4 << 20)

    def used_before(numel: int, count: int) -> int:
        tensors = [pool.empty((numel,), torch.uint8) for _ in range(count)]
        result = sum(int(tensor[0]) for tensor in tensors)  # new memory is zero
        for tensor in tensors:
            tensor.fill_(1)
        return result

    small, large = 1 << 20, 3 << 20
    assert used_before(small, 4) == 0
    assert used_before(large, 1) == 0
    assert used_before(large, 1) == 0
    assert used_before(small, 4) == 4  # nobody's memory goes while it is in use
    now += 10.0
    assert used_before(large, 1) == 0
    assert used_before(large, 1) == 1
    assert used_before(small, 4) == 1  # as many as there was room for


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (5, 7), (1 << 17,)])
def test_a_pool_gives_contiguous_tensors_of_any_shape(shape: tuple[int, ...]) -> None:
    for dtype in (torch.bool, torch.float16, torch.complex128):
        tensor = ResultPool().empty(shape, dtype)
        assert (tensor.shape, tensor.dtype) == (torch.Size(shape), dtype)
        assert tensor.is_contiguous()


def test_a_result_outlives_its_pool() -> None:
    pool = ResultPool()
    tensor = pool.empty((1 << 18,), torch.float32).fill_(2.0)
    pool.clear()
    del pool
    gc.collect()
    assert tensor.sum().item() == 2.0 * (1 << 18)


def rounds(count: int, numel: int) -> list[tuple[int, int]]:
    """Do ``count`` rounds of several operations; the growth of memory and of descriptors after the first 100.

    Rank 0 measures while the others wait: agents that are threads would count the files that the others read.
    """

    def used() -> tuple[int, int]:
        shoal.barrier()
        gc.collect()
        found = (resident_bytes(), len(descriptors())) if shoal.rank() == 0 else (0, 0)
        shoal.barrier()
        return found

    start = (0, 0)
    x = torch.ones(numel)
    for step in range(count):
        if step == 100:
            start = used()
        shoal.neighbor_allreduce(x, "x")
        other = (shoal.rank() + 1) % shoal.size()
        behind = (shoal.rank() - 1) % shoal.size()
        shoal.neighbor_allreduce(x, 0.5, {behind: 0.5}, {other: 1.0})
        shoal.allreduce(x)
        if step % 10 == 0:
            shoal.neighbor_allreduce(x, 0.5, None, {other: 0.5}, name=f"new name {step}")
            shoal.broadcast_object({"step": step})
    memory, opened = used()
    return [(memory - start[0], opened - start[1])]


@pytest.mark.parametrize("numel", [10, 20_000], ids=["inline", "region"])
def test_nothing_grows_over_hundreds_of_rounds(fleet: Fleets, numel: int) -> None:
    for [(memory, opened)] in fleet(3).run(rounds, 200 if numel > 10 else 400, numel):
        assert memory < 12e6
        assert opened <= 2


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("numel", [10, 20_000], ids=["inline", "region"])
def test_nothing_grows_over_ten_thousand_rounds(fleet: Fleets, numel: int) -> None:
    for [(memory, opened)] in fleet(3).run(rounds, 10_000, numel):
        assert memory < 16e6
        assert opened <= 2


def test_one_published_copy_serves_every_destination(fleet: Fleets) -> None:
    """Seven neighbours read one copy: the arena of an agent holds one tensor, not seven."""

    def run() -> int:
        from shoal.runtime.agent import current

        shoal.set_topology(shoal.topology.FullyConnectedGraph(8))
        shoal.neighbor_allreduce(torch.ones(1_000_000))
        return current().engine.arena.nbytes

    assert max(fleet(8).run(run)) < 5.1e6


class Cycle:
    """Only the garbage collector frees it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.me, self.tensor = self, tensor


class CollectedRegion(Region):
    """The garbage collector comes when it is made, inside the arena."""

    def __init__(self, *args: Any) -> None:
        gc.collect()
        super().__init__(*args)


class CollectedBlocks(defaultdict[int, list[Any]]):
    """The garbage collector comes when one looks for blocks of a new size, inside the pool."""

    def __missing__(self, size: int) -> list[Any]:
        gc.collect()
        return super().__missing__(size)


@pytest.mark.timeout(20)
def test_the_garbage_collector_may_run_during_an_allocation(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """And free a tensor of the same pool: it must not wait for a lock that its thread holds."""
    monkeypatch.setattr("shoal.transport.shared_regions.Region", CollectedRegion)
    pool = ResultPool()
    pool._free = CollectedBlocks(list)
    for nbytes in (100, 20_000, SMALL + 1, 1 << 20, 1 << 21):
        Cycle(arena.empty((nbytes,), torch.uint8))
        Cycle(pool.empty((nbytes + SMALL,), torch.uint8))
    held = arena.nbytes
    gc.collect()
    for nbytes in (100, 20_000, SMALL + 1, 1 << 20, 1 << 21):
        arena.empty((nbytes,), torch.uint8)
    assert arena.nbytes == held  # all of it had come back


def test_unavailable_device_memory_is_an_error_or_has_no_values(caplog: pytest.LogCaptureFixture) -> None:
    before = descriptors()
    memory = PeerMemory()
    with pytest.raises(ProtocolError, match="bytes of a device's memory"):
        memory.add_of_device(1, os.open(os.devnull, os.O_RDONLY), MOST_OF_DEVICE + 1)
    memory.add_of_device(1, os.open(os.devnull, os.O_RDONLY), 4096)
    assert "cannot be mapped" in caplog.text
    assert memory.view(1, 64, 256, torch.float32).is_meta
    with pytest.raises(ProtocolError):
        memory.view(1, 4000, 256, torch.float32)
    with pytest.raises(ProtocolError, match="shared twice"):
        memory.add_of_device(1, os.open(os.devnull, os.O_RDONLY), 4096)
    memory.close()
    assert descriptors() == before
