"""The local step of the wrapped optimizer, and a GradScaler's check whether the gradients are finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..dtensors import local
from .params import only


class InnerStep:
    """Steps the wrapped optimizer.

    Args:
        optimizer: The wrapped one.

    Attributes:
        optimizer: The wrapped one.
        scaled: The gradients are a GradScaler's.
        overflowed: The GradScaler has found that this agent's gradients are not all finite.
        closure: Evaluates the loss and the gradients at the model's parameters, if the user has given one.
        loss: The last result of the closure.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.scaled = self.overflowed = False
        self.closure: Callable[[], Any] | None = None
        self.loss: Any = None

    def evaluate(self) -> None:
        """Call the closure, if there is one."""
        if self.closure is not None:
            with torch.enable_grad():
                self.loss = self.closure()

    def unscale(self, params: Iterable[torch.nn.Parameter], found_inf: Any, scale: torch.Tensor | None) -> None:
        """Use a GradScaler's result, and divide the gradients by its scale, unless the user has done so."""
        self.scaled = found_inf is not None
        self.overflowed = found_inf is not None and bool(found_inf.item())
        if scale is None or self.overflowed:
            return
        for param in params:
            if param.grad is not None:
                local(param.grad).div_(scale.to(param.grad.device))

    def __call__(self, params: Iterable[torch.nn.Parameter] | None = None) -> None:
        """Step with some parameters, or all; not at all if the gradients have overflowed."""
        if self.overflowed:
            return
        if params is None:
            self.optimizer.step()
            return
        before = self._kept_in_groups()
        with only(self.optimizer, params):
            self.optimizer.step()
        if self._kept_in_groups() != before:
            raise ValueError(
                f'overlap="backward": {type(self.optimizer).__name__} counts its steps in its param_groups, and would '
                "count each bucket as one. Leave overlap out"
            )

    def _kept_in_groups(self) -> list[dict[str, Any]]:
        """The numbers in the groups, which a step leaves as they are if all its state is the parameters' own."""
        numbers = (bool, int, float, str, tuple)
        groups = self.optimizer.param_groups
        return [{key: value for key, value in group.items() if isinstance(value, numbers)} for group in groups]

    def with_mean_gradients(self) -> None:
        """Step with gradients that have been averaged: those of an agent where they overflowed were left out."""
        self.optimizer.step()
