"""Pods, as far as they matter to agents: each has network interfaces, processes and mounts of its own, no capability,
and a /dev/shm of one page. Linux makes them (namespaces); no Kubernetes runs here."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from .namespaces import Namespace
from .world import plain_environment

# The rest is the command, as the pod's second process.
_INSIDE = """
mount -t tmpfs -o size=4k tmpfs /dev/shm
exec setpriv --no-new-privs --bounding-set=-all --inh-caps=-all "$@"
"""


def in_pod(machine: Namespace, command: Sequence[str]) -> list[str]:
    """A command line that runs another one in a pod of its own; the pod ends with it, whatever was left there."""
    apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return ["ip", "netns", "exec", machine.name, *apart, "sh", "-ec", _INSIDE, "pod", *command]


def start_pod(
    machine: Namespace, command: Sequence[str], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Start one.

    Its environment has no variables of a launcher except the given ones. Its output is written to a file.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            in_pod(machine, command),
            env=plain_environment() | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )


def into_pod(pod: subprocess.Popen[bytes], command: Sequence[str]) -> list[str]:
    """A command line that runs another one in a pod that is there, as a probe is."""
    (first,) = Path(f"/proc/{pod.pid}/task/{pod.pid}/children").read_text().split()
    dropped = ["setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
    return ["nsenter", "--target", first, "--net", "--pid", "--mount", *dropped, *command]
