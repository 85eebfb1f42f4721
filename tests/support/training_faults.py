"""The training of agents of which one fails: the loops and the kinds of fault, by name."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import shoal
from shoal.algorithms import ExactDiffusion, GradientTracking, QuasiGlobalMomentum
from shoal.topology import Circulant

MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "small": lambda: torch.nn.Linear(8, 4),
    "large": lambda: torch.nn.Sequential(torch.nn.Linear(300, 900), torch.nn.ReLU(), torch.nn.Linear(900, 30)),
}
INPUTS = {"small": 8, "large": 300}
FEW_STEPS = 120
"""For a fault that nobody should notice."""
UNTIL_SECONDS = 3.5
"""A loop that nothing ends, as one through windows may be, ends by itself."""
BUSY_SECONDS = 1.5
BEGUN = "the training has begun"
"""A line of each agent's log: an interrupt before it would end the process instead of the training."""
AT_LEAST = 0.002
"""Seconds of a step, so that faults come in the middle of training on a slow machine too."""


def _halves(size: int) -> Any:
    """A ring whose agents keep half, on which every algorithm converges."""
    return Circulant(size, {0: 0.5, 1: 0.25, -1: 0.25}) if size > 2 else shoal.topology.FullyConnectedGraph(2)


def _of_algorithm(algorithm: Any, inner: torch.optim.Optimizer, model: torch.nn.Module) -> Any:
    return shoal.DecentralizedOptimizer(inner, model, algorithm, topology=_halves(shoal.size()))


WRAPPERS: dict[str, Callable[[torch.optim.Optimizer, torch.nn.Module], Any]] = {
    "atc": shoal.DecentralizedOptimizer,
    "awc": partial(shoal.DecentralizedOptimizer, algorithm=shoal.algorithms.GradientDescent(1.0, atc=False)),
    "backward": functools.partial(shoal.DecentralizedOptimizer, overlap="backward", bucket_bytes=1 << 17),
    "gradients": shoal.bluefog.DistributedGradientAllreduceOptimizer,
    "tracking": functools.partial(_of_algorithm, GradientTracking(1.0)),
    "diffusion": functools.partial(_of_algorithm, ExactDiffusion(1.0, lazy=True)),
    "quasi-global": functools.partial(_of_algorithm, QuasiGlobalMomentum(1.0, 0.5)),
    "put": shoal.optim.DistributedWinPutOptimizer,
    "get": shoal.optim.DistributedPullGetOptimizer,
    "push": shoal.optim.DistributedPushSumOptimizer,
}
WINDOWS = ("put", "get", "push")


@dataclass(frozen=True)
class Fault:
    """A drawn fault. ``kind`` is a name of ``KINDS``; ``after`` the seconds of training before it.

    Attributes:
        busy: The rank that keeps the interpreter lock between steps; -1: none.
        then: The action of an agent whose batches have ended: "leave", or "linger" for longer than all timeouts.
    """

    seed: int
    kind: str
    wrapper: str
    transport: str
    size: int
    model: str
    graph: str
    victim: int
    after: float
    timeout: float
    busy: int
    then: str

    def __str__(self) -> str:
        return f"{self.seed}-{self.kind}-{self.wrapper}-{self.transport}-{self.size}-{self.model}"

    @property
    def in_step(self) -> bool:
        return self.wrapper not in WINDOWS


KINDS = ("kill", "interrupt", "exception", "leave", "unequal", "deadline", "stop", "busy")
"""Killed; Ctrl-C; an error that ends the script; one that is caught, after which the agent leaves; fewer batches; a
step that takes longer than others wait; a process that is stopped for a second; one that is killed while another keeps
the interpreter lock."""


