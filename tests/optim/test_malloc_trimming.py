"""Gradients that are freed after a step do not cost the next one page faults."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from shoal.optim import malloc_trimming
from support.limits import scaled

PAGES = (4 * 2048 * 2048 * 4) // os.sysconf("SC_PAGE_SIZE")
"""Of the gradients of the script's model."""
SCRIPT = """
import resource
import statistics
import sys
import torch
import shoal

shoal.init()
model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if "parts" in sys.argv:
    quasi = shoal.algorithms.QuasiGlobalMomentum(1.0, 0.9)
    optimizer = shoal.DecentralizedOptimizer(optimizer, model, quasi, overlap="backward")
else:
    optimizer = shoal.DecentralizedOptimizer(optimizer, model)
faults = []
for _ in range(12):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    model(torch.ones(1, 2048)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(int(statistics.median(faults[5:])))  # some take new memory, until there is enough
shoal.shutdown()
"""

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's heap is told")


def faults_of_a_step(*arguments: str, **environ: str) -> int:
    command = [sys.executable, "-c", SCRIPT, *arguments]
    run = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=scaled(120))
    assert run.returncode == 0, run.stderr
    return int(run.stdout)


def test_gradients_reuse_the_previous_steps_memory() -> None:
    assert faults_of_a_step() < PAGES // 10


@pytest.mark.slow
def test_bucket_threads_reuse_the_previous_steps_memory() -> None:
    # A thread takes the heap of one that has ended, if there is one: in some runs that of a thread of init.
    assert any(faults_of_a_step("parts") < PAGES // 2 for _ in range(6))
    assert faults_of_a_step("parts", MALLOC_ARENA_MAX="8") > PAGES


@pytest.mark.slow
def test_heap_settings_of_the_environment_take_precedence() -> None:
    assert faults_of_a_step(MALLOC_TRIM_THRESHOLD_="131072") > PAGES // 2


@pytest.mark.parametrize(
    ("name", "text", "tuned"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072", True),
        ("MALLOC_MMAP_THRESHOLD_", "131072", True),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072", True),
        ("GLIBC_TUNABLES", "glibc.pthread.rseq=0", False),
        ("MALLOC_TRIM_THRESHOLD_", "", False),
    ],
)
def test_any_heap_variable_disables_trimming(
    name: str, text: str, tuned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(one, raising=False)
    monkeypatch.setenv(name, text)
    reported: list[tuple[int, int]] = []
    libc = SimpleNamespace(mallopt=lambda what, value: reported.append((what, value)) or 1)
    monkeypatch.setattr(malloc_trimming.ctypes, "CDLL", lambda _: libc)
    assert malloc_trimming.keep_freed_memory.__wrapped__() is not tuned
    assert bool(reported) is not tuned
