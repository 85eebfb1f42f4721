"""What a fleet did and how fast: the timeline of each agent."""

from . import record as record
from . import summaries as summaries
from .timeline import timeline_context as timeline_context
from .timeline import timeline_end_activity as timeline_end_activity
from .timeline import timeline_start_activity as timeline_start_activity
