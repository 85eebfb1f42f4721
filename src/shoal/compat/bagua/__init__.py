"""BAGUA's names, so that a script of its users runs on Shoal.

    import shoal.compat.bagua as bagua  # was: import bagua.torch_api as bagua

As BAGUA does, importing this gives every module of torch ``with_bagua``. docs/bagua.md has the list and the
differences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch

from ...ops.arguments import Internal
from ...ops.collective import barrier as _barrier
from ...ops.objects import broadcast_optimizer_state, broadcast_parameters
from ...optim.asynchronous import WindowOptimizer
from ...runtime.bootstrap import init
from ...runtime.queries import local_rank as get_local_rank
from ...runtime.queries import local_size as get_local_size
from ...runtime.queries import rank as get_rank
from ...runtime.queries import size as get_world_size
from . import algorithms as algorithms
from .algorithms.base import Algorithm
from .algorithms.gradient_allreduce import GradientAllReduceAlgorithm

__all__ = [
    "algorithms",
    "get_local_rank",
    "get_local_size",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "with_bagua",
    "without_bagua",
]


def init_process_group() -> None:
    """Become an agent, as :func:`shoal.init` does."""
    init()


def with_bagua(
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    algorithm: Algorithm,
    process_group: None = None,
    do_flatten: bool = True,
) -> torch.nn.Module:
    """Make the agents train together: each step of these optimizers becomes a step of all agents.

    Parameters, buffers and optimizer state become those of rank 0. The user's loop steps the same optimizers as before.
    A second call replaces the algorithm.

    Args:
        model: The model whose parameters the optimizers have.
        optimizers: Optimizers of torch, each with parameters of its own.
        algorithm: One of :mod:`shoal.compat.bagua.algorithms`.
        process_group: None: only all agents together are supported.
        do_flatten: Ignored: parameters are always stored in a few large tensors.

    Returns:
        The model.

    Raises:
        TypeError: An argument is no algorithm, or is no list of optimizers.
        ValueError: A process group is given; the model names parameters to leave out; or the algorithm does not support
            this number of agents.
    """
    if process_group is not None:
        raise ValueError("with_bagua: there is no process_group but all agents; leave it out")
    if not isinstance(algorithm, Algorithm):
        raise TypeError(f"with_bagua: an algorithm of shoal.compat.bagua.algorithms is wanted, not {algorithm!r}")
    if getattr(model, "_bagua_params_and_buffers_to_ignore", None):
        raise ValueError(
            "with_bagua: _bagua_params_and_buffers_to_ignore: Shoal exchanges all parameters that an optimizer has. "
            "Give those that are to stay an agent's own to an optimizer that is not in the list"
        )
    if isinstance(optimizers, torch.optim.Optimizer):
        raise TypeError("with_bagua: a list of optimizers is wanted: [optimizer]")
    optimizers = list(optimizers)
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"with_bagua: optimizers of torch are wanted, not {optimizer!r}")
    without_bagua(model)
    broadcast_parameters(model.state_dict(), 0)
    for optimizer in optimizers:
        broadcast_optimizer_state(optimizer, 0)
    attached = Attached()
    try:
        for optimizer in optimizers:
            attached.append(Stepping(optimizer, model, algorithm))
    except BaseException:
        for stepping in attached:
            stepping.close()
        raise
    model.__dict__.update({_ATTACHED: attached, "bagua_algorithm": algorithm})
    return model


def without_bagua(model: torch.nn.Module) -> None:
    """Take :func:`with_bagua` back: the optimizers step by themselves again, and the model keeps its values.

    All agents call it; with asynchronous averages it returns when all have.
    """
    if any(stepping.has_windows for stepping in model.__dict__.get(_ATTACHED, ())):
        _barrier(Internal("without_bagua"))  # slower agents still average with this one through its windows
    model.__dict__.pop("bagua_algorithm", None)
    for stepping in model.__dict__.pop(_ATTACHED, ()):
        stepping.close()


_ATTACHED = "_shoal_bagua"
_module: Any = torch.nn.Module
_module.with_bagua = with_bagua


Closure = Callable[[], float]
_SCALERS = ("found_inf", "grad_scale")
"""The attributes that a GradScaler sets for a step."""


class Attached(list["Stepping"]):
    """The redirected optimizers of a model. A copy of the model, or a pickled one, has none."""

    def __reduce__(self) -> tuple[type[list[Any]], tuple[()]]:
        return list, ()


class Stepping:
    """Redirects ``optimizer.step()`` to the decentralized optimizer around it, until :meth:`close`.

    Args:
        optimizer: The user's optimizer.
        model: The model whose parameters it has.
        algorithm: The algorithm of the decentralized optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module, algorithm: Algorithm) -> None:
        self._optimizer, self._model, self._algorithm = optimizer, model, algorithm
        self._warmup = algorithm.warmup_steps
        first = GradientAllReduceAlgorithm() if self._warmup else algorithm
        self._around = first.around(optimizer, model)
        self._local: Callable[..., Any] = optimizer.step
        self._own = vars(optimizer).get("step")  # a learning-rate scheduler's, which counts
        self._passes_on = False

        def step(_optimizer: torch.optim.Optimizer, closure: Closure | None = None) -> Any:
            return self._step(closure)

        # A method, because learning-rate schedulers unwrap it; a scheduler made earlier checks for its marks on it.
        vars(step).update(getattr(self._local, "__dict__", {}))
        self._method = MethodType(step, optimizer)
        # Otherwise a GradScaler would skip the step of an agent whose neighbours wait for it.
        vars(optimizer).update(step=self._method, _step_supports_amp_scaling=True)

    @property
    def has_windows(self) -> bool:
        """Other agents may access this one's windows at any time."""
        return isinstance(self._around, WindowOptimizer)

    def _step(self, closure: Closure | None) -> Any:
        if self._passes_on:  # the decentralized optimizer takes the local step
            return self._local() if closure is None else self._local(closure)
        own, around = vars(self._optimizer), vars(self._around)
        scaled = {name: own.pop(name) for name in _SCALERS if name in own}
        around.update(scaled)
        self._passes_on = True
        try:
            loss = self._around.step(closure)
        finally:
            self._passes_on = False
            for name in scaled:
                del around[name]
            own.update(scaled)  # the GradScaler takes them away
            if self._around.rounds:
                self._around.num_steps_per_communication = self._algorithm.communication_interval
        if self._warmup:  # a step that failed is taken again
            self._count_warmup()
        return loss

    def _count_warmup(self) -> None:
        """After the last step of the warm-up, which all agents take together, the algorithm itself begins."""
        self._warmup -= 1
        if not self._warmup:
            self._around.close()
            self._around = self._algorithm.around(self._optimizer, self._model)

    def close(self) -> None:
        """The optimizer steps by itself again."""
        self._around.close()
        self._passes_on = True  # a scheduler may have wrapped this method
        held = vars(self._optimizer)
        held.pop("_step_supports_amp_scaling", None)
        if held.get("step") is self._method:
            del held["step"]
            if self._own is not None:
                held["step"] = self._own
