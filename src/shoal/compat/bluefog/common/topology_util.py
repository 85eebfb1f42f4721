"""All of :mod:`shoal.topology_util`, under BlueFog's module name."""

from ....topology_util import *  # noqa: F403 - it holds nothing else
