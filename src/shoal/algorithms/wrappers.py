"""Algorithms around another algorithm, which replace its exchange: between machines, or by a robust rule.

For :class:`OfMachines` the agents of a machine hold its numbers in shares, and exchange these with other machines.
:class:`RobustMixing` has a robust rule in place of the average by W, for neighbours that send nonsense.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch

from ..compression import Compressor
from ..ops.robust_rules import Robust
from ..topology.families.compose import Idle, Kronecker
from ..topology.schedule import AnyTopology, Edges, EdgeSchedule, Schedule, as_schedule, assemble
from .algorithm import Algorithm, Gradient, State, require_algorithm
from .mix import COUNTERPARTS, EVERYBODY, MACHINE, InItsRound, Mix
from .needs import Facts, Need
from .schedule_weights import Form, RoundWeights
from .stability.growth import with_wrapper


@dataclass(frozen=True)
class Wrapper(Algorithm):
    """The common part of algorithms over another one: what they do not define themselves is the algorithm's.

    Attributes:
        own_state: Tensors of the wrapper's own, with which the state begins; the rest is the algorithm's.
    """

    algorithm: Algorithm
    own_state: ClassVar[int] = 0

    @property
    def one_gradient(self) -> bool:  # type: ignore[override]
        return self.algorithm.one_gradient

    @property
    def separable(self) -> bool:  # type: ignore[override]
        return self.algorithm.separable

    @property
    def needs(self) -> tuple[Need, ...]:
        return with_wrapper(self, self.algorithm.needs)

    def at_rest(self) -> Algorithm:
        return replace(self, algorithm=self.algorithm.at_rest())

    def cycle(self, rounds: int) -> int:
        return self.algorithm.cycle(rounds)

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> Any:
        return self.algorithm.init(x, grad, mix)

    def estimate(self, x: torch.Tensor, state: Any) -> torch.Tensor:
        return self.algorithm.estimate(x, state[self.own_state :] if self.own_state else state)


@dataclass(frozen=True)
class OfMachines(Algorithm):
    """An algorithm that treats each machine as one agent.

    The gradient is the mean over the agents of a machine; they begin with the mean of their ``x``. Each agent holds a
    share of ``x`` and of the algorithm's state, which it exchanges with its counterparts on the other machines. Then it
    gets the other shares from the agents of its machine. So every number leaves a machine once, for any number of
    agents on it, and a compressor affects only messages between machines. Hierarchical communication is BlueFog's (Ying
    et al. 2021, arXiv:2111.04287, section V-B) and BAGUA's (Gan et al. 2021, arXiv:2107.01499), which leave it to one
    agent of each machine.

    The topology is one of all agents, :func:`shoal.topology.between_machines`; the algorithm's needs are checked on the
    topology of the machines. After a loss the first remaining agent of each machine has all shares.

    The state is the agent's share and the algorithm's own.

    Args:
        algorithm: A separable algorithm.

    Raises:
        ValueError: The algorithm is not separable.
    """

    algorithm: Algorithm
    source: ClassVar[str] = "Ying et al. 2021, arXiv:2111.04287, section V-B; Gan et al. 2021, arXiv:2107.01499"
    one_gradient: ClassVar[bool] = True
    separable: ClassVar[bool] = True
    own_rounds: ClassVar[bool] = True
    state_has_mean: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_algorithm(self.algorithm)
        if not self.algorithm.separable:
            raise ValueError(
                f"{self.algorithm} between machines: the agents of a machine step their shares of x apart, and it is "
                "not separable (shoal.algorithms.Algorithm). Take one that is, or average between agents"
            )

    @property
    def needs(self) -> tuple[Need, ...]:
        return _BETWEEN, *(_of_machines(need) for need in self.algorithm.needs)

    def cycle(self, rounds: int) -> int:
        return self.algorithm.cycle(rounds)

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> State:
        share = mix.share(mix.average(x, MACHINE))
        return share, *self.algorithm.init(share, _share_of_mean(x, grad, mix), _Counterparts(mix))

    def step(self, x: torch.Tensor, state: State, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, State]:
        share, *inner = state
        share, found = self.algorithm.step(share, tuple(inner), _share_of_mean(x, grad, mix), _Counterparts(mix))
        return mix.whole(share, x), (share, *found)

    def healed(self, topology: Schedule, gone: tuple[int, ...]) -> AnyTopology:
        return _ByLeaders(topology, gone, self.algorithm)


def _share_of_mean(x: torch.Tensor, grad: Gradient, mix: Mix) -> Gradient:
    """The share of the machine's gradient, which is taken at the model's parameters."""
    return Gradient(lambda share: mix.share(mix.average(grad(x), MACHINE)))


class _Counterparts(InItsRound):
    """The exchange between the agents of the same position on all machines."""

    def __init__(self, mix: Mix) -> None:
        super().__init__(mix)
        self.size = mix.machines

    def average(self, x: torch.Tensor, group: str = EVERYBODY) -> torch.Tensor:
        return self._mix.average(x, COUNTERPARTS) if group == EVERYBODY else x.clone()


def _machines_of(topology: Schedule) -> Kronecker | None:
    return topology if isinstance(topology, Kronecker) and isinstance(topology.inside, Idle) else None


def _not_between(facts: Facts) -> str:
    return "" if _machines_of(facts.schedule) else "agents of one machine speak to each other in it, or to others"


_BETWEEN = Need(
    "between machines", _not_between, "Take shoal.topology.between_machines(schedule_of_machines, agents_per_machine)."
)


def _of_machines(need: Need) -> Need:
    def problem(facts: Facts) -> str:
        both = _machines_of(facts.schedule)
        if both is None or both.between.size == 1:
            return ""
        dimension = None if facts.dimension is None else -(-facts.dimension // both.inside.size)
        return need.problem(Facts(both.between, dimension))

    return replace(need, problem=problem)


class _ByLeaders(EdgeSchedule):
    """The topology between machines after a loss: the first remaining agent of each machine represents it."""

    def __init__(self, topology: Schedule, gone: tuple[int, ...], algorithm: Algorithm) -> None:
        whole = topology
        both = _machines_of(whole)
        assert both is not None
        self.size, each = whole.size, both.inside.size
        places = np.arange(self.size).reshape(both.between.size, each)
        groups = [[rank for rank in ranks if rank not in gone] for ranks in places.tolist()]
        self._leaders = np.array([(group or ranks)[0] for group, ranks in zip(groups, places.tolist(), strict=True)])
        lost = tuple(machine for machine, group in enumerate(groups) if not group)
        self._machines = as_schedule(algorithm.healed(both.between, lost)) if lost else both.between
        self.period = self._machines.period
        self._what = f"{whole.describe()}, without {', '.join(map(str, gone))}"

    def _edges(self, round: int) -> Edges:
        edges = self._machines.edges(round)
        others = np.setdiff1d(np.arange(self.size), self._leaders)
        to, of = (np.concatenate([self._leaders[ends], others]) for ends in (edges.destination, edges.source))
        return assemble(self.size, to, of, np.concatenate([edges.weight, np.ones(len(others))]))

    def describe(self) -> str:
        return self._what


@dataclass(frozen=True)
class RobustMixing(Wrapper):
    """The algorithm with ``mix.robust(x, rule)`` in place of every ``mix(x)``.

    Over ``Momentum(GradientDescent(lr), beta, dampened=True)`` with :class:`~shoal.robust.ClippedGossip` it is the
    algorithm of He, Karimireddy, Jaggi 2022, arXiv:2202.01545; with :class:`~shoal.robust.NearestNeighbours` that of
    Farhadkhani et al. 2023, arXiv:2209.10931. A rule is no linear average, so an algorithm that is exact with W is not
    with a rule.

    Args:
        algorithm: One that communicates by ``mix(x)`` alone.
        rule: Such as :class:`shoal.robust.TrimmedMean`.

    Raises:
        TypeError: ``algorithm`` or ``rule`` is none.
        ValueError: In a step, an algorithm that communicates in another way.
    """

    rule: Robust
    source: ClassVar[str] = "He, Karimireddy, Jaggi 2022, arXiv:2202.01545"
    separable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_algorithm(self.algorithm)
        if not isinstance(self.rule, Robust):
            raise TypeError(f"RobustMixing(rule={self.rule!r}): a rule of shoal.robust is wanted, as TrimmedMean(1)")

    @property
    def own_rounds(self) -> bool:  # type: ignore[override]
        return self.algorithm.own_rounds

    @property
    def needs(self) -> tuple[Need, ...]:
        return (*self.algorithm.needs, _enough_neighbours(self.rule))

    def at_rest(self) -> Algorithm:
        return self.algorithm.at_rest()

    def healed(self, topology: Schedule, gone: tuple[int, ...]) -> AnyTopology:
        return self.algorithm.healed(topology, gone)

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> Any:
        return self.algorithm.init(x, grad, _ByRule(mix, self.rule))

    def step(self, x: torch.Tensor, state: Any, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, Any]:
        return self.algorithm.step(x, state, grad, _ByRule(mix, self.rule))


def _enough_neighbours(rule: Robust) -> Need:
    def too_few(weights: RoundWeights) -> str:
        found = weights.too_few_sources(rule.neighbours_needed)
        return "" if found is None else "agent {} has {}".format(*found)

    return Need(
        "enough neighbours",
        lambda facts: facts.first(too_few),
        "Take a topology with more neighbours in a round, such as topology.FullyConnectedGraph, or another rule.",
        f"at least {rule.neighbours_needed} neighbours in a round for {rule}",
    )


class _ByRule(InItsRound):
    """Another's verbs, of which only the average by W is left, and replaced."""

    def __init__(self, mix: Mix, rule: Robust) -> None:
        super().__init__(mix)
        self._rule = rule

    def _weigh(
        self, form: Form, x: torch.Tensor, nbytes: int | None = None, speaks: torch.Tensor | None = None
    ) -> torch.Tensor:
        if form != "mix":
            self._refuse("row-stochastic averages" if form == "pull" else "column-stochastic sums")
        if nbytes is not None or speaks is not None:
            self._refuse("messages in another form than x")
        return self._mix.robust(x, self._rule)

    def compressed(self, x: torch.Tensor, compressor: Compressor) -> tuple[torch.Tensor, torch.Tensor]:
        self._refuse("compressed messages")

    def average(self, x: torch.Tensor, group: str = EVERYBODY) -> torch.Tensor:
        self._refuse("averages over all agents or a machine")

    def edges(self, messages: torch.Tensor, *, nbytes: int | None = None) -> torch.Tensor:
        self._refuse("a message for each neighbour")

    def _refuse(self, operation: str) -> NoReturn:
        raise ValueError(
            f"{self._rule} replaces averages by W, and this algorithm uses {operation}, which it would leave "
            "unprotected. Take an algorithm that communicates by mix(x) alone, such as GradientDescent with Momentum"
        )
