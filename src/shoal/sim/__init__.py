"""How long would it take? A model of networks, for what no one machine can hold.

:class:`Network` says what agents have between them, :func:`simulate` plays steps of training on it, and
:func:`recommend` ranks the topologies of the catalog for it. No agents are started, but
to measure a real network (:mod:`shoal.sim.probe`).
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
