"""Ranks the topologies of the catalog by the predicted time until all agents agree, and by the costs of training.

The number of rounds to an error depends on the topology (:mod:`shoal.topology.analysis.consensus`), and the time of a
round on the network (:mod:`shoal.netmodel.simulation`). Training differs from agreeing: it averages every few steps,
with incomplete agreement in between. :mod:`shoal.netmodel.training` computes the costs of that, and the needs of the
algorithms decide which topologies can be used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..topology.analysis.consensus import EXACT, rounds_to
from ..topology.families.compose import AllReduce, Kronecker
from ..topology.schedule import Schedule
from .messages import ALLREDUCE, HIERARCHICAL, NEIGHBOR, Averaging, Step, averagings
from .network import Network, format_seconds
from .simulation import simulate
from .training import Training, steps_apart

AS_FAST = 0.05
"""Times that differ by less are equal: the model is not better than that, and fewer rounds are worth more."""

_WINDOW = 24
"""The most rounds that are simulated; the others are assumed to repeat the second half of them."""
_MUCH = 1.5
"""The factor from which a difference is mentioned."""
_LONGEST_EXACT = 64
_BARE_ROUNDS = 4
_PERIODS, _LONGEST_PERIOD = 4, 64
"""Of training, that are played; of a longer one, and of none, as many rounds as of all others."""
_PLAIN = Training()


@dataclass(frozen=True)
class Candidate:
    """One method of averaging on this network.

    Attributes:
        name: of the topology, or of the all-reduce.
        operation: the operation that executes its rounds; several are joined by " and ".
        rounds: to the error; None if it never reaches it, or if that is unknown.
        exact: the rounds end with the exact mean of all.
        seconds_per_round: predicted, on average.
        waiting_share: the share of a round for a tensor of no bytes: latency and overheads.
        models_on_a_nic: the traffic of the busiest NIC in a round, in tensors of the model; on average.
        seconds: predicted, to the error; infinite if `rounds` is None.
        why: a sentence.
        refused: why it cannot be used for training; empty if it can.
        trained_by: the operation with which an optimizer executes its rounds.
        seconds_per_step: of training, computing and messages, on average.
        steps_apart: the distance of agents from their mean during training, in local steps; see
            :func:`~shoal.netmodel.training.steps_apart`.
        training_seconds: `seconds_per_step`, times how many more steps it takes than if agents were together; infinite
            if it is refused.
        schedule: its rounds, of all agents; None for an all-reduce.
    """

    name: str
    operation: str
    rounds: int | None
    exact: bool
    seconds_per_round: float
    waiting_share: float
    models_on_a_nic: float
    seconds: float
    why: str = ""
    refused: str = ""
    trained_by: str = ""
    seconds_per_step: float = math.inf
    steps_apart: float = math.inf
    training_seconds: float = math.inf
    schedule: Schedule | None = None

    @property
    def topology(self) -> Schedule | None:
        """The ``topology=`` of an optimizer that trains with it: of machines, if they average; None for an all-reduce.

        Machines average with ``communication_type=CommunicationType.hierarchical_neighbor_allreduce``.
        """
        if self.trained_by == HIERARCHICAL and isinstance(self.schedule, Kronecker):
            return self.schedule.between
        return self.schedule


@dataclass(frozen=True)
class Recommendation:
    """The result of :func:`recommend`.

    Attributes:
        network, nbytes, error, training: as given.
        candidates: the fastest to agree first, among equal ones the one with the fewest rounds; candidates that never
            agree are last.
        passed_over: ``{name: reason}`` for topologies that cannot be made, or timed, with this number of agents.
    """

    network: Network
    nbytes: float
    error: float
    candidates: tuple[Candidate, ...]
    passed_over: dict[str, str]
    training: Training = _PLAIN

    @property
    def to_train(self) -> tuple[Candidate, ...]:
        """The candidates that agree and can be used for training: the cheapest first, among equal ones the one with the
        fewest rounds.
        """
        able = [candidate for candidate in self.candidates if not candidate.refused and candidate.rounds is not None]
        return tuple(
            _ranked(
                able,
                lambda candidate: candidate.training_seconds,
                lambda candidate: (_many(candidate.rounds), candidate.steps_apart),
            )
        )

    def ties(self) -> list[list[Candidate]]:
        """The candidates in their order, those together that cost the same for the same reasons."""
        groups: list[list[Candidate]] = []
        for candidate in self.candidates:
            if groups and _is_shown_as(candidate, groups[-1][0]):
                groups[-1].append(candidate)
            else:
                groups.append([candidate])
        return groups

    def advice(self) -> list[str]:
        """The recommendation in sentences: the best to agree, the best that is no all-reduce, and the best to train
        with.
        """
        best = self.candidates[0]
        equals = f" Times within {AS_FAST:.0%} count as equal, and fewer rounds decide."
        sentences = [f"To agree to {self.error:g}, take {best.name} ({best.operation}): {best.why}.{equals}"]
        gossip = next((candidate for candidate in self.candidates if candidate.operation != ALLREDUCE), best)
        if gossip is not best and math.isfinite(gossip.seconds):
            times = _times(_ratio(gossip.seconds, best.seconds))
            sentences.append(
                f"Of the exchanges with neighbours take {gossip.name} ({gossip.operation}), {times} as long."
            )
        return [*sentences, *_advice_to_train(self.to_train, self.training)]


def recommend(
    network: Network,
    nbytes: float,
    error: float = 1e-3,
    *,
    training: Training = _PLAIN,
    watched: Callable[[Sequence[Averaging]], Iterable[Averaging]] = iter,
) -> Recommendation:
    """Rank every topology of the catalog, and the all-reduces, on a network. With a thousand agents it takes a minute.

    Args:
        network: the network between the agents.
        nbytes: of one agent's tensors, the model.
        error: the consensus error to reach, relative to that of the start, above 0.
        training: the intended training: local steps, compression, the difference of agents' data.
        watched: iterates over the averaging methods, and may show the progress.

    Raises:
        ValueError: fewer than two agents, an error or a size that is not above 0, or a network on which no message
            takes any time.
    """
    if network.size < 2:
        raise ValueError("a single agent has no neighbour. Pass at least 2 agents.")
    if not 0 < nbytes < math.inf:
        raise ValueError(f"the model has {nbytes} bytes. Pass a number above 0.")
    if not 0 < error < 1:
        raise ValueError(f"error is {error}. Pass a number between 0 and 1, such as 1e-3; the start's is 1.")
    possible, passed_over = averagings(network.size, network.agents_per_machine)
    found = []
    for averaging in watched(possible):
        candidate = _candidate(network, averaging, nbytes, error)
        if averaging.schedule is not None and candidate.operation == ALLREDUCE:
            passed_over[averaging.name] = "for so many agents it is an all-reduce of all in every round"
        else:
            found.append(_trained(network, averaging, nbytes, training, candidate))
    if not any(candidate.seconds_per_round for candidate in found):
        raise ValueError(
            "no message takes any time on this network, so there is nothing to rank by. Give the bandwidth "
            "inside a machine (inside=Link(...) of Network, --inside-bandwidth), or measure it (--measure)."
        )
    ranked = _ranked(
        found, lambda candidate: candidate.seconds, lambda candidate: (_many(candidate.rounds), not candidate.exact)
    )
    explained = tuple(replace(candidate, why=_why(candidate) + _fault(candidate, ranked[0])) for candidate in ranked)
    return Recommendation(network, nbytes, error, explained, passed_over, training)


def _candidate(network: Network, averaging: Averaging, nbytes: float, error: float) -> Candidate:
    needed = _rounds(averaging, error)
    played = min(_WINDOW, needed or _WINDOW)
    operations = averaging.operations(nbytes, played)
    steps = [operation.step for operation in operations]
    timed = _timed(network, steps, needed or played)
    bare = [operation.step for operation in averaging.operations(0.0, min(played, _BARE_ROUNDS))]
    idle = _timed(network, bare, len(bare))
    loads = {id(step): _through_a_nic(network, step) for step in steps}
    return Candidate(
        name=averaging.name,
        operation=" and ".join(sorted({operation.name for operation in operations})),
        rounds=needed,
        # With more rounds the error only approaches zero.
        exact=averaging.schedule is None
        or (needed is not None and needed <= _LONGEST_EXACT and _rounds(averaging, EXACT) == needed),
        seconds_per_round=timed.per_round,
        waiting_share=min(1.0, idle.per_round / timed.per_round) if timed.total else 0.0,
        models_on_a_nic=float(np.mean([loads[id(step)] for step in steps])) / nbytes,
        seconds=math.inf if needed is None else timed.total,
        schedule=averaging.schedule,
    )


def _rounds(averaging: Averaging, error: float) -> int | None:
    if averaging.schedule is None:
        return 1
    return rounds_to(averaging.schedule, error, second_buffer=averaging.second_buffer).at_most


def _trained(
    network: Network, averaging: Averaging, nbytes: float, training: Training, candidate: Candidate
) -> Candidate:
    """The candidate with its costs of training."""
    if averaging.second_buffer:
        return replace(candidate, refused="training mixes parameters by W alone, and has no second buffer")
    refused = "" if averaging.schedule is None else training.refuses(averaging.schedule)
    if refused:
        return replace(candidate, refused=refused)
    trained_by = _trained_by(averaging.schedule, network, training)
    if (
        trained_by == candidate.operation
        and training.message(nbytes, trained_by) == nbytes
        and _is_typical(candidate, averaging.schedule)
    ):
        per_round = candidate.seconds_per_round
    else:
        per_round = _seconds_of_training(network, averaging, training.message(nbytes, trained_by), trained_by)
    per_step = training.seconds_per_step(per_round)
    apart = steps_apart(averaging.schedule, training.local_steps, training.kept)
    cost = per_step * training.times_the_steps(apart)
    return replace(
        candidate, trained_by=trained_by, seconds_per_step=per_step, steps_apart=apart, training_seconds=cost
    )


def _trained_by(schedule: Schedule | None, network: Network, training: Training) -> str:
    """An optimizer has one operation for all rounds."""
    if schedule is None:
        return ALLREDUCE
    between = (
        schedule.between if isinstance(schedule, Kronecker) and isinstance(schedule.inside, AllReduce) else schedule
    )
    of_machines = 1 < schedule.size // between.size == network.agents_per_machine
    return HIERARCHICAL if of_machines and training.compressor is None else NEIGHBOR


def _seconds_of_training(network: Network, averaging: Averaging, message: float, trained_by: str) -> float:
    """The time of a round, on average over all rounds."""
    run = averaging.messages if averaging.messages is not None and trained_by == NEIGHBOR else averaging.operations
    period = _period(averaging.schedule)
    rounds = period * max(1, min(_PERIODS, _WINDOW // period)) if period <= _LONGEST_PERIOD else _WINDOW
    steps = [operation.step for operation in run(message, rounds)]
    return simulate(network, steps).seconds_per_step(skip=period if rounds > period else 0)


def _is_typical(candidate: Candidate, schedule: Schedule | None) -> bool:
    """Whether the rounds to the error stand for all rounds: an exact schedule may be done before its costly ones."""
    period = _period(schedule)
    return candidate.rounds is not None and (candidate.rounds % period == 0 or candidate.rounds >= _WINDOW >= period)


def _period(schedule: Schedule | None) -> int:
    return 1 if schedule is None else schedule.period or _LONGEST_PERIOD + 1


def _ranked(
    candidates: Iterable[Candidate],
    seconds: Callable[[Candidate], float],
    better: Callable[[Candidate], tuple[float, float]],
) -> list[Candidate]:
    """By time; candidates as fast as the fastest of them by rounds, then by ``better``, then by time."""
    remaining = sorted(candidates, key=lambda candidate: _digits(seconds(candidate)))
    ranked: list[Candidate] = []
    while remaining:
        enough = _digits(seconds(remaining[0])) * (1 + AS_FAST)
        as_fast = [candidate for candidate in remaining if _digits(seconds(candidate)) <= enough]
        ranked += sorted(as_fast, key=better)  # stable: the plainest of equal ones first, in the catalog's order
        remaining = remaining[len(as_fast) :]
    return ranked


class _Timed(NamedTuple):
    total: float
    per_round: float


def _timed(network: Network, steps: list[Step], rounds: int) -> _Timed:
    """The time of so many rounds, of which `steps` are the first. The others are assumed to repeat the second half of
    these.
    """
    timeline = simulate(network, steps)
    further = rounds - len(steps)
    total = timeline.seconds
    if further:
        total += further * timeline.seconds_per_step(skip=len(steps) // 2)
    return _Timed(total, total / rounds)


def _through_a_nic(network: Network, step: Step) -> float:
    """Bytes that the busiest NIC sends or receives, whichever is more, in all exchanges of a step."""
    load = np.zeros((2, network.machines))
    for messages in step:
        ends = network.machine_of(messages.source), network.machine_of(messages.destination)
        leaves = ends[0] != ends[1]
        for direction, end in zip(load, ends, strict=True):
            direction += np.bincount(end[leaves], weights=messages.nbytes[leaves], minlength=network.machines)
    return float(load.max())


def _why(candidate: Candidate) -> str:
    if candidate.rounds is None:
        return "it does not agree, or nobody knows after how many rounds"
    seconds = format_seconds(candidate.seconds_per_round)
    rounds = f"{candidate.rounds:,} round{'' if candidate.rounds == 1 else 's'} of {seconds}"
    exactly = ", then exact" if candidate.exact else ""
    models = float(f"{candidate.models_on_a_nic:.3g}")
    nic = (
        f"{models:g} model{'' if models == 1 else 's'} a round through the busiest NIC"
        if models
        else "all inside machines"
    )
    waiting = f"{candidate.waiting_share:.0%} latency" if candidate.waiting_share >= 0.005 else "hardly any latency"
    return f"{rounds}{exactly}; {nic}, {waiting}"


def _fault(candidate: Candidate, best: Candidate) -> str:
    """The reason why it is slower than the best; empty if there is none of importance."""
    if candidate.rounds is None or best.rounds is None or not best.seconds or candidate.seconds < _MUCH * best.seconds:
        return ""
    many, longer = candidate.rounds / best.rounds, candidate.seconds_per_round / best.seconds_per_round
    if many >= longer:
        return f"; {_times(many)} the rounds of the best"
    reason = "waiting" if candidate.waiting_share > 0.5 else "crowding the NIC"
    return f"; each {_times(longer)} as long as the best's, {reason}"


def _is_shown_as(candidate: Candidate, other: Candidate) -> bool:
    same = candidate.why == other.why and bool(candidate.refused) == bool(other.refused)
    times = sorted([candidate.training_seconds, other.training_seconds])
    return same and (bool(candidate.refused) or times[1] <= times[0] * (1 + AS_FAST))


def _advice_to_train(ranked: Sequence[Candidate], training: Training) -> list[str]:
    if not ranked:
        return [f"To train there is nothing to take: {training.algorithm} refuses all of them."]
    best, *others = ranked
    sentences = [
        f"To train, take {best.name} ({best.trained_by}): a step takes {format_seconds(best.seconds_per_step)}"
        f"{_parts_of_a_step(training)}, agents are {best.steps_apart:.2g} local steps apart, and where their data "
        f"differ by {training.difference:g} and the mean gradient is to shrink to {training.accuracy:g} of its length "
        f"it takes {training.times_the_steps(best.steps_apart):.3g} times the steps."
    ]
    mean = next((candidate for candidate in ranked if candidate.schedule is None), None)
    gossip = next((candidate for candidate in ranked if candidate.schedule is not None), None)
    shorter = [candidate for candidate in others if candidate.seconds_per_step < (1 - AS_FAST) * best.seconds_per_step]
    if mean is not None and mean is not best:
        sentences.append(
            f"With {mean.name} it would take {_times(_ratio(mean.training_seconds, best.training_seconds))} as long."
        )
    if mean is best and gossip is not None:
        times = _times(_ratio(gossip.training_seconds, best.training_seconds))
        sentences.append(
            f"Of the exchanges with neighbours, {gossip.name} ({gossip.trained_by}) would take {times} as long."
        )
    if shorter:
        quickest = min(shorter, key=lambda candidate: candidate.seconds_per_step)
        sentences.append(
            f"A step of {quickest.name} is the shortest, {format_seconds(quickest.seconds_per_step)}, but agents are "
            f"{quickest.steps_apart:.2g} steps apart: in all it would take "
            f"{_times(_ratio(quickest.training_seconds, best.training_seconds))} as long."
        )
    if training.compressor is not None:
        sentences.append(
            f"This is for {training.algorithm} with {training.compressor}, if its short messages are what travels: "
            "between real agents Shoal still sends whole tensors."
        )
    return sentences


def _parts_of_a_step(training: Training) -> str:
    sentences = [f"{format_seconds(training.compute)} of it computing"] if training.compute else []
    if training.local_steps > 1:
        sentences.append(f"with an exchange every {training.local_steps} steps")
    return f" ({', '.join(sentences)})" if sentences else ""


def _many(rounds: int | None) -> float:
    return math.inf if rounds is None else rounds


def _digits(seconds: float) -> float:
    """To three digits, below which no difference could be measured."""
    return float(f"{seconds:.3g}")


def _ratio(value: float, of: float) -> float:
    """Infinite of nothing, as on a network where some messages take no time."""
    return value / of if of else math.inf if value else 1.0


def _times(ratio: float) -> str:
    if math.isinf(ratio):
        return "infinitely many times"
    return f"{ratio:,.0f} times" if ratio >= 10 else f"{ratio:.2g} times"
