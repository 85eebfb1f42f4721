"""Train under drawn faults, many times, and print what came of each kind: the tables of docs/fault-injection.md.

python tools/chaos.py              # 100 runs, seven minutes
python tools/chaos.py 1000 --first 0
python tools/chaos.py --locked 20  # who holds the interpreter's lock does so for longer
python tools/chaos.py --returns    # whoever fails is started again
python tools/chaos.py --links      # each agent is a machine, and cables are slow, or cut; as root
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from rich.progress import track

from support import chaos, chaos_acts, chaos_links, chaos_rejoins

Run = TypeVar("Run")
Failed = list[tuple[int, str]]


def _collect(
    seeds: Sequence[int], what: str, run: Callable[[int], Run], kinds: Callable[[int], list[str]]
) -> tuple[dict[str, list[Run]], Failed]:
    """What came of the runs, by kind, and of those that failed."""
    found: dict[str, list[Run]] = {}
    failed: Failed = []
    began = time.monotonic()
    for seed in track(seeds, what):
        try:
            came = run(seed)
        except AssertionError as error:
            failed.append((seed, str(error)))
            print(f"seed {seed} failed: {error}", flush=True)
        else:
            for kind in kinds(seed):
                found.setdefault(kind, []).append(came)
    print(f"{(time.monotonic() - began) / len(seeds):.2f} s each\n")
    return dict(sorted(found.items())), failed


def losses(seeds: Sequence[int], locked: float, over: str = "") -> Failed:
    """Those that are left go on. Prints a table; the seeds that failed, and how."""

    def kinds(seed: int) -> list[str]:
        draw = chaos.Draw.of(seed)
        return [draw.kind, *(f"*{condition}*" for condition in draw.conditions)]

    found, failed = _collect(seeds, "chaos", lambda seed: chaos.run(seed, locked, over), kinds)
    _print_steps(found)
    return failed


def links(seeds: Sequence[int], over: str = "") -> Failed:
    """Cables are slow, or cut. As :func:`losses`."""
    kinds: Callable[[int], list[str]] = lambda seed: [chaos_links.Draw.of(seed).kind]  # noqa: E731
    found, failed = _collect(seeds, "chaos of links", lambda seed: chaos_links.run(seed, over), kinds)
    _print_steps(found)
    return failed


def _print_steps(found: Mapping[str, Sequence[chaos.RunFigures | chaos_links.RunFigures]]) -> None:
    print("| fault | runs | longest step, median | worst | from where they must end, at most |")
    print("| --- | --- | --- | --- | --- |")
    for kind, runs in found.items():
        seconds, distance = [one.seconds for one in runs], max(one.distance for one in runs)
        print(f"| {kind} | {len(runs)} | {statistics.median(seconds):.2f} s | {max(seconds):.2f} s | {distance:.0e} |")


def returns(seeds: Sequence[int], over: str = "") -> Failed:
    """Whoever fails comes back. As :func:`losses`."""

    def kinds(seed: int) -> list[str]:
        draw = chaos_rejoins.Draw.of(seed, over)
        return [draw.kind, *(f"*{condition}*" for condition in draw.conditions)]

    found, failed = _collect(seeds, "chaos, and back", lambda seed: chaos_rejoins.run(seed, over), kinds)
    print("| fault | runs | started again | to enter, median | worst | from where they must end, at most |")
    print("| --- | --- | --- | --- | --- | --- |")
    for kind, runs in found.items():
        seconds, distance = [one for run in runs for one in run.seconds] or [0.0], max(one.distance for one in runs)
        entered = f"{statistics.median(seconds):.2f} s | {max(seconds):.2f} s"
        print(f"| {kind} | {len(runs)} | {sum(one.starts for one in runs)} | {entered} | {distance:.0e} |")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="?", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--locked", type=float, default=chaos_acts.LOCKED_SECONDS, help="seconds")
    parser.add_argument("--returns", action="store_true", help="whoever fails is started again")
    parser.add_argument("--links", action="store_true", help="each agent is a machine, and cables are slow, or cut")
    parser.add_argument("--over", default="", help="the transport, as process-group, if not the one that is drawn")
    args = parser.parse_args()
    seeds = range(args.first, args.first + args.count)
    if args.returns:
        failed = returns(seeds, args.over)
    else:
        failed = links(seeds, args.over) if args.links else losses(seeds, args.locked, args.over)
    if args.returns:
        drawn = sum(len(faults) for seed in seeds for faults in chaos_rejoins.Draw.of(seed, args.over).faults.values())
    else:
        drawn = len(seeds) if args.links else sum(len(chaos.Draw.of(seed).faults) for seed in seeds)
    print(f"\n{len(seeds)} runs, {drawn} faults; {len(failed)} runs failed")
    if failed:
        print(f"failed: {', '.join(str(seed) for seed, _ in failed)}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
