"""Builds the components of an optimizer: the strategy of its algorithm, its weights, the state that is averaged.

Combinations that cannot work are refused here, with the remedy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import networkx as nx
import torch

from ..algorithms.algorithm import Algorithm, check_is_algorithm
from ..algorithms.gradient_descent import GradientDescent, ParallelGradientDescent
from ..runtime.agent import current
from ..topology.schedule import Schedule
from .adam import OneBitAdam
from .equation import Equation, EquationDuringBackward
from .exchanges.bucket_exchange import BucketExchange
from .exchanges.mixed_state import MixedState, check_second_iterates, warn_of_second_moments
from .exchanges.sync_exchange import GradientExchange
from .strategies import (
    AdaptThenCombine,
    AdaptThenCombineDuringBackward,
    AdaptWithCombine,
    AverageGradients,
    AverageGradientsDuringBackward,
    AverageMomenta,
    InnerStep,
    StepStrategy,
)

ATC, PARALLEL = GradientDescent(1.0), ParallelGradientDescent(1.0)
_BY_BUCKETS: dict[Algorithm, tuple[type[StepStrategy], type[StepStrategy] | None]] = {
    ATC: (AdaptThenCombine, AdaptThenCombineDuringBackward),
    GradientDescent(1.0, atc=False): (AdaptWithCombine, None),
    PARALLEL: (AverageGradients, AverageGradientsDuringBackward),
}
"""The strategies of the common algorithms, without and with overlap="backward"."""


def by_buckets(algorithm: Algorithm) -> tuple[type[StepStrategy], type[StepStrategy] | None] | None:
    """The strategies of a common algorithm by buckets, without and with overlap="backward"; None for any other
    algorithm.
    """
    known = isinstance(algorithm, GradientDescent | ParallelGradientDescent)  # others may have no hash
    return _BY_BUCKETS.get(algorithm) if known else None


def strategy_of(
    algorithm: Algorithm,
    bucket_exchange: BucketExchange,
    local: InnerStep,
    overlap: str | None,
    topology: nx.Graph | Schedule | str | None,
    name: str,
    unchecked: str | Iterable[str],
) -> StepStrategy:
    """The strategy of an algorithm: its own equation, or for the common ones a strategy that overlaps and copies
    less.
    """
    check_is_algorithm(algorithm)
    if overlap not in (None, "backward"):
        raise ValueError(f'overlap={overlap!r}: give "backward", or leave it out')
    by_parts = EquationDuringBackward if algorithm.separable else None
    plain, during_backward = by_buckets(algorithm) or (Equation, by_parts)
    if overlap and (during_backward is None or not bucket_exchange.in_step):
        raise ValueError(
            'overlap="backward" is for adapt, then combine, for averaged gradients, and for algorithms that are '
            f"separable (shoal.algorithms.Algorithm), in step; not for {algorithm}"
            + (
                "; adapt with combine overlaps the whole pass as it is"
                if bucket_exchange.in_step
                else " through windows"
            )
        )
    if plain in (Equation, AverageGradients) and not bucket_exchange.in_step:
        raise ValueError(f"{algorithm} exchanges in step, not through windows; leave bucket_exchange out")
    if plain is AverageGradients and isinstance(local.optimizer, OneBitAdam):
        if overlap:
            raise ValueError('overlap="backward": OneBitAdam averages momenta behind the backward pass; leave it out')
        assert isinstance(bucket_exchange, GradientExchange)
        return AverageMomenta(bucket_exchange, local, local.optimizer)
    if plain is Equation:
        of_parts = EquationDuringBackward if overlap else Equation
        return of_parts(bucket_exchange, local, algorithm, topology, name, unchecked)
    return during_backward(bucket_exchange, local) if overlap and during_backward else plain(bucket_exchange, local)


def mixed_of(
    optimizer: torch.optim.Optimizer,
    keys: Sequence[str] | None,
    algorithm: Algorithm,
    bucket_exchange: type[BucketExchange],
) -> MixedState | None:
    """The state of the optimizer that is averaged beside the parameters, if any."""
    if algorithm != PARALLEL:
        check_second_iterates(optimizer, keys, algorithm, bool(bucket_exchange.in_step and by_buckets(algorithm)))
    if keys is None:
        agent = current("DecentralizedOptimizer")
        could = bucket_exchange.in_step and algorithm != PARALLEL and by_buckets(algorithm)
        if could and agent.size > 1 and agent.rank == 0:
            warn_of_second_moments(optimizer)
        return None
    mixed = MixedState(optimizer, keys)
    if not mixed.keys:
        return None
    if algorithm == PARALLEL:
        raise ValueError("mix_state: where gradients are averaged all agents have the same state; leave it out")
    if not by_buckets(algorithm):
        raise ValueError(
            f"mix_state is for adapt, then combine, and adapt with combine; {algorithm} says by itself what is "
            "exchanged, with weights that may be negative. Leave it out"
        )
    if not bucket_exchange.in_step:
        raise ValueError(
            "mix_state: through windows a neighbour's state would be of another step than its parameters; leave it out"
        )
    return mixed
