"""Who am I: the variables of each launcher, as recorded from Open MPI 4.1, MPICH 4.0 and Slurm 22.05; and as their
controllers set them in pods of Kubernetes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from shoal.rendezvous.launch import Launch, derived_port, detect, first_host, free_ports, parse_address
from support.limits import scaled

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job-17",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "1996161025",
    "PMIX_NAMESPACE": "1996161025",
    "PMIX_RANK": "1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "8", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
SBATCH = {
    "SLURM_JOB_ID": "2",
    "SLURM_JOB_NODELIST": "node[07-09]",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NPROCS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "0",
}
SRUN = SBATCH | {
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NODELIST": "node[08-09]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_LAUNCH_NODE_IPADDR": "10.9.9.9",
}
SALLOC_INTERACTIVE = SBATCH | {
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NODELIST": "node07",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
}

INDEXED_JOB = {
    "JOB_COMPLETION_INDEX": "2",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "train-0.train",
    "MASTER_PORT": "29400",
}
# Of a pod of Kubeflow's TrainJob; its PyTorchJob sets RANK, WORLD_SIZE and MASTER_* besides, for pods of one agent.
TRAIN_JOB = {
    "JOB_COMPLETION_INDEX": "1",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29400",
}
PYTORCH_JOB = TRAIN_JOB | {
    "JOB_COMPLETION_INDEX": "",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "train-master-0",
    "MASTER_PORT": "23456",
    "PET_NPROC_PER_NODE": "1",
}


# A program that imports one module without the package around it: what that imports is not this module's doing.
ALONE = f"""
import sys, types
sys.modules["shoal"] = package = types.ModuleType("shoal")
package.__path__ = {list(shoal.__path__)}
"""


def test_without_a_launcher_the_job_has_one_agent() -> None:
    assert detect({}) == Launch(0, 1, "none")


def test_torchrun_variables_are_used_unchanged() -> None:
    assert detect(TORCHRUN) == Launch(3, 4, "torchrun", "10.0.0.7", 29500, True, 2, "job-17")


def test_variables_set_by_the_user_let_rank_0_host_the_store() -> None:
    by_hand = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    assert detect(by_hand) == Launch(3, 4, "torchrun", "10.0.0.7", 29500, False, 0, "")


def test_shoal_rendezvous_overrides_the_address_and_no_agent_hosts_there() -> None:
    launch = detect(TORCHRUN | {"SHOAL_RENDEZVOUS": "node1:4711"})
    assert (launch.host, launch.port, launch.store_is_served) == ("node1", 4711, False)


@pytest.mark.parametrize("variables", [OPENMPI, HYDRA, SRUN])
def test_shoal_rendezvous_and_master_addr_work_with_every_launcher(variables: dict[str, str]) -> None:
    master = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}
    by_master = detect(variables | master)
    assert (by_master.rank, by_master.host, by_master.port) == (1, "10.0.0.7", 29500)
    by_rendezvous = detect(variables | master | {"SHOAL_RENDEZVOUS": "[fd00::2]:4711"})
    assert (by_rendezvous.rank, by_rendezvous.host, by_rendezvous.port) == (1, "fd00::2", 4711)


def test_open_mpi_on_one_machine_uses_a_port_derived_from_its_job() -> None:
    port = derived_port("1996161025")
    assert detect(OPENMPI) == Launch(1, 2, "openmpi", "127.0.0.1", port, job="1996161025")
    assert detect(OPENMPI | {"PMIX_NAMESPACE": "1996161026"}).port != port


def test_derived_ports_are_stable_and_outside_the_ephemeral_range() -> None:
    ports = [derived_port(f"{job}.0") for job in range(2000)]
    assert all(20000 <= port <= 29999 for port in ports)
    assert len(set(ports)) > 1500
    assert derived_port("1996161025") == 23501


def test_free_ports_have_no_listener_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        used = server.getsockname()[1]
        others = free_ports(2)
        monkeypatch.setattr("shoal.rendezvous.launch._PORTS", [used, *others])
        assert sorted(free_ports(2)) == sorted(others)
        with pytest.raises(OSError, match="2 of 3 ports could be found"):
            free_ports(3)


def test_open_mpi_on_several_machines_requires_an_address() -> None:
    with pytest.raises(ValueError, match=r"2 agents, but the host of rank 0.*SHOAL_RENDEZVOUS=host:port.*mpirun -x"):
        detect(OPENMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"})


def test_pmi_without_a_job_id_or_a_known_daemon_requires_an_address() -> None:
    with pytest.raises(ValueError, match=r"a port cannot be derived.*SHOAL_RENDEZVOUS"):
        detect(HYDRA)


def test_pmi_agents_of_one_hydra_daemon_derive_one_address(tmp_path: Path) -> None:
    daemon = tmp_path / "hydra_pmi_proxy"
    daemon.symlink_to(sys.executable)
    agent = tmp_path / "agent.py"
    agent.write_text(f"""{ALONE}
