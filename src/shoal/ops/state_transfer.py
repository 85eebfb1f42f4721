"""The point at which all present agents admit joining agents, and send them the state they need."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any
from zlib import crc32

import torch

from .. import clock
from .._signals import deferred
from ..arithmetic import complete
from ..engine.discovery import submit_to_all
from ..errors import NONSENSE, DeadlineExceeded, Mismatch, PeerLost, ShoalError
from ..fault_tolerance.rejoin import JoiningPeer
from ..operations.backend_stages import CollectiveBackend
from ..operations.control_messages import parsed_counts
from ..operations.operation import FailurePolicy, Operation
from ..operations.stage import Exchange, Send, Steps
from ..runtime.agent import Agent
from . import safe_serialization
from .arguments import Internal, channel_name, payload
from .collective import gather_by_rank, parts_of_all

Found = tuple[Mapping[int, JoiningPeer], dict[str, int]]
CRC_BYTES = 4


def let_in(agent: Agent, timeout: float | None = None) -> tuple[int, ...]:
    """Admit the agents that have asked any present agent. All present agents call it; all get the same ranks,
    ascending.

    The admitted agents are full members when it returns.
    """
    asking = torch.tensor([len(agent.engine.joining_peers())])
    asks = gather_by_rank(asking, Internal("entry: who asks"), timeout=timeout, by_links=True)
    if not any(int(count) for count in asks.values()):
        return ()
    backend = agent.engine.backend
    if backend is None:
        return _admit(agent, timeout)
    try:
        _quiesce(agent, backend, timeout)
        return _admit(agent, timeout)
    finally:
        with agent.engine.lock:
            backend.resume()


def _quiesce(agent: Agent, backend: CollectiveBackend, timeout: float | None) -> None:
    """The backend runs collective rounds in the background, and joining agents know of none in progress. All scripts
    are in this call now, so none of them waits for a round. Rounds that an agent has begun are finished, and no other
    begins before all have admitted the same agents.
    """
    engine, name = agent.engine, "entry: how far all are"
    with engine.lock:
        begun = backend.quiesce()
    counts = gather_by_rank(torch.tensor([begun]), Internal(name), timeout=timeout, by_links=True)
    with engine.lock:
        backend.quiesce(max(int(count) for count in counts.values()))
    seconds = engine.timeout if timeout is None else timeout
    limit = clock.monotonic() + seconds
    while not engine.drive_until(lambda: backend.is_quiescent or engine.ended is not None, limit):
        deferred.checkpoint()
        if clock.monotonic() >= limit:
            others = [rank for rank in counts if rank != agent.rank]
            raise DeadlineExceeded(
                f"rank {agent.rank} has waited {seconds:g} s for tensors that are still moved, before it lets in who "
                "asks for it",
                others,
            )


def _admit(agent: Agent, timeout: float | None) -> tuple[int, ...]:
    entry = agent.engine.rejoin

    def steps(operation: Operation) -> Steps[Found]:
        entry.admit_after(operation)
        asking = {rank: peer.as_data() for rank, peer in entry.asking().items()}
        content = json.dumps({"asking": asking, "begun": entry.begun()}).encode()
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        parts = yield from parts_of_all(agent, operation, data, by_links=True)
        yield from complete([message.payload for _, message in parts if message.payload is not None])
        found: dict[int, JoiningPeer] = {}
        begun: dict[str, int] = {}
        for rank, message in parts:
            assert message.payload is not None
            _add(found, begun, rank, bytes(message.payload.data.numpy()), operation)
        return found, begun

    name = channel_name("entry", Internal("entry"))
    found, _ = submit_to_all(agent.engine, "entry", name, steps, timeout).wait()
    return tuple(sorted(found))


def _add(found: dict[int, JoiningPeer], begun: dict[str, int], rank: int, text: bytes, operation: Operation) -> None:
    """Add the joining agents that one agent knows, and its round counts."""
    try:
        content = json.loads(text)
        counts = parsed_counts(content["begun"])
        asking = {int(other): JoiningPeer.of(peer, int(other)) for other, peer in content["asking"].items()}
    except NONSENSE as error:
        why = f"{operation}: what rank {rank} says of those who ask makes no sense: {error}"
        raise Mismatch(why, (rank,)) from None
    for name, count in counts.items():
        begun[name] = max(count, begun.get(name, 0))
    for other, peer in asking.items():
        if other not in operation.left_of([other]) and (
            other not in found or found[other].place.incarnation < peer.place.incarnation
        ):
            found[other] = peer


def hand_over(agent: Agent, state: Callable[[], Any] | None, timeout: float | None = None) -> Any:
    """Send each admitted agent the state of an agent that was present before. All call it.

    Args:
        agent: The caller.
        state: Makes the state, of plain data and tensors; None if this agent needs it.
        timeout: Seconds that each wait may take.

    Returns:
        The state if this agent needed it, else None.

    Raises:
        PeerLost: No agent that has the state is left.
        ShoalError: The state could not be made, or was received damaged.
    """
    found: Any = None
    needs, came = state is None, None
    while True:
        flags = gather_by_rank(torch.tensor([needs]), Internal("entry: who needs a state"), timeout=timeout)
        needy = [rank for rank, flag in flags.items() if flag]
        givers = [rank for rank in flags if rank not in needy]
        if not needy:
            return found
        if not givers:
            raise PeerLost(f"rank {agent.rank}: nobody is left who could hand over the state of the run", needy)
        giver_of = {rank: _giver(agent, rank, givers) for rank in needy}
        if agent.rank in giver_of.values() and came is None:
            assert state is not None
            came = _written(state)
        sent = _sent(agent, giver_of, came, timeout)
        if needs and sent is not None:  # and should another giver die, this agent has it, too
            found, came, needs = _read(agent, sent), sent, False


def _giver(agent: Agent, needy: int, givers: list[int]) -> int:
    """A neighbour, if one is there; not the same for all."""
    near = sorted(rank for rank in givers if agent.topology.graph.has_edge(rank, needy)) or givers
    return near[needy % len(near)]


def _sent(
    agent: Agent, giver_of: Mapping[int, int], written: torch.Tensor | None, timeout: float | None
) -> torch.Tensor | None:
    """Send each admitted agent the state of its donor, ``written`` here. Returns the received state; None if this agent
    receives none, or if the donor was lost.
    """
    rank = agent.rank
    takers = [other for other, giver in giver_of.items() if giver == rank]

    def steps(operation: Operation) -> Steps[torch.Tensor | None]:
        sends = []
        if takers and written is not None:
            published = agent.engine.publish(operation, written)
            sends = [Send(other, published, 0, len(written), (len(written),)) for other in takers]
        sources = [giver_of[rank]] if rank in giver_of else []
        arrived = yield Exchange(sends, sources, torch.uint8)
        for source in sources:
            if source in arrived:
                yield from complete([payload(arrived, source)])
                return payload(arrived, source).data.clone()
        return None

    channel = channel_name("entry", Internal("entry: state"))
    return agent.engine.submit("entry: state", channel, steps, timeout, on_loss=FailurePolicy.SKIP_MISSING).wait()


def _written(state: Callable[[], Any]) -> torch.Tensor:
    try:
        data = safe_serialization.write({"state": state()})
    except Exception as error:  # the agents that wait for it have to be notified
        data = safe_serialization.write({"error": f"{type(error).__name__}: {error}"})
    checksum = crc32(data.numpy()).to_bytes(CRC_BYTES, "little")  # type: ignore[arg-type]
    return torch.cat([torch.frombuffer(bytearray(checksum), dtype=torch.uint8), data])


def _read(agent: Agent, came: torch.Tensor) -> Any:
    checksum, data = bytes(came[:CRC_BYTES].numpy()), came[CRC_BYTES:]
    if crc32(data.numpy()).to_bytes(CRC_BYTES, "little") != checksum:  # type: ignore[arg-type]
        raise ShoalError(f"rank {agent.rank}: the state that was handed over was changed on the way", (agent.rank,))
    content = safe_serialization.read(data)
    if "error" in content:
        raise ShoalError(f"rank {agent.rank}: its state could not be handed over: {content['error']}", (agent.rank,))
    return content["state"]
