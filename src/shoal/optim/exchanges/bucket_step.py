"""A part of a model that an algorithm steps: the parameters of a bucket, and the algorithm's memory of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...algorithms.algorithm import Algorithm, Gradient
from ...algorithms.exchange import Exchange
from ..lr_tracking import LearningRates
from .buckets import Bucket

MovedBy = Callable[["BucketStep", torch.Tensor], torch.Tensor]
"""How far the wrapped optimizer moves a part from a point."""


class BucketStep:
    """Steps one bucket by an algorithm, which takes the wrapped optimizer's update as its gradient.

    Args:
        bucket: The bucket of parameters.
        algorithm: Its equation.
        mix: The exchange of this part.
        rates: The learning rates of the wrapped optimizer.
        name: The owner of the parameters, for errors.

    Attributes:
        x: The algorithm's values of the parameters, ``[numel]``, which are their initial values.
        mix: The exchange.
    """

    def __init__(self, bucket: Bucket, algorithm: Algorithm, mix: Exchange, rates: LearningRates, name: str) -> None:
        self.bucket, self._algorithm, self.mix, self._rates, self._name = bucket, algorithm, mix, rates, name
        self.x = bucket.flat.clone()
        self._state: Any = None

    @property
    def estimate(self) -> torch.Tensor:
        """The algorithm's answer: where the model is."""
        return self.x if self._state is None else self._algorithm.estimate(self.x, self._state)

    def check(self) -> None:
        """Raise ValueError if the model is no longer the one that the algorithm began with."""
        flat = self.bucket.flat
        if (self.x.dtype, self.x.device, len(self.x)) != (flat.dtype, flat.device, self.bucket.numel):
            raise ValueError(
                f"{self._name}: {type(self._algorithm).__name__} has begun with {len(self.x)} numbers of "
                f"{self.x.dtype} on {self.x.device}, and here are {self.bucket.numel} of {flat.dtype} on "
                f"{flat.device}. "
                "Convert the model before the first step"
            )

    def look(self) -> None:
        """Note the learning rates: the wrapped optimizer is about to step."""
        self._rates.look(self.bucket.params)

    def step(self, round_: int, moved: MovedBy) -> None:
        """A step of the algorithm. Nothing has happened to ``x`` where it raises."""
        multiples = self._rates.multiples(self.bucket)
        algorithm = self._algorithm
        if not (isinstance(multiples, float) and multiples == 1.0):
            scaled = algorithm.scaled(multiples)
            algorithm, multiples = (algorithm, 1.0) if scaled is None else (scaled, multiples)
        grad = Gradient(lambda at: self._per_rate(moved(self, at), multiples))
        mix, x, state = self.mix, self.x, self._state
        # Before anything is computed: an algorithm's memory covers the agents of the round before, and has to begin
        # again when one of them is lost.
        lost = mix.begin(round_)
        if state is None:
            state = algorithm.init(x, grad, mix)
        elif lost:
            x, state = algorithm.restart(x, state, grad, mix)
        # Both at once: where the exchange raises, x and the memory are still those of one round.
        self.x, self._state = algorithm.step(x, state, grad, mix)
        mix.end()
        self._rates.exchanged()

    def settle(self) -> None:
        """Set the parameters to the algorithm's estimate."""
        self.bucket.put(self.estimate)

    def _per_rate(self, moved: torch.Tensor, multiples: float | torch.Tensor) -> torch.Tensor:
        """How far the wrapped optimizer would have moved with its first learning rate."""
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

    def state(self) -> dict[str, Any]:
        state = self._state and tuple(one.clone() for one in self._state)
        return {"x": self.x.clone(), "state": state, "rates": self._rates.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.x = state["x"].clone()
        self._rates.load_state(state["rates"])
        self._state = tuple(one.clone() for one in state["state"]) if state["state"] else None
