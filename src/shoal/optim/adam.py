"""Variants of Adam for agents: :class:`AccumAdamW` for small batches, :class:`OneBitAdam` for short messages.

The moments of AccumAdamW are those of gradients of all agents' batches together. With OneBitAdam agents average its
momentum instead of their gradients, once its second moment is fixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..topology._validate import as_int


def check_adam(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Raise ValueError for an argument that is out of its range or no number."""
    if not lr >= 0:
        raise ValueError(f"lr={lr}: pass 0 or more")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas={betas}: pass two numbers from 0 to below 1")
    if not (eps > 0 and weight_decay >= 0):
        raise ValueError(f"eps={eps}, weight_decay={weight_decay}: pass a small number above 0, and 0 or more")


class _OfRealParameters(torch.optim.Optimizer):
    """Refuses complex parameters, whose gradients it would square as complex numbers."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if any(param.is_complex() for param in self.param_groups[-1]["params"]):
            self.param_groups.pop()
            raise ValueError(
                f"{type(self).__name__} takes no complex parameters; give torch.view_as_real(parameter), or use "
                "torch.optim.Adam"
            )


class AccumAdamW(_OfRealParameters):
    """AdamW whose moments take in the mean of ``accumulate`` gradients at a time, for agents that average parameters.

        adam = shoal.optim.AccumAdamW(model.parameters(), lr=1e-3, accumulate=shoal.size())
        optimizer = shoal.DecentralizedOptimizer(adam, model, mix_state=())

    AdamW divides by the root of the mean square of its gradients, and the square of a gradient holds its noise. In
    data-parallel training that is the noise of the batches of all n agents together; of one agent's batch it is n times
    as large, so each step is smaller, down to 1/sqrt(n). The mean over n steps of one agent has as much noise as the
    mean over n agents of one step. So in step t = 1, 2, ..., with s = ``accumulate``, ``k = ceil(t / s)``,
    ``b1 = beta1^s`` and ``b2 = beta2^s``: ``p = b1 m + (1 - b1) g``, ``q = b2 v + (1 - b2) g^2``,
    ``x+ = (1 - lr weight_decay) x - lr p / (1 - b1^k) / (sqrt(q / (1 - b2^k)) + eps)``, ``b+ = b + g / s``. After every
    s-th step ``m+ = b1 m + (1 - b1) b+``, ``v+ = b2 v + (1 - b2) (b+)^2``, ``b+ = 0``; all are zero at first.

    That is AccumAdam (Wang et al. 2024, arXiv:2410.11998) with the decay of AdamW, and with betas to the power of s,
    so that moments remember as many steps as AdamW's. Nothing more is sent. With ``accumulate=1`` it is AdamW.

    Args:
        params: As of any optimizer of torch.
        lr: The step; as in data-parallel training with as many processes.
        accumulate: s, 1 or more: usually the number of agents.
        betas: The parts of the first and of the second moment that remain after one step.
        eps: Added to the root of the second moment.
        weight_decay: Times ``lr``, the part of a parameter that a step takes away.

    State of each parameter: ``exp_avg``, ``exp_avg_sq`` and ``sum`` (b), as the parameter, and ``step``, a float32
    tensor without dimensions.

    Raises:
        TypeError: A count is no whole number.
        ValueError: A number is out of its range.
        RuntimeError: In a step: a gradient is sparse.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        *,
        accumulate: int,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        check_adam(lr, betas, eps, weight_decay)
        accumulate = as_int(accumulate, "accumulate")
        if accumulate < 1:
            raise ValueError(f"accumulate={accumulate}: pass a number of gradients, at least 1")
        defaults = {"lr": lr, "accumulate": accumulate, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """A step with the present gradients, which also updates the moments."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step_of(param, group)
        return loss

    def _step_of(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        grad, own, every = param.grad, self.state[param], group["accumulate"]
        assert grad is not None
        if grad.is_sparse:
            raise RuntimeError("AccumAdamW takes no sparse gradients; use embeddings with sparse=False")
        if not own:
            own["step"] = torch.tensor(0.0, device="cpu")
            own["exp_avg"], own["exp_avg_sq"], own["sum"] = (torch.zeros_like(param) for _ in range(3))
        own["step"] += 1
        step, m, v, b = int(own["step"]), own["exp_avg"], own["exp_avg_sq"], own["sum"]
        beta1, beta2 = (beta**every for beta in group["betas"])
        count = -(-step // every)
        first = m.lerp(grad, 1 - beta1)
        root = (v * beta2).addcmul_(grad, grad, value=1 - beta2).div_(1 - beta2**count).sqrt_().add_(group["eps"])
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.addcdiv_(first, root, value=-group["lr"] / (1 - beta1**count))
        b.add_(grad, alpha=1 / every)
        if step % every == 0:
            m.lerp_(b, 1 - beta1)
            v.mul_(beta2).addcmul_(b, b, value=1 - beta2)
            b.zero_()


class OneBitAdam(_OfRealParameters):
    """Adam that fixes its second moment after some steps, so that the averaged momentum may be compressed to one bit.

        adam = shoal.optim.OneBitAdam(model.parameters(), lr=1e-3, warmup=500)
        gradients = shoal.algorithms.ParallelGradientDescent(1.0)
        optimizer = shoal.DecentralizedOptimizer(adam, model, gradients, compression=shoal.compression.Sign())

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
        TypeError: A count is no whole number.
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
        warmup = as_int(warmup, "warmup")
        if warmup < 1:
            raise ValueError(f"warmup={warmup}: pass 1 or more, since they determine the second moment")
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
                if not param.requires_grad or (grad is None and not own):  # a frozen one stays, whatever its momentum
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
