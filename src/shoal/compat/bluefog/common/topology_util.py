"""All of :mod:`shoal.topology_util`, where BlueFog has it."""

from ....topology_util import *  # noqa: F403 - it holds nothing else
