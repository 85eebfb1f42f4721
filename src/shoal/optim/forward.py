"""Tells an optimizer that a forward pass of training begins."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

_compiler: Any = torch.compiler  # its functions are untyped


class Begins(Protocol):
    def _begin_pass(self) -> None: ...


class BeforeForward:
    """A forward pre-hook of a model. A copy of the model, by ``deepcopy`` or from a file, has one that does nothing."""

    def __init__(self, model: torch.nn.Module | None = None, optimizer: Begins | None = None) -> None:
        self._model = weakref.ref(model) if model is not None else None
        self._optimizer = weakref.ref(optimizer) if optimizer is not None else None

    def __reduce__(self) -> tuple[type[BeforeForward], tuple[()]]:
        return BeforeForward, ()

    @_compiler.disable  # type: ignore[untyped-decorator]  # a compiled model is compiled around it
    def __call__(self, module: torch.nn.Module, _args: Any) -> None:
        optimizer = self._optimizer() if self._optimizer is not None else None
        mine = self._model is not None and self._model() is module
        if optimizer is not None and mine and module.training and torch.is_grad_enabled():
            optimizer._begin_pass()
