"""A man in the middle who does not know the secret can end a connection, but cannot make a result wrong."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

import shoal
from support.relay import Change, in_the_middle
from support.relay_attacks import attack, rounds

OVER = [pytest.param(name, marks=pytest.mark.transport(name)) for name in ("shared_memory", "network")]


def forges(draws: random.Random) -> Callable[[], Change]:
    """Numbers of a large tensor change so that its checksum stays: at four corners of the table that is summed."""
    row, column, apart = draws.randrange(20, 60), draws.randrange(100), draws.randrange(2, 20)

    def of_a_connection() -> Change:
        def change(data: bytes, before: int) -> bytes:
            changed = bytearray(data)
            for down, right in ((0, 0), (0, 1), (1, 0), (1, 1)):
                at = 800_000 + 8 * (512 * (row + apart * down) + column + apart * right) - before
                # A byte that can be one more or less; all numbers are the same, so at all corners it is the same one.
                for place in range(max(at, 0), min(at + 4, len(data))):
                    if 0 < changed[place] < 255:
                        changed[place] += 1 if down == right else -1
                        break
            return bytes(changed)

        return change

    return of_a_connection


@pytest.mark.transport("network")
@pytest.mark.parametrize("secret", ["a word", ""], ids=["given", "made up"])
def test_a_relay_that_forges_checksums_changes_no_tensor_if_a_secret_is_set(
    secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A secret chosen by rank 0 could be read by the relay. The test shows that this relay forges messages then."""
    monkeypatch.setenv("SHOAL_SECRET", secret)
    fooled = False
    for seed in range(5):  # what he wants to change may come in two pieces, and he looks at one
        with in_the_middle(forges(random.Random(seed))):
            results = shoal.Fleet(2, transport="network", timeout=5.0).run(rounds)
        fooled = fooled or any(wrong for _, wrong, _ in results)
        assert not secret or all(not wrong and end for _, wrong, end in results), results
    assert fooled == (not secret)


@pytest.mark.parametrize("over", OVER)
def test_changes_by_a_relay_are_detected(over: str) -> None:
    attack(over, 0, 15)


@pytest.mark.soak
@pytest.mark.parametrize("over", OVER)
def test_changes_by_a_relay_are_detected_in_a_thousand_jobs(over: str) -> None:
    attack(over, 1000, 1000)
