"""Checks of the arguments that all of Shoal's Adams share."""

from __future__ import annotations


def check_adam(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Raise ValueError for an argument that is out of its range or no number."""
    if not lr >= 0:
        raise ValueError(f"lr={lr}: pass 0 or more")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas={betas}: pass two numbers from 0 to below 1")
    if not (eps > 0 and weight_decay >= 0):
        raise ValueError(f"eps={eps}, weight_decay={weight_decay}: pass a small number above 0, and 0 or more")
