"""What going on after a loss costs where nothing is lost, and how long those that are left take where somebody is.

    python benchmarks/survival.py                      # four minutes; the machine must be quiet
    python benchmarks/survival.py --only recovery      # or undisturbed, or digits
    python benchmarks/survival.py --agents 4           # 2 if not given

``undisturbed``: the median and the least time of a call with ``on_loss="raise"`` and ``"continue"``, and the ratio. The
agents leave and meet again between the two, so both are measured in the same processes and minutes.

``recovery``: agents average, and one kills itself with SIGKILL between two rounds; from that moment to the end of the
first operation of all that is without it, over all that are left.

``digits``: eight agents run examples/train_digits.py, and half of them, rank 0 first, are killed one by one. What is
printed and drawn (out/survival.png) is of those that are left. Then the same with all four killed after the first
epochs, which is what the data of the other four give by themselves; and without a loss. Needs ``shoal[demo]``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import shoal

KIB, MIB = 1 << 10, 1 << 20
TURNS, KILLS = 11, 15
POLICIES = ("raise", "continue")
Call = Callable[[], object]


def averages(nbytes: int) -> Call:
    x, out = torch.ones(nbytes // 4), torch.empty(nbytes // 4)
    return lambda: shoal.neighbor_allreduce(x, out=out)


def burst() -> Call:
    xs = [torch.ones(KIB) for _ in range(100)]

    def call() -> None:
        for handle in [shoal.nonblocking.neighbor_allreduce(x) for x in xs]:
            handle.wait()

    return call


def means(nbytes: int) -> Call:
    x, out = torch.ones(nbytes // 4), torch.empty(nbytes // 4)
    return lambda: shoal.nonblocking.allreduce(x, out=out).wait()


def training(algorithm: shoal.algorithms.Algorithm) -> Call:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))  # 16 MiB
    plain = torch.optim.SGD(model.parameters(), lr=1e-6)
    optimizer = shoal.DecentralizedOptimizer(plain, model, algorithm)
    data = torch.randn(16, 1024)

    def call() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    return call


CASES: dict[str, tuple[Callable[[], Call], int]] = {
    "neighbor_allreduce, 4 B": (lambda: averages(4), 300),
    "neighbor_allreduce, 1 MiB": (lambda: averages(MIB), 100),
    "neighbor_allreduce, 25 MiB": (lambda: averages(25 * MIB), 8),
    "100 x 4 KiB in flight": (burst, 30),
    "allreduce, 4 B": (lambda: means(4), 300),
    "allreduce, 64 KiB": (lambda: means(64 * KIB), 200),
    "allreduce, 1 MiB": (lambda: means(MIB), 100),
    "allreduce, 25 MiB": (lambda: means(25 * MIB), 8),
    "barrier": (lambda: shoal.barrier, 300),
    "a step of 16 MiB, parameters": (lambda: training(shoal.algorithms.GradientDescent(1.0)), 10),
    "a step of 16 MiB, gradients": (lambda: training(shoal.algorithms.ParallelGradientDescent(1.0)), 10),
    "a step of 16 MiB, exact diffusion": (lambda: training(shoal.algorithms.ExactDiffusion(1.0, lazy=True)), 10),
}
"""By name: makes the call, and how often it is repeated in a turn."""


def undisturbed() -> None:
    """Print seconds by case and policy, as rank 0."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[float]]] = {}
    for turn in range(2 * TURNS):
        policy = POLICIES[turn % 2]
        shoal.init(on_loss=policy)
        for name, (make, count) in CASES.items():
            call = make()
            for _ in range(3):
                call()
            shoal.barrier()
            begun = time.perf_counter()
            for _ in range(count):
                call()
            seconds = (time.perf_counter() - begun) / count
            found.setdefault(name, {}).setdefault(policy, []).append(seconds)
        rank = shoal.rank()
        shoal.shutdown()
    if rank == 0:
        print(json.dumps(found), flush=True)


