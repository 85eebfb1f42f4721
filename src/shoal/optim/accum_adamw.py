"""AdamW for agents with small batches: its moments are those of gradients of all agents' batches together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .adam_arguments import check_adam


class AccumAdamW(torch.optim.Optimizer):
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
            own["step"] = torch.tensor(0.0)
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
