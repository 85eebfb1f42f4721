"""Firewalls that let connections through in one direction only, or in none."""

from __future__ import annotations

import errno
import random
import socket
import threading
import time

import pytest
import torch

import shoal
from shoal.engine.watchdog import ALIVE
from shoal.errors import ProtocolError
from shoal.runtime.agent import current
from shoal.transport import reverse_connections
from shoal.transport.addresses import listen_tcp, parse_ports
from shoal.transport.authentication import MESSAGES, REVERSED, Accepting, Connecting
from shoal.transport.link import Link
from shoal.transport.messages import Kind, Message
from shoal.transport.network_link import NetworkLink
from support.closed_ports import closed_ports, refused
from support.leftovers import nothing_is_left, wait_until
from support.limits import scaled
from support.relay import in_the_middle
from support.relay_attacks import cuts

pytestmark = pytest.mark.transport("network")
SIZES = (3, 5_000, 400_000)


def rounds(count: int = 5) -> list[torch.Tensor]:
    results = []
    for step in range(count):
        handles = [
            shoal.nonblocking.neighbor_allreduce(torch.full((size,), 10.0 * step + shoal.rank()), name=f"of {size}")
            for size in SIZES
        ]
        results += [shoal.bluefog.wait(handle) for handle in handles]
        results.append(shoal.allreduce(torch.tensor([float(shoal.rank() + step)])))
    return results


def reversed_links() -> list[int]:
    """The ranks to which this agent sends over connections that they have opened."""
    links = current().engine.router.links
    return sorted(rank for rank, link in links.items() if isinstance(link, NetworkLink) and link.is_reversed)


def rounds_and_links() -> tuple[list[torch.Tensor], list[int]]:
    result = rounds(), reversed_links()
    shoal.barrier()
    return result


@pytest.fixture(scope="module")
def undisturbed() -> list[list[torch.Tensor]]:
    return shoal.Fleet(3, transport="network", timeout=60.0).run(rounds)


