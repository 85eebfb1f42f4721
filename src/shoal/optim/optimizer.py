"""A decentralized optimizer around any torch optimizer: the user's loop, the user's local step, and an exchange.

The optimizer that is wrapped is not rebuilt and keeps its state; a step of ours is its step, before or after an average
with the neighbours. When the exchange begins and where its result goes is what the ways differ in (:class:`Way`).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

import torch

from ..runtime.agent import current
from .buckets import BUCKET_BYTES
from .flight import Flight
from .rounds import ALIASES, NAMES, Settings

_OWNER = "_shoal_optimizer"
"""On a parameter: a weak reference to the decentralized optimizer that has it."""


class Way(Enum):
    """When an optimizer exchanges what (Ying et al. 2021, arXiv:2111.04287, equations 22 and 23)."""

    adapt_then_combine = "x+ = W (x - lr g(x))"
    adapt_with_combine = "x+ = W x - lr g(x)"
    gradients = "x+ = x - lr mean(g)"


class DecentralizedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose agents average as they go.

    It stands for the optimizer that it wraps, with the same ``param_groups``, ``state`` and hooks, so learning-rate
    schedulers, gradient clipping and ``GradScaler`` work on it. All agents call ``step()`` equally often. Between steps
    the attributes of :class:`~shoal.optim.Settings` may be set; they hold for the round that begins at the next forward
    pass (adapt with combine) or step.

    Args:
        optimizer: Any torch optimizer but LBFGS; its state is kept.
        model: The module, or modules, whose parameters it has.
        way: When it exchanges what.
        bucket_bytes: How much goes into one message.
        name: What the exchanges are matched by; the same on all agents, another one for each optimizer of an agent.
        flight: How parameters travel: in step with the neighbours, or through windows (``window_flight.py``).
        settings: The attributes to begin with.

    Raises:
        TypeError: ``optimizer`` or ``model`` is not one.
        ValueError: LBFGS; a parameter that is not in the model, or that another wrapper has.
        Mismatch: At the first step, if the agents' models differ; it names the parameter.
    """

    _step_supports_amp_scaling = True  # else GradScaler would leave out step() on an agent whose neighbours wait for it

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        way: Way = Way.adapt_then_combine,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        name: str = "optimizer",
        flight: type[Flight] = Flight,
        **settings: Any,
    ) -> None:
        # Optimizer.__init__ would make groups, state and hooks of its own; they are the wrapped optimizer's.
        self._inner = _checked(optimizer)
        self._models = [model] if isinstance(model, torch.nn.Module) else list(model)
        self._way = way
        self._settings = Settings()
        self._rounds = self._forwards = 0
        self._warned = False
        self._names = _names_of(self._models, self._inner)
        self._flight = flight(lambda: self._names, name, bucket_bytes)
        for key, value in settings.items():
            setattr(self, key, value)
        me = weakref.ref(self)
        for param in self._names:
            setattr(param, _OWNER, me)

        def before_forward(module: torch.nn.Module, args: Any) -> None:
            alive = me()
            if alive is not None and module.training and torch.is_grad_enabled():
                alive._begin_pass()

        # A compiled model is compiled around it.
        compiler: Any = torch.compiler
        self._hook = self._models[0].register_forward_pre_hook(compiler.disable(before_forward))

    # It stands for the optimizer that it wraps

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that is wrapped."""
        return self._inner

    @property
    def rounds(self) -> int:
        """How many exchanges there have been."""
        return self._rounds

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        groups: list[dict[str, Any]] = self._inner.param_groups
        return groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        defaults: dict[str, Any] = self._inner.defaults
        return defaults

    def __getattr__(self, name: str) -> Any:
        name = ALIASES.get(name, name)
        if name in NAMES:
            return getattr(self._settings, name)
        if name == "_inner":  # it is being made, or copied
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        name = ALIASES.get(name, name)
        if name in NAMES:
            self._settings.set(name, value)
            self._warn_if_late(name)
        elif name.startswith("_") or name in ("found_inf", "grad_scale", "step"):  # GradScaler's, and schedulers'
            super().__setattr__(name, value)
        else:
            known = ", ".join((*NAMES, *ALIASES))
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r} to set; there are: {known}")

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a decentralized optimizer cannot be pickled or copied; save its state_dict()")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._way.value}; {self._inner!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the wrapped optimizer's. The parameters must be the model's; they are exchanged from the next round on."""
        self._inner.add_param_group(param_group)
        self._flight.changed()
        self._names = _names_of(self._models, self._inner, self)
        for param in self._names:
            setattr(param, _OWNER, weakref.ref(self))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's."""
        self._inner.zero_grad(set_to_none)

    # A step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """The local step and this round's exchange, in the order of the way.

        Where the gradients of a ``GradScaler`` overflowed, the local step is left out and the exchange is not: the
        neighbours wait for it.

        Args:
            closure: Evaluates the model and its gradients once more, before all else.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        exchanges = self._is_due
        if self._way is Way.adapt_with_combine:
            if exchanges and not self._flight.under_way:
                self._flight.take_off(self._settings)
            self._flight.land()
        self._unscale()
        if self._way is Way.gradients and exchanges:
            self._flight.average_gradients()
        if exchanges:
            self._flight.before_local_step()
        if not self._overflowed:
            self._inner.step()
        if self._way is Way.adapt_then_combine and exchanges:
            self._flight.take_off(self._settings)
            self._flight.land()
        if exchanges:
            self._rounds += 1
        if self._enough_passes:
            self._forwards = 0
        self._warned = False
        return loss

    def synchronize(self) -> None:
        """Wait until what this agent has begun to send or fetch has arrived. ``step()`` does what follows from it."""
        self._flight.wait()

    @property
    def _enough_passes(self) -> bool:
        """As many forward passes as an exchange takes; a step without any counts as one."""
        return max(1, self._forwards) >= self._settings.num_steps_per_communication

    @property
    def _is_due(self) -> bool:
        return current("optimizer.step").size > 1 and self._enough_passes

    def _begin_pass(self) -> None:
        """A forward pass of training begins; adapt with combine exchanges the parameters meanwhile."""
        self._forwards += 1
        if self._way is Way.adapt_with_combine and self._is_due and not self._flight.under_way:
            with torch.no_grad():
                self._flight.take_off(self._settings)

    def _warn_if_late(self, name: str) -> None:
        if self._flight.under_way and not self._warned:
            self._warned = True
            warnings.warn(
                f"{name} was set after this round's exchange had begun, at the forward pass; it holds from the next "
                "round on. Set it before the forward pass.",
                stacklevel=4,
            )

    @property
    def _overflowed(self) -> bool:
        found = self.__dict__.get("found_inf")  # a GradScaler sets it for the time of a step
        return found is not None and bool(found.item())

    def _unscale(self) -> None:
        """Divide the gradients by what a GradScaler has multiplied the loss by, unless the user has done so."""
        scale = self.__dict__.get("grad_scale")
        if scale is None or self._overflowed:
            return
        for param in self._names:
            if param.grad is not None:
                param.grad.div_(scale.to(param.grad.device))

    # State

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, and under ``"shoal"`` what is ours.

        Take it between steps, before the next forward pass.
        """
        return {**self._inner.state_dict(), "shoal": {"rounds": self._rounds, "forwards": self._forwards}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken. The state of a plain optimizer of the same kind is taken, too."""
        state = dict(state_dict)
        own = state.pop("shoal", {"rounds": 0, "forwards": 0})
        self._flight.abandon()
        self._inner.load_state_dict(state)
        self._rounds, self._forwards = own["rounds"], own["forwards"]

    def close(self) -> None:
        """Give the model back: no hook, no claim on its parameters, which keep their values."""
        self._flight.close()
        self._hook.remove()
        for param in self._names:
            if hasattr(param, _OWNER):
                delattr(param, _OWNER)


