"""Decentralized training of any PyTorch model: wrap the optimizer, keep the loop."""

from .._lazy_import import public_names as _public_names
from .adam import AccumAdamW as AccumAdamW
from .adam import OneBitAdam as OneBitAdam
from .asynchronous import DistributedADPSGDOptimizer as DistributedADPSGDOptimizer
from .asynchronous import DistributedPullGetOptimizer as DistributedPullGetOptimizer
from .asynchronous import DistributedPushSumOptimizer as DistributedPushSumOptimizer
from .asynchronous import DistributedWinPutOptimizer as DistributedWinPutOptimizer
from .checkpoints.checkpoint import Checkpoint as Checkpoint
from .evaluation import Metric as Metric
from .evaluation import Metrics as Metrics
from .evaluation import consensus as consensus
from .evaluation import consensus_distance as consensus_distance
from .evaluation import metrics as metrics
from .evaluation import save as save
from .optimizer import DecentralizedOptimizer as DecentralizedOptimizer
from .settings import CommunicationType as CommunicationType
from .settings import Settings as Settings
from .warmup import Warmup as Warmup

__all__ = _public_names(globals())
