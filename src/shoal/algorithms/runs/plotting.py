"""Optional ways out of records: axes of matplotlib and frames of pandas, which are imported when they are used."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def axes_for(ax: Axes | None) -> Axes:
    """The caller's axes, or those of a new figure.

    Raises:
        ImportError: matplotlib is not installed.
    """
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("plot() needs matplotlib, which is not installed. Run: pip install 'shoal[plot]'") from error
    axes: Axes = pyplot.subplots(layout="constrained")[1]
    return axes


def scale(axes: Axes, across: str, up: str, values: torch.Tensor, log: bool | None) -> None:
    """Name both axes. The vertical one is logarithmic if ``log`` is True, or None and no value is negative."""
    # A value of 0, such as the consensus distance of a common start, is left out and not drawn at the bottom.
    if log or (log is None and bool((values > 0).any()) and not bool((values < 0).any())):
        axes.set_yscale("log", nonpositive="mask")
    axes.set_xlabel(across)
    axes.set_ylabel(up)


def frame_of(rows: Sequence[dict[str, Any]]) -> Any:
    """The rows as a ``pandas.DataFrame``.

    Raises:
        ImportError: pandas is not installed.
    """
    try:
        pandas: Any = import_module("pandas")
    except ImportError as error:
        raise ImportError("to_pandas() needs pandas, which is not installed. Run: pip install pandas") from error
    return pandas.DataFrame(list(rows))
