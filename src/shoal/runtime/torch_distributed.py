"""Warns of a script's process group in a job whose agents survive failures."""

from __future__ import annotations

import warnings

import torch.distributed as dist

from .agent import Agent


def warn_of_process_group(agent: Agent, stacklevel: int) -> None:
    """Warn once if a failure would end the survivors, because a script's process group needs all of its members.

    Groups that were given to Shoal (``process_group=``, ``mesh=``) or that Shoal has made are not the script's.
    """
    mine = agent.launch.beside or agent.engine.backend is not None
    if mine or agent.size == 1 or agent.warned_of_process_group or not agent.engine.survives_losses:
        return
    if dist.is_available() and dist.is_initialized():
        agent.warned_of_process_group = True
        warnings.warn(
            f"rank {agent.rank}: torch.distributed is initialized, and agents are to survive failures. If an agent "
            "fails, the process group's operations raise, hang or abort on the others, and a restarted agent cannot "
            "join it. Remove dist.init_process_group() and replace the calls that use it: dist.get_rank() by "
            "shoal.rank(), dist.all_reduce() by shoal.allreduce() or shoal.metrics(), dist.barrier() by "
            "shoal.barrier(), DistributedSampler by shoal.AgentSampler (docs/howto/ddp.md)",
            stacklevel=stacklevel,
        )
