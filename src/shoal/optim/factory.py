"""Builds the components of an optimizer: the strategy of its algorithm, its weights, the state that is averaged.

Combinations that cannot work are refused here, with the remedy.

With ``compression=`` the algorithm is one that is sound for a compressor, with a mixing rate ``gamma``.
A compressor alone does not average: the parts that a message leaves out have to be sent later. CHOCO-SGD does that on a
static topology, DeepSqueeze on a changing one. Both move by the factor ``gamma`` towards the neighbours. Too large, and
errors amplify each other; too small, and agents stay apart. On digits CHOCO-SGD was best, or next to it, with ``gamma``
the share of a message that arrives. With twice as much top-k diverged there, and with that much top 1% did after ten
epochs of CIFAR-10. So if a message carries less than half, and of some vectors far less, ``gamma`` is half of the
share. DeepSqueeze accumulates the parts left out, and was best with a third.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import networkx as nx
import torch

from ..algorithms.algorithm import Algorithm
from ..algorithms.compressed import ChocoSGD, DeepSqueeze
from ..algorithms.gradient_descent import GradientDescent, ParallelGradientDescent
from ..algorithms.matrices import PowerGossip
from ..compression import Compressor, LowRank, Shrunk, Zstd
from ..compression.random_numbers import Redrawn
from ..runtime.agent import current
from ..topology.schedule import Schedule
from .adam import OneBitAdam
from .equation import Equation, EquationDuringBackward
from .exchanges.bucket_exchange import BucketExchange
from .exchanges.mixed_state import MixedState, check_second_iterates, warn_of_second_moments
from .exchanges.sync_exchange import GradientExchange
from .steps import (
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
    mixed = None if keys is None else MixedState(optimizer, keys)
    if algorithm != PARALLEL:
        taken = () if mixed is None else mixed.keys
        check_second_iterates(optimizer, taken, algorithm, bool(bucket_exchange.in_step and by_buckets(algorithm)))
    if mixed is None:
        agent = current("DecentralizedOptimizer")
        could = bucket_exchange.in_step and algorithm != PARALLEL and by_buckets(algorithm)
        if could and agent.size > 1 and agent.rank == 0:
            warn_of_second_moments(optimizer)
        return None
    if not mixed.keys:
        return None
    if algorithm == PARALLEL:
        raise ValueError("mix_state: where gradients are averaged all agents have the same state; leave it out")
    if not by_buckets(algorithm):
        raise ValueError(
            f"mix_state is for adapt, then combine, and adapt with combine; {algorithm} determines what is "
            "exchanged, with weights that may be negative. Leave it out"
        )
    if not bucket_exchange.in_step:
        raise ValueError(
            "mix_state: through windows a neighbour's state would be of another step than its parameters; leave it out"
        )
    return mixed


LEAST = 0.005
"""Less of a message than this is too little to average by: agents would train each for itself."""
COARSE = 0.5
"""If messages keep less than this share, and of some vectors much less, errors amplify with a full ``gamma``."""
FINE = 0.99
"""From this share on, adding a message's error to the next message does no harm."""
_MOST_NUMBERS = 1 << 20
log = logging.getLogger("shoal")


