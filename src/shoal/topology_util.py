"""BlueFog's module of graphs, dynamic schedules and weights; the functions are in :mod:`shoal.topology`."""

from .ops.objects import InferDestinationFromSourceRanks as InferDestinationFromSourceRanks
from .ops.objects import InferSourceFromDestinationRanks as InferSourceFromDestinationRanks
from .topology import ExponentialGraph as ExponentialGraph
from .topology import ExponentialTwoGraph as ExponentialTwoGraph
from .topology import FullyConnectedGraph as FullyConnectedGraph
from .topology import GetDynamicOnePeerSendRecvRanks as GetDynamicOnePeerSendRecvRanks
from .topology import GetExp2DynamicSendRecvMachineRanks as GetExp2DynamicSendRecvMachineRanks
from .topology import GetInnerOuterExpo2DynamicSendRecvRanks as GetInnerOuterExpo2DynamicSendRecvRanks
from .topology import GetInnerOuterRingDynamicSendRecvRanks as GetInnerOuterRingDynamicSendRecvRanks
from .topology import GetRecvWeights as GetRecvWeights
from .topology import GetSendWeights as GetSendWeights
from .topology import IsRegularGraph as IsRegularGraph
from .topology import IsTopologyEquivalent as IsTopologyEquivalent
from .topology import MeshGrid2DGraph as MeshGrid2DGraph
from .topology import RingGraph as RingGraph
from .topology import StarGraph as StarGraph
from .topology import SymmetricExponentialGraph as SymmetricExponentialGraph
from .topology import classify as classify
from .topology import mixing_matrix as mixing_matrix
from .topology import spectral_gap as spectral_gap
from .topology import with_metropolis_hastings_weights as with_metropolis_hastings_weights
from .topology import with_uniform_weights as with_uniform_weights
from .topology import with_weights as with_weights
