"""Lightning, decentralized: a strategy for its Trainer, whose agents average with their neighbours.

    from shoal.frameworks.lightning import ShoalStrategy

    trainer = L.Trainer(strategy=ShoalStrategy(), accelerator="cpu", devices=1)

``shoal run -n 4 train.py`` starts it, or torchrun. docs/lightning.md says what works, and what is refused and why.
"""

from .callbacks import ConsensusDistance as ConsensusDistance
from .strategy import ShoalStrategy as ShoalStrategy
from .wrapping import Wrapper as Wrapper

__all__ = ["ConsensusDistance", "ShoalStrategy", "Wrapper"]
