"""The rates of messages that share resources: max-min fairness, which approximates the equilibrium of TCP flows.

No message's rate can grow without lowering one that is not larger. Found by progressive filling (Bertsekas and
Gallager, Data Networks, section 6.5.2), many bottlenecks in one pass.
"""

from __future__ import annotations

import numpy as np

from .network import Floats, Ints

_EQUAL = 1e-9
"""Relative difference below which two rates are the same, far above rounding and below anything measurable."""


def fair_rates(shared: Ints, capacity: Floats) -> Floats:
    """Rates of messages that are sent at the same time.

    Args:
        shared: int64 [messages, k], the indices of what each message passes. One may be named twice in a row only if
            its capacity is infinite.
        capacity: float64 [shared things], in bytes a second.

    Returns:
        float64 [messages], bytes a second; infinite where nothing limits.
    """
    rates = np.full(len(shared), np.inf)
    limiting = np.isfinite(capacity)[shared]
    shared = shared[:, limiting.any(axis=0)]
    undecided = np.flatnonzero(limiting.any(axis=1))
    left = capacity.astype(float)
    while len(undecided):
        passes = shared[undecided]
        users = np.bincount(passes.ravel(), minlength=len(left))
        offered = (left / np.maximum(users, 1))[passes]
        best = offered.min(axis=1)
        # If it alone limits all its messages, their rates are exactly its offer.
        held_elsewhere = np.bincount(
            passes.ravel(), weights=(best[:, None] < offered * (1 - _EQUAL)).ravel(), minlength=len(left)
        )
        decided = ((held_elsewhere[passes] == 0) & (offered <= best[:, None] * (1 + _EQUAL))).any(axis=1)
        rates[undecided[decided]] = best[decided]
        left -= np.bincount(
            passes[decided].ravel(), weights=np.repeat(best[decided], passes.shape[1]), minlength=len(left)
        )
        np.maximum(left, 0.0, out=left)
        undecided = undecided[~decided]
    return rates