def recovery(victim: int) -> None:
    """Average until the victim has killed itself, then print how long it took to go on, as the lowest rank left."""
    shoal.init(on_loss="continue")
    rank, x = shoal.rank(), torch.ones(KIB)
    for _ in range(30):
        shoal.neighbor_allreduce(x)
    moment = shoal.broadcast(torch.tensor([time.time() + 0.2], dtype=torch.float64), 1 - min(victim, 1)).item()
    there = list(range(shoal.size()))
    while len(there) == shoal.size():
        if rank == victim and time.time() >= moment:
            print(time.time(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        shoal.neighbor_allreduce(x)
        there = shoal.allgather(torch.tensor([rank])).tolist()
    ended = shoal.allgather(torch.tensor([time.time()], dtype=torch.float64))
    if rank == min(there):
        print(float(ended.max()), flush=True)
    shoal.shutdown()


def said_by(agents: int, *arguments: str, policy: str = "raise") -> str:
    launch = [sys.executable, "-m", "shoal", "run", "--no-prefix", "-n", str(agents)]
    launch += ["--on-failure", "continue"] if policy == "continue" else []
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, __file__, *arguments], env=environment, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    return done.stdout.decode()


def show_undisturbed(agents: int) -> None:
    for name, by in json.loads(said_by(agents, "--agent", "undisturbed")).items():
        said = []
        for which, of in (("median", statistics.median), ("least", min)):
            plain, going_on = (of(by[policy]) for policy in POLICIES)
            said.append(
                f"{which}: raise {1e3 * plain:.3f} ms, continue {1e3 * going_on:.3f} ms, ratio {going_on / plain:.3f}"
            )
        print(f"{name}: {'; '.join(said)}")


def show_recovery(agents: int) -> None:
    seconds = []
    for number in range(KILLS):
        said = said_by(agents, "--agent", "recovery", str(number % agents), policy="continue").split()
        died, ended = sorted(float(line) for line in said)
        seconds.append(ended - died)
    print(
        f"recovery of {agents - 1} agents from a SIGKILL, {KILLS} times: median {1e3 * statistics.median(seconds):.0f} "
        f"ms, worst {1e3 * max(seconds):.0f} ms"
    )


def show_digits(agents: int = 8) -> None:
    example = Path(__file__).parents[1] / "examples" / "train_digits.py"
    arguments = [str(example), "--no-baselines", "--epochs", "30", "--picture"]
    launch = [sys.executable, "-m", "shoal", "run", "--no-prefix", "-n", str(agents), "--on-failure", "continue"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    half = range(agents // 2)
    for name, victims, at_once in (("survival", half, 1), ("at once", half, len(half)), ("undisturbed", range(0), 0)):
        print(f"{name}:", flush=True)
        picture = f"out/{name}.png"
        job = subprocess.Popen([*launch, *arguments, picture], env=environment, stdout=subprocess.PIPE, text=True)
        assert job.stdout is not None
        left = list(victims)
        for line in job.stdout:
            print(line, end="", flush=True)
            if " epoch " in line and left:
                for pid in [_pid_of(job.pid, rank) for rank in left[:at_once]]:
                    os.kill(pid, signal.SIGKILL)
                del left[:at_once]
        if job.wait():
            raise SystemExit("nobody finished")


def _pid_of(launcher: int, rank: int) -> int:
    """The process of a rank among the launcher's children."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    wanted = f"RANK={rank}".encode()
    return next(int(pid) for pid in children if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("undisturbed", "recovery", "digits"))
    parser.add_argument("--agents", type=int, default=2)
    parser.add_argument("--agent", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.agent:
        undisturbed() if args.agent[0] == "undisturbed" else recovery(int(args.agent[1]))
        return
    print(f"load average {os.getloadavg()[0]:.2f}")
    if args.only in (None, "undisturbed"):
        show_undisturbed(args.agents)
    if args.only in (None, "recovery"):
        show_recovery(max(3, args.agents))
    if args.only in (None, "digits"):
        show_digits()


if __name__ == "__main__":
    main()
