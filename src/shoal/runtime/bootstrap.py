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
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from importlib import import_module
from typing import Any

import networkx as nx

from .. import clock
from .._signals import deferred
from ..config import BEGIN_WITH, CONTINUE, RAISE, STOP, Config, misspelled, read
from ..coordination.attach import PROCESS_GROUP, BackendOptions, attach_backend, check_backend, check_transport
from ..engine.discovery import discover, submit_to_all
from ..engine.engine import Engine
from ..errors import Mismatch, NotInitialized, PeerLost, ShoalError
from ..execution.membership import NEEDED
from ..execution.operation import Handle, Operation
from ..execution.stage import Steps
from ..fault_tolerance.launcher_notes import write_note
from ..rendezvous.bootstrap_barrier import DIRECTORY, STORE_CHECK_SECONDS, AlreadyMet, BootstrapBarrier, gather_agents
from ..rendezvous.launch import Launch, among_counterparts, check_that_all_must_live, current, join_address
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
from ..transport.addresses import parse_ports
from ..transport.peer_address import Endpoint, PeerId
from ..transport.tls import certificates_of
from .agent import (
    Agent,
    AgentContext,
    Machines,
    agent_context,
    fleet_runs,
    process_context,
    warn_of_process_group,
)
from .queries import set_topology
from .script_end import failure

log = logging.getLogger("shoal")
FAREWELL_SECONDS = 10.0
"""Seconds at most that ``shutdown`` waits until other agents have received the messages that they still need."""
_taken: dict[int, AgentContext] = {}
"""The contexts of this process whose agents hold resources, by the ids of the contexts."""
_abandoned: list[Engine] = []


def _observe(module: str, call: str, agent: Agent) -> None:
    # By name, because the observers are in a higher layer.
    getattr(import_module(f"shoal.observability.{module}"), call)(agent)


_OBSERVERS = ("membership_log", "status_publisher", "timeline")
on_start: list[Callable[[Agent], None]] = [partial(_observe, module, "attach") for module in _OBSERVERS]
"""Called with every new agent."""
on_stop: list[Callable[[Agent], None]] = [partial(_observe, module, "detach") for module in _OBSERVERS]
"""Called with every agent that shuts down."""


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
        Variables set everything else: deadlines, transports, ports, the secret, and the reaction to failures.
        :mod:`shoal.config` and docs/environment.md list them.

    Raises:
        DeadlineExceeded: Agents did not come in time; the message names them.
        Mismatch: Agents have different variables, or an agent does not know the secret that another one was given.
        PeerLost: Another agent failed in ``init``; the message has its error. All agents may call ``init`` again.
        NotInitialized: This process was forked from an agent's process.
        ValueError: A variable is invalid.
    """
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
    if topology_fn is not None and not callable(topology_fn):
        raise TypeError(
            f"shoal.init(topology_fn=): a function that takes the number of agents and returns a graph, such as "
            f"shoal.topology.RingGraph, and not a {type(topology_fn).__name__}; shoal.set_topology takes a graph"
        )
    if on_loss is not None and on_loss not in (RAISE, CONTINUE):
        raise ValueError(f"shoal.init(): on_loss={on_loss!r}: it must be {RAISE!r} or {CONTINUE!r}")
    if mine.agent is not None:
        if on_loss is not None and (on_loss == CONTINUE) != mine.agent.engine.survives_losses:
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
    if mine is process_context() and fleet_runs:
        warnings.warn(
            "shoal.init() in a thread of a process in which a Fleet runs: the process becomes an agent of its own. A "
            "thread of one of the fleet's agents is bound to that agent instead: "
            "threading.Thread(target=shoal.Fleet.bind(function))",
            stacklevel=3,
        )
    mine.process_group = process_group
    agent = mine.agent = _connect(mine, read(), on_loss, mesh)
    for hook in on_start:
        hook(agent)
    agent.set_topology((topology_fn or _default_graph)(agent.size), is_weighted)
    agent.topology_is_default = topology_fn is None
    warn_of_process_group(agent, stacklevel=4)
    if mine is process_context() and agent.rank == 0:
        for name, variable in misspelled().items():
            warnings.warn(f"shoal.init(): {name} has no effect; did you mean {variable}?", stacklevel=3)


def _default_graph(size: int) -> nx.DiGraph:
    from ..topology import ExponentialTwoGraph

    return ExponentialTwoGraph(size)


def shutdown() -> None:
    """End this agent and free all resources. Without an agent it does nothing; ``init`` may be called again afterwards.

    It first delivers its messages that other agents wait for, for up to ten seconds.
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


