"""Compressors: shorter messages for the algorithms that support them.

A :class:`Compressor` maps a tensor to its receivers' tensor after decompression, and gives the number of bytes of the
message. ``encode`` makes these bytes, and ``decode`` makes the same tensor from them. The algorithms built for it are
CHOCO-SGD, DeepSqueeze, BEER and low-precision D-PSGD. Between machines the bytes are sent; within a machine whole
tensors are read in place.
"""

from .._lazy_import import public_names as _public_names
from .compressor import Cast as Cast
from .compressor import Compressor as Compressor
from .compressor import Identity as Identity
from .compressor import LowRank as LowRank
from .compressor import Shrunk as Shrunk
from .compressor import Zstd as Zstd
from .quantise import QSGD as QSGD
from .quantise import MinMaxUInt8 as MinMaxUInt8
from .quantise import Sign as Sign
from .random_numbers import Draws as Draws
from .sparse import RandomK as RandomK
from .sparse import TopK as TopK

__all__ = _public_names(globals())
