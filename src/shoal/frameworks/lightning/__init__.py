"""Lightning, decentralized: a strategy for its Trainer, whose agents average with their neighbours.

    from shoal.frameworks.lightning import ShoalStrategy

    trainer = L.Trainer(strategy=ShoalStrategy(), accelerator="cpu", devices=1)

``shoal run -n 4 train.py`` starts it, or torchrun. docs/lightning.md lists the supported features, and the refused ones
with reasons.
"""

from .. import not_installed

try:
    from .base_strategy import Wrapper as Wrapper
    from .callbacks import ConsensusDistance as ConsensusDistance
    from .fabric import ShoalFabricStrategy as ShoalFabricStrategy
    from .strategy import ShoalStrategy as ShoalStrategy
except ModuleNotFoundError as error:
    raise not_installed(error, "lightning") from None

__all__ = ["ConsensusDistance", "ShoalFabricStrategy", "ShoalStrategy", "Wrapper"]
