"""Any algorithm that averages by W, with a robust rule in place of the average, for neighbours that send nonsense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch

from ..compression import Compressor
from ..ops.robust import Robust
from ..topology.schedule import AnyTopology, Schedule
from .algorithm import Algorithm, Gradient
from .local_steps import Wrapper
from .mix import EVERYBODY, InItsRound, Mix
from .needs import Need
from .schedule_weights import Form, RoundWeights


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
        ValueError: In a step, an algorithm that communicates in another way.
    """

    rule: Robust
    source: ClassVar[str] = "He, Karimireddy, Jaggi 2022, arXiv:2202.01545"
    separable: ClassVar[bool] = False

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
