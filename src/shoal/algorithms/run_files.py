"""Files of tensors and plain data without pickle: a numpy archive of bytes, and a description of them in JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray

_KIND = "shoal run, version 1"
_PLAIN = (bool, int, float, str, type(None))


def write_tree(tree: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a dict of tensors, numbers, strings, None, and tuples, lists and dicts of these.

    A tensor that occurs in two places is written once, and is one tensor again when it is read.

    Raises:
        TypeError: A part is of another type.
    """
    writer = _Writer()
    header = json.dumps({"kind": _KIND, "tree": writer.described(tree, "")})
    arrays: dict[str, Any] = {str(index): array for index, array in enumerate(writer.arrays)}
    with Path(path).open("wb") as file:  # numpy would add a suffix to a bare path
        np.savez(file, header=np.frombuffer(header.encode(), np.uint8), **arrays)


class _Writer:
    def __init__(self) -> None:
        self.arrays: list[NDArray[np.uint8]] = []
        self._known: dict[int, int] = {}

    def described(self, value: Any, place: str) -> Any:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return {"tensor": self._index(value), "dtype": str(value.dtype)[6:], "shape": list(value.shape)}
        if kind is tuple or kind is list:
            return {kind.__name__: [self.described(one, f"{place}[{index}]") for index, one in enumerate(value)]}
        if kind is dict and all(type(name) is str for name in value):
            return {"dict": {name: self.described(one, f"{place}.{name}") for name, one in value.items()}}
        if kind in _PLAIN:
            return {"value": value}
        raise TypeError(
            f"{place.removeprefix('.')} is a {kind.__name__}, which cannot be saved without pickle: use tensors, "
            "numbers, strings, None, and tuples, lists and dicts of these"
        )

    def _index(self, tensor: torch.Tensor) -> int:
        if id(tensor) not in self._known:
            self._known[id(tensor)] = len(self.arrays)
            # As bytes, because numpy has no bfloat16.
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            self.arrays.append(flat.view(torch.uint8).numpy())
        return self._known[id(tensor)]


def read_tree(path: str | os.PathLike[str], names: set[str], device: torch.device) -> dict[str, Any]:
    """The dict of :func:`write_tree`, with its tensors on a device.

    Args:
        path: The file.
        names: The keys that the dict must have.
        device: Where to put the tensors.

    Raises:
        ValueError: The file is of another kind, or damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            header = json.loads(bytes(archive["header"]))
            arrays = {name: archive[name] for name in archive.files if name != "header"}
        if header["kind"] != _KIND:
            raise ValueError(f"it is {header['kind']!r}, and this version of Shoal reads {_KIND!r}")
        tree: dict[str, Any] = _Reader(arrays, device).value(header["tree"])
        if set(tree) != names:
            raise ValueError(f"it has the fields {sorted(tree)}")
        return tree
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, BadZipFile, RuntimeError) as error:
        raise ValueError(f"{os.fspath(path)} is not a saved run, or is damaged: {error}") from error


class _Reader:
    def __init__(self, arrays: dict[str, NDArray[np.uint8]], device: torch.device) -> None:
        self._arrays, self._device = arrays, device
        self._made: dict[int, torch.Tensor] = {}

    def value(self, described: dict[str, Any]) -> Any:
        if "tensor" in described:
            return self._tensor(described["tensor"], described["dtype"], described["shape"])
        [(kind, inner)] = described.items()
        if kind == "value":
            return inner
        if kind == "dict":
            return {name: self.value(one) for name, one in inner.items()}
        return {"tuple": tuple, "list": list}[kind](self.value(one) for one in inner)

    def _tensor(self, index: int, dtype: str, shape: list[int]) -> torch.Tensor:
        if index not in self._made:
            kind = getattr(torch, dtype)
            if not isinstance(kind, torch.dtype):
                raise ValueError(f"unknown dtype {dtype!r}")
            array = self._arrays[str(index)]
            # An empty tensor cannot be viewed as numbers of another size.
            flat = torch.from_numpy(array.copy()).view(kind) if len(array) else torch.empty(0, dtype=kind)
            found = flat.reshape(shape)
            self._made[index] = found.to(self._device)
        return self._made[index]
