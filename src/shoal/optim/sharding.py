"""Models that are sharded over the processes of a replica: conditions under which they can be averaged. Agents average
the numbers at the same position of each replica. So a shard may be exchanged like a whole parameter, if no other code
averages between replicas and all processes of a replica treat their parts alike.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence

import torch

from ..algorithms.algorithm import Algorithm
from ..compression import Compressor, LowRank
from ..dtensors import is_copied, is_sharded, placements, processes
from ..runtime.agent import Agent, current

Named = Mapping[torch.nn.Parameter, str]


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that shares its work with other processes, because these are agents with models of their own.

    Raises:
        ValueError: It is a ``ZeroRedundancyOptimizer``.
    """
    module = sys.modules.get("torch.distributed.optim")
    if module is not None and isinstance(optimizer, getattr(module, "ZeroRedundancyOptimizer", ())):
        raise ValueError(
            "ZeroRedundancyOptimizer steps a part of the parameters here and copies the others from other processes, "
            "which makes all models one. Wrap a plain optimizer of torch; to hold a part of its state only, shard the "
            'model inside each replica: fully_shard(model, mesh=mesh["shard"]) and shoal.init(mesh=mesh["replicate"])'
        )


def check_sharding(
    params: Named,
    models: Sequence[torch.nn.Module],
    algorithm: Algorithm,
    compression: Compressor | LowRank | None,
    in_step: bool,
    overlap: str | None,
) -> None:
    """Refuse combinations that are not sound for these parameters.

    Args:
        params: The averaged parameters, with their names.
        models: The models of these parameters.
        algorithm: The algorithm of a step.
        compression: The compressor of messages.
        in_step: Whether exchanges are synchronous with the neighbours'.
        overlap: Whether buckets step during the backward pass.

    Raises:
        ValueError: A parameter is sharded over processes that this agent averages with, or stored as partial sums; or
            the processes of a replica would treat shared parameters differently.
    """
    agent = current("DecentralizedOptimizer")
    _check_that_nothing_is_flat(models)
    spread = [param for param in params if is_sharded(param) and len(processes(param)) > 1]
    for param in spread:
        _check_place(agent, param, params[param])
    if not spread:
        return
    where = f"{params[spread[0]]!r} is sharded over ranks {list(processes(spread[0]))}"
    if not in_step:
        raise ValueError(
            f"{where}, which wait for each other in every pass. Through windows each would average its part at a "
            "different time, so that the parts would not belong to one step, and copies of a parameter would differ. "
            "Take an optimizer that exchanges in step"
        )
    if overlap:
        raise ValueError(
            f'overlap="backward": {where}, and only the code that sharded it knows when its gradient is complete; '
            "leave overlap out. Adapt with combine exchanges during the whole pass"
        )
    copied = next(copies(params), None)
    if copied is None:
        return
    by_itself = algorithm.separable and getattr(algorithm, "compressor", None) is None
    if compression is not None or not by_itself:
        who = type(compression if compression is not None else algorithm).__name__
        raise ValueError(
            f"{where}, of which each has a copy of {params[copied]!r}. {who} looks at several numbers together, and "
            "beside it each process has others, so that the copies would differ. Take an algorithm that treats each "
            "number by itself, without compression, or shard that parameter, too"
        )


def check_robust(params: Named) -> None:
    """Refuse a rule that looks at a whole bucket where processes of a replica hold copies.

    Raises:
        ValueError: There is a copy.
    """
    copied = next(copies(params), None)
    if copied is not None:
        raise ValueError(
            f"robust: several processes of a replica have a copy of {params[copied]!r}, and the rule sees each beside "
            "other shards, so that the copies would differ. Leave robust out"
        )


def copies(params: Named) -> Iterator[torch.nn.Parameter]:
    """The parameters that several processes of a replica have copies of, if others are sharded."""
    if not any(is_sharded(param) and len(processes(param)) > 1 for param in params):
        return
    yield from (param for param in params if not is_sharded(param) or is_copied(param))


def _check_that_nothing_is_flat(models: Sequence[torch.nn.Module]) -> None:
    module = sys.modules.get("torch.distributed.fsdp")
    flat = getattr(module, "FullyShardedDataParallel", ())
    if current().size > 1 and any(isinstance(part, flat) for model in models for part in model.modules()):
        raise ValueError(
            "FullyShardedDataParallel makes one flat tensor of many parameters, and which part of it lies here cannot "
            'be seen. Take fully_shard(model, mesh=mesh["shard"]), and shoal.init(mesh=mesh["replicate"])'
        )


def _check_place(agent: Agent, param: torch.nn.Parameter, called: str) -> None:
    there, counterparts = processes(param), agent.launch.ranks
    if not counterparts:
        raise ValueError(
            f"{called!r} is sharded over ranks {list(there)}, each of which is an agent: they would average different "
            "parts of one model. Say which dimension of the mesh is between the replicas: "
            'shoal.init(mesh=mesh["replicate"])'
        )
    both = sorted(set(there) & set(counterparts) - {counterparts[agent.rank]})
    if both:
        raise ValueError(
            f"{called!r} lies on ranks {list(there)}, and this agent averages with ranks {both} of these: torch would "
            "average between them, too, or they hold other parts of one model. A mesh of two dimensions makes "
            'fully_shard average between replicas by itself (HSDP). Give it the one inside a replica, mesh["shard"], '
            'and shoal.init the one between them, mesh["replicate"]'
        )
    if any(getattr(placement, "is_partial", bool)() for placement in placements(param)):
        raise ValueError(f"{called!r} is kept as parts of a sum ({placements(param)}); redistribute it first")
