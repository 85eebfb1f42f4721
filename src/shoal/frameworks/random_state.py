"""The states of the random generators that training uses."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


class RandomState:
    """Python's, NumPy's and torch's generators of this process, for a :class:`~shoal.Checkpoint`.

    A loaded state is kept until :meth:`restore`, because random numbers are drawn before training resumes.
    """

    def __init__(self) -> None:
        self._loaded: Mapping[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        version, words, gauss = random.getstate()
        name, keys, position, has_gauss, cached = np.random.get_state()
        return {
            "python": [version, list(words), gauss],
            "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), has_gauss, cached],
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        self._loaded = state_dict

    def restore(self) -> None:
        """Set the generators to the loaded state, if there is one."""
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        version, words, gauss = loaded["python"]
        random.setstate((version, tuple(words), gauss))
        name, keys, position, has_gauss, cached = loaded["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
        torch.set_rng_state(loaded["torch"])
        if loaded["cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(loaded["cuda"])
