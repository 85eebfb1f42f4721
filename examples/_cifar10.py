"""CIFAR-10 (Krizhevsky 2009) from its standard folder ``cifar-10-batches-py``, and batches of it for each agent.

The files of that folder are pickles, and a pickle can run anything on the machine that reads it. These are read by an
unpickler that knows arrays and bytes and refuses everything else.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import BatchSampler

LABELS, SIDE, PADDING = 10, 32, 4
TRAIN, TEST = [f"data_batch_{number}" for number in range(1, 6)], ["test_batch"]
WHERE = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
"""Of the training images' red, green and blue, where 1 is the brightest; and how much they vary."""
DEVIATION = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)


@dataclass(frozen=True)
class Images:
    """Images uint8 [m, 3, 32, 32], and what they show, int64 [m] with values 0 to 9."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, chosen: Iterable[int], size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The chosen images in batches, augmented. The last ones, too few for a batch, are left out.

        An image is cropped and flipped as its own draw of this epoch says, whoever sees it. So with images that
        `shoal.data.AgentSampler` chooses, which deals one order out to all agents, an epoch is the same for any number
        of agents with as many images in all their batches together.

        Args:
            chosen: Numbers of images, in their order.
            size: Images in a batch.
            seed: Of the draws; another one for each epoch, the same on all agents.
        """
        generator = torch.Generator().manual_seed(seed)
        corners = torch.randint(2 * PADDING + 1, (len(self), 2), generator=generator)
        mirrored = torch.randint(2, (len(self),), generator=generator).bool()
        for batch in BatchSampler(chosen, size, drop_last=True):
            yield _ready(_crop(self.pixels[batch], corners[batch], mirrored[batch])), self.labels[batch]

    def in_order(self, size: int = 500) -> Iterator[tuple[Tensor, Tensor]]:
        """All images as they are, for a test."""
        for pixels, labels in zip(torch.split(self.pixels, size), torch.split(self.labels, size), strict=True):
            yield _ready(pixels), labels

    def part(self, rank: int, agents: int) -> Images:
        """Every `agents`-th image, from the `rank`-th on."""
        return Images(self.pixels[rank::agents], self.labels[rank::agents])


def _crop(pixels: Tensor, corners: Tensor, mirrored: Tensor) -> Tensor:
    """32 x 32 pixels of each image from its corner on, with black around the edges, or their mirror image.

    As He et al. 2015 (arXiv:1512.03385, section 4.2) do it.
    """
    span = torch.arange(SIDE)
    rows, columns = (corners[:, axis : axis + 1] + span for axis in (0, 1))
    columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    images = torch.arange(len(pixels))[:, None, None]
    cropped = pad(pixels, (PADDING,) * 4)[images, :, rows[:, :, None], columns[:, None, :]]  # [m, rows, columns, 3]
    return cropped.permute(0, 3, 1, 2)


def _ready(pixels: Tensor) -> Tensor:
    """Float32 with mean 0 and deviation 1, a pixel's three colours side by side in memory, as convolutions like it."""
    return pixels.float().div(255).sub(MEAN).div(DEVIATION).contiguous(memory_format=torch.channels_last)


def load(folder: str | Path, limit_train: int = 0, limit_test: int = 0) -> tuple[Images, Images]:
    """The images to train on and those to test with.

    Args:
        folder: ``cifar-10-batches-py``, or the folder that it lies in.
        limit_train, limit_test: Take no more than so many, the first; 0 for all.

    Raises:
        SystemExit: A file is missing, or it is not what it should be.
    """
    folder = Path(folder)
    if (folder / "cifar-10-batches-py").is_dir():
        folder /= "cifar-10-batches-py"
    missing = [name for name in [*TRAIN, *TEST] if not (folder / name).is_file()]
    if missing:
        raise SystemExit(
            f"{folder} lacks {', '.join(missing)}. It should be the folder cifar-10-batches-py of {WHERE}: unpack that "
            "and name the folder with --data"
        )
    return _images(folder, TRAIN, limit_train), _images(folder, TEST, limit_test)


def _images(folder: Path, names: list[str], limit: int) -> Images:
    batches: list[Images] = []
    for name in names:
        batches.append(read(folder / name))
        if limit and sum(map(len, batches)) >= limit:
            break
    pixels, labels = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("pixels", "labels"))
    return Images(pixels[: limit or None], labels[: limit or None])


def read(path: Path) -> Images:
    """One file of the folder: a pickled dict with ``b"data"``, uint8 [m, 3072], and ``b"labels"``, m numbers.

    Raises:
        SystemExit: It is not that.
    """
    try:
        with path.open("rb") as file:
            batch = _Unpickler(file, encoding="bytes").load()
    except _Refused as refused:
        raise SystemExit(f"{path} asks for {refused}, which no file of CIFAR-10 needs; it was not read") from None
    except Exception as error:  # a damaged pickle raises whatever its bytes happen to mean
        raise SystemExit(f"{path} is damaged, or no file of CIFAR-10: {type(error).__name__}: {error}") from None
    expected = "a dict with b'data', uint8 [m, 3072], and b'labels', m whole numbers from 0 to 9"
    data, labels = (batch.get(b"data"), batch.get(b"labels")) if isinstance(batch, dict) else (None, None)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape[1:] != (3 * SIDE * SIDE,):
        found = f"{data.dtype} {list(data.shape)}" if isinstance(data, np.ndarray) else "no such array"
        raise SystemExit(f"{path}: expected {expected}; its data is {found}")
    if not isinstance(labels, list) or len(labels) != len(data) or not all(_is_label(label) for label in labels):
        raise SystemExit(f"{path}: expected {expected}; its labels are not that, for {len(data)} images")
    pixels = torch.from_numpy(np.ascontiguousarray(data)).view(-1, 3, SIDE, SIDE)
    return Images(pixels, torch.tensor(labels, dtype=torch.int64))


def _is_label(label: object) -> bool:
    return type(label) is int and 0 <= label < LABELS


class _Refused(Exception):
    """A pickle asks for what it has no business with."""


class _Unpickler(pickle.Unpickler):
    """Knows what arrays and bytes are made of, under the names of Python 2 and 3 and of all versions of NumPy."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "_codecs" and name == "encode":
            return _latin1
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if (module, name) in [(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")]:
            return _reconstruct
        if (module, name) in [(f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")]:
            return _frombuffer
        raise _Refused(f"{module}.{name}")


def _latin1(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes for Python 2."""
    if encoding != "latin1":
        raise _Refused(f"the encoding {encoding}")
    return text.encode("latin1")


def _reconstruct(kind: type, shape: tuple[int, ...], dtype: object) -> Any:
    """An empty array, which the pickle then fills."""
    if kind is not np.ndarray or shape != (0,):
        raise _Refused(f"an array of {kind} {shape}")
    return np.ndarray(shape, np.uint8)


def _frombuffer(data: bytes, dtype: np.dtype[Any], shape: tuple[int, ...], order: str) -> Any:
    """An array in the pickles of protocol 5."""
    return np.frombuffer(data, dtype).reshape(shape, order="F" if order == "F" else "C")
