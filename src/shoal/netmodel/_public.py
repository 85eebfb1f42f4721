"""The public names of this package, which ``__init__.py`` imports on first use."""

from .messages import Messages as Messages
from .messages import Step as Step
from .messages import direct_allreduce as direct_allreduce
from .messages import hierarchical as hierarchical
from .messages import hierarchical_allreduce as hierarchical_allreduce
from .messages import parameter_server as parameter_server
from .messages import ring_allreduce as ring_allreduce
from .messages import rounds_of as rounds_of
from .messages import tree_allreduce as tree_allreduce
from .network import Link as Link
from .network import Network as Network
from .recommendation import Recommendation as Recommendation
from .recommendation import recommend as recommend
from .simulation import Timeline as Timeline
from .simulation import simulate as simulate
from .training import Training as Training
