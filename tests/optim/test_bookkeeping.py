"""The work of an optimizer for each parameter in a step, counted: it must not cost as much as the step itself.

Two models have different numbers of parameters. Work that the longer one has more of, and that the plain optimizer
lacks, is done for each parameter. Nothing is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import shoal
from shoal.algorithms import ExactDiffusion
from shoal.optim.exchanges import window_exchange

Make = Callable[[torch.optim.Optimizer, nn.Module], torch.optim.Optimizer]
Local = Callable[[Any], torch.optim.Optimizer]

FEW, MANY = 20, 320
OPTIM = str(Path(shoal.__file__).parent / "optim")


class Touches(TorchFunctionMode):
    """Counts what is asked of tensors and done to them: functions, methods, and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Instructions:
    """Counts the instructions of this thread in the Python code of ``shoal.optim``."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Instructions:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(OPTIM):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._opcode

    def _opcode(self, frame: FrameType, event: str, arg: object) -> Any:
        self.count += event == "opcode"
        return self._opcode


class Model(nn.Module):
    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.ones(numel)) for _ in range(count))

    def forward(self) -> torch.Tensor:
        return torch.cat(list(self.parts)).sum()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)


def counts(count: int, numel: int, make: Make | None, local: Local, backward: bool) -> tuple[int, int]:
    """Touches and instructions of one step, and of the forward pass before it."""
    model = Model(count, numel)
    inner = local(model.parameters())
    optimizer: Any = inner if make is None else make(inner, model)

    def step() -> None:
        loss = model()
        if backward:
            loss.backward()
        optimizer.step()

    for param in model.parameters():
        param.grad = torch.ones_like(param)
    for _ in range(3):
        step()
    least = [sys.maxsize, sys.maxsize]  # a waiting agent may process messages that have arrived
    for _ in range(4):
        with Touches() as touches:
            step()
        with Instructions() as instructions:
            step()
        least = [min(pair) for pair in zip(least, (touches.count, instructions.count), strict=True)]
    shoal.barrier()
    if make is not None:
        optimizer.close()
    return least[0], least[1]


def for_each_parameter(
    size: int, make: Make, numel: int, local: Local = sgd, backward: bool = False
) -> tuple[float, float]:
    """Touches and instructions that each parameter costs an agent beside the plain optimizer's."""

    def run() -> tuple[float, float]:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(shoal.size()))
        few, many, few_plain, many_plain = (
            torch.tensor(counts(count, numel, one, local, backward)) for one in (make, None) for count in (FEW, MANY)
        )
        touches, instructions = (((many - few) - (many_plain - few_plain)) / (MANY - FEW)).tolist()
        return touches, instructions

    results = shoal.Fleet(size).run(run)
    return max(one[0] for one in results), max(one[1] for one in results)


def equation(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    topology = shoal.topology.FullyConnectedGraph(shoal.size())
    return shoal.DecentralizedOptimizer(optimizer, model, ExactDiffusion(1.0, lazy=True), topology=topology)


ATC, AWC = (
    shoal.DecentralizedOptimizer,
    partial(shoal.DecentralizedOptimizer, algorithm=shoal.algorithms.GradientDescent(1.0, atc=False)),
)
GRADIENTS = shoal.bluefog.DistributedGradientAllreduceOptimizer
PUT, PUSH_SUM = shoal.optim.DistributedWinPutOptimizer, shoal.optim.DistributedPushSumOptimizer
SMALL, LARGE = 8, 2000

# Whether a parameter requires gradients, where it is, of which size, and before and after an exchange that lasts its
# version; where parameters are large each is then given its new data, in a loop of Python's.
ATC_SMALL, ATC_LARGE, AWC_SMALL, AWC_LARGE = (3, 0), (4, 12), (6, 0), (7, 12)
WATCHED = (1 + 2 * 2, 0)  # at the start and when it has arrived
GATHERED = (1 + 2 + 4, 80)  # its gradient, is it sparse, there and back

CASES = {
    "adapt, then combine": (ATC, {}, SMALL, ATC_SMALL),
    "adapt, then combine, large": (ATC, {}, LARGE, ATC_LARGE),
    "adapt with combine": (AWC, {}, SMALL, AWC_SMALL),
    "adapt with combine, large": (AWC, {}, LARGE, AWC_LARGE),
    "every second step": (ATC, {"num_steps_per_communication": 2}, SMALL, ATC_SMALL),
    "put": (PUT, {}, SMALL, WATCHED),
    "push-sum": (PUSH_SUM, {}, SMALL, (1 + 3 * 2, 0)),
    "gradients": (GRADIENTS, {}, SMALL, GATHERED),
    "an equation": (equation, {}, SMALL, WATCHED),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [1, 2])
def test_few_operations_are_done_per_parameter(case: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        window_exchange, "FLOOR", 0.0
    )  # who has little gives nothing away: a step of fewer instructions
    make, options, numel, (most_touches, most_instructions) = CASES[case]
    touches, instructions = for_each_parameter(size, partial(make, **options), numel)
    assert touches < most_touches + 0.5
    assert instructions < most_instructions + 0.5


def test_few_operations_are_done_per_mixed_state() -> None:
    """Adam's second moments cost as much again as the parameters, plus a check that they are the same objects."""

    def adam(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(params)

    touches, instructions = for_each_parameter(2, partial(ATC, mix_state=("exp_avg_sq",)), SMALL, local=adam)
    assert touches < 1 + 2 * 2 + 0.5
    assert instructions < 40


def test_few_operations_are_done_per_parameter_during_the_backward_pass() -> None:
    """The parameter's hook is called. The torch calls in between cannot be counted."""
    _, instructions = for_each_parameter(2, partial(ATC, overlap="backward"), SMALL, backward=True)
    assert instructions < 120
