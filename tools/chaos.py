"""Train under drawn faults, many times, and print what came of each kind: the table of docs/survival.md.

python tools/chaos.py              # 100 runs, five minutes
python tools/chaos.py 1000 --first 0
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from rich.progress import track

from support.chaos import Draw, Found, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="?", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    args = parser.parse_args()
    found: dict[str, list[Found]] = {}
    failed = []
    for seed in track(range(args.first, args.first + args.count), "chaos"):
        try:
            came = run(seed)
        except AssertionError as error:
            failed.append((seed, str(error)))
        else:
            found.setdefault(Draw.of(seed).kind, []).append(came)
    print("| fault | runs | longest step, median | worst | from where they must end, at most |")
    print("| --- | --- | --- | --- | --- |")
    for kind, runs in sorted(found.items()):
        seconds, distance = [one.seconds for one in runs], max(one.distance for one in runs)
        print(f"| {kind} | {len(runs)} | {statistics.median(seconds):.2f} s | {max(seconds):.2f} s | {distance:.0e} |")
    for seed, text in failed:
        print(f"seed {seed} failed: {text}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
