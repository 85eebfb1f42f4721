"""What trust costs: two agents exchange and average a tensor, with TLS and without, with the finite guard and without.

    pip install 'shoal[tls]'
    sudo python benchmarks/trust.py               # two minutes; the wire of 1 Gbit/s needs root, ip and tc
    python benchmarks/trust.py --only loopback    # or wire, finite

Prints the median time of an average with each, their ratio, and the processor time of both agents for each GiB that one
sends. The agents leave and meet again between the two, so both are measured in the same processes and minutes. TLS is
measured between agents that go through the network, the guard (``SHOAL_CHECK_FINITE``) in shared memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch

import shoal
from shoal.bench.measurement import ADDRESSES, two_machines, wire_seconds
from shoal.cli.certificates import make

MIB = 1 << 20
SIZES = {"4 KiB": 4096, "1 MiB": MIB, "25 MiB": 25 * MIB}
TURNS, PORT = 5, 29400
CASES = ("wire", "loopback", "finite")


def agent(variable: str, settings: list[str]) -> None:
    """Print seconds and processor seconds by size and setting of a variable, as rank 0."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for turn in range(2 * TURNS):
        setting = settings[turn % 2]
        os.environ[variable] = setting
        shoal.init()
        for size, nbytes in SIZES.items():
            x, out = torch.full((nbytes // 4,), float(shoal.rank())), torch.empty(nbytes // 4)
            count = max(3, min(300, 64 * MIB // nbytes))
            for _ in range(3):
                shoal.neighbor_allreduce(x, out=out)
            shoal.barrier()
            began, busy = time.perf_counter(), time.process_time()
            for _ in range(count):
                shoal.neighbor_allreduce(x, out=out)
            each = (time.perf_counter() - began) / count, (time.process_time() - busy) / count
            assert torch.equal(out, torch.full_like(out, 0.5))
            found.setdefault(size, {}).setdefault(setting, []).append(each)
        rank = shoal.rank()
        shoal.shutdown()
    if rank == 0:
        print(json.dumps(found), flush=True)


def measure(where: str, folder: Path) -> None:
    launch = [sys.executable, "-m", "shoal", "run", "--no-prefix"]
    variable, off, on = ("SHOAL_CHECK_FINITE", "0", "1") if where == "finite" else ("SHOAL_TLS", "off", "on")
    rest = [__file__, "--agent", variable, off, on]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "SHOAL_CERTIFICATES": str(folder)}
    if where != "finite":
        environment["SHOAL_TRANSPORT"] = "network"
    if where != "wire":
        said = subprocess.run([*launch, "-n", "2", *rest], env=environment, check=True, stdout=subprocess.PIPE).stdout
    else:
        environment["SHOAL_SECRET"] = "for this measurement only"
        with two_machines() as machines:
            meeting = ["-n", "1", "--nnodes", "2", "--rendezvous", f"{ADDRESSES[0]}:{PORT}", "--node-rank"]
            jobs = [
                subprocess.Popen(
                    [*inside, *launch, *meeting, str(node), *rest], env=environment, stdout=subprocess.PIPE
                )
                for node, inside in enumerate(machines)
            ]
            said = jobs[0].communicate()[0]
            if any(job.wait() for job in jobs):
                raise SystemExit("an agent failed")
    for size, settings in json.loads(said).items():
        plain, inside = (statistics.median(seconds for seconds, _ in settings[name]) for name in (off, on))
        busy = [2 * statistics.median(cpu for _, cpu in settings[name]) * (1 << 30) / SIZES[size] for name in (off, on)]
        limit = f"; the wire alone {1e3 * wire_seconds(SIZES[size]):.2f} ms" if where == "wire" else ""
        print(
            f"{where}, {size}: {variable}={off} {1e3 * plain:.3f} ms, ={on} {1e3 * inside:.3f} ms, "
            f"ratio {inside / plain:.3f}{limit}"
            f"; processor time for a GiB {busy[0]:.1f} and {busy[1]:.1f} s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--agent", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.agent:
        agent(args.agent[0], args.agent[1:])
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "certificates"
        make(folder, 2, timedelta(hours=1))
        print(f"load average {os.getloadavg()[0]:.2f}")
        for where in CASES:
            if args.only in (None, where):
                measure(where, folder)


if __name__ == "__main__":
    main()
