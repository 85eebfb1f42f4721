"""The public names of this package, which ``__init__.py`` imports on first use."""

from ..execution.events import Event as Event
from ..runtime.queries import bytes_sent as bytes_sent
from ..runtime.queries import events as events
from ..runtime.queries import is_entering as is_entering
from ..runtime.queries import membership as membership
from .timeline import timeline_context as timeline_context
from .timeline import timeline_end_activity as timeline_end_activity
from .timeline import timeline_start_activity as timeline_start_activity
