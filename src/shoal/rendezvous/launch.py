"""Detects how this process was started: its rank, the number of agents, and the address at which agents first meet.

Each launcher sets its own environment variables. :func:`detect` reads those of torchrun (and ``shoal run``, which sets
the same ones), Open MPI, PMI (MPICH, Intel MPI), Slurm and Kubernetes' indexed Jobs. It returns one value,
:class:`Launch`. Without any of them a process is the only agent of its job. No function but :func:`among_counterparts`
imports torch.

With ``init(mesh=)`` agents are replicas of several processes each, which share one model (``fully_shard``, tensor
parallelism). Each process is an agent of a separate job with its counterparts, which are the processes at the same
position in the other replicas. Rank and size are those of the replica, and agents exchange data with counterparts only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import BEGIN_WITH, INCARNATION

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

LOOPBACK = "127.0.0.1"

# Below the range from which Linux takes the ports of outgoing connections (32768 to 60999), so that no client of this
# machine occupies one of these by accident.
_PORTS = range(20000, 30000)


@dataclass(frozen=True)
class Launch:
    """The rank of an agent and the address of its job. ``host`` and ``port`` are None if there is one agent."""

    rank: int
    size: int
    #: "torchrun", "openmpi", "pmi", "slurm", "kubernetes" or "none"; "torch.distributed" (see :func:`current`);
    #: "fleet" for threads.
    launcher: str
    host: str | None = None
    port: int | None = None
    #: Whether the launcher itself serves a TCPStore at host:port, so that no agent has to host one.
    store_is_served: bool = False
    #: The number of times that the launcher has restarted the job.
    attempt: int = 0
    #: The launcher's name for the job: equal for all its agents, and unique on this machine. Often empty.
    job: str = ""
    #: The number of times that the launcher has restarted this agent while the other agents continued.
    incarnation: int = 0
    #: The number of agents with which the job begins, from rank 0 on; 0 for all. The others may join it.
    begin_with: int = 0
    #: The ranks of the agents in ``torch.distributed``, by agent, if a mesh defines the agents.
    ranks: tuple[int, ...] = ()
    #: The number of processes of all replicas in that case.
    processes: int = 0

    @property
    def beside(self) -> str:
        """A string, usable as a folder's name, that distinguishes these agents from others with the same ranks.

        Empty if there are no such agents.
        """
        return f"counterparts-of-rank{self.ranks[0]}" if len(self.ranks) < self.processes else ""

    @property
    def begins(self) -> int:
        """The number of agents with which the job begins."""
        return self.begin_with or self.size

    @property
    def joins(self) -> bool:
        """Whether this agent joins a running job with a rank that was not in it before."""
        return self.rank >= self.begins


def current(environ: Mapping[str, str] = os.environ) -> Launch:
    """The launch of this process: from ``torch.distributed`` if it is initialised, else from :func:`detect`.

    A process group has priority because the script's author has configured it; under ``multiprocessing.spawn`` it is
    the only source. Rank and size are those of the default group. Its store is used, so the address may be unknown. If
    the address is known, ``host`` determines the interface that leads to the other agents.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return detect(environ)
    variables = _Variables(environ)
    if variables.text(BEGIN_WITH):
        raise ValueError(
            f"{BEGIN_WITH}={variables.text(BEGIN_WITH)}: the process group of torch.distributed that the script has "
            "initialised cannot grow; leave it out of a run that agents may join"
        )
    host, port = _given_address(variables)
    return Launch(
        rank=distributed.get_rank(),
        size=distributed.get_world_size(),
        launcher="torch.distributed",
        host=host,
        port=port,
        attempt=variables.count("TORCHELASTIC_RESTART_COUNT", default=0),
        incarnation=variables.count(INCARNATION, default=0),
        job=variables.text("TORCHELASTIC_RUN_ID"),
    )


