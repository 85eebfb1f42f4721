"""The regret of a recommendation: its time to an accuracy over that of the best candidate, by simulation.

Networks, models and differences of data are drawn. Every candidate trains quadratics of the drawn difference, whose
curvatures differ twentyfold, with learning rates from a grid, and counts with the best of them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from shoal.netmodel import Link, Network, Training, recommend, recommendation
from shoal.netmodel.messages import Averaging, averagings

Rows = NDArray[np.float64]
SIZE, DIMENSION, ACCURACY, MOST = 8, 12, 0.1, 4000
RATES = np.array([1.9, 1.0, 0.5, 0.25, 0.12, 0.06, 0.03, 0.015, 0.008])
DIFFERENCES = (0.02, 0.2, 1.0)


def problem(difference: float) -> tuple[Rows, Rows]:
    """``h`` and ``c`` of each agent's gradient ``h (x - c)``, [n, d], whose difference at 0 is the given one."""
    draw = np.random.default_rng(0)
    h = np.geomspace(0.05, 1.0, DIMENSION) * np.exp(draw.normal(0, 0.3, (SIZE, DIMENSION)))
    h /= h.max()
    mean = draw.choice([-1.0, 1.0], DIMENSION)  # flat directions count as much as steep ones
    apart = draw.normal(size=(SIZE, DIMENSION))
    apart -= apart.mean(0)
    apart *= difference * np.linalg.norm(mean) / np.sqrt((apart**2).sum(1).mean())
    return h, -(mean + apart) / h


@cache
def steps_to_the_accuracy(local: int, name: str, difference: float) -> float:
    """Until the mean gradient at agents' points is short enough, root mean square over agents and a period."""
    schedule = next(one.schedule for one in averagings(SIZE, local)[0] if one.name == name)
    h, c = problem(difference)
    curvature, pull = h.mean(0), (h * c).mean(0)
    rates = RATES[:, None, None] * h
    keep, move = 1 - rates, rates * c
    period = 1 if schedule is None else schedule.period or 64
    matrices = [np.full((SIZE, SIZE), 1 / SIZE) if schedule is None else schedule.matrix(k) for k in range(period)]
    x, lengths = np.zeros(keep.shape), []
    for step in range(MOST):
        x = matrices[step % period] @ (keep * x + move)
        lengths.append(((curvature * x - pull) ** 2).sum(-1).mean(-1))
        recent = min(period, 16)
        if len(lengths) >= recent and (np.mean(lengths[-recent:], 0) <= ACCURACY**2 * (pull**2).sum()).any():
            return float(step + 1)
    return np.inf


def regrets(count: int) -> tuple[list[float], list[float]]:
    """Regrets of the recommendations on drawn networks, and of recommendations that ignore the target accuracy."""
    draw, result, without = np.random.default_rng(5), list[float](), list[float]()
    for number in range(count):
        local = (1, 1, 4)[number % 3]
        latency, bandwidth, nbytes = (10 ** draw.uniform(*span) for span in ((-5, -1.5), (7, 9.5), (4, 8)))
        difference = float(draw.choice(DIFFERENCES))
        network = Network(SIZE, Link(latency, bandwidth), local, Link(0.0, 4e9))
        made = recommend(network, nbytes, training=Training(difference, accuracy=ACCURACY))
        step_seconds = {one.name: one.seconds_per_step for one in made.to_train}
        seconds = {name: step * steps_to_the_accuracy(local, name, difference) for name, step in step_seconds.items()}
        plain = Training(difference, accuracy=1.0)
        rescaled = (
            replace(one, training_seconds=one.seconds_per_step * plain.times_the_steps(one.steps_apart))
            for one in made.candidates
        )
        for regret, one in ((result, made), (without, replace(made, candidates=tuple(rescaled)))):
            regret.append(seconds[one.to_train[0].name] / min(seconds.values()))
    return result, without


FEW = {
    "all-reduce (direct, as shoal.allreduce)",
    "all-reduce (ring)",
    "base-2",
    "exponential",
    "gossip-pga",
    "inner-outer-ring",
    "one-peer-exponential",
    "ring",
    "ring-star",
}


@pytest.mark.timeout(600)  # for a busy machine; alone it takes seconds
def test_the_recommendation_is_near_the_best_on_random_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    def stub_averagings(size: int, local: int) -> tuple[list[Averaging], dict[str, str]]:
        results, passed_over = averagings(size, local)
        return [one for one in results if one.name in FEW], passed_over

    monkeypatch.setattr(recommendation, "averagings", stub_averagings)
    result, without = regrets(12)
    print("regrets", np.round(result, 2), "without the accuracy", np.round(without, 2))
    assert max(result) < 1.3
    assert np.mean(result) < 1.1
    assert max(without) > 2.0, "the problems are too easy to tell one rule from another"
