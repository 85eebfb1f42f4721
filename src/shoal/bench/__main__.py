"""``python -m shoal.bench PART...``: what every agent of a job of ``shoal bench`` runs."""

from __future__ import annotations

import argparse
from dataclasses import asdict

import torch
import torch.distributed as dist

import shoal

from . import parts
from .meter import Reporter

PARTS = {
    "large": parts.large,
    "small": parts.small,
    "windows": parts.windows,
    "latency": parts.latency,
    "memory": parts.memory,
    "scaling": parts.scaling,
    "wire": parts.wire,
}


def main() -> None:
    """Run the measurements, beside a process group of Gloo, and report to the process that started the job."""
    parser = argparse.ArgumentParser(prog="python -m shoal.bench", description=__doc__)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--quick", action="store_true", help="small sizes and few repetitions")
    args = parser.parse_args()
    reporter = Reporter()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shoal.init()
    found = [figures for part in args.parts for figures in PARTS[part](reporter, args.quick)]
    reporter.send({"figures": [asdict(figures) for figures in found]})
    shoal.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
