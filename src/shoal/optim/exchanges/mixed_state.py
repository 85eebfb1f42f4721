"""State of the wrapped optimizer that is averaged beside the parameters, such as Adam's second moments.

Each kind of state has a bucket beside each bucket of parameters, laid out like it, so that all agents' messages agree
for any states that an agent has. If an agent has no state, because a parameter has had no gradient yet, the bucket has
a tensor of its own: zeros, as optimizers begin with, and later the neighbours' averages.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ...dtensors import local
from ...runtime.agent import current
from ..params import is_dense
from .buckets import Bucket

_SECOND_MOMENTS: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.Adam: "exp_avg_sq",
    torch.optim.AdamW: "exp_avg_sq",
    torch.optim.NAdam: "exp_avg_sq",
    torch.optim.RAdam: "exp_avg_sq",
    torch.optim.RMSprop: "square_avg",
    torch.optim.Adagrad: "sum",
}


def second_moments(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """The state whose root an optimizer of torch divides by; empty for optimizers without such a division."""
    found = next((key for kind, key in _SECOND_MOMENTS.items() if isinstance(optimizer, kind)), None)
    if found is None:
        return ()
    amsgrad = any(group.get("amsgrad") for group in optimizer.param_groups)
    return (found, f"max_{found}") if amsgrad else (found,)


def warn_of_second_moments(optimizer: torch.optim.Optimizer) -> None:
    """Say what an optimizer that divides by its second moments does where agents' data differ."""
    keys = second_moments(optimizer)
    if keys:
        warnings.warn(
            f"{type(optimizer).__name__} divides by the size of each agent's own gradients, and the agents average "
            'their parameters only: where their data differ much, accuracy is lost (docs/training.md, "Adam on '
            f'heterogeneous data"). mix_state={keys} averages what it divides by, too, and sends '
            f"{len(keys) + 1} times as much; mix_state=() leaves it as it is, and this warning out",
            stacklevel=5,
        )


def check_second_iterates(
    optimizer: torch.optim.Optimizer, keys: Sequence[str], algorithm: object, can_mix: bool
) -> None:
    """Refuse a schedule-free optimizer of which only the parameters are averaged.

    Its parameters are between two sequences of iterates (Defazio et al. 2024, arXiv:2405.15682): x, and z, which it
    keeps and which takes the steps. Where agents' gradients differ their z go apart for good, and take the parameters
    along.

    Args:
        optimizer: The wrapped one.
        keys: The names of the averaged state.
        algorithm: The algorithm, for the error.
        can_mix: State of an optimizer can be averaged beside it.

    Raises:
        ValueError: It is schedule-free, and its z would not be averaged.
    """
    kind = type(optimizer).__name__
    is_schedule_free = any("train_mode" in group for group in optimizer.param_groups)
    if current("DecentralizedOptimizer").size == 1 or not is_schedule_free:
        return
    why = f"{kind} steps z, which it keeps beside the parameters, and each agent's own would go away from the others' "
    if not can_mix:
        raise ValueError(
            f"{why}for good: {algorithm} exchanges the parameters alone. Take adapt, then combine, or adapt with "
            'combine, in step and with mix_state=("z",), or averaged gradients'
        )
    if "z" not in keys:
        raise ValueError(
            f'{why}for good: give mix_state=("z",), and for an Adam ("z", "exp_avg_sq"); or average gradients'
        )


