"""Which carries tensors between machines better: plain TCP sockets or ZeroMQ (pyzmq)?

Measures both in the same run, in turn, between two processes: the time to exchange a vector and average it, on loopback
and between two network namespaces joined by a 1 Gbit/s wire (there with Gloo beside them); how soon a survivor notices
that its peer was killed; how a background thread gets on while the main thread computes; and the peak of memory.

    pip install pyzmq
    sudo python benchmarks/network_sockets.py               # two minutes; the namespaces need root, ip and tc
    python benchmarks/network_sockets.py --only loopback    # or: wire, death, busy, memory (several are allowed)
    sudo python benchmarks/network_sockets.py --only loopback wire --sweep  # chunks, buffers, one or two sockets a pair
    sudo python benchmarks/network_sockets.py --only wire --congestion cubic

A ratio above 1 says that plain TCP is better. Every figure is a median; run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import multiprocessing
import os
import select
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import zmq
from zmq.utils.monitor import recv_monitor_message

KIB, MIB = 1 << 10, 1 << 20
HEADER = struct.Struct("<4sIQ16s")  # magic, round, payload bytes, name: what a transport needs to match a message
BLOCK = 256 * KIB  # bytes summed at a time, so that the running sum stays in the cache
TIMEOUT = 60.0
SIZES = {8: 300, 4 * KIB: 300, MIB: 20, 25 * MIB: 1}  # payload bytes: exchanges timed together
WIRE = 25 * MIB
# 1448 payload bytes a segment, with 66 bytes of Ethernet, IP and TCP (timestamps) before them, at 1e9 bits a second
WIRE_SECONDS = WIRE * 8 / 1e9 * 1514 / 1448


class Buffers:
    """One agent's float32 vectors of a round, and the views of them that every round needs again."""

    def __init__(self, nbytes: int, value: float) -> None:
        self.x = torch.full((nbytes // 4,), value)
        self.received, self.out = torch.zeros_like(self.x), torch.zeros_like(self.x)
        self.outgoing = memoryview(self.x.numpy()).cast("B")
        self.incoming = memoryview(self.received.numpy()).cast("B")
        step = BLOCK // 4
        self.blocks = list(zip(self.x.split(step), self.received.split(step), self.out.split(step), strict=True))


def average(x: torch.Tensor, received: torch.Tensor, out: torch.Tensor) -> None:
    torch.mul(x, 0.5, out=out)
    torch.add(out, received, alpha=0.5, out=out)


class Control:
    """The two workers' own line: a barrier, and small objects. Never timed."""

    def __init__(self, sock: socket.socket) -> None:
        self._reader, self._writer = sock.makefile("r"), sock.makefile("w")

    def swap(self, value: Any = None) -> Any:
        self._writer.write(json.dumps(value) + "\n")
        self._writer.flush()
        return json.loads(self._reader.readline())


@dataclass(frozen=True)
class Place:
    """Where a worker is, and how it reaches its peer."""

    rank: int
    host: str
    control: Control

    def connection(self, tuning: Tuning) -> socket.socket:
        """Rank 0 accepts, rank 1 connects. Buffer sizes are set before, for the handshake settles the window scale."""
        if self.rank == 0:
            with socket.create_server((self.host, 0)) as listener:
                tuning.apply(listener)
                self.control.swap(listener.getsockname()[1])
                sock, _ = listener.accept()
        else:
            sock = socket.socket()
            tuning.apply(sock)
            sock.connect((self.host, self.control.swap()))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        return sock


@dataclass(frozen=True)
class Tuning:
    chunk: int  # TCP: the most bytes of one system call; ZeroMQ: the bytes of one message
    buffer: int = 0  # SO_SNDBUF and SO_RCVBUF; 0 leaves them to the kernel's autotuning
    one_socket: bool = False  # TCP: both directions share a connection

    def apply(self, sock: socket.socket) -> None:
        if self.buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.buffer)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.buffer)


