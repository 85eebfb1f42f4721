"""Fleets that no one machine can hold: what thousands of agents would compute, as the rows of one tensor.

:class:`StackedFleet` runs an algorithm on all of them (:class:`StackedMix` has its verbs), with :func:`per_agent` and
:func:`loss_of` for gradients and :class:`StackedModel` for neural networks. :class:`Pace` is the clock of a run: how
long its steps would take on a :class:`shoal.netmodel.Network`.
"""

from .._lazy_import import public_names as _public_names
from ..algorithms.gradients import per_agent as per_agent
from .networks import StackedModel as StackedModel
from .networks import loss_of as loss_of
from .pace import Pace as Pace
from .stacked import StackedFleet as StackedFleet
from .stacked import StackedMix as StackedMix

__all__ = _public_names(globals())
