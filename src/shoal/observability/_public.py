"""The public names of this room, which ``__init__.py`` hands on when the first of them is asked for."""

from .timeline import timeline_context as timeline_context
from .timeline import timeline_end_activity as timeline_end_activity
from .timeline import timeline_start_activity as timeline_start_activity
