"""Agents on a Ray cluster: ``shoal.ray.train(function, agents=8)``, as ``shoal.Fleet(8).run`` has them in threads.

Each agent is a Ray actor, in a process of its own. A placement group gives all of them their resources at once, and
those of one node get consecutive ranks, so that a node is a machine. Ray starts them, collects their output and their
results, and reports when one has died. Agents communicate by Shoal itself, not by Ray.

Workers of ``ray.train.torch.TorchTrainer`` do not need this module: :func:`shoal.init` finds the process group that the
trainer has made. See docs/ray.md.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, TypeVar

from . import config
from .config import CONTINUE, RAISE
from .errors import DeadlineExceeded, PeerLost, ShoalError
from .runtime.agent import agent_context
from .runtime.bootstrap import init, leave, shutdown
from .topology._validate import check_size

__all__ = ["AgentFailed", "train"]

log = logging.getLogger("shoal")
T = TypeVar("T")
GRACE_SECONDS = 10.0
"""After one agent failed: how long the others may take to end by themselves before they are killed."""
_CPU, _GPU = "CPU", "GPU"


class AgentFailed(ShoalError):
    """An agent of :func:`train` raised, or its process died. ``ranks`` are the agents that failed first, of one
    cause.
    """


def train(
    function: Callable[..., T],
    *args: Any,
    agents: int,
    resources_per_agent: Mapping[str, float] | None = None,
    strategy: str = "PACK",
    on_loss: str = RAISE,
    timeout: float | None = None,
    **kwargs: Any,
) -> list[T | None]:
    """Call ``function(*args, **kwargs)`` in every agent, after ``init`` and before ``shutdown``.

    The driver's connection to Ray is used; without one, ``ray.init()`` makes it, as with any call of Ray.

    Args:
        function: The function of each agent; Ray serializes it and its arguments (cloudpickle).
        agents: The number of agents.
        resources_per_agent: The resources of each agent, by Ray's names: ``{"CPU": 4, "GPU": 1}``. One CPU, if not
            given.
        strategy: The strategy of the placement group: ``"PACK"`` on few nodes, ``"SPREAD"`` on many, or the
            ``"STRICT_"`` forms.
        on_loss: ``"raise"``, or ``"continue"``: the surviving agents continue after a loss, as with this option of
            ``shoal.init`` (docs/survival.md).
        timeout: Seconds of the wait for resources, and of every wait of the agents; ``SHOAL_TIMEOUT`` (300) if not
            given. It does not limit the function's duration.

    Returns:
        The results, by rank. With ``on_loss="continue"`` None for lost agents; the log has the reason.

    Raises:
        AgentFailed: An agent raised, and its exception is ``__cause__``, or an error with its text and traceback, if it
            cannot be serialized; or its process died. The error names the ranks. The others have ended then: by
            themselves, or killed after ten seconds. With ``on_loss="continue"``: all failed.
        DeadlineExceeded: The cluster did not have the resources in time. Nothing was started.
        ImportError: Ray is not installed; ``pip install 'shoal[ray]'`` installs it.
        ValueError: An argument is invalid.
    """
    ray = _ray()
    try:
        agents = check_size(agents)
    except (TypeError, ValueError):
        raise ValueError(
            f"shoal.ray.train(agents={agents!r}): the number of agents must be a positive integer"
        ) from None
    resources = _checked(resources_per_agent)
    if on_loss not in (RAISE, CONTINUE):
        raise ValueError(f"shoal.ray.train(on_loss={on_loss!r}): it must be {RAISE!r} or {CONTINUE!r}")
    seconds = config.read().timeout if timeout is None else timeout
    if not _is_number(seconds) or not seconds > 0:
        raise ValueError(f"shoal.ray.train(timeout={timeout!r}): it must be a positive number of seconds")
    group = ray.util.placement_group([dict(resources)] * agents, strategy=strategy)
    actors: list[Any] = []
    try:
        bundles = _placed(ray, group, agents, resources, seconds)
        actors = [_start(ray, group, bundle, rank, resources) for rank, bundle in enumerate(bundles)]
        environments = _environments(ray, actors, on_loss, seconds)
        asked = [
            actor.run.remote(environment, function, args, kwargs)
            for actor, environment in zip(actors, environments, strict=True)
        ]
        return _results(ray, asked, on_loss == CONTINUE)
    finally:
        for actor in actors:
            ray.kill(actor, no_restart=True)
        ray.util.remove_placement_group(group)


class _RayAgent:
    """One agent's process; an actor of Ray's."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __repr__(self) -> str:
        """The text that Ray writes before each line that this process prints."""
        return f"rank {self._rank}"

    def where(self) -> tuple[str, str, int]:
        """Its node, the node's address, and a free port there."""
        ray = _ray()
        with socket.socket() as free:
            free.bind(("", 0))
            port: int = free.getsockname()[1]
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), port

    def run(
        self, environment: Mapping[str, str], function: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> T:
        """Become an agent, and call the function."""
        os.environ.update(environment)
        init()
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            _leave_with(error)
            raise _that_arrives(error) from None
        shutdown()
        return result


def _leave_with(error: BaseException) -> None:
    """Notify the others at once why this agent ends, because its process lives on until Ray ends it."""
    leave(agent_context(), f"its function ended with {type(error).__name__}: {error}".splitlines()[0][:500], died=True)


class _Described(ShoalError):
    """The type, text and traceback of an exception that cannot be sent."""


def _that_arrives(error: BaseException) -> BaseException:
    """The exception, or its description if its copy could not be made at the driver, which would not know what failed:
    ``__init__`` needs more arguments than are in ``args``, or one of its attributes cannot be serialized.
    """
    try:
        _ray().cloudpickle.loads(_ray().cloudpickle.dumps(error))
    except Exception:
        described = "".join(traceback.format_exception(error))
        return _Described(f"{type(error).__name__}: {error}\n\n{described}")
    return error


def _ray() -> Any:
    try:
        importlib.import_module("ray.util.placement_group")
        return importlib.import_module("ray")
    except ImportError as error:
        raise ImportError("shoal.ray needs Ray: pip install 'shoal[ray]'") from error


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _checked(given: Mapping[str, float] | None) -> dict[str, float]:
    resources = {_CPU: 1.0} if given is None else dict(given) if isinstance(given, Mapping) else {}
    wrong = [name for name, amount in resources.items() if not _is_number(amount) or not amount >= 0]
    if wrong or not any(resources.values()):
        raise ValueError(
            f"shoal.ray.train(resources_per_agent={given!r}): a positive amount of each resource, as in "
            '{"CPU": 4, "GPU": 1}'
        )
    return {name: amount for name, amount in resources.items() if amount}


def _placed(ray: Any, group: Any, agents: int, resources: Mapping[str, float], seconds: float) -> list[int]:
    """The bundles of the group in the order of ranks: those of one node follow each other."""
    try:
        ray.get(group.ready(), timeout=seconds)
    except ray.exceptions.GetTimeoutError:
        there = {name: ray.cluster_resources().get(name, 0) for name in resources}
        free = {name: ray.available_resources().get(name, 0) for name in resources}
        raise DeadlineExceeded(
            f"shoal.ray.train(): no room for {agents} agents of {dict(resources)} each within {seconds:g} s; the "
            f"cluster has {there}, of which {free} is free: ask for fewer or smaller agents, or wait for others to end"
        ) from None
    node_of: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    nodes = list(dict.fromkeys(node_of[bundle] for bundle in sorted(node_of)))
    return sorted(node_of, key=lambda bundle: (nodes.index(node_of[bundle]), bundle))


def _start(ray: Any, group: Any, bundle: int, rank: int, resources: Mapping[str, float]) -> Any:
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    options: dict[str, Any] = {
        "num_cpus": resources.get(_CPU, 0),
        "num_gpus": resources.get(_GPU, 0),
        "resources": {name: amount for name, amount in resources.items() if name not in (_CPU, _GPU)},
        "max_restarts": 0,
        "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
    }
    return ray.remote(_RayAgent).options(**options).remote(rank)


def _environments(ray: Any, actors: Sequence[Any], on_loss: str, seconds: float) -> list[dict[str, str]]:
    """The variables of each agent, as torchrun would set them."""
    try:
        found = ray.get([actor.where.remote() for actor in actors], timeout=seconds)
    except ray.exceptions.GetTimeoutError:
        raise DeadlineExceeded(f"shoal.ray.train(): Ray did not start {len(actors)} actors in {seconds:g} s") from None
    except ray.exceptions.RayError as error:
        raise AgentFailed(f"shoal.ray.train(): an agent's process did not start: {_first_line(error)}") from error
    nodes = [node for node, _, _ in found]
    _, host, port = found[0]
    common = {
        "WORLD_SIZE": str(len(actors)),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "SHOAL_SECRET": secrets.token_hex(32),
        "SHOAL_TIMEOUT": f"{seconds:g}",
        "SHOAL_ON_LOSS": on_loss,
    }
    sizes = {nodes.count(node) for node in nodes}
    if len(sizes) == 1:
        common["SHOAL_AGENTS_PER_MACHINE"] = str(sizes.pop())
    return [
        common
        | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank - nodes.index(node)),
            "LOCAL_WORLD_SIZE": str(nodes.count(node)),
            "GROUP_RANK": str(list(dict.fromkeys(nodes)).index(node)),
        }
        for rank, node in enumerate(nodes)
    ]


