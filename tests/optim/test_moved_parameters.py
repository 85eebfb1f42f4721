"""Parameters whose data somebody has put elsewhere, or cut, with ``param.data = ...``: noticed, and never lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.algorithms import ExactDiffusion, GradientDescent
from shoal.optim.window_flight import PutFlight

Fleets = Callable[..., shoal.Fleet]
ATC, AWC = GradientDescent(1.0), GradientDescent(1.0, atc=False)
SIZE = 3


class Reassigning(torch.optim.SGD):
    """Gives each parameter new data in its step, as optimizers from before ``torch.no_grad`` do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data = param.data - group["lr"] * param.grad


class InPlace(Reassigning):
    """The same numbers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.copy_(param - group["lr"] * param.grad)


def model(width: int) -> nn.Sequential:
    made = nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, 1, bias=False))
    generator = torch.Generator().manual_seed(shoal.rank())  # agents may be threads, and share the global one
    for param in made.parameters():
        nn.init.uniform_(param, -0.5, 0.5, generator=generator)
    return made


def flat(of: nn.Module) -> Tensor:
    return torch.cat([param.detach().reshape(-1).clone() for param in of.parameters()])


WIDTHS = pytest.mark.parametrize("width", [3, 60], ids=["small", "large"])


@WIDTHS
@pytest.mark.parametrize("how", ["atc", "awc", "backward", "equation", "put", "gradients"])
def test_a_local_step_that_gives_parameters_new_data_counts(fleet: Fleets, how: str, width: int) -> None:
    def run(local: type[torch.optim.SGD]) -> Tensor:
        shoal.set_topology(shoal.FullyConnectedGraph(SIZE))
        options: dict[str, Any] = {
            "atc": {},
            "awc": {"algorithm": AWC},
            "backward": {"overlap": "backward", "bucket_bytes": 1},
            "equation": {"algorithm": ExactDiffusion(1.0, lazy=True)},
            "put": {"algorithm": AWC, "flight": PutFlight},
            "gradients": {"algorithm": shoal.algorithms.ParallelGradientDescent(1.0)},
        }[how]
        net = model(width)
        shoal.broadcast_parameters(net.state_dict(), root_rank=0)
        optimizer = shoal.DecentralizedOptimizer(local(net.parameters(), lr=0.1), net, **options)
        for step in range(3):
            optimizer.zero_grad()
            net(torch.full((2, width), 0.1 * (1 + step + shoal.rank()))).square().sum().backward()
            optimizer.synchronize()
            shoal.barrier()
            optimizer.step()
            shoal.barrier()
        found = flat(net)
        optimizer.close()
        return found

    agents = fleet(SIZE)
    assert torch.equal(torch.stack(agents.run(run, Reassigning)), torch.stack(agents.run(run, InPlace)))


@WIDTHS
def test_new_data_while_the_average_is_under_way_are_an_error_and_not_a_loss(fleet: Fleets, width: int) -> None:
    def run() -> None:
        net = model(width)
        optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net, AWC)
        net(torch.ones(1, width)).sum().backward()
        if shoal.rank() == 0:
            net[1].weight.data = net[1].weight.data.clamp(-0.01, 0.01)
            with pytest.raises(RuntimeError, match=r"'1\.weight' were changed while their average was under way"):
                optimizer.step()
        else:
            optimizer.step()

    fleet(2).run(run)


@WIDTHS
def test_parameters_that_are_cut_where_they_lie_are_exchanged_as_they_are(fleet: Fleets, width: int) -> None:
    """As in structured pruning; what is left begins at the same address."""

    def run() -> Tensor:
        shoal.set_topology(shoal.FullyConnectedGraph(2))
        net = model(width)
        optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), net)
        net(torch.ones(1, width)).sum().backward()
        optimizer.step()
        net[0].weight.data = net[0].weight.data[:2]
        net[1].weight.data = net[1].weight.data[:, :2]
        with torch.no_grad():
            for param in net.parameters():
                param.fill_(float(shoal.rank()))
        optimizer.zero_grad()
        optimizer.step()
        assert net[0].weight.shape == (2, width) and net[1].weight.shape == (1, 2)
        return flat(net)

    for found in fleet(2).run(run):
        assert torch.equal(found, torch.full((2 * width + 2,), 0.5))


@WIDTHS
def test_where_nothing_is_done_to_it_a_parameter_is_not_copied_before_an_exchange(fleet: Fleets, width: int) -> None:
    """It lies in one of two places, or, where it is small, always in one."""

    def run() -> int:
        shoal.set_topology(shoal.FullyConnectedGraph(2))
        net = model(width)
        optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        places = set()
        for _ in range(5):
            optimizer.zero_grad()
            net(torch.ones(1, width)).sum().backward()
            optimizer.step()
            places.add(net[0].weight.data_ptr())
        return len(places)

    assert fleet(2).run(run) == [1 if width == 3 else 2] * 2
