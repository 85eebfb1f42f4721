"""The costs of training on a topology: seconds for a step, the distance between agents, and the steps that it costs.

If agents' data differ, every local step drives agents apart, and every exchange brings them closer. With a learning
rate lr and constant gradients, their distance from the mean converges to the product of lr, the difference of the
gradients, and a number of the topology, :func:`steps_apart`. D-PSGD ends at the same distance from the optimum (in
Koloskova et al. 2020, arXiv:2003.10422, theorem 2, 1 / p replaces that number). To end as near as with all agents
together, training needs a learning rate that is smaller by that factor, and as many more steps.

The factor depends on the accuracy of training. The differences keep their length, while the mean gradient shrinks: when
a tenth of it is left, the same differences are ten times as long relative to it. So the measured difference is divided
by the final share of the mean gradient, ``accuracy``. The effect of the differences and the mean gradient are at right
angles on average, so they add in squares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import index
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ..algorithms.algorithm import Algorithm
from ..algorithms.compressed import ChocoSGD, LowPrecision
from ..algorithms.gradient_descent import GradientDescent
from ..algorithms.needs import check
from ..compression import QSGD, Compressor, Identity, MinMaxUInt8, RandomK, Sign, TopK, Zstd
from ..topology.analysis.span import DENSE_LIMIT, Span
from ..topology.schedule import Schedule
from .messages import NEIGHBOR
from .network import ACCURACY, COMPRESSION, DIFFERENCE

Rows: TypeAlias = NDArray[np.float64]

_COLUMNS = 16
_FEWEST, _MOST = 64, 512
"""Exchanges that are played: no less, and no more."""
_WORK = 20_000_000
"""Edges that may be visited: a second."""
_SETTLED = 0.01
_SAMPLED = 4096
_MANY = 1 << 20
"""Numbers of a model, of which a share down to a millionth is kept exactly."""
_FLOAT = 4


@dataclass(frozen=True)
class Training:
    """The parameters of training: with D-PSGD, adapt then combine, as :class:`shoal.DecentralizedOptimizer` does.

    Attributes:
        difference: how much agents' data differ: the root mean square distance of their gradients from the mean
            gradient, in lengths of the mean gradient. 0 if all have the same data, 1 if the differences are as long as
            the mean gradient. Measured at the begin of training (:func:`shoal.netmodel.probe.measure_difference`); the
            default is for shuffled data.
        local_steps: steps for each exchange, at least 1, as ``num_steps_per_communication`` of the optimizer.
        compute: seconds that an agent computes in a step.
        compression: of a message, in bytes of the model: a share above 0 and at most 1, such as 0.5 for parameters in
            16 bits, which applies to all exchanges; or a compressor for float32, which applies to messages to
            neighbours. A compressor needs an algorithm that is built for it: CHOCO-SGD, and low-precision D-PSGD for
            :class:`~shoal.compression.MinMaxUInt8`.
        accuracy: the length of the mean gradient at the end of training, as a share of its length when `difference` was
            measured, above 0 and at most 1.

    Raises:
        ValueError: an invalid number, or a compressor that is no contraction.
        TypeError: `compression` is neither a number nor a compressor.
    """

    difference: float = DIFFERENCE
    local_steps: int = 1
    compute: float = 0.0
    compression: float | Compressor = 1.0
    accuracy: float = ACCURACY

    def __post_init__(self) -> None:
        for name, what in (("difference", "a number, zero or more"), ("compute", "seconds, zero or more")):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}. Pass {what}.")
        if not 0 < self.accuracy <= 1:
            raise ValueError(
                f"accuracy is {self.accuracy}. Pass the share of the mean gradient that is left at the end, above 0 "
                "and at most 1."
            )
        try:
            enough = index(self.local_steps) >= 1
        except TypeError:
            enough = False
        if not enough:
            raise ValueError(f"local_steps is {self.local_steps}. Pass a number of steps, at least 1.")
        if isinstance(self.compression, Compressor):
            if self.kept <= 0:
                raise ValueError(
                    f"{self.compression} is no contraction: what it loses of normal numbers is more than all of them, "
                    "and compressing algorithms diverge with it. Take a finer one, or TopK, which always is."
                )
        elif not isinstance(self.compression, (int, float)):
            raise TypeError(f"compression is {self.compression!r}. Pass a share of the bytes, or a compressor.")
        elif not 0 < self.compression <= 1:
            raise ValueError(f"compression is {self.compression}. Pass the share of the bytes, above 0 and at most 1.")

    @property
    def compressor(self) -> Compressor | None:
        """None if there is a share only."""
        return self.compression if isinstance(self.compression, Compressor) else None

    @property
    def algorithm(self) -> str:
        """The name of the algorithm used for training."""
        return type(self._plain).__name__

    @property
    def _plain(self) -> Algorithm:
        """The algorithm, with parameters on which its needs do not depend."""
        if self.compressor is None:
            return GradientDescent(1.0)
        return LowPrecision(1.0) if isinstance(self.compressor, MinMaxUInt8) else ChocoSGD(1.0, 1.0, Identity())

    @property
    def kept(self) -> float:
        """The factor by which an exchange moves towards the neighbours' mean, CHOCO-SGD's gamma: 1 if uncompressed.

        The share of normal numbers that a message keeps, in squares; or of any numbers, if that is well known.
        """
        if self.compressor is None:
            return 1.0
        inside = self.compressor.compressor if isinstance(self.compressor, Zstd) else self.compressor
        if isinstance(inside, (TopK, RandomK)):
            # TopK keeps far more of normal numbers, and CHOCO-SGD diverges with so large a gamma. Of few numbers a
            # message cannot keep so small a share as of a model.
            return inside.delta(_MANY)
        x = torch.from_numpy(np.random.default_rng(0).standard_normal(_SAMPLED)).unsqueeze(0)
        lost = self.compressor(x, _Draws()) - x
        return 1.0 - float((lost**2).sum() / (x**2).sum())

    def message(self, nbytes: float, operation: str) -> float:
        """The bytes that an operation sends instead of `nbytes`."""
        if not isinstance(self.compression, Compressor):
            return nbytes * self.compression
        if operation != NEIGHBOR:
            return nbytes
        return float(self.compression.nbytes(max(1, round(nbytes / _FLOAT)), torch.float32))

    def refuses(self, schedule: Schedule) -> str:
        """Why it cannot be trained with on a topology; empty if it can."""
        try:
            check(self.algorithm, self._plain.needs, schedule)
        except ValueError as error:
            return str(error)
        return ""

    def seconds_per_step(self, seconds_per_round: float) -> float:
        """Seconds of a step, on average: computing, and its share of a round."""
        return self.compute + seconds_per_round / self.local_steps

    def times_the_steps(self, apart: float) -> float:
        """The number of steps that replace one step of agents that are together, if agents are :func:`steps_apart`."""
        return math.hypot(1.0, self.difference / self.accuracy * apart)


class _Draws:
    """The draws for a random compressor."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def uniform(self, like: torch.Tensor) -> torch.Tensor:
        return torch.rand(like.shape, dtype=like.dtype, generator=self._generator, device="cpu")


