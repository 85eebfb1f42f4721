"""Decentralized training of any PyTorch model: wrap the optimizer, keep the loop."""

from .._lazy_import import public_names as _public_names
from ..data import AgentSampler as AgentSampler
from ..data import dirichlet_shards as dirichlet_shards
from .adam import AccumAdamW as AccumAdamW
from .adam import OneBitAdam as OneBitAdam
from .bluefog import DistributedAdaptThenCombineOptimizer as DistributedAdaptThenCombineOptimizer
from .bluefog import DistributedAdaptWithCombineOptimizer as DistributedAdaptWithCombineOptimizer
from .bluefog import DistributedADPSGDOptimizer as DistributedADPSGDOptimizer
from .bluefog import DistributedAllreduceOptimizer as DistributedAllreduceOptimizer
from .bluefog import DistributedGradientAllreduceOptimizer as DistributedGradientAllreduceOptimizer
from .bluefog import (
    DistributedHierarchicalNeighborAllreduceOptimizer as DistributedHierarchicalNeighborAllreduceOptimizer,
)
from .bluefog import DistributedNeighborAllreduceOptimizer as DistributedNeighborAllreduceOptimizer
from .bluefog import DistributedPullGetOptimizer as DistributedPullGetOptimizer
from .bluefog import DistributedPushSumOptimizer as DistributedPushSumOptimizer
from .bluefog import DistributedWinPutOptimizer as DistributedWinPutOptimizer
from .checkpoints.checkpoint import Checkpoint as Checkpoint
from .mean_model import consensus as consensus
from .mean_model import consensus_distance as consensus_distance
from .mean_model import save as save
from .metric import Metric as Metric
from .metric import Metrics as Metrics
from .metric import metrics as metrics
from .optimizer import DecentralizedOptimizer as DecentralizedOptimizer
from .settings import CommunicationType as CommunicationType
from .settings import Settings as Settings
from .warmup import Warmup as Warmup

__all__ = _public_names(globals())
