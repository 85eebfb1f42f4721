"""The requests of the clients of torch's ``TCPStore``, and the format of their arguments.

A request is a byte with its kind, then its arguments in the byte order of the machine: strings and values with their
lengths before them (64 bits), numbers (64 bits), several keys with their count before them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum
from itertools import chain, repeat

LONGEST_KEY, LONGEST_VALUE, MOST_KEYS, LONGEST_REQUEST = 1 << 13, 1 << 23, 1 << 17, 1 << 28
"""The limits of torch's server for one request: bytes of a key, bytes of a value, number of keys, bytes in all."""
INT, LENGTH, WORD = struct.Struct("=q"), struct.Struct("=Q"), struct.Struct("=I")


class StoreRequest(IntEnum):
    """The first byte of a request."""

    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    NUM_KEYS = 7
    DELETE_KEY = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    CANCEL_WAIT = 12
    PING = 13
    QUEUE_PUSH = 14
    QUEUE_POP = 15
    QUEUE_LEN = 16
    LIST_KEYS = 17
    BARRIER = 18


class InvalidRequest(Exception):
    """A request that is malformed or exceeds a quota. Its connection is closed."""


_SHAPES = {
    StoreRequest.VALIDATE: "w",
    StoreRequest.SET: "sv",
    StoreRequest.COMPARE_SET: "svv",
    StoreRequest.GET: "s",
    StoreRequest.ADD: "sn",
    StoreRequest.CHECK: "S",
    StoreRequest.WAIT: "S",
    StoreRequest.NUM_KEYS: "",
    StoreRequest.DELETE_KEY: "s",
    StoreRequest.APPEND: "sv",
    StoreRequest.MULTI_GET: "S",
    StoreRequest.MULTI_SET: "P",
    StoreRequest.CANCEL_WAIT: "",
    StoreRequest.PING: "w",
    StoreRequest.QUEUE_PUSH: "sv",
    StoreRequest.QUEUE_POP: "s",
    StoreRequest.QUEUE_LEN: "s",
    StoreRequest.LIST_KEYS: "",
    StoreRequest.BARRIER: "sn",
}
"""Arguments: a string (s), value (v), number (n) or word (w), several strings (S), or pairs of string and value (P)."""
_LIMITS = {"s": LONGEST_KEY, "v": LONGEST_VALUE}
_SIZES = {"n": INT.size, "w": WORD.size}
_REPEATED = {"S": "s", "P": "sv"}


def scan(data: bytearray) -> Iterator[int]:
    """Find the end of the first request in a buffer.

    Each call of ``next`` continues at the position of the last one. So a client that sends many keys one by one costs
    no more than a client that sends them at once.

    Args:
        data: The buffer. It may grow, at its end, between two calls.

    Yields:
        0 while the request is not complete, then its length.

    Raises:
        InvalidRequest: There is no such request, or it exceeds the limits.
    """
    if data[0] not in _SHAPES:
        raise InvalidRequest
    end = 1
    for shape in _SHAPES[StoreRequest(data[0])]:
        fields: Iterable[str] = shape
        if shape in _REPEATED:
            while len(data) < end + LENGTH.size:
                yield 0
            [count] = LENGTH.unpack_from(data, end)
            if count > MOST_KEYS:
                raise InvalidRequest
            end += LENGTH.size
            fields = chain.from_iterable(repeat(_REPEATED[shape], count))
        for field in fields:
            size = _SIZES.get(field, 0)
            if not size:
                while len(data) < end + LENGTH.size:
                    yield 0
                [length] = LENGTH.unpack_from(data, end)
                if length > _LIMITS[field]:
                    raise InvalidRequest
                size = LENGTH.size + length
            end += size
            if end > LONGEST_REQUEST:
                raise InvalidRequest
    while len(data) < end:
        yield 0
    yield end


class Arguments:
    """Reads the arguments of a complete request, in their order."""

    def __init__(self, data: bytearray) -> None:
        self._data = data
        self._at = 1

    def _take(self, count: int) -> bytes:
        begin, self._at = self._at, self._at + count
        return bytes(self._data[begin : self._at])

    def number(self) -> int:
        return int(INT.unpack(self._take(INT.size))[0])

    def count(self) -> int:
        return int(LENGTH.unpack(self._take(LENGTH.size))[0])

    def word(self) -> bytes:
        return self._take(WORD.size)

    def text(self) -> bytes:
        """Read a string or a value."""
        return self._take(self.count())

    def texts(self) -> list[bytes]:
        return [self.text() for _ in range(self.count())]