def draw(seed: int) -> Fault:
    """Kinds and wrappers come in turn, so that few seeds meet all of both; everything else is drawn."""
    chance = random.Random(f"training fault {seed}")
    kind, size = KINDS[seed % len(KINDS)], chance.randint(2, 5)
    victim = chance.randrange(size)
    others = [rank for rank in range(size) if rank != victim]
    return Fault(
        seed,
        kind,
        list(WRAPPERS)[(3 * seed + seed // 40) % len(WRAPPERS)],  # 80 seeds are all pairs of a kind and a wrapper
        chance.choice(["shared_memory", "network"]),
        size,
        chance.choice(list(MODELS)),
        chance.choice(["ring", "exponential"]),
        victim,
        chance.uniform(0.0, 0.5),
        # Long where a loss has to be noticed without it: on a busy machine an agent may begin seconds after the others.
        {"deadline": 2.0, "unequal": 2.0, "stop": 5.0}.get(kind, 15.0),
        chance.choice(others) if kind == "busy" else -1,
        chance.choice(["leave", "linger"]),
    )


@dataclass(frozen=True)
class AgentEnd:
    """How one agent's training ended, by its own account.

    Attributes:
        error: The class of the error that it caught; empty if none came.
        noticed: Seconds of the clock of all processes when it did.
        shutdown: Seconds that ``shutdown()`` took.
    """

    error: str
    ranks: tuple[int, ...]
    said: str
    steps: int
    noticed: float
    shutdown: float


class OwnError(Exception):
    """The exception of one agent's script."""


def ready() -> None:
    """Everything that the first step would have to load has been."""
    model = MODELS["small"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(4, INPUTS["small"])).square().mean().backward()
    optimizer.step()


def train(fault: Fault) -> AgentEnd:
    """Train until the end or an error, catch it, and leave. The agent triggers its own fault, except signals."""
    error, ranks, output, loop = "", (), "", None
    try:
        print(BEGUN, flush=True)
        loop = _Loop(fault)
        loop.run()
    except shoal.ShoalError as caught:
        error, ranks, output = type(caught).__name__, caught.ranks, str(caught)
    except KeyboardInterrupt:
        error = "KeyboardInterrupt"
    except OwnError as caught:
        if fault.kind == "exception":
            raise
        error, output = type(caught).__name__, str(caught)
    noticed = time.monotonic()
    steps = loop.steps if loop else 0
    del loop
    started = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C
        shoal.shutdown()
    return AgentEnd(error, ranks, output, steps, noticed, time.monotonic() - started)


class _Loop:
    """A training loop that goes wrong as a fault says."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.steps = fault, 0
        self.failing = shoal.rank() == fault.victim
        size = shoal.size()
        shoal.set_topology(
            shoal.topology.RingGraph(size) if fault.graph == "ring" else shoal.topology.ExponentialTwoGraph(size)
        )
        torch.manual_seed(0)
        self.model = MODELS[fault.model]()
        self.inner = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.libc = ctypes.PyDLL(None)  # its calls keep the interpreter lock

    def run(self) -> None:
        fault = self.fault
        optimizer = WRAPPERS[fault.wrapper](self.inner, self.model)
        x = torch.ones(4, INPUTS[fault.model])

        def evaluate() -> float:
            optimizer.zero_grad()
            loss = self.model(x).square().mean()
            loss.backward()
            return loss.item()

        start, late = time.monotonic(), False
        while not self._is_over(time.monotonic() - start):
            if self.failing and not late and time.monotonic() - start >= fault.after:
                late = True
                self._fail()
            if fault.wrapper == "tracking":
                optimizer.step(evaluate)
            else:
                evaluate()
                optimizer.step()
            self.steps += 1
            if fault.busy == shoal.rank():
                self.libc.usleep(int(BUSY_SECONDS * 1e6))
            time.sleep(AT_LEAST)
        self._end()

    def _is_over(self, seconds: float) -> bool:
        if self.fault.kind == "stop":
            return self.steps >= FEW_STEPS
        if self.failing and self.fault.kind == "unequal" and seconds >= self.fault.after:
            return True
        return seconds >= UNTIL_SECONDS

    def _fail(self) -> None:
        if self.fault.kind in ("exception", "leave"):
            raise OwnError(f"rank {shoal.rank()} cannot read its batch")
        if self.fault.kind == "deadline":
            time.sleep(self.fault.timeout * 1.5)

    def _end(self) -> None:
        fault = self.fault
        if self.failing and fault.kind == "unequal":
            if fault.then == "linger":  # it writes its results, say
                time.sleep(fault.timeout * 2)
        else:  # what one does after training: everybody is asked
            shoal.allreduce(torch.ones(3), name="result")