TUNED = {"tcp": Tuning(BLOCK), "zmq": Tuning(MIB)}
SWEEP = {
    "tcp": Tuning(BLOCK),
    "tcp 64K": Tuning(64 * KIB),
    "tcp 512K": Tuning(512 * KIB),
    "tcp 1M": Tuning(MIB),
    "tcp buffers 1M": Tuning(BLOCK, buffer=MIB),
    "tcp buffers 4M": Tuning(BLOCK, buffer=4 * MIB),
    "tcp one socket": Tuning(BLOCK, one_socket=True),
    "zmq 256K": Tuning(BLOCK),
    "zmq 1M": Tuning(MIB),
    "zmq 4M": Tuning(4 * MIB),
    "zmq buffers 4M": Tuning(MIB, buffer=4 * MIB),
}
Figures = dict[str, dict[str, float]]


class Link(Protocol):
    def exchange(self, b: Buffers) -> None:
        """Send `b.x`, receive the peer's, and leave their average in `b.out`."""


class TcpLink:
    """One connection for each direction and one epoll loop; bytes land in the buffer that they are summed from."""

    def __init__(self, place: Place, tuning: Tuning) -> None:
        first = place.connection(tuning)
        second = first.dup() if tuning.one_socket else place.connection(tuning)
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
            for fd in self._ready():
                if fd == self._in.fileno():
                    if got == total:  # the next round's bytes wait in the kernel
                        continue
                    got += self._receive(b.incoming, got)
                    while summed < len(b.blocks) and got >= HEADER.size + min((summed + 1) * BLOCK, len(b.incoming)):
                        average(*b.blocks[summed])
                        summed += 1
                    continue
                start = sent - HEADER.size
                sent += self._out.send(b.outgoing[start : start + self._chunk])
                if sent == total:
                    self._epoll.modify(self._out, 0)

    def _ready(self) -> list[int]:
        events = self._epoll.poll(TIMEOUT)
        if not events:
            raise TimeoutError("the peer is silent")
        return [fd for fd, _ in events]

    def _receive(self, payload: memoryview, got: int) -> int:
        start = got - HEADER.size
        n = self._in.recv_into(self._header_in[got:] if start < 0 else payload[start : start + self._chunk])
        if n == 0:
            raise ConnectionError("the peer closed its socket")
        if start + n == 0:  # a short message's payload came with its header: save the way around the loop
            with suppress(BlockingIOError):
                n += self._in.recv_into(payload[: self._chunk])
        return n

    def echo(self, count: int) -> None:
        for _ in range(count):
            self._ready()
            self._out.send(self._in.recv(64))

    def ping(self) -> None:
        self._out.send(b"12345678")
        self._ready()
        self._in.recv(64)


