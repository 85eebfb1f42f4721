"""Who stands in the middle of a connection and does not know the secret can end it, and cannot make a result wrong."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

import shoal
from support.leftovers import nothing_is_left
from support.relay import Change, in_the_middle

SIZES = (3, 5_000, 400_000)
OVER = [pytest.param(name, marks=pytest.mark.transport(name)) for name in ("shared_memory", "network")]
MIB = 1 << 20


def rounds() -> tuple[int, int, str]:
    """How many results were right, how many wrong, and what ended it."""
    right = wrong = 0
    try:
        for step in range(6):
            x = torch.full((SIZES[step % 3],), 10.0 * step + shoal.rank())
            found = shoal.neighbor_allreduce(x, name="x")
            exact = bool((found == 10.0 * step + 0.5).all())
            right, wrong = right + exact, wrong + (not exact)
    except shoal.ShoalError as error:
        return right, wrong, type(error).__name__
    return right, wrong, ""


def flips(draws: random.Random) -> Callable[[], Change]:
    """One flipped bit in one direction of the first connection, at a place of any magnitude."""
    place = int(10 ** draws.uniform(0, 6.6))
    bit = 1 << draws.randrange(8)
    count = 0

    def of_a_connection() -> Change:
        nonlocal count
        count += 1
        mine = count

        def change(said: bytes, before: int) -> bytes:
            if mine != 1 or not before <= place < before + len(said):
                return said
            changed = bytearray(said)
            changed[place - before] ^= bit
            return bytes(changed)

        return change

    return of_a_connection


def leaves_out(draws: random.Random) -> Callable[[], Change]:
    """Some bytes, or a whole packet, never arrive."""
    place, nbytes = int(10 ** draws.uniform(0, 6.6)), draws.choice([1, 16, 1000, MIB])

    def of_a_connection() -> Change:
        def change(said: bytes, before: int) -> bytes:
            start = max(0, place - before)
            return said[:start] + said[max(start, place + nbytes - before) :]

        return change

    return of_a_connection


def repeats(draws: random.Random) -> Callable[[], Change]:
    """What comes at one time comes twice."""
    place = int(10 ** draws.uniform(0, 6.6))

    def of_a_connection() -> Change:
        return lambda said, before: 2 * said if before <= place < before + len(said) else said

    return of_a_connection


def forges(draws: random.Random) -> Callable[[], Change]:
    """Numbers of a large tensor change so that its checksum stays: at four corners of the table that is summed."""
    row, column, apart = draws.randrange(20, 60), draws.randrange(100), draws.randrange(2, 20)

    def of_a_connection() -> Change:
        def change(said: bytes, before: int) -> bytes:
            changed = bytearray(said)
            for down, right in ((0, 0), (0, 1), (1, 0), (1, 1)):
                at = 800_000 + 8 * (512 * (row + apart * down) + column + apart * right) - before
                # A byte that can be one more or less; all numbers are the same, so at all corners it is the same one.
                for place in range(max(at, 0), min(at + 4, len(said))):
                    if 0 < changed[place] < 255:
                        changed[place] += 1 if down == right else -1
                        break
            return bytes(changed)

        return change

    return of_a_connection


@pytest.mark.transport("network")
@pytest.mark.parametrize("secret", ["a word", ""], ids=["given", "made up"])
def test_who_computes_for_it_changes_no_tensor_where_a_secret_was_given(
    secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rank 0 made the secret up he could have read it. So this test shows that he is good at it."""
    monkeypatch.setenv("SHOAL_SECRET", secret)
    fooled = False
    for seed in range(5):  # what he wants to change may come in two pieces, and he looks at one
        with in_the_middle(forges(random.Random(seed))):
            found = shoal.Fleet(2, transport="network", timeout=5.0).run(rounds)
        fooled = fooled or any(wrong for _, wrong, _ in found)
        assert not secret or all(not wrong and end for _, wrong, end in found), found
    assert fooled == (not secret)


def attack(over: str, first: int, count: int) -> None:
    ends: dict[str, int] = {}
    for seed in range(first, first + count):
        draws = random.Random(seed)
        with nothing_is_left(), in_the_middle(draws.choice([flips, flips, leaves_out, repeats])(draws)):
            try:
                # A packet that was left out is missed at the deadline, if nothing comes behind it.
                found = shoal.Fleet(2, transport=over, timeout=1.0).run(rounds)
            except shoal.ShoalError as error:
                found = [(0, 0, type(error).__name__)]
        assert not any(wrong for _, wrong, _ in found), (seed, found)
        for *_, end in found:
            ends[end] = ends.get(end, 0) + 1
    assert count < 10 or ends.get("PeerLost", 0) > 0, ends


@pytest.mark.parametrize("over", OVER)
def test_what_a_relay_changes_is_noticed(over: str) -> None:
    attack(over, 0, 25)


@pytest.mark.soak
@pytest.mark.parametrize("over", OVER)
def test_what_a_relay_changes_is_noticed_in_a_thousand_jobs(over: str) -> None:
    attack(over, 1000, 1000)
