"""The public names of this package, which ``__init__.py`` imports on first use."""

from .timeline import timeline_context as timeline_context
from .timeline import timeline_end_activity as timeline_end_activity
from .timeline import timeline_start_activity as timeline_start_activity
