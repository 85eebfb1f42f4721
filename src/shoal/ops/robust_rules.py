"""Robust rules that replace the average of neighbours' tensors if an agent does not trust all neighbours.

One faulty neighbour can move a plain average anywhere: NaN after an overflow, numbers from broken memory, or lies. Each
rule here bounds the influence of one neighbour. The rules cost more than an average, and their result is not the mean
if honest agents differ much: choose the weakest sufficient rule.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch

from ..arithmetic import weigh_in_blocks
from ..runtime.agent import Agent
from ..topology._validate import check_count

log = logging.getLogger("shoal")
BLOCK = 1 << 16
"""Elements that are worked on at a time."""
Term = tuple[int, torch.Tensor, float]
"""A neighbour's rank, its tensor (flat) and its weight."""
_named: set[tuple[int, int]] = set()
_warned: set[tuple[int, Robust]] = set()
"""The agents and rules with a logged warning that too few neighbours are left."""


class Robust(ABC):
    """A rule that takes the place of the weighted average; a frozen dataclass, so that agents can compare theirs.

    Attributes:
        neighbours_needed: The fewest neighbours that an agent needs in a round, unless it has none at all.
    """

    @property
    def neighbours_needed(self) -> int:
        return 1

    def combine(
        self, rank: int, out: torch.Tensor, own: torch.Tensor, own_weight: float, terms: Sequence[Term]
    ) -> None:
        """Write to ``out`` what agent ``rank`` makes of its own tensor and those of its neighbours.

        Tensors that are not finite are left out, their weight is added to its own, and the log names the senders once.
        """
        finite = []
        for source, tensor, weight in terms:
            # Before any distance: that to a NaN is NaN, which no sort can place, so one faulty neighbour could decide
            # the radius.
            if _is_finite(tensor):
                finite.append((source, tensor, weight))
                continue
            # The weights must still sum to 1, or each round with a faulty neighbour would shrink the model.
            own_weight += weight
            if (rank, source) not in _named:
                _named.add((rank, source))
                log.warning("rank %d leaves out the values of rank %d: they are not finite", rank, source)
        self._combine(out, own, own_weight, finite)

    @abstractmethod
    def _combine(self, out: torch.Tensor, own: torch.Tensor, own_weight: float, terms: Sequence[Term]) -> None:
        """As :meth:`combine`, for tensors that are finite, except possibly ``own``."""


@dataclass(frozen=True)
class FiniteOnly(Robust):
    """The weighted average of the finite tensors: no neighbour's NaN or infinity spreads.

    This agent's own tensor takes the weights of the tensors left out.
    """

    def _combine(self, out: torch.Tensor, own: torch.Tensor, own_weight: float, terms: Sequence[Term]) -> None:
        weigh_in_blocks(out, own, own_weight, [tensor for _, tensor, _ in terms], [weight for _, _, weight in terms])


@dataclass(frozen=True)
class ClippedGossip(Robust):
    """Self-centred clipping: ``x_i <- sum_j w_ij (x_i + clip(x_j - x_i, radius))`` (He, Karimireddy, Jaggi, "Byzantine-
    robust decentralized learning via ClippedGossip", 2022).

    A neighbour's tensor at any distance moves this agent by at most its weight times ``radius``. A nearer tensor counts
    as in the plain average, bit for bit.

    Args:
        radius: In the norm of a tensor: the distance between honest neighbours. If not given, it is computed in each
            round for each tensor: the largest distance after the ``tolerated`` largest are removed.
        tolerated: How many neighbours of one agent may send nonsense, if ``radius`` is not given. An agent then needs
            ``2 tolerated + 1`` neighbours in a round: with fewer, the honest ones may not be the majority, and equal
            neighbours can make the radius 0, so that agents stop at different values.

    Raises:
        TypeError: ``radius`` is no number, or ``tolerated`` is no whole number.
        ValueError: ``radius`` is negative or NaN, or ``tolerated`` is less than 1.
    """

    radius: float | None = None
    tolerated: int = 1

    def __post_init__(self) -> None:
        if self.radius is not None and not isinstance(self.radius, Real):
            raise TypeError(f"ClippedGossip: radius={self.radius!r} must be a number, or None")
        if self.radius is not None and not self.radius >= 0:
            raise ValueError(f"ClippedGossip: radius={self.radius!r} must be 0 or more")
        check_count(self, "tolerated")

    @property
    def neighbours_needed(self) -> int:
        return 1 if self.radius is not None else 2 * self.tolerated + 1

    def _combine(self, out: torch.Tensor, own: torch.Tensor, own_weight: float, terms: Sequence[Term]) -> None:
        distances = [_distance(own, tensor) for _, tensor, _ in terms]
        radius = _radius_without(self.tolerated, distances) if self.radius is None else self.radius
        _clip(out, own, own_weight, terms, distances, radius)


