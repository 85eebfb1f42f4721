"""The vectors that agents exchange in a coordination round, as bytes and combined."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.coordination.round import Vector

VECTORS = st.builds(
    Vector,
    st.sampled_from([b"a" * 8, b"b" * 8]),
    st.integers(0, 1 << 300),
    st.booleans(),
    st.integers(0, 1 << 70),
    st.integers(0, 5),
)


@given(VECTORS)
@settings(max_examples=200)
def test_an_encoded_vector_is_decoded_equally(one: Vector) -> None:
    assert Vector.of(one.as_tensor()) == one


def test_request_bits_are_intersected_and_flags_united() -> None:
    vector = Vector(b"a" * 8, 0b1100, asks=True)
    other = Vector(b"a" * 8, 0b0110, leaving=0b10)
    assert vector.combined_with(other, 1) == Vector(b"a" * 8, 0b0100, True, 0b10)


def test_another_cache_is_detected_and_reported() -> None:
    one, other = Vector(b"a" * 8, 1), Vector(b"b" * 8, 1)
    assert one.combined_with(other, 3).differs == 4
    assert one.combined_with(Vector(b"a" * 8, 1, differs=2), 3).differs == 2


@given(VECTORS, VECTORS)
@settings(max_examples=100)
def test_merging_is_idempotent(one: Vector, other: Vector) -> None:
    together = one.combined_with(other, 1)
    assert together.combined_with(other, 1) == together
    assert together.combined_with(one, 0).bits == together.bits


@pytest.mark.parametrize("raw", [b"", b"x" * 20, b"x" * 100, bytes(Vector(b"a" * 8, 7).as_tensor().numpy())[:-1]])
def test_invalid_messages_are_refused(raw: bytes) -> None:
    with pytest.raises(ValueError):
        Vector.of(torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8))
