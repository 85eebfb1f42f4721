"""Robust rules against attacks: what the honest agents of a simulated fleet learn beside some that lie.

    python benchmarks/byzantine.py             # minutes on two cores
    python benchmarks/byzantine.py --quick     # few steps and seeds, to see that everything works

Sixteen agents on a circulant graph of degree 8 train a linear classifier of scikit-learn's digits by D-PSGD with local
momentum. Agents 0, 5 and 10 lie, so that an honest agent has one or two of them among its 8 neighbours; rules are told
of two. Each figure is the mean, over the honest agents and seeds, of the accuracy of an agent's own model on 453 images
that nobody trains on, with the 95% interval over seeds (Student's t). The digits are dealt out evenly, or by a
Dirichlet distribution, so that agents have different labels. All rules have the same step, batches and number of steps.
"""

from __future__ import annotations

import argparse
import multiprocessing
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import shoal
from shoal.algorithms import Algorithm, GradientDescent, Momentum, RobustMixing
from shoal.data import dirichlet_shards
from shoal.ops.robust_rules import Robust
from shoal.sim import (
    Adversary,
    ALittleIsEnough,
    InnerProductManipulation,
    LabelFlip,
    SignFlip,
    StackedFleet,
    StackedModel,
)
from shoal.sim.sweeps import interval
from shoal.topology.families.static import Circulant

AGENTS, BAD, TOLERATED, BATCH = 16, (0, 5, 10), 2, 16
LR, BETA = 0.5, 0.9
RULES: dict[str, Robust | None] = {
    "W x": None,
    "ClippedGossip": shoal.robust.ClippedGossip(tolerated=TOLERATED),
    "ClippedSum (CS+)": shoal.robust.ClippedSum(TOLERATED),
    "NearestNeighbours (NNA)": shoal.robust.NearestNeighbours(TOLERATED),
    "TrimmedMean": shoal.robust.TrimmedMean(TOLERATED),
    "CoordinateMedian": shoal.robust.CoordinateMedian(),
}
ATTACKS: dict[str, Adversary | None] = {
    "none": None,
    "sign flip": SignFlip(BAD),
    "inner product": InnerProductManipulation(BAD, 0.1),
    "ALIE": ALittleIsEnough(BAD, 1.5),
    "label flip": LabelFlip(BAD, 10),
}
HONEST = SignFlip(BAD).honest(AGENTS)


@dataclass(frozen=True)
class Digits:
    """Images ``[m, 64]`` and labels to train on, dealt out, and others to test with."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    parts: list[Tensor]

    @staticmethod
    def of(seed: int, alpha: float | None) -> Digits:
        from sklearn.datasets import load_digits

        found = load_digits()
        draw = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(found.target), generator=draw)
        images = torch.from_numpy(found.data)[order].float() / 16
        labels = torch.from_numpy(found.target)[order].long()
        train, test = (images[:1344], labels[:1344]), (images[1344:], labels[1344:])
        even = [*torch.arange(1344).view(AGENTS, -1)]
        parts = even if alpha is None else dirichlet_shards(train[1], AGENTS, alpha=alpha, seed=seed)
        return Digits(train, test, [_filled(part) for part in parts])


def _filled(part: Tensor) -> Tensor:
    """A part of at least a batch: a smaller one is repeated."""
    return part.repeat(-(-BATCH // len(part)))


def accuracy(rule: Robust | None, attack: Adversary | None, digits: Digits, seed: int, steps: int) -> float:
    """The mean accuracy of the honest agents' models, in percent."""
    inputs, targets = digits.train
    if isinstance(attack, LabelFlip):
        targets = attack.flipped(targets, digits.parts)
    torch.manual_seed(seed)
    model = StackedModel(nn.Linear(64, 10), AGENTS)
    gradient = model.gradient(cross_entropy, inputs, targets, digits.parts, BATCH)
    algorithm: Algorithm = Momentum(GradientDescent(LR), BETA, dampened=True)
    if rule is not None:
        algorithm = RobustMixing(algorithm, rule)
    fleet = StackedFleet(Circulant(AGENTS, [-4, -3, -2, -1, 1, 2, 3, 4]), seed=seed)

    def falling(step: int) -> float:
        return 1.0 if step < 3 * steps // 4 else 0.1

    run = fleet.run(algorithm, model.start, gradient, steps, every=0, adversary=attack, lr_lambda=falling)
    honest = run.x[HONEST]
    images, labels = digits.test
    if not honest.isfinite().all():
        return 10.0  # as good as a guess
    outputs = model.outputs(honest, images.expand(len(honest), *images.shape))
    return 100 * (outputs.argmax(-1) == labels).double().mean().item()


def score(case: tuple[str, str, float | None, int, int]) -> float:
    rule, attack, alpha, seed, steps = case
    torch.set_num_threads(1)  # the tensors are small
    return accuracy(RULES[rule], ATTACKS[attack], Digits.of(seed, alpha), seed, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="2 seeds and 10 steps")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--alpha", type=float, default=1.0, help="of the Dirichlet distribution; small: data differ")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    seeds, steps = (2, 10) if args.quick else (args.seeds, args.steps)
    with multiprocessing.get_context("fork").Pool(args.processes) as pool:
        for title, alpha in (("evenly dealt data", None), (f"Dirichlet({args.alpha:g})", args.alpha)):
            print(f"\n% of test images, {title}, {seeds} seeds, {steps} steps:\n")
            print(f"| rule | {' | '.join(ATTACKS)} |\n| --- |{' ---: |' * len(ATTACKS)}", flush=True)
            cases = [
                (rule, attack, alpha, seed, steps) for rule in RULES for attack in ATTACKS for seed in range(seeds)
            ]
            scores = pool.imap(score, cases)
            for rule in RULES:
                found = [interval([next(scores) for _ in range(seeds)], 0.95) for _ in ATTACKS]
                print(f"| {rule} | {' | '.join(f'{mean:.1f} ± {half:.1f}' for mean, half in found)} |", flush=True)


if __name__ == "__main__":
    main()