def _connect(mine: AgentContext, config: Config, on_loss: str | None, mesh: Any) -> Agent:
    on_loss = on_loss or config.on_loss
    launch = mine.launch or current()
    if mesh is not None:
        launch = among_counterparts(launch, mesh)
    timeout = config.timeout if mine.timeout is None else mine.timeout
    forced = mine.transport or config.transport
    check_transport(forced, "SHOAL_TRANSPORT")
    per_machine = config.agents_per_machine if mine.agents_per_machine is None else mine.agents_per_machine
    deadline = clock.monotonic() + timeout
    wanted = _process_group(mine, config, launch, forced)
    forced = "" if forced == PROCESS_GROUP else forced
    parse_ports("SHOAL_PORTS", config.ports)
    certificates = certificates_of(launch.rank, config)
    check_that_all_must_live(launch, on_loss == CONTINUE, certificates is not None)
    _check_room(mine, config, launch, on_loss)
    launch, of_launcher = _numbered(mine, config, launch, on_loss, deadline)
    mine.engine = engine = Engine(launch.rank, launch.size, timeout, launch.incarnation)
    engine.configure(config, certificates)
    if on_loss == CONTINUE:
        engine.survive_losses(config.on_partition == STOP)
    _taken[id(mine)] = mine
    with _ended_if_failed(mine, engine):
        alike = {"SHOAL_AGENTS_PER_MACHINE": per_machine, "SHOAL_TLS": "on" if certificates else "off"}
        alike |= {"on_loss": on_loss, "SHOAL_ON_PARTITION": config.on_partition}
        alike |= {"SHOAL_TRANSPORT=process-group": wanted is not None, **(wanted.alike if wanted is not None else {})}
        alike |= {"WORLD_SIZE": launch.size, BEGIN_WITH: launch.begins}
        published = {"place": asdict(engine.place), "alike": alike, **of_launcher}
        try:
            if launch.joins:
                raise AlreadyMet
            if launch.begins < launch.size:
                engine.begin_without(tuple(range(launch.begins, launch.size)))
            may_rejoin = launch.incarnation > 0 and not mine.has_met and bool(config.secret)
            # A failed engine closes before the barrier, because rank 0 then waits until others have read the reason.
            gathering = gather_agents(mine.store, launch, deadline, published, may_rejoin)
            with gathering as (meeting, found), _ended_if_failed(mine, engine):
                _check_agreement(found, alike)
                endpoint = _listen(engine, config, launch, forced, with_absent(found, launch.size))
                met = introduce(meeting, launch, found, endpoint, config.secret)
                engine.meet(met.endpoints, met.key, met.is_private)
                if wanted is not None:
                    attach_backend(engine, wanted)
                if mine is not process_context():  # all earlier threads belong to others in a fleet
                    engine.expect_no_calls_of(threading.enumerate())
                engine.start()
                agent = Agent(engine, _machines(met.places, per_machine, launch), launch, config)
                _await_first_links(agent, deadline, meeting)
                meeting.forget(ENDPOINT)
                if on_loss == CONTINUE and met.is_private and launch.store_is_served:
                    meeting.store.set(DIRECTORY, met.written())
                # No agent continues before the store is closed: init_process_group may need its port.
            _await_all(agent, deadline)
        except AlreadyMet:
            agent = _rejoin(engine, config, launch, forced, per_machine, published, deadline, wanted)
    mine.has_met = True
    return agent


@contextlib.contextmanager
def _ended_if_failed(mine: AgentContext, engine: Engine) -> Iterator[None]:
    try:
        yield
    except BaseException:
        _free(mine)
        engine.close(clock.monotonic() + 1.0, "its shoal.init() failed", died=True)
        raise


def _numbered(
    mine: AgentContext, config: Config, launch: Launch, on_loss: str, deadline: float
) -> tuple[Launch, dict[str, Any]]:
    """The launch and the data to publish, from :func:`~.peer_directory.numbered` if a launcher may be replaced."""
    may_be = launch.store_is_served and not launch.joins and not mine.has_met and mine.store is None
    if not (may_be and on_loss == CONTINUE and config.launcher and config.secret):
        return launch, {}
    with contextlib.closing(open_store(launch, deadline)) as store:
        return numbered(store, launch, deadline, config)


def _process_group(mine: AgentContext, config: Config, launch: Launch, forced: str) -> BackendOptions | None:
    """The options of the backend that moves tensors; None if links move them."""
    given = mine.process_group
    if (forced != PROCESS_GROUP and given is None) or launch.size == 1:
        return None
    backend = check_backend(config.process_group, given, launch.size, launch.rank)
    return BackendOptions(backend, config.cache_capacity, given)


