"""What attaches itself to every new agent. ``shoal.init()`` imports it, whatever else of Shoal has been imported."""

from . import membership_recorder as membership_recorder
from . import status_publisher as status_publisher
from . import timeline as timeline
