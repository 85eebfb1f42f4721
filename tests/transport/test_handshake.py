"""Two agents prove to each other that they know the secret, and that each is the intended peer."""

from __future__ import annotations

import pytest

from shoal.errors import ProtocolError
from shoal.transport.authentication import MESSAGES, QUESTION, REFUSED, REVERSED, Accepting, Connecting

SIZE = 3


def pair(source: int = 2, destination: int = 0, secret: bytes = b"key") -> tuple[Accepting, Connecting]:
    return Accepting(b"key", 0, SIZE), Connecting(secret, source, destination, 3, 4, QUESTION)


def test_both_sides_authenticate_and_derive_the_same_keys_for_this_connection() -> None:
    keys = set()
    for _ in range(2):
        accepting, connecting = pair()
        assert accepting.check(connecting.answer(accepting.hello)) == 2
        assert (accepting.incarnation, accepting.expected, accepting.purpose) == (3, 4, QUESTION)
        assert connecting.check(accepting.welcome(17)) == 17
        assert accepting.keys == connecting.keys
        keys |= set(connecting.keys)
    assert len(keys) == 4


@pytest.mark.parametrize(
    ("source", "destination"), [(2, 1), (1, 2), (0, 0), (SIZE, 0)], ids=["another", "a third", "itself", "no rank"]
)
def test_a_peer_that_expects_another_rank_or_has_an_impossible_one_is_refused(source: int, destination: int) -> None:
    accepting, connecting = pair(source, destination)
    with pytest.raises(ProtocolError, match=f"rank {source} looks for rank {destination}; this is rank 0"):
        accepting.check(connecting.answer(accepting.hello))


def test_an_invalid_purpose_is_refused() -> None:
    accepting, connecting = Accepting(b"key", 0, SIZE), Connecting(b"key", 2, 0, purpose=REVERSED + 1)
    with pytest.raises(ProtocolError, match="a connection of purpose 3"):
        accepting.check(connecting.answer(accepting.hello))


def test_another_secret_and_a_replayed_response_are_refused() -> None:
    accepting, connecting = pair(secret=b"other")
    with pytest.raises(ProtocolError, match="does not have this job's secret"):
        accepting.check(connecting.answer(accepting.hello))
    before, connecting = pair()
    with pytest.raises(ProtocolError, match="does not have this job's secret"):
        accepting.check(connecting.answer(before.hello))


@pytest.mark.parametrize("at", [0, 8], ids=["the count", "the proof"])
def test_a_modified_welcome_is_refused(at: int) -> None:
    accepting, connecting = pair()
    accepting.check(connecting.answer(accepting.hello))
    welcome = bytearray(accepting.welcome(17))
    welcome[at] ^= 1
    with pytest.raises(ProtocolError, match="does not have this job's secret"):
        connecting.check(bytes(welcome))
    with pytest.raises(ProtocolError, match="it refuses this agent"):
        connecting.check(REFUSED)


def test_wrong_lengths_and_greetings_are_refused() -> None:
    accepting, connecting = pair()
    with pytest.raises(ProtocolError, match="a greeting of 1 bytes"):
        connecting.answer(b"S")
    with pytest.raises(ProtocolError, match="it is no Shoal agent"):
        connecting.answer(b"SHOAX" + accepting.hello[5:])
    with pytest.raises(ProtocolError, match="it speaks protocol"):
        connecting.answer(accepting.hello[:5] + b"\xff\xff" + accepting.hello[7:])
    with pytest.raises(ProtocolError, match="an answer of 1 bytes"):
        accepting.check(b"S")


@pytest.mark.parametrize("incarnation", [0, 4])
def test_the_handshake_checks_the_incarnation_of_the_process(incarnation: int) -> None:
    accepting, connecting = Accepting(b"key", 0, SIZE, incarnation), Connecting(b"key", 2, 0, 3, 4, MESSAGES)
    accepting.check(connecting.answer(accepting.hello))
    assert accepting.is_for_another_process == (incarnation != 4)
