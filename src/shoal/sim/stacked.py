"""A fleet of agents as the rows of one tensor: thousands of them in one process, on a CPU or a GPU.

Averaging with the neighbours is then one operation on ``[n, d]``; which one, :mod:`~shoal.sim.mixing_products` chooses.
A topology may depend on the agents' values (:data:`StateTopology`): a school of fish, links that form on events,
learned graphs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import networkx as nx
import numpy as np
import torch
from numpy.typing import ArrayLike

from ..algorithms.algorithm import Algorithm, Gradient, check_algorithm, warn_of_undeclared_needs
from ..algorithms.mix import COUNTERPARTS, EVERYBODY, MACHINE
from ..algorithms.needs import STATIC, Need, check, without
from ..algorithms.runs.conditions import Conditions
from ..algorithms.runs.run import Measure, Run, check_start, steps_of
from ..algorithms.runs.unreliable_mix import CarriesMessages, under
from ..algorithms.schedule_weights import Form, Ranks, RoundWeights, ScheduleWeights
from ..netmodel.network import Network
from ..ops.robust_rules import Robust, Term, too_few
from ..topology.families.compose import Idle
from ..topology.schedule import AnyTopology, Edges, Schedule, as_schedule, metropolis_hastings
from ..transport.shared_regions import ResultPool
from .adversaries import Adversary
from .mixing_products import product
from .pace import ExchangeTraffic, Pace

T = TypeVar("T")

_KEPT = 256
_KEPT_WITHOUT_PERIOD = 8
_LEAST_POOL = 1 << 28

StateTopology = Callable[[int, torch.Tensor, Any], Any]
"""Takes the round, the agents' x ``[n, d]`` and the algorithm's state; returns the links of the round.

