"""A quadratic of a few dimensions for each agent, for tests that compute an optimizer's steps in numpy."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

import shoal

Vectors = NDArray[np.float64]
SIZE, D, LR = 4, 6, 0.1
W = np.array(shoal.topology.mixing_matrix(shoal.topology.RingGraph(SIZE)))
_DRAW = np.random.default_rng(8)
CURVED, CENTRES = _DRAW.uniform(0.2, 1.5, (SIZE, D)), _DRAW.normal(size=(SIZE, D))
START = _DRAW.normal(size=(SIZE, D))


def slope(x: Vectors) -> Vectors:
    return CURVED * (x - CENTRES)


class Point(torch.nn.Module):
    """Parameters whose loss has the gradient of :func:`slope`: in one piece, or in several."""

    def __init__(self, pieces: int = 1) -> None:
        super().__init__()
        self.pieces = torch.nn.ParameterList(torch.tensor(START[shoal.rank()]).chunk(pieces))

    def x(self) -> torch.Tensor:
        return torch.cat(list(self.pieces))

    def forward(self) -> torch.Tensor:
        curved, centre = torch.tensor(CURVED[shoal.rank()]), torch.tensor(CENTRES[shoal.rank()])
        return (curved * (self.x() - centre).square()).sum() / 2
