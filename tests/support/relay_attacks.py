"""Attacks of a relay in the middle of a connection, and jobs that run through it."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

import shoal
from support.leftovers import nothing_is_left
from support.relay import Change, Cut, in_the_middle

SIZES = (3, 5_000, 400_000)
MIB = 1 << 20


def rounds() -> tuple[int, int, str]:
    """How many results were right, how many wrong, and what ended it."""
    right = wrong = 0
    try:
        for step in range(6):
            x = torch.full((SIZES[step % 3],), 10.0 * step + shoal.rank())
            result = shoal.neighbor_allreduce(x, name="x")
            exact = bool((result == 10.0 * step + 0.5).all())
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
        own = count

        def change(data: bytes, before: int) -> bytes:
            if own != 1 or not before <= place < before + len(data):
                return data
            changed = bytearray(data)
            changed[place - before] ^= bit
            return bytes(changed)

        return change

    return of_a_connection


def leaves_out(draws: random.Random) -> Callable[[], Change]:
    """Some bytes, or a whole packet, never arrive."""
    place, nbytes = int(10 ** draws.uniform(0, 6.6)), draws.choice([1, 16, 1000, MIB])

    def of_a_connection() -> Change:
        def change(data: bytes, before: int) -> bytes:
            start = max(0, place - before)
            return data[:start] + data[max(start, place + nbytes - before) :]

        return change

    return of_a_connection


def repeats(draws: random.Random) -> Callable[[], Change]:
    """Delivers the bytes received at one time twice."""
    place = int(10 ** draws.uniform(0, 6.6))

    def of_a_connection() -> Change:
        return lambda data, before: 2 * data if before <= place < before + len(data) else data

    return of_a_connection


def cuts(draws: random.Random, seen: list[int]) -> Callable[[], Change]:
    """Every connection is cut when so many bytes have passed in one direction, of any magnitude; the later ones later,
    so that it ends."""
    lasts = 5.0

    def of_a_direction() -> Change:
        nonlocal lasts
        lasts += 0.02
        place, reset = int(10 ** draws.uniform(1.5, lasts)), draws.random() < 0.5

        def change(data: bytes, before: int) -> bytes:
            if before + len(data) > place:
                seen.append(place)
                raise Cut(reset)
            return data

        return change

    return of_a_direction


def attack(over: str, first: int, count: int) -> None:
    ends: dict[str, int] = {}
    for seed in range(first, first + count):
        draws = random.Random(seed)
        with nothing_is_left(), in_the_middle(draws.choice([flips, flips, leaves_out, repeats])(draws)):
            try:
                # A packet that was left out is missed at the deadline, if nothing comes behind it.
                results = shoal.Fleet(2, transport=over, timeout=1.0).run(rounds)
            except shoal.ShoalError as error:
                results = [(0, 0, type(error).__name__)]
        assert not any(wrong for _, wrong, _ in results), (seed, results)
        for *_, end in results:
            ends[end] = ends.get(end, 0) + 1
    assert count < 10 or ends.get("PeerLost", 0) > 0, ends
