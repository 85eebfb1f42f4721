"""Bootstrap and shutdown of an agent.

``init`` reads rank and size from the environment, finds the other agents through a store, and connects. Only ``init``
uses the store. Afterwards every agent has the addresses and the job's secret, and needs neither the store nor rank 0.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from typing import Any

import networkx as nx

from .. import clock
from .._signals import deferred
from ..coordination.attach import PROCESS_GROUP, BackendOptions, attach_backend, check_backend, check_transport
from ..coordination.ordering import CAPACITY
from ..engine.engine import Engine
from ..engine.stalls import STALL_AFTER
from ..errors import Mismatch, NotInitialized, PeerLost, ShoalError
from ..operations.membership import NEEDED
from ..operations.operation import Operation, Steps
from ..rendezvous.bootstrap_barrier import DIRECTORY, AlreadyMet, gather_agents
from ..rendezvous.launch import BEGIN_WITH, LAUNCHER, Launch, current, join_address
from ..rendezvous.peer_directory import (
    ENDPOINT,
    PeerDirectory,
    add_to_directory,
    directory,
    introduce,
    numbered,
    with_absent,
)
from ..rendezvous.rendezvous import open_store
from ..rendezvous.replicas import among_counterparts, check_that_all_must_live
from ..transport.addresses import parse_ports, ports_of_environment
from ..transport.peer_address import Endpoint, PeerId
from ..transport.tls import certificates_of
from .agent import Agent, AgentContext, Machines, agent_context, process_context
from .exit_notes import write_note
from .queries import set_topology
from .script_end import failure
from .torch_distributed import warn_of_process_group

log = logging.getLogger("shoal")
RAISE, CONTINUE, STOP = "raise", "continue", "stop"
DEFAULT_TIMEOUT = 300.0
ENTRY_TIMEOUT = 3600.0
"""Seconds that a restarted agent waits for admission, until the members reach their next point for it."""
FAREWELL_SECONDS = 10.0
"""Seconds at most that ``shutdown`` waits until other agents have received the messages that they still need."""
_taken: dict[int, AgentContext] = {}
"""The contexts of this process whose agents hold resources, by the ids of the contexts."""
_abandoned: list[Engine] = []
on_start: list[Callable[[Agent], None]] = []
"""Called with every new agent; the timeline and other observers attach themselves here."""
on_stop: list[Callable[[Agent], None]] = []
_ATTACHED = "shoal.observability.observers"
"""The module of these observers, in a higher layer; ``init`` imports it, because callers may not have done so."""


def init(
    topology_fn: Callable[[int], nx.DiGraph] | None = None,
    is_weighted: bool = False,
    *,
    on_loss: str | None = None,
    process_group: Any = None,
    mesh: Any = None,
) -> None:
    """Initialise an agent: find the other agents and connect to them. All agents call it.

    The variables of torchrun, ``shoal run``, Open MPI, PMI, Slurm or Kubernetes determine rank and size. Without any of
    them the job has one agent, with which every operation works. A ``torch.distributed`` that is already initialised is
    left unchanged. A warning is issued if agents are to survive failures, since process groups do not. Called again by
    an agent, ``init`` only sets a given topology, as :func:`~shoal.set_topology` would: not while there are windows.
    After :func:`shutdown` it can initialise an agent again.

    Args:
        topology_fn: Makes the static topology from the number of agents. If not given, it is the exponential graph, or,
            on a repeated call, the current topology.
        is_weighted: Whether to use the weights of that graph's edges; otherwise they are uniform.
        on_loss: The reaction to the loss of an agent: ``"raise"`` :class:`~shoal.PeerLost` in all operations that need
            all agents, or ``"continue"`` without the lost agent where possible (see docs/survival.md). It is the same
            for all agents. If not given, ``SHOAL_ON_LOSS``, else ``"raise"``.
        process_group: A process group of ``torch.distributed``, of all agents, that moves the tensors from now on, such
            as ``torch.distributed.new_group()`` returns. The script must not use it itself in the meantime.
        mesh: A ``DeviceMesh`` of one dimension, the one between replicas that have several processes each, such as
            ``init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))["replicate"]``. This process is
            then an agent among its counterparts, the processes at the same position in the other replicas:
            :func:`~shoal.rank` is the replica's number, :func:`~shoal.size` the number of replicas (docs/sharded.md).

    Environment:
        ``SHOAL_TIMEOUT``: seconds for every wait (300).
        ``SHOAL_TRANSPORT``: ``threads``, ``shared_memory`` or ``network`` for all pairs; or ``process-group``, to have
            tensors moved by process groups of ``torch.distributed`` (docs/coordination.md).
        ``SHOAL_PROCESS_GROUP``, ``SHOAL_CACHE_CAPACITY``: the backend of these groups (``gloo``), and the entries of
            their response cache (1024).
        ``SHOAL_INTERFACE``: the interface or address to listen on between machines.
        ``SHOAL_PORTS``: the ports to listen on there, as ``FIRST-LAST``; each agent takes the first free port. If
            unset, the system picks one.
        ``SHOAL_AGENTS_PER_MACHINE``: group ranks into machines of this many.
        ``SHOAL_SECRET``: the job's secret, the same for all agents; if unset, rank 0 generates one, which any reader of
            the store can read during ``init``.
        ``SHOAL_RENDEZVOUS``: ``host:port`` of the store.
        ``SHOAL_CHECK_FINITE``: 1 to refuse to send NaN and infinity, with :class:`~shoal.NotFinite`.
        ``SHOAL_COMPRESS_LOCALLY``: 1 to send compressed messages within a machine, too, where agents otherwise read
            tensors in place.
        ``SHOAL_DEVICE_MEMORY``: 1 to let agents of a machine read each other's CUDA tensors on their devices
            (docs/devices.md).
        ``SHOAL_TLS``: ``on`` for TLS between machines, with the certificates in the folder ``SHOAL_CERTIFICATES``.
        ``SHOAL_ON_LOSS``: ``raise`` or ``continue``.
        ``SHOAL_DROP_AFTER``: seconds after which an agent that does not answer (stopped, hung, cut off) counts as lost;
            if unset, operations wait for it until their deadlines. An agent that computes answers.
        ``SHOAL_STALL_SECONDS``: seconds (30) after which a waiting call is logged, with the status of the awaited
            agents; ``inf`` for never.
        ``SHOAL_INCARNATION``: how often this agent was restarted while the other agents continued; with more than 0 it
            requests admission.
        ``SHOAL_ENTRY_TIMEOUT``: seconds to wait for admission (3600).
        ``SHOAL_BEGIN_WITH``: the number of agents with which the job begins, if not all; the others may join, each with
            ``SHOAL_INCARNATION=1``.
        ``SHOAL_LAUNCHER``: a name of this machine's launcher, different from that of a replacement launcher.
        ``SHOAL_ON_PARTITION``: with ``on_loss="continue"``, the policy of a partition that may not be the majority: it
            cannot reach at least as many other agents as it has, and these are not known to have ended. ``continue``:
            the smaller partition continues until it reaches the larger one again, and then ends with
            :class:`~shoal.PeerLost`. ``stop``: it ends with that error at once, so that at most one partition
            continues.
        ``SHOAL_RECORD``: a folder in which each agent records the membership.

    Raises:
        DeadlineExceeded: Agents did not come in time; the message names them.
        Mismatch: Agents have different variables, or an agent does not know the secret that another one was given.
        PeerLost: Another agent failed in ``init``; the message has its error. All agents may call ``init`` again.
        NotInitialized: This process was forked from an agent's process.
        ValueError: A variable is invalid.
    """
    import_module(_ATTACHED)
    with deferred:
        _init(agent_context(), topology_fn, is_weighted, on_loss, process_group, mesh)


def _init(
    mine: AgentContext,
    topology_fn: Callable[[int], nx.DiGraph] | None,
    is_weighted: bool,
    on_loss: str | None,
    process_group: Any,
    mesh: Any,
) -> None:
    if mine.agent is not None:
        if on_loss is not None and (_on_loss(on_loss) == CONTINUE) != mine.agent.engine.survives_losses:
            raise ValueError(f"shoal.init(on_loss={on_loss!r}): this agent has begun otherwise; shut down first")
        if process_group is not None and mine.process_group is not process_group:
            raise ValueError("shoal.init(process_group=): this agent has begun without it; shut down first")
        if mesh is not None and among_counterparts(current(), mesh).ranks != mine.agent.launch.ranks:
            raise ValueError("shoal.init(mesh=): this agent has begun among others; shut down first")
        if topology_fn is not None:
            graph = topology_fn(mine.agent.size)
            if not mine.agent.has_topology(graph, is_weighted):
                set_topology(graph, is_weighted)
        return
    if mine.forked_from is not None and mine.forked_from[1] > 1:
        raise NotInitialized(
            f"shoal.init(): this process was forked from that of rank {mine.forked_from[0]}, which keeps its place "
            "among the agents. Agents are started by a launcher, or with multiprocessing's spawn before init()"
        )
    mine.process_group = process_group
    agent = mine.agent = _connect(mine, _on_loss(on_loss), mesh)
    for hook in on_start:
        hook(agent)
    agent.set_topology((topology_fn or _default_graph)(agent.size), is_weighted)
    agent.topology_is_default = topology_fn is None
    warn_of_process_group(agent, stacklevel=5)


def _default_graph(size: int) -> nx.DiGraph:
    from ..topology import ExponentialTwoGraph

    return ExponentialTwoGraph(size)


def shutdown() -> None:
    """End this agent and free all resources. Without an agent it does nothing; ``init`` may be called again afterwards.

    Other agents first receive the messages of this one that they still need, for up to ten seconds.
    """
    leave(agent_context())


def leave(mine: AgentContext, farewell: str = "", died: bool = False) -> None:
    """End the agent of a context. ``died`` notifies the other agents that it did not shut down properly."""
    agent = mine.agent
    if agent is None:
        return
    agent.engine.check_may_close()
    with deferred, contextlib.ExitStack() as last:  # all hooks run, whichever fails
        _free(mine)
        for hook in reversed(on_stop):
            last.callback(hook, agent)
        agent.engine.close(clock.monotonic() + FAREWELL_SECONDS, farewell, died)


def default_timeout() -> float:
    """The timeout of ``SHOAL_TIMEOUT``, in seconds."""
    return _seconds_from_environment("SHOAL_TIMEOUT", DEFAULT_TIMEOUT)


def _agents_per_machine(mine: AgentContext) -> int | None:
    if mine.agents_per_machine is not None:
        return mine.agents_per_machine
    text = os.environ.get("SHOAL_AGENTS_PER_MACHINE", "")
    if not text:
        return None
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"SHOAL_AGENTS_PER_MACHINE={text!r}: it must be a positive integer")
    return int(text)


def _flag_from_environment(variable: str) -> bool:
    text = os.environ.get(variable, "")
    if text not in ("", "0", "1"):
        raise ValueError(f"{variable}={text!r}: it must be 0 or 1")
    return text == "1"


def _seconds_from_environment(variable: str, default: float) -> float:
    text = os.environ.get(variable, "")
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise ValueError(f"{variable}={text!r}: it must be a positive number of seconds")
    return seconds


def _choice_from_environment(variable: str, *values: str) -> str:
    """The value of a variable; the first of the choices if it is not set."""
    text = os.environ.get(variable, "") or values[0]
    if text not in values:
        raise ValueError(f"{variable}={text!r}: it must be {' or '.join(map(repr, values))}")
    return text


def _on_loss(given: str | None) -> str:
    if given is not None and given not in (RAISE, CONTINUE):
        raise ValueError(f"shoal.init(): on_loss={given!r}: it must be {RAISE!r} or {CONTINUE!r}")
    return _choice_from_environment("SHOAL_ON_LOSS", RAISE, CONTINUE) if given is None else given


def _connect(mine: AgentContext, on_loss: str, mesh: Any) -> Agent:
    launch = mine.launch or current()
    if mesh is not None:
        launch = among_counterparts(launch, mesh)
    timeout = mine.timeout if mine.timeout is not None else default_timeout()
    forced = mine.transport or os.environ.get("SHOAL_TRANSPORT", "")
    check_transport(forced, "SHOAL_TRANSPORT")
    per_machine = _agents_per_machine(mine)
    deadline = clock.monotonic() + timeout
    on_partition = _choice_from_environment("SHOAL_ON_PARTITION", CONTINUE, STOP)
    finite, locally = _flag_from_environment("SHOAL_CHECK_FINITE"), _flag_from_environment("SHOAL_COMPRESS_LOCALLY")
    on_devices = _flag_from_environment("SHOAL_DEVICE_MEMORY")
    wanted = _process_group(mine, launch, forced)
    forced = "" if forced == PROCESS_GROUP else forced
    drop_after = _seconds_from_environment("SHOAL_DROP_AFTER", float("inf"))
    stall_seconds = _seconds_from_environment("SHOAL_STALL_SECONDS", STALL_AFTER)
    parse_ports(*ports_of_environment())
    certificates = certificates_of(launch.rank)
    check_that_all_must_live(launch, on_loss == CONTINUE, certificates is not None)
    _check_room(mine, launch, on_loss)
    launch, of_launcher = _numbered(mine, launch, on_loss, deadline)
    mine.engine = engine = Engine(launch.rank, launch.size, timeout, launch.incarnation)
    engine.rejoin.extend_timeout(_seconds_from_environment("SHOAL_ENTRY_TIMEOUT", ENTRY_TIMEOUT))
    engine.publisher.finite, engine.compresses_locally, engine.devices.wanted = finite, locally, on_devices
    engine.watchdog.drop_after, engine.stalls.after = drop_after, stall_seconds
    engine.router.certificates = certificates
    if on_loss == CONTINUE:
        engine.survive_losses(on_partition == STOP)
    _taken[id(mine)] = mine
    try:
        alike = {"SHOAL_AGENTS_PER_MACHINE": per_machine, "SHOAL_TLS": "on" if certificates else "off"}
        alike |= {"on_loss": on_loss, "SHOAL_ON_PARTITION": on_partition}
        alike |= {"SHOAL_TRANSPORT=process-group": wanted is not None, **(wanted.alike if wanted is not None else {})}
        alike |= {"WORLD_SIZE": launch.size, BEGIN_WITH: launch.begins}
        said = {"place": asdict(engine.router.place), "alike": alike, **of_launcher}
        try:
            if launch.joins:
                raise AlreadyMet
            if launch.begins < launch.size:
                engine.begin_without(tuple(range(launch.begins, launch.size)))
            comes_back = launch.incarnation > 0 and not mine.has_met and bool(os.environ.get("SHOAL_SECRET"))
            with gather_agents(mine.store, launch, deadline, said, comes_back) as (meeting, found):
                _check_agreement(found, alike)
                endpoint = _listen(engine, launch, forced, with_absent(found, launch.size))
                met = introduce(meeting, launch, found, endpoint)
                meeting.end()
                engine.router.meet(met.endpoints, met.key, met.is_private)
                if wanted is not None:
                    attach_backend(engine, wanted)
                if mine is not process_context():  # all earlier threads belong to others in a fleet
                    engine.deadlocks.bystanders.update(threading.enumerate())
                engine.start()
                agent = Agent(engine, _machines(met.places, per_machine, launch), launch)
                _await_links(agent, deadline)
                meeting.forget(ENDPOINT)
                if on_loss == CONTINUE and met.is_private and launch.store_is_served:
                    meeting.store.set(DIRECTORY, met.written())
                # No agent continues before the store is closed: init_process_group may need its port.
            _await_all(agent, deadline)
        except AlreadyMet:
            agent = _rejoin(engine, launch, forced, per_machine, said, deadline, wanted)
    except BaseException:
        _free(mine)
        engine.close(clock.monotonic() + 1.0, died=True)
        raise
    mine.has_met = True
    return agent


def _numbered(mine: AgentContext, launch: Launch, on_loss: str, deadline: float) -> tuple[Launch, dict[str, Any]]:
    """The launch and the data to publish, from :func:`~.peer_directory.numbered` if a launcher may be replaced."""
    may_be = launch.store_is_served and not launch.joins and not mine.has_met and mine.store is None
    if not (may_be and on_loss == CONTINUE and os.environ.get(LAUNCHER) and os.environ.get("SHOAL_SECRET")):
        return launch, {}
    with contextlib.closing(open_store(launch, deadline)) as store:
        return numbered(store, launch, deadline)


def _process_group(mine: AgentContext, launch: Launch, forced: str) -> BackendOptions | None:
    """The options of the backend that moves tensors; None if links move them."""
    given = mine.process_group
    if (forced != PROCESS_GROUP and given is None) or launch.size == 1:
        return None
    text = os.environ.get("SHOAL_CACHE_CAPACITY", "") or str(CAPACITY)
    if not text.isdecimal():
        raise ValueError(f"SHOAL_CACHE_CAPACITY={text!r}: it must be a number of entries, or 0 for no cache")
    backend = check_backend(os.environ.get("SHOAL_PROCESS_GROUP", "") or "gloo", given, launch.size, launch.rank)
    return BackendOptions(backend, int(text), given)


def _listen(engine: Engine, launch: Launch, forced: str, found: list[dict[str, Any]]) -> Endpoint:
    interface, reached = os.environ.get("SHOAL_INTERFACE", ""), [one["reached"] for one in found]
    places = [PeerId(**one["place"]) for one in found]
    ports = parse_ports(*ports_of_environment())
    return engine.router.listen(places, forced, interface, launch.host or "", reached, ports)


def _rejoin(
    engine: Engine,
    launch: Launch,
    forced: str,
    per_machine: int | None,
    said: dict[str, Any],
    deadline: float,
    wanted: BackendOptions | None,
) -> Agent:
    """Create an agent that waits for admission, because the other agents run already."""
    with contextlib.closing(open_store(launch, deadline)) as store:
        met = directory(store, launch, deadline)
        _check_agreement(met.said, said["alike"])
        met.said[launch.rank] = {**said, "reached": store.address}
        endpoint = _listen(engine, launch, forced, met.said)
        met.reached_from[launch.rank] = {"endpoint": asdict(endpoint)}
        _check_reachable(engine, launch, met)
        engine.router.meet(met.endpoints, met.key, met.is_private)
        add_to_directory(store, launch, met)
    if wanted is not None:
        attach_backend(engine, wanted)
    engine.start()
    with engine.lock:
        engine.rejoin.begin_waiting()
    log.warning("rank %d comes later: until it loads its shoal.Checkpoint it exchanges with nobody", launch.rank)
    return Agent(engine, _machines(met.places, per_machine, launch), launch)


def _free(mine: AgentContext) -> None:
    mine.agent = mine.engine = None
    _taken.pop(id(mine), None)


def _await_links(agent: Agent, deadline: float) -> None:
    """Wait for all connections. Each agent then has a link to rank + 1, so notices of a loss reach all agents."""
    from ..engine.discovery import discover, submit_to_all

    def steps(operation: Operation) -> Steps[list[int]]:
        return discover(agent.engine, operation, ())

    rest = max(1.0, deadline - clock.monotonic())
    submit_to_all(agent.engine, "init", "~init", steps, rest, alone=False).wait()


def _await_all(agent: Agent, deadline: float) -> None:
    """Wait until all agents have come this far, as the last step of ``init``.

    An agent that has shut down since has passed this step, which shows that all agents have come. So ``init`` succeeds
    on all agents, and the next operation that needs the departed agent raises :class:`PeerLost`.
    """
    try:
        _await_links(agent, deadline)
    except PeerLost as lost:
        view = agent.engine.view
        if any(rank not in view.left and view.died.get(rank) != NEEDED for rank in lost.ranks):
            raise


def _check_agreement(found: list[dict[str, Any]], alike: dict[str, Any]) -> None:
    for name, value in alike.items():
        others = [rank for rank, one in enumerate(found) if "alike" in one and one["alike"].get(name) != value]
        if others:
            there = found[others[0]]["alike"].get(name)
            raise Mismatch(
                f"{name} is {value} here and {there} on ranks {others}; set it to one value for all agents", others
            )


def _check_room(mine: AgentContext, launch: Launch, on_loss: str) -> None:
    """Refuse a job that other agents may join, if its settings allow no joining."""
    if launch.begins == launch.size:
        return
    what = f"{BEGIN_WITH}={launch.begins} of {launch.size} agents, so others may join"
    if on_loss != CONTINUE:
        raise ValueError(f"{what}, and with on_loss={on_loss!r} nobody could: set SHOAL_ON_LOSS=continue")
    if not os.environ.get("SHOAL_SECRET"):
        raise ValueError(f"{what}: they prove with SHOAL_SECRET that they belong to the job; set it for all agents")
    if not launch.store_is_served:
        raise ValueError(
            f"{what}: they look for the others in a store that stays, as `shoal run --max-agents` serves one"
        )
    if launch.joins and mine.has_met:
        raise ShoalError(
            f"shoal.init(): rank {launch.rank} joined a run, and has left it; a new process can join again", ()
        )


def _check_reachable(engine: Engine, launch: Launch, met: PeerDirectory) -> None:
    """Refuse to wait for agents that listen only for processes of their own machine and user."""
    known = [place.rank for place in met.places if place.known and place.rank != launch.rank]
    far = [rank for rank in known if engine.transport_to(rank) == "network" and not met.endpoints[rank].port]
    if far:
        raise ValueError(
            f"shoal.init(): rank {launch.rank} on {engine.router.place.host} cannot reach ranks {far} on "
            f"{met.places[far[0]].host}, which listen for agents of their own machine and user only, since they met at "
            f"{join_address(launch.host, launch.port)}. Start the run at a --rendezvous that other machines reach, or "
            "with SHOAL_INTERFACE"
        )


def _machines(places: list[PeerId], per_machine: int | None, launch: Launch) -> Machines | None:
    if per_machine is not None:
        return Machines(tuple(rank // per_machine for rank in range(len(places))))
    if launch.begins < launch.size:
        return None
    known: dict[tuple[str, int, int], int] = {}
    return Machines(tuple(known.setdefault(place.machine, len(known)) for place in places))


def _at_exit() -> None:
    failed = failure()
    # Before the shutdown message: other agents may fail because of it, and the launcher must know the first failure by
    # then.
    write_note(*((failed.is_peer_loss, failed.awaited) if failed is not None else (False,)))
    try:
        leave(process_context(), failed.text if failed is not None else "its process ended", died=failed is not None)
    except Exception:
        log.exception("leaving at the end of the process failed")


atexit.register(_at_exit)


def _in_child() -> None:
    """Detach a forked child from the agent: its copies of the sockets must not hide the end of the parent.

    The engines are kept unchanged. Their sockets and locks belong to threads that do not exist in the child. The
    numbers of their descriptors belong to files that the child opens next.
    """
    for mine in _taken.values():
        engine = mine.engine
        if engine is not None:
            mine.agent, mine.engine, mine.forked_from = None, None, (engine.rank, engine.size)
            engine.abandon_in_child()
            _abandoned.append(engine)
    _taken.clear()


os.register_at_fork(after_in_child=_in_child)
