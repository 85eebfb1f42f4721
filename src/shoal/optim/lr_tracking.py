"""The step lengths of the wrapped optimizer, from its learning rates: for memory that is kept in units of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..dtensors import local
from .exchanges.buckets import Bucket


class LearningRates:
    """The learning rates of the local steps, as multiples of the first that was not zero, parameter by parameter.

    Those of one schedule are the same multiple, whatever their groups' rates are, and then that is one number.

    Args:
        optimizer: The wrapped one. Where its groups have no ``lr`` that is a number, it counts as never changing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._first: list[float] = []
        self._last: list[float] = []
        self._key: list[tuple[float, list[int]]] = []
        self._found: list[float] = []

    def look(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Note the rates as they are now: a local step is about to be taken with them."""
        now = self._now(params)
        if self._last or 0.0 in now:
            now_or_before = zip(now, self._last or [0.0] * len(now), strict=True)
            self._last = [rate or last for rate, last in now_or_before]
        else:
            self._last = now
        if not self._first or 0.0 in self._first:
            self._first = [one or rate for one, rate in zip(self._first or now, now, strict=True)]

    def _now(self, params: Sequence[torch.nn.Parameter]) -> list[float]:
        """The rate of each parameter, recomputed when a group's rate or parameters have changed."""
        groups = [(_number(group.get("lr")), group["params"]) for group in self._optimizer.param_groups]
        key = [(rate, list(map(id, those))) for rate, those in groups]
        if key != self._key:
            rates = {param: rate for rate, those in groups for param in those}
            self._key, self._found = key, [rates[param] for param in params]
        return self._found

    def multiples(self, bucket: Bucket) -> float | torch.Tensor:
        """The rates of the last local step with a nonzero rate since :meth:`exchanged`; zero if there was none.

        One number, or one for each of the bucket's, ``[numel]``.
        """
        if self._last and self._last == self._first and 0.0 not in self._first:
            return 1.0
        found = [last / first if first else 0.0 for first, last in zip(self._first, self._last, strict=True)]
        if len(set(found)) == 1:
            return found[0]
        lengths = torch.tensor([local(param).numel() for param in bucket.params])
        return torch.tensor(found, dtype=bucket.flat.dtype).repeat_interleave(lengths).to(bucket.flat.device)

    def exchanged(self) -> None:
        """An exchange has taken in all local steps: forget their rates."""
        self._last = []

    def state(self) -> dict[str, list[float]]:
        return {"first": list(self._first), "last": list(self._last)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._first, self._last = list(state.get("first", [])), list(state.get("last", []))


def _number(rate: Any) -> float:
    """The rate as a number; 1 if it is none, such as None in an optimizer that finds its rate by itself."""
    return float(rate) if isinstance(rate, int | float | torch.Tensor) else 1.0
