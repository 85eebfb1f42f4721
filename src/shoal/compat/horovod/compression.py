"""Horovod's module name for the compressors of its PyTorch front end."""

from .reductions import Compression as Compression
from .reductions import Compressor as Compressor
from .reductions import FP16Compressor as FP16Compressor
from .reductions import NoneCompressor as NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
