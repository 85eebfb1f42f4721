"""Memory of a device by CUDA's driver, against one made of memory files and NVIDIA's own header."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.device import Cuda, CudaStream, Driver, Unshareable
from support.leftovers import descriptors
from support.limits import scaled

SOURCE = Path(__file__).parent.parent / "support" / "libcuda.c"
HEADERS = [path for path in sorted(Path("/usr/local").glob("cuda*/include")) if (path / "cuda.h").exists()]
COMPILER = shutil.which("cc")
STEP = 2 << 20
NOT_SUPPORTED, OUT_OF_MEMORY = 801, 2
NEEDS = "there is no C compiler, or no cuda.h of NVIDIA's toolkit in /usr/local"
pytestmark = pytest.mark.skipif(not HEADERS or COMPILER is None, reason=NEEDS)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = str(tmp_path_factory.mktemp("driver") / "libcuda.so.1")
    assert COMPILER is not None
    flags = ["-Wall", "-Werror", "-shared", "-fPIC", f"-I{HEADERS[-1]}"]
    subprocess.run([COMPILER, *flags, "-o", made, str(SOURCE)], check=True)
    return made


def counts(library: str) -> list[int]:
    """Handles, reserved ranges and mapped ranges that have not been given back."""
    result = (ctypes.c_int * 3)()
    ctypes.CDLL(library).stub_counts(result)
    return list(result)


def fail(library: str, name: str, code: int) -> None:
    ctypes.CDLL(library).stub_fail(name.encode(), code)


def test_memory_is_created_mapped_and_released(library: str) -> None:
    before, driver = descriptors(), Driver(library)
    assert driver.why_not(0) is None
    address, size, fd = driver.make(0, 5000)
    assert size == STEP
    assert os.fstat(fd).st_size == size
    ctypes.memset(address, 7, size)
    assert counts(library) == [0, 1, 1]
    other, device = driver.map(fd, size)
    assert (other != address, device) == (True, 1)
    assert ctypes.string_at(other + size - 1, 1) == b"\7"
    ctypes.memset(other, 8, 1)
    assert ctypes.string_at(address, 2) == b"\10\7"
    driver.unmap(other, size)
    driver.unmap(address, size)
    os.close(fd)
    assert counts(library) == [0, 0, 0]
    assert descriptors() == before


def test_another_process_maps_it_and_keeps_it_when_its_owner_is_killed(library: str) -> None:
    program = (
        "import ctypes, os, signal, socket, sys\n"
        "from shoal.device import Driver\n"
        "address, size, fd = Driver(sys.argv[1]).make(1, 1)\n"
        "ctypes.memset(address, 42, size)\n"
        "socket.send_fds(socket.socket(fileno=int(sys.argv[2])), [b'here'], [fd])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    import socket

    ours, remote = socket.socketpair()
    with ours, remote:
        command = [sys.executable, "-c", program, library, str(remote.fileno())]
        ended = subprocess.run(command, pass_fds=[remote.fileno()], check=False, timeout=scaled(60))
        assert ended.returncode == -9
        _, fds, _, _ = socket.recv_fds(ours, 4, 1)
    driver = Driver(library)
    address, _ = driver.map(fds[0], STEP)
    os.close(fds[0])
    assert ctypes.string_at(address, STEP) == bytes([42]) * STEP
    driver.unmap(address, STEP)


@pytest.mark.parametrize("size", [2 * STEP, 0, 1])
def test_a_size_that_differs_from_the_memorys_is_refused(library: str, size: int) -> None:
    driver = Driver(library)
    address, made, fd = driver.make(0, STEP)
    before = counts(library)
    with pytest.raises(Unshareable):
        driver.map(fd, size)
    assert counts(library) == before
    os.close(fd)
    driver.unmap(address, made)


def test_a_descriptor_of_something_else_is_refused(library: str) -> None:
    with Path(os.devnull).open() as nothing, pytest.raises(Unshareable, match="cuMemImportFromShareableHandle"):
        Driver(library).map(nothing.fileno(), STEP)
    assert counts(library) == [0, 0, 0]


MAKING = (
    "cuMemGetAllocationGranularity",
    "cuMemCreate",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemExportToShareableHandle",
)
MAPPING = (
    "cuMemImportFromShareableHandle",
    "cuMemGetAllocationPropertiesFromHandle",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
)


@pytest.mark.parametrize("name", MAKING)
@pytest.mark.parametrize("code", [NOT_SUPPORTED, OUT_OF_MEMORY])
def test_a_failure_during_creation_leaves_nothing(library: str, name: str, code: int) -> None:
    before, driver = descriptors(), Driver(library)
    fail(library, name, code)
    try:
        with pytest.raises(MemoryError if code == OUT_OF_MEMORY else Unshareable, match=name):
            driver.make(0, STEP)
    finally:
        fail(library, "", 0)
    assert counts(library) == [0, 0, 0]
    assert descriptors() == before
    address, size, fd = driver.make(0, STEP)  # and the next goes well
    driver.unmap(address, size)
    os.close(fd)


@pytest.mark.parametrize("name", MAPPING)
@pytest.mark.parametrize("code", [NOT_SUPPORTED, OUT_OF_MEMORY])
def test_a_failure_during_mapping_leaves_nothing(library: str, name: str, code: int) -> None:
    driver = Driver(library)
    address, size, fd = driver.make(0, STEP)
    before, open_before = counts(library), descriptors()
    fail(library, name, code)
    try:
        with pytest.raises(MemoryError if code == OUT_OF_MEMORY else Unshareable, match=name):
            driver.map(fd, size)
    finally:
        fail(library, "", 0)
    assert (counts(library), descriptors()) == (before, open_before)
    driver.unmap(address, size)
    os.close(fd)


@pytest.mark.parametrize("name", ["cuInit", "cuDeviceGetAttribute"])
def test_a_drivers_error_message_is_reported(library: str, name: str) -> None:
    fail(library, name, NOT_SUPPORTED)
    try:
        with pytest.raises(Unshareable, match=rf"{name}: operation not supported \(801\)"):
            Driver(library).why_not(0)
    finally:
        fail(library, "", 0)


def test_a_machine_without_a_driver_raises() -> None:
    with pytest.raises(Unshareable, match="no_such_library"):
        Driver("no_such_library.so.1")


def test_a_device_is_refused_only_if_its_memory_cannot_be_shared(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.device.driver", lambda: Driver(library))
    Cuda(torch.device("cuda", 0))
    monkeypatch.setattr(Driver, "why_not", lambda _, device: f"device {device} has no virtual memory")
    with pytest.raises(Unshareable, match="device 1 has no virtual memory"):
        Cuda(torch.device("cuda", 1))


def test_an_event_is_recorded_on_its_stream_and_a_waiting_thread_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, object]] = []

    class Event:
        def __init__(self, blocking: bool) -> None:
            calls.append(("blocking", blocking))

        def record(self, stream: object) -> None:
            calls.append(("record", stream))

        def synchronize(self) -> None:
            calls.append(("synchronize", None))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    stream: Any = object()
    mark = CudaStream(stream).mark()
    assert calls == [("blocking", True), ("record", stream)]
    mark.wait()
    assert calls[2:] == [("synchronize", None)]
