"""Agents that learn to read digits are killed, one drawn at random every 30 s, and started again, for ten minutes.

    python benchmarks/restarts.py                      # ten minutes, and one more without kills
    python benchmarks/restarts.py --seconds 120 --every 10

Eight agents (``--agents``) with uneven shards of the digits average their parameters after every step, and let in who
was started again after every 20. Printed: the accuracy of each agent's own model when the time is up, beside that of a
run of as many steps in which nobody is killed; and ``shoal report`` of who was there when, drawn in out/restarts.png.
Needs ``shoal[demo]``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import shoal

ROOT = Path(__file__).parents[1]
BATCH, BETWEEN, PAUSE = 32, 20, 0.1


def agent(seconds: float, most: int) -> None:
    """Train for so long, or so many steps; the last line says how far, and how well."""
    sys.path.insert(0, str(ROOT / "examples"))
    import _data
    from train_digits import make_model

    torch.set_num_threads(1)
    shoal.init()
    rank, size = shoal.rank(), shoal.size()
    digits = _data.load(size, 0.5, 0)
    model = _data.seeded(0, make_model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    optimizer = shoal.DecentralizedOptimizer(sgd, model, topology=shoal.topology.OnePeerExponential(size))
    checkpoint = shoal.Checkpoint(model=model, optimizer=optimizer)
    step = checkpoint.load(None, missing_ok=True)
    batches = digits.shards[rank].batches(BATCH, seed=step * size + rank)
    while step < most:
        images, labels = next(batches)
        optimizer.zero_grad()
        (digits.weight(rank) * cross_entropy(model(images), labels)).backward()
        optimizer.step()
        time.sleep(PAUSE)  # the figure is about who is there, not about the processor
        step += 1
        if step % BETWEEN == 0:
            over = time.time() > float(os.environ["BEGAN"]) + seconds
            if shoal.allreduce(torch.tensor([float(over)])).item() == 1.0:
                break
            checkpoint.save(None, step)
    with torch.no_grad():
        right = (model(digits.test.images).argmax(dim=1) == digits.test.labels).double().mean().item()
    os.write(1, (json.dumps({"rank": rank, "steps": step, "accuracy": right}) + "\n").encode())  # a line at once
    shoal.shutdown()


def run(agents: int, seconds: float, every: float, most: int, record: str) -> list[dict[str, float]]:
    """What each agent that finished said; every so many seconds one is killed, if that is not 0."""
    launch = [sys.executable, "-m", "shoal", "run", "--no-prefix", "-n", str(agents)]
    launch += ["--on-failure", "restart", "--max-restarts", "1000", __file__]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "SHOAL_RECORD": record, "BEGAN": str(time.time())}
    job = subprocess.Popen(
        [*launch, "--agent", str(seconds), str(most)], env=environment, stdout=subprocess.PIPE, text=True
    )
    draw, limit = random.Random(0), time.monotonic() + seconds - every
    while every and time.monotonic() < limit:
        time.sleep(every)
        victims = _pids(job.pid)
        if victims:
            os.kill(draw.choice(victims), signal.SIGKILL)
    said, _ = job.communicate()
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def _pids(launcher: int) -> list[int]:
    """The agents among the launcher's children."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(pid) for pid in children if b"RANK=" in Path(f"/proc/{pid}/environ").read_bytes()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two kills")
    parser.add_argument("--agent", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.agent:
        agent(float(args.agent[0]), int(args.agent[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        killed = run(args.agents, args.seconds, args.every, 1 << 60, folder)
        shown = ["report", folder, "--picture", "out/restarts.png"]
        subprocess.run([sys.executable, "-m", "shoal", *shown], check=True)
    steps = int(max(one["steps"] for one in killed))
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = run(args.agents, 10 * args.seconds, 0, steps, folder)
    for name, found in (("killed and started again", killed), ("undisturbed", undisturbed)):
        accuracy = sorted(one["accuracy"] for one in found)
        right = f"accuracy {accuracy[0]:.1%} to {accuracy[-1]:.1%}"
        print(f"{name}: {len(found)} of {args.agents} agents finished {steps} steps, {right}")


if __name__ == "__main__":
    main()
