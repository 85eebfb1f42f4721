"""Horovod's module name for the compressors of its PyTorch front end."""

from .reduce_options import Compression as Compression
from .reduce_options import Compressor as Compressor
from .reduce_options import FP16Compressor as FP16Compressor
from .reduce_options import NoneCompressor as NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
