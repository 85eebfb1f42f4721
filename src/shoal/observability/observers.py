"""The observers that attach themselves to every new agent. ``shoal.init()`` imports this module in every case."""

from . import membership_recorder as membership_recorder
from . import status_publisher as status_publisher
from . import timeline as timeline
