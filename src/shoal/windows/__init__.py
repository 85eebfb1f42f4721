"""One-sided windows: memory that an agent's neighbours write to and read from without its taking part.

``shoal.windows.create(tensor, "x")`` makes one; what may be done with it are the methods of :class:`Window`.
"""

from ..runtime.queries import empty as empty
from .window import Window as Window
from .window import create as create
from .window import named as named
from .window import names as names
from .window import turn_off_associated_p as turn_off_associated_p
from .window import turn_on_associated_p as turn_on_associated_p
from .window_memory import SlotState as SlotState

__all__ = ["SlotState", "Window", "create", "empty", "named", "names", "turn_off_associated_p", "turn_on_associated_p"]
