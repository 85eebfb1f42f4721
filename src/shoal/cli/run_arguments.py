"""The command line of ``shoal run``.

A cluster's controller sets variables for one machine of a job: its number of agents, its index, and the rendezvous.
torchrun takes the defaults of its options from variables that begin with ``PET_``, so Kubeflow sets these in the pods
of a PyTorchJob or a TrainJob. An indexed Job of Kubernetes, and a JobSet, set the index of the pod. ``shoal run`` reads
both. Options on the command line take precedence.

What each agent runs is a script, a module, code, or a program.
"""

from __future__ import annotations

import argparse
import errno
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ..rendezvous.launch import parse_address
from . import agent_script


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line; what follows the script belongs to the script."""
    parser.allow_abbrev = False
    parser.add_argument(
        "-n",
        "--nproc-per-node",
        type=_count,
        metavar="N",
        dest="agents",
        help=f"agents on this machine ({AGENTS}, else as many as it has GPUs, or 1)",
    )
    parser.add_argument("--nnodes", type=int, metavar="K", help=f"machines in the job ({NODES}, else 1)")
    parser.add_argument(
        "--node-rank",
        type=int,
        metavar="I",
        help=f"which of them this is: 0 to K - 1 ({NODE_RANK} or {INDEX}, else 0)",
    )
    parser.add_argument(
        "--rendezvous",
        metavar="HOST:PORT",
        help="where machine 0 is reached, and a free port there; needed for several machines (SHOAL_RENDEZVOUS, or "
        f"{HOST} and {PORT})",
    )
    parser.add_argument(
        "--ports",
        metavar="FIRST-LAST",
        help="the ports on which the agents of this machine listen for other machines, one for each agent: open them "
        "in the firewall (SHOAL_PORTS, else any port)",
    )
    parser.add_argument(
        "--max-agents",
        type=int,
        metavar="M",
        help="the largest number of agents: others may join the running job if the script loads and saves a "
        "shoal.Checkpoint; the command to join is printed at the start. With --on-failure continue "
        "(the default then) or restart",
    )
    parser.add_argument(
        "--join",
        metavar="HOST:PORT",
        help="add N agents to the running job at HOST:PORT, which was started with --max-agents",
    )
    parser.add_argument(
        "--on-failure",
        choices=["stop", "continue", "restart"],
        help="when an agent fails: end the others (stop, the default); let them continue (continue, the default with "
        "--max-agents and --join); let them continue, and restart the failed agent, which rejoins if the script loads "
        "and saves a shoal.Checkpoint (restart). With restart on one machine, a job whose agents have all failed is "
        "restarted from its checkpoint files",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=3,
        metavar="K",
        help="with restart: how often each agent is restarted, and how often the whole job if all agents failed (3)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="how long agents may take to end after SIGINT or SIGTERM before the next, harder signal (10)",
    )
    parser.add_argument(
        "--watch",
        action="store_true",
        help="show the running job on a page on 127.0.0.1; its address, which is secret, is printed",
    )
    parser.add_argument("--watch-port", type=int, default=0, metavar="PORT", help="the port of that page (any)")
    parser.add_argument("--no-prefix", action="store_true", help="pass output through, without [rank] before each line")
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an environment variable of the agents; may be given several times",
    )
    parser.add_argument(
        "--timeline",
        metavar="DIR",
        help="write each agent's trace into this folder, for shoal report (SHOAL_TIMELINE)",
    )
    parser.add_argument(
        "--record", metavar="DIR", help="write the membership log of each agent into this folder (SHOAL_RECORD)"
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "-m",
        action="store_const",
        const=MODULE,
        default=FILE,
        dest="kind",
        help="the script is a module, as in python -m",
    )
    kind.add_argument(
        "-c", action="store_const", const=CODE, dest="kind", help="the script is Python code, as in python -c"
    )
    kind.add_argument(
        "--no-python",
        action="store_const",
        const=PROGRAM,
        dest="kind",
        help="the script is a program, which is run without Python",
    )
    parser.add_argument("script", help="the Python script that every agent runs; - reads it from the standard input")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")
    rest.required = False  # some versions of argparse would ask for them too where the script is missing


def _count(text: str) -> int:
    """The number of agents; ``-np 4``, which other launchers have, is read as ``-n p`` and explained."""
    if text == "p":
        raise argparse.ArgumentTypeError("-np is an option of mpirun: give -n N")
    if text in ("gpu", "cpu", "auto"):
        raise argparse.ArgumentTypeError(f"{text!r} is torchrun's: give a number, or leave -n out for all GPUs")
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}") from None


AGENTS, NODES, NODE_RANK = "PET_NPROC_PER_NODE", "PET_NNODES", "PET_NODE_RANK"
HOST, PORT = "PET_MASTER_ADDR", "PET_MASTER_PORT"
INDEX = "JOB_COMPLETION_INDEX"
GPUS = Path("/proc/driver/nvidia/gpus")
"""A folder of the driver with an entry for each of the machine's GPUs."""