class ZmqLink:
    """A PAIR socket and one I/O thread; a long payload is cut into messages, so that summing overlaps receiving."""

    def __init__(self, place: Place, tuning: Tuning) -> None:
        self._socket = zmq.Context(io_threads=1).socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.rcvtimeo = int(TIMEOUT * 1000)
        if tuning.buffer:
            self._socket.sndbuf = self._socket.rcvbuf = tuning.buffer
        if place.rank == 0:
            place.control.swap(self._socket.bind_to_random_port(f"tcp://{place.host}"))
        else:
            self._socket.connect(f"tcp://{place.host}:{place.control.swap()}")
        self._chunk = tuning.chunk
        self._round = 0

    def exchange(self, b: Buffers) -> None:
        header = HEADER.pack(b"test", self._round, len(b.outgoing), b"")
        self._round += 1
        if len(b.outgoing) <= 64 * KIB:  # below this one message and a copy are faster
            self._socket.send(header + b.outgoing, copy=True)
            b.incoming[:] = self._socket.recv()[HEADER.size :]
            return average(b.x, b.received, b.out)
        self._socket.send(header)
        for start in range(0, len(b.outgoing), self._chunk):
            self._socket.send(b.outgoing[start : start + self._chunk], copy=False)
        self._socket.recv()
        start = 0
        while start < len(b.x):
            frame = self._socket.recv(copy=False)
            piece = torch.frombuffer(frame.buffer, dtype=torch.float32)
            for block in piece.split(BLOCK // 4):
                end = start + len(block)
                average(b.x[start:end], block, b.out[start:end])
                start = end
        return None

    def echo(self, count: int) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        for _ in range(count):
            poller.poll(TIMEOUT * 1000)
            self._socket.send(self._socket.recv())

    def ping(self) -> None:
        self._socket.send(b"12345678")
        self._socket.recv()


class GlooLink:
    def __init__(self, place: Place) -> None:
        port = 0 if place.rank == 0 else place.control.swap()
        store = dist.TCPStore(place.host, port, 2, place.rank == 0, wait_for_workers=False)
        if place.rank == 0:
            place.control.swap(store.port)
        dist.init_process_group("gloo", store=store, rank=place.rank, world_size=2)
        self._peer = 1 - place.rank

    def exchange(self, b: Buffers) -> None:
        receive = dist.irecv(b.received, self._peer)
        send = dist.isend(b.x, self._peer)
        assert receive is not None and send is not None
        receive.wait()
        send.wait()
        average(b.x, b.received, b.out)


def timed_exchanges(link: Link, control: Control, b: Buffers, count: int) -> float:
    """Seconds of one exchange, of the slower of the two agents."""
    control.swap()
    start = time.perf_counter()
    for _ in range(count):
        link.exchange(b)
    seconds = (time.perf_counter() - start) / count
    return float(max(seconds, control.swap(seconds)))


def compare(links: dict[str, Any], measure: Callable[[Any], list[float]], repeats: int, warm: int) -> dict[str, float]:
    """The median of what `measure` returns for each link, the links taken in turn."""
    values: dict[str, list[float]] = {name: [] for name in links}
    for repeat, (name, link) in itertools.product(range(-warm, repeats), links.items()):
        measured = measure(link)
        if repeat >= 0:
            values[name] += measured
    return {name: statistics.median(v) for name, v in values.items()}


def measure_exchanges(place: Place, links: dict[str, Any], sizes: dict[int, int], repeats: int) -> Figures:
    figures = {}
    for nbytes, count in sizes.items():
        b = Buffers(nbytes, 1.0 + 2.0 * place.rank)

        def measure(link: Link, b: Buffers = b, count: int = count) -> list[float]:
            b.out.zero_()
            seconds = timed_exchanges(link, place.control, b, count)
            assert bool((b.out == 2.0).all()), link
            return [seconds]

        figures[f"average {size_name(nbytes)} both ways"] = compare(links, measure, repeats, warm=2)
    return figures


def compute_with_torch(stop: threading.Event) -> None:
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
    "in torch": compute_with_torch,
    "in Python": compute_in_python,
}


def beside(load: str, work: Callable[[], Any]) -> Any:
    """The result of `work` in a background thread, while this, the main thread, is busy with `load`."""
    stop, results = threading.Event(), []

    def background() -> None:
        try:
            results.append(work())
        finally:
            stop.set()

    thread = threading.Thread(target=background)
    thread.start()
    LOADS[load](stop)
    thread.join()
    return results[0]


def measure_busy(place: Place, links: dict[str, Any], repeats: int) -> Figures:
    """Rank 0's main thread computes; its background thread echoes, and then averages, with rank 1."""
    figures: Figures = {}
    b = Buffers(WIRE, 1.0)
    for load in LOADS:
        count = 30 if load == "in Python" else 300
        latencies: dict[str, list[float]] = {name: [] for name in links}
        for _, (name, link) in itertools.product(range(repeats), links.items()):
            place.control.swap()
            if place.rank == 0:
                beside(load, lambda link=link, count=count: link.echo(count))
                continue
            for _ in range(count):
                start = time.perf_counter()
                link.ping()
                latencies[name].append(time.perf_counter() - start)
        if place.rank == 1:
            quantiles = {name: statistics.quantiles(v, n=100) for name, v in latencies.items()}
            figures[f"echo p50, main thread {load}"] = {name: q[49] for name, q in quantiles.items()}
            figures[f"echo p99, main thread {load}"] = {name: q[98] for name, q in quantiles.items()}

        def measure(link: Link, load: str = load) -> list[float]:
            mine = load if place.rank == 0 else "idle"
            return [beside(mine, lambda: timed_exchanges(link, place.control, b, 1))]

        figures[f"average 25 MiB, main thread {load}"] = compare(links, measure, repeats, warm=1)
    return {**figures, **(place.control.swap(figures) or {})} if place.rank == 0 else place.control.swap(figures)


