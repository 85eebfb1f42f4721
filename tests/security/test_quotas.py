"""Limits on one agent's cost to another: an agent that exceeds a quota fails, by name, and its memory is freed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest
import torch

import shoal
from shoal.errors import ProtocolError
from shoal.runtime.agent import current
from shoal.transport import quotas
from shoal.transport.messages import Kind, Message, Payload, Where
from shoal.transport.shared_memory import SharedMemoryLink
from shoal.transport.shared_regions import Arena, PeerMemory
from support.leftovers import descriptors, wait_until

Fleets = Callable[..., shoal.Fleet]
VICTIM, GREEDY = 0, 2
FEW = 50


@pytest.fixture
def small_quotas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "MESSAGES", FEW)


def early(number: int, numel: int = 4) -> Message:
    """A numbered message of a call that no agent makes."""
    message = Message(Kind.DATA, "neighbor_allreduce", f"early {number}", dtype=torch.uint8, shape=(numel,))
    message.where, message.nbytes, message.body = Where.INLINE, numel, bytes(numel)
    message.payload = Payload(torch.zeros(numel, dtype=torch.uint8), numel)
    return message


def announced(number: int, numel: int) -> Message:
    """A tensor that is announced, and does not come."""
    message = early(number, numel)
    message.where, message.body, message.token = Where.STREAM, b"", 1 + number
    return message


def question(number: int) -> Message:
    return Message(Kind.ASK, "neighbor_allreduce", f"early {number}")


def send(messages: Iterator[Message]) -> None:
    """To the victim."""
    engine = current().engine
    with engine.lock:
        for message in messages:
            engine.sender.send_message(VICTIM, message)
    engine.poller.wake()


def average_for_ever() -> None:
    while True:
        shoal.neighbor_allreduce(torch.ones(3), name="x")


def loss(fleet: shoal.Fleet, messages: Callable[[], Iterator[Message]]) -> list[str]:
    """The errors of the agents other than the greedy one, which has sent these.

    The victim keeps none of the messages.
    """

    def run() -> str:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(3))
        with pytest.raises(shoal.ShoalError) as caught:
            shoal.barrier()
            if shoal.rank() == GREEDY:
                send(messages())
            average_for_ever()
        engine = current().engine
        if shoal.rank() == GREEDY:
            return ""
        assert isinstance(caught.value, shoal.PeerLost)
        assert caught.value.ranks == (GREEDY,), caught.value
        if shoal.rank() == VICTIM:
            with engine.lock:
                kept = [*engine.matcher.early, *engine.matcher.asks]
                assert not [key for key in kept if key[0].startswith("early")]
                assert GREEDY not in engine.matcher._kept
                assert GREEDY not in engine.router.incoming
        return str(caught.value)

    victim, other, _ = fleet.run(run)
    assert "quota" in victim
    return [victim, other]


def test_a_peer_that_exceeds_the_early_message_quota_fails(fleet: Fleets, small_quotas: None) -> None:
    [output, _] = loss(fleet(3), lambda: (early(k) for k in range(FEW + 10)))
    assert f"its quota of {FEW} messages that came before this agent's call" in output


def test_a_peer_that_exceeds_the_query_quota_fails(fleet: Fleets, small_quotas: None) -> None:
    [output, _] = loss(fleet(3), lambda: (question(k) for k in range(FEW + 10)))
    assert f"its quota of {FEW} questions" in output


def test_a_repeated_message_or_query_counts_once(fleet: Fleets, small_quotas: None) -> None:
    def run() -> float:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(3))
        shoal.barrier()
        if shoal.rank() == GREEDY:
            send(early(1) for _ in range(3 * FEW))
            send(question(1) for _ in range(3 * FEW))
        return sum(shoal.neighbor_allreduce(torch.ones(1)).item() for _ in range(20))

    assert fleet(3).run(run) == [20.0] * 3


@pytest.mark.parametrize("transport", ["shared_memory", "network"])
def test_a_peer_that_exceeds_the_early_byte_quota_fails(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "KEPT_BYTES", 100_000)
    [output, _] = loss(
        shoal.Fleet(3, transport=transport, timeout=20.0), lambda: (early(k, numel=10_000) for k in range(11))
    )
    assert "100,000 bytes" in output


@pytest.mark.transport("network")
@pytest.mark.parametrize(("count", "numel"), [(3, 50_000), (FEW + 1, 8)], ids=["bytes", "number"])
def test_a_peer_that_announces_too_many_bytes_fails(
    count: int, numel: int, monkeypatch: pytest.MonkeyPatch, small_quotas: None
) -> None:
    monkeypatch.setattr(quotas, "KEPT_BYTES", 100_000)
    [output, _] = loss(
        shoal.Fleet(3, transport="network", timeout=20.0), lambda: (announced(k, numel) for k in range(count))
    )
    assert "tensors that are announced and have not come" in output


@pytest.mark.transport("shared_memory")
def test_shared_memory_of_the_sender_counts_against_no_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "KEPT_BYTES", 100_000)

    def run() -> float:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(2))
        shoal.barrier()
        if shoal.rank() == VICTIM:
            time.sleep(0.2)
        handles = [shoal.nonblocking.neighbor_allreduce(torch.ones(100_000), name=f"large {k}") for k in range(5)]
        return sum(handle.wait()[0].item() for handle in handles)

    assert shoal.Fleet(2, transport="shared_memory", timeout=20.0).run(run) == [5.0, 5.0]


def test_a_quota_is_released_when_the_calls_have_been_made(fleet: Fleets, small_quotas: None) -> None:
    """Ten times the quota of messages, half of them early, never all at once."""

    def run() -> int:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(2))
        engine = current().engine
        for step in range(20):
            shoal.barrier()
            if shoal.rank() == VICTIM:
                time.sleep(0.03)  # and it is asked, too
            names = [f"{step}.{part}" for part in range(FEW // 2)]
            handles = [shoal.nonblocking.neighbor_allreduce(torch.ones(5000), name=name) for name in names]
            for handle in handles:
                assert handle.wait()[0].item() == 1.0
        with engine.lock:
            return sum(abs(value.count) + abs(value.nbytes) for value in engine.matcher._kept.values()) + sum(
                value.count for value in engine.matcher._asked.values()
            )

    assert fleet(2).run(run) == [0, 0]


@pytest.mark.soak
@pytest.mark.parametrize("numel", [64, 2000, 6000])
def test_ten_thousand_calls_to_a_late_agent_stay_within_the_quota(fleet: Fleets, numel: int) -> None:
    count = 10_000

    def run() -> float:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(2))
        shoal.barrier()
        if shoal.rank() == VICTIM:
            time.sleep(0.3)
        x = torch.ones(numel)
        handles = [shoal.nonblocking.neighbor_allreduce(x) for _ in range(count)]
        return sum(handle.wait()[0].item() for handle in handles)

    assert fleet(2, timeout=120.0).run(run) == [count, count]


@pytest.mark.transport("shared_memory")
@pytest.mark.parametrize("lockable", [False, True])
def test_memory_shared_twice_is_released(lockable: bool) -> None:
    """Its sender fails, as for any protocol error."""

    def messages() -> Iterator[Message]:
        link = current().engine.router.link(VICTIM)
        assert isinstance(link, SharedMemoryLink)
        fd = os.memfd_create("twice")
        arena = Arena()
        segment = arena.allocate(300_000).segment
        for _ in range(2):
            link._share(1 << 20, segment.fd, lockable)
        arena.close()
        os.close(fd)
        yield question(0)

    before = len(descriptors())
    with pytest.raises(AssertionError, match="shared twice"):  # it is no quota
        loss(shoal.Fleet(3, transport="shared_memory", timeout=20.0), messages)
    assert wait_until(lambda: len(descriptors()) <= before)


def test_memory_files_and_windows_of_a_peer_count_against_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "SEGMENTS", 3)
    monkeypatch.setattr(quotas, "descriptor_limit", lambda: 1)
    before = len(descriptors())
    arena, memory = Arena(), PeerMemory()
    fd = arena.allocate(300_000).segment.fd
    memory.add(1, os.dup(fd), lockable=True)
    with pytest.raises(ProtocolError, match="quota of 1 windows"):
        memory.add(2, os.dup(fd), lockable=True)
    for ident in (2, 3):
        memory.add(ident, os.dup(fd))
    with pytest.raises(ProtocolError, match="quota of 3 memory files"):
        memory.add(4, os.dup(fd))
    memory.forget(1)
    memory.add(4, os.dup(fd), lockable=True)
    memory.close()
    arena.close()
    assert len(descriptors()) == before
