"""The network transport over a wire of a known speed: two agents on two machines made of network namespaces.

Shoal's network transport is TCP. The wire is a pair of virtual Ethernet devices held to 1 Gbit/s by the kernel (``tc
tbf``), so how long a tensor must take is known: its bytes and their headers. Making it needs root. The namespaces have
no names: they vanish with the processes that hold them, also when those are killed.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist

import shoal

from .meter import Figures, Reporter, compare

MIB = 1 << 20
BITS_PER_SECOND = 1_000_000_000
DEVICE = "veth0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")

_MTU = 1500
_ETHERNET_HEADER = 14
_IP_AND_TCP_HEADERS = 20 + 32
"""IPv4, and TCP with its timestamps."""


def wire_seconds(nbytes: int) -> float:
    """The least time that ``nbytes`` of payload take on the wire, with the headers of their full segments."""
    segments = -(-nbytes // (_MTU - _IP_AND_TCP_HEADERS))
    return (nbytes + segments * (_ETHERNET_HEADER + _IP_AND_TCP_HEADERS)) * 8 / BITS_PER_SECOND


def missing_tool() -> str:
    """A program that :func:`two_machines` needs and this machine lacks; empty if there is none."""
    return next((tool for tool in ("ip", "tc", "unshare", "nsenter") if shutil.which(tool) is None), "")


@contextmanager
def two_machines() -> Iterator[list[list[str]]]:
    """Two network namespaces at ``ADDRESSES``, joined by a wire of 1 Gbit/s each way.

    Yields:
        For each, the prefix of a command to be run there.

    Raises:
        RuntimeError: The system does not allow it; the message has its error.
    """
    with ExitStack() as held:
        holders = [held.enter_context(_namespace()) for _ in ADDRESSES]
        inside = [["nsenter", f"--net=/proc/{pid}/ns/net"] for pid in holders]
        pid, peer = holders
        _run("ip", "link", "add", DEVICE, "netns", str(pid), "type", "veth", "peer", "name", DEVICE, "netns", str(peer))
        for enter, address in zip(inside, ADDRESSES, strict=True):
            _run(*enter, "ip", "address", "add", f"{address}/24", "dev", DEVICE)
            _run(*enter, "ip", "link", "set", "lo", "up")
            _run(*enter, "ip", "link", "set", DEVICE, "up")
            limit = ["rate", f"{BITS_PER_SECOND}bit", "burst", "128kb", "latency", "50ms"]
            _run(*enter, "tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", *limit)
        yield inside


@contextmanager
def _namespace() -> Iterator[int]:
    """A process in a network namespace of its own, which ends when its stdin closes, so at the latest with us."""
    command = ["unshare", "--net", "cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as holder:
        assert holder.stdin and holder.stdout and holder.stderr
        try:
            holder.stdin.write(b".")
            holder.stdin.flush()
            if not holder.stdout.read(1):  # it answers once it is inside
                raise RuntimeError(f"unshare --net: {holder.stderr.read().decode().strip()}")
            yield holder.pid
        finally:
            holder.kill()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


def measure(reporter: Reporter, quick: bool) -> list[Figures]:
    """An agent's part: average with the other one, and with Gloo exchange the same bytes, received first."""
    nbytes = MIB if quick else 25 * MIB
    peer = 1 - shoal.rank()
    x = torch.full((nbytes // 4,), float(shoal.rank()))
    received, out = torch.full_like(x, 0.0), torch.full_like(x, 0.0)

    def exchange() -> None:
        works = dist.irecv(received, peer), dist.isend(x, peer)
        for work in works:
            work.wait()  # type: ignore[union-attr]

    def exchange_and_average() -> None:
        exchange()
        torch.mul(x, 0.5, out=out)
        out.add_(received, alpha=0.5)

    cases = {
        "average": lambda: shoal.neighbor_allreduce(x, out=out),
        "gloo": exchange,
        "gloo and average": exchange_and_average,
    }
    seconds = compare(reporter, f"{nbytes // MIB} MiB over the wire", cases, 3 if quick else 11)
    if not torch.equal(shoal.neighbor_allreduce(x), torch.full_like(x, 0.5)):
        raise AssertionError(f"rank {shoal.rank()} averaged to something else than 0.5")
    return [Figures("wire", nbytes, shoal.size(), seconds)]
