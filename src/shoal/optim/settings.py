"""The definition of an optimizer's next exchange: the attributes that a user sets, or a schedule, read at one
moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from functools import partial
from typing import Any

import torch

from ..algorithms.needs import LOOKED_AT
from ..algorithms.schedule_weights import AgentSchedule
from ..execution.operation import Handle
from ..ops.collective import submit_allreduce
from ..ops.hierarchical import machine_mixing
from ..ops.hierarchical import submit as submit_between_machines
from ..ops.neighbor import mixing_of, submit
from ..ops.robust_rules import Robust, too_few
from ..runtime.agent import Agent, current
from ..topology._validate import check_size
from ..topology.mixing import Mixing

Weights = Mapping[int, float]


class CommunicationType(Enum):
    """The kind of exchange of an optimizer."""

    neighbor_allreduce = "neighbor.allreduce"
    hierarchical_neighbor_allreduce = "hierarchical.neighbor.allreduce"
    allreduce = "allreduce"
    empty = "empty"


BY_HAND = ("self_weight", "src_weights", "dst_weights", "src_machine_weights", "dst_machine_weights")
"""The weights of a round, which a schedule gives if there is one."""


@dataclass
class Settings:
    """The attributes of an optimizer that define its exchange. Without weights the optimizer's topology applies.

    Attributes:
        self_weight: w_ii of this agent (``self_weights``, as in the paper, is the same).
        src_weights: ``{source: weight}``, pull.
        dst_weights: ``{destination: weight}``, or destinations: push.
        src_machine_weights, dst_machine_weights: The same between machines.
        enable_topo_check: Confirm that both ends of an edge know of it.
        communication_type: The operation that averages.
        num_steps_per_communication: Backward passes between two exchanges.
        robust: A rule that replaces the weighted average, as for :func:`shoal.neighbor_allreduce`; for adapt, then
            combine, and adapt with combine. It is applied to each bucket separately.
    """

    self_weight: float | None = None
    src_weights: Weights | None = None
    dst_weights: Weights | Iterable[int] | None = None
    src_machine_weights: Weights | None = None
    dst_machine_weights: Weights | Iterable[int] | None = None
    enable_topo_check: bool = True
    communication_type: CommunicationType = CommunicationType.neighbor_allreduce
    num_steps_per_communication: int = 1
    robust: Robust | None = None

    @property
    def by_hand(self) -> list[str]:
        """The names of the weights that the user has set."""
        return [name for name in BY_HAND if getattr(self, name) is not None]

    def set(self, name: str, value: Any) -> None:
        """Check and set one attribute.

        Raises:
            TypeError, ValueError: The value is invalid.
        """
        if name == "communication_type" and not isinstance(value, CommunicationType):
            raise TypeError(f"communication_type must be a shoal.optim.CommunicationType, not {value!r}")
        if name == "robust" and not isinstance(value, Robust | None):
            raise TypeError(f"robust must be a rule such as shoal.robust.ClippedGossip(), not {value!r}")
        if name == "num_steps_per_communication":
            try:
                value = check_size(value)
            except (TypeError, ValueError):
                raise ValueError(f"{name} must be a whole number from 1 on, not {value!r}") from None
        # A generator would be empty from the second round or bucket on.
        setattr(self, name, list(value) if isinstance(value, Iterator) else value)

    def check_neighbours(self, schedule: AgentSchedule | None) -> None:
        """All agents have as many neighbours in the rounds of a schedule as ``robust`` needs; else the step checks it.

        Raises:
            ValueError: An agent has fewer.
        """
        among_agents = self.communication_type is CommunicationType.neighbor_allreduce
        if self.robust is None or schedule is None or not among_agents:
            return
        found = schedule.too_few_sources(self.robust.neighbours_needed, LOOKED_AT)
        if found is not None:
            round_, rank, received = found
            raise ValueError(too_few(self.robust, f"in round {round_} of topology= rank {rank} has {received}"))

    def next_round(
        self, schedule: AgentSchedule | None, number: int, default: AgentSchedule | None = None
    ) -> ExchangeRound:
        """The next exchange, by the present settings.

        Args:
            schedule: The schedule of the weights, of agents or, if machines average, of machines.
            number: The number of the round.
            default: The schedule of averages with neighbours, if neither the settings nor the script give weights.

        Raises:
            TypeError, ValueError: The weights set by hand are incomplete, or name unknown ranks.
        """
        agent, kind = current("optim"), self.communication_type
        mixing, form = None, "push-pull"
        replan: Callable[[tuple[int, ...]], Mixing] | None = None
        if (
            default is not None
            and kind is CommunicationType.neighbor_allreduce
            and agent.topology_is_default
            and self.robust is None  # a rule compares several neighbours
            and not self.by_hand
        ):
            schedule = default
        if kind in (CommunicationType.empty, CommunicationType.allreduce):
            pass
        elif schedule is not None:
            mixing = schedule.mixing(number)
            replan = partial(schedule.mixing, number, "mix")
        elif kind is CommunicationType.neighbor_allreduce:
            mixing, form = mixing_of(agent, self.self_weight, self.src_weights, self.dst_weights)
        else:
            mixing = machine_mixing(agent, self.self_weight, self.src_machine_weights, self.dst_machine_weights)
        if self.robust is not None and kind not in (CommunicationType.empty, CommunicationType.neighbor_allreduce):
            raise ValueError(f"robust is for averages of neighbours, and not for communication_type {kind.value}")
        checked = self.enable_topo_check and schedule is None
        return ExchangeRound(agent, number, kind, mixing, form, checked, replan, self.robust)


@dataclass(frozen=True)
class ExchangeRound:
    """One exchange of all buckets of an optimizer.

    Attributes:
        agent: The exchanging agent.
        number: The number of the round, from 0 on.
        kind: The operation that averages.
        mixing: Its weights; None for the static topology's.
        form: The side that knows its edges, as for :func:`shoal.ops.neighbor.submit`.
        checked: Confirm that both ends of an edge know of it.
        replan: Returns the weights without lost agents, if a schedule gives them.
        robust: A rule that replaces the weighted average.
    """

    agent: Agent
    number: int
    kind: CommunicationType
    mixing: Mixing | None
    form: str
    checked: bool
    replan: Callable[[tuple[int, ...]], Mixing] | None = None
    robust: Robust | None = None

    def check_that_none_is_negative(self) -> None:
        """For what must stay positive while it is averaged, as second moments do.

        Raises:
            ValueError: A weight of this agent is below zero.
        """
        if self.kind in (CommunicationType.empty, CommunicationType.allreduce):
            return
        agent, mixing = self.agent, self.mixing
        if mixing is None:
            between = self.kind is CommunicationType.hierarchical_neighbor_allreduce
            static = agent.machine_topology if between else agent.topology
            if static is None:
                return
            mixing = static.mixing
        least = min(mixing.self_weight, *mixing.source_weights, *mixing.destination_weights, 1.0)
        if least < 0:
            raise ValueError(
                f"mix_state: rank {agent.rank} has the weight {least:g} in round {self.number}, and an average with "
                "a negative weight may be negative, where Adam takes the root. Take weights of 0 or more, such as "
                "Metropolis-Hastings weights, or leave mix_state out"
            )

    def start(
        self, tensor: torch.Tensor, out: torch.Tensor, name: str, fusible: bool = True, layout: int = 0
    ) -> Handle[torch.Tensor] | None:
        """Start the exchange of a flat tensor; its result will be in ``out``. None if nothing is exchanged.

        The tensor must not change until then: others read it in place, if they can.

        Args:
            tensor, out: ``[numel]``.
            name: Matches the exchange of different agents.
            fusible: A small tensor may be fused with others.
            layout: A digest of the parameters that are exchanged; neighbours must have the same.
        """
        if self.kind is CommunicationType.empty:
            return None
        agent, mixing = self.agent, self.mixing
        if self.kind is CommunicationType.allreduce:
            return submit_allreduce(agent, tensor, "average", name, out=out, zero_copy=True, layout=layout)
        if self.kind is CommunicationType.neighbor_allreduce:
            return submit(
                agent,
                tensor,
                mixing,
                self.form,
                name,
                checked=self.checked,
                out=out,
                zero_copy=True,
                fusible=fusible,
                replan=self.replan,
                robust=self.robust,
                layout=layout,
            )
        return submit_between_machines(
            agent, tensor, mixing, name, checked=self.checked, out=out, zero_copy=True, layout=layout
        )


NAMES = tuple(field.name for field in fields(Settings))
ALIASES = {"self_weights": "self_weight"}