def _listen(engine: Engine, config: Config, launch: Launch, forced: str, found: list[dict[str, Any]]) -> Endpoint:
    reached = [answer["reached"] for answer in found]
    places = [PeerId(**answer["place"]) for answer in found]
    ports = parse_ports("SHOAL_PORTS", config.ports)
    return engine.listen(places, forced, config.interface, launch.host or "", reached, ports)


def _rejoin(
    engine: Engine,
    config: Config,
    launch: Launch,
    forced: str,
    per_machine: int | None,
    published: dict[str, Any],
    deadline: float,
    wanted: BackendOptions | None,
) -> Agent:
    """Create an agent that waits for admission, because the other agents run already."""
    with contextlib.closing(open_store(launch, deadline)) as store:
        met = directory(store, launch, deadline, config.secret)
        _check_agreement(met.published, published["alike"])
        met.published[launch.rank] = {**published, "reached": store.address}
        endpoint = _listen(engine, config, launch, forced, met.published)
        met.reached_from[launch.rank] = {"endpoint": asdict(endpoint)}
        _check_reachable(engine, launch, met)
        engine.meet(met.endpoints, met.key, met.is_private)
        add_to_directory(store, launch, met, config.secret)
    if wanted is not None:
        attach_backend(engine, wanted)
    # Before the progress thread starts: it would take the end of a lost agent's process for the loss of a member, and
    # confirm it after that rank has been admitted again.
    engine.begin_waiting()
    engine.start()
    log.warning(
        "rank %d started later than the others: it runs in isolation until it has loaded its shoal.Checkpoint",
        launch.rank,
    )
    return Agent(engine, _machines(met.places, per_machine, launch), launch, config)


def _free(mine: AgentContext) -> None:
    mine.agent = mine.engine = None
    _taken.pop(id(mine), None)


def _await_first_links(agent: Agent, deadline: float, meeting: BootstrapBarrier) -> None:
    """Wait for all connections. Each agent then has a link to rank + 1, so notices of a loss reach all agents.

    Until then only the store can report an agent that fails: without the checks, the others would wait until their
    deadline for a link to it.
    """
    handle = _begin_links(agent, deadline)
    limit = max(deadline, clock.monotonic())
    while not agent.engine.wait_for(handle, STORE_CHECK_SECONDS) and clock.monotonic() < limit:
        if not meeting.check():
            break
    try:
        handle.wait()
    except PeerLost:
        meeting.check()  # the first cause, if published: the lost agent may have failed because of it, as this one does
        raise
    finally:
        meeting.end()


def _begin_links(agent: Agent, deadline: float) -> Handle[list[int]]:
    """Begin an operation that ends when all agents have begun it and have their links."""

    def steps(operation: Operation) -> Steps[list[int]]:
        return discover(agent.engine, operation, ())

    rest = max(1.0, deadline - clock.monotonic())
    return submit_to_all(agent.engine, "init", "~init", steps, rest, alone=False)


def _await_all(agent: Agent, deadline: float) -> None:
    """Wait until all agents have come this far, as the last step of ``init``.

    An agent that has shut down since has passed this step, which shows that all agents have come. So ``init`` succeeds
    on all agents, and the next operation that needs the departed agent raises :class:`PeerLost`.
    """
    try:
        _begin_links(agent, deadline).wait()
    except PeerLost as lost:
        view = agent.engine.view
        if any(rank not in view.left and view.died.get(rank) != NEEDED for rank in lost.ranks):
            raise


def _check_agreement(found: list[dict[str, Any]], alike: dict[str, Any]) -> None:
    for name, value in alike.items():
        others = [rank for rank, answer in enumerate(found) if "alike" in answer and answer["alike"].get(name) != value]
        if others:
            there = found[others[0]]["alike"].get(name)
            raise Mismatch(
                f"{name} is {value} here and {there} on ranks {others}; set it to one value for all agents", others
            )


def _check_room(mine: AgentContext, config: Config, launch: Launch, on_loss: str) -> None:
    """Refuse a job that other agents may join, if its settings allow no joining."""
    if launch.begins == launch.size:
        return
    intent = f"{BEGIN_WITH}={launch.begins} of {launch.size} agents, so others may join"
    if on_loss != CONTINUE:
        raise ValueError(f"{intent}, which on_loss={on_loss!r} does not allow: set SHOAL_ON_LOSS=continue")
    if not config.secret:
        raise ValueError(f"{intent}: they authenticate with SHOAL_SECRET; set it for all agents")
    if not launch.store_is_served:
        raise ValueError(
            f"{intent}: they look for the others in a store that stays, as `shoal run --max-agents` serves one"
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
            f"shoal.init(): rank {launch.rank} on {engine.host} cannot reach ranks {far} on "
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
