"""The states in a checkpoint: of plain data and random generators, and the states of several agents as one.

Models, optimizers and other parts with ``state_dict()`` have states of their own. :func:`mean_state` merges the states
of several agents, which are nested dicts, lists and tuples.
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from ...algorithms.algorithm import Algorithm
from ...data import AgentSampler
from ...ops import safe_serialization

log = logging.getLogger("shoal")


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
    return any(hasattr(getattr(candidate, "step", None), "_wrapped_by_lr_sched") for candidate in (optimizer, wrapped))


class GeneratorState:
    """The state of a generator."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"state": self._generator.get_state()}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], /) -> None:
        self._generator.set_state(state_dict["state"])


class RandomState:
    """Python's, NumPy's and torch's generators of this process.

    A loaded state is kept until :meth:`restore`, because random numbers are drawn before training resumes.
    """

    def __init__(self) -> None:
        self._loaded: Mapping[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        version, words, gauss = random.getstate()
        name, keys, position, has_gauss, cached = np.random.get_state()
        return {
            "python": [version, list(words), gauss],
            "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), has_gauss, cached],
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        self._loaded = state_dict

    def restore(self) -> None:
        """Set the generators to the loaded state, if there is one."""
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        version, words, gauss = loaded["python"]
        random.setstate((version, tuple(words), gauss))
        name, keys, position, has_gauss, cached = loaded["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
        torch.set_rng_state(loaded["torch"])
        if loaded["cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(loaded["cuda"])


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
        if isinstance(self._data, dict) and (missing := [key for key in self._data if key not in data]):
            log.warning(
                "checkpoint: %s has %s here and not in the checkpoint, and load() removes what the checkpoint does not "
                "have: set it after load() if the script has gained it since",
                self._name,
                ", ".join(map(repr, missing)),
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
        return {_with_python_numbers(key): _with_python_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_python_numbers(item) for item in value]
    if type(value) is tuple:
        return tuple(_with_python_numbers(item) for item in value)
    return value


NO_SCHEDULES = (torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, AgentSampler, PlainData, GeneratorState)
"""Parts that have no learning-rate schedule in them. An object of the script's may have one."""


def mean_state(states: Sequence[Any], path: str) -> Any:
    """The mean over agents for values that have one, else the first agent's.

    Floating-point and complex tensors, and numbers with a fraction, are summed in float64 in the order given, over
    those agents that have them; where all have the same, it stays that. Integers, of whatever kind, are counters: the
    first agent's, as are strings, and lists that differ in length.

    Raises:
        ValueError: Tensors of different shapes; it names the place, beginning with ``path``.
    """
    return _joined(states, _mean, path)


def in_own_memory(state: Any) -> Any:
    """The state, with copies of those tensors that are a part of something larger, such as a bucket of parameters.

    To save a tensor is to save all of its storage.
    """
    copies: dict[object, torch.Tensor] = {}

    def own(values: Sequence[Any], path: str) -> Any:
        [value] = values
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return value
        if value.untyped_storage().nbytes() == value.nbytes:
            return value
        place = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if place not in copies:  # shared parameters stay one
            copies[place] = value.detach().clone()
        return copies[place]

    return _joined([state], own, "")


def _joined(states: Sequence[Any], leaf: Callable[[Sequence[Any], str], Any], path: str) -> Any:
    """One tree from several that are alike; ``leaf`` merges the values at one position."""
    states = [state for state in states if state is not None] or [None]
    first = states[0]
    if any(_kind(state) is not _kind(first) for state in states):
        raise ValueError(
            f"{path}: the agents have different things there, {', '.join(type(s).__name__ for s in states)}"
        )
    if isinstance(first, Mapping):
        merged: Any = copy.copy(first)  # keeps the attributes of a model's state_dict
        for key in dict.fromkeys(key for state in states for key in state):
            merged[key] = _joined([state[key] for state in states if key in state], leaf, f"{path}.{key}")
        return merged
    if isinstance(first, list | tuple):
        alike = all(len(state) == len(first) for state in states)
        items = zip(*(states if alike else [first]), strict=True)
        joined = [_joined(item, leaf, f"{path}.{number}") for number, item in enumerate(items)]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    return leaf(states, path)


def _kind(state: Any) -> type:
    kinds: tuple[type, ...] = (Mapping, list, tuple, torch.Tensor)
    return next((kind for kind in kinds if isinstance(state, kind)), object)


def _mean(values: Sequence[Any], path: str) -> Any:
    first = values[0]
    if isinstance(first, float) and any(value != first for value in values):
        return sum(values) / len(values)
    if not isinstance(first, torch.Tensor):
        return first
    if not (first.is_floating_point() or first.is_complex()):
        return first.clone()
    shapes = dict.fromkeys(tuple(value.shape) for value in values)
    if len(shapes) > 1:
        raise ValueError(f"{path}: the agents have tensors of the shapes {', '.join(map(str, shapes))}, without a mean")
    if all(torch.equal(value, first) for value in values[1:]):
        return first.clone()
    total = first.to(torch.complex128 if first.is_complex() else torch.float64, copy=True)
    for value in values[1:]:
        total += value
    return (total / len(values)).to(first.dtype)


def without_own_memory(state: Any, algorithm: Algorithm | None) -> Any:
    """A decentralized optimizer's state without what has no mean over agents, and begins anew at the mean model.

    That is the error feedback of a compressor's shares, and the memory of an algorithm that keeps a share of the model
    or one value for each neighbour. ``algorithm``: that of the optimizer, if the part is one.
    """
    own = state.get("shoal") if isinstance(state, Mapping) else None
    if not isinstance(own, Mapping) or not isinstance(own.get("way"), Mapping):
        return state
    dropped = {"rests", "rests_of"}
    if algorithm is not None and not _state_has_mean(algorithm):
        dropped.add("parts")
    return {**state, "shoal": {**own, "way": {key: value for key, value in own["way"].items() if key not in dropped}}}


def _state_has_mean(algorithm: Algorithm) -> bool:
    inner = getattr(algorithm, "algorithm", None)  # of one that wraps another
    return algorithm.state_has_mean and (not isinstance(inner, Algorithm) or _state_has_mean(inner))


def state_for_new_agent(state: Any) -> Any:
    """A decentralized optimizer's state without the agent that it was of."""
    own = state.get("shoal") if isinstance(state, Mapping) else None
    if not isinstance(own, Mapping):
        return state
    return {**state, "shoal": {key: value for key, value in own.items() if key != "agent"}}


def state_of_agent(state: Any, number: int, count: int) -> Any:
    """A decentralized optimizer's state as that of the n-th of so many agents."""
    own = state.get("shoal") if isinstance(state, Mapping) else None
    if not isinstance(own, Mapping) or "agent" not in own:
        return state
    return {**state, "shoal": {**own, "agent": (number, count)}}
