"""Admits joining agents, at one call of all members, and sends them the state of the job."""

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
from ..execution.backend_stages import CollectiveBackend
from ..execution.control_messages import parsed_counts
from ..execution.operation import FailurePolicy, Operation
from ..execution.stage import Exchange, Send, Steps
from ..fault_tolerance.rejoin import JoiningPeer
from ..runtime.agent import Agent
from . import safe_serialization
from .arguments import Internal, channel_name, payload
from .collective import complete_parts_of_all, gather_by_rank, parts_of_all

Admission = tuple[Mapping[int, JoiningPeer], dict[str, int]]
"""The admitted agents, and the number of rounds begun, by name."""
CRC_BYTES = 4


def admit_joining_agents(agent: Agent, timeout: float | None = None) -> tuple[int, ...]:
    """Admit the agents that have requested it from any member. All members call it; all get the same ranks, ascending.

    The admitted agents are full members when it returns.
    """
    asking = torch.tensor([len(agent.engine.joining_peers())], device="cpu")
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
    """Finish the backend's rounds that an agent has begun, and begin no other before all have admitted the same agents.

    A joining agent knows of no round in progress. All scripts are in this call now, so none of them waits for a round.
    """
    engine, name = agent.engine, "entry: how far all are"
    with engine.lock:
        begun = backend.quiesce()
    counts = gather_by_rank(torch.tensor([begun], device="cpu"), Internal(name), timeout=timeout, by_links=True)
    with engine.lock:
        backend.quiesce(max(int(count) for count in counts.values()))
    seconds = engine.timeout if timeout is None else timeout
    limit = clock.monotonic() + seconds
    while not engine.drive_until(lambda: backend.is_quiescent or engine.ended is not None, limit):
        deferred.checkpoint()
        if clock.monotonic() >= limit:
            others = [rank for rank in counts if rank != agent.rank]
            raise DeadlineExceeded(
                f"rank {agent.rank} has waited {seconds:g} s for tensors that are still moved, before it admits the "
                "joining agent",
                others,
            )


def _admit(agent: Agent, timeout: float | None) -> tuple[int, ...]:
    rejoin = agent.engine.rejoin

    def steps(operation: Operation) -> Steps[Admission]:
        rejoin.admit_after(operation)
        # All members are in this call before one of them holds its gate. Otherwise the script of another member might
        # wait, on its way to this call, for an operation that this agent has not begun.
        yield from parts_of_all(agent, operation, torch.empty(0, device="cpu"), by_links=True)
        asking = {rank: peer.as_data() for rank, peer in rejoin.joining_peers().items()}
        content = json.dumps({"asking": asking, "begun": rejoin.hold()}).encode()
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        parts = yield from complete_parts_of_all(agent, operation, data, by_links=True)
        admitted: dict[int, JoiningPeer] = {}
        begun: dict[str, int] = {}
        for rank, part in parts.items():
            _add(admitted, begun, rank, bytes(part.numpy()), operation)
        return admitted, begun

    name = channel_name("entry", Internal("entry"))
    admitted, _ = submit_to_all(agent.engine, "entry", name, steps, timeout).wait()
    return tuple(sorted(admitted))


def _add(admitted: dict[int, JoiningPeer], begun: dict[str, int], rank: int, text: bytes, operation: Operation) -> None:
    """Add the joining agents that one agent knows, and its round counts."""
    try:
        content = json.loads(text)
        counts = parsed_counts(content["begun"])
        asking = {int(other): JoiningPeer.of(peer, int(other)) for other, peer in content["asking"].items()}
    except NONSENSE as error:
        why = f"{operation}: rank {rank} sent an invalid list of joining agents: {error}"
        raise Mismatch(why, (rank,)) from None
    for name, count in counts.items():
        begun[name] = max(count, begun.get(name, 0))
    for other, peer in asking.items():
        known = admitted.get(other)
        # Only a rank that the plan excludes can be admitted. Of several starts of an agent, the last one is alive.
        if other in operation.excluded_ranks and (known is None or known.place.incarnation < peer.place.incarnation):
            admitted[other] = peer


def transfer_state(agent: Agent, state: Callable[[], Any] | None, timeout: float | None = None) -> Any:
    """Send each admitted agent the state of a donor, which was a member before. All members call it.

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
    received: Any = None
    needs, written = state is None, None
    while True:
        flags = gather_by_rank(
            torch.tensor([needs], device="cpu"), Internal("entry: who needs a state"), timeout=timeout
        )
        receivers = [rank for rank, flag in flags.items() if flag]
        donors = [rank for rank in flags if rank not in receivers]
        if not receivers:
            return received
        if not donors:
            raise PeerLost(f"rank {agent.rank}: no agent is left that could transfer the state of the run", receivers)
        donor_of = {rank: _donor(agent, rank, donors) for rank in receivers}
        if agent.rank in donor_of.values() and written is None:
            assert state is not None
            written = _written(state)
        arrived = _exchange_state(agent, donor_of, written, timeout)
        if needs and arrived is not None:  # from now on this agent is a donor as well, if another one is lost
            received, written, needs = _read(agent, arrived), arrived, False


def _donor(agent: Agent, receiver: int, donors: list[int]) -> int:
    """A neighbour of the receiver, if one is a donor; not the same for all receivers."""
    near = sorted(rank for rank in donors if agent.topology.graph.has_edge(rank, receiver)) or donors
    return near[receiver % len(near)]


def _exchange_state(
    agent: Agent, donor_of: Mapping[int, int], written: torch.Tensor | None, timeout: float | None
) -> torch.Tensor | None:
    """Send each admitted agent the state of its donor, ``written`` here. Returns the received state; None if this agent
    receives none, or if the donor was lost.
    """
    rank = agent.rank
    receivers = [other for other, donor in donor_of.items() if donor == rank]

    def steps(operation: Operation) -> Steps[torch.Tensor | None]:
        sends = []
        if receivers and written is not None:
            published = agent.engine.publish(operation, written)
            sends = [Send(other, published, 0, len(written), (len(written),)) for other in receivers]
        sources = [donor_of[rank]] if rank in donor_of else []
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


def _read(agent: Agent, received: torch.Tensor) -> Any:
    checksum, data = bytes(received[:CRC_BYTES].numpy()), received[CRC_BYTES:]
    if crc32(data.numpy()).to_bytes(CRC_BYTES, "little") != checksum:  # type: ignore[arg-type]
        raise ShoalError(f"rank {agent.rank}: the transferred state was modified in transit", (agent.rank,))
    content = safe_serialization.read(data)
    if "error" in content:
        raise ShoalError(f"rank {agent.rank}: its state could not be transferred: {content['error']}", (agent.rank,))
    return content["state"]
