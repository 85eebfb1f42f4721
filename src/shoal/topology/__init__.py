"""Who talks to whom, and with what weights: graphs, time-varying schedules, mixing matrices, drawing.

Two conventions run through all of it. ``W[i, j]`` of a mixing matrix is what agent i multiplies x_j by; a networkx edge
(j, i) points from source to destination and carries that same number, so ``A[source, destination]`` is W transposed.
This package needs numpy and networkx only, and knows nothing of the rest of Shoal.
"""

from .drawing import draw as draw
from .drawing import draw_rounds as draw_rounds
from .dynamic import GetDynamicOnePeerSendRecvRanks as GetDynamicOnePeerSendRecvRanks
from .dynamic import GetExp2DynamicSendRecvMachineRanks as GetExp2DynamicSendRecvMachineRanks
from .dynamic import GetInnerOuterExpo2DynamicSendRecvRanks as GetInnerOuterExpo2DynamicSendRecvRanks
from .dynamic import GetInnerOuterRingDynamicSendRecvRanks as GetInnerOuterRingDynamicSendRecvRanks
from .dynamic import collect_rounds as collect_rounds
from .graphs import ExponentialGraph as ExponentialGraph
from .graphs import ExponentialTwoGraph as ExponentialTwoGraph
from .graphs import FullyConnectedGraph as FullyConnectedGraph
from .graphs import GetRecvWeights as GetRecvWeights
from .graphs import GetSendWeights as GetSendWeights
from .graphs import IsRegularGraph as IsRegularGraph
from .graphs import IsTopologyEquivalent as IsTopologyEquivalent
from .graphs import MeshGrid2DGraph as MeshGrid2DGraph
from .graphs import RingGraph as RingGraph
from .graphs import StarGraph as StarGraph
from .graphs import SymmetricExponentialGraph as SymmetricExponentialGraph
from .mixing import Mixing as Mixing
from .weights import Stochasticity as Stochasticity
from .weights import classify as classify
from .weights import mixing_matrix as mixing_matrix
from .weights import spectral_gap as spectral_gap
from .weights import with_metropolis_hastings_weights as with_metropolis_hastings_weights
from .weights import with_uniform_weights as with_uniform_weights
from .weights import with_weights as with_weights