They are pairs of agents, integers ``[m, 2]``, or a bool matrix ``[n, n]``; links have both directions and
Metropolis-Hastings weights. Or they are a graph with its weights, or W, float ``[n, n]``, which are used as they are.
The state is that before the step; it is None when :meth:`~shoal.algorithms.Algorithm.init` exchanges something.
"""


class StateSchedule(Schedule):
    """The rounds of a run whose links depend on its values.

    Args:
        size: Number of agents.
        links: Returns the links of a round.

    Attributes:
        x, state: The values at the beginning of the step, which the run sets.
    """

    period = None

    def __init__(self, size: int, links: StateTopology) -> None:
        self.size, self._links = size, links
        self.x: torch.Tensor | None = None
        self.state: Any = None

    def edges(self, round: int) -> Edges:
        """The round with the present values.

        Raises:
            ValueError: The function returned links of other agents, or of a wrong shape.
        """
        if self.x is None:
            raise ValueError("the links of a round depend on the values of a run, and there is none")
        return edges_of(self._links(round, self.x, self.state), self.size)

    def mixing(self, round: int, rank: int) -> Any:
        raise ValueError("one agent alone cannot know links that depend on the values of all agents")

    def describe(self) -> str:
        return f"links of {self.size} agents that depend on their values"


def edges_of(links: torch.Tensor | AnyTopology, size: int) -> Edges:
    """The edges of a round from the result of a :data:`StateTopology`.

    Raises:
        ValueError: They are not links of ``size`` agents.
    """
    given = links.detach().cpu().numpy() if isinstance(links, torch.Tensor) else links
    if isinstance(given, (list, tuple, np.ndarray)):
        pairs = np.asarray(given) if len(given) else np.empty((0, 2), np.int64)
        if pairs.dtype.kind == "b":
            if pairs.shape != (size, size):
                raise ValueError(f"a bool matrix of shape {list(pairs.shape)} for {size} agents: pass [{size}, {size}]")
            return metropolis_hastings(size, *pairs.nonzero())
        if pairs.dtype.kind in "iu":
            if pairs.ndim != 2 or pairs.shape[1] != 2 or (len(pairs) and not 0 <= pairs.min() <= pairs.max() < size):
                raise ValueError(
                    f"links of shape {list(pairs.shape)} for {size} agents: pass pairs of ranks, integers [m, 2] from "
                    f"0 to {size - 1}; W, [n, n], must be float"
                )
            return metropolis_hastings(size, pairs[:, 0], pairs[:, 1])
        given = pairs
    schedule = as_schedule(given)
    if schedule.size != size:
        raise ValueError(f"links of {schedule.size} agents, and there are {size}")
    return schedule.edges(0)


def allow_any_links(what: str, needs: Iterable[Need], size: int, unchecked: str | Iterable[str] = ()) -> None:
    """Refuse an algorithm whose W must not change. Other needs concern graphs that are not known before the run.

    Raises:
        ValueError: The algorithm needs a static topology.
    """
    static = [need for need in without(unchecked, what, needs) if need is STATIC]
    check(what, static, StateSchedule(size, lambda round, x, state: []))


class StackedMix(CarriesMessages):
    """The operations of :class:`~shoal.algorithms.Mix` on rows.

    Args:
        topology: A graph with its weights, or a schedule.
        seed: The seed of the algorithm's random numbers.
        agents_per_machine: The size of a group ``"machine"``: consecutive ranks from 0 on.
        pace: Computes :attr:`seconds`.
        adversary: Changes the messages of some agents in averages over the topology.
    """

    stacked = True

    def __init__(
        self,
        topology: nx.Graph | Schedule,
        seed: int = 0,
        agents_per_machine: int = 1,
        pace: Pace | None = None,
        adversary: Adversary | None = None,
    ) -> None:
        super().__init__(seed)
        self._follows = topology if isinstance(topology, StateSchedule) else None
        self._rounds = ScheduleWeights(topology)
        self.size = self._rounds.size
        self._per_machine = agents_per_machine
        self.machines = self.size // agents_per_machine
        self._pace = pace
        self.seconds = None if pace is None else 0.0
        self._exchanges: list[ExchangeTraffic] = []
        self._exchanged_in = 0  # the round of the last one
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._pool, self._pool_for = ResultPool(), 0
        self._adversary = adversary
        self._honest = None if adversary is None else adversary.honest(self.size)

    def follow(self, x: torch.Tensor, state: Any) -> None:
        if self._follows is not None:
            self._follows.x, self._follows.state = x, state

    def end(self) -> None:
        if self._pace is not None and self.seconds is not None:
            # An algorithm with local steps exchanges in another round than that of its step.
            round_ = self._exchanged_in if self._exchanges else self.round
            self.seconds += self._pace.seconds(round_, tuple(self._exchanges))
        self._exchanges.clear()

    def _weigh(
        self, form: Form, x: torch.Tensor, nbytes: int | None = None, speaks: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.check(x)
        weights = self._rounds[self.round]
        each, messages, longest = x[0].nbytes if nbytes is None else nbytes, weights.messages, 1
        if speaks is not None:
            speaking = speaks.view(-1).cpu()
            said = torch.as_tensor(weights.sends, device="cpu") * speaking
            messages, longest = int(said.sum()), int(speaking.any())
        self._note(ExchangeTraffic("neighbours", longest * each), messages * each)
        x = x.contiguous()
        multiply = self._once((form, x.dtype, x.device), lambda: product(weights, form, x.dtype, x.device))
        out = self._empty_like(x)
        multiply(out, x)
        if self._adversary is not None:
            for rank, (own, terms) in self._attacked(form, x).items():
                mixed = sum((weight * tensor for _, tensor, weight in terms), own * x[rank].view(-1))
                out[rank] = mixed.view(x.shape[1:])
        return out

    def robust(self, x: torch.Tensor, rule: Robust) -> torch.Tensor:
        self.check(x)
        weights = self._rounds[self.round]
        self._note(ExchangeTraffic("neighbours", x[0].nbytes), weights.messages * x[0].nbytes)
        x = x.contiguous()
        out, attacked = self._empty_like(x), self._attacked("mix", x)
        for rank, (own, sources) in enumerate(self._sources("mix")):
            if 0 < len(sources) < rule.neighbours_needed:
                raise ValueError(too_few(rule, f"in round {self.round} rank {rank} has {len(sources)}"))
            terms = (
                attacked[rank][1] if rank in attacked else [(source, x[source].view(-1), w) for source, w in sources]
            )
            rule.combine(rank, out[rank].view(-1), x[rank].view(-1), own, terms)
        return out

    def _sources(self, form: Form) -> list[tuple[float, list[tuple[int, float]]]]:
        """The self weight of each agent, and its sources with their weights."""

        def make() -> list[tuple[float, list[tuple[int, float]]]]:
            weights = self._rounds[self.round]
            own, sources = [0.0] * self.size, [list[tuple[int, float]]() for _ in range(self.size)]
            edges = (weights.destination.tolist(), weights.source.tolist(), getattr(weights, form).tolist())
            for here, there, weight in zip(*edges, strict=True):
                if here == there:
                    own[here] += weight
                else:
                    sources[here].append((there, weight))
            return list(zip(own, sources, strict=True))

        return self._once(("sources", form), make)

    def _attacked(self, form: Form, x: torch.Tensor) -> dict[int, tuple[float, list[Term]]]:
        """The self weight and the messages of each honest agent that has a neighbour of the adversary's."""
        if self._adversary is None or self._honest is None:
            return {}
        bad, found = set(self._adversary.ranks), dict[int, tuple[float, list[Term]]]()
        rows, sources = x.reshape(self.size, -1), self._sources(form)
        for rank in self._honest:
            own, mine = sources[rank]
            if not bad.isdisjoint(source for source, _ in mine):
                seen = rows[[rank, *(source for source, _ in mine if source not in bad)]]
                found[rank] = (
                    own,
                    [
                        (
                            source,
                            self._adversary.message(rows[source], seen, self.size) if source in bad else rows[source],
                            weight,
                        )
                        for source, weight in mine
                    ],
                )
        return found

    def counted(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self._honest is None else rows[self._honest]

    def average(self, x: torch.Tensor, group: str = EVERYBODY) -> torch.Tensor:
        self.check(x)
        self._refuse_adversary("averages over all agents or a machine")
        if group == EVERYBODY:
            self._note(ExchangeTraffic("all", x[0].nbytes), x.nbytes)
            return x.mean(0, keepdim=True).expand_as(x).contiguous()
        if group not in (MACHINE, COUNTERPARTS):
            raise ValueError(f"group={group!r}: pass {EVERYBODY!r}, {MACHINE!r} or {COUNTERPARTS!r}")
        of_machine = group == MACHINE
        self._note(ExchangeTraffic("machine" if of_machine else "all", x[0].nbytes), x.nbytes)
        rows = x.view(-1, self._per_machine, *x.shape[1:])
        return rows.mean(1 if of_machine else 0, keepdim=True).expand_as(rows).reshape(x.shape)

    def share(self, x: torch.Tensor) -> torch.Tensor:
        each, d = self._per_machine, x.shape[-1]
        if d % each:
            raise ValueError(
                f"{d} numbers cannot be dealt out to {each} agents of a machine, equally many to each: a stacked fleet "
                "has rows of one length. Take a multiple"
            )
        rows = torch.arange(len(x), device=x.device)
        return x.view(len(x), each, d // each)[rows, rows % each]

    def whole(self, share: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        self._note(ExchangeTraffic("machine", share[0].nbytes), share.nbytes)
        return share.view(self.machines, -1).repeat_interleave(self._per_machine, 0)

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        return x[self._here(x.device)]

    def gather(self, messages: torch.Tensor) -> torch.Tensor:
        out = messages.new_zeros((self.size, *messages.shape[1:]))
        return out.index_add_(0, self._here(messages.device), messages)

    def by_agent(self, rows: torch.Tensor) -> torch.Tensor:
        place = self._ranks("place", rows.device, self._places)
        most = int(place.max()) + 1 if len(place) else 0
        out = rows.new_zeros((self.size, most, *rows.shape[1:]))
        out[self._here(rows.device), place] = rows
        return out.flatten(1, 2)

    def by_link(self, rows: torch.Tensor, r: int) -> torch.Tensor:
        place = self._ranks("place", rows.device, self._places)
        return rows.view(self.size, rows.shape[1] // r, r, rows.shape[-1])[self._here(rows.device), place]

    def _places(self) -> Ranks:
        """The place of each link among those of its agent, ``[links]``."""
        here = self._rounds[self.round].neighbours[0]
        order = np.argsort(here, kind="stable")
        places = np.empty_like(here)
        places[order] = np.arange(len(here)) - np.searchsorted(here[order], here[order])
        return places

    def edges(self, messages: torch.Tensor, *, nbytes: int | None = None) -> torch.Tensor:
        self._refuse_adversary("a message for each neighbour")
        each = messages[:1].nbytes if nbytes is None else nbytes
        self._note(ExchangeTraffic("neighbours", each), each * len(messages))
        return messages[self._ranks("reverse", messages.device, lambda: self._rounds[self.round].reverse)]

    def _refuse_adversary(self, feature: str) -> None:
        if self._adversary is not None:
            raise ValueError(f"adversary: it changes averages over the topology, and this algorithm uses {feature}")

    def sign(self, like: torch.Tensor) -> torch.Tensor:
        here, there = self._rounds[self.round].neighbours
        return torch.from_numpy(np.sign(there - here)).to(like.device, like.dtype).unsqueeze(1)

    @property
    def here(self) -> Ranks:
        return np.arange(self.size)

    def round_weights(self) -> RoundWeights:
        return self._rounds[self.round]

    def fetch(self, x: torch.Tensor, destination: Ranks, source: Ranks) -> torch.Tensor:
        self.check(x)
        return x[torch.from_numpy(source).to(x.device)]

    def _here(self, device: torch.device) -> torch.Tensor:
        """The agent that each row of messages belongs to, int64 [links]."""
        return self._ranks("here", device, lambda: self._rounds[self.round].neighbours[0])

    def _ranks(self, name: str, device: torch.device, make: Callable[[], Ranks]) -> torch.Tensor:
        return self._once((name, device), lambda: torch.from_numpy(make()).to(device))

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        """A value that depends only on the round's edges, computed at its first use."""
        key = self._rounds.schedule.in_period(self.round), key
        if key not in self._kept:
            most = _KEPT_WITHOUT_PERIOD if self._rounds.schedule.period is None else _KEPT
            while len(self._kept) >= most:
                self._kept.popitem(last=False)
            self._kept[key] = make()
        found: T = self._kept[key]
        return found

    def _note(self, exchange: ExchangeTraffic, sent: int) -> None:
        self._exchanged_in = self.round
        self.exchanges += 1
        self.sent += sent
        if self._pace is not None:
            self._exchanges.append(exchange)

    def _empty_like(self, x: torch.Tensor) -> torch.Tensor:
        """Memory that was written to before, if there is some: fresh pages cost more than mixing."""
        if not x.is_cpu:
            return torch.empty_like(x)
        if x.nbytes > self._pool_for:
            self._pool_for = x.nbytes
            self._pool = ResultPool(max(_LEAST_POOL, 4 * x.nbytes))
        return self._pool.empty(tuple(x.shape), x.dtype)

    def _agents(self, like: torch.Tensor) -> torch.Tensor:
        return torch.arange(self.size, device=like.device).unsqueeze(1)

    def check(self, x: torch.Tensor) -> None:
        """Raise ValueError if it has no row for each agent."""
        if x.dim() < 2 or len(x) != self.size:
            raise ValueError(f"a tensor of shape {list(x.shape)}: a fleet of {self.size} agents has [{self.size}, d]")


class StackedFleet:
    """Simulated agents, all in one process.

    Args:
        topology: A graph with its weights, or a schedule; it sets the number of agents. Or this number, for agents
            whose links are those of ``run(topology=)``.
        seed: The seed of all random numbers of a run.
        agents_per_machine: For algorithms that average within a machine.
    """

    def __init__(self, topology: nx.Graph | Schedule | int, *, seed: int = 0, agents_per_machine: int = 1) -> None:
        self.topology = Idle(topology) if isinstance(topology, int) else as_schedule(topology)
        self.seed, self.agents_per_machine = seed, agents_per_machine
        self.size = self.topology.size
        if agents_per_machine < 1 or self.size % agents_per_machine:
            raise ValueError(f"{self.size} agents do not fill machines of {agents_per_machine}")

    def run(
        self,
        algorithm: Algorithm,
        x: torch.Tensor,
        gradient: Gradient | Callable[[torch.Tensor], torch.Tensor],
        steps: int,
        *,
        measure: Measure | None = None,
        every: int | None = None,
        progress: bool = False,
        resume: Run | None = None,
        lr_lambda: Callable[[int], float] | None = None,
        adversary: Adversary | None = None,
        network: Network | None = None,
        compute: ArrayLike = 0.0,
        unchecked: str | Iterable[str] = (),
        topology: StateTopology | None = None,
        conditions: Conditions | None = None,
    ) -> Run:
        """Take some steps of an algorithm on all agents.

        Args:
            algorithm: From :mod:`shoal.algorithms`, or your own.
            x: The agents' initial values: ``[n, d]``, or ``[d]`` if all are equal.
            gradient: ``[n, d]`` to ``[n, d]``, row i the gradient of agent i at its own row: a function, or the result
                of :func:`~shoal.sim.per_agent` for one agent's loss.
            steps: How many.
            measure: Takes the estimates of all agents, ``[n, d]``, here and in :func:`shoal.algorithms.run`; gives
                ``{name: figure}``, recorded beside the figures that are always recorded (:class:`Run`).
            every: Steps between two records; the first is before the first step, and the last after the last. If not
                given, a hundredth of the steps, at least 1. With 0 nothing is recorded.
            progress: Show a bar on stderr, if that is a terminal or a notebook.
            resume: A run of this fleet to continue.
            lr_lambda: A schedule: takes the number of a step, from 0, and returns the factor of the algorithm's
                learning rate in that step, as in ``torch.optim.lr_scheduler.LambdaLR``.
            adversary: Agents that send something else than the algorithm says (:mod:`shoal.sim.adversaries`). Records,
                and what ``measure`` takes, are then of the other agents, in order of their ranks.
            network: A network of as many agents: the records then have the time of the steps on it, as ``seconds``.
                :class:`~shoal.sim.pace.Pace` describes the model.
            compute: Seconds that an agent computes in a step on that network: one number, or one for each agent, [n].
            unchecked: The names of conditions that are not checked (:func:`shoal.algorithms.check`).
            topology: A function of the round, the agents' ``x`` and the algorithm's state, instead of the fleet's
                topology: pairs of agents, int ``[m, 2]``, or a bool matrix ``[n, n]``, for links with
                Metropolis-Hastings weights; or a graph with its weights, or W itself, float ``[n, n]``. The needs of
                the algorithm are then not checked, except that W may change.
            conditions: An unreliable network, and absent or slow agents.

        Raises:
            TypeError: ``algorithm`` is none, or ``x`` no tensor of numbers with fractions.
            ValueError: A shape is wrong, or the mixing does not meet the algorithm's needs; the message names the
                failed condition and an alternative. Or ``conditions`` are combined with ``network``, ``resume`` or
                ``adversary``.
        """
        check_algorithm(algorithm)
        check_start(x)
        warn_of_undeclared_needs(algorithm)
        if network is not None and (conditions is not None or topology is not None):
            raise ValueError("network= computes times for a topology that is known in advance, without conditions")
        if adversary is not None and conditions is not None:
            raise ValueError("adversary= changes messages of a reliable network: give it without conditions")
        name = type(algorithm).__name__
        if topology is None:
            check(name, algorithm.needs, self.topology, dimension=x.shape[-1], unchecked=unchecked)
            schedule = self.topology
        else:
            allow_any_links(name, algorithm.needs, self.size, unchecked)
            schedule = StateSchedule(self.size, topology)
        pace = None if network is None else Pace(network, self.topology, compute, self.agents_per_machine)
        stacked = StackedMix(schedule, self.seed, self.agents_per_machine, pace, adversary)
        start = x.expand(self.size, -1) if x.dim() == 1 else x
        stacked.check(start)
        stacked.follow(start, None)
        mix = stacked if conditions is None else under(conditions, stacked, resume)
        return steps_of(
            algorithm,
            start,
            gradient,
            mix,
            steps,
            measure=measure,
            every=every,
            progress=progress,
            resume=resume,
            lr_lambda=lr_lambda,
        )
