"""Entropy coding of another compressor's messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .compressor import Around, check_dtype, check_message
from .draws import Draws


@dataclass(frozen=True)
class Zstd(Around):
    """The same numbers in fewer bytes: another compressor's messages through zstd (RFC 8878).

    Of 8-bit messages about a sixth to a quarter is left out, of 4-bit ones a third, of bfloat16 a fifth; signs are as
    short as they can be. It takes about a millisecond for a megabyte, at each end. How long a message gets depends on
    the numbers; :meth:`nbytes` says the most, and :meth:`encode` gives such messages of a vector alone, while those of
    the rows of a matrix stay as the compressor makes them.

    Args:
        compressor: The compressor of the messages.
        level: The level of zstd, 1 or more; higher levels are slower, with little gain here.

    Raises:
        ModuleNotFoundError: zstandard is not installed: ``pip install 'shoal[zstd]'``.
        ValueError: There is no such level.
    """

    level: int = 1

    varies = True

    def __post_init__(self) -> None:
        most = _zstandard().MAX_COMPRESSION_LEVEL
        if not 1 <= self.level <= most:
            raise ValueError(f"level={self.level}: pass 1 to {most}")

    def __call__(self, x: torch.Tensor, mix: Draws) -> torch.Tensor:
        return self.compressor(x, mix)

    @property
    def unbiased(self) -> bool:
        return self.compressor.unbiased

    def omega(self, d: int) -> float:
        return self.compressor.omega(d)

    def encode(self, x: torch.Tensor, draws: Draws) -> torch.Tensor:
        message = self.compressor.encode(x, draws)
        if message.dim() > 1 or not message.numel():
            return message
        packed = _zstandard().ZstdCompressor(level=self.level).compress(message.cpu().numpy().data)
        if len(packed) >= len(message):
            return message
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(message.device)

    def decode(
        self, data: torch.Tensor, d: int, dtype: torch.dtype, draws: Draws, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.compressor.decode(self._unpacked(data, d, dtype), d, dtype, draws, out=out)

    def add_decoded(
        self,
        total: torch.Tensor,
        data: torch.Tensor,
        weight: float,
        draws: Draws,
        *,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        data = self._unpacked(data, total.shape[-1], dtype or total.dtype)
        return self.compressor.add_decoded(total, data, weight, draws, dtype=dtype)

    def _unpacked(self, data: torch.Tensor, d: int, dtype: torch.dtype) -> torch.Tensor:
        """The compressor's message. A message is unpacked only if its header states exactly the expected number of
        bytes.
        """
        check_dtype(dtype)
        if d < 0 or data.dim() != 1 or data.dtype != torch.uint8 or len(data) >= self.nbytes(d, dtype):
            return data
        nbytes = self.nbytes(d, dtype)
        zstandard, packed = _zstandard(), data.contiguous().cpu().numpy().data
        description = f"{self!r} of {d} numbers in {dtype}"
        try:
            says = zstandard.get_frame_parameters(packed).content_size
            if says != nbytes:
                raise ValueError(f"a message that unpacks to {says} bytes, not to {nbytes}: it should be {description}")
            unpacked = zstandard.ZstdDecompressor().decompress(packed, max_output_size=nbytes)
        except zstandard.ZstdError as error:
            raise ValueError(
                f"a message of {len(data)} bytes that zstd cannot unpack ({error}): it should be {description}"
            ) from None
        found = torch.frombuffer(bytearray(unpacked), dtype=torch.uint8).to(data.device)
        check_message(found, nbytes, description)
        return found


def _zstandard() -> Any:
    try:
        import zstandard
    except ModuleNotFoundError:
        raise ModuleNotFoundError("Zstd needs zstandard: pip install 'shoal[zstd]'", name="zstandard") from None
    return zstandard
