"""What a small nonblocking call costs its caller, in a world of one: Python alone, nothing is sent.

    python benchmarks/submitting.py

Prints microseconds for a submission with ``out=`` of 4 KB, and for its beginning, sum and end. To compare two versions,
run it with each in turn, several times: ``PYTHONPATH=other/src python benchmarks/submitting.py``.
"""

from __future__ import annotations

import statistics
import time

import torch

import shoal

CALLS, REPETITIONS = 100, 60


def main() -> None:
    torch.set_num_threads(1)
    shoal.init()
    tensors = [torch.full((1024,), float(k)) for k in range(CALLS)]
    outs = [torch.empty(1024) for _ in range(CALLS)]
    submitting, rest = [], []
    for _ in range(REPETITIONS):
        began = time.perf_counter()
        handles = [shoal.nonblocking.neighbor_allreduce(x, out=out) for x, out in zip(tensors, outs, strict=True)]
        submitted = time.perf_counter()
        for handle in handles:
            handle.wait()
        submitting.append(submitted - began)
        rest.append(time.perf_counter() - submitted)
    for what, seconds in (("submitting", submitting), ("the rest", rest)):
        print(f"{what}: {1e6 * statistics.median(seconds) / CALLS:.1f} us a call")
    shoal.shutdown()


if __name__ == "__main__":
    main()
