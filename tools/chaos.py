"""Train under drawn faults, many times, and print what came of each kind: the table of docs/survival.md.

python tools/chaos.py              # 100 runs, five minutes
python tools/chaos.py 1000 --first 0
python tools/chaos.py --returns    # whoever fails is started again
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from rich.progress import track

from support import chaos, chaos_returns


def losses(seeds: Sequence[int]) -> list[tuple[int, str]]:
    """Those that are left go on. Prints a table; the seeds that failed, and how."""
    found: dict[str, list[chaos.Found]] = {}
    failed = []
    for seed in track(seeds, "chaos"):
        try:
            came = chaos.run(seed)
        except AssertionError as error:
            failed.append((seed, str(error)))
        else:
            found.setdefault(chaos.Draw.of(seed).kind, []).append(came)
    print("| fault | runs | longest step, median | worst | from where they must end, at most |")
    print("| --- | --- | --- | --- | --- |")
    for kind, runs in sorted(found.items()):
        seconds, distance = [one.seconds for one in runs], max(one.distance for one in runs)
        print(f"| {kind} | {len(runs)} | {statistics.median(seconds):.2f} s | {max(seconds):.2f} s | {distance:.0e} |")
    return failed


def returns(seeds: Sequence[int]) -> list[tuple[int, str]]:
    """Whoever fails comes back. As :func:`losses`."""
    found: dict[str, list[chaos_returns.Found]] = {}
    failed = []
    for seed in track(seeds, "chaos, and back"):
        try:
            came = chaos_returns.run(seed)
        except AssertionError as error:
            failed.append((seed, str(error)))
        else:
            found.setdefault(chaos_returns.Draw.of(seed).kind, []).append(came)
    print("| fault | runs | started again | to enter, median | worst | from where they must end, at most |")
    print("| --- | --- | --- | --- | --- | --- |")
    for kind, runs in sorted(found.items()):
        seconds, distance = [one for run in runs for one in run.seconds] or [0.0], max(one.distance for one in runs)
        entered = f"{statistics.median(seconds):.2f} s | {max(seconds):.2f} s"
        print(f"| {kind} | {len(runs)} | {sum(one.starts for one in runs)} | {entered} | {distance:.0e} |")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="?", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--returns", action="store_true", help="whoever fails is started again")
    args = parser.parse_args()
    seeds = range(args.first, args.first + args.count)
    failed = returns(seeds) if args.returns else losses(seeds)
    for seed, text in failed:
        print(f"seed {seed} failed: {text}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
