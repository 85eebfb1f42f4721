"""Packed integers in a message: codes of a few bits each, and ascending places.

``d`` codes of ``bits`` bits are ``ceil(d bits / 8)`` bytes, without a gap. Their whole bytes come first, the lowest of
all codes, then the next; then the remaining bits of each, eight codes in as many bytes as there are such bits, the
first code in the lowest bits. So a range of codes that begins at a multiple of eight can be written and read
separately. Unused bits of the last byte are zero.

``k`` ascending places among ``d`` have one bit for every place, or Elias and Fano's form, whichever is shorter. That
form has the lowest ``l = floor(log2(d / k))`` bits of each place unchanged, packed. The rest of a place, at most
``(d - 1) >> l``, is in a row of bits, of which bit ``(place >> l) + i`` is set for the i-th: ``k l`` and
``k + ((d - 1) >> l)`` bits, each filled up to bytes, between ``l + 2`` and ``l + 3`` for each place. Places of four
bytes would never save more than one byte, and only from d = 2^29 on. If all places are sent, they need no bytes.
"""

from __future__ import annotations

import torch

from ..kernels import native

_TOGETHER = {2: torch.int32, 4: torch.int16}
"""As many bytes as one has codes: an integer that becomes one byte."""


def packed_bytes(d: int, bits: int) -> int:
    return -(-d * bits // 8)


class Packed:
    """``d`` codes of ``bits`` bits in a message.

    A code is uint8 where it has 8 bits or fewer, else int64, and not negative.

    Args:
        data: uint8 ``[packed_bytes(d, bits)]``.
        bits: From 0, which are no bytes and codes of zero, to 63.
    """

    def __init__(self, data: torch.Tensor, d: int, bits: int) -> None:
        self.d, self.bits = d, bits
        planes, self._rest = divmod(bits, 8)
        self._planes, self._packed = data[: planes * d].view(planes, d), data[planes * d :]

    def put(self, start: int, codes: torch.Tensor) -> None:
        """Write ``[n]`` codes from place ``start`` on, a multiple of 8; ``n`` is one, too, or reaches the end."""
        stop = start + len(codes)
        for number, plane in enumerate(self._planes):
            plane[start:stop] = codes >> 8 * number if number else codes
        if self._rest:
            if len(self._planes):
                codes = (codes >> 8 * len(self._planes)) & ((1 << self._rest) - 1)
            target = self._packed[start // 8 * self._rest :][: packed_bytes(len(codes), self._rest)]
            if native.pack(target, codes, self._rest):
                return
            packed = _pack(_filled(codes.to(torch.uint8), 8), self._rest)
            target.copy_(packed[: len(target)])

    def take(self, start: int, stop: int) -> torch.Tensor:
        """The codes of places ``start``, a multiple of 8, to ``stop``, one or the end."""
        if self.bits <= 8 and len(self._planes):
            return self._planes[0][start:stop]
        codes = None
        if self._rest:
            packed = self._packed[start // 8 * self._rest : packed_bytes(stop, self._rest)]
            codes = torch.empty(stop - start, dtype=torch.uint8, device=packed.device)
            if not native.unpack(codes, packed, self._rest):
                codes = _unpack(_filled(packed, self._rest), self._rest)[: stop - start]
            if self.bits < 8:
                return codes
        total = torch.zeros(stop - start, dtype=torch.int64, device=self._packed.device)
        if codes is not None:
            total |= codes.to(torch.int64) << 8 * len(self._planes)
        for number, plane in enumerate(self._planes):
            total |= plane[start:stop].to(torch.int64) << 8 * number
        return total

    def check(self) -> None:
        """Raise ValueError if the last byte has more than codes, and it is not zero."""
        used = self.d * self._rest % 8
        if used and int(self._packed[-1]) >> used:
            raise ValueError("the bits that fill up its last byte are not zero")


def _filled(codes: torch.Tensor, multiple: int) -> torch.Tensor:
    """With zeros up to a multiple of so many."""
    more = -len(codes) % multiple
    return torch.cat([codes, codes.new_zeros(more)]) if more else codes


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 ``[8 m]`` below ``2^bits``, to uint8 ``[m bits]``: the bytes of a larger integer close up."""
    if codes.data_ptr() % 8:
        codes = codes.clone()
    if bits == 1:
        # The product has byte i, which is 0 or 1, as bit 56 + i.
        return ((codes.view(torch.int64) * 0x0102040810204080) >> 56).to(torch.uint8)
    if bits in _TOGETHER:
        many = codes.view(_TOGETHER[bits])
        packed = many.clone()
        for number in range(1, 8 // bits):
            packed |= many >> number * (8 - bits)
        return packed.to(torch.uint8)
    eight = codes.view(torch.int64)
    for lane, have in ((8, bits), (16, 2 * bits), (32, 4 * bits)):
        low = _lanes(2 * lane, have)
        eight = (eight & low) | ((eight & (low << lane)) >> (lane - have))
    return eight.view(torch.uint8).view(-1, 8)[:, :bits].reshape(-1)


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 ``[m bits]`` to uint8 ``[8 m]``."""
    if bits == 1:
        # A copy of all eight bits in each byte, of which one is kept.
        eight = packed.to(torch.int64) * 0x0101010101010101
        return eight.bitwise_and_(0x8040201008040201 - (1 << 64)).view(torch.uint8).clamp_(max=1)
    if bits in _TOGETHER:
        some = packed.to(_TOGETHER[bits])
        many = some.clone()
        for number in range(1, 8 // bits):
            many |= some << number * (8 - bits)
        return many.bitwise_and_(_lanes(8, bits) & ((1 << 8 * many.itemsize) - 1)).view(torch.uint8)
    wide = packed.new_zeros((len(packed) // bits, 8))
    for column, read in zip(wide.T, packed.view(-1, bits).T, strict=False):
        column.copy_(read)
    eight = wide.view(torch.int64).view(-1)
    for lane, have in ((32, 4 * bits), (16, 2 * bits), (8, bits)):
        low = _lanes(2 * lane, have)
        eight = (eight & low) | ((eight << (lane - have)) & (low << lane))
    return eight.view(torch.uint8)


def _lanes(width: int, bits: int) -> int:
    """The lowest ``bits`` bits of each lane of so many bits, as an int64."""
    return sum(((1 << bits) - 1) << at for at in range(0, 64, width))


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