def assert_equal(averages: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    for one, other in zip(averages, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_an_unreachable_agent_opens_the_connections_to_it(undisturbed: list[list[torch.Tensor]]) -> None:
    with nothing_is_left(), closed_ports(1):
        results = shoal.Fleet(3, transport="network", timeout=60.0).run(rounds_and_links)
    assert_equal([one for one, _ in results], undisturbed)
    assert [links for _, links in results] == [[1], [], [1]]


@pytest.mark.parametrize("code", [errno.ECONNREFUSED, errno.EHOSTUNREACH], ids=["refused", "unreachable"])
def test_an_agent_behind_a_firewall_opens_the_connections_to_it(
    code: int, undisturbed: list[list[torch.Tensor]]
) -> None:
    with nothing_is_left(), refused(code, 1):
        results = shoal.Fleet(3, transport="network", timeout=60.0).run(rounds_and_links)
    assert_equal([one for one, _ in results], undisturbed)
    assert [links for _, links in results] == [[1], [], [1]]


@pytest.mark.parametrize("seed", range(2))
def test_repeatedly_cut_reverse_connections_give_the_same_results(
    seed: int, undisturbed: list[list[torch.Tensor]]
) -> None:
    seen: list[int] = []
    with nothing_is_left(), in_the_middle(cuts(random.Random(seed), seen)), refused(errno.EHOSTUNREACH, 1):
        results = shoal.Fleet(3, transport="network", timeout=60.0).run(rounds_and_links)
    assert seen
    assert_equal([one for one, _ in results], undisturbed)
    assert [links for _, links in results] == [[1], [], [1]]


@pytest.mark.parametrize("cut_first", [False, True], ids=["leaves", "cut"])
def test_an_agent_that_shuts_down_does_not_wait_for_a_peer_that_reads_no_more(cut_first: bool) -> None:
    """Only the peer could open their connection again. Rank 1 closes both directions, as after rank 0's shutdown
    message, and rank 0 has one more message for it.
    """
    is_leaving, is_cut, may_end = threading.Event(), threading.Event(), threading.Event()

    def leave_unread() -> bool:
        rounds_and_links()
        engine, router = current().engine, current().engine.router
        if shoal.rank() == 1:
            assert cut_first or is_leaving.wait(scaled(20.0))
            with engine.lock:
                router.drop(0)
            is_cut.set()
            return may_end.wait(scaled(20.0))
        link = router.links[1]
        if cut_first:
            assert wait_until(lambda: 1 in router.reversing and not link.open, scaled(20.0))  # type: ignore[attr-defined]
        with engine.lock:
            link.post(Message(Kind.ASK, ALIVE, ALIVE))
            router.send_shutdown()
            is_leaving.set()
            assert is_cut.wait(scaled(20.0))  # with the lock: the message is not sent before
        ended = wait_until(lambda: link.idle, scaled(5.0))
        may_end.set()
        return ended

    with refused(errno.EHOSTUNREACH, 1):
        assert shoal.Fleet(2, transport="network", timeout=60.0).run(leave_unread) == [True, True]


def test_an_unneeded_reverse_connection_changes_nothing() -> None:
    expected = shoal.Fleet(4, transport="threads", timeout=60.0).run(late)
    with nothing_is_left():
        assert shoal.Fleet(4, transport="network", timeout=60.0).run(late) == expected


def is_open(link: Link) -> bool:
    return isinstance(link, NetworkLink) and link.open and link.idle


def first_contact() -> None:
    """Ranks 0 and 3 of six have no connection after init; rank 0 sends to rank 3, which needs no tensor of it."""
    shoal.barrier()
    engine = current().engine
    if shoal.rank() == 0:
        with engine.lock:
            assert 3 not in engine.router.links and not engine.router.receives_from(3)
            engine.sender.send_message(3, Message(Kind.ASK, ALIVE, ALIVE))
            engine.sender.flush()
        assert wait_until(lambda: 3 in reversed_links() and is_open(engine.router.links[3]))
    shoal.barrier()


def test_other_agents_forward_the_request_for_a_connection() -> None:
    with nothing_is_left(), closed_ports(3):
        shoal.Fleet(6, transport="network", timeout=60.0).run(first_contact)


def late() -> list[float]:
    shoal.barrier()
    if shoal.rank() == 1 and current().engine.router.transport_to(3) == "network":
        with current().engine.lock:
            current().engine.router.reversing.connect_back(3)
    return [shoal.neighbor_allreduce(torch.tensor([float(shoal.rank() + step)])).item() for step in range(3)]


def errors_of_init(size: int, timeout: float) -> list[str]:
    """What each agent raises."""

    def run() -> None:
        raise AssertionError("init has to fail")

    with pytest.raises(shoal.ShoalError) as caught:
        shoal.Fleet(size, transport="network", timeout=timeout).run(run)
    return [str(caught.value)]


def test_without_an_open_direction_the_error_comes_long_before_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reverse_connections, "CLOSED_SECONDS", 3.0)
    monkeypatch.setattr(reverse_connections._Attempts.__init__, "__defaults__", (3.0, "no answer"))
    began = time.monotonic()
    with nothing_is_left(), closed_ports(0, 1):
        [text] = errors_of_init(2, 600.0)
    assert time.monotonic() - began < scaled(300.0)
    assert "cannot connect to rank" in text and "(no answer: a firewall?)" in text and "127.0.0.1:" in text


def test_a_deadline_before_that_has_the_same_error() -> None:
    with nothing_is_left(), closed_ports(0, 1):
        [text] = errors_of_init(2, 4.0)
    assert "cannot connect to rank" in text and "(no answer: a firewall?)" in text


def test_a_temporary_outage_at_first_contact_is_no_failure() -> None:
    with nothing_is_left(), closed_ports(0, 1) as ports:

        def run() -> float:
            return shoal.neighbor_allreduce(torch.tensor([float(shoal.rank())])).item()

        def end() -> None:
            for rank in (0, 1):
                ports.open(rank)

        timer = threading.Timer(3.0, end)
        timer.start()
        results = shoal.Fleet(2, transport="network", timeout=60.0).run(run)
        timer.join()
    assert results == [0.5, 0.5]


def test_keys_of_a_reverse_connection_are_unique() -> None:
    keys = []
    for purpose in (MESSAGES, REVERSED):
        accepting, connecting = Accepting(b"key", 0, 2), Connecting(b"key", 1, 0, purpose=purpose)
        accepting.check(connecting.answer(accepting.hello))
        assert accepting.keys == connecting.keys
        connecting.check(accepting.welcome())
        keys.append(accepting.keys)
    assert not {*keys[0]} & {*keys[1]}


def test_a_peer_without_the_secret_opens_no_reverse_connection() -> None:
    accepting, connecting = Accepting(b"key", 0, 2), Connecting(b"guessed", 1, 0, purpose=REVERSED)
    with pytest.raises(ProtocolError, match="secret"):
        accepting.check(connecting.answer(accepting.hello))


def test_agents_listen_on_their_configured_ports_each_on_its_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = listener.getsockname()[1]
        ports = range(first, min(first + 50, 1 << 16))
        socks = [listen_tcp("127.0.0.1", ports) for _ in range(3)]
        results = [sock.getsockname()[1] for sock in socks]
        assert len({*results}) == 3 and all(port in ports and port != first for port in results)
        with pytest.raises(OSError, match="SHOAL_PORTS"):
            listen_tcp("127.0.0.1", range(first, first + 1))
        for sock in socks:
            sock.close()


@pytest.mark.parametrize(("text", "ports"), [("", range(1)), ("29500", range(29500, 29501)), ("5-7", range(5, 8))])
def test_ports_are_one_port_or_a_range(text: str, ports: range) -> None:
    assert parse_ports("SHOAL_PORTS", text) == ports


@pytest.mark.parametrize("text", ["0", "7-5", "a-b", "1-70000", "-3", "5-", "1,2"])
def test_invalid_ports_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"SHOAL_PORTS.*FIRST-LAST"):
        parse_ports("SHOAL_PORTS", text)
