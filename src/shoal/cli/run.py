"""``shoal run``: start N agents of a script on this machine, as torchrun does, and keep a job running despite failures.

It sets the same variables as torchrun, so scripts work unchanged. It exists because torchrun ends all agents when one
fails; with ``--on-failure continue`` the others keep training. It also forwards signals, marks each line of output with
its rank, and leaves no process behind, even when it is killed itself. With ``--join`` it claims ranks of a running job
in that job's store, and starts agents that join it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from .. import config
from ..config import BEGIN_WITH, INCARNATION, LAUNCHER, WATCH
from ..observability.watch.live import Watch, print_message
from ..rendezvous.bootstrap_barrier import LOST
from ..rendezvous.elastic_join import JOIN_SECONDS, Invitation, keep_secret
from ..rendezvous.launch import LOOPBACK, join_address, parse_address
from ..rendezvous.rendezvous import listen
from ..transport.addresses import parse_ports
from . import run_arguments
from .agent_output import AgentOutput
from .agent_processes import AgentProcesses, FailureHandling, JobExit
from .launcher_signals import Signals
from .run_arguments import CODE, FILE, STDIN, check_program, command_of, variables, why_not_started, words_of
from .run_arguments import add_arguments as add_arguments
from .watch import check_between_machines, is_this_machine, listen_for_joining, watch_of, watch_of_joining

# Processes of their own, so that the launcher needs no torch and starts the agents at once, and no thread. torch would
# warn of each client that sends malformed data, with pages of frames, and any process can: only errors are shown.
# This must be set before torch is imported.
_FROM = "import os, sys; os.environ.setdefault('TORCH_CPP_LOG_LEVEL', 'ERROR'); from shoal.rendezvous."
SERVE = f"{_FROM}rendezvous import serve; serve(int(sys.argv[1]), *sys.argv[2:])"
PUBLISH_END = f"{_FROM}rendezvous import publish_end; publish_end(*sys.argv[1:])"
CLAIM = f"{_FROM}elastic_join import main; main(sys.argv[1:])"
CLAIM_START_SECONDS = 60.0
"""How long the process that claims ranks may take to start."""
LONGEST_PAUSE = 30.0
"""Seconds before all agents are begun with again, at most."""


@dataclass(frozen=True)
class LaunchedJob:
    """The common data of all agents in one run of a job, as known to this machine's launcher."""

    agents_per_node: int
    nodes: int
    node_rank: int
    host: str
    port: int
    name: str
    secret: str | None
    invitation: Invitation | None = None
    joins_at: int | None = None
    """The first rank of these agents, if they join a running job."""
    attempt: int = 0
    """How often the job has been begun again."""
    attempts: int = 0
    """How often it may be."""
    watch: str = ""
    """The socket for its agents' status; empty without a watch."""
    launcher: str = field(default_factory=functools.partial(secrets.token_hex, 8))
    """A name of this machine's launcher; its replacement has another."""

    @property
    def size(self) -> int:
        return self.invitation.size if self.invitation is not None else self.agents_per_node * self.nodes

    def environment(self, local_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of one agent: the launcher's own, and the variables that torchrun sets."""
        first = self.node_rank * self.agents_per_node if self.joins_at is None else self.joins_at
        rank = first + local_rank
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
            "TORCHELASTIC_RESTART_COUNT": str(self.attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(self.attempts),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        # It is the launcher's address; if it stayed, rank 0 would host a store at the launcher's port.
        found.pop("SHOAL_RENDEZVOUS", None)
        found.pop(INCARNATION, None)
        found.pop(BEGIN_WITH, None)
        found.pop(WATCH, None)
        if self.watch:
            found[WATCH] = self.watch
        found.pop(LAUNCHER, None)
        if self.nodes > 1:
            found[LAUNCHER] = self.launcher
        if self.invitation is not None:
            found[BEGIN_WITH] = str(self.invitation.begins)
        if self.joins_at is not None:
            found[INCARNATION] = "1"
        found.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        if self.agents_per_node > 1:
            found.setdefault("OMP_NUM_THREADS", "1")
        if self.secret is not None:
            found["SHOAL_SECRET"] = self.secret
        return found


def run(args: argparse.Namespace) -> int:
    """Run the job's agents of this machine; the exit status is described in docs/launching.md."""
    try:
        host, port = _checked(args)
    except ValueError as error:
        return _refused(error, 2)
    if args.script == STDIN and args.kind == FILE:
        args.kind, args.script = CODE, sys.stdin.read()
    return _join(args, host, port) if args.join is not None else _begin(args, host, port)


def _begin(args: argparse.Namespace, host: str, port: int) -> int:
    """Run agents that begin together; restart all of them if none is left, up to the allowed number of restarts."""
    # Whether agents are left on other machines, no launcher knows.
    attempts = args.max_restarts if args.on_failure == "restart" and args.nnodes == 1 else 0
    with contextlib.ExitStack() as last:
        signals = last.enter_context(Signals())
        watch = None
        if args.watch:
            try:
                watch = last.enter_context(watch_of(args, host, port))
            except OSError as error:
                return _refused(f"--watch: {error.strerror or error}", 1)
            except ValueError as error:
                return _refused(f"--watch: {error}", 2)
        ending = _begin_once(args, host, port, 0, attempts, signals, watch)
        for attempt in range(1, attempts + 1):
            if not ending.all_gone:
                break
            stopped = _pause_before(attempt, attempts, signals, watch)
            if stopped is not None:
                return 128 + stopped
            if watch is not None:
                watch.begin_again(attempt)
            ending = _begin_once(args, host, port, attempt, attempts, signals, watch)
        if watch is not None:
            watch.end(f"the run has ended, with status {ending.status}")
    return ending.status


def _begin_once(
    args: argparse.Namespace,
    host: str,
    port: int,
    attempt: int,
    attempts: int,
    signals: Signals,
    watch: Watch | None,
) -> JobExit:
    """One run, in which nothing is of the one before it: it has its own store, name and secret."""
    with contextlib.ExitStack() as last:
        listener = None
        if args.node_rank == 0:
            try:
                listener = last.enter_context(listen(host, port, config.read().interface))
            except ValueError as error:
                return JobExit(_refused(error, 2))
            except OSError as error:
                return JobExit(_refused(f"cannot listen on {join_address(host, port)}: {error.strerror}", 1))
            port = listener.getsockname()[1]
        secret = config.read().secret or (secrets.token_hex(32) if args.nnodes == 1 else None)
        name = f"{host}:{port}" if args.nnodes > 1 else secrets.token_hex(8)
        invitation, how, text = None, "", ""
        if args.max_agents is not None and secret is not None:
            kept = keep_secret(secret)
            last.callback(os.close, kept)
            invitation = Invitation(name, args.max_agents, args.agents * args.nnodes, os.getpid(), kept, attempt)
            try:
                invitation = replace(
                    invitation, watch_port=listen_for_joining(watch, invitation, secret, host, port, args.nnodes)
                )
            except OSError as error:
                return JobExit(_refused(f"--watch: cannot listen for launchers that join: {error.strerror}", 1))
            text, how = invitation.written(secret), _how_to_join(args, invitation, host, port)
        nodes = args.agents, args.nnodes, args.node_rank
        path = watch.path if watch is not None else ""
        job = LaunchedJob(*nodes, host, port, name, secret, invitation, attempt=attempt, attempts=attempts, watch=path)
        elsewhere = _beyond if args.nnodes > 1 else _have_joined(invitation, host, port)
        return _run_agents(args, job, signals, elsewhere, watch, listener, text, how if listener is not None else "")


def _pause_before(attempt: int, attempts: int, signals: Signals, watch: Watch | None) -> signal.Signals | None:
    """Say that the job restarts, and wait: not the first time, then 1 s, 2 s, 4 s ..., as what ended it may need
    time to pass, and a job that ends at once shall not use up many attempts in a moment. The signal that forbids it."""
    seconds = min(2.0 ** (attempt - 2), LONGEST_PAUSE) if attempt > 1 else 0.0
    limit = time.monotonic() + seconds
    received = signals.read()
    if not _stopping(received):
        when = f" in {seconds:g} s" if seconds else ""
        print_message(f"all agents failed; restarting the job{when} ({attempt} of {attempts})")
    while True:
        stopping = _stopping(received)
        if stopping is not None:
            print_message(f"{stopping.name}: the job is not restarted")
            return stopping
        if signal.SIGTSTP in received:
            os.kill(os.getpid(), signal.SIGSTOP)
        if time.monotonic() >= limit:
            return None
        if watch is not None:
            watch.serve()
        received = signals.wait(min(limit, watch.due if watch is not None else limit) - time.monotonic())


def _stopping(received: list[signal.Signals]) -> signal.Signals | None:
    """The first of these after which nothing is begun."""
    return next((signum for signum in received if signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)), None)


def _beyond() -> bool:
    """There are agents that this launcher does not see."""
    return True


def _have_joined(invitation: Invitation | None, host: str, port: int) -> Callable[[], bool]:
    """Whether agents of other launchers may have joined this run. After a result of False none can join any more."""

    @functools.cache
    def have_joined() -> bool:
        if invitation is None or invitation.size == invitation.begins:
            return False
        try:
            # All spare ranks: the claim is granted only if no launcher has claimed any.
            claim(host, port, invitation.size - invitation.begins)
        except ValueError:
            return True
        return False

    return have_joined


@dataclass(frozen=True)
class ClaimedRanks:
    """Ranks of a running job, from ``first`` on."""

    invitation: Invitation
    secret: str
    first: int


def claim(host: str, port: int, agents: int) -> ClaimedRanks:
    """Claim so many ranks of the job whose store is there.

    Raises:
        ValueError: The job has no ranks to give; the message has the reason.
    """
    command = [sys.executable, "-c", CLAIM, host, str(port), str(agents)]
    limit = JOIN_SECONDS + CLAIM_START_SECONDS
    try:
        done = subprocess.run(
            command, env=os.environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit
        )
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise ValueError(f"the store there did not answer within {limit:g} s") from None
    except json.JSONDecodeError:
        raise ValueError(f"asking the store there failed:\n{done.stderr}") from None
    if "error" in answer:
        raise ValueError(answer["error"])
    return ClaimedRanks(Invitation(**answer["invitation"]), answer["secret"], int(answer["first"]))


def _join(args: argparse.Namespace, host: str, port: int) -> int:
    """Run agents that join a running job."""
    try:
        claimed = claim(host, port, args.agents)
    except ValueError as error:
        return _refused(f"--join {args.join}: {error}", 1)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    invitation, last = claimed.invitation, claimed.first + args.agents - 1
    ranks = f"rank {last}" if args.agents == 1 else f"ranks {claimed.first} to {last}"
    job = LaunchedJob(
        args.agents, 1, 0, host, port, invitation.name, claimed.secret, invitation, claimed.first, invitation.attempt
    )
    with Signals() as signals, contextlib.ExitStack() as parts:
        watch = watch_of_joining(invitation, claimed.secret, host, args.agents)
        if watch is not None:
            job = replace(job, watch=parts.enter_context(watch).path)
        says = f"joining the run at {args.join} as {ranks} of {invitation.size}"
        return _run_agents(args, job, signals, _beyond, watch, says=says).status


def serve_store(agents: AgentProcesses, listener: socket.socket, *invitation: str) -> None:
    """Serve the rendezvous store at a listening socket, from a process of its own.

    ``invitation`` is the argument of :data:`SERVE`, or left out. The agents may connect already: the kernel accepts
    their connections until that process serves them.
    """
    command = [sys.executable, "-c", SERVE, str(listener.fileno()), *invitation]
    loss = "agents can no longer find each other"
    agents.start_helper("the rendezvous store", command, listener.fileno(), loss=loss)
    listener.close()


def _run_agents(
    args: argparse.Namespace,
    job: LaunchedJob,
    signals: Signals,
    elsewhere: Callable[[], bool],
    watch: Watch | None,
    listener: socket.socket | None = None,
    invitation: str = "",
    says: str = "",
) -> JobExit:
    """Start the agents, supervise them until they end, and serve the store if it is to be here."""
    output = AgentOutput() if args.agents > 1 and not args.no_prefix else None
    command = command_of(args.kind, args.script, args.arguments)
    survive, restarts = args.on_failure != "stop", args.max_restarts if args.on_failure == "restart" else 0
    failures = FailureHandling(survive, args.grace, restarts)
    with AgentProcesses(output, signals, failures, elsewhere, watch) as agents:
        if "OMP_NUM_THREADS" not in os.environ and args.agents > 1 and not job.attempt:
            agents.print("OMP_NUM_THREADS is not set: each agent gets 1 thread")
        if says:
            agents.print(says)
        if watch is not None and watch.address and not job.attempt:
            agents.print(f"watch the run at {watch.address}")
        defaults = {"SHOAL_ON_LOSS": "continue"} if survive else {}
        options = {"SHOAL_PORTS": args.ports, "SHOAL_TIMELINE": args.timeline, "SHOAL_RECORD": args.record}
        given = variables(args.env) | {name: value for name, value in options.items() if value is not None}
        for local_rank in range(args.agents):
            environ = job.environment(local_rank, {**defaults, **os.environ, **given})
            rank = int(environ["RANK"])
            try:
                agents.start(rank, command, environ, keeps_stdin=local_rank == 0 and args.node_rank == 0)
            except OSError as error:
                return JobExit(_refused(why_not_started(command[0], error), 1))
            if job.joins_at is None:  # no agent waits for joining agents to meet
                # Agents that have met detect the loss by themselves; agents that have not would wait.
                agents.run_on_end(rank, [sys.executable, "-c", PUBLISH_END, LOST], environ)
        if listener is not None:
            serve_store(agents, listener, invitation)
        ending = agents.supervise()
        if ending.summary and not (ending.all_gone and job.attempt < job.attempts):
            agents.print(ending.summary)
        return ending


def _how_to_join(args: argparse.Namespace, invitation: Invitation, host: str, port: int) -> str:
    """The message to the user about a run that others may join."""
    more = invitation.size - invitation.begins
    if not more:
        return ""
    here = is_this_machine(host) or not config.read().secret
    where = "on this machine, by this user" if here else "on other machines with the same SHOAL_SECRET"
    script = shlex.join(words_of(args.kind, args.script, args.arguments))
    return f"{more} more may join, {where}: shoal run --join {join_address(host, port)} -n K {script}"


def _refused(why: object, status: int) -> int:
    print(f"shoal run: error: {why}", file=sys.stderr)
    return status


def _checked(args: argparse.Namespace) -> tuple[str, int]:
    """Refuse invalid arguments; return where to meet (port 0: any)."""
    if args.join is not None:
        others = {"--nnodes": args.nnodes, "--node-rank": args.node_rank, "--rendezvous": args.rendezvous}
        others["--max-agents"] = args.max_agents
        for option in (option for option, given in others.items() if given is not None):
            raise ValueError(f"--join with {option}: the run that is joined sets it; leave {option} out")
        run_arguments.fill_in(args, {run_arguments.AGENTS: os.environ.get(run_arguments.AGENTS, "")})
    else:
        run_arguments.fill_in(args, os.environ)
    if args.agents < 1:
        raise ValueError(f"-n {args.agents}: at least one agent must run here")
    if args.nnodes < 1:
        raise ValueError(f"--nnodes {args.nnodes}: it must be 1 or more")
    if not 0 <= args.node_rank < args.nnodes:
        raise ValueError(f"--node-rank {args.node_rank} must be 0 to {args.nnodes - 1} with --nnodes {args.nnodes}")
    ports = parse_ports(*(("--ports", args.ports) if args.ports is not None else ("SHOAL_PORTS", config.read().ports)))
    if 0 not in ports and len(ports) < args.agents:
        raise ValueError(f"{len(ports)} ports for {args.agents} agents of this machine: each needs one of its own")
    growing = args.max_agents is not None or args.join is not None
    if growing and args.on_failure == "stop":
        grown = "--join" if args.join is not None else "--max-agents"
        raise ValueError(
            f"{grown} with --on-failure stop: the end of one agent would end all; choose continue or restart"
        )
    args.on_failure = args.on_failure or ("continue" if growing else "stop")
    begins = args.agents * args.nnodes
    if args.max_agents is not None and args.max_agents < begins:
        raise ValueError(
            f"--max-agents {args.max_agents}: it must be at least {begins}, the number of agents at the start"
        )
    if args.max_restarts < 0:
        raise ValueError(f"--max-restarts {args.max_restarts}: 0 or more")
    later = "--on-failure restart" if args.on_failure == "restart" else "--max-agents" if growing else ""
    if later and args.nnodes > 1 and not config.read().secret:
        raise ValueError(
            f"{later} with --nnodes: set SHOAL_SECRET to the same for all machines; agents that start later "
            "authenticate with it"
        )
    if not 0 <= args.watch_port < 1 << 16:
        raise ValueError(f"--watch-port {args.watch_port}: a port, or 0 for any that is free")
    if args.watch and args.nnodes > 1:
        check_between_machines()
    if args.watch and args.join is not None:
        raise ValueError("--join with --watch: the run that is joined has its own page; leave --watch out")
    if not args.grace >= 0:
        raise ValueError(f"--grace {args.grace}: seconds, zero or more")
    check_program(args.kind, args.script, args.arguments, f"-n {args.agents}")
    variables(args.env)
    if args.join is not None:
        return parse_address(args.join, "--join")
    if args.rendezvous is not None:
        return parse_address(args.rendezvous, "--rendezvous")
    if config.read().rendezvous:
        return parse_address(config.read().rendezvous, "SHOAL_RENDEZVOUS")
    if args.nnodes > 1:
        found = run_arguments.rendezvous(os.environ)
        if found is not None:
            return found
        raise ValueError("--nnodes needs --rendezvous HOST:PORT, where machine 0 is reached, the same on every machine")
    return LOOPBACK, 0
