"""Fits the parameters of a NIC to the measured times of messages.

Messages that begin together on one NIC take ``degree (overhead + nbytes / bandwidth) + latency``: linear in the three
unknowns, so that least squares finds them. Errors count by their share of the time, or the longest runs alone would
decide.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .network import Link


class Observation(NamedTuple):
    """Every NIC of a network sent and received so many messages of one size at once, and all had come after so long.

    Attributes:
        degree: messages on each NIC, at least 1.
        nbytes: of each message.
        seconds: measured.
    """

    degree: int
    nbytes: float
    seconds: float


def fit_link(observations: Sequence[Observation]) -> Link:
    """The NIC with the best fit to the observations.

    With one degree only, overhead and latency cannot be distinguished, and all of it counts as latency. A negative
    latency or overhead is set to zero.

    Raises:
        ValueError: fewer than two different sizes, times that are not positive, or times that do not grow with the
            bytes, so that there is no bandwidth in them.
    """
    if len({one.nbytes for one in observations}) < 2:
        raise ValueError("messages of one size only cannot tell bandwidth from latency. Measure at least two sizes.")
    if any(one.seconds <= 0 or one.degree < 1 for one in observations):
        raise ValueError("an observation has no positive time or no message. Pass what was measured.")
    degree, nbytes, seconds = (np.array(column, float) for column in zip(*observations, strict=True))
    columns = {"bandwidth": degree * nbytes, "latency": np.ones_like(degree)}
    if len(set(degree.tolist())) > 1:
        columns["overhead"] = degree
    best: dict[str, float] = {}
    least = math.inf
    # None may be negative. The best such fit is the plain fit of the nonzero ones, so trying all subsets is exact.
    for count in range(1, len(columns) + 1):
        for names in itertools.combinations(columns, count):
            shares = np.stack([columns[name] / seconds for name in names], axis=1)
            found, *_ = np.linalg.lstsq(shares, np.ones_like(seconds), rcond=None)
            error = float(((shares @ found - 1) ** 2).sum())
            if found.min() >= 0 and error < least:
                best, least = dict(zip(names, found.tolist(), strict=True)), error
    if not best.get("bandwidth"):
        raise ValueError("longer messages did not take longer. Measure larger ones, or on a quieter machine.")
    return Link(best.get("latency", 0.0), 1 / best["bandwidth"], best.get("overhead", 0.0))
