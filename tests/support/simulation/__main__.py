"""``python -m support.simulation --seed N``: replay a seed, from the folder ``tests``; ``--count`` more."""

from __future__ import annotations

import argparse
import os
import sys
import time


def main() -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":  # else sets of strings have another order in every process
        os.execve(
            sys.executable,
            [sys.executable, "-m", "support.simulation", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )
    import torch

    from .runs import run, shrunk
    from .scenarios import Scenario

    parser = argparse.ArgumentParser(prog="python -m support.simulation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first seed that fails")
    parser.add_argument("--no-shrink", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    began, failed = time.process_time(), 0
    for seed in range(args.seed, args.seed + args.count):
        report = run(Scenario.draw(seed))
        if not report.problems:
            continue
        failed += 1
        print(f"seed {seed} fails: {report.problems[0]}", flush=True)
        if not args.no_shrink:
            short = shrunk(report.scenario)
            print(f"The shortest run found that fails:\n{short}\n" + "\n".join(run(short).problems), flush=True)
        if not args.keep_going:
            break
    print(f"{seed - args.seed + 1} seeds, {failed} failed, {time.process_time() - began:.1f} s of CPU")
    return 1 if failed else 0


sys.exit(main())