from shoal.rendezvous.launch import detect
launch = detect()
print(launch.host, launch.port, launch.job)
""")
    start = f"""
import os, subprocess
found = [
    subprocess.check_output(["sh", "-c", f"PMI_RANK={{rank}} {sys.executable} {agent}; true"], text=True).split()
    for rank in range(2)
]
assert found[0] == found[1], found
host, port, job = found[0]
assert host == "127.0.0.1" and job.split(".")[0] == str(os.getpid()), found
"""
    environ = os.environ | {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
    subprocess.run([daemon, "-c", start], env=environ, check=True, timeout=scaled(30))


def test_srun_uses_the_first_host_of_the_step_and_not_the_submitting_host() -> None:
    assert detect(SRUN) == Launch(1, 2, "slurm", "node08", derived_port("2.0"), job="2.0")
    assert detect(SRUN | {"SLURM_STEP_ID": "1"}).port != derived_port("2.0")


def test_srun_on_one_node_uses_loopback() -> None:
    assert detect(SRUN | {"SLURM_STEP_NUM_NODES": "1"}).host == "127.0.0.1"


@pytest.mark.parametrize("variables", [SBATCH, {"SLURM_JOB_ID": "3", "SLURM_NTASKS": "2"}])
def test_a_batch_script_or_a_shell_of_salloc_is_a_single_agent(variables: dict[str, str]) -> None:
    assert detect(variables) == Launch(0, 1, "none")


def test_an_interactive_step_is_a_single_agent() -> None:
    launch = detect(SALLOC_INTERACTIVE)
    assert (launch.rank, launch.size) == (0, 1)


def test_srun_with_pmi2_is_slurm() -> None:
    launch = detect(SRUN | {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_JOBID": "2.0"})
    assert (launch.launcher, launch.host) == ("slurm", "node08")


def test_mpich_inside_slurm_is_pmi_because_srun_only_started_its_daemons() -> None:
    inside = SRUN | HYDRA | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "PMI_JOBID": "x"}
    launch = detect(inside)
    assert (launch.rank, launch.size, launch.launcher) == (1, 2, "pmi")


def test_open_mpi_inside_slurm_is_open_mpi() -> None:
    assert detect(SRUN | OPENMPI | {"SLURM_PROCID": "0"}).launcher == "openmpi"


def test_torchrun_started_by_srun_and_mpirun_is_torchrun() -> None:
    assert detect(SRUN | OPENMPI | HYDRA | TORCHRUN).rank == 3


def test_in_an_indexed_job_with_a_world_size_the_index_is_the_rank() -> None:
    assert detect(INDEXED_JOB) == Launch(2, 4, "kubernetes", "train-0.train", 29400)
    assert detect(INDEXED_JOB | TORCHRUN).rank == 3


def test_pods_of_an_indexed_job_without_a_world_size_are_single_agents() -> None:
    assert detect({"JOB_COMPLETION_INDEX": "2"}) == Launch(0, 1, "none")
    assert detect({"JOB_COMPLETION_INDEX": "0", "WORLD_SIZE": "1"}).size == 1


def test_a_pod_of_a_pytorchjob_with_one_agent_is_used_unchanged() -> None:
    assert detect(PYTORCH_JOB) == Launch(1, 2, "torchrun", "train-master-0", 23456)


def test_torchrun_in_a_pod_of_several_agents_is_torchrun() -> None:
    inside = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2"}
    assert detect(TORCHRUN | inside).rank == 3


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (TRAIN_JOB, r"PET_NNODES=2 is set.*RANK is not.*alone: start the script with `shoal run` or torchrun"),
        (TRAIN_JOB | {"PET_NNODES": "1"}, r"PET_NPROC_PER_NODE=2 is set"),
        (PYTORCH_JOB | {"WORLD_SIZE": "4"}, r"PET_NNODES=2.*several agents.*start the script with `shoal run`"),
        (INDEXED_JOB | {"WORLD_SIZE": "2"}, r"JOB_COMPLETION_INDEX=2 must be less than WORLD_SIZE=2"),
        (INDEXED_JOB | {"MASTER_ADDR": ""}, r"JOB_COMPLETION_INDEX=2 and WORLD_SIZE=4 are set but MASTER_ADDR is not"),
        (TORCHRUN | {"RANK": "4"}, r"RANK=4 must be less than WORLD_SIZE=4"),
        (TORCHRUN | {"RANK": "-1"}, r"RANK='-1' is not a whole number"),
        (TORCHRUN | {"WORLD_SIZE": "four"}, r"WORLD_SIZE='four' is not a whole number"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, r"RANK=3 must be less than WORLD_SIZE=0"),
        (TORCHRUN | {"WORLD_SIZE": ""}, r"RANK=3 is set but WORLD_SIZE is not"),
        (TORCHRUN | {"MASTER_ADDR": ""}, r"WORLD_SIZE=4 are set but MASTER_ADDR is not"),
        (TORCHRUN | {"MASTER_PORT": ""}, r"WORLD_SIZE=4 are set but MASTER_PORT is not"),
        (TORCHRUN | {"MASTER_PORT": "http"}, r"MASTER_PORT='http' has no port between 1 and 65535"),
        (TORCHRUN | {"MASTER_PORT": "65536"}, r"MASTER_PORT='65536' has no port"),
        (TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "x"}, r"TORCHELASTIC_RESTART_COUNT='x'"),
        (TORCHRUN | {"SHOAL_RENDEZVOUS": "node1"}, r"SHOAL_RENDEZVOUS='node1' is not host:port"),
        ({"WORLD_SIZE": "4"}, r"WORLD_SIZE=4 is set but RANK is not"),
        (OPENMPI | {"OMPI_COMM_WORLD_RANK": "2"}, r"OMPI_COMM_WORLD_RANK=2 must be less than OMPI_COMM_WORLD_SIZE=2"),
        (HYDRA | {"PMI_SIZE": "two"}, r"PMI_SIZE='two'"),
        (SRUN | {"SLURM_PROCID": "2"}, r"SLURM_PROCID=2 must be less than SLURM_STEP_NUM_TASKS=2"),
        (SRUN | {"SLURM_STEP_NODELIST": "[,"}, r"cannot read the Slurm node list.*SHOAL_RENDEZVOUS"),
    ],
)
def test_invalid_variables_are_named_with_their_values(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        detect(variables)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("vm", "vm"),
        ("vm,other", "vm"),
        ("node[003-007,9],gpu1", "node003"),
        ("node[12]", "node12"),
        ("rack1-node[5,7]-ib", "rack1-node5-ib"),
        ("a.example.org,b[1-2]", "a.example.org"),
    ],
)
def test_the_first_host_of_a_slurm_node_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@pytest.mark.parametrize("text", ["", ":1", "host", "host:", "host:0", "host:70000", "host:1x", "::1:29400", "host:+1"])
def test_an_address_that_is_not_host_and_port_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--rendezvous="):
        parse_address(text, "--rendezvous")


def test_detecting_the_launch_does_not_import_torch() -> None:
    code = f"""{ALONE}
import shoal.rendezvous.launch, shoal.rendezvous.rendezvous
shoal.rendezvous.launch.current()
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=scaled(30)).returncode == 0
