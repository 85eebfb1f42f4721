"""Any algorithm of ``shoal.algorithms`` on a model: the object that runs in a simulation trains a network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import networkx as nx
import torch

from ..algorithms.algorithm import Algorithm, Gradient
from ..algorithms.exchange import Exchange
from ..algorithms.needs import check
from ..topology.schedule import Schedule
from ..world.agent import current
from .balance import schedule_of
from .buckets import Bucket
from .flight import Flight
from .local import LocalStep
from .rates import Rates
from .strategies import StepStrategy


class Equation(StepStrategy):
    """A step of an algorithm, with what the wrapped optimizer moves by in the place of the gradient.

    The algorithm sees ``grad(x) = (x - what the wrapped optimizer makes of x) / c`` and has ``c`` times its ``lr``, c
    being the wrapped optimizer's learning rate as a multiple of its first. So its own ``lr`` is 1 where the wrapped
    optimizer's is to count, what it remembers follows a schedule as the equation says, and with SGD the iterates are
    those of the equation with the learning rate of the moment. Where the rates of groups follow schedules of their own
    c is one number for each parameter. Without an ``lr``, of the groups or of the algorithm, c is 1.

    Local steps between two exchanges add up; the rate is that of the last. While it is zero nothing can be seen of the
    gradients, and they count as zero.

    One that takes its gradient at other points than its own ``x`` needs a closure.

    Args:
        flight: The parameters, in one bucket.
        local: The local step.
        algorithm: Its equation.
        topology: A graph or a schedule, which has been checked; the static topology if there is none.
        name: What the exchanges are matched by.
        unchecked: Conditions that the static topology need not fulfil.
    """

    equation = "an algorithm's own"

    def __init__(
        self,
        flight: Flight,
        local: LocalStep,
        algorithm: Algorithm,
        topology: nx.Graph | Schedule | None,
        name: str,
        unchecked: str | Iterable[str],
    ) -> None:
        super().__init__(flight, local)
        self._algorithm, self._topology, self._name, self._unchecked = algorithm, topology, name, unchecked
        self._rates = Rates(local.optimizer)
        self._mix: Exchange | None = None
        self._x: torch.Tensor | None = None
        self._state: Any = None

    def step(self, due: bool) -> None:
        local = self._local
        if self._elsewhere and local.closure is None:
            raise ValueError(
                f"{type(self._algorithm).__name__} takes its gradient at points that it chooses, and not where the "
                "model is: give step() a closure that clears the gradients, computes the loss, calls backward() and "
                "returns the loss"
            )
        bucket = self._bucket()
        if self._x is None:
            self._x = bucket.flat.clone()
        if (self._x.dtype, self._x.device, len(self._x)) != (bucket.flat.dtype, bucket.flat.device, bucket.numel):
            raise ValueError(
                f"{type(self._algorithm).__name__} has begun with {self._x.dtype} on {self._x.device}, and the model "
                "was converted since: convert it before the first step"
            )
        if not self._elsewhere or not due:
            local.evaluate()
        self._rates.look(bucket.params)
        if not due:
            local()
            return
        algorithm, multiples = self._at_the_rate(bucket)
        grad = Gradient(lambda at: self._moved_by(bucket, at, multiples))
        mix = self._exchange(bucket.numel)
        lost = mix.begin(self._flight.rounds)
        if self._state is None:
            self._state = algorithm.init(self._x, grad, mix)
        elif lost:
            self._x, self._state = algorithm.restart(self._x, self._state, grad, mix)
        self._x, self._state = algorithm.step(self._x, self._state, grad, mix)
        mix.end()
        self._rates.exchanged()
        self._flight.rounds += 1
        bucket.flat.copy_(algorithm.estimate(self._x, self._state))

    @property
    def _elsewhere(self) -> bool:
        """The gradient of a step is not taken where the model is, which has the algorithm's answer."""
        if self._x is None or self._state is None:
            return not self._algorithm.one_gradient
        return not self._algorithm.one_gradient or self._algorithm.estimate(self._x, self._state) is not self._x

    def check_that_it_can_follow(self) -> None:
        raise ValueError(
            f"{type(self._algorithm).__name__}: an agent without batches cannot take part, since a step of it is one "
            "of all agents. Deal out equally many batches (shoal.AgentSampler)"
        )

    def _bucket(self) -> Bucket:
        self._flight.prepare()
        buckets = self._flight.buckets
        if len(buckets) != 1:
            raise ValueError(
                f"{self._name}: an algorithm takes all parameters as one vector, and these have {len(buckets)} dtypes "
                "or devices. Convert the model to one"
            )
        return buckets[0]

    def _exchange(self, numel: int) -> Exchange:
        if self._mix is None:
            topology = self._topology
            if topology is None:
                topology = schedule_of(current("optimizer.step").topology)
                what = type(self._algorithm).__name__
                check(what, self._algorithm.needs, topology, dimension=numel, unchecked=self._unchecked)
            self._mix = Exchange(topology, name=self._name, algorithm=self._algorithm)
        return self._mix

    def _at_the_rate(self, bucket: Bucket) -> tuple[Algorithm, float | torch.Tensor]:
        """The algorithm with the learning rate of this step, and that rate as a multiple of the first."""
        multiples = self._rates.multiples(bucket)
        if isinstance(multiples, float) and multiples == 1.0:
            return self._algorithm, 1.0
        scaled = self._algorithm.scaled(multiples)
        return (self._algorithm, 1.0) if scaled is None else (scaled, multiples)

    def _moved_by(self, bucket: Bucket, at: torch.Tensor, multiples: float | torch.Tensor) -> torch.Tensor:
        """How far the wrapped optimizer moves from a point, which is where the model is if there is no closure; as far
        as with its first learning rate."""
        if self._elsewhere:
            bucket.flat.copy_(at)
            self._local.evaluate()
        self._local()
        bucket.adopt()
        moved = at - bucket.flat
        if isinstance(multiples, float) and multiples:
            return moved if multiples == 1.0 else moved / multiples
        still = torch.as_tensor(multiples, dtype=moved.dtype, device=moved.device) == 0
        if torch.where(still, moved.nan_to_num(0, 0, 0), 0).any():
            raise ValueError(
                f"{self._name}: the wrapped optimizer moves parameters whose lr is 0, and "
                f"{type(self._algorithm).__name__} takes steps of that length. Give them a small lr, or freeze them "
                "with requires_grad_(False)"
            )
        return moved / torch.where(still, 1.0, multiples)

    def changed(self) -> None:
        if self._x is not None:
            raise ValueError(
                f"{type(self._algorithm).__name__} has begun, and remembers a vector as long as the parameters were: "
                "add parameters before the first step"
            )
        super().changed()

    def state(self) -> dict[str, Any]:
        if self._x is None:
            return {}
        state = self._state and tuple(one.clone() for one in self._state)
        return {"x": self._x.clone(), "state": state, "rates": self._rates.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._x = state["x"].clone() if state else None
        self._rates.load_state(state.get("rates", {}))
        self._state = tuple(one.clone() for one in state["state"]) if state and state["state"] else None
