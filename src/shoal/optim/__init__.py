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
from .checkpoint import Checkpoint as Checkpoint
from .consensus import consensus as consensus
from .consensus import consensus_distance as consensus_distance
from .metrics import Metric as Metric
from .metrics import Metrics as Metrics
from .metrics import metrics as metrics
from .optimizer import DecentralizedOptimizer as DecentralizedOptimizer
from .sampler import AgentSampler as AgentSampler
from .sampler import dirichlet_shards as dirichlet_shards
from .settings import CommunicationType as CommunicationType
from .settings import Settings as Settings
from .warmup import Warmup as Warmup