def compressing(
    algorithm: Algorithm, compressor: Compressor | LowRank | None, topology: nx.Graph | Schedule | None, numbers: int
) -> Algorithm:
    """Adapt, then combine, with compressed messages; the algorithm itself without a compressor, or for averaged
    gradients, which the exchange compresses.

    ``LowRank`` is PowerGossip. An unbiased compressor whose error may exceed its message is scaled down until it does
    not.

    Args:
        algorithm: The requested algorithm.
        compressor: The compressor of its messages.
        topology: A schedule of more than one round needs an algorithm that stores nothing of its neighbours.
        numbers: The number of parameters.

    Raises:
        TypeError: ``compressor`` is no compressor.
        ValueError: The algorithm is neither adapt, then combine, nor the average of gradients; or a message keeps so
            little that agents would not converge to each other.
    """
    if compressor is None:
        return algorithm
    if isinstance(compressor, LowRank) and algorithm == ATC:
        return PowerGossip(1.0, compressor.iterations, rank=compressor.rank)
    if isinstance(compressor, LowRank):
        raise ValueError(f"compression={compressor!r} is for adapt, then combine, and not for {algorithm}")
    if not isinstance(compressor, Compressor):
        raise TypeError(f"compression={compressor!r} is no compressor; take one of shoal.compression, as TopK(0.1)")
    if algorithm == PARALLEL:
        if not compressor.encodes:
            raise TypeError(f"compression={compressor!r} has no wire format (define _encode and _pieces)")
        return algorithm
    if algorithm != ATC:
        takes = "takes its own compressor" if hasattr(algorithm, "compressor") else "determines what is exchanged"
        raise ValueError(
            "compression= is for adapt, then combine (GradientDescent(1.0)), and for averaged gradients "
            f"(ParallelGradientDescent(1.0)); {algorithm} {takes}. Leave compression out, or take "
            "an algorithm that compresses: LowPrecision, ChocoSGD, DeepSqueeze, BEER"
        )
    if compressor.unbiased and compressor.delta(numbers) <= 0 and math.isfinite(compressor.omega(numbers)):
        compressor = _shrunk(compressor)
    kept = share_kept(compressor, numbers)
    if kept < LEAST:
        raise ValueError(
            f"compression={compressor!r}: of {numbers} numbers a message keeps {kept:.2g}, by their squares, so agents "
            "would hardly reach consensus. Take a finer one, such as MinMaxUInt8(), QSGD(7, chunk=64) or TopK(0.01)"
        )
    changes = isinstance(topology, Schedule) and topology.period != 1
    steady = kept >= COARSE or compressor.delta(numbers) >= kept / 2
    chosen: Algorithm = ChocoSGD(1.0, kept if steady else kept / 2, compressor)
    if changes:
        chosen = DeepSqueeze(1.0, kept if kept >= FINE else kept / 3, compressor)
    if current("DecentralizedOptimizer(compression=)").rank == 0:
        log.info("compression: parameters are averaged by %s", chosen)
        if changes and kept < FINE:
            log.warning(
                "compression=%r on a topology that changes: DeepSqueeze ends farther from the optimum, the coarser the "
                "messages are. Take a static topology, on which ChocoSGD does not, or MinMaxUInt8()",
                compressor,
            )
    return chosen


def _shrunk(compressor: Compressor) -> Compressor:
    if isinstance(compressor, Zstd):  # which makes messages short of whatever is in it
        return replace(compressor, compressor=Shrunk(compressor.compressor))
    return Shrunk(compressor)


def feeds_back(compressor: Compressor, numbers: int) -> bool:
    """Whether the error of a mean's message is added to the next one: for all but fine and unbiased compressors."""
    return not compressor.unbiased and share_kept(compressor, numbers) < FINE


def share_kept(compressor: Compressor, numbers: int) -> float:
    """``1 - |C(v) - v|^2 / |v|^2`` for v of so many normally distributed numbers, 2^20 at most: the same on all agents.

    To two digits, downwards, since all agents must mix equally far, and their processors may round differently.
    """
    # float64, and from quantiles: torch.randn draws other numbers on other processors.
    measured = max(1, min(numbers, _MOST_NUMBERS))
    uniform = Redrawn(0, 0, 0).uniform(torch.empty(measured, dtype=torch.float64, device="cpu"))
    v = torch.special.ndtri(uniform.clamp(min=1e-12)).float()
    error = (compressor(v, Redrawn(0, 1, 0)) - v).double().square().sum() / v.double().square().sum()
    kept = 1 - float(error)
    inside = compressor.compressor if isinstance(compressor, Zstd) else compressor
    if isinstance(inside, Shrunk):  # by more, of more numbers
        kept *= compressor.delta(numbers) / compressor.delta(measured)
    digits = 10.0 ** (1 - math.floor(math.log10(kept))) if kept > 0 else 1.0
    return math.floor(kept * digits + 1e-6) / digits