class MixedState:
    """The averaged state of one optimizer.

    Args:
        optimizer: The wrapped one.
        keys: Their names in the optimizer, such as ``("exp_avg_sq",)``.

    Raises:
        TypeError: ``keys`` are no names.
        ValueError: The state that the optimizer divides by is left out, but other state is given.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, keys: Iterable[str]) -> None:
        self.keys = () if isinstance(keys, str) else tuple(dict.fromkeys(keys))
        if isinstance(keys, str) or not all(isinstance(key, str) for key in self.keys):
            raise TypeError(f'mix_state={keys!r}: give a tuple of names, such as ("exp_avg_sq",)')
        missing = [key for key in second_moments(optimizer) if key not in self.keys]
        if self.keys and missing:
            raise ValueError(
                f"mix_state={self.keys}: {type(optimizer).__name__} divides by {' and '.join(missing)}. Where others' "
                "gradients are large, what they have would be divided by the small numbers of one's own, and the "
                f"steps be far too large: give mix_state={(*self.keys, *missing)}"
            )
        self._optimizer = optimizer
        self._confirmed = False

    def confirm(self, names: Mapping[torch.nn.Parameter, str]) -> None:
        """Check after a step that the optimizer keeps the state that is to be averaged.

        Raises:
            ValueError: It keeps no such state for a parameter that has a gradient.
        """
        if self._confirmed:
            return
        # Only after a step with a gradient can the optimizer have state. Before it an empty state is no error.
        learnt = [param for param in names if param.grad is not None]
        if not learnt:
            return
        if not any(self._optimizer.state.get(param) for param in learnt):
            raise ValueError(
                f"mix_state={self.keys}: {type(self._optimizer).__name__} keeps no state of the parameters that it has "
                "stepped, so that there is nothing to mix; leave mix_state out"
            )
        self._confirmed = True

    def are(self, tensors: Iterable[torch.Tensor], params: Iterable[torch.nn.Parameter], key: str) -> bool:
        """The state of each of these parameters is the tensor that it was."""
        state, none = self._optimizer.state, dict[str, Any]()
        pairs = zip(params, tensors, strict=True)
        return all(state.get(param, none).get(key) is tensor for param, tensor in pairs)

    def of(self, param: torch.nn.Parameter, key: str, called: str) -> torch.Tensor | None:
        """The state of a parameter; None if it has not been stepped yet.

        Raises:
            ValueError: The optimizer keeps no such state, or it is no tensor like the parameter.
        """
        state = self._optimizer.state.get(param)
        found = (state or {}).get(key)
        # Not stepped yet. A step with other parameters must not fail because of this one: it sends its zeros, or its
        # average.
        if not state or (key in state and found is None):
            return None
        if not isinstance(found, torch.Tensor) or not _alike(found, param):
            kept = [name for name, value in state.items() if isinstance(value, torch.Tensor) and _alike(value, param)]
            if isinstance(found, torch.Tensor):
                fault = f"is {list(found.shape)} {str(found.dtype)[6:]}"
            else:
                fault = "is not there" if key not in state else f"is a {type(found).__name__}"
            raise ValueError(
                f"mix_state: {key!r} of the parameter {called!r} ({list(param.shape)} {str(param.dtype)[6:]}) "
                f"{fault}. Of {type(self._optimizer).__name__} there can be mixed what has the parameter's shape and "
                f"dtype: {', '.join(kept) or 'nothing'}"
            )
        return found


def _alike(state: torch.Tensor, param: torch.Tensor) -> bool:
    return (state.shape, state.dtype, state.device) == (param.shape, param.dtype, param.device)


class StateBucket(Bucket):
    """One kind of state of all parameters of a bucket; ``params`` are the state tensors.

    Args:
        beside: The bucket of parameters.
        mixed: The source of the state.
        key: The name of the state.
        names: The names of the parameters.
        saved: By name, saved state of parameters for which the optimizer has none.
    """

    def __init__(
        self,
        beside: Bucket,
        mixed: MixedState,
        key: str,
        names: Mapping[torch.nn.Parameter, str],
        saved: Mapping[str, torch.Tensor],
    ) -> None:
        self._mixed = mixed
        # Names, and not parameters, identify saved state: another process loads it.
        self._names = [names[param] for param in beside.params]
        self._own: dict[int, Any] = {number: _zeros(param) for number, param in enumerate(beside.params)}
        # Begun with tensors of its own for all parameters, so that the layout equals the neighbours' whatever state
        # this agent has.
        super().__init__(list(self._own.values()))
        self.of, self.kind = beside.params, key
        for number, own in self._own.items():
            if self._names[number] in saved:
                local(own).copy_(saved[self._names[number]])

    def adopt(self) -> None:
        """Use the optimizer's state as it is now. State averaged before the optimizer had any is added to its initial
        state.
        """
        # The usual case costs one look at each state. Optimizers replace their state in load_state_dict, so identity
        # decides.
        if not self._own and self._mixed.are(self.params, self.of, self.kind) and self.in_place:
            return
        for number, param in enumerate(self.of):
            state: Any = self._mixed.of(param, self.kind, self._names[number])
            own = self._own.pop(number, None)
            if state is None:
                state = self._own[number] = _zeros(param) if own is None else own
            elif own is not None and local(own).any():
                # The optimizer begins its state at zero. The neighbours' averages until then would be lost with its
                # first step.
                state.add_(own)
            # Before the bucket moves the tensors: it sets .data of the optimizer's own tensor, which the optimizer
            # continues to use.
            self.params[number] = state
        super().adopt()

    def of_its_own(self) -> dict[str, torch.Tensor]:
        """The nonzero state of parameters for which the optimizer has none; by name."""
        return {self._names[number]: local(own).clone() for number, own in self._own.items() if local(own).any()}


def _zeros(param: torch.Tensor) -> torch.Tensor:
    like = param.detach()
    return torch.zeros_like(like) if is_dense(param) else torch.zeros_like(like, memory_format=torch.contiguous_format)
