"""A Slurm cluster of two nodes on this machine: a real ``slurmctld`` and two real ``slurmd`` (Debian: slurm-wlm).

Each node has a network, a host name and an /etc/hosts of its own. Nobody else is let in, so no munge is needed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from .namespaces import Namespace, network_namespaces
from .world import plain_environment

NODES = ("node0", "node1")
PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol")
START_SECONDS = 30.0
_CONFIGURATION = """
ClusterName=shoal
SlurmctldHost=node0({controller})
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
SlurmctldPort=6817
SlurmdPort=6818
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/linear
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=2
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """The cluster; commands run on its first node."""

    machines: tuple[Namespace, ...]
    folder: Path

    def run(self, *command: str, seconds: float = 90.0, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command there to its end."""
        return subprocess.run(
            self.on(0, *command),
            env=self.environment | environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def on(self, node: int, *command: str) -> list[str]:
        """A command line that runs another one on a node."""
        inside = f'hostname {NODES[node]}; mount --bind {self.folder}/hosts /etc/hosts; exec "$@"'
        apart = ["unshare", "--mount", "--uts", "sh", "-ec", inside, "node"]
        # `ip netns exec` would hide the control groups, which slurmd looks for.
        return ["nsenter", f"--net={self.machines[node].path}", *apart, *command]

    @property
    def environment(self) -> dict[str, str]:
        return plain_environment() | {"SLURM_CONF": f"{self.folder}/slurm.conf", "OMP_NUM_THREADS": "1"}


def require_slurm() -> None:
    """Skip the test where Slurm is not installed."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} (Debian: slurm-wlm)")
    if os.geteuid() != 0:
        pytest.skip("a cluster of Slurm needs root")


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Slurm]:
    """Start it, and end it with all its processes."""
    require_slurm()
    with network_namespaces(2) as machines, ExitStack() as last:
        slurm = Slurm(tuple(machines), folder)
        addresses = [machine.address for machine in machines]
        hosts = [f"{address} {name}" for address, name in zip(addresses, NODES, strict=True)]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
        nodes = [f"NodeName={name} NodeAddr={address} CPUs=4" for address, name in zip(addresses, NODES, strict=True)]
        text = _CONFIGURATION.format(folder=folder, controller=addresses[0], nodes="\n".join(nodes))
        (folder / "slurm.conf").write_text(text)
        for name in ("state", *NODES):
            (folder / name).mkdir()
        daemons = {"slurmctld": slurm.on(0, "slurmctld", "-D", "-i")}
        for node, name in enumerate(NODES):
            daemons[name] = slurm.on(node, "slurmd", "-D", "-N", name)
        for name, command in daemons.items():
            output = last.enter_context((folder / f"{name}.log").open("w"))
            process = subprocess.Popen(
                command, env=slurm.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            last.callback(_end, process)
        _await_nodes(slurm, list(daemons))
        yield slurm


def _await_nodes(slurm: Slurm, daemons: list[str]) -> None:
    limit = time.monotonic() + START_SECONDS
    while True:
        done = slurm.run("sinfo", "--noheader", "--format=%T %D")
        if done.stdout.split() == ["idle", str(len(NODES))]:
            return
        if time.monotonic() >= limit:
            logs = "\n".join(f"{name}:\n{(slurm.folder / f'{name}.log').read_text()[-2000:]}" for name in daemons)
            raise AssertionError(f"the cluster did not start: {done.stdout}{done.stderr}\n{logs}")
        time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(60.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
