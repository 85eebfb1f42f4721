"""Which carries tensors between machines better: plain TCP sockets or ZeroMQ (pyzmq)?

Measures both in the same run, in turn, between two processes: the time to exchange a vector and average it, on loopback
and between two network namespaces joined by a 1 Gbit/s wire (with Gloo beside them); how soon a survivor notices that
its peer was killed; how a background thread gets on while the main thread computes; and the peak of memory.

    pip install pyzmq
    sudo python benchmarks/network_sockets.py                # two minutes; the wire needs root, ip and tc
    python benchmarks/network_sockets.py --only loopback     # or wire, death, busy, memory; several are allowed
    python benchmarks/network_sockets.py --only busy --sweep # other chunks and buffers, and a socket for each direction
    sudo python benchmarks/network_sockets.py --only wire --congestion reno

Figures are medians; in brackets is the ratio to plain TCP. The machine should be quiet: the load average is printed.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import multiprocessing
import os
import select
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zmq
from zmq.utils.monitor import recv_monitor_message

Figures = dict[str, dict[str, float]]  # what was measured: {link: median}

KIB, MIB = 1 << 10, 1 << 20
HEADER = struct.Struct("<4sIQ16s")  # magic, round, payload bytes, name: what a transport needs to match a message
BLOCK = 256 * KIB  # bytes summed at a time, so that the running sum stays in the cache
TIMEOUT = 60.0  # seconds
WIRE = 25 * MIB
SIZES = {"8 B": (8, 300), "4 KiB": (4 * KIB, 300), "1 MiB": (MIB, 20), "25 MiB": (WIRE, 1)}  # bytes, timed together
# 1448 payload bytes a segment behind 66 bytes of Ethernet, IP and TCP (with timestamps), at 1e9 bits a second.
WIRE_SECONDS = WIRE * 8 / 1e9 * 1514 / 1448


@dataclass(frozen=True)
class Tuning:
    chunk: int  # TCP: the most bytes of one system call; ZeroMQ: the bytes of one message
    buffer: int = 0  # SO_SNDBUF and SO_RCVBUF; 0 leaves them to the kernel's autotuning
    sockets: int = 1  # TCP: 2 gives each direction its own connection


TUNED = {"tcp": Tuning(MIB), "zmq": Tuning(MIB)}
SWEEP = {
    "tcp": Tuning(MIB),
    **{f"tcp {kib}K": Tuning(kib * KIB) for kib in (64, 256, 512)},
    **{f"tcp buffers {mib}M": Tuning(MIB, buffer=mib * MIB) for mib in (1, 4)},
    "tcp two sockets": Tuning(MIB, sockets=2),
    "zmq": Tuning(MIB),
    **{f"zmq {kib}K": Tuning(kib * KIB) for kib in (256, 4096)},
    "zmq buffers 4M": Tuning(MIB, buffer=4 * MIB),
}


@dataclass(frozen=True)
class Place:
    """Where a worker is, and its own line to the other one (never timed)."""

    rank: int
    host: str
    line: Any

    def swap(self, value: Any = None) -> Any:
        """The other worker's value; a barrier, too."""
        self.line.send(value)
        return self.line.recv()

    def connection(self, tuning: Tuning) -> socket.socket:
        """Rank 0 accepts, rank 1 connects. Buffer sizes are set before, for the handshake settles the window scale."""
        with socket.socket() as first:
            if tuning.buffer:
                first.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, tuning.buffer)
                first.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, tuning.buffer)
            if self.rank == 0:
                first.bind((self.host, 0))
                first.listen()
                self.swap(first.getsockname()[1])
                sock, _ = first.accept()
            else:
                first.connect((self.host, self.swap()))
                sock = first.dup()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        return sock


