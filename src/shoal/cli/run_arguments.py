"""The command line of ``shoal run``."""

from __future__ import annotations

import argparse

from . import node_variables
from .agent_program import CODE, FILE, MODULE, PROGRAM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line; what follows the script belongs to the script."""
    parser.allow_abbrev = False
    parser.add_argument(
        "-n",
        "--nproc-per-node",
        type=_count,
        metavar="N",
        dest="agents",
        help=f"agents on this machine ({node_variables.AGENTS}, else as many as it has GPUs, or 1)",
    )
    parser.add_argument("--nnodes", type=int, metavar="K", help=f"machines in the job ({node_variables.NODES}, else 1)")
    parser.add_argument(
        "--node-rank",
        type=int,
        metavar="I",
        help=f"which of them this is: 0 to K - 1 ({node_variables.NODE_RANK} or {node_variables.INDEX}, else 0)",
    )
    parser.add_argument(
        "--rendezvous",
        metavar="HOST:PORT",
        help="where machine 0 is reached, and a free port there; needed for several machines (SHOAL_RENDEZVOUS, or "
        f"{node_variables.HOST} and {node_variables.PORT})",
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
