"""How fast compressors encode, and decode into a sum, on one core: gigabytes of float32 a second.

    python benchmarks/codec.py
    python benchmarks/codec.py --only "QSGD()" "MinMaxUInt8()" --numbers 1000000

Beside each a plain copy and a plain ``add_(alpha=)`` of whole tensors, in turn with it: what a compressor takes is told
as a multiple of these, too. Counted is processor time, which waiting for other programs does not lengthen; the least of
several runs. The random numbers of QSGD and RandomK are part of it, and told once more by themselves. Exit status 1 if
a compressor of 8 bits is below 1 GB/s.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch

from shoal.compression import QSGD, Cast, Compressor, Identity, MinMaxUInt8, RandomK, Shrunk, Sign, TopK, Zstd
from shoal.compression.random_numbers import Redrawn

COMPRESSORS: dict[str, Compressor] = {
    "Identity()": Identity(),
    "Cast(bfloat16)": Cast(torch.bfloat16),
    "Cast(float16)": Cast(torch.float16),
    "MinMaxUInt8()": MinMaxUInt8(),
    "MinMaxUInt8(2048)": MinMaxUInt8(2048),
    "QSGD()": QSGD(),
    "QSGD(7)": QSGD(7),
    "QSGD(7, chunk=64)": QSGD(7, chunk=64),
    "QSGD(1)": QSGD(1),
    "Shrunk(QSGD(7))": Shrunk(QSGD(7)),
    "Sign()": Sign(),
    "TopK(0.01)": TopK(0.01),
    "TopK(0.1)": TopK(0.1),
    "RandomK(0.01)": RandomK(0.01),
    "Zstd(Cast(bfloat16))": Zstd(Cast(torch.bfloat16)),
    "Zstd(MinMaxUInt8())": Zstd(MinMaxUInt8()),
    "Zstd(4 bits)": Zstd(QSGD(7, chunk=64)),
}
EIGHT_BITS = ("MinMaxUInt8()", "QSGD()")
BAR = 1.0
"""GB/s of float32, of compressors of eight bits."""


def draws() -> Redrawn:
    return Redrawn(1, 0, 0)


def in_turn(ways: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """The least seconds of each."""
    least = dict.fromkeys(ways, float("inf"))
    until = time.monotonic() + seconds
    runs = 0
    while time.monotonic() < until or runs < 3:
        for name, way in ways.items():
            began = time.thread_time()
            way()
            least[name] = min(least[name], time.thread_time() - began)
        runs += 1
    return least


def measure(compressor: Compressor, d: int, seconds: float) -> dict[str, float]:
    x = torch.randn(d, generator=torch.Generator().manual_seed(1))
    total, plain = torch.zeros_like(x), torch.zeros_like(x)
    data = compressor.encode(x, draws())
    ways: dict[str, Callable[[], object]] = {
        "copy": lambda: plain.copy_(x),
        "add": lambda: plain.add_(x, alpha=0.25),
        "encode": lambda: compressor.encode(x, draws()),
        "decode": lambda: compressor.add_decoded(total, data, 0.25, draws()),
    }
    return in_turn(ways, seconds) | {"bytes": data.numel()}


def main() -> int:
    parser = argparse.ArgumentParser(description="how fast compressors encode and decode")
    parser.add_argument("--numbers", type=int, nargs="*", default=[1_000_000, 16_000_000])
    parser.add_argument("--only", nargs="*", default=list(COMPRESSORS), choices=list(COMPRESSORS))
    parser.add_argument("--seconds", type=float, default=2.0, help="of each compressor")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    missed = []
    for d in arguments.numbers:
        print(f"{d:,} numbers: GB/s of float32 on one core; times a copy, times an add of whole tensors")
        drawn = torch.empty(d)
        alone = in_turn({"": lambda: draws().stream(drawn).fill(0, 0, drawn)}, arguments.seconds)  # noqa: B023
        print(f"random numbers alone: {4e-9 * d / alone['']:.2f}")
        print(f"{'':20}{'bytes':>10}{'encode':>9}{'copies':>8}{'decode + sum':>14}{'adds':>7}{'copy':>9}{'add':>7}")
        for name in arguments.only:
            found = measure(COMPRESSORS[name], d, arguments.seconds)
            speed = {way: 4e-9 * d / found[way] for way in ("copy", "add", "encode", "decode")}
            print(
                f"{name:20}{found['bytes'] / (4 * d):10.2%}{speed['encode']:9.2f}"
                f"{found['encode'] / found['copy']:8.1f}{speed['decode']:14.2f}{found['decode'] / found['add']:7.1f}"
                f"{speed['copy']:9.1f}{speed['add']:7.1f}"
            )
            if name in EIGHT_BITS and min(speed["encode"], speed["decode"]) < BAR:
                missed.append(f"{name} of {d:,} numbers")
    if missed:
        print(f"below {BAR:g} GB/s: {', '.join(missed)}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
