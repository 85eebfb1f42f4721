"""A connection between two machines is cut while both agents live: it is made again, and every message comes once."""

from __future__ import annotations

import random
import time

import pytest
import torch

import shoal
from shoal.errors import ProtocolError
from shoal.runtime.agent import current
from shoal.transport.network_link import NetworkLink
from shoal.transport.retransmit import ACKNOWLEDGE_AFTER_UNITS, ReceivedOffset, SendBuffer
from support.leftovers import nothing_is_left
from support.limits import scaled
from support.relay import Change, in_the_middle
from support.relay_attacks import cuts

SIZES = (3, 5_000, 400_000)


@pytest.mark.parametrize("seed", range(50))
def test_each_unit_arrives_once_and_in_order_for_any_cut(seed: int) -> None:
    draws = random.Random(seed)
    sent: SendBuffer[int] = SendBuffer()
    offset, arrived, following = ReceivedOffset(), [], 0
    on_the_way: list[int] = []
    acknowledgements: list[int] = []
    while following < 500 or not sent.idle or on_the_way:
        act = draws.random()
        if act < 0.5 and (following < 500 or not sent.idle):
            unit = sent.next_to_resend()
            if unit is None:
                unit, following = following, following + 1
            sent.keep(unit)
            on_the_way.append(unit)
        elif act < 0.95 and on_the_way:
            arrived.append(on_the_way.pop(0))
            if offset.one_more(1):
                acknowledgements.append(offset.report())
        elif act < 0.98 and acknowledgements:
            sent.acknowledge(acknowledgements.pop(0))
        elif act > 0.99:  # what is on its way is lost, there and back
            on_the_way.clear()
            acknowledgements.clear()
            sent.resend_after(offset.count)
    assert arrived == list(range(500))


def test_an_impossible_offset_is_refused() -> None:
    sent: SendBuffer[int] = SendBuffer()
    for unit in range(5):
        sent.keep(unit)
    sent.acknowledge(3)
    for count in (2, 6, 1 << 40):
        with pytest.raises(ProtocolError, match="were expected"):
            sent.acknowledge(count)
        with pytest.raises(ProtocolError, match="were expected"):
            sent.resend_after(count)
    sent.acknowledge(5)


def test_sent_units_are_not_kept_for_ever() -> None:
    sent: SendBuffer[int] = SendBuffer()
    offset = ReceivedOffset()
    for unit in range(10 * ACKNOWLEDGE_AFTER_UNITS):
        sent.keep(unit)
        if offset.one_more(1):
            sent.acknowledge(offset.report())
        assert len(sent._kept) <= ACKNOWLEDGE_AFTER_UNITS


def rounds() -> list[torch.Tensor]:
    """Twenty rounds of each size, with others in flight."""
    results = []
    for step in range(20):
        handles = [
            shoal.nonblocking.neighbor_allreduce(torch.full((size,), 10.0 * step + shoal.rank()), name=f"of {size}")
            for size in SIZES
        ]
        results += [shoal.bluefog.wait(handle) for handle in handles]
        results.append(shoal.allreduce(torch.tensor([float(shoal.rank() + step)])))
    return results


@pytest.mark.transport("network")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 40))])
def test_repeatedly_cut_links_give_the_same_results(seed: int) -> None:
    undisturbed = shoal.Fleet(3, transport="network", timeout=30.0).run(rounds)
    seen: list[int] = []
    with nothing_is_left(), in_the_middle(cuts(random.Random(seed), seen)):
        results = shoal.Fleet(3, transport="network", timeout=30.0).run(rounds)
    assert len(seen) > 10
    for one, other in zip(results, undisturbed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.transport("network")
def test_a_chunk_that_is_spoiled_once_comes_again() -> None:
    spoiled: list[int] = []

    def of_a_direction() -> Change:
        def change(data: bytes, before: int) -> bytes:
            place = 1_000_000 - before  # within a tensor of 1,600,000 bytes
            if spoiled or not 0 <= place < len(data):
                return data
            spoiled.append(place)
            return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

        return change

    def run() -> torch.Tensor:
        return shoal.neighbor_allreduce(torch.full((400_000,), float(shoal.rank())), name="x")

    with nothing_is_left(), in_the_middle(of_a_direction):
        outcomes = shoal.Fleet(2, transport="network", timeout=30.0).run(run)
    assert spoiled
    assert all(torch.equal(one, torch.full((400_000,), 0.5)) for one in outcomes)


@pytest.mark.transport("network")
def test_a_sender_buffers_only_units_that_it_may_retransmit() -> None:
    def run() -> int:
        for step in range(300):
            shoal.neighbor_allreduce(torch.full((5,), float(step)), name="small")
            if step % 20 == 0:
                shoal.neighbor_allreduce(torch.full((1 << 20,), float(step)), name="large")
        links = list(current().engine.router.links.values())
        shoal.barrier()  # an ended agent has no link
        return max(len(link._sent._kept) for link in links if isinstance(link, NetworkLink))

    assert max(shoal.Fleet(2, transport="network").run(run)) < 2 * ACKNOWLEDGE_AFTER_UNITS


@pytest.mark.transport("network")
def test_repeated_corruption_ends_a_link_and_other_links_keep_their_limit() -> None:
    def of_a_direction() -> Change:
        def change(data: bytes, before: int) -> bytes:
            place = 500 - before  # behind the handshake
            if not 0 <= place < len(data):
                return data
            return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

        return change

    def run() -> str:
        began = time.monotonic()
        with pytest.raises(shoal.PeerLost) as caught:
            for step in range(50):
                shoal.neighbor_allreduce(torch.full((1_000,), float(step)), name="x")
        assert time.monotonic() - began < scaled(10.0)
        return str(caught.value)

    with nothing_is_left(), in_the_middle(of_a_direction):
        results = shoal.Fleet(2, transport="network", timeout=30.0).run(run)
    assert any("modified in transit" in text for text in results), results