def fill_in(args: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Set those of ``agents``, ``nnodes`` and ``node_rank`` that are None; else it is the first of one machine.

    Raises:
        ValueError: A variable is no number; the message names the option to give instead.
    """
    if args.agents is None:
        args.agents = _count_from(environ, AGENTS, "-n", "how many agents run on this machine")
    if args.agents is None:
        args.agents = gpus(environ) or 1
    if args.nnodes is None:
        args.nnodes = _count_from(environ, NODES, "--nnodes", "how many machines there are, which does not change") or 1
    if args.node_rank is None:
        args.node_rank = _count_from(environ, NODE_RANK, "--node-rank", "which of the machines this is")
    if args.node_rank is None and args.nnodes > 1:  # else the index is a sweep's, whose pods do not meet
        args.node_rank = _count_from(environ, INDEX, "--node-rank", "which of the machines this is")
    args.node_rank = args.node_rank or 0


def gpus(environ: Mapping[str, str]) -> int:
    """How many GPUs a process of this machine may use, without torch: importing it would take seconds."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        return next((at for at, name in enumerate(names) if name in ("", "-1")), len(names))
    return sum(1 for _ in GPUS.glob("*"))


def rendezvous(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """The address of machine 0; None if no variable has it."""
    host, port = environ.get(HOST, "").strip(), environ.get(PORT, "").strip()
    if not (host and port):
        return None
    bracketed = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return parse_address(f"{bracketed}:{port}", f"{HOST}:{PORT}")


def _count_from(environ: Mapping[str, str], name: str, option: str, meaning: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name}={text!r} is no whole number: give {option}, {meaning}")
    return int(text)


FILE, MODULE, CODE, PROGRAM = "script", "-m", "-c", "--no-python"
STDIN = "-"
"""The script that is read from the standard input."""
_PYTHON = re.compile(r"python[\d.]*(\.exe)?")


def words_of(kind: str, script: str, arguments: Sequence[str]) -> list[str]:
    """The part of a command line of ``shoal run`` that says what to run."""
    return [*([] if kind == FILE else [kind]), script, *arguments]


def command_of(kind: str, script: str, arguments: Sequence[str]) -> list[str]:
    """The command of an agent's process."""
    if kind == PROGRAM:
        return [script, *arguments]
    # Unbuffered: lines come when they are printed, and a killed agent's last words are not lost.
    return [sys.executable, "-u", agent_script.__file__, *words_of(kind, script, arguments)]


def why_not_started(program: str, error: OSError) -> str:
    """The reason why the system could not start a program that exists."""
    if error.errno == errno.ENOEXEC:
        return f"{program!r} is no program of this system, and has no #! line that names its interpreter"
    if error.errno == errno.ENOENT:
        return f"{program!r}: there is no interpreter of the name in its #! line"
    return f"{program!r} cannot be started: {error.strerror or error}"


def check_program(kind: str, script: str, arguments: Sequence[str], count: str) -> None:
    """Refuse what cannot be run.

    Raises:
        ValueError: There is no such script or program; the message says what to give instead.
    """
    if kind == PROGRAM and shutil.which(script) is None:
        if Path(script).is_file():
            raise ValueError(f"--no-python: {script!r} is not executable: chmod +x {shlex.quote(script)}")
        raise ValueError(f"--no-python: there is no program {script!r}")
    if kind != FILE or script == STDIN:
        return
    if _PYTHON.fullmatch(Path(script).name) and arguments:
        words = [word for word in arguments if word != "-u"]
        raise ValueError(
            f"each agent runs Python already, so leave {script!r} out: shoal run {count} {shlex.join(words)}"
        )
    if Path(script).exists():
        return
    if shutil.which(script) is not None:
        command = shlex.join([script, *arguments])
        raise ValueError(f"{script!r} is a program and no Python script: shoal run {count} --no-python {command}")
    raise ValueError(f"there is no script {script!r} in {Path.cwd()} (-m runs a module)")


def variables(texts: Iterable[str]) -> dict[str, str]:
    """The variables of ``--env NAME=VALUE``.

    Raises:
        ValueError: A text is of another form.
    """
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ValueError(f"--env {text}: give NAME=VALUE")
        found[name] = value
    return found
