"""A model of the network: how long rounds of a topology, all-reduces and training on them would take elsewhere.

:class:`Network` says what agents have between them, a :class:`Link` inside a machine and one between machines.
:func:`simulate` plays steps of training on it, each a :class:`Step` of :class:`Messages`, and gives a
:class:`Timeline`; :func:`rounds_of` makes steps of a topology, :func:`direct_allreduce`, :func:`ring_allreduce`,
:func:`tree_allreduce`, :func:`hierarchical_allreduce` and :func:`parameter_server` of averaging over all, and
:func:`hierarchical` of averaging between machines. :func:`recommend` ranks the topologies of the catalog by the time to
agree and by what :class:`Training` on them costs, in a :class:`Recommendation`.

None of this starts agents. What does is not imported here: ``shoal.netmodel.probe``, which measures a real network.
"""

from .allreduce import direct_allreduce as direct_allreduce
from .allreduce import hierarchical as hierarchical
from .allreduce import hierarchical_allreduce as hierarchical_allreduce
from .allreduce import parameter_server as parameter_server
from .allreduce import ring_allreduce as ring_allreduce
from .allreduce import tree_allreduce as tree_allreduce
from .messages import Messages as Messages
from .messages import Step as Step
from .messages import rounds_of as rounds_of
from .network import Link as Link
from .network import Network as Network
from .recommendation import Recommendation as Recommendation
from .recommendation import recommend as recommend
from .simulation import Timeline as Timeline
from .simulation import simulate as simulate
from .training import Training as Training
