"""The weighted sum of three tensors: torch's operations, the compiled kernels, and a C program, side by side.

    python benchmarks/sums.py
    python benchmarks/sums.py --megabytes 16 --processes 1 2

Each process sums float32 tensors of its own, all processes at the same time, in turn by each way. The C program is one
loop over the three tensors, compiled for this machine with ``-O3 -march=native``, with ordinary and with non-temporal
stores. Shown is the median, over repetitions, of the slowest process. The machine must be quiet. Exit status 1 if the
kernels take more than 1.1 times the time of the faster C loop for 100 MB.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median

import torch

from shoal.bench.measurement import LoadWatch, here
from shoal.kernels import native
from shoal.kernels.sums import weighted_sum

WEIGHTS = [0.3, 0.5, 0.2]
KERNELS, PLAIN, STREAMING = "compiled kernels", "C, ordinary stores", "C, non-temporal stores"
BAR = 1.1
C = """
#include <immintrin.h>
#include <stddef.h>
void plain(float *restrict out, const float *restrict a, const float *restrict b, const float *restrict c,
           float x, float y, float z, size_t n) {
  for (size_t i = 0; i < n; i++) out[i] = __builtin_fmaf(c[i], z, __builtin_fmaf(b[i], y, a[i] * x));
}
void streaming(float *out, const float *a, const float *b, const float *c, float x, float y, float z, size_t n) {
  const __m256 u = _mm256_set1_ps(x), v = _mm256_set1_ps(y), w = _mm256_set1_ps(z);
  for (size_t i = 0; i + 8 <= n; i += 8)
    _mm256_stream_ps(out + i, _mm256_fmadd_ps(_mm256_loadu_ps(c + i), w, _mm256_fmadd_ps(_mm256_loadu_ps(b + i), v,
                                              _mm256_mul_ps(_mm256_loadu_ps(a + i), u))));
  _mm_sfence();
}
"""


def loaded(library: Path) -> ctypes.CDLL:
    """The C program."""
    program = ctypes.CDLL(str(library))
    for function in (program.plain, program.streaming):
        function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_float] * 3 + [ctypes.c_size_t]
    return program


def aligned(n: int) -> torch.Tensor:
    """``[n]`` float32 that begins at a multiple of 64 bytes, as vectors that are written past the caches must."""
    room = torch.zeros(n + 16)
    return room[-room.data_ptr() % 64 // 4 :][:n]


def ways_of(n: int, program: ctypes.CDLL) -> dict[str, Callable[[], object]]:
    """What is measured, on tensors of ``n`` numbers."""
    a, b, c, out = (aligned(n) for _ in range(4))
    for at, one in enumerate((a, b, c), 1):
        one.fill_(at)
    given = *(one.data_ptr() for one in (out, a, b, c)), *WEIGHTS, n

    def by_torch() -> None:
        for target, *parts in zip(*(torch.split(one, 1 << 18) for one in (out, a, b, c)), strict=True):
            weighted_sum(target, parts[0], WEIGHTS[0], parts[1:], WEIGHTS[1:], implementation="torch")

    return {
        "torch": by_torch,
        KERNELS: lambda: native.weigh(out, [a, b, c], WEIGHTS),
        PLAIN: lambda: program.plain(*given),
        STREAMING: lambda: program.streaming(*given),
        "copy": lambda: out.copy_(a),
    }


def measure(n: int, library: Path, barrier: Barrier, repetitions: int, found: Queue[list[dict[str, float]]]) -> None:
    """What one process does: each way in turn, together with the other processes."""
    torch.set_num_threads(1)
    ways, taken = ways_of(n, loaded(library)), []
    for _ in range(repetitions + 1):
        seconds = {}
        for name, way in ways.items():
            barrier.wait(60)
            began = time.perf_counter()
            way()
            seconds[name] = time.perf_counter() - began
        taken.append(seconds)
    found.put(taken[1:])


def measured(n: int, processes: int, library: Path, repetitions: int) -> dict[str, float]:
    """The median, over repetitions, of the slowest process's seconds, of each way."""
    context = multiprocessing.get_context("spawn")
    barrier, found = context.Barrier(processes), context.Queue()
    started = [
        context.Process(target=measure, args=(n, library, barrier, repetitions, found)) for _ in range(processes)
    ]
    for process in started:
        process.start()
    taken = [found.get(timeout=300) for _ in started]
    for process in started:
        process.join(60)
    return {name: median(max(one[at][name] for one in taken) for at in range(repetitions)) for name in taken[0][0]}


def main() -> int:
    parser = argparse.ArgumentParser(description="weighted sums of three tensors")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1, 16, 100])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--repetitions", type=int, default=15)
    options = parser.parse_args()
    if native.why_not_native() is not None:
        print(f"the compiled kernels are not used: {native.why_not_native()}")
        return 1
    watch, missed = LoadWatch(), []
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "sums.c"), Path(folder, "sums.so")
        source.write_text(C)
        subprocess.run(["cc", "-O3", "-march=native", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        for processes in options.processes:
            for megabytes in options.megabytes:
                taken = measured(int(megabytes * 250_000), processes, library, options.repetitions)
                print(f"{processes} processes, {megabytes:g} MB each")
                ratio = taken[KERNELS] / min(taken[PLAIN], taken[STREAMING])
                for name, seconds in taken.items():
                    print(f"  {name:24}{1e3 * seconds:9.2f} ms{seconds / taken[KERNELS]:7.2f} of the kernels' time")
                if megabytes >= 100 and ratio > BAR:
                    missed.append(f"{processes} processes, {megabytes:g} MB: {ratio:.2f} of the C program's time")
    print(here(), watch.load(), *missed, sep="\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
