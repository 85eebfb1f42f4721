"""``k`` ascending places among ``d``, in few bytes: one bit for every place, or Elias-Fano, whichever is shorter.

Elias and Fano's form has the lowest ``l = floor(log2(d / k))`` bits of each place unchanged, packed. The rest of a
place, at most ``(d - 1) >> l``, is in a row of bits, of which bit ``(place >> l) + i`` is set for the i-th: ``k l`` and
``k + ((d - 1) >> l)`` bits, each filled up to bytes, between ``l + 2`` and ``l + 3`` for each place. Places of four
bytes would never save more than one byte, and only from d = 2^29 on. If all places are sent, they need no bytes.
"""

from __future__ import annotations

import torch

from ..kernels.native import codecs as native
from .bits import Packed, packed_bytes


def positions_bytes(k: int, d: int) -> int:
    return 0 if k == d else min(packed_bytes(d, 1), sum(_elias_fano(k, d)))


def _low_bits(k: int, d: int) -> int:
    return (d // k).bit_length() - 1


def _separate_bits(k: int, d: int) -> int | None:
    """``l`` of Elias-Fano; None where a bit for every place is shorter."""
    return None if positions_bytes(k, d) == packed_bytes(d, 1) else _low_bits(k, d)


def _elias_fano(k: int, d: int) -> tuple[int, int]:
    """Bytes of the lowest bits, and of the row of bits."""
    low = _low_bits(k, d)
    return packed_bytes(k, low), packed_bytes(k + ((d - 1) >> low), 1)


def write_positions(d: int, places: torch.Tensor, data: torch.Tensor) -> None:
    """Write ``places`` (int64 ``[k]``, ascending, below ``d``) into ``data`` ``[positions_bytes(k, d)]``."""
    k = len(places)
    if k == d:
        return
    if native.write_places(data, places, d, _separate_bits(k, d)):
        return
    if _separate_bits(k, d) is None:
        chosen = torch.zeros(d, dtype=torch.uint8, device=data.device)
        chosen[places] = 1
        Packed(data, d, 1).put(0, chosen)
        return
    low, (lower, _) = _low_bits(k, d), _elias_fano(k, d)
    length = k + ((d - 1) >> low)
    marks = torch.zeros(length, dtype=torch.uint8, device=data.device)
    marks[(places >> low) + torch.arange(k, device=data.device)] = 1
    if low:
        lowest = places & ((1 << low) - 1)
        Packed(data[:lower], k, low).put(0, lowest.to(torch.uint8) if low <= 8 else lowest)
    Packed(data[lower:], length, 1).put(0, marks)


def read_positions(data: torch.Tensor, k: int, d: int) -> torch.Tensor:
    """int64 ``[k]``, ascending.

    Raises:
        ValueError: The bytes are not ``k`` ascending places below ``d``.
    """
    if k == d:
        return torch.arange(d, device=data.device)
    read = native.read_places(data, k, d, _separate_bits(k, d))
    if read is not None:
        return read
    # By torch, which also finds what is wrong with bytes that the kernel refuses.
    if _separate_bits(k, d) is None:
        return _set_bits(data, d, k)
    low, (lower, _) = _low_bits(k, d), _elias_fano(k, d)
    places = (_set_bits(data[lower:], k + ((d - 1) >> low), k) - torch.arange(k, device=data.device)) << low
    if low:
        packed = Packed(data[:lower], k, low)
        packed.check()
        places |= packed.take(0, k).to(torch.int64)
    if int(places[-1]) >= d:
        raise ValueError(f"position {int(places[-1])} of {d} numbers is out of range")
    wrong = (places[1:] <= places[:-1]).nonzero()
    if len(wrong):
        first, second = places[int(wrong[0]) :][:2].tolist()
        raise ValueError(f"its positions do not ascend: {second} comes after {first}")
    return places


def _set_bits(data: torch.Tensor, length: int, k: int) -> torch.Tensor:
    """int64 ``[k]``, where bits are set, of so many."""
    packed = Packed(data, length, 1)
    packed.check()
    places = packed.take(0, length).nonzero().view(-1)
    if len(places) != k:
        raise ValueError(f"it has {len(places)} positions, and should have {k}")
    return places
