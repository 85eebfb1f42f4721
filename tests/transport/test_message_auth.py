"""Sealed messages open unchanged, in order, with the key; and checksums detect errors."""

from __future__ import annotations

import hashlib
import random
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ProtocolError
from shoal.transport.authentication import ChecksumSeal, CorruptMessage, MacSeal
from shoal.transport.network_link import strong, sums, unchecked

few = settings(max_examples=100)


@few
@given(packets=st.lists(st.binary(min_size=1, max_size=2000), min_size=1, max_size=5))
def test_sealed_messages_are_opened(packets: list[bytes]) -> None:
    for sender, receiver in ((MacSeal(b"key"), MacSeal(b"key")), (ChecksumSeal(), ChecksumSeal())):
        for packet in packets:
            sealed = sender.close(packet)
            assert len(sealed) == sender.size + len(packet)
            assert bytes(receiver.open(memoryview(sealed))) == packet


@pytest.mark.parametrize("nbytes", [1, 511, 512, 513, 5000])
def test_another_key_sequence_number_or_length_is_refused(nbytes: int) -> None:
    packet = bytes(range(256)) * 20
    first, second = (MacSeal(b"key"), MacSeal(b"key"))
    sealed, next_one = first.close(packet[:nbytes]), first.close(packet[:nbytes])
    for wrong in (next_one, sealed[:-1], sealed + b"\0", sealed[1:], b"", sealed[:8]):
        with pytest.raises(ProtocolError, match="modified in transit, or was not sent by it"):
            MacSeal(b"key").open(memoryview(wrong))
    with pytest.raises(ProtocolError):
        MacSeal(b"other").open(memoryview(sealed))
    second.open(memoryview(sealed))
    with pytest.raises(ProtocolError):
        second.open(memoryview(sealed))


@pytest.mark.parametrize("nbytes", [1, 7, 8, 9, 4095, 4096, 4097, 12_345, 1 << 20])
@pytest.mark.parametrize("offset", [0, 1])
def test_checksums_detect_flipped_bits_and_moved_bytes(nbytes: int, offset: int) -> None:
    draws = random.Random(nbytes)
    data = bytearray(draws.randbytes(nbytes + offset))
    chunk = memoryview(data)[offset:]
    full = sums(chunk)
    assert sums(memoryview(bytes(chunk))) == full  # wherever it lies
    for _ in range(200):
        for flips in (1, 2, 3):
            places = draws.sample(range(8 * nbytes), flips)
            for place in places:
                chunk[place // 8] ^= 1 << place % 8
            assert sums(chunk) != full, places
            for place in places:
                chunk[place // 8] ^= 1 << place % 8
        one, other = draws.randrange(nbytes), draws.randrange(nbytes)
        if chunk[one] != chunk[other]:
            chunk[one], chunk[other] = chunk[other], chunk[one]
            assert sums(chunk) != full
            chunk[one], chunk[other] = chunk[other], chunk[one]
    assert sums(chunk) == full
    if nbytes > 1:
        assert sums(chunk[:-1]) != full or not chunk[-1]


@pytest.mark.parametrize("rows", [(3, 3), (3, 7)], ids=["within a row", "within a column"])
def test_checksums_detect_swapped_words(rows: tuple[int, int]) -> None:
    """A swap within a row changes the column sums, and one within a column the row sums: both are needed."""
    words = np.arange(10 * 512, dtype=np.uint64).reshape(10, 512)
    full = sums(memoryview(words).cast("B"))
    one, other = (rows[0], 5), (rows[1], 5 if rows[0] != rows[1] else 9)
    words[one], words[other] = words[other], words[one]
    assert sums(memoryview(words).cast("B")) != full


def test_each_check_has_its_own_error() -> None:
    empty = memoryview(b"")
    assert len({check(empty) for check in (sums, strong, unchecked)}) == 3
    assert strong(memoryview(b"a")) != strong(memoryview(b"b"))


def test_the_hash_of_a_long_packet_does_not_have_its_seal() -> None:
    """A packet over 512 bytes is sealed by its hash and length, which must not form a packet with the same seal."""
    long = b"x" * 10_000
    seal = MacSeal(b"key").close(long)[: MacSeal.size]
    forged = hashlib.sha256(long).digest() + struct.pack("<Q", len(long))
    assert bytes(MacSeal(b"key").open(memoryview(seal + long))) == long
    with pytest.raises(CorruptMessage):
        MacSeal(b"key").open(memoryview(seal + forged))
