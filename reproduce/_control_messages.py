"""Control messages by which agents agree on an order: counted on real agents, and modelled for a whole machine."""

from __future__ import annotations

import math
import os
import random
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

import shoal
from shoal.coordination import round as coordination
from shoal.coordination.ordering import CALL, ROUND
from shoal.runtime.agent import current
from shoal.transport.link import Published
from shoal.transport.messages import Kind, Message, encode
from shoal.transport.process_group import ProcessGroups
from shoal.transport.threads import ThreadLink

KINDS = ("coordinator", "tree", "cached", "edge-matched")
OPERATIONS, STEPS = 160, 3
REQUEST_BYTES = 64
"""Of one call that is asked for, as it is put together with those of others."""


class _Counts:
    """Counts messages without tensors, of all agents."""

    def __init__(self, of_edges: bool) -> None:
        self.messages: Counter[int] = Counter()
        self.nbytes: Counter[int] = Counter()
        self._of_edges = of_edges
        self._lock = threading.Lock()
        self._post = ThreadLink.post

    def clear(self) -> None:
        with self._lock:
            self.messages.clear()
            self.nbytes.clear()

    def post(
        self, link: ThreadLink, message: Message, published: Published | None = None, start: int = 0, stop: int = 0
    ) -> None:
        coordinates = message.name.startswith((ROUND, CALL)) or message.kind is Kind.DONE
        matches = (message.kind is Kind.DATA and not message.name.startswith("~")) or message.name.startswith("~fused")
        if matches if self._of_edges else coordinates:
            head = len(encode(message))
            message.tail = b""
            said = (stop - start) * published.data.element_size() if published is not None and coordinates else 0
            with self._lock:
                for rank in (link._rank, link.peer):
                    self.messages[rank] += 1
                    self.nbytes[rank] += head + said
        self._post(link, message, published, start, stop)


def counted(size: int, kind: str) -> tuple[float, float]:
    """Count messages and bytes that the busiest agent sends and receives in a step after the first.

    Counted are messages about the order; of "edge-matched" calls, the headers. Tensors are not moved.
    """
    counts = _Counts(kind == "edge-matched")

    def step() -> None:
        draw = random.Random(shoal.rank())
        with current().engine.lock:  # all is given before anybody drives
            handles = [
                shoal.nonblocking.neighbor_allreduce(torch.ones(64), f"gradient {number}")
                for number in draw.sample(range(OPERATIONS), OPERATIONS)
            ]
        for handle in handles:
            handle.wait()

    def run() -> None:
        shoal.set_topology(shoal.topology.RingGraph(size))
        for _ in range(2):
            step()
        together.wait()
        if not shoal.rank():
            counts.clear()
        together.wait()
        for _ in range(STEPS):
            step()
        together.wait()
        if not shoal.rank():
            found.append((max(counts.messages.values()) / STEPS, max(counts.nbytes.values()) / STEPS))
        together.wait()

    together, found = threading.Barrier(size), list[tuple[float, float]]()
    flat = {"coordinator": 1 << 30, "tree": 1}.get(kind, coordination.FLAT)
    originals = coordination.FLAT, ProcessGroups._move, ThreadLink.post
    coordination.FLAT, ProcessGroups._move = flat, _moved_at_once  # type: ignore[method-assign]
    ThreadLink.post = lambda link, *args: counts.post(link, *args)  # type: ignore[method-assign, assignment]
    os.environ["SHOAL_CACHE_CAPACITY"] = "1024" if kind == "cached" else "0"
    try:
        shoal.Fleet(size, transport="threads" if kind == "edge-matched" else "process-group", timeout=120.0).run(run)
    finally:
        coordination.FLAT, ProcessGroups._move, ThreadLink.post = originals  # type: ignore[method-assign]
        del os.environ["SHOAL_CACHE_CAPACITY"]
    return found[0]


def _moved_at_once(groups: ProcessGroups, _there: Any, several: list[Any]) -> None:
    for run in several:
        groups._finished(run)


# On a whole machine


@dataclass(frozen=True)
class Paper:
    """Summit in the paper on Horovod's response cache (Romero et al., NSDI 2022), with assumptions for missing numbers.

    Attributes:
        agents: GPUs.
        bandwidth: Of a node, bytes a second.
        latency: Of a message between nodes, seconds; an assumption: EDR InfiniBand through MPI.
        overhead: Processor time to send or receive a message, seconds; an assumption: MPI's on a POWER9.
    """

    agents: int = 27_600
    bandwidth: float = 23e9
    latency: float = 1.5e-6
    overhead: float = 1e-6

    def __str__(self) -> str:
        return (
            f"Control of one step with 160 calls on Summit: messages of {1e6 * self.latency:g} us latency and "
            f"{1e6 * self.overhead:g} us of processor time, {self.bandwidth / 1e9:g} GB/s (assumed, but for the last)"
        )


PAPER = Paper()


def modelled(kind: str, agents: int, paper: Paper = PAPER) -> float:
    """Seconds of one negotiation: a round of bits; with a coordinator also requests up and its decision down."""
    steps = math.ceil(math.log2(agents))
    bits = steps * (paper.latency + 2 * paper.overhead + (2 * OPERATIONS / 8 + 100) / paper.bandwidth)
    if kind == "cached":
        return bits
    fan_out = agents - 1 if kind == "coordinator" else coordination.FAN_OUT
    levels, here = 0, 1
    while here < agents:
        here, levels = here * fan_out + 1, levels + 1
    said = OPERATIONS * REQUEST_BYTES
    # A node of the tree receives from and sends to fan_out others, one after the other.
    return bits + 2 * levels * (paper.latency + fan_out * (paper.overhead + said / paper.bandwidth))
