"""What attaches itself to every new agent. ``shoal.init()`` imports it, whatever else of Shoal has been imported."""

from . import recorder as recorder
from . import summaries as summaries
from . import timeline as timeline
