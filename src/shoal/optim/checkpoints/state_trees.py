"""Merges the states of several agents' models and optimizers, which are nested dicts, lists and tuples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


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
    states = [one for one in states if one is not None] or [None]
    first = states[0]
    if any(_kind(one) is not _kind(first) for one in states):
        raise ValueError(
            f"{path}: the agents have different things there, {', '.join(type(s).__name__ for s in states)}"
        )
    if isinstance(first, Mapping):
        made: Any = copy.copy(first)  # keeps the attributes of a model's state_dict
        for key in dict.fromkeys(key for one in states for key in one):
            made[key] = _joined([one[key] for one in states if key in one], leaf, f"{path}.{key}")
        return made
    if isinstance(first, list | tuple):
        alike = all(len(one) == len(first) for one in states)
        items = zip(*(states if alike else [first]), strict=True)
        joined = [_joined(item, leaf, f"{path}.{number}") for number, item in enumerate(items)]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    return leaf(states, path)


def _kind(state: Any) -> type:
    kinds: tuple[type, ...] = (Mapping, list, tuple, torch.Tensor)
    return next((kind for kind in kinds if isinstance(state, kind)), object)


def _mean(values: Sequence[Any], path: str) -> Any:
    first = values[0]
    if isinstance(first, float) and any(one != first for one in values):
        return sum(values) / len(values)
    if not isinstance(first, torch.Tensor):
        return first
    if not (first.is_floating_point() or first.is_complex()):
        return first.clone()
    shapes = dict.fromkeys(tuple(one.shape) for one in values)
    if len(shapes) > 1:
        raise ValueError(f"{path}: the agents have tensors of the shapes {', '.join(map(str, shapes))}, without a mean")
    if all(torch.equal(one, first) for one in values[1:]):
        return first.clone()
    total = first.to(torch.complex128 if first.is_complex() else torch.float64, copy=True)
    for one in values[1:]:
        total += one
    return (total / len(values)).to(first.dtype)
