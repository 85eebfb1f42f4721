"""The command-line options of training, without the torch that :class:`.Training` needs."""

from __future__ import annotations

DIFFERENCE = 0.01
"""The difference of agents' gradients at the begin of training on shuffled data, whose batches still differ."""
ACCURACY = 0.1
"""The share of the mean gradient's length that is left at the end of training."""
COMPRESSION = "0.5 (half of the bytes), topk:0.01, randomk:0.01, qsgd:127 (levels), sign or uint8"
"""How compression is written."""
