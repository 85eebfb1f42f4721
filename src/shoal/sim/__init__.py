"""Fleets that are too large for one machine: the computations of thousands of agents, as the rows of one tensor.

:class:`StackedFleet` runs an algorithm on all of them (:class:`StackedMix` has its operations), with :func:`per_agent`
and :func:`loss_of` for gradients and :class:`StackedModel` for neural networks. :class:`Pace` is the clock of a run:
the time of its steps on a :class:`shoal.netmodel.Network`. :class:`Conditions` describe an unreliable network,
:class:`PoissonGossip` asynchronous gossip, and an :class:`Adversary` controls some agents of a run (:class:`SignFlip`,
:class:`InnerProductManipulation`, :class:`ALittleIsEnough`, :class:`LabelFlip`). :func:`flipped_and_shifted` augments
images. :func:`sweep` runs algorithms on topologies with several seeds; its result, a :class:`Sweep`, has a table of
means with confidence intervals.
"""

from .._lazy_import import public_names as _public_names
from ..algorithms.runs.conditions import Conditions as Conditions
from ..algorithms.runs.conditions import PoissonGossip as PoissonGossip
from ..algorithms.runs.gradients import flipped_and_shifted as flipped_and_shifted
from ..algorithms.runs.gradients import per_agent as per_agent
from .adversaries import Adversary as Adversary
from .adversaries import ALittleIsEnough as ALittleIsEnough
from .adversaries import InnerProductManipulation as InnerProductManipulation
from .adversaries import LabelFlip as LabelFlip
from .adversaries import SignFlip as SignFlip
from .networks import StackedModel as StackedModel
from .networks import loss_of as loss_of
from .pace import Pace as Pace
from .stacked import StackedFleet as StackedFleet
from .stacked import StackedMix as StackedMix
from .sweeps import Sweep as Sweep
from .sweeps import sweep as sweep

__all__ = _public_names(globals())
