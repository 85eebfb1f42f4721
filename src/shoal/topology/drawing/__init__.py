"""Pictures of topologies and of their rounds: agents, the lines between them, panels, and files."""

from .pictures import draw as draw
from .pictures import draw_rounds as draw_rounds
from .pictures import draw_schedule as draw_schedule
from .pictures import save as save
