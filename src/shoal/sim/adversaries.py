"""Agents of a simulation that send their neighbours something else than the algorithm says, to try robust rules.

An adversary knows what every honest agent sends, and its agents may send each neighbour another tensor. They follow the
algorithm otherwise, as if they were honest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import floor
from statistics import NormalDist

import torch


@dataclass(frozen=True)
class Adversary(ABC):
    """Some agents of a fleet, and their messages.

    Args:
        ranks: The agents that it controls.
    """

    ranks: tuple[int, ...]

    @abstractmethod
    def message(self, own: torch.Tensor, seen: torch.Tensor, size: int) -> torch.Tensor:
        """What one of its agents sends to one honest agent.

        Args:
            own: The tensor that the algorithm would send, ``[d]``.
            seen: The receiver's own tensor, and then those of its honest neighbours, ``[k, d]``.
            size: The number of agents of the fleet.
        """

    def honest(self, size: int) -> list[int]:
        """The ranks of the other agents, in order; records of a run are about these.

        Raises:
            ValueError: A rank does not exist, or no agent is left.
        """
        found = [rank for rank in range(size) if rank not in self.ranks]
        if not found or len(found) + len(set(self.ranks)) != size:
            raise ValueError(f"ranks={self.ranks} of an adversary: pass some of 0 to {size - 1}, and not all")
        return found


@dataclass(frozen=True)
class SignFlip(Adversary):
    """The negative of its own tensor, ``-scale x`` (Li, Xu, Chen, Giannakis, Ling 2019, arXiv:1811.03761).

    Args:
        scale: A factor; 1 keeps the norm.
    """

    scale: float = 1.0

    def message(self, own: torch.Tensor, seen: torch.Tensor, size: int) -> torch.Tensor:
        return -self.scale * own


@dataclass(frozen=True)
class InnerProductManipulation(Adversary):
    """``-epsilon`` times the mean of the tensors of the receiver and its honest neighbours (Xie, Koyejo, Gupta 2019,
    arXiv:1903.03936, for gradients and a server; between neighbours as He, Karimireddy, Jaggi 2022, arXiv:2202.01545).

    Args:
        epsilon: A factor: small ones are hard to tell from honest tensors.
    """

    epsilon: float = 0.1

    def message(self, own: torch.Tensor, seen: torch.Tensor, size: int) -> torch.Tensor:
        return -self.epsilon * seen.mean(0)


@dataclass(frozen=True)
class ALittleIsEnough(Adversary):
    """``mean - z std`` in each coordinate, over the receiver and its honest neighbours: ALIE (Baruch, Baruch, Goldberg
    2019, arXiv:1902.06156, for gradients and a server; between neighbours as He, Karimireddy, Jaggi 2022).

    Args:
        z: Standard deviations. If not given, the paper's largest that hides among n agents, m of them the adversary's:
            the quantile of the normal distribution at ``(n - m - s) / (n - m)``, ``s = floor(n / 2 + 1) - m``.
    """

    z: float | None = None

    def message(self, own: torch.Tensor, seen: torch.Tensor, size: int) -> torch.Tensor:
        return seen.mean(0) - self.deviations(size) * seen.std(0, correction=int(len(seen) > 1))

    def deviations(self, size: int) -> float:
        """The z for a fleet of ``size`` agents.

        Raises:
            ValueError: The adversary has about half of the agents, so that it needs nobody else.
        """
        if self.z is not None:
            return self.z
        bad = len(set(self.ranks))
        good = size - bad
        share = (good - floor(size / 2 + 1) + bad) / good
        if not 0 < share < 1:
            raise ValueError(f"ALittleIsEnough: no z hides {bad} of {size} agents; pass z")
        return NormalDist().inv_cdf(share)


@dataclass(frozen=True)
class LabelFlip(Adversary):
    """Honest messages of agents with wrong labels: c - 1 - label in place of a label, of c classes.

    The labels are data, so :meth:`flipped` must be called for them before the gradient is made.

    Args:
        classes: c.
    """

    classes: int = 10

    def message(self, own: torch.Tensor, seen: torch.Tensor, size: int) -> torch.Tensor:
        return own

    def flipped(self, targets: torch.Tensor, parts: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
        """The targets of a fleet in which the adversary's agents have wrong ones.

        Args:
            targets: int64 ``[n, samples]``; or ``[m]`` with ``parts``.
            parts: The indices of each agent's samples, as for :meth:`StackedModel.gradient`, without common ones.
        """
        found = targets.clone()
        for rank in self.ranks:
            at = rank if parts is None else parts[rank]
            found[at] = self.classes - 1 - targets[at]
        return found
