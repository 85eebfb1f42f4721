"""The draws of a seed: the program, the network, and the faults."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from .network import Weather
from .programs import FUSIBLE, KINDS, ONE_EXCHANGE, Call, Program
from .training import Training

SHORT = 3.0
"""The longest that a partition lasts which all survive."""
FAULTS = (
    *("none", "none", "cut", "cut", "partition", "slow", "crash", "shape", "other call", "missing call", "leaves"),
    "leaves pending",
)
CONTINUED = "crash, continue"
REJOINS = "rejoins"
ONLY = {CONTINUED: ("average",), "leaves pending": ONE_EXCHANGE}
"""The calls of a program with some of the faults."""


@dataclass(frozen=True)
class Fault:
    """A fault: at a step of the scheduler, or at a call of an agent.

    Attributes:
        kind: One of :data:`FAULTS`.
        at: The step, or the number of the call.
        rank, other: The affected agent; the peer of the connection.
        seconds: How long it lasts.
    """

    kind: str
    at: int
    rank: int
    other: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return {
            "cut": f"step {self.at}: the connections of ranks {self.rank} and {self.other} are cut",
            "partition": f"step {self.at}: rank {self.rank} is apart from the others for {self.seconds:.3g} s",
            "slow": f"rank {self.rank} pauses for up to {self.seconds:.3g} s before each of its steps",
            "crash": f"step {self.at}: rank {self.rank} crashes",
            "returns": f"step {self.at}: rank {self.rank} crashes, and is started again after {self.seconds:.3g} s",
            "departs": f"training step {self.at}: rank {self.rank} leaves, and returns after {self.seconds:.3g} s",
            "joins": f"rank {self.rank} is started {self.seconds:.3g} s after the others, and joins",
            "shape": f"call {self.at}: rank {self.rank} gives a tensor with one number more",
            "other call": f"call {self.at}: rank {self.rank} makes another call under that name",
            "missing call": f"call {self.at}: rank {self.rank} does not make it, and waits with the next for 2 s",
            "leaves pending": f"rank {self.rank} leaves without waiting for what it has begun",
            "leaves": f"call {self.at}: rank {self.rank} leaves in its place",
        }[self.kind]


@dataclass(frozen=True)
class Scenario:
    """All that a seed decides."""

    seed: int
    program: Program
    weather: Weather
    faults: tuple[Fault, ...]
    on_loss: str = "raise"

    @staticmethod
    def draw(seed: int) -> Scenario:
        chance = random.Random(seed)
        size = chance.choice((2, 3, 3, 4, 4, 5))
        kind = chance.choice((*FAULTS, CONTINUED, REJOINS, REJOINS))
        if kind == REJOINS:
            return _draw_training(seed, chance, size)
        length = chance.choice((3, 8, 15, 30))
        kinds = FUSIBLE if chance.random() < 0.3 else KINDS
        if kind in ONLY:
            kinds = ONLY[kind]
        program = Program.draw(chance, size, length, kinds)
        weather = _draw_weather(chance)
        faults = [_draw_fault(chance, kind.partition(",")[0], program) for _ in range(_how_many(chance, kind))]
        faults += _cut_again(chance, faults)
        return Scenario(seed, program, weather, tuple(faults), "continue" if kind == CONTINUED else "raise")

    @staticmethod
    def calm(seed: int, size: int, length: int) -> Scenario:
        """So many agents and operations, without faults."""
        chance = random.Random(seed)
        return Scenario(seed, Program.draw(chance, size, length, KINDS), _draw_weather(chance), ())

    def __str__(self) -> str:
        p, w = self.program, self.weather
        lines = [f"{p.size} agents on the {p.topology} graph, on_loss={self.on_loss!r}; {w}"]
        return "\n".join([*lines, *map(str, p.calls), *map(str, self.faults)])


def _draw_weather(chance: random.Random) -> Weather:
    return Weather(
        chance.choice((0.0001, 0.001, 0.02)),
        chance.choice((0.0, 0.3, 0.9)),
        chance.choice((1 << 12, 1 << 14, 1 << 18)),
    )


def _draw_training(seed: int, chance: random.Random, size: int) -> Scenario:
    """Agents crash, some of them again while they enter, and one may join; the network may fail as well."""
    program = Training.draw(chance, size, chance.choice((1, 2, 4, 6)))
    weather, faults = _draw_weather(chance), []
    begins = size
    if size > 2 and chance.random() < 0.3:
        begins -= 1
        faults.append(Fault("joins", 0, begins, seconds=chance.uniform(0.0, 0.5)))
    for _ in range(chance.choice((1, 1, 2, 3))):
        at, rank = chance.randrange(30 * size, 400 * size), chance.randrange(begins)
        faults.append(Fault("returns", at, rank, seconds=chance.choice((0.0, 0.001, 0.05, 0.3)) * chance.random()))
    if size > 2 and chance.random() < 0.3:
        faults.append(
            Fault("departs", chance.randrange(1, 4), chance.randrange(begins), seconds=chance.choice((0, 0.3)))
        )
    for _ in range(chance.choice((0, 0, 1, 3))):
        faults.append(_draw_fault(chance, "cut", program))
    faults += _cut_again(chance, faults)
    if chance.random() < 0.1:
        faults.append(Fault("slow", 0, chance.randrange(size), seconds=0.0005))
    return Scenario(seed, program, weather, tuple(faults), "continue")


def _how_many(chance: random.Random, kind: str) -> int:
    return 0 if kind == "none" else chance.randint(1, 6) if kind == "cut" else 1


def _cut_again(chance: random.Random, faults: list[Fault]) -> list[Fault]:
    """Cuts that follow others on the same connections so soon that these may still be sending again."""
    return [
        replace(fault, at=fault.at + chance.choice((5, 15, 50)) + chance.randrange(10))
        for fault in faults
        if fault.kind == "cut" and chance.random() < 0.5
    ]


def _draw_fault(chance: random.Random, kind: str, program: Program) -> Fault:
    rank, other = chance.sample(range(program.size), 2)
    averages = all(call.kind == "average" for call in program.calls)
    steps = 50 * program.size + (3 if averages else 8) * program.size * len(program.calls)
    if kind in ("shape", "other call", "missing call", "leaves"):
        able = [call.number for call in program.calls if _can_be_wrong(call, kind, rank)]
        return Fault(kind, chance.choice(able), rank) if able else Fault("slow", 0, rank, seconds=0.001)
    at = chance.randrange(30 * program.size, steps)
    seconds = chance.choice((0.0005, 0.005, 0.05)) if kind == "slow" else chance.uniform(0.01, SHORT)
    return Fault(kind, at, rank, other, seconds)


def _can_be_wrong(call: Call, kind: str, rank: int) -> bool:
    if kind == "leaves":
        return True
    fits = call.kind in ("static", "average", "sum", "max", "pull", "push-pull")
    if call.sends and not call.sends[rank] and not any(rank in to for to in call.sends):
        return False  # its weights are for no other agent, so none can know
    return fits and (kind != "missing call" or call.blocking)