@dataclass(frozen=True)
class ClippedSum(Robust):
    """CS+: clipping to the distance of the (2b + 1)-th farthest neighbour, with ``b = tolerated`` (Gaucher, Dieuleveut,
    Hendrikx, "Unified breakdown analysis for Byzantine robust gossip", 2025, arXiv:2410.10418).

    ``x_i <- x_i + sum_j w_ij clip(x_j - x_i, radius)``: :class:`ClippedGossip` whose radius leaves twice as many
    neighbours beyond it. The paper counts weights: where those of an agent's neighbours are equal, weight 2b w beyond
    the radius is 2b neighbours. Where they differ, this rule counts neighbours.

    Args:
        tolerated: How many neighbours of one agent may send nonsense. An agent needs ``2 tolerated + 1`` neighbours in
            a round: with fewer the radius is 0.

    Raises:
        TypeError: ``tolerated`` is no whole number.
        ValueError: ``tolerated`` is less than 1.
    """

    tolerated: int = 1

    def __post_init__(self) -> None:
        check_count(self, "tolerated")

    @property
    def neighbours_needed(self) -> int:
        return 2 * self.tolerated + 1

    def _combine(self, out: torch.Tensor, own: torch.Tensor, own_weight: float, terms: Sequence[Term]) -> None:
        distances = [_distance(own, tensor) for _, tensor, _ in terms]
        _clip(out, own, own_weight, terms, distances, _radius_without(2 * self.tolerated, distances))


@dataclass(frozen=True)
class NearestNeighbours(Robust):
    """NNA, nearest-neighbour averaging: the mean of the own tensor and the nearest of the neighbours' (Farhadkhani et
    al., "Robust collaborative learning with linear gradient overhead", 2023, arXiv:2209.10931).

    The ``tolerated`` farthest tensors are left out; of equally far ones those of higher ranks. All others count alike:
    the weights of the topology only select the participants. The paper's agents do not wait for slow neighbours, and
    so leave out as many again; here every neighbour's tensor arrives.

    Args:
        tolerated: How many neighbours of one agent may send nonsense. An agent needs ``2 tolerated + 1`` neighbours in
            a round.

    Raises:
        TypeError: ``tolerated`` is no whole number.
        ValueError: ``tolerated`` is less than 1.
    """

    tolerated: int = 1

    def __post_init__(self) -> None:
        check_count(self, "tolerated")

    @property
    def neighbours_needed(self) -> int:
        return 2 * self.tolerated + 1

    def _combine(self, out: torch.Tensor, own: torch.Tensor, own_weight: float, terms: Sequence[Term]) -> None:
        distances = [_distance(own, tensor) for _, tensor, _ in terms]
        nearest = sorted(range(len(terms)), key=distances.__getitem__)[: max(0, len(terms) - self.tolerated)]
        # In rank order again: the order of a sum decides its last bits.
        tensors = [terms[place][1] for place in sorted(nearest)]
        share = 1 / (len(tensors) + 1)
        weigh_in_blocks(out, own, share, tensors, [share] * len(tensors))


@dataclass(frozen=True)
class TrimmedMean(Robust):
    """In each coordinate the mean without the ``count`` largest and the ``count`` smallest numbers, including this
    agent's own (Yin, Chen, Ramchandran, Bartlett, "Byzantine-robust distributed learning", 2018).

    All count alike: the weights of the topology only select the participants. An agent needs ``2 count + 1`` neighbours
    in a round: with fewer, the honest ones may not be the majority, and with two neighbours the median of three can
    keep agents at different values. If losses leave an agent fewer, it trims as many as leave at least one number.

    Args:
        count: How many neighbours of one agent may send nonsense.

    Raises:
        TypeError: ``count`` is no whole number.
        ValueError: ``count`` is not 1 or more.
    """

    count: int = 1

    def __post_init__(self) -> None:
        check_count(self, "count")

    @property
    def neighbours_needed(self) -> int:
        return 2 * self.count + 1

    def _combine(self, out: torch.Tensor, own: torch.Tensor, own_weight: float, terms: Sequence[Term]) -> None:
        _trim(self, out, own, terms, self.count)


