"""The agents' functions in the tests of Lightning.

They import Lightning, and the test process does not: it takes seconds.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import shoal
from support.agent_main import left_over

FEATURES, CLASSES = 6, 3
Params = dict[str, np.ndarray[Any, Any]]
"""As arrays, since a tensor would go to the test through memory that both share."""
PAGE = Path(__file__).parents[2] / "docs" / "lightning.md"
EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_digits.py"


class Numbered(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """Samples that know their numbers."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(count, FEATURES, generator=generator)
        self.labels = torch.randint(CLASSES, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.inputs[index], self.labels[index], int(index)


TRAIN, VALID = Numbered(56, 1), Numbered(24, 2)


def network(dropout: float = 0.0, norm: bool = False) -> torch.nn.Sequential:
    between: list[torch.nn.Module] = [torch.nn.BatchNorm1d(8)] if norm else []
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 8), *between, torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(8, CLASSES)
    )


def params_of(module: torch.nn.Module) -> Params:
    return {name: one.detach().numpy().copy() for name, one in module.state_dict().items()}


@dataclass
class Fitted:
    """What became of one agent."""

    seen: list[list[int]]
    losses: list[float]
    first: Params
    params: Params
    moments: list[np.ndarray[Any, Any]]
    rounds: list[int]
    steps: int
    epochs: int
    lr: float
    drawn: float
    has_group: bool
    optimizer: str
    metrics: dict[str, float]
    ranks: tuple[Any, ...]
    dtypes: set[str] = field(default_factory=set)
    messages: list[str] = field(default_factory=list)


def fit(
    folder: str,
    *,
    optimizer: str = "sgd",
    wrapper: str = "",
    resume: str | None = None,
    checkpoint: dict[str, Any] | None = None,
    stop: dict[str, Any] | None = None,
    loader: dict[str, Any] | None = None,
    module: dict[str, Any] | None = None,
    seeds: bool = False,
    **options: Any,
) -> Fitted:
    import lightning.pytorch as pl

    from support import lightning_modules as modules

    if seeds:
        pl.seed_everything(7 + int(os.environ["RANK"]), verbose=False)

    torch.manual_seed(100 + int(os.environ["RANK"]))  # agents that begin with weights of their own
    net = modules.Net(optimizer=optimizer, **(module or {}))
    trainer = modules.trainer(folder, wrapper, checkpoint, stop, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(net, *modules.loaders(**(loader or {})), ckpt_path=resume)
    optimizers = trainer.optimizers
    return Fitted(
        seen=net.seen,
        losses=net.losses,
        first=net.first,
        params=params_of(net.net),
        moments=[
            one.numpy().copy()
            for made in optimizers
            for state in made.state.values()
            for _, one in sorted(state.items())
            if isinstance(one, torch.Tensor)
        ],
        rounds=[made.rounds for made in optimizers],
        steps=trainer.global_step,
        epochs=trainer.current_epoch,
        lr=optimizers[0].param_groups[0]["lr"],
        drawn=torch.rand(()).item(),
        has_group=dist.is_initialized(),
        optimizer=type(optimizers[0]).__name__,
        metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
        ranks=(trainer.global_rank, trainer.world_size, trainer.is_global_zero, shoal.rank()),
        dtypes=net.dtypes,
        messages=[str(one.message) for one in caught],
    )


def own_rates(folder: str, checkpoint: dict[str, Any] | None) -> tuple[str, list[float]]:
    """The error where each agent logs a loss of its own, which is monitored by the step; the rates of the batches."""
    from support import lightning_modules as modules

    net = modules.Net(optimizer="sgd" if checkpoint else "plateau of steps", sync=False)
    try:
        modules.trainer(folder, checkpoint=checkpoint).fit(net, *modules.loaders())
    except ValueError as error:
        return str(error), net.rates
    return "", net.rates


def evaluate(folder: str) -> dict[str, Any]:
    """Fit, validate, test and predict with one Trainer; what was found, beside this agent's own model."""
    from support import lightning_modules as modules

    torch.manual_seed(0)
    net = modules.Net(optimizer="sgd")
    trainer = modules.trainer(folder, max_epochs=2, logger=modules.csv_logger(folder))
    trainer.fit(net, *modules.loaders())
    own = params_of(net.net)
    loader = modules.loaders()[1]
    [validated] = trainer.validate(net, loader, verbose=False)
    [tested] = trainer.test(net, loader, verbose=False)
    predicted = trainer.predict(net, loader)
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    metrics = list(net.metrics.values())
    return {
        "own": own,
        "again": params_of(net.net),
        "validated": validated,
        "tested": tested,
        "predicted": torch.cat(predicted).numpy(),
        "released": all(metric.dist_sync_fn is None for metric in metrics),
        "logged": dict(trainer.logged_metrics),
        "trained_under_grad": all(parameter.requires_grad for parameter in net.net.parameters()),
    }


def loaded_anywhere(path: str) -> dict[str, Any]:
    """A checkpoint's model as Lightning loads it without Shoal."""
    from support import lightning_modules as modules

    net = modules.Net.load_from_checkpoint(path, map_location="cpu")
    saved = torch.load(path, map_location="cpu", weights_only=True)
    plain = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.5)
    plain.load_state_dict(saved["optimizer_states"][0])
    return {"params": params_of(net.net), "keys": sorted(saved["optimizer_states"][0]), "said": saved["shoal"]}


