"""LightningCLI with the strategy. In processes of its own: it keeps the model, whose memory other tests would find."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import lightning_agents as agents
from support.world import World

pytest.importorskip("lightning", reason="pip install 'shoal[lightning]'")
pytest.importorskip("jsonargparse", reason="pip install 'jsonargparse[signatures]', which LightningCLI needs")

SIZE = 4
IMPORTS = ("lightning.pytorch",)
pytestmark = pytest.mark.timeout(300)


def test_the_strategy_of_the_pages_configuration_is_created(world: World, tmp_path: Path) -> None:
    result = world.results(agents.run_cli, str(tmp_path), patience=120.0)
    assert result == [("DistributedGradientAllreduceOptimizer", [7])] * SIZE
