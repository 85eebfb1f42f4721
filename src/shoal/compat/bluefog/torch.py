"""All of :mod:`shoal.bluefog`, under BlueFog's module name."""

from ...bluefog import *  # noqa: F403 - all that its __all__ says
from ...bluefog import __all__ as __all__  # type: ignore[attr-defined]  # which type checkers do not see
