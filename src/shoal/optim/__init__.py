"""Decentralized training of any PyTorch model: wrap the optimizer, keep the loop."""

from .bluefog import DistributedAdaptThenCombineOptimizer as DistributedAdaptThenCombineOptimizer
from .bluefog import DistributedAdaptWithCombineOptimizer as DistributedAdaptWithCombineOptimizer
from .bluefog import DistributedAllreduceOptimizer as DistributedAllreduceOptimizer
from .bluefog import DistributedGradientAllreduceOptimizer as DistributedGradientAllreduceOptimizer
from .bluefog import (
    DistributedHierarchicalNeighborAllreduceOptimizer as DistributedHierarchicalNeighborAllreduceOptimizer,
)
from .bluefog import DistributedNeighborAllreduceOptimizer as DistributedNeighborAllreduceOptimizer
from .bluefog import DistributedPullGetOptimizer as DistributedPullGetOptimizer
from .bluefog import DistributedPushSumOptimizer as DistributedPushSumOptimizer
from .bluefog import DistributedWinPutOptimizer as DistributedWinPutOptimizer
from .consensus import consensus as consensus
from .consensus import consensus_distance as consensus_distance
from .optimizer import DecentralizedOptimizer as DecentralizedOptimizer
from .rounds import CommunicationType as CommunicationType
from .rounds import Settings as Settings
