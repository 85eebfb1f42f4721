"""What a command line says of training, without the torch that :class:`.Training` needs."""

from __future__ import annotations

DIFFERENCE = 0.01
"""How much agents' gradients differ where training begins, of shuffled data, whose batches still differ."""
ACCURACY = 0.1
"""What is left of the mean gradient's length where training is to end."""
COMPRESSION = "0.5 (half of the bytes), topk:0.01, randomk:0.01, qsgd:127 (levels), sign or uint8"
"""How compression is written."""