def detect(environ: Mapping[str, str] = os.environ) -> Launch:
    """Read the launcher's variables. An empty variable counts as unset.

    The order is from the inside out, because launchers are nested and the innermost one has started this process:

    1. torchrun and ``shoal run`` (``RANK``, ``WORLD_SIZE``): mpirun or srun often start one of them on every machine,
       never the reverse. A user can also set these variables to override all others.
    2. Open MPI (``OMPI_COMM_WORLD_RANK``): inside a Slurm job the allocation's variables are set too.
    3. PMI (``PMI_RANK``): MPICH and Intel MPI start their daemons with srun. Then ``SLURM_PROCID`` is that of the
       daemon, and equal for all agents of a machine. ``srun --mpi=pmi2`` sets ``PMI_RANK`` as well; if the two agree,
       the launcher is Slurm.
    4. Slurm (``SLURM_PROCID`` inside a step). A batch script or a shell of salloc has ``SLURM_NTASKS``, and even
       ``SLURM_PROCID=0``, but was not started by srun: only ``SLURM_STEP_ID`` shows a step. ``SLURM_STEP_NUM_TASKS`` is
       the size, since an interactive step is one task with the ``SLURM_NTASKS`` of the whole allocation.
    5. An indexed Job of Kubernetes, or a JobSet, with one agent in each pod: the Job's controller sets
       ``JOB_COMPLETION_INDEX``, which is the rank if the manifest sets ``WORLD_SIZE``. Without that variable the pods
       are independent, as in a sweep.
    6. None of them: one agent.

    The variables that Kubeflow sets in a pod for torchrun (``PET_NNODES``, ...) do not contain the rank of a process.
    If they ask for several agents and no launcher has started these, an error is raised.

    The address is the first of these that is available: ``SHOAL_RENDEZVOUS=host:port``; ``MASTER_ADDR`` and
    ``MASTER_PORT``; for Slurm, the first host of the step and a port derived from the job and step; if all agents are
    on this machine, 127.0.0.1 and a port derived from the job. ``SLURM_LAUNCH_NODE_IPADDR`` is not used: it is the node
    on which srun was called, and a login node has no rank 0.

    Raises:
        ValueError: A variable is not a number or contradicts another one, or there are several machines and no known
            address. The message names the variable, its value, and the remedy.
    """
    variables = _Variables(environ)
    for launcher in (_torchrun, _openmpi, _pmi, _slurm, _kubernetes):
        launch = launcher(variables)
        if launch is not None:
            return _with_initial_agents(launch, variables)
    if variables.text("WORLD_SIZE") and variables.count("WORLD_SIZE") > 1:
        raise ValueError(f"WORLD_SIZE={environ['WORLD_SIZE']} is set but RANK is not: set both, or neither")
    for name in ("PET_NNODES", "PET_NPROC_PER_NODE"):
        if variables.text(name) not in ("", "1", "auto", "cpu", "gpu"):
            raise ValueError(
                f"{name}={variables.text(name)} is set, for torchrun, but RANK is not, so this process would be alone: "
                "start the script with `shoal run` or torchrun, which read it"
            )
    return Launch(0, 1, "none")


def parse_address(text: str, source: str) -> tuple[str, int]:
    """Split ``host:port`` (or ``[ipv6]:port``); ``source`` is the variable or option for error messages."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if not colon or not host or (":" in host and not bracketed):
        raise ValueError(f"{source}={text!r} is not host:port (an IPv6 address goes in brackets: [::1]:29400)")
    return host, _port(port, source, text)


def join_address(host: str | None, port: int | None) -> str:
    """The reverse of :func:`parse_address`: ``host:port``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if host and ":" in host else f"{host}:{port}"


def derived_port(job: str) -> int:
    """A port in 20000..29999 that is equal for all agents of a job, and rarely equal for two jobs."""
    digest = hashlib.sha256(job.encode()).digest()
    return _PORTS[int.from_bytes(digest[:8], "big") % len(_PORTS)]