def _checked(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    if isinstance(optimizer, DecentralizedOptimizer):
        raise ValueError("this optimizer is decentralized already; wrap the one inside it")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"an optimizer of torch is wanted, not {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS cannot be decentralized: it evaluates the model several times in a step, and its line search is "
            "about one agent's own loss. Take SGD or Adam."
        )
    return optimizer


def _names_of(
    models: Iterable[torch.nn.Module], optimizer: torch.optim.Optimizer, owner: DecentralizedOptimizer | None = None
) -> dict[torch.nn.Parameter, str]:
    """The models' parameters that the optimizer has, in the models' order, with their names."""
    models = list(models)
    if not models or not all(isinstance(one, torch.nn.Module) for one in models):
        raise TypeError("model must be a torch.nn.Module, or a list of them")
    wanted = {param for group in optimizer.param_groups for param in group["params"]}
    found: dict[torch.nn.Parameter, str] = {}
    left_out = []
    for number, model in enumerate(models):
        for name, param in model.named_parameters():
            full = name if len(models) == 1 else f"{number}.{name}"
            if param in wanted:
                found.setdefault(param, full)
            elif param.requires_grad and _owner_of(param) is None:
                left_out.append(full)
    strangers = len(wanted) - len(found)
    if strangers:
        raise ValueError(f"the optimizer has {strangers} parameters that are not the model's; pass all its models")
    for param, name in found.items():
        if _owner_of(param) not in (None, owner):
            raise ValueError(f"another decentralized optimizer has the parameter {name!r}; call its close() first")
    if left_out:
        warnings.warn(
            f"no optimizer that averages has these parameters, which are learnt: {', '.join(left_out)}. They will "
            "drift apart between agents. Give them to this optimizer, or to another one before it.",
            stacklevel=4,
        )
    return found


def _owner_of(param: torch.nn.Parameter) -> DecentralizedOptimizer | None:
    reference = getattr(param, _OWNER, None)
    owner: DecentralizedOptimizer | None = None if reference is None else reference()
    return owner