def exchange() -> dict[str, Any]:
    """The results of the strategy's own operations."""
    from support import lightning_modules as modules

    strategy, rank = modules.strategy(), shoal.rank()
    nan = torch.tensor(float("nan") if rank == 1 else 1.0)
    refused = ""
    try:
        strategy.all_gather(torch.ones(1), sync_grads=True)
    except ValueError as error:
        refused = str(error)
    return {
        "mean": strategy.reduce(torch.tensor(rank)).item(),
        "sum": strategy.reduce(torch.full((2,), float(rank)), reduce_op="sum").tolist(),
        "max": strategy.reduce(rank, reduce_op="max"),
        "nan": strategy.reduce(nan).item(),
        "path": str(strategy.broadcast(Path(f"/of/{rank}"), src=2)),
        "gathered": strategy.all_gather(torch.tensor([rank, rank + 1])).tolist(),
        "all": strategy.reduce_boolean_decision(rank > 0),
        "any": strategy.reduce_boolean_decision(rank > 2, all=False),
        "refused": refused,
    }


def refusals(cases: list[str]) -> dict[str, str]:
    """With which error each case is refused."""
    from support import lightning_modules as modules

    result = {}
    for case in cases:
        try:
            modules.CASES[case]()
            result[case] = "accepted"
        except Exception as error:
            result[case] = f"{type(error).__name__}: {error}"
    return result


def fit_until_killed(folder: str, victim: int) -> tuple[str, list[str]]:
    """Train until an agent is killed; the error of the others, and the resources left in their processes."""
    from shoal.errors import PeerLost
    from support import lightning_modules as modules

    try:
        modules.trainer(folder, max_epochs=1000).fit(modules.Net(optimizer="sgd", dies=victim), *modules.loaders())
    except PeerLost as lost:
        output = f"PeerLost {lost.ranks}"
        lost.__traceback__ = None
    else:
        output = "ended"
    shoal.shutdown()
    return output, left_over()


def run_page(folder: str) -> Fitted:
    """What docs/lightning.md prints; and a fit in its own way."""
    from support import lightning_modules as modules

    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(code, names)
    modules.WRAPPERS["page"] = names["averaged_moments"]
    assert isinstance(names["callbacks"][0], modules.ConsensusDistance)
    return fit(folder, optimizer="adam", wrapper="page")


def run_example(arguments: list[str]) -> tuple[float, Params]:
    """The example's own ``main``."""
    if "lightning_digits" not in sys.modules:
        spec = importlib.util.spec_from_file_location("lightning_digits", EXAMPLE)
        assert spec is not None and spec.loader is not None
        sys.modules["lightning_digits"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    example = sys.modules["lightning_digits"]
    net, accuracy = example.main(example.parse(arguments))
    return accuracy, params_of(net)


def run_cli(folder: str) -> tuple[str, list[int]]:
    """LightningCLI with the configuration that docs/lightning.md prints; the wrapper, and each optimizer's rounds."""
    from lightning.pytorch.cli import LightningCLI

    from support import lightning_modules as modules

    [configuration] = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    path = Path(folder) / f"config{os.environ['RANK']}.yaml"
    path.write_text(configuration)
    quiet = ["--trainer.logger=false", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    options = [f"--trainer.default_root_dir={folder}", "--trainer.max_epochs=1"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that arguments are not the command line's
        cli = LightningCLI(modules.Net, modules.Samples, args=["fit", f"--config={path}", *quiet, *options])
    return cli.trainer.strategy._wrapper.__name__, [optimizer.rounds for optimizer in cli.trainer.optimizers]
