"""``python -m support.simulation.mutations``: the first seed that notices each of some defects that are put in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src"
AGREEMENT, REJOIN, RECOVERY = (f"fault_tolerance/{name}.py" for name in ("agreement", "rejoin", "recovery"))
MUTATIONS = (
    ("resuming", "transport/retransmit.py", "        self._kept.extend(self._again)\n", ""),
    ("resuming", "transport/retransmit.py", "self._kept, self._again = deque(), self._kept", "self._kept = deque()"),
    ("resuming", "transport/network_link.py", "before._chunk.at, before._chunk.rest = before._chunk.begin, 0", "pass"),
    ("matching", "operations/matching.py", "if message.round >= self._begun.get(message.name, 0):", "if False:"),
    ("matching", "operations/matching.py", "if stage is None or message.stage > stage.number:", "if stage is None:"),
    ("matching", "operations/matching.py", "early = self.early.pop(key, None)", "early = self.early.get(key)"),
    ("matching", "operations/matching.py", "if key[0] == stage]", "if key[0] <= stage + 1]"),
    ("fusion", "operations/fusion.py", "                operation.sent = fused.sent\n", ""),
    ("fusion", "operations/fusion.py", "        for received in had:\n            self._unpack(received)\n", ""),
    ("fusion", "operations/fusion.py", "if fused is None and any(", "if fused is None and False and any("),
    (
        "agreement",
        AGREEMENT,
        "if not self._gate.paused or self.missing:",
        "if not self._gate.paused:",
    ),
    (
        "agreement",
        AGREEMENT,
        "begun[name] = max(count, begun.get(name, 0))",
        "begun[name] = count",
    ),
    ("agreement", AGREEMENT, "elif _all_have_result(operation, reports):", "elif False:"),
    ("agreement", AGREEMENT, "if min(keepers, default=-1) == self._rank:", "if False:"),
    ("failures", "fault_tolerance/failures.py", "return self._after_those_before(said)", "return said"),
    ("sender", "operations/sender.py", "        del self._unacknowledged[token]\n", ""),
    ("engine", RECOVERY, "        del stage.arrived[source]\n", "        pass\n"),
    ("engine", RECOVERY, "    stage.missing.difference_update(gone)\n", ""),
    ("rejoin", REJOIN, "        self._matcher.begin_at(begun)\n", ""),
    ("rejoin", REJOIN, "            self._failures.forget(rank)\n", ""),
    ("rejoin", AGREEMENT, "        self._missed.difference_update(ranks)\n", ""),
    ("rejoin", AGREEMENT, "if late else self.now", "if False else self.now"),
    ("rejoin", "ops/state_transfer.py", "begun[name] = max(count, begun.get(name, 0))", "begun[name] = count"),
    ("rejoin", "transport/pending_peers.py", "            self._kept.append((source, message))\n", ""),
)
"""What part, which file, what is replaced by what: once."""


def first_failure(mutation: tuple[str, str, str, str], most: int, seconds: float) -> str:
    """The first seed that fails, of so many, and how."""
    _, name, old, new = mutation
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(SOURCE / "shoal", Path(folder, "shoal"), ignore=shutil.ignore_patterns("__pycache__"))
        path = Path(folder, "shoal", name)
        text = path.read_text()
        assert text.count(old) >= 1, f"{name} has no {old!r}"
        path.write_text(text.replace(old, new, 1))
        tests = Path(__file__).parents[2]
        command = [sys.executable, "-m", "support.simulation", "--count", str(most), "--no-shrink"]
        env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{tests}"}
        try:
            done = subprocess.run(command, env=env, cwd=tests, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"none in {seconds:g} s"
        return (done.stdout + done.stderr).splitlines()[0][:150]


def main() -> None:
    most, seconds = int((sys.argv[1:] or ["5000"])[0]), float((sys.argv[2:] or ["3600"])[0])
    for mutation in MUTATIONS:
        print(f"{mutation[0]}: {mutation[2].strip()[:60]!r} -> {mutation[3].strip()!r}", flush=True)
        print(f"    {first_failure(mutation, most, seconds)}", flush=True)


if __name__ == "__main__":
    main()