@dataclass(frozen=True)
class CoordinateMedian(Robust):
    """In each coordinate the median of this agent's own number and the neighbours' (Yin, Chen, Ramchandran, Bartlett,
    "Byzantine-robust distributed learning", 2018); of an even number of them the mean of the two in the middle.

    All count alike: the weights of the topology only select the participants. It tolerates any minority of the tensors,
    and loses most of what a mean gains over noise. An agent needs 3 neighbours in a round: with two the median can keep
    agents at different values.
    """

    @property
    def neighbours_needed(self) -> int:
        return 3

    def _combine(self, out: torch.Tensor, own: torch.Tensor, own_weight: float, terms: Sequence[Term]) -> None:
        _trim(self, out, own, terms, len(terms))


def check_neighbours(agent: Agent, rule: Robust, neighbours: Sequence[int], *, whole: bool) -> None:
    """Refuse a rule whose agent has too few neighbours in a round; if losses may be the cause, warn once and continue.

    Args:
        agent: The agent that averages.
        rule: Its rule.
        neighbours: The ranks whose tensors it takes. Without neighbours there is no error.
        whole: They are the neighbours in a topology of all agents, which is too small even without losses.

    Raises:
        ValueError: They are fewer than the rule needs, and the cause is not a loss under ``on_loss="continue"``.
    """
    if not 0 < len(neighbours) < rule.neighbours_needed:
        return
    problem, engine = too_few(rule, f"rank {agent.rank} has ranks {list(neighbours)}"), agent.engine
    if whole or not engine.survives_losses or len(engine.alive) == agent.size:
        raise ValueError(problem)
    if (agent.rank, rule) not in _warned:
        _warned.add((agent.rank, rule))
        log.warning("%s. Agents were lost, so it goes on without that guarantee", problem)


def too_few(rule: Robust, found: str) -> str:
    """The message of an agent that has too few neighbours in a round, with the remedy."""
    return (
        f"robust={rule}: an agent needs at least {rule.neighbours_needed} neighbours in a round to tell honest tensors "
        f"from others, and {found}; with fewer the average can stop before agents agree. Take a topology with more "
        "neighbours in a round, such as topology.FullyConnectedGraph, or ClippedGossip(radius=...) or FiniteOnly()"
    )


def _trim(rule: Robust, out: torch.Tensor, own: torch.Tensor, terms: Sequence[Term], count: int) -> None:
    """In each coordinate the mean without the ``count`` largest and smallest, or as many as leave one or two."""
    if own.is_complex():
        raise TypeError(f"{type(rule).__name__}: complex numbers have no order; take ClippedGossip")
    tensors = [own, *(tensor for _, tensor, _ in terms)]
    # After losses fewer tensors may be left than are trimmed; an empty slice has the mean NaN.
    cut = min(count, (len(tensors) - 1) // 2)
    blocks = (torch.split(tensor, BLOCK) for tensor in (out, *tensors))
    for target, *numbers in zip(*blocks, strict=True):
        ordered = torch.stack(numbers).sort(dim=0).values
        # 16 bits are summed in float32 and rounded once, whatever the installed torch does by itself.
        wide = torch.promote_types(own.dtype, torch.float32)
        target.copy_(ordered[cut : len(tensors) - cut].mean(dim=0, dtype=wide))


def _radius_without(farthest: int, distances: Sequence[float]) -> float:
    """The largest distance without the ``farthest`` largest; 0 if none is left."""
    return sorted([0.0, *distances])[max(0, len(distances) - farthest)]


def _clip(
    out: torch.Tensor,
    own: torch.Tensor,
    own_weight: float,
    terms: Sequence[Term],
    distances: Sequence[float],
    radius: float,
) -> None:
    """``own + sum of weight clip(tensor - own, radius)``."""
    weights = []
    for distance, (_, _, weight) in zip(distances, terms, strict=True):
        # A nearer tensor keeps its weight unrounded. The comparison also excludes a distance of 0, as no radius is
        # negative.
        kept = weight if distance <= radius else weight * (radius / distance)
        weights.append(kept)
        # clip(x_j - x_i) is a multiple of the difference, so x_i takes the part of the weight that x_j loses.
        own_weight += weight - kept
    weigh_in_blocks(out, own, own_weight, [tensor for _, tensor, _ in terms], weights)


def _is_finite(tensor: torch.Tensor) -> bool:
    return all(bool(block.isfinite().all()) for block in torch.split(tensor, BLOCK))


def _distance(first: torch.Tensor, second: torch.Tensor) -> float:
    # In float64: the square of a float16 above 256 is infinite, and then all distances would be equal.
    wide = torch.complex128 if first.is_complex() else torch.float64
    squares = (
        (a.to(wide) - b.to(wide)).abs().square().sum().item()
        for a, b in zip(torch.split(first, BLOCK), torch.split(second, BLOCK), strict=True)
    )
    return float(sum(squares) ** 0.5)
