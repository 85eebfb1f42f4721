"""The learning rate for n agents: linear scaling, and a warm-up that leads there."""

from __future__ import annotations

import torch

from ..runtime.agent import current


class Warmup(torch.optim.lr_scheduler.LinearLR):
    """From the optimizer's learning rate to ``factor`` times it, by equal steps (Goyal et al. 2017, arXiv:1706.02677).

    With x ← W (x − lr g) or x ← W x − lr g, W averaging, the mean of the agents' models moves by −lr times the mean of
    their gradients: n agents with b samples each take the step of one batch of n·b samples, as data-parallel training
    does. So the rule of that paper holds as it stands: a rate that is right for one agent and its b samples becomes n
    times as large. Where the rate was chosen for all agents together (a script that ran under DistributedDataParallel
    with as many processes), it is right already. For Adam and its like √n is more apt: ``factor=shoal.size() ** 0.5``
    (Malladi et al. 2022, arXiv:2205.10287). The farther a topology lets agents drift apart, the smaller the rate that
    it bears; ``shoal.consensus_distance`` shows it.

    It is torch's ``LinearLR`` on a rate that is raised first, and composes as that does. Make it before the other
    schedulers, which then begin from the raised rate::

        warmup = shoal.optim.Warmup(optimizer, steps=500)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total_steps - 500)
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[500])

    or ``ChainedScheduler([warmup, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)])``. ``state_dict()`` and
    ``load_state_dict()`` resume it. The loaded rate is the saved one, for any number of agents.

    Args:
        optimizer: A decentralized one, or any other.
        steps: How many ``step()`` of the scheduler it takes; at least 1.
        factor: How many times the rate in the end; at least 1. The number of agents if None.

    Raises:
        ValueError: ``steps`` or ``factor`` is out of range; or another scheduler has the optimizer already.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int, factor: float | None = None) -> None:
        factor = current("Warmup").size if factor is None else factor
        if steps < 1:
            raise ValueError(f"Warmup: steps={steps} must be at least 1")
        if not factor >= 1:
            raise ValueError(f"Warmup: factor={factor:g} must be at least 1")
        if any("initial_lr" in group for group in optimizer.param_groups):
            raise ValueError(
                "Warmup: the optimizer has a scheduler, or the state of one, already, which would not include the "
                "raised rate. Make Warmup first, then the other schedulers, and load states after that."
            )
        self.factor = factor
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor  # not in place: groups may share a tensor
        super().__init__(optimizer, start_factor=1 / factor, total_iters=steps)
