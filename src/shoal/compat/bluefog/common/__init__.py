"""BlueFog's package beside its front ends."""

from . import topology_util as topology_util
