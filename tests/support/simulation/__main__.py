"""``python -m support.simulation --seed N``: replay a seed, from the folder ``tests``; ``--count`` more."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType

SAMPLED = 0.001
"""Seconds of CPU time between two samples of ``--parts``."""
HERE = Path(__file__).parent
PACKAGE = HERE.parents[2] / "src" / "shoal"


class Parts:
    """Samples what the process does. A library's time is that of its caller."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()

    def __enter__(self) -> Parts:
        signal.signal(signal.SIGPROF, self._sample)
        signal.setitimer(signal.ITIMER_PROF, SAMPLED, SAMPLED)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0.0)

    def _sample(self, _number: int, frame: FrameType | None) -> None:
        while frame is not None:
            file = Path(frame.f_code.co_filename)
            if file.parent == HERE:
                self.outcomes[f"simulation/{file.name}"] += 1
                return
            if PACKAGE in file.parents:
                self.outcomes[f"shoal/{file.relative_to(PACKAGE).parts[0]}"] += 1
                return
            frame = frame.f_back

    def __str__(self) -> str:
        total = self.outcomes.total()
        return "\n".join(f"{count / total:6.1%}  {part}" for part, count in self.outcomes.most_common())


def main() -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":  # else sets of strings have another order in every process
        os.execve(
            sys.executable,
            [sys.executable, "-m", "support.simulation", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )
    import torch
    import torch._dynamo  # which the first optimizer would import, within a run that is measured

    from .runs import run, shrunk
    from .scenarios import Scenario

    parser = argparse.ArgumentParser(prog="python -m support.simulation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first seed that fails")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--agents", type=int, help="in all runs so many agents, and no faults")
    parser.add_argument("--operations", type=int, default=30, help="with --agents: of each agent")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each seed; the fastest one counts")
    parser.add_argument("--parts", action="store_true", help="which parts take the CPU time")
    args = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # a full collection passes the libraries' objects: a fifth of a second, every 40 runs
    took, failed, parts = 0.0, 0, Parts()
    for seed in range(args.seed, args.seed + args.count):
        scenario = Scenario.calm(seed, args.agents, args.operations) if args.agents else Scenario.draw(seed)
        times = []
        for _ in range(args.repeat):
            began = time.process_time()
            if args.parts:
                with parts:
                    report = run(scenario)
            else:
                report = run(scenario)
            times.append(time.process_time() - began)
        took += min(times)
        if not report.problems:
            continue
        failed += 1
        print(f"seed {seed} fails: {report.problems[0]}", flush=True)
        if not args.no_shrink:
            short = shrunk(report.scenario)
            print(f"The shortest run found that fails:\n{short}\n" + "\n".join(run(short).problems), flush=True)
        if not args.keep_going:
            break
    count = seed - args.seed + 1
    print(f"{count} seeds, {failed} failed, {took:.1f} s of CPU, {1000 * took / count:.1f} ms for each")
    if args.parts:
        print(parts)
    return 1 if failed else 0


sys.exit(main())
