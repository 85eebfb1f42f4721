"""The parts of a checkpoint that are not models or optimizers: plain data, and random generators."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from ...data import AgentSampler
from ...ops import safe_serialization


class Stateful(Protocol):
    """Models, optimizers, schedulers, samplers, scalers."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def as_stateful(name: str, part: Any) -> Stateful:
    """A part that was given to a checkpoint, as an object with a state.

    Raises:
        TypeError: It has none, or is data that cannot be filled in place.
    """
    if isinstance(part, torch.Generator):
        return GeneratorState(part)
    if hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
        found: Stateful = part
        return found
    if isinstance(part, dict | list):
        return PlainData(name, part)
    raise TypeError(
        f"checkpoint: {name} is a {type(part).__name__}, which load() cannot change in place. Give plain data in a "
        f'dict, state={{"{name}": ...}}, or an object with state_dict() and load_state_dict()'
    )


def is_scheduled(optimizer: torch.optim.Optimizer) -> bool:
    """A learning-rate schedule of torch's has been made for this optimizer, or for the one that it wraps."""
    wrapped = getattr(optimizer, "optimizer", None)  # torch marks the step of an optimizer for which one is made
    return any(hasattr(getattr(one, "step", None), "_wrapped_by_lr_sched") for one in (optimizer, wrapped))


class GeneratorState:
    """The state of a generator."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"state": self._generator.get_state()}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], /) -> None:
        self._generator.set_state(state_dict["state"])


class PlainData:
    """A dict or list of the script's, which is read when it is saved and filled in place when it is loaded.

    Raises:
        TypeError: It has something that would not be loaded again; the message says what and where.
    """

    def __init__(self, name: str, data: dict[Any, Any] | list[Any]) -> None:
        self._name, self._data = name, data
        # Tried now: data that cannot be loaded again would otherwise be found at the first save, hours later.
        self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        try:
            written = safe_serialization.write(_with_python_numbers(self._data), self._name)
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"checkpoint: {error}. A dict or list of a checkpoint has plain data: numbers, strings, None, tensors, "
                "and collections of these. An object with state_dict() and load_state_dict() is a part of its own"
            ) from None
        return {"data": safe_serialization.read(written)}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        # A copy: the script changes its data in place, and would change the loaded state that other parts may still
        # read.
        data = copy.deepcopy(state_dict["data"])
        if isinstance(self._data, dict) != isinstance(data, dict):
            raise ValueError(
                f"checkpoint: {self._name} is a {type(self._data).__name__} here, and a {type(data).__name__} in the "
                "checkpoint. Give the same kind to save() and load()"
            )
        # In place, because the script holds this very object; after the check of its kind, so that an error leaves it
        # as it was.
        self._data.clear()
        if isinstance(self._data, dict):
            self._data.update(data)
        else:
            self._data.extend(data)


def _with_python_numbers(value: Any) -> Any:
    """The data with numpy's numbers as Python's, and a dict or list of a subclass as a plain one."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {_with_python_numbers(key): _with_python_numbers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_with_python_numbers(one) for one in value]
    if type(value) is tuple:
        return tuple(_with_python_numbers(one) for one in value)
    return value


NO_SCHEDULES = (torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, AgentSampler, PlainData, GeneratorState)
"""Parts that have no learning-rate schedule in them. An object of the script's may have one."""
