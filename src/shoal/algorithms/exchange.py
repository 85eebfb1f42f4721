"""The exchange of an algorithm in a real agent: a thread, a process, a machine of a cluster."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import networkx as nx
import numpy as np
import torch

from ..compression import Compressor
from ..compression.random_numbers import Redrawn
from ..execution.membership import WHOLE
from ..execution.operation import Handle, Operation
from ..ops.arguments import Internal, channel_name, on_device_of
from ..ops.collective import allgather, allreduce, submit_allreduce
from ..ops.encoded import Encoded
from ..ops.gathering import neighbor_allgather, submit_alltoall
from ..ops.neighbor import submit
from ..ops.reduction import shares, submit_shares
from ..ops.robust_rules import Robust, check_neighbours
from ..runtime.agent import current
from ..topology.healing import Without
from ..topology.schedule import Schedule
from .algorithm import Algorithm, Gradient, check_algorithm, warn_of_undeclared_needs
from .mix import COUNTERPARTS, EVERYBODY, MACHINE
from .needs import check
from .runs.conditions import Conditions
from .runs.run import Measure, Run, check_start, steps_of
from .runs.unreliable_mix import CarriesMessages, under
from .schedule_weights import AgentSchedule, Form, Ranks, RoundWeights

_ODD = 0x9E3779B1
"""Makes digests of 32 bits differ by the place of an exchange."""


class Exchange(CarriesMessages):
    """The methods of :class:`Mix` by Shoal's operations, called by one agent.

    Args:
        topology: A graph with its weights, or a schedule, over all agents.
        seed: The seed of the algorithm's random numbers; the same on all agents.
        name: Matches the exchanges of different agents.
        algorithm: The algorithm that exchanges; it defines its topology after a loss (``on_loss="continue"``).

    Attributes:
        layout: A digest of the composition of the tensors, equal on all agents in a round; 0 for none.
        operation: The last awaited operation.

    Raises:
        ValueError: The topology is for another number of agents.
    """

    def __init__(
        self,
        topology: nx.Graph | Schedule,
        seed: int = 0,
        name: str = "algorithm",
        algorithm: Algorithm | None = None,
    ) -> None:
        super().__init__(seed)
        agent = current("algorithms.Exchange")
        self.size, self.rank = agent.size, agent.rank
        self._schedule = AgentSchedule(topology, self.rank, Without if algorithm is None else algorithm.healed)
        if self._schedule.size != self.size:
            raise ValueError(f"the topology has {self._schedule.size} agents, and there are {self.size}")
        self.layout = self._place = 0
        self.operation: Operation | None = None
        self._name = name
        self._plan = WHOLE

    def beside(self, number: int) -> Exchange:
        """The exchange of another part of the parameters, over the same topology: with its own name and random
        numbers.
        """
        found = copy.copy(self)
        found._name, found.seed = f"{self._name}.{number}", self.seed + number
        return found

    def _digest(self) -> int:
        """The layout and the exchange's place in its step, which are the same on all agents."""
        # An agent whose step has failed begins the next one in a round in which others may still exchange for this
        # one. Without the place they would mix different vectors; with it both steps fail, and the next ones match.
        place, self._place = self._place, self._place + 1
        return self.layout ^ (place * _ODD & 0xFFFFFFFF)

    def begin(self, step: int) -> bool:
        super().begin(step)
        self._place = 0
        agent = current("algorithms.Exchange")
        # Once for the step, and not for each exchange: all exchanges and the state of a step have the same agents.
        before, self._plan = self._plan, agent.engine.plan(channel_name("step", self._name))
        self.size = agent.size - len(self._plan.gone)
        return self._plan != before

    def _weigh(
        self, form: Form, x: torch.Tensor, nbytes: int | None = None, speaks: torch.Tensor | None = None
    ) -> torch.Tensor:
        mixing = self._schedule.mixing(self.round, form, self._plan.gone)
        speaking = None if speaks is None else bool(speaks)
        self.exchanges += 1
        if speaking is not False:
            self.sent += len(mixing.destinations) * (x.nbytes if nbytes is None else nbytes)
        agent = current("neighbor_allreduce")
        return self._result_of(
            submit(agent, x, mixing, name=self._name, fusible=False, speaks=speaking, layout=self._digest())
        )

    def robust(self, x: torch.Tensor, rule: Robust) -> torch.Tensor:
        mixing = self._schedule.mixing(self.round, "mix", self._plan.gone)
        self.exchanges += 1
        self.sent += len(mixing.destinations) * x.nbytes
        agent = current("neighbor_allreduce")
        check_neighbours(agent, rule, list(mixing.sources), whole=not self._plan.gone)
        return self._result_of(
            submit(agent, x, mixing, name=self._name, fusible=False, robust=rule, layout=self._digest())
        )

    def _result_of(self, handle: Handle[torch.Tensor]) -> torch.Tensor:
        self.operation = handle.operation
        return handle.wait()

    def compressed(self, x: torch.Tensor, compressor: Compressor) -> tuple[torch.Tensor, torch.Tensor]:
        if not compressor.encodes:
            return super().compressed(x, compressor)
        mixing = self._schedule.mixing(self.round, "mix", self._plan.gone)
        seed, step, times = self.seed, self.step, self._draws
        encoded = Encoded.of(x, compressor, self.rank, lambda rank: Redrawn(seed, step, rank, times), by=self)
        self.exchanges += 1
        self.sent += len(mixing.destinations) * encoded.message.numel()
        agent = current("neighbor_allreduce")
        mixed = self._result_of(
            submit(agent, x, mixing, name=self._name, encoded=lambda _: encoded, layout=self._digest())
        )
        return mixed, on_device_of(x, encoded.numbers)

    def average(self, x: torch.Tensor, group: str = EVERYBODY) -> torch.Tensor:
        groups = {EVERYBODY: lambda: None, MACHINE: lambda: [*self._cut(0)], COUNTERPARTS: self._counterparts}
        if group not in groups:
            raise ValueError(f"group={group!r}: pass {EVERYBODY!r}, {MACHINE!r} or {COUNTERPARTS!r}")
        self.exchanges += 1
        self.sent += x.nbytes
        name = f"{self._name} mean" + ("" if group == EVERYBODY else f" of {group}")
        agent = current("allreduce")
        return self._result_of(submit_allreduce(agent, x, "average", name, groups[group](), layout=self._digest()))

    def share(self, x: torch.Tensor) -> torch.Tensor:
        start, stop = self._cut(len(x))[self.rank]
        return x[start:stop].clone()

    def whole(self, share: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        self.exchanges += 1
        self.sent += share.nbytes
        name = f"{self._name} shares"
        agent = current("algorithms.Exchange")
        return self._result_of(submit_shares(agent, share, x.clone(), self._cut(len(x)), name, self._digest()))

    def _cut(self, total: int) -> dict[int, tuple[int, int]]:
        """The numbers of each agent of this machine: equally many; if any agent is lost, the first one has all."""
        gone = self._plan.gone
        ranks = [rank for rank in current("algorithms.Exchange").local_ranks if rank not in gone]
        if gone:
            return {rank: (0 if rank == ranks[0] else total, total) for rank in ranks}
        return dict(zip(ranks, shares(total, len(ranks)), strict=True))

    def _counterparts(self) -> list[int]:
        machines, gone = current("algorithms.Exchange").machines, self._plan.gone
        groups = [machines.ranks(machine) for machine in range(machines.count)]
        mine = groups[machines.of[self.rank]]
        if not gone:
            return [group[mine.index(self.rank)] for group in groups]
        remaining = [[rank for rank in group if rank not in gone] for group in groups]
        leaders = [group[0] for group in remaining if group]
        return leaders if self.rank in leaders else [self.rank]

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        return x.expand(len(self._neighbours), *x.shape)

    def gather(self, messages: torch.Tensor) -> torch.Tensor:
        return messages.sum(0)

    def by_agent(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.flatten(0, 1).unsqueeze(0)

    def by_link(self, rows: torch.Tensor, r: int) -> torch.Tensor:
        return rows.reshape(len(self._neighbours), r, rows.shape[-1])

    def edges(self, messages: torch.Tensor, *, nbytes: int | None = None) -> torch.Tensor:
        ranks = self._neighbours
        self.exchanges += 1
        self.sent += messages.nbytes if nbytes is None else nbytes * len(ranks)
        agent, name = current("neighbor_alltoall"), f"{self._name} edges"
        return self._result_of(
            submit_alltoall(agent, messages, ranks, name, own_for_lost=True, everybody=True, layout=self._digest())
        )

    def sign(self, like: torch.Tensor) -> torch.Tensor:
        signs = [1.0 if self.rank < neighbour else -1.0 for neighbour in self._neighbours]
        return torch.tensor(signs, dtype=like.dtype, device=like.device).unsqueeze(1)

    @property
    def machines(self) -> int:  # type: ignore[override]
        of = current("algorithms.Exchange").machines.of
        return len({machine for rank, machine in enumerate(of) if rank not in self._plan.gone})

    @property
    def _neighbours(self) -> list[int]:
        return self._schedule.neighbours(self.round, self._plan.gone)

    def _agents(self, like: torch.Tensor) -> torch.Tensor:
        return torch.tensor([self.rank], device="cpu")

    # The three below are for UnreliableMix.

    @property
    def here(self) -> Ranks:
        return np.array([self.rank])

    def round_weights(self) -> RoundWeights:
        return self._schedule.round_weights(self.round, self._plan.gone)

    def fetch(self, x: torch.Tensor, destination: Ranks, source: Ranks) -> torch.Tensor:
        sources, destinations = source[destination == self.rank].tolist(), destination[source == self.rank].tolist()
        name = Internal(f"{self._name} messages")
        row = x.unsqueeze(0)
        return neighbor_allgather(row, name, src_ranks=sources, dst_ranks=destinations, enable_topo_check=False)

    def rows_of_all(self, x: torch.Tensor) -> torch.Tensor:
        return allgather(x.unsqueeze(0), Internal(f"{self._name} records.rows"))

    def mean_of_all(self, x: torch.Tensor) -> torch.Tensor:
        return allreduce(x, name=Internal(f"{self._name} records.mean"))

    def sum_of_all(self, values: torch.Tensor) -> torch.Tensor:
        return allreduce(values, op="sum", name=Internal(f"{self._name} records.sums"))


def run(
    algorithm: Algorithm,
    x: torch.Tensor,
    gradient: Gradient | Callable[[torch.Tensor], torch.Tensor],
    topology: nx.Graph | Schedule,
    steps: int,
    *,
    seed: int = 0,
    measure: Measure | None = None,
    every: int | None = None,
    progress: bool = False,
    resume: Run | None = None,
    lr_lambda: Callable[[int], float] | None = None,
    unchecked: str | Iterable[str] = (),
    conditions: Conditions | None = None,
) -> Run:
    """Run an algorithm on the agents that there are: each calls it with its own ``x`` ``[d]`` and its own gradient.

    Arguments as for :meth:`shoal.sim.StackedFleet.run`, also ``measure``, which takes the estimates of all agents,
    ``[n, d]``. ``topology``, ``steps``, ``seed``, ``lr_lambda``, ``every``, and whether there is a ``measure``, must be
    the same on all agents, because they take each record together: an average over all agents (``d`` numbers, and 4),
    or with a ``measure`` the estimates of all (``n d``). :attr:`Run.sent` does not count these. ``every=0`` records
    nothing.

    An algorithm that declares no ``needs`` causes a warning, once.

    With ``conditions`` the agents have the losses, delays, noise and pauses of the simulated run with the same seed,
    and the same result up to rounding. The real network still carries each message at once, and the agents take their
    ticks together; the receiver applies the conditions.

    Raises:
        TypeError: ``algorithm`` is none, or ``x`` no tensor of numbers with fractions.
        ValueError: The mixing is not what the algorithm needs; the message names the failed condition. Or ``x`` has no
            dimension, or there are both ``conditions`` and ``resume``.
    """
    check_algorithm(algorithm)
    check_start(x)
    check(type(algorithm).__name__, algorithm.needs, topology, dimension=x.shape[-1], unchecked=unchecked)
    exchange = Exchange(topology, seed, algorithm=algorithm)
    mix = exchange if conditions is None else under(conditions, exchange, resume)
    if exchange.rank == 0:
        warn_of_undeclared_needs(algorithm)
    # Many bars in one terminal would be unreadable.
    shown = progress and exchange.rank == 0
    return steps_of(
        algorithm,
        x,
        gradient,
        mix,
        steps,
        measure=measure,
        every=every,
        progress=shown,
        resume=resume,
        lr_lambda=lr_lambda,
    )
