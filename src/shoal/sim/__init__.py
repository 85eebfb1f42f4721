"""Fleets and networks that no one machine can hold: what agents would compute, and how long it would take.

:class:`StackedFleet` runs an algorithm on thousands of agents as the rows of one tensor (:class:`StackedMix` has its
verbs), with :func:`per_agent` and :func:`loss_of` for gradients and :class:`StackedModel` for neural networks.

:class:`Network` says what agents have between them, a :class:`Link` inside a machine and one between machines.
:func:`simulate` plays steps of training on it, each a :class:`Step` of :class:`Messages`, and gives a
:class:`Timeline`; :func:`rounds_of` makes steps of a topology, :func:`direct_allreduce`, :func:`ring_allreduce`,
:func:`tree_allreduce`, :func:`hierarchical_allreduce` and :func:`parameter_server` of averaging over all, and
:func:`hierarchical` of averaging between machines. :class:`Pace` is the clock of a stacked run.
:func:`recommend` ranks the topologies of the catalog by the time to agree and by what :class:`Training` on them costs,
in a :class:`Recommendation`.

None of this starts agents. What does is not imported here: ``shoal.sim.probe``, which measures a real network.
"""

from ..algorithms.gradients import per_agent as per_agent
from .allreduce import direct_allreduce as direct_allreduce
from .allreduce import hierarchical as hierarchical
from .allreduce import hierarchical_allreduce as hierarchical_allreduce
from .allreduce import parameter_server as parameter_server
from .allreduce import ring_allreduce as ring_allreduce
from .allreduce import tree_allreduce as tree_allreduce
from .messages import Messages as Messages
from .messages import Step as Step
from .messages import rounds_of as rounds_of
from .network_model import Link as Link
from .network_model import Network as Network
from .networks import StackedModel as StackedModel
from .networks import loss_of as loss_of
from .pace import Pace as Pace
from .recommend import Recommendation as Recommendation
from .recommend import recommend as recommend
from .simulate import Timeline as Timeline
from .simulate import simulate as simulate
from .stacked import StackedFleet as StackedFleet
from .stacked import StackedMix as StackedMix
from .training import Training as Training
