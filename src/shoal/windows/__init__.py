"""One-sided windows: memory that an agent's neighbours write to and read from without its taking part.

``shoal.windows.create(tensor, "x")`` makes one; what may be done with it are the methods of :class:`Window`.
"""

from .memory import SlotState as SlotState
from .public import Window as Window
from .public import create as create
from .public import named as named
from .public import names as names
from .public import turn_off_associated_p as turn_off_associated_p
from .public import turn_on_associated_p as turn_on_associated_p

__all__ = ["SlotState", "Window", "create", "named", "names", "turn_off_associated_p", "turn_on_associated_p"]
