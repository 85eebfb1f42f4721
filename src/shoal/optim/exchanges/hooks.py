"""Hooks of a model that report the begin of a forward pass, and each parameter's gradient. They keep no object
alive.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

_compiler: Any = torch.compiler  # its functions are untyped


class PassListener(Protocol):
    def _begin_pass(self) -> None: ...


class BeforeForward:
    """A forward pre-hook of a model. In a copy of the model, by ``deepcopy`` or from a file, it does nothing."""

    def __init__(self, model: torch.nn.Module | None = None, optimizer: PassListener | None = None) -> None:
        _leave_uncompiled()
        self._model = weakref.ref(model) if model is not None else None
        self._optimizer = weakref.ref(optimizer) if optimizer is not None else None

    def __reduce__(self) -> tuple[type[BeforeForward], tuple[()]]:
        return BeforeForward, ()

    def __call__(self, module: torch.nn.Module, _args: Any) -> None:
        optimizer = self._optimizer() if self._optimizer is not None else None
        mine = self._model is not None and self._model() is module
        if optimizer is not None and mine and module.training and torch.is_grad_enabled():
            optimizer._begin_pass()


@functools.cache
def _leave_uncompiled() -> None:
    """A compiled model is compiled around its hook. Only where there is one: as a decorator this would import torch's
    compiler with ``import shoal``, seconds that only training needs (an optimizer of torch's imports it anyway)."""
    BeforeForward.__call__ = _compiler.disable(BeforeForward.__call__)  # type: ignore[method-assign]


class GradientListener(Protocol):
    def came(self, param: torch.Tensor) -> None: ...


def add_gradient_listener(param: torch.nn.Parameter, listener: GradientListener) -> RemovableHandle:
    """Call ``listener.came(param)`` when a backward pass has left its gradient, for as long as the listener lives."""
    reference = weakref.ref(listener)

    def tell(param: torch.Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive.came(param)

    register: Callable[[Any], RemovableHandle] = param.register_post_accumulate_grad_hook
    return register(tell)
