"""Replaces this agent's model by the mean of all agents' models while Lightning evaluates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...optim.mean_model import averaged, means


class MeanModel:
    """A module whose tensors hold the mean or this agent's own values; :func:`shoal.consensus` in two halves.

    Of both there is one copy in memory: what is not in place is kept beside it.

    Args:
        module: This agent's.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._tensors: list[torch.Tensor] = []
        self._others: list[torch.Tensor] = []

    @property
    def is_in_place(self) -> bool:
        return bool(self._tensors)

    def put_in_place(self) -> None:
        """Average, and put the mean in place. All agents call it."""
        if self.is_in_place:
            return
        # Lightning evaluates in inference mode, and tensors made in it could not be written to afterwards.
        with torch.inference_mode(False), torch.no_grad():
            tensors = averaged(self._module)
            self._others = means(tensors, "lightning.mean")
            self._tensors = tensors
            self._exchange()

    def put_back(self) -> None:
        """Put this agent's own values back; nothing, if they are there. No agent waits for another."""
        if self.is_in_place:
            self._exchange()
            self._tensors, self._others = [], []

    @contextmanager
    def own(self) -> Iterator[None]:
        """A context in which the module holds this agent's own values, even while the mean is otherwise in place."""
        if self.is_in_place:
            self._exchange()
        try:
            yield
        finally:
            if self.is_in_place:
                self._exchange()

    @contextmanager
    def mean(self) -> Iterator[None]:
        """Inside, the module holds the mean. All agents enter it."""
        was = self.is_in_place
        self.put_in_place()
        try:
            yield
        finally:
            if not was:
                self.put_back()

    def _exchange(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for tensor, other in zip(self._tensors, self._others, strict=True):
                kept = tensor.clone()
                tensor.copy_(other)
                other.copy_(kept)
