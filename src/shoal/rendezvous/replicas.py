"""Agents that are replicas of several processes each: ``init(mesh=)``.

The processes of a replica share one model (``fully_shard``, tensor parallelism). Each process is an agent of a separate
job with its counterparts, which are the processes at the same position in the other replicas. Rank and size are those
of the replica, and agents exchange data with counterparts only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .launch import Launch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def among_counterparts(launch: Launch, mesh: Any) -> Launch:
    """The launch of a process among its counterparts.

    Args:
        launch: The launch of the process in the whole job, with the ranks of ``torch.distributed``.
        mesh: The dimension between the replicas.

    Raises:
        TypeError: ``mesh`` is no mesh.
        ValueError: The mesh has several dimensions, or this process is not in it; or the job was not launched by
            ``torch.distributed``, of whose processes a mesh consists.
    """
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"shoal.init(mesh=): a DeviceMesh is wanted, not {type(mesh).__name__}")
    if launch.launcher != "torch.distributed":
        raise ValueError("shoal.init(mesh=): agents are threads here, and a mesh is of processes; leave it out")
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ()
        of = f" ({', '.join(names)})" if names else ""
        raise ValueError(
            f"shoal.init(mesh=): the mesh has {mesh.ndim} dimensions{of}. Give the one between the replicas, such as "
            'mesh["replicate"]; those inside a replica are for fully_shard(mesh=mesh["shard"]) and its like'
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"shoal.init(mesh=): rank {launch.rank} is not in the mesh of ranks {_ranks(mesh)}")
    ranks = _ranks(mesh)
    return replace(launch, rank=ranks.index(launch.rank), size=len(ranks), ranks=ranks, processes=launch.size)


def check_that_all_must_live(launch: Launch, continues: bool, tls: bool) -> None:
    """Refuse options that concern all processes of a replica, because an agent is only one of them.

    Raises:
        ValueError: The other agents are to continue without a lost one, or certificates name ranks of the whole job.
    """
    if len(launch.ranks) == launch.processes:
        return
    each = f"a replica has {launch.processes // len(launch.ranks)} processes"
    if continues:
        raise ValueError(
            f"shoal.init(mesh=) with on_loss='continue': {each}, and with one of them lost the others, which hold the "
            "rest of its model, are of no use to their counterparts, who would not hear of it at the same step. Take "
            "on_loss='raise' (SHOAL_ON_LOSS), and go on from a checkpoint"
        )
    if tls:
        raise ValueError(
            f"shoal.init(mesh=) with SHOAL_TLS=on: {each}, and a certificate names one agent of a rank, where there "
            "are several. Leave one of the two out"
        )


def _ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(mesh.mesh.flatten().tolist())
