"""Which carries tensors between machines better: plain TCP sockets or ZeroMQ (pyzmq)?

Measures both in the same run, in turn, between two processes: the time to exchange a vector and average it, on loopback
and between two network namespaces joined by a 1 Gbit/s wire (with Gloo beside them); how soon a survivor notices that
its peer was killed; how a background thread gets on while the main thread computes; and the peak of memory.

    pip install pyzmq
    sudo python benchmarks/network_sockets.py                # about two minutes; the wire needs root, ip and tc
    python benchmarks/network_sockets.py --only loopback     # or wire, death, busy, memory; several are allowed
    python benchmarks/network_sockets.py --only wire --sockets 2 --chunk 256

Figures are medians; in brackets is the ratio to plain TCP. The machine must be quiet: the load average is printed.
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

Links = dict[str, Any]
Measure = Callable[[Any], float]
Figures = dict[str, dict[str, float]]  # {what was measured: {link: median}}

KIB, MIB = 1 << 10, 1 << 20
HEADER = struct.Struct("<4sIQ16s")  # magic, round, payload bytes, name: what a transport needs to match a message
BLOCK = 256 * KIB  # bytes summed at a time, so that the running sum stays in the cache
TIMEOUT = 300.0  # seconds for one part
SIZES = {"8 B": (8, 300), "4 KiB": (4 * KIB, 300), "1 MiB": (MIB, 20), "25 MiB": (25 * MIB, 1)}  # bytes, timed together
# 1448 payload bytes a segment behind 66 bytes of Ethernet, IP and TCP (with timestamps), at 1e9 bits a second.
WIRE_SECONDS = 25 * MIB * 8 / 1e9 * 1514 / 1448


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


class Buffers:
    """One agent's float32 vectors of a round, and the views of them that every round needs again."""

    def __init__(self, nbytes: int, rank: int) -> None:
        ramp = torch.arange(nbytes // 4) % 1000
        self.x, self.average = (ramp + 2 * rank).float(), (ramp + 1).float()
        self.received, self.out = torch.zeros_like(self.x), torch.zeros_like(self.x)
        self.outgoing, self.incoming = (memoryview(t.numpy().data).cast("B") for t in (self.x, self.received))
        self.blocks = list(zip(*(torch.split(t, BLOCK // 4) for t in (self.x, self.received, self.out)), strict=True))


def average(x: torch.Tensor, received: torch.Tensor, out: torch.Tensor) -> None:
    torch.mul(x, 0.5, out=out)
    torch.add(out, received, alpha=0.5, out=out)


class TcpLink:
    """One epoll loop; bytes land in the buffer that they are summed from, and the sum follows the arriving prefix."""

    def __init__(self, place: Place, chunk: int, buffer: int, sockets: int) -> None:
        first = self._connection(place, buffer)
        # A duplicate descriptor lets one connection be polled for reading and for writing on their own.
        second = first.dup() if sockets == 1 else self._connection(place, buffer)
        self._out, self._in = (first, second) if place.rank == 0 else (second, first)
        self._chunk = chunk
        self._header_in = memoryview(bytearray(HEADER.size))
        self._epoll = select.epoll()
        self._epoll.register(self._in, select.EPOLLIN)
        self._epoll.register(self._out, 0)

    def exchange(self, b: Buffers) -> None:
        total = HEADER.size + len(b.outgoing)
        got = summed = 0
        sent = self._out.sendmsg([HEADER.pack(b"test", 0, len(b.outgoing), b""), b.outgoing[: self._chunk]])
        self._epoll.modify(self._out, select.EPOLLOUT) if sent < total else None
        while sent < total or got < total:
            for fd, _ in self._epoll.poll():
                if fd == self._out.fileno():
                    start = sent - HEADER.size
                    sent += self._out.send(b.outgoing[start : start + self._chunk])
                    self._epoll.modify(self._out, 0) if sent == total else None
                elif got < total:  # else it is the next round's, and waits in the kernel
                    got += self._receive(b.incoming, got)
                    while summed < len(b.blocks) and got - HEADER.size >= min((summed + 1) * BLOCK, len(b.incoming)):
                        average(*b.blocks[summed])
                        summed += 1

    @staticmethod
    def _connection(place: Place, buffer: int) -> socket.socket:
        sock = socket.socket()
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF) if buffer else ():  # before the window scale is settled
            sock.setsockopt(socket.SOL_SOCKET, option, buffer)
        if place.rank == 0:
            sock.bind((place.host, 0))
            sock.listen()
            place.swap(sock.getsockname()[1])
            sock = sock.accept()[0]
        else:
            sock.connect((place.host, place.swap()))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        return sock

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

    def __init__(self, place: Place, chunk: int, buffer: int) -> None:
        self._socket = zmq.Context(io_threads=1).socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.sndbuf = self._socket.rcvbuf = buffer or -1
        if place.rank == 0:
            place.swap(self._socket.bind_to_random_port(f"tcp://{place.host}"))
        else:
            self._socket.connect(f"tcp://{place.host}:{place.swap()}")
        self._chunk = chunk

    def exchange(self, b: Buffers) -> None:
        header = HEADER.pack(b"test", 0, len(b.outgoing), b"")
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
        works = dist.irecv(b.received, self._peer), dist.isend(b.x, self._peer)
        for work in works:
            work.wait()  # type: ignore[union-attr]
        average(b.x, b.received, b.out)


def compare(links: Links, measure: Measure, repeats: int, percentile: int = 50) -> dict[str, float]:
    """The median, or another percentile, of what `measure` returns for each link, the links taken in turn."""
    for link in links.values():
        measure(link)
    rounds = [{name: measure(link) for name, link in links.items()} for _ in range(repeats)]
    return {name: sorted(values[name] for values in rounds)[repeats * percentile // 100] for name in links}


def exchange_seconds(place: Place, b: Buffers, count: int, link: Any) -> float:
    """Seconds of one exchange, of the slower of the two agents."""
    b.out.zero_()
    place.swap()
    start = time.perf_counter()
    for _ in range(count):
        link.exchange(b)
    seconds = (time.perf_counter() - start) / count
    assert torch.equal(b.out, b.average), link
    return float(max(seconds, place.swap(seconds)))


def measure_exchanges(place: Place, links: Links, repeats: int, part: str) -> Figures:
    figures = {}
    for size, (nbytes, count) in SIZES.items():
        if part == "loopback" or size == "25 MiB":
            timed = partial(exchange_seconds, place, Buffers(nbytes, place.rank), count)
            figures[f"average {size} both ways"] = compare(links, timed, repeats)
    return figures


def compute(load: str, stop: threading.Event) -> None:
    model, batch = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(3)]), torch.randn(64, 512)
    while not stop.is_set():
        if load == "idle":
            stop.wait()
        elif load == "in torch":
            model(batch).square().mean().backward()
        else:
            sum(i * i for i in range(1000))


def beside(load: str, work: Callable[[], Any]) -> Any:
    """The result of `work` in a background thread, while this, the main thread, is busy with `load`."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as background:
        result = background.submit(work)
        result.add_done_callback(lambda _: stop.set())
        compute(load, stop)
        return result.result()


def measure_busy(place: Place, links: Links, repeats: int) -> Figures:
    """Rank 0's main thread computes, while its background thread averages with rank 1, which has nothing else to do."""
    figures = {}
    short, long = (partial(exchange_seconds, place, Buffers(n, place.rank), 1) for n in (8, 25 * MIB))
    cases = {"8 B, median": (short, 99, 50), "8 B, p99": (short, 200, 99), "25 MiB": (long, repeats, 50)}
    for load, (what, case) in itertools.product(("idle", "in torch", "in Python"), cases.items()):
        result = beside(load if place.rank == 0 else "idle", partial(compare, links, *case))
        figures[f"average {what}, main thread {load}"] = result
    return figures


def peak_growth(place: Place, b: Buffers, delay: float, link: Any) -> float:
    """Bytes that rank 0's memory grows by at its peak, when it begins `delay` seconds after rank 1."""
    status = Path("/proc/self/status")
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = int(status.read_text().split("VmRSS:")[1].split()[0])
    place.swap()
    time.sleep(delay if place.rank == 0 else 0.0)
    link.exchange(b)
    place.swap()
    return float(int(status.read_text().split("VmHWM:")[1].split()[0]) - before) * KIB


def measure_memory(place: Place, links: Links) -> Figures:
    """Each case once: what the allocator keeps of the first time would hide the growth of the second."""
    b = Buffers(100_000_000, place.rank)
    links["zmq, one message"] = ZmqLink(place, len(b.outgoing), 0)
    cases = {"100 MB, read at once": 0.0, "100 MB, read 0.5 s late": 0.5}
    return {what: {k: peak_growth(place, b, late, link) for k, link in links.items()} for what, late in cases.items()}


def worker(place: Place, namespace: str, part: str, store: str, options: argparse.Namespace, results: Any) -> None:
    if namespace:
        with Path(f"/run/netns/{namespace}").open() as file:
            assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0, "setns needs root"
    os.environ["GLOO_SOCKET_IFNAME"] = "veth0" if namespace else "lo"
    torch.set_num_threads(1)
    links: Links = {
        "tcp": TcpLink(place, options.chunk * KIB, options.buffer * KIB, options.sockets),
        "zmq": ZmqLink(place, options.chunk * KIB, options.buffer * KIB),
    }
    if part == "memory":
        figures = measure_memory(place, links)
    elif part == "busy":
        figures = measure_busy(place, links, options.repeats)
    else:
        figures = measure_exchanges(place, links | {"gloo": GlooLink(place, store)}, options.repeats, part)
    place.swap()
    if place.rank == 0:
        results.send(figures)
    os._exit(0)  # ZeroMQ's contexts and Gloo's threads need no farewell here


def run_pair(part: str, host: str, namespaces: list[str], options: argparse.Namespace) -> Figures:
    """Rank 0's figures, of two workers, each in its namespace ("" is ours)."""
    spawn = multiprocessing.get_context("spawn")
    lines, (result, results), workers = spawn.Pipe(), spawn.Pipe(duplex=False), []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for line, rank in zip(lines, (0, 1), strict=True):
                arguments = (Place(rank, host, line), namespaces[rank], part, f"{folder}/store", options, results)
                workers.append(spawn.Process(target=worker, args=arguments, daemon=True))
                workers[rank].start()
                line.close()
            results.close()  # so that the workers' death is the end of the file
            if not result.poll(TIMEOUT):
                raise TimeoutError(f"{part} took more than {TIMEOUT} s")
            return dict(result.recv())
        finally:
            for process in workers:
                process.kill()
                process.join()


@contextmanager
def wire() -> Iterator[list[str]]:
    """Two namespaces joined by a veth of 1 Gbit/s each way, at 10.77.0.1 and 10.77.0.2; deleted on the way out."""
    a, b = names = [f"shoal{os.getpid()}{end}" for end in "ab"]
    setup = [f"ip netns add {name}" for name in names]
    setup += [f"ip link add veth0 netns {a} type veth peer name veth0 netns {b}"]
    for name, address in ((a, "10.77.0.1/24"), (b, "10.77.0.2/24")):
        setup += [f"ip -n {name} addr add {address} dev veth0", f"ip -n {name} link set veth0 up"]
        setup += [f"tc -n {name} qdisc add dev veth0 root tbf rate 1gbit burst 128kb latency 50ms"]
    try:
        subprocess.run(["sh", "-ec", "\n".join(setup)], check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)


def noticed_after(way: str) -> float:
    """Seconds from the SIGKILL of a peer until the survivor's socket says so."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as pair, socket.create_server(("127.0.0.1", 0)) as listener:
        monitor = pair.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        addresses = listener.getsockname(), f"tcp://127.0.0.1:{pair.bind_to_random_port('tcp://127.0.0.1')}"
        victim = multiprocessing.get_context("fork").Process(target=wait_for_death, args=addresses, daemon=True)
        victim.start()
        with listener.accept()[0] as sock:
            assert sock.recv(5) == pair.recv() == b"ready"
            start = time.perf_counter()
            victim.kill()
            if way == "tcp":
                sock.recv(1)
            elif way == "zmq, its monitor":
                monitor.recv_multipart()
            else:
                pair.poll(2000)
            seconds = time.perf_counter() - start
        victim.join()
        pair.disable_monitor()
        return seconds


def wait_for_death(address: tuple[str, int], zmq_address: str) -> None:
    ballast = torch.ones(25_000_000)  # a training process has memory to give back before its sockets close
    sock, pair = socket.create_connection(address), zmq.Context().socket(zmq.PAIR)
    pair.connect(zmq_address)
    sock.sendall(b"ready")
    pair.send(b"ready")
    signal.pause()
    del ballast


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["loopback", "wire", "death", "busy", "memory"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--chunk", type=int, default=1024, help="KiB of one system call (TCP) or message (ZeroMQ)")
    parser.add_argument("--buffer", type=int, default=0, help="KiB of SO_SNDBUF and SO_RCVBUF (0: autotuning)")
    parser.add_argument("--sockets", type=int, default=1, choices=(1, 2), help="TCP: 2 is one for each direction")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces go on a kill, too
    print(f"load average {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
    for part in options.only:
        if part == "death":
            ways = {way: way for way in ("tcp", "zmq, its monitor", "zmq, 2 s of poll")}
            figures = {"SIGKILL noticed after": compare(ways, noticed_after, options.repeats)}
        elif part == "wire":
            with wire() as namespaces:
                figures = run_pair(part, "10.77.0.1", namespaces, options)
            next(iter(figures.values()))["the wire's own"] = WIRE_SECONDS
        else:
            figures = run_pair(part, "127.0.0.1", ["", ""], options)
        for what, values in figures.items():
            print(f"{part:9} {what}")
            for name, v in values.items():
                amount = f"{v / 1e6:9.1f} MB" if part == "memory" else f"{v * 1e3:9.3f} ms ({v / values['tcp']:.2f})"
                print(f"{'':10}{name:18}{amount}", flush=True)
    print(f"load average {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
