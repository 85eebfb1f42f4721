"""``shoal run``: start N agents of a script on this machine, as torchrun does, and keep a job alive that can live on.

It sets the variables that torchrun sets, so that a script cannot tell them apart. It exists because torchrun ends every
survivor of one death at once; with ``--on-failure continue`` the others train on. It also passes signals on, marks each
line of output with its rank, and leaves no process behind, even when it is killed itself.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..world.launch import INCARNATION, LOOPBACK, join_address, parse_address
from ..world.meeting import LOST
from ..world.rendezvous import listen
from .agent_output import AgentOutput
from .agent_processes import AgentProcesses

# A process of its own, so that the launcher needs no torch and starts the agents at once, and no thread. torch would
# warn of each client that says something odd, with pages of frames, and anybody may be one: only errors are shown.
# It must be told before it is imported.
SERVE = (
    "import os, sys; os.environ.setdefault('TORCH_CPP_LOG_LEVEL', 'ERROR'); "
    "from shoal.world.rendezvous import serve; serve(int(sys.argv[1]))"
)
TELL = (
    "import os, sys; os.environ.setdefault('TORCH_CPP_LOG_LEVEL', 'ERROR'); "
    "from shoal.world.rendezvous import tell_of_the_end; tell_of_the_end(*sys.argv[1:])"
)


@dataclass(frozen=True)
class Job:
    """What all agents of one job have in common, as far as this machine's launcher knows it."""

    agents_per_node: int
    nodes: int
    node_rank: int
    host: str
    port: int
    name: str
    secret: str | None

    @property
    def size(self) -> int:
        return self.agents_per_node * self.nodes

    def environment(self, local_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of one agent: the launcher's own, and the variables that torchrun sets."""
        rank = self.node_rank * self.agents_per_node + local_rank
        found = {
            **environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.agents_per_node),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.nodes),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_RUN_ID": self.name,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        # It is our address; left there it would tell rank 0 to host a store where the launcher does.
        found.pop("SHOAL_RENDEZVOUS", None)
        found.pop(INCARNATION, None)
        found.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        if self.agents_per_node > 1:
            found.setdefault("OMP_NUM_THREADS", "1")
        if self.secret is not None:
            found["SHOAL_SECRET"] = self.secret
        return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line; what follows the script belongs to the script."""
    parser.allow_abbrev = False
    parser.add_argument(
        "-n", "--nproc-per-node", type=int, required=True, metavar="N", dest="agents", help="agents on this machine"
    )
    parser.add_argument("--nnodes", type=int, default=1, metavar="K", help="machines in the job (1)")
    parser.add_argument("--node-rank", type=int, default=0, metavar="I", help="which of them this is: 0 to K - 1 (0)")
    parser.add_argument(
        "--rendezvous",
        metavar="HOST:PORT",
        help="where machine 0 is reached, and a free port there; needed for several machines (SHOAL_RENDEZVOUS)",
    )
    parser.add_argument(
        "--on-failure",
        choices=["stop", "continue", "restart"],
        default="stop",
        help="when an agent fails: end the others (stop, the default); let them go on (continue); let them go on, and "
        "start it again to take its place, where the script loads and saves a shoal.Checkpoint (restart)",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=3,
        metavar="K",
        help="with restart: how often each agent is started again (3)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="how long agents may take to end after SIGINT or SIGTERM before the next, harder signal (10)",
    )
    parser.add_argument("--no-prefix", action="store_true", help="pass output through, without [rank] before each line")
    parser.add_argument("-m", action="store_true", dest="is_module", help="the script is a module, as in python -m")
    parser.add_argument("script", help="the Python script, or with -m the module, that every agent runs")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")
    rest.required = False  # some versions of argparse would ask for them too where the script is missing


def run(args: argparse.Namespace) -> int:
    """Run the job's agents of this machine; the exit status is described in docs/launching.md."""
    try:
        address = _checked(args)
    except ValueError as error:
        print(f"shoal run: error: {error}", file=sys.stderr)
        return 2
    listener = None
    host, port = address
    if args.node_rank == 0:
        try:
            listener = listen(host, port, os.environ.get("SHOAL_INTERFACE", ""))
        except ValueError as error:
            print(f"shoal run: error: {error}", file=sys.stderr)
            return 2
        except OSError as error:
            print(f"shoal run: error: cannot listen on {join_address(host, port)}: {error.strerror}", file=sys.stderr)
            return 1
        port = listener.getsockname()[1]
    secret = os.environ.get("SHOAL_SECRET") or (secrets.token_hex(32) if args.nnodes == 1 else None)
    name = f"{host}:{port}" if args.nnodes > 1 else secrets.token_hex(8)
    job = Job(args.agents, args.nnodes, args.node_rank, host, port, name, secret)

    output = AgentOutput() if args.agents > 1 and not args.no_prefix else None
    # Unbuffered: lines come when they are printed, and a killed agent's last words are not lost.
    command = [sys.executable, "-u", *(["-m"] if args.is_module else []), args.script, *args.arguments]
    survive, restarts = args.on_failure != "stop", args.max_restarts if args.on_failure == "restart" else 0
    elsewhere = args.nnodes > 1
    with AgentProcesses(output, survive=survive, restarts=restarts, elsewhere=elsewhere, grace=args.grace) as agents:
        if "OMP_NUM_THREADS" not in os.environ and args.agents > 1:
            agents.say("OMP_NUM_THREADS is not set: each agent gets 1 thread")
        defaults = {"SHOAL_ON_LOSS": "continue"} if survive else {}
        for local_rank in range(args.agents):
            environ = job.environment(local_rank, {**defaults, **os.environ})
            rank = int(environ["RANK"])
            agents.start(rank, command, environ, keeps_stdin=rank == 0)
            # Those that have met find out by themselves; those that have not would wait for it.
            agents.tell_of(rank, [sys.executable, "-c", TELL, LOST], environ)
        if listener is not None:
            # The agents may connect already: the kernel lets them in, and they are answered once torch is imported.
            serve = [sys.executable, "-c", SERVE, str(listener.fileno())]
            agents.start_helper("the rendezvous store", serve, listener.fileno())
            listener.close()
        return agents.mind()


