"""``python -m support.simulation.mutations``: the first seed that notices each of some defects that are put in."""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .scenarios import Scenario

SOURCE = Path(__file__).parents[3] / "src"
AGREEMENT, REJOIN, RECOVERY = (f"fault_tolerance/{name}.py" for name in ("agreement", "rejoin", "recovery"))
MUTATIONS = (
    ("resuming", "transport/retransmit.py", "        self._kept.extend(self._again)\n", ""),
    ("resuming", "transport/retransmit.py", "self._kept, self._again = deque(), self._kept", "self._kept = deque()"),
    ("resuming", "transport/network_link.py", "before._chunk.at, before._chunk.rest = before._chunk.begin, 0", "pass"),
    ("matching", "execution/matching.py", "if message.round >= self._begun.get(message.name, 0):", "if False:"),
    ("matching", "execution/matching.py", "if stage is None or message.stage > stage.number:", "if stage is None:"),
    ("matching", "execution/matching.py", "early = self.early.pop(key, None)", "early = self.early.get(key)"),
    ("matching", "execution/matching.py", "if key[0] == stage]", "if key[0] <= stage + 1]"),
    ("fusion", "execution/fusion.py", "                operation.stages_sent = fused.stages_sent\n", ""),
    ("fusion", "execution/fusion.py", "        for received in had:\n            self._unpack(received)\n", ""),
    ("fusion", "execution/fusion.py", "if fused is None and any(", "if fused is None and False and any("),
    (
        "agreement",
        AGREEMENT,
        "if not self._gate.paused or self.missing or self._membership.view.is_cut_off:",
        "if not self._gate.paused or self._membership.view.is_cut_off:",
    ),
    (
        "agreement",
        AGREEMENT,
        "begun[name] = max(count, begun.get(name, 0))",
        "begun[name] = count",
    ),
    ("agreement", AGREEMENT, "elif self._all_have_result(operation, reports):", "elif False:"),
    ("agreement", AGREEMENT, "if min(keepers, default=-1) == self._rank:", "if False:"),
    (
        "failures",
        "fault_tolerance/failure_detector.py",
        "return self._after_those_before(departure)",
        "return departure",
    ),
    ("sender", "execution/sender.py", "        del self._unacknowledged[token]\n", ""),
    ("recovery", RECOVERY, "        del stage.arrived[source]\n", "        pass\n"),
    ("recovery", RECOVERY, "    stage.missing.difference_update(gone)\n", ""),
    ("rejoin", REJOIN, "        self._matcher.begin_at(decisions[-1].begun)\n", ""),
    ("rejoin", REJOIN, "            self._failures.forget(rank)\n", ""),
    ("rejoin", AGREEMENT, "set(self._membership.view.needed)", "{*self._membership.view.left}"),
    ("rejoin", AGREEMENT, "if late else self.plan", "if False else self.plan"),
    ("rejoin", "ops/state_transfer.py", "begun[name] = max(count, begun.get(name, 0))", "begun[name] = count"),
    (
        "calls pending",
        "execution/submission_gate.py",
        "{rank for rank in view.left if stage.has_all_of(rank)} if view.left else ()",
        "()",
    ),
    (
        "calls pending",
        "engine/shutdown.py",
        """                self._fusion.begin()
                # Another thread may""",
        "                # Another thread may",
    ),
    (
        "calls pending",
        "engine/shutdown.py",
        "self._drive_until(lambda: all(operation.has_entered for operation in matcher.in_flight()), deadline)",
        "pass",
    ),
    (
        "leaving",
        "engine/shutdown.py",
        "self._drive_until(lambda: sender.drained and not matcher.in_flight(), deadline)",
        "pass",
    ),
    ("leaving", "transport/router.py", "if to_all or peer not in self.links or self.links[peer].idle:", "if True:"),
    ("leaving", "runtime/bootstrap.py", "if any(rank not in view.left and", "if True or any(rank not in view.left and"),
    (
        "leaving",
        "fault_tolerance/failure_detector.py",
        "        self._router.shut_out(rank)\n",
        "        self._router.drop(rank)\n",
    ),
    (
        "leaving",
        "fault_tolerance/failure_detector.py",
        "if shows or hears else clock.monotonic() + GRACE",
        "if shows else clock.monotonic() + GRACE",
    ),
    (
        "leaving",
        "fault_tolerance/failure_detector.py",
        "shows = not departure.died and not own and self._router.reaches(rank)",
        "shows = False",
    ),
    ("leaving", "execution/progress.py", "                    self._take_backlog()\n", ""),
    ("rejoin", "transport/acceptor.py", "            self._kept.append((source, message))\n", ""),
)
"""What part, which file, what is replaced by what: once."""
AFFECTED: dict[str, Callable[[Scenario], bool]] = {
    **dict.fromkeys(("agreement", "recovery", "rejoin"), lambda scenario: scenario.on_loss == "continue"),
    "calls pending": lambda scenario: any(fault.kind == "leaves pending" for fault in scenario.faults),
    "resuming": lambda scenario: any(fault.kind == "cut" for fault in scenario.faults),
}
"""The scenarios that reach a part, where few do. The others are not run."""


def first_failure(mutation: tuple[str, str, str, str], most: int, seconds: float) -> str:
    """The first seed that fails, of so many, and how; or how many were tried in so many seconds of CPU."""
    part, name, old, new = mutation
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(SOURCE / "shoal", Path(folder, "shoal"), ignore=shutil.ignore_patterns("__pycache__"))
        path = Path(folder, "shoal", name)
        text = path.read_text()
        assert text.count(old) >= 1, f"{name} has no {old!r}"
        path.write_text(text.replace(old, new, 1))
        result = Path(folder, "found")
        child = os.fork()  # which has the libraries, and imports the package from the copy
        if child == 0:
            try:
                result.write_text(_search(folder, part, most, seconds))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        return result.read_text() if result.exists() else "the process ended"


def _search(folder: str, part: str, most: int, seconds: float) -> str:
    sys.path.insert(0, folder)
    from .runs import run
    from .scenarios import Scenario

    gc.freeze()
    affected = AFFECTED.get(part, lambda scenario: True)
    for seed in range(most):
        if time.process_time() > seconds:
            return f"none of {seed}"
        scenario = Scenario.draw(seed)
        problems = run(scenario).problems if affected(scenario) else []
        if problems:
            return f"{seed}: {problems[0]}"
    return f"none of {most}"


def main() -> None:
    if os.environ.get("PYTHONHASHSEED") != "0":
        command = [sys.executable, "-m", "support.simulation.mutations", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": "0"})
    import torch
    import torch._dynamo

    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(prog="python -m support.simulation.mutations")
    parser.add_argument("most", type=int, nargs="?", default=5000, help="seeds for each")
    parser.add_argument("seconds", type=float, nargs="?", default=3600.0, help="of CPU for each")
    parser.add_argument("--only", type=int, nargs="+", default=range(len(MUTATIONS)), help="their places in the table")
    args = parser.parse_args()
    for number in args.only:
        part, _, old, new = MUTATIONS[number]
        print(f"{number}, {part}: {old.strip()[:60]!r} -> {new.strip()!r}", flush=True)
        print(f"    {first_failure(MUTATIONS[number], args.most, args.seconds)[:300]}", flush=True)


if __name__ == "__main__":
    main()
