"""The layout of a figure's panels: how many are in a row, the size of each, and the space for titles. Sizes are inches
on paper. Only arithmetic; `pictures` passes it to matplotlib.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

COLUMN_WIDTH = 3.3
TEXT_WIDTH = 6.9
"""Inches: of a column and of the text of a paper with two columns."""

_TITLE = 0.22
_GAP = 0.14


@dataclass(frozen=True)
class Sheet:
    """A grid of panels.

    Attributes:
        rows, columns: of the grid.
        width, height: inches, of the whole.
        above: inches above each row, reserved for titles.
        gap: inches between two columns.
    """

    rows: int
    columns: int
    width: float
    height: float
    above: float
    gap: float

    def spacing(self) -> dict[str, float]:
        """The sizes for matplotlib's ``GridSpec``."""
        panel_width = (self.width + self.gap) / self.columns - self.gap
        panel_height = self.height / self.rows - self.above
        return {
            "left": 0.0,
            "right": 1.0,
            "bottom": 0.0,
            "top": 1.0 - self.above / self.height,
            "wspace": self.gap / panel_width,
            "hspace": self.above / panel_height,
        }


def sheet(panels: int, aspect: float, width: float | None, *, titled: bool, wide: bool = False) -> Sheet:
    """The grid for this many panels.

    Args:
        panels: at least one.
        aspect: height over width of a panel.
        width: inches. By default a column's for one or two panels and the text's for more.
        titled: whether panels have a title.
        wide: whether panels are so full that each needs a third of the text's width.
    """
    if width is None:
        width = _usual_width(panels, wide=wide)
    if panels == 1:
        above = _TITLE if titled else 0.0
        return Sheet(1, 1, width, width * aspect + above, above, 0.0)
    columns = _columns(panels, wide=wide)
    rows = ceil(panels / columns)
    panel_width = (width + _GAP) / columns - _GAP
    above = _TITLE if titled else _GAP
    return Sheet(rows, columns, width, rows * (panel_width * aspect + above), above, _GAP)


def _columns(panels: int, *, wide: bool) -> int:
    if wide:
        return 2 if panels in (2, 4) else 3
    if panels <= 5:
        return panels
    return 3 if panels in (6, 9) else 4


def _usual_width(panels: int, *, wide: bool) -> float:
    if panels == 1 or (panels == 2 and not wide):
        return COLUMN_WIDTH
    return TEXT_WIDTH * _columns(panels, wide=True) / 3 if wide else TEXT_WIDTH
