"""All of :mod:`shoal.bluefog`, where BlueFog has it."""

from ...bluefog import *  # noqa: F403 - all that its __all__ says
from ...bluefog import __all__ as __all__
