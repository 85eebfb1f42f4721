"""The code on the page about Horovod runs, on real agents, and its statements on each name hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import shoal
import shoal.compat.horovod as hvd

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "horovod.md").read_text()
ROWS = [line.split(" | ") for line in PAGE.split("\n## ")[0].splitlines() if line.startswith("| `")]


@pytest.mark.filterwarnings("ignore:torch.manual_seed")  # the page runs it in processes
def test_the_pages_script_trains() -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

    def run() -> torch.Tensor:
        names: dict[str, object] = {}
        exec(code, names)
        model = names["model"]
        assert isinstance(model, torch.nn.Linear)
        return model.weight.detach()

    weights = torch.stack(shoal.Fleet(3, timeout=20.0).run(run))
    assert weights.isfinite().all()
    assert torch.equal(weights, weights[0].expand_as(weights))


def test_the_page_has_every_name_and_no_other() -> None:
    present, missing = set(), set()
    for names, became, *_ in ROWS:
        (missing if became.startswith("not there") else present).update(re.findall(r"`([\w.]+)[(`]", names))
    assert present == set(hvd.__all__)  # type: ignore[attr-defined]
    assert missing == {"elastic.run", "elastic.TorchState", "elastic.ElasticSampler"}
    assert not hasattr(hvd, "elastic")
    assert [name for name in hvd.__all__ if not hasattr(hvd, name)] == []  # type: ignore[attr-defined]


def test_the_options_of_the_optimizer_are_those_on_the_page() -> None:
    [row] = [names for names, *_ in ROWS if "DistributedOptimizer" in names]
    [options] = re.findall(r"\((.*)\)", row)
    had = hvd.DistributedOptimizer.__annotations__
    assert ["optimizer", *options.split(", ")] == [name for name in had if name != "return"]


def test_shoals_names_on_the_page_exist() -> None:
    for name in re.findall(r"`(?:run = )?shoal\.([A-Za-z_]+)", PAGE):
        assert hasattr(shoal, name) or name == "compat", name


def test_the_links_of_the_page_have_targets() -> None:
    targets = [one for one in re.findall(r"\]\(([^)#]+)", PAGE) if not one.startswith("https:")]
    assert len(targets) >= 3
    assert [target for target in targets if not (DOCS / target).exists()] == []
