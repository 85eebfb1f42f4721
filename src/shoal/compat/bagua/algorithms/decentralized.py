"""BAGUA's decentralized SGD, in full and in low precision."""

from __future__ import annotations

from typing import Any, Literal

import torch

from ....algorithms.compressed import LowPrecision
from ....algorithms.gradient_descent import GradientDescent
from ....optim.optimizer import DecentralizedOptimizer
from ....optim.settings import CommunicationType
from ....runtime.agent import current
from ....topology._validate import check_size
from ....topology.families.one_peer import ShiftOne
from ....topology.families.static import Circulant
from ....topology.schedule import Schedule
from .base import Algorithm

__all__ = ["DecentralizedAlgorithm", "LowPrecisionDecentralizedAlgorithm"]

_MODES = ("all", "shift_one")


class DecentralizedAlgorithm(Algorithm):
    """``x+ = W x - lr g(x)``: parameters are averaged while the gradients are computed (Gan et al. 2021,
    arXiv:2107.01499).

    Args:
        hierarchical: Machines average as agents do: the mean of each machine's agents is sent.
        peer_selection_mode: ``"all"``: the mean over all. ``"shift_one"``: with one other, of the other half, and with
            the next one of it the next time (:class:`shoal.topology.ShiftOne`); their number must be even.
        communication_interval: k: the algorithm communicates in steps 1, k + 1, 2 k + 1, ...

    Raises:
        ValueError: There is no such mode or interval; in ``with_bagua``, where an odd number is to be paired.
    """

    def __init__(
        self,
        hierarchical: bool = True,
        peer_selection_mode: Literal["all", "shift_one"] = "all",
        communication_interval: int = 1,
    ) -> None:
        if peer_selection_mode not in _MODES:
            raise ValueError(
                f"peer_selection_mode={peer_selection_mode!r}: there are {' and '.join(map(repr, _MODES))}"
            )
        self.hierarchical, self.peer_selection_mode = hierarchical, peer_selection_mode
        self.communication_interval = check_size(communication_interval, "communication_interval")

    def around(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> DecentralizedOptimizer:
        agent, options = current("with_bagua"), dict[str, Any]()
        if self.peer_selection_mode == "all":
            options["communication_type"] = CommunicationType.allreduce
        elif self.hierarchical:
            options["communication_type"] = CommunicationType.hierarchical_neighbor_allreduce
            options["topology"] = ShiftOne(agent.machines.count)
        else:
            options["topology"] = ShiftOne(agent.size)
        return DecentralizedOptimizer(optimizer, model, GradientDescent(1.0, atc=False), mix_state=(), **options)


class LowPrecisionDecentralizedAlgorithm(Algorithm):
    """:class:`shoal.algorithms.LowPrecision` on a ring with weights of a third: the changes of parameters are sent in
    eight bits.

    Args:
        hierarchical: The ring is one of machines, of which each agent sends its share: inside, the agents' steps are
            averaged as they are. On one machine nothing is compressed then.
        communication_interval: k: the algorithm communicates in steps 1, k + 1, 2 k + 1, ...; the updates between them
            add up.

    Raises:
        ValueError: There is no such interval.
    """

    def __init__(self, hierarchical: bool = True, communication_interval: int = 1) -> None:
        self.hierarchical = hierarchical
        self.communication_interval = check_size(communication_interval, "communication_interval")

    def around(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> DecentralizedOptimizer:
        agent = current("with_bagua")
        if not self.hierarchical:
            return DecentralizedOptimizer(optimizer, model, LowPrecision(1.0), topology=thirds(agent.size))
        machines = agent.machines.count
        if machines == 1:
            of_all = CommunicationType.allreduce
            return DecentralizedOptimizer(optimizer, model, mix_state=(), communication_type=of_all)
        between = CommunicationType.hierarchical_neighbor_allreduce
        ring = thirds(machines)
        return DecentralizedOptimizer(optimizer, model, LowPrecision(1.0), topology=ring, communication_type=between)


def thirds(size: int) -> Schedule:
    """BAGUA's ring: oneself and both neighbours weigh a third; of two agents each is the other's neighbour twice."""
    return Circulant(size, {0: 1 / 3, 1: 1 / 3, -1: 1 / 3})