def _results(ray: Any, asked: Sequence[Any], go_on: bool) -> list[Any]:
    """The results of all agents. After a failure: the results of the survivors, or an error, once all have ended or had
    time to end.
    """
    found: list[Any] = [None] * len(asked)
    running, failed = list(asked), {}
    limit = float("inf")
    while running and (rest := limit - time.monotonic()) > 0:
        ended, running = ray.wait(running, num_returns=1, timeout=None if limit == float("inf") else rest)
        for ended_run in ended:
            rank = asked.index(ended_run)
            try:
                found[rank] = ray.get(ended_run)
            except ray.exceptions.RayError as error:
                failed[rank] = error
                if not go_on:
                    limit = min(limit, time.monotonic() + GRACE_SECONDS)
    if failed and (not go_on or len(failed) == len(asked)):
        raise _failure(ray, failed, [asked.index(run) for run in running])
    for rank in sorted(failed):
        log.warning("shoal.ray.train(): the others went on without rank %d: %s", rank, _how(ray, failed, rank))
    return found


def _failure(ray: Any, failed: Mapping[int, Any], killed: Iterable[int]) -> AgentFailed:
    """The error for the agents that did not fail because of another agent's failure: their processes died, or else they
    raised an exception of their own.
    """
    died = [rank for rank in failed if _has_died(ray, failed[rank])]
    raised = [rank for rank in failed if rank not in died and not isinstance(_cause(failed[rank]), PeerLost)]
    first = sorted(died or raised or failed)
    failures = "; ".join(_how(ray, failed, rank) for rank in first)
    others = sorted(set(failed) - set(first))
    after = f"; ranks {others} ended with it" if others else ""
    stubborn = sorted(killed)
    after += f"; ranks {stubborn} had not noticed after {GRACE_SECONDS:g} s and were killed" if stubborn else ""
    error = AgentFailed(f"shoal.ray.train(): {failures}{after}", first)
    error.__cause__ = _cause(failed[first[0]])
    return error


def _how(ray: Any, failed: Mapping[int, Any], rank: int) -> str:
    cause = _cause(failed[rank])
    if _has_died(ray, failed[rank]):
        return f"rank {rank}'s process died ({_first_line(cause)})"
    said = "" if isinstance(cause, _Described) else f"{type(cause).__name__}: "
    return f"rank {rank} failed with {said}{_first_line(cause)}"


def _has_died(ray: Any, error: Any) -> bool:
    return isinstance(error, ray.exceptions.RayActorError)


def _cause(error: Any) -> Any:
    """The exception of an agent, or Ray's error for a dead one."""
    return getattr(error, "cause", None) or error


def _first_line(error: object) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
