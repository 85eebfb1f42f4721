"""Recovery from a cut connection: which units are sent again, when the receiver acknowledges, when it gives up."""

from __future__ import annotations

import pytest

from shoal.errors import ProtocolError
from shoal.transport.retransmit import (
    ACKNOWLEDGE_AFTER_BYTES,
    ACKNOWLEDGE_AFTER_UNITS,
    MOST_CORRUPT,
    ReceivedOffset,
    SendBuffer,
)


def sent(*units: int) -> SendBuffer[int]:
    result: SendBuffer[int] = SendBuffer()
    for unit in units:
        result.keep(unit)
    return result


def again(one: SendBuffer[int]) -> list[int | None]:
    results = []
    while not one.idle:
        results.append(one.next_to_resend())
    return results


def test_only_unacknowledged_units_are_sent_again_in_order_and_once() -> None:
    one = sent(1, 2, 3, 4)
    one.acknowledge(1)
    assert one.idle and one.next_to_resend() is None
    one.resend_after(2)
    assert again(one) == [3, 4]


def test_units_overtaken_by_a_second_cut_are_sent_again_before_newer_ones() -> None:
    one = sent(1, 2, 3)
    one.resend_after(0)
    one.keep(one.next_to_resend() or 0)
    one.resend_after(0)
    assert again(one) == [1, 2, 3]


@pytest.mark.parametrize("count", [0, 4])
def test_an_impossible_offset_is_refused(count: int) -> None:
    one = sent(1, 2, 3)
    one.acknowledge(1)
    with pytest.raises(ProtocolError, match=f"it confirmed {count} packets; 1 to 3 were expected"):
        one.acknowledge(count)


def test_the_receiver_acknowledges_after_a_number_of_units_or_bytes() -> None:
    offset = ReceivedOffset()
    assert [offset.one_more(1) for _ in range(ACKNOWLEDGE_AFTER_UNITS)] == [False] * (ACKNOWLEDGE_AFTER_UNITS - 1) + [
        True
    ]
    assert offset.report() == ACKNOWLEDGE_AFTER_UNITS
    assert not offset.one_more(ACKNOWLEDGE_AFTER_BYTES - 1) and offset.one_more(1)
    assert offset.report() == ACKNOWLEDGE_AFTER_UNITS + 2
    assert not offset.one_more(1)


def test_only_consecutive_corrupt_units_count() -> None:
    offset = ReceivedOffset()
    for _ in range(2):
        assert [offset.add_corrupt() for _ in range(MOST_CORRUPT - 1)] == [False] * (MOST_CORRUPT - 1)
        offset.one_more(1)
    assert [offset.add_corrupt() for _ in range(MOST_CORRUPT)] == [False] * (MOST_CORRUPT - 1) + [True]