def free_ports(count: int) -> list[int]:
    """Different ports in 20000..29999 on which no process of this machine listens, for a server that binds them later.

    Raises:
        OSError: there are not as many free ports.
    """
    free: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as attempt, contextlib.suppress(OSError):
            attempt.bind(("", port))
            free.append(port)
        if len(free) == count:
            return free
    raise OSError(f"{len(free)} of {count} ports could be found: almost all in {_PORTS[0]} to {_PORTS[-1]} are in use")


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: ``node[003-007,9],gpu1`` begins with ``node003``."""
    match = re.match(r"([^,\[\]]*)(?:\[(\w+)[^\]]*\]([^,\[\]]*))?", nodelist)
    host = "".join(part or "" for part in match.groups()) if match else ""
    if not host:
        raise ValueError(
            f"cannot read the Slurm node list {nodelist!r}: set SHOAL_RENDEZVOUS=host:port to rank 0's host"
        )
    return host


class _Variables:
    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, name: str) -> str:
        return self._environ.get(name, "").strip()

    def first(self, *names: str) -> str:
        return next((self.text(name) for name in names if self.text(name)), "")

    def count(self, name: str, default: int | None = None) -> int:
        text = self.text(name)
        if not text and default is not None:
            return default
        if not (text.isascii() and text.isdigit()):
            raise ValueError(f"{name}={text!r} is not a whole number, zero or more")
        return int(text)

    def place(self, rank_name: str, size_name: str) -> tuple[int, int]:
        rank = self.count(rank_name)
        if not self.text(size_name):
            raise ValueError(f"{rank_name}={rank} is set but {size_name} is not: set both, or neither")
        size = self.count(size_name)
        if rank >= size:
            raise ValueError(f"{rank_name}={rank} must be less than {size_name}={size}: ranks are 0 to {size_name} - 1")
        return rank, size


def _torchrun(variables: _Variables) -> Launch | None:
    if not variables.text("RANK"):
        return None
    rank, size = variables.place("RANK", "WORLD_SIZE")
    nodes = variables.text("PET_NNODES")
    if nodes.isdigit() and int(nodes) < size and not variables.text("TORCHELASTIC_RUN_ID"):
        raise ValueError(
            f"RANK={rank} and WORLD_SIZE={size} are set with PET_NNODES={nodes}, as Kubeflow does for a pod that is to "
            "have several agents, but this process is the only one here: start the script with `shoal run` or torchrun"
        )
    host, port = _rank_0s_address(variables, "RANK", rank, size)
    return Launch(
        rank=rank,
        size=size,
        launcher="torchrun",
        host=host,
        port=port,
        # At an address that the user has set, no launcher serves a store.
        store_is_served=(
            variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True" and not variables.text("SHOAL_RENDEZVOUS")
        ),
        attempt=variables.count("TORCHELASTIC_RESTART_COUNT", default=0),
        incarnation=variables.count(INCARNATION, default=0),
        job=variables.text("TORCHELASTIC_RUN_ID"),
    )


def _with_initial_agents(launch: Launch, variables: _Variables) -> Launch:
    """The launch with the number of agents at the start, if not all ranks begin."""
    begin_with = variables.count(BEGIN_WITH, default=0)
    if not variables.text(BEGIN_WITH):
        return launch
    if not 1 <= begin_with <= launch.size:
        raise ValueError(f"{BEGIN_WITH}={begin_with} must be 1 to {launch.size}, the number of ranks that there may be")
    found = replace(launch, begin_with=begin_with)
    if found.joins and not launch.incarnation:
        raise ValueError(
            f"rank {launch.rank} is none of the {begin_with} that the run begins with ({BEGIN_WITH}): to join it, set "
            f"{INCARNATION}=1, too"
        )
    return found


def _openmpi(variables: _Variables) -> Launch | None:
    if not variables.text("OMPI_COMM_WORLD_RANK"):
        return None
    rank, size = variables.place("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    job = variables.first("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    is_local = variables.count("OMPI_COMM_WORLD_LOCAL_SIZE", default=0) == size
    host, port = _address(variables, size, LOOPBACK if is_local else None, job, "mpirun -x SHOAL_RENDEZVOUS=host:port")
    return Launch(rank, size, "openmpi", host, port, job=job)


def _pmi(variables: _Variables) -> Launch | None:
    if not variables.text("PMI_RANK"):
        return None
    rank, size = variables.place("PMI_RANK", "PMI_SIZE")
    if _is_slurm_step(variables) and (rank, size) == _slurm_place(variables):
        return None
    is_local = variables.count("MPI_LOCALNRANKS", default=0) == size
    job = variables.text("PMI_JOBID")
    if not job and is_local and size > 1:
        job = _hydra_proxy()
    host, port = _address(
        variables, size, LOOPBACK if is_local else None, job, "mpiexec -genv SHOAL_RENDEZVOUS host:port"
    )
    return Launch(rank, size, "pmi", host, port, job=job)


def _slurm(variables: _Variables) -> Launch | None:
    if not _is_slurm_step(variables):
        return None
    rank, size = _slurm_place(variables)
    job = f"{variables.first('SLURM_JOB_ID', 'SLURM_JOBID')}.{variables.first('SLURM_STEP_ID', 'SLURM_STEPID')}"
    nodes = variables.first("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    if variables.text("SLURM_STEP_NUM_NODES") == "1":
        host: str | None = LOOPBACK
    else:
        host = first_host(nodes) if nodes else None
    host, port = _address(variables, size, host, job, "export SHOAL_RENDEZVOUS=host:port")
    return Launch(rank, size, "slurm", host, port, job=job)


def _kubernetes(variables: _Variables) -> Launch | None:
    if not (variables.text("JOB_COMPLETION_INDEX") and variables.text("WORLD_SIZE")):
        return None
    rank, size = variables.place("JOB_COMPLETION_INDEX", "WORLD_SIZE")
    host, port = _rank_0s_address(variables, "JOB_COMPLETION_INDEX", rank, size)
    return Launch(rank, size, "kubernetes", host, port)


def _rank_0s_address(variables: _Variables, name: str, rank: int, size: int) -> tuple[str | None, int | None]:
    """The address that the user must set if the variable ``name`` gives the rank."""
    host, port = _given_address(variables)
    if size > 1 and (host is None or port is None):
        missing = "MASTER_ADDR" if host is None else "MASTER_PORT"
        raise ValueError(
            f"{name}={rank} and WORLD_SIZE={size} are set but {missing} is not: "
            "set it to where rank 0 can be reached, or set SHOAL_RENDEZVOUS=host:port"
        )
    return host, port


def _is_slurm_step(variables: _Variables) -> bool:
    return bool(variables.text("SLURM_PROCID") and variables.first("SLURM_STEP_ID", "SLURM_STEPID"))


def _slurm_place(variables: _Variables) -> tuple[int, int]:
    size_name = "SLURM_STEP_NUM_TASKS" if variables.text("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    return variables.place("SLURM_PROCID", size_name)


def _given_address(variables: _Variables) -> tuple[str | None, int | None]:
    rendezvous = variables.text("SHOAL_RENDEZVOUS")
    if rendezvous:
        return parse_address(rendezvous, "SHOAL_RENDEZVOUS")
    port = variables.text("MASTER_PORT")
    host = variables.text("MASTER_ADDR")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    return host or None, _port(port, "MASTER_PORT", port) if port else None


def _address(
    variables: _Variables, size: int, derived_host: str | None, job: str, how: str
) -> tuple[str | None, int | None]:
    if size == 1:
        return None, None
    host, port = _given_address(variables)
    host = host or derived_host
    if port is None and job:
        port = derived_port(job)
    if host is None or port is None:
        missing = "the host of rank 0" if host is None else "a port"
        raise ValueError(
            f"{size} agents, but {missing} cannot be derived from the launcher's variables: set "
            f"SHOAL_RENDEZVOUS=host:port to rank 0's host and a free port there ({how}), the same for every agent"
        )
    return host, port


def _port(text: str, source: str, value: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise ValueError(f"{source}={value!r} has no port between 1 and 65535")
    return int(text)


def _hydra_proxy() -> str:
    """A name of the daemon that MPICH's and Intel MPI's launcher runs on each machine: there is no job id.

    All agents of one job on one machine descend from one such process. Its start time makes the name unique.
    """
    pid = os.getppid()
    while pid > 1:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return ""
        name = stat[stat.index("(") + 1 : stat.rindex(")")]
        fields = stat[stat.rindex(")") + 2 :].split()
        if "pmi_proxy" in name:
            return f"{pid}.{fields[19]}"
        pid = int(fields[1])
    return ""


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
            "rest of its model, are of no use to their counterparts, which would notice it at another step. Take "
            "on_loss='raise' (SHOAL_ON_LOSS), and go on from a checkpoint"
        )
    if tls:
        raise ValueError(
            f"shoal.init(mesh=) with SHOAL_TLS=on: {each}, and a certificate names one agent of a rank, where there "
            "are several. Leave one of the two out"
        )


def _ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(mesh.mesh.flatten().tolist())