class Buffers:
    """One agent's float32 vectors of a round, and the views of them that every round needs again."""

    def __init__(self, nbytes: int, value: float) -> None:
        self.x = torch.full((nbytes // 4,), value)
        self.received, self.out = torch.zeros_like(self.x), torch.zeros_like(self.x)
        self.outgoing, self.incoming = (memoryview(t.numpy().data).cast("B") for t in (self.x, self.received))
        self.blocks = list(zip(*(torch.split(t, BLOCK // 4) for t in (self.x, self.received, self.out)), strict=True))


def average(x: torch.Tensor, received: torch.Tensor, out: torch.Tensor) -> None:
    torch.mul(x, 0.5, out=out)
    torch.add(out, received, alpha=0.5, out=out)


class TcpLink:
    """One epoll loop; bytes land in the buffer that they are summed from, and the sum follows the arriving prefix."""

    def __init__(self, place: Place, tuning: Tuning) -> None:
        first = place.connection(tuning)
        # A duplicate descriptor lets one connection be polled for reading and for writing on their own.
        second = first.dup() if tuning.sockets == 1 else place.connection(tuning)
        self._out, self._in = (first, second) if place.rank == 0 else (second, first)
        self._chunk = tuning.chunk
        self._round = 0
        self._header_in = memoryview(bytearray(HEADER.size))
        self._epoll = select.epoll()
        self._epoll.register(self._in, select.EPOLLIN)
        self._epoll.register(self._out, 0)

    def exchange(self, b: Buffers) -> None:
        header = HEADER.pack(b"test", self._round, len(b.outgoing), b"")
        self._round += 1
        total = HEADER.size + len(b.outgoing)
        got = summed = 0
        sent = self._out.sendmsg([header, b.outgoing[: self._chunk]])
        if sent < total:
            self._epoll.modify(self._out, select.EPOLLOUT)
        while sent < total or got < total:
            events = self._epoll.poll(TIMEOUT)
            if not events:
                raise TimeoutError("the peer is silent")
            for fd, _ in events:
                if fd == self._out.fileno():
                    start = sent - HEADER.size
                    sent += self._out.send(b.outgoing[start : start + self._chunk])
                    if sent == total:
                        self._epoll.modify(self._out, 0)
                elif got < total:  # else it is the next round's, and waits in the kernel
                    got += self._receive(b.incoming, got)
                    while summed < len(b.blocks) and got - HEADER.size >= min((summed + 1) * BLOCK, len(b.incoming)):
                        average(*b.blocks[summed])
                        summed += 1

    def _receive(self, payload: memoryview, got: int) -> int:
        start = got - HEADER.size
        n = self._in.recv_into(self._header_in[got:] if start < 0 else payload[start : start + self._chunk])
        if n == 0:
            raise ConnectionError("the peer closed its socket")
        if start + n == 0:  # a short payload came with its header: save a turn of the loop
            with suppress(BlockingIOError):
                n += self._in.recv_into(payload[: self._chunk])
        return n


class ZmqLink:
    """A PAIR socket and one I/O thread; a long payload is cut into messages, so that summing overlaps receiving."""

    def __init__(self, place: Place, tuning: Tuning) -> None:
        self._socket = zmq.Context(io_threads=1).socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.rcvtimeo = int(TIMEOUT * 1000)
        if tuning.buffer:
            self._socket.sndbuf = self._socket.rcvbuf = tuning.buffer
        if place.rank == 0:
            place.swap(self._socket.bind_to_random_port(f"tcp://{place.host}"))
        else:
            self._socket.connect(f"tcp://{place.host}:{place.swap()}")
        self._chunk = tuning.chunk
        self._round = 0

    def exchange(self, b: Buffers) -> None:
        header = HEADER.pack(b"test", self._round, len(b.outgoing), b"")
        self._round += 1
        if len(b.outgoing) <= 64 * KIB:  # up to here one message and a copy are faster
            self._socket.send(header + b.outgoing)
            b.incoming[:] = self._socket.recv()[HEADER.size :]
            average(b.x, b.received, b.out)
            return
        self._socket.send(header)
        for start in range(0, len(b.outgoing), self._chunk):
            self._socket.send(b.outgoing[start : start + self._chunk], copy=False)
        self._socket.recv()
        start = 0
        while start < len(b.x):
            frame = self._socket.recv(copy=False)
            for block in torch.split(torch.frombuffer(frame.buffer, dtype=torch.float32), BLOCK // 4):
                end = start + len(block)
                average(b.x[start:end], block, b.out[start:end])
                start = end


class GlooLink:
    def __init__(self, place: Place, store: str) -> None:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=place.rank, world_size=2)
        self._peer = 1 - place.rank

    def exchange(self, b: Buffers) -> None:
        receive, send = dist.irecv(b.received, self._peer), dist.isend(b.x, self._peer)
        assert receive is not None and send is not None
        receive.wait()
        send.wait()
        average(b.x, b.received, b.out)


def compare(links: dict[str, Any], measure: Callable[[Any], float], repeats: int, warm: int = 2) -> dict[str, float]:
    """The median of what `measure` returns for each link, the links taken in turn."""
    values: dict[str, list[float]] = {name: [] for name in links}
    for repeat, (name, link) in itertools.product(range(-warm, repeats), links.items()):
        value = measure(link)
        if repeat >= 0:
            values[name].append(value)
    return {name: statistics.median(v) for name, v in values.items()}


def exchange_seconds(place: Place, b: Buffers, count: int, link: Any) -> float:
    """Seconds of one exchange, of the slower of the two agents."""
    b.out.zero_()
    place.swap()
    start = time.perf_counter()
    for _ in range(count):
        link.exchange(b)
    seconds = (time.perf_counter() - start) / count
    assert bool((b.out == 2.0).all()), link
    return float(max(seconds, place.swap(seconds)))


def measure_exchanges(place: Place, links: dict[str, Any], sizes: list[str], repeats: int) -> Figures:
    figures = {}
    for size in sizes:
        nbytes, count = SIZES[size]
        b = Buffers(nbytes, 1.0 + 2.0 * place.rank)
        timed = partial(exchange_seconds, place, b, count)
        figures[f"average {size} both ways"] = compare(links, timed, repeats)
    return figures


def compute_in_torch(stop: threading.Event) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512))
    batch = torch.randn(64, 512)
    while not stop.is_set():
        model.zero_grad()
        model(batch).square().mean().backward()


def compute_in_python(stop: threading.Event) -> None:
    while not stop.is_set():
        sum(i * i for i in range(1000))


LOADS: dict[str, Callable[[threading.Event], object]] = {
    "idle": threading.Event.wait,
    "in torch": compute_in_torch,
    "in Python": compute_in_python,
}


def beside(load: str, work: Callable[[], Any]) -> Any:
    """The result of `work` in a background thread, while this, the main thread, is busy with `load`."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as background:
        result = background.submit(work)
        result.add_done_callback(lambda _: stop.set())
        LOADS[load](stop)
        return result.result()


def measure_busy(place: Place, links: dict[str, Any], repeats: int) -> Figures:
    """Rank 0's main thread computes, while its background thread averages with rank 1, which has nothing else to do."""
    figures: Figures = {}
    short, long = (Buffers(n, 1.0 + 2.0 * place.rank) for n in (8, WIRE))
    for load in LOADS:
        mine = load if place.rank == 0 else "idle"
        latencies: dict[str, list[float]] = {name: [] for name in links}
        for name in [*links] * repeats:
            one = partial(exchange_seconds, place, short, 1, links[name])
            latencies[name] += beside(mine, lambda one=one: [one() for _ in range(15)])  # type: ignore[misc]
        quantiles = {name: statistics.quantiles(v, n=100) for name, v in latencies.items()}
        figures[f"average 8 B, p50, main thread {load}"] = {name: q[49] for name, q in quantiles.items()}
        figures[f"average 8 B, p99, main thread {load}"] = {name: q[98] for name, q in quantiles.items()}
        timed = partial(exchange_seconds, place, long, 1)
        figures[f"average 25 MiB, main thread {load}"] = beside(mine, partial(compare, links, timed, repeats))
    return figures


def peak_growth(place: Place, b: Buffers, delay: float, link: Any) -> float:
    """Bytes that rank 0's peak lies above its buffers, when it begins `delay` seconds after rank 1."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    kib = [int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])]
    place.swap()
    time.sleep(delay if place.rank == 0 else 0.0)
    link.exchange(b)
    place.swap()
    kib.append(int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]))
    return float(kib[1] - kib[0]) * KIB


def measure_memory(place: Place, links: dict[str, Any]) -> Figures:
    b = Buffers(100_000_000, 1.0)
    links["zmq, one message"] = ZmqLink(place, Tuning(len(b.outgoing)))
    delays = {"at once": 0.0, "0.5 s late": 0.5}
    return {f"growth, 100 MB read {k}": compare(links, partial(peak_growth, place, b, d), 3) for k, d in delays.items()}


def worker(place: Place, namespace: str, part: str, store: str, options: argparse.Namespace, results: Any) -> None:
    if namespace:
        with Path(f"/run/netns/{namespace}").open() as file:
            ctypes.CDLL(None).setns(file.fileno(), 0)
    os.environ["GLOO_SOCKET_IFNAME"] = "veth0" if namespace else "lo"
    torch.set_num_threads(1)
    tunings = SWEEP if options.sweep else TUNED
    links: dict[str, Any] = {k: (TcpLink if k.startswith("tcp") else ZmqLink)(place, t) for k, t in tunings.items()}
    if part == "memory":
        figures = measure_memory(place, links)
    elif part == "busy":
        figures = measure_busy(place, links, options.repeats)
    else:
        links["gloo"] = GlooLink(place, store)
        figures = measure_exchanges(place, links, ["25 MiB"] if part == "wire" else [*SIZES], options.repeats)
    place.swap()
    results.send(figures)
    os._exit(0)  # ZeroMQ's contexts and Gloo's threads need no farewell here


def run_pair(part: str, host: str, namespaces: list[str], options: argparse.Namespace) -> Figures:
    """Two workers, each in its namespace ("" is ours), and rank 0's figures."""
    spawn = multiprocessing.get_context("spawn")
    lines, (result, results) = spawn.Pipe(), spawn.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as store:
        workers = [
            spawn.Process(
                target=worker, args=(Place(i, host, lines[i]), namespaces[i], part, f"{store}/store", options, results)
            )
            for i in range(2)
        ]
        try:
            for process in workers:
                process.start()
            for end in (*lines, results):
                end.close()  # so that a worker's death is the end of the file, for us and for the other
            return dict(result.recv())
        finally:
            for process in workers:
                process.kill()
                process.join()


@contextmanager
def wire(congestion: str | None) -> Iterator[list[str]]:
    """Two namespaces joined by a veth of 1 Gbit/s each way, at 10.77.0.1 and 10.77.0.2; deleted on the way out."""
    names = [f"shoal{os.getpid()}{end}" for end in "ab"]
    lines = [f"ip netns add {name}" for name in names]
    lines.append(f"ip link add veth0 netns {names[0]} type veth peer name veth0 netns {names[1]}")
    for i, name in enumerate(names, start=1):
        lines.append(f"ip -n {name} addr add 10.77.0.{i}/24 dev veth0")
        lines.append(f"ip -n {name} link set veth0 up")
        lines.append(f"tc -n {name} qdisc add dev veth0 root tbf rate 1gbit burst 128kb latency 50ms")
        if congestion:
            lines.append(f"ip netns exec {name} sysctl -qw net.ipv4.tcp_congestion_control={congestion}")
    try:
        for line in lines:
            subprocess.run(line.split(), check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)


def victim(kind: str, port: int) -> None:
    ballast = torch.ones(25_000_000)  # a training process has memory to give back before its sockets close
    with zmq.Context() as context, socket.socket() as sock, context.socket(zmq.PAIR) as peer:
        if kind == "tcp":
            sock.connect(("127.0.0.1", port))
            sock.sendall(b"ready")
        else:
            peer.connect(f"tcp://127.0.0.1:{port}")
            peer.send(b"ready")
        signal.pause()
    del ballast


def noticed_after(kind: str) -> float:
    """Seconds from SIGKILL of a peer until its socket says so: the end of the stream, or ZeroMQ's monitor."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as pair, socket.create_server(("127.0.0.1", 0)) as listener:
        pair.linger = 0
        monitor = pair.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        port = listener.getsockname()[1] if kind == "tcp" else pair.bind_to_random_port("tcp://127.0.0.1")
        process = multiprocessing.get_context("fork").Process(target=victim, args=(kind, port))
        process.start()
        try:
            sock = listener.accept()[0] if kind == "tcp" else None
            assert (sock.recv(5) if sock else pair.recv()) == b"ready"
            time.sleep(0.2)
            start = time.perf_counter()
            process.kill()
            if sock:
                assert sock.recv(1) == b""
            elif kind == "zmq, monitored":
                recv_monitor_message(monitor)
            else:
                pair.poll(2000)
            return time.perf_counter() - start
        finally:
            process.kill()
            process.join()
            pair.disable_monitor()


def show(part: str, figures: Figures) -> None:
    for what, values in figures.items():
        print(f"{part:8} {what}")
        for name, value in values.items():
            amount = (
                f"{value / 1e6:9.1f} MB"
                if part == "memory"
                else f"{value * 1e3:9.3f} ms  ({value / values['tcp']:.2f})"
            )
            print(f"{'':10}{name:18}{amount}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["loopback", "wire", "death", "busy", "memory"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--congestion", help="TCP congestion control on the wire (default: the machine's)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces go on a kill, too
    print(f"load average {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
    for part in options.only:
        if part == "death":
            kinds = {kind: kind for kind in ("tcp", "zmq, monitored", "zmq, gave up")}
            figures = {"SIGKILL noticed after": compare(kinds, noticed_after, options.repeats, warm=1)}
        elif part == "wire":
            with wire(options.congestion) as namespaces:
                figures = run_pair(part, "10.77.0.1", namespaces, options)
            next(iter(figures.values()))["the wire's own"] = WIRE_SECONDS
        else:
            figures = run_pair(part, "127.0.0.1", ["", ""], options)
        show(part, figures)
    print(f"load average {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