def steps_apart(schedule: Schedule | None, local_steps: int = 1, kept: float = 1.0) -> float:
    """The final distance of agents from their mean when they take gradients, in local steps of their own data.

    In each exchange ``e+ = (1 - kept) y + kept W y`` with ``y = e + local_steps g``, of constant ``g`` with mean zero;
    the result is the root mean square of ``e + j g`` over agents, exchanges and the local steps ``j``, divided by that
    of ``g``, on average over random ``g``. A ring of a thousand agents takes a million exchanges to converge; the
    iteration ends after at most 512.

    Args:
        schedule: None for an all-reduce.
        local_steps: steps between two exchanges.
        kept: the factor by which an exchange moves towards the neighbours' mean.
    """
    # Mean of j and of j squared over the local steps.
    first, second = (local_steps - 1) / 2, (local_steps - 1) * (2 * local_steps - 1) / 6
    if schedule is None or schedule.size == 1:
        return math.sqrt(second)
    drift = _drift(schedule.size)
    energy = float((drift**2).sum())
    span = Span(schedule)
    apart, squares = np.zeros_like(drift), list[float]()
    most = max(1, min(_MOST, _WORK // (len(span[0].edges.weight) * drift.shape[1])))
    matrices: dict[int, Rows] = {}
    for number in range(most):
        mean_square = float((apart**2).sum()) + 2 * first * float((apart * drift).sum())
        squares.append(mean_square / energy + second)
        if len(squares) >= _FEWEST and _is_settled(squares):
            break
        ahead = apart + local_steps * drift
        apart = (1 - kept) * ahead + kept * _mixed(span, number, ahead, matrices)
    return math.sqrt(max(0.0, float(np.mean(squares[len(squares) // 2 :]))))


def _drift(size: int) -> Rows:
    """Directions with mean zero over agents, float64 [n, columns]: a whole basis, or some at random."""
    columns = 1 if size > DENSE_LIMIT else min(_COLUMNS, size - 1)
    drift = np.random.default_rng(0).standard_normal((size, columns))
    drift -= drift.mean(axis=0)
    return np.linalg.qr(drift)[0]


def _mixed(span: Span, number: int, x: Rows, matrices: dict[int, Rows]) -> Rows:
    """``W x`` of a round; the matrices of a period are made once."""
    if span.size > DENSE_LIMIT:
        return np.stack([span[number].apply(column) for column in x.T], axis=1)
    if not span.whole:
        return span[number].matrix() @ x
    index = number % len(span)
    if index not in matrices:
        matrices[index] = span[index].matrix()
    return matrices[index] @ x


def _is_settled(squares: list[float]) -> bool:
    """Whether the last half is as the one before it; looked at after 64, 128, 256, ... exchanges."""
    count = len(squares)
    if count & (count - 1):
        return False
    quarter = count // 4
    before, after = float(np.mean(squares[quarter : 2 * quarter])), float(np.mean(squares[2 * quarter :]))
    return abs(after - before) <= _SETTLED * after


_NAMES: dict[str, tuple[type[Compressor], type[float] | type[int] | None]] = {
    "topk": (TopK, float),
    "randomk": (RandomK, float),
    "qsgd": (QSGD, int),
    "sign": (Sign, None),
    "uint8": (MinMaxUInt8, None),
}


def parse_compression(text: str) -> float | Compressor:
    """A share such as ``0.5``, or a compressor such as ``topk:0.01``, ``qsgd:7`` or ``sign``.

    Raises:
        ValueError: it is neither; the message lists the choices.
    """
    name, colon, number = text.strip().lower().partition(":")
    if name not in _NAMES:
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"{text!r} is no share of the bytes and no compressor. Write {COMPRESSION}.") from None
    kind, takes = _NAMES[name]
    if bool(colon) != (takes is not None):
        raise ValueError(f"{text!r}: {name} {'takes a number' if takes else 'takes no number'}. Write {COMPRESSION}.")
    try:
        return kind() if takes is None else kind(takes(number))  # type: ignore[call-arg]
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}. Write {COMPRESSION}.") from None
