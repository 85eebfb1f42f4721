"""The matrices that a vector of parameters consists of, for equations of matrices."""

from __future__ import annotations

import math

import torch

from .algorithm import Shapes


def matrix_sizes(shapes: Shapes, numbers: int) -> list[tuple[int, int]]:
    """Rows and columns of each parameter: its first dimension, and all others together; a vector is one column.

    Args:
        shapes: The shapes of the parameters.
        numbers: The length of the vector that they make up.

    Raises:
        ValueError: The shapes have another number of elements.
    """
    if sum(map(math.prod, shapes)) != numbers:
        raise ValueError(
            f"shapes={shapes} have {sum(map(math.prod, shapes))} numbers, and x has {numbers}: give the shapes of the "
            "parameters in the order in which they lie in x"
        )
    return [(shape[0], math.prod(shape[1:])) if shape else (1, 1) for shape in shapes]


def split(x: torch.Tensor, sizes: list[tuple[int, int]]) -> list[torch.Tensor]:
    """``[..., d]`` to a list of ``[..., rows, columns]``."""
    parts = torch.split(x, [rows * columns for rows, columns in sizes], dim=-1)
    return [part.reshape(*part.shape[:-1], *size) for part, size in zip(parts, sizes, strict=True)]


def join(matrices: list[torch.Tensor]) -> torch.Tensor:
    """The inverse of :func:`split`."""
    return torch.cat([matrix.flatten(-2) for matrix in matrices], dim=-1)
