"""Adam for short messages: agents average its momentum instead of their gradients, once its second moment is fixed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .adam_arguments import check_adam


class OneBitAdam(torch.optim.Optimizer):
    """Adam that fixes its second moment after some steps, so that the averaged momentum may be compressed to one bit.

        adam = shoal.optim.OneBitAdam(model.parameters(), lr=1e-3, warmup=500)
        optimizer = shoal.optim.DistributedGradientAllreduceOptimizer(adam, model, compression=shoal.compression.Sign())

    The square of a coarsely compressed gradient is of little use, and the second moment hardly changes after the first
    part of a training. So for ``warmup`` steps this is Adam, on the mean of uncompressed gradients:
    ``m+ = b1 m + (1 - b1) g``, ``v+ = b2 v + (1 - b2) g^2``. After step T = ``warmup`` v is fixed, each agent computes
    ``b1 m + (1 - b1) g`` from its own gradient, and ``m+`` is the compressed mean of these, where the error of a
    message is added to the next. The step is ``lr m+ / (1 - b1^t) / (sqrt(v / (1 - b2^T)) + eps)``, where t counts on
    (Tang et al. 2021, arXiv:2102.02888; with eight bits, whose rest is not added, it is QAdam of BAGUA, Gan et al.
    2021, arXiv:2107.01499).

    A number that had no gradient during the warm-up, as an embedding of a rare word, takes the square of the first mean
    that is not zero for its second moment. Alone, or with another way to exchange, it steps with its own gradients.

    Args:
        params: As of any optimizer of torch.
        lr: The step.
        warmup: The number of Adam's steps, 1 or more: about an eighth of all, and more than the warm-up of the learning
            rate.
        betas: The parts of the first and of the second moment that remain after one step.
        eps: Added to the root of the second moment.
        weight_decay: Times the parameter is added to its gradient.

    Raises:
        ValueError: A number is out of its range.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        *,
        warmup: int,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        check_adam(lr, betas, eps, weight_decay)
        if warmup < 1:
            raise ValueError(f"warmup={warmup}: pass 1 or more, since the second moment is what they make of it")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "warmup": warmup, "steps": 0}
        super().__init__(params, defaults)
        self._momenta_are_there = False

    @property
    def second_moment_stays(self) -> bool:
        """The next step is one after the warm-up."""
        return all(group["steps"] >= group["warmup"] for group in self.param_groups)

    @torch.no_grad()
    def momenta_for_gradients(self, *, overflowed: bool = False) -> None:
        """Put the momentum that each parameter's gradient makes in the gradient's place: the next step takes it as it
        is. ``overflowed``: the gradients count as zero."""
        for group in self.param_groups:
            beta = group["betas"][0]
            for param in group["params"]:
                own, grad = self.state.get(param, {}), param.grad
                if grad is None and not own:
                    continue
                grad = torch.zeros_like(param) if grad is None or overflowed else self._decayed(param, group)
                param.grad = grad.mul_(1 - beta)
                if own:
                    grad.add_(own["exp_avg"], alpha=beta)
        self.expect_momenta()

    def expect_momenta(self) -> None:
        """The gradients that the next step finds are momenta."""
        self._momenta_are_there = True

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """As Adam's, and after the warm-up with the second moment as it is."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        momenta, self._momenta_are_there = self._momenta_are_there, False
        for group in self.param_groups:
            group["steps"] += 1
            stays = group["steps"] > group["warmup"]
            for param in group["params"]:
                if param.grad is not None:
                    self._step_of(param, group, stays, momenta)
        return loss

    def _step_of(self, param: torch.Tensor, group: dict[str, Any], stays: bool, momenta: bool) -> None:
        own = self.state[param]
        if not own:
            own["exp_avg"], own["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        m, v, (beta1, beta2) = own["exp_avg"], own["exp_avg_sq"], group["betas"]
        second = 1 - beta2 ** min(group["steps"], group["warmup"])
        if momenta:
            m.copy_(param.grad)
        else:
            grad = self._decayed(param, group)
            m.lerp_(grad, 1 - beta1)
            if not stays:
                v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        if stays:
            v.copy_(torch.where(v == 0, (m / (1 - beta1)).square_().mul_(second), v))
        root = (v.sqrt() / math.sqrt(second)).add_(group["eps"])
        param.addcdiv_(m, root, value=-group["lr"] / (1 - beta1 ** group["steps"]))

    @staticmethod
    def _decayed(param: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """The gradient with its weight decay, in memory of its own."""
        assert param.grad is not None
        grad = param.grad.to_dense() if param.grad.is_sparse else param.grad
        return grad.add(param, alpha=group["weight_decay"])
