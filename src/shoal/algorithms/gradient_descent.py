"""Decentralized gradient descent: average with the neighbours, and follow the agent's own gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .algorithm import Algorithm, Gradient, State
from .growth import by_self_weights, dies_out
from .mix import Mix
from .needs import CONNECTED, DOUBLY_STOCHASTIC, Need


@dataclass(frozen=True)
class GradientDescent(Algorithm):
    """Decentralized (stochastic) gradient descent, D-PSGD.

    Adapt, then combine: ``x+ = W (x - lr g(x))`` (Ying et al. 2021, arXiv:2111.04287, equation 23).
    Adapt with combine: ``x+ = W x - lr g(x)`` (equation 22; Lian et al. 2017, arXiv:1705.09056).

    Where the agents' objectives differ it ends near the optimum, at a distance of the order of ``lr``.

    Args:
        lr: The step.
        atc: Adapt, then combine; else adapt with combine.
    """

    lr: float
    atc: bool = True
    source: ClassVar[str] = "Lian et al. 2017, arXiv:1705.09056; Ying et al. 2021, arXiv:2111.04287, eqs. 22, 23"
    one_gradient: ClassVar[bool] = True
    separable: ClassVar[bool] = True

    @property
    def needs(self) -> tuple[Need, ...]:
        return DOUBLY_STOCHASTIC, CONNECTED, dies_out(self, by_self_weights())

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        if self.atc:
            return mix(x - self.lr * grad(x)), ()
        return mix(x) - self.lr * grad(x), ()


@dataclass(frozen=True)
class ParallelGradientDescent(Algorithm):
    """Data-parallel training, for comparison: ``x+ = x - lr mean(g(x))``, the mean over all agents.

    Agents that begin with equal parameters keep them equal, and take the same steps as a single agent with all data.

    Args:
        lr: The step.
    """

    lr: float
    needs = ()  # it averages over all agents, whatever the topology
    source: ClassVar[str] = "Goyal et al. 2017, arXiv:1706.02677"
    one_gradient: ClassVar[bool] = True
    separable: ClassVar[bool] = True

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        return x - self.lr * mix.average(grad(x)), ()
