"""Datasets that are read from their beginning (``IterableDataset``): their number of samples is known only at the end.

Accelerate makes every process read the whole stream and take its part. If the last round of batches is not full, the
stream's first samples fill it up, and an evaluation has to remove them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate.data_loader import IterableDatasetShard
from accelerate.state import GradientState
from torch.utils.data import IterableDataset


class Counted(IterableDataset[Any]):
    """A stream that counts its samples.

    Attributes:
        total: How many there were, once it has been read to its end in this process; None before.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.total: int | None = None

    def __iter__(self) -> Iterator[Any]:
        count = 0
        for one in self._stream:
            count += 1
            yield one
        self.total = count

    def __len__(self) -> int:
        return len(self._stream)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of an object that is just being unpickled, too
            raise AttributeError(name)
        return getattr(self._stream, name)


def count_samples(loader: Any) -> None:
    """Count the samples of a prepared loader's stream, if it reads one."""
    shard = getattr(loader, "dataset", None)
    if isinstance(shard, IterableDatasetShard) and not isinstance(shard.dataset, Counted):
        shard.dataset = Counted(shard.dataset)


def samples_of_last_round(state: GradientState) -> int:
    """How many samples of the batches that all agents have now are not there for a second time; 0 means all."""
    if not state.end_of_dataloader:
        return 0
    shard = getattr(state.active_dataloader, "dataset", None)
    if not isinstance(shard, IterableDatasetShard) or not isinstance(shard.dataset, Counted):
        return max(int(state.remainder), 0)
    if shard.drop_last or shard.dataset.total is None:
        return 0
    together: int = shard.batch_size * (1 if shard.split_batches else shard.num_processes)
    return shard.dataset.total % together