def status_bytes(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * KIB


def measure_memory(place: Place, links: dict[str, Any], repeats: int) -> Figures:
    """Rank 0's peak above its buffers while it averages 100 MB, at once or half a second after rank 1 began."""
    libc = ctypes.CDLL(None)
    b = Buffers(100_000_000, 1.0)
    figures = {}
    for case, delay in {"at once": 0.0, "late": 0.5}.items():

        def measure(link: Link, delay: float = delay) -> list[float]:
            libc.malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            before = status_bytes("VmRSS")
            place.control.swap()
            time.sleep(delay if place.rank == 0 else 0.0)
            link.exchange(b)
            place.control.swap()
            return [float(status_bytes("VmHWM") - before)]

        figures[f"peak growth, 100 MB, read {case}"] = compare(links, measure, repeats, warm=1)
    return figures


def size_name(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB" if nbytes >= KIB else f"{nbytes} B"


def worker(rank: int, host: str, port: int, part: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    place = meet(rank, host, port)
    tunings = SWEEP if options.sweep else TUNED
    links: dict[str, Any] = {
        name: TcpLink(place, t) if name.startswith("tcp") else ZmqLink(place, t) for name, t in tunings.items()
    }
    if part in ("loopback", "wire"):
        links["gloo"] = GlooLink(place)
        sizes = SIZES if part == "loopback" else {WIRE: 1}
        figures = measure_exchanges(place, links, sizes, options.repeats)
    elif part == "busy":
        figures = measure_busy(place, links, options.repeats)
    else:
        links["zmq, one message"] = ZmqLink(place, Tuning(chunk=100_000_000))
        figures = measure_memory(place, links, 3)
    if rank == 0:
        print(json.dumps(figures), flush=True)
    place.control.swap()
    os._exit(0)  # ZeroMQ contexts and Gloo threads need no farewell here


def meet(rank: int, host: str, port: int) -> Place:
    if rank == 0:
        with socket.create_server((host, port)) as listener:
            listener.settimeout(TIMEOUT)
            return Place(rank, host, Control(listener.accept()[0]))
    deadline = time.monotonic() + TIMEOUT
    while True:
        try:
            return Place(rank, host, Control(socket.create_connection((host, port))))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def run_pair(
    part: str, host: str, prefixes: list[list[str]], interfaces: list[str], options: argparse.Namespace
) -> Figures:
    """Two workers, each behind its prefix (`ip netns exec ...`), and rank 0's figures."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    workers = []
    try:
        for rank, (prefix, interface) in enumerate(zip(prefixes, interfaces, strict=True)):
            arguments = ["--worker", str(rank), host, str(port), part, *sys.argv[1:]]
            workers.append(
                subprocess.Popen(
                    [*prefix, sys.executable, __file__, *arguments],
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "GLOO_SOCKET_IFNAME": interface},
                )
            )
        return dict(json.loads(workers[0].communicate(timeout=600)[0]))
    finally:
        for process in workers:
            process.kill()
            process.wait()


@contextmanager
def wire(congestion: str | None) -> Iterator[list[str]]:
    """Two namespaces joined by a veth of 1 Gbit/s each way, at 10.77.0.1 and 10.77.0.2; deleted on the way out."""
    names = [f"shoal{os.getpid()}{end}" for end in "ab"]

    def sh(line: str) -> None:
        subprocess.run(line.split(), check=True)

    try:
        for name in names:
            sh(f"ip netns add {name}")
        sh(f"ip link add veth0 netns {names[0]} type veth peer name veth0 netns {names[1]}")
        for i, name in enumerate(names):
            sh(f"ip -n {name} addr add 10.77.0.{i + 1}/24 dev veth0")
            sh(f"ip -n {name} link set lo up")
            sh(f"ip -n {name} link set veth0 up")
            sh(f"tc -n {name} qdisc add dev veth0 root tbf rate 1gbit burst 128kb latency 50ms")
            if congestion:
                sh(f"ip netns exec {name} sysctl -qw net.ipv4.tcp_congestion_control={congestion}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)


def victim(kind: str, port: int) -> None:
    ballast = torch.ones(25_000_000)  # a training process has memory to tear down before its sockets close
    if kind == "tcp":
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(b"ready")
    else:
        peer = zmq.Context().socket(zmq.PAIR)
        peer.connect(f"tcp://127.0.0.1:{port}")
        peer.send(b"ready")
    signal.pause()
    del ballast


def notice_tcp() -> float:
    with socket.create_server(("127.0.0.1", 0)) as listener, killed_later("tcp", listener.getsockname()[1]) as kill:
        sock, _ = listener.accept()
        with sock:
            sock.recv(5)
            epoll = select.epoll()
            epoll.register(sock, select.EPOLLIN | select.EPOLLRDHUP)
            start = kill()
            epoll.poll(TIMEOUT)
            assert sock.recv(1) == b""
            return time.perf_counter() - start


def notice_zmq(watch: Callable[[Any, Any], None]) -> float:
    with zmq.Context() as context, context.socket(zmq.PAIR) as sock:
        sock.linger = 0
        port = sock.bind_to_random_port("tcp://127.0.0.1")
        monitor = sock.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        with killed_later("zmq", port) as kill:
            sock.recv()
            start = kill()
            watch(sock, monitor)
            seconds = time.perf_counter() - start
        sock.disable_monitor()
        return seconds


@contextmanager
def killed_later(kind: str, port: int) -> Iterator[Callable[[], float]]:
    process = multiprocessing.get_context("fork").Process(target=victim, args=(kind, port))
    process.start()

    def kill() -> float:
        time.sleep(0.2)
        start = time.perf_counter()
        process.kill()
        return start

    try:
        yield kill
    finally:
        process.kill()
        process.join()


def measure_death(repeats: int) -> Figures:
    def with_monitor(_: Any, monitor: Any) -> None:
        recv_monitor_message(monitor)

    def without_monitor(sock: Any, _: Any) -> None:
        assert sock.poll(2000) == 0

    ways = {"tcp": notice_tcp, "zmq": lambda: notice_zmq(with_monitor)}
    figures = {"a killed peer is noticed after": compare(ways, lambda way: [way()], repeats, warm=1)}
    notice_zmq(without_monitor)
    return figures


def show(title: str, figures: Figures) -> None:
    print(f"\n{title}")
    for what, values in figures.items():
        unit, scale = ("MB", 1e-6) if "growth" in what else ("ms", 1e3)
        cells = [f"{name} {v * scale:9.3f} {unit} ({v / values['tcp']:.2f})" for name, v in values.items()]
        print(f"  {what:40} " + "   ".join(cells), flush=True)


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "--worker":
        rank, host, port, part = sys.argv[2:6]
        return worker(int(rank), host, int(port), part, parse(sys.argv[6:]))
    options = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces go on a kill, too
    print(f"load average {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores; in brackets the ratio to plain TCP")
    here = ("127.0.0.1", [[], []], ["lo", "lo"])
    for part in options.only:
        if part == "death":
            show("death", measure_death(options.repeats))
        elif part == "wire":
            with wire(options.congestion) as names:
                prefixes = [["ip", "netns", "exec", name] for name in names]
                figures = run_pair(part, "10.77.0.1", prefixes, ["veth0", "veth0"], options)
            for values in figures.values():
                values["the wire itself"] = WIRE_SECONDS
            show("wire of 1 Gbit/s", figures)
        else:
            show(part, run_pair(part, *here, options))
    print(f"load average {os.getloadavg()[0]:.2f}")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["loopback", "wire", "death", "busy", "memory"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--sweep", action="store_true", help="other chunks and buffers too")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--congestion", help="the wire's TCP congestion control, for all (the machine's default)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
