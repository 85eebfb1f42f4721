"""The user's own optimizer, whose step becomes a step of all agents."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from .algorithms.base import Algorithm
from .algorithms.gradient_allreduce import GradientAllReduceAlgorithm

Closure = Callable[[], float]
_SCALERS = ("found_inf", "grad_scale")
"""The attributes that a GradScaler sets for a step."""


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

    def _step(self, closure: Closure | None) -> Any:
        if self._passes_on:  # the decentralized optimizer takes the local step
            return self._local() if closure is None else self._local(closure)
        own, around = vars(self._optimizer), vars(self._around)
        scaled = {name: own.pop(name) for name in _SCALERS if name in own}
        around.update(scaled)
        self._passes_on = True
        try:
            return self._around.step(closure)
        finally:
            self._passes_on = False
            for name in scaled:
                del around[name]
            own.update(scaled)  # the GradScaler takes them away
            if self._around.rounds:
                self._around.num_steps_per_communication = self._algorithm.communication_interval
            if self._warmup:
                self._count_warmup()

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
