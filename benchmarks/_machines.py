"""Machines made of network namespaces, on one Ethernet bridge, and jobs that have agents on each of them.

Their NICs are held to a rate in both directions by the kernel (``tc tbf``). Making them needs root, ``ip`` and ``tc``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from shoal.bench import measurement
from shoal.bench.measurement import Figures, Progress, run_job

DEVICE, PORT = "eth0", 29400
# Below this the kernel lets a message through before it begins to count: 32 KiB at once is little beside 1 MB.
BURST = "32kb"
# Queues that hold all that can be under way, so that nothing is lost: as in a data centre, and unlike over a policer.
QUEUE = "16mb"
LARGE_PACKET = 30000
"""Below ``BURST``, above which the kernel would cut a packet up again."""
_TCP = {"tcp_congestion_control": "reno", "tcp_rmem": "4096 131072 262144", "tcp_wmem": "4096 131072 262144"}


def obstacle() -> str:
    """Why no machines can be made here; empty if they can."""
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    tool = measurement.missing_tool()
    return f"there is no program {tool!r} (Debian: iproute2 and util-linux)" if tool else ""


@contextmanager
def machines(count: int, rate: float, large_packets: bool = False) -> Iterator[list[list[str]]]:
    """Network namespaces 10.78.0.1, 10.78.0.2, ... on one bridge, each NIC held to `rate` bytes a second each way.

    Args:
        large_packets: The kernel handles up to 30 KB at once, as where a NIC cuts packets up by itself, and not 1500
            bytes, each of which takes the core from who computes on it.

    Yields:
        For each, the command that another command is put behind to run there.
    """
    limit = ["root", "tbf", "rate", f"{8 * rate:.0f}bit", "burst", BURST, "limit", QUEUE]
    with ExitStack() as held:
        switch, *holders = [held.enter_context(measurement._namespace()) for _ in range(count + 1)]
        at_switch, *inside = [["nsenter", f"--net=/proc/{pid}/ns/net"] for pid in (switch, *holders)]
        measurement._run(*at_switch, "ip", "link", "add", "bridge0", "type", "bridge")
        measurement._run(*at_switch, "ip", "link", "set", "bridge0", "up")
        for number, (pid, enter) in enumerate(zip(holders, inside, strict=True)):
            port = f"port{number}"
            ends = [port, "netns", str(switch), "type", "veth", "peer", "name", DEVICE, "netns", str(pid)]
            measurement._run("ip", "link", "add", *ends)
            measurement._run(*at_switch, "ip", "link", "set", port, "master", "bridge0", "up")
            measurement._run(*enter, "ip", "address", "add", f"10.78.0.{number + 1}/24", "dev", DEVICE)
            measurement._run(*enter, "ip", "link", "set", "lo", "up")
            if large_packets:
                measurement._run(*enter, "ip", "link", "set", DEVICE, "gso_max_size", str(LARGE_PACKET))
            measurement._run(*enter, "ip", "link", "set", DEVICE, "up")
            for name, value in _TCP.items():
                measurement._run(*enter, "sysctl", "-q", "-w", f"net.ipv4.{name}={value}")
            measurement._run(*enter, "tc", "qdisc", "add", "dev", DEVICE, *limit)
            measurement._run(*at_switch, "tc", "qdisc", "add", "dev", port, *limit)
        yield inside


def run_on_machines(
    count: int, rate: float, per_machine: int, script: Sequence[str], progress: Progress, large_packets: bool = False
) -> list[Figures]:
    """A job whose agents run a script, `per_machine` of them on each machine; what rank 0 measured."""
    with machines(count, rate, large_packets) as entered:
        commands = [
            [
                *(*enter, sys.executable, "-m", "shoal", "run", "--no-prefix", "-n", str(per_machine)),
                *("--nnodes", str(count), "--node-rank", str(node), "--rendezvous", f"10.78.0.1:{PORT}"),
                *script,
            ]
            for node, enter in enumerate(entered)
        ]
        return run_job(commands, {"GLOO_SOCKET_IFNAME": DEVICE}, progress)