def _checked(args: argparse.Namespace) -> tuple[str, int]:
    """Refuse arguments that make no sense; return where to meet (port 0: any)."""
    if args.agents < 1:
        raise ValueError(f"-n {args.agents}: at least one agent must run here")
    if args.nnodes < 1:
        raise ValueError(f"--nnodes {args.nnodes}: there is at least this one machine")
    if not 0 <= args.node_rank < args.nnodes:
        raise ValueError(f"--node-rank {args.node_rank} must be 0 to {args.nnodes - 1} with --nnodes {args.nnodes}")
    if args.max_restarts < 0:
        raise ValueError(f"--max-restarts {args.max_restarts}: 0 or more")
    if args.on_failure == "restart" and args.nnodes > 1 and not os.environ.get("SHOAL_SECRET"):
        raise ValueError(
            "--on-failure restart with --nnodes: set SHOAL_SECRET to the same for all machines; who is started again "
            "proves with it that it belongs to the job"
        )
    if not args.grace >= 0:
        raise ValueError(f"--grace {args.grace}: seconds, zero or more")
    if not args.is_module and not Path(args.script).exists():
        raise ValueError(f"there is no script {args.script!r} in {Path.cwd()} (-m runs a module)")
    if args.rendezvous is not None:
        return parse_address(args.rendezvous, "--rendezvous")
    if os.environ.get("SHOAL_RENDEZVOUS"):
        return parse_address(os.environ["SHOAL_RENDEZVOUS"], "SHOAL_RENDEZVOUS")
    if args.nnodes > 1:
        raise ValueError("--nnodes needs --rendezvous HOST:PORT, where machine 0 is reached, the same on every machine")
    return LOOPBACK, 0
