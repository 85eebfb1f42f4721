"""Which topology? Ranks those of the catalog by the predicted time until all agents agree, and says why.

Agreeing to an error takes a number of rounds, which is the topology's (:mod:`shoal.topology.consensus`), and each takes
a time, which is the network's (:mod:`shoal.sim.simulate`). Training is not the same as agreeing: it averages once a
step, and agrees as well as the topology lets it meanwhile. So the time of one round is given, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..topology.consensus import EXACT, rounds_to
from ..topology.schedule import Schedule
from .candidates import Way, ways
from .messages import Step
from .network_model import Network
from .operations import ALLREDUCE
from .simulate import simulate
from .units import format_seconds

_WINDOW = 24
"""Rounds that are played at most; the others are taken to go on like the second half of them."""
_MUCH = 1.5
"""How many times as much is worth a word."""
_LONGEST_EXACT = 64
_BARE_ROUNDS = 4


@dataclass(frozen=True)
class Candidate:
    """One way to average on this network.

    Attributes:
        name: of the topology, or of the all-reduce.
        operation: what carries out its rounds; several are joined by " and ".
        rounds: to the error; None if it never gets there, or nobody knows.
        exact: they end with the exact mean of all.
        seconds_per_round: predicted, on average.
        waiting_share: of a round, what a tensor of no bytes would take: latency and overheads.
        models_on_a_card: of a round, what the busiest card sends or receives, in tensors of the model; on average.
        seconds: predicted, to the error; infinite if `rounds` is None.
        why: a sentence.
    """

    name: str
    operation: str
    rounds: int | None
    exact: bool
    seconds_per_round: float
    waiting_share: float
    models_on_a_card: float
    seconds: float
    why: str = ""


@dataclass(frozen=True)
class Recommendation:
    """What :func:`recommend` found.

    Attributes:
        network, nbytes, error: as given.
        candidates: the fastest first; those that never agree come last.
        passed_over: ``{name: why}`` for topologies that cannot be made, or timed, for this number of agents.
    """

    network: Network
    nbytes: float
    error: float
    candidates: tuple[Candidate, ...]
    passed_over: dict[str, str]

    def ties(self) -> list[list[Candidate]]:
        """The candidates in their order, those together that cost the same for the same reasons."""
        return [list(group) for _, group in itertools.groupby(self.candidates, key=lambda one: one.why)]

    def advice(self) -> list[str]:
        """What to take, in sentences: the best, the best that is no all-reduce, and the shortest round."""
        best = self.candidates[0]
        said = [f"To agree to {self.error:g}, take {best.name} ({best.operation}): {best.why}."]
        gossip = next((one for one in self.candidates if one.operation != ALLREDUCE), best)
        if gossip is not best and math.isfinite(gossip.seconds):
            times = f"{gossip.seconds / best.seconds:.2g} times as long"
            said.append(f"Of those that talk to neighbours only, take {gossip.name} ({gossip.operation}), {times}.")
        agreeing = [one for one in self.candidates if one.rounds is not None]
        shortest = min(agreeing, key=lambda one: (_digits(one.seconds_per_round), one.seconds))
        said.append(
            "Training averages once a step and need not agree each time, so there the length of a round counts: "
            f"{shortest.name} has the shortest, {format_seconds(shortest.seconds_per_round)}, and agrees after "
            f"{shortest.rounds}."
        )
        return said


def recommend(
    network: Network,
    nbytes: float,
    error: float = 1e-3,
    *,
    watched: Callable[[Sequence[Way]], Iterable[Way]] = iter,
) -> Recommendation:
    """Rank every topology of the catalog, and the all-reduces, for a network. For a thousand agents it takes a minute.

    Args:
        network: what is between the agents.
        nbytes: of one agent's tensors, the model.
        error: the consensus error to reach, relative to that of the start, above 0.
        watched: goes through the ways to average for it, one by one, and may show how far it is.

    Raises:
        ValueError: fewer than two agents, or an error or a size that is not above 0.
    """
    if network.size < 2:
        raise ValueError("a single agent has nobody to agree with. Pass at least 2 agents.")
    if not 0 < nbytes < math.inf:
        raise ValueError(f"the model has {nbytes} bytes. Pass a number above 0.")
    if not 0 < error < 1:
        raise ValueError(f"error is {error}. Pass a number between 0 and 1, such as 1e-3; the start's is 1.")
    possible, passed_over = ways(network.size, network.agents_per_machine)
    found = []
    for way in watched(possible):
        one = _candidate(network, way, nbytes, error)
        if way.schedule is not None and one.operation == ALLREDUCE:
            passed_over[way.name] = "for so many agents it is an all-reduce of all in every round"
        else:
            found.append(one)
    # Of those that are equally fast, exact ones come first, and of these the plainest, in the catalog's order.
    found.sort(key=lambda one: (_digits(one.seconds), not one.exact))
    told = tuple(replace(one, why=_why(one) + _fault(one, found[0])) for one in found)
    return Recommendation(network, nbytes, error, told, passed_over)


def _candidate(network: Network, way: Way, nbytes: float, error: float) -> Candidate:
    needed = 1 if way.schedule is None else rounds_to(way.schedule, error).at_most
    played = min(_WINDOW, needed or _WINDOW)
    operations = way.operations(nbytes, played)
    steps = [operation.step for operation in operations]
    timed = _timed(network, steps, needed or played)
    bare = [operation.step for operation in way.operations(0.0, min(played, _BARE_ROUNDS))]
    idle = _timed(network, bare, len(bare))
    loads = {id(step): _through_a_card(network, step) for step in steps}
    return Candidate(
        name=way.name,
        operation=" and ".join(sorted({operation.name for operation in operations})),
        rounds=needed,
        exact=way.schedule is None or _is_exact(way.schedule, needed),
        seconds_per_round=timed.per_round,
        waiting_share=min(1.0, idle.per_round / timed.per_round) if timed.total else 0.0,
        models_on_a_card=float(np.mean([loads[id(step)] for step in steps])) / nbytes,
        seconds=math.inf if needed is None else timed.total,
    )


def _is_exact(schedule: Schedule, rounds: int | None) -> bool:
    # What takes longer only comes closer and closer.
    return rounds is not None and rounds <= _LONGEST_EXACT and rounds_to(schedule, EXACT).at_most == rounds


class _Timed(NamedTuple):
    total: float
    per_round: float


def _timed(network: Network, steps: list[Step], rounds: int) -> _Timed:
    """So many rounds, of which `steps` are the first. The others go on like the second half of these."""
    timeline = simulate(network, steps)
    further = rounds - len(steps)
    total = timeline.seconds
    if further:
        total += further * timeline.seconds_per_step(skip=len(steps) // 2)
    return _Timed(total, total / rounds)


def _through_a_card(network: Network, step: Step) -> float:
    """Bytes that the busiest card sends or receives, whichever is more, in all exchanges of a step."""
    load = np.zeros((2, network.machines))
    for messages in step:
        ends = network.machine_of(messages.source), network.machine_of(messages.destination)
        leaves = ends[0] != ends[1]
        for way, end in zip(load, ends, strict=True):
            way += np.bincount(end[leaves], weights=messages.nbytes[leaves], minlength=network.machines)
    return float(load.max())


def _why(one: Candidate) -> str:
    if one.rounds is None:
        return "it does not agree, or nobody knows after how many rounds"
    rounds = f"{one.rounds:,} round{'' if one.rounds == 1 else 's'} of {format_seconds(one.seconds_per_round)}"
    exactly = ", then exact" if one.exact else ""
    models = float(f"{one.models_on_a_card:.3g}")
    card = (
        f"{models:g} model{'' if models == 1 else 's'} a round through the busiest card"
        if models
        else "all inside machines"
    )
    waiting = f"{one.waiting_share:.0%} latency" if one.waiting_share >= 0.005 else "hardly any latency"
    return f"{rounds}{exactly}; {card}, {waiting}"


def _fault(one: Candidate, best: Candidate) -> str:
    """What makes it slower than the best; empty if nothing much does."""
    if one.rounds is None or best.rounds is None or one.seconds < _MUCH * best.seconds:
        return ""
    many, longer = one.rounds / best.rounds, one.seconds_per_round / best.seconds_per_round
    if many >= longer:
        return f"; {_times(many)} the rounds of the best"
    reason = "waiting" if one.waiting_share > 0.5 else "crowding the card"
    return f"; each {_times(longer)} as long as the best's, {reason}"


def _digits(seconds: float) -> float:
    """To three digits, below which no difference could be measured."""
    return float(f"{seconds:.3g}")


def _times(ratio: float) -> str:
    return f"{ratio:,.0f} times" if ratio >= 10 else f"{ratio:.2g} times"
