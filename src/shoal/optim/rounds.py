"""What the next exchange of an optimizer is: the attributes that a user sets, or a schedule, read at one moment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

import torch

from ..algorithms.view import View
from ..engine.operation import Handle
from ..ops.collective import allreduce_nonblocking
from ..ops.hierarchical import hierarchical_neighbor_allreduce_nonblocking
from ..ops.neighbor import neighbor_allreduce_nonblocking
from ..topology._validate import check_size
from ..world.agent import current

Weights = Mapping[int, float]


class CommunicationType(Enum):
    """How an optimizer exchanges."""

    neighbor_allreduce = "neighbor.allreduce"
    hierarchical_neighbor_allreduce = "hierarchical.neighbor.allreduce"
    allreduce = "allreduce"
    empty = "empty"


BY_HAND = ("self_weight", "src_weights", "dst_weights", "src_machine_weights", "dst_machine_weights")
"""The weights of a round, which a schedule gives if there is one."""


@dataclass
class Settings:
    """The attributes of an optimizer that say how it exchanges. None of the weights: the static topology.

    Attributes:
        self_weight: w_ii of this agent (``self_weights``, as the paper writes it, is the same).
        src_weights: ``{source: weight}``, pull.
        dst_weights: ``{destination: weight}``, or destinations: push.
        src_machine_weights, dst_machine_weights: The same between machines.
        enable_topo_check: Confirm that both ends of an edge know of it.
        communication_type: How.
        num_steps_per_communication: Backward passes between two exchanges.
    """

    self_weight: float | None = None
    src_weights: Weights | None = None
    dst_weights: Weights | Iterable[int] | None = None
    src_machine_weights: Weights | None = None
    dst_machine_weights: Weights | Iterable[int] | None = None
    enable_topo_check: bool = True
    communication_type: CommunicationType = CommunicationType.neighbor_allreduce
    num_steps_per_communication: int = 1

    @property
    def by_hand(self) -> list[str]:
        """The weights that the user has set."""
        return [name for name in BY_HAND if getattr(self, name) is not None]

    def set(self, name: str, value: Any) -> None:
        """Set one, checked.

        Raises:
            TypeError, ValueError: It is not what it must be.
        """
        if name == "communication_type" and not isinstance(value, CommunicationType):
            raise TypeError(f"communication_type must be a shoal.CommunicationType, not {value!r}")
        if name == "num_steps_per_communication":
            try:
                value = check_size(value)
            except (TypeError, ValueError):
                raise ValueError(f"{name} must be a whole number from 1 on, not {value!r}") from None
        setattr(self, name, value)

    def check_that_none_is_negative(self, view: View | None, round_: int) -> None:
        """For what must stay positive while it is averaged, as second moments do.

        Raises:
            ValueError: A weight of this agent in the round is below zero.
        """
        if self.communication_type in (CommunicationType.empty, CommunicationType.allreduce):
            return
        agent = current("optim")
        between = self.communication_type is CommunicationType.hierarchical_neighbor_allreduce
        static = agent.machine_topology if between else agent.topology
        sources, destinations = (
            (self.src_machine_weights, self.dst_machine_weights) if between else (self.src_weights, self.dst_weights)
        )
        if view is not None:
            part = view.part(round_)
            weights = [part.own, *part.sources.values()]
        elif self.by_hand or static is None:
            maps = [one for one in (sources, destinations) if isinstance(one, Mapping)]
            weights = [self.self_weight or 0.0, *(weight for one in maps for weight in one.values())]
        else:
            weights = [static.mixing.self_weight, *static.mixing.source_weights]
        if min(weights) < 0:
            raise ValueError(
                f"mix_state: rank {agent.rank} has the weight {min(weights):g} in round {round_}, and an average with "
                "a negative weight may be negative, where Adam takes the root. Take weights of 0 or more, such as "
                "Metropolis-Hastings weights, or leave mix_state out"
            )

    def start(
        self, tensor: torch.Tensor, out: torch.Tensor, name: str, view: View | None, round_: int
    ) -> Handle[torch.Tensor] | None:
        """Begin the exchange of a flat tensor; its result will be in ``out``. None where nothing is exchanged.

        The tensor must not change until then: it is read where it lies, if others can read there.

        Args:
            tensor, out: ``[numel]``.
            name: What the exchange is matched by.
            view: The schedule that the weights come from, of agents or, where machines average, of machines.
            round_: Its round.
        """
        kind = self.communication_type
        if kind is CommunicationType.empty:
            return None
        with current("optim").engine.publisher.lending(tensor):
            if kind is CommunicationType.allreduce:
                return allreduce_nonblocking(tensor, name=name, out=out)
            average, sources, destinations = (
                (neighbor_allreduce_nonblocking, self.src_weights, self.dst_weights)
                if kind is CommunicationType.neighbor_allreduce
                else (
                    hierarchical_neighbor_allreduce_nonblocking,
                    self.src_machine_weights,
                    self.dst_machine_weights,
                )
            )
            weights = (self.self_weight, sources, destinations) if view is None else view.part(round_)
            check = self.enable_topo_check and view is None
            return average(tensor, *weights, enable_topo_check=check, name=name, out=out)


NAMES = tuple(field.name for field in fields(Settings))
ALIASES = {"self_weights": "self_weight"}
