"""Parameters whose data somebody has put elsewhere, or cut, with ``param.data = ...``: noticed, and never lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import shoal
from shoal.algorithms import ExactDiffusion, GradientDescent
from shoal.optim.exchanges.pairwise_exchange import PairwiseExchange
from shoal.optim.exchanges.window_exchange import GetExchange, PushSumExchange, PutExchange

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
def test_new_parameter_data_set_by_a_local_step_are_used(fleet: Fleets, how: str, width: int) -> None:
    def run(local: type[torch.optim.SGD]) -> Tensor:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(SIZE))
        options: dict[str, Any] = {
            "atc": {},
            "awc": {"algorithm": AWC},
            "backward": {"overlap": "backward", "bucket_bytes": 1},
            "equation": {"algorithm": ExactDiffusion(1.0, lazy=True)},
            "put": {"algorithm": AWC, "bucket_exchange": PutExchange},
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
        result = flat(net)
        optimizer.close()
        return result

    agents = fleet(SIZE)
    assert torch.equal(torch.stack(agents.run(run, Reassigning)), torch.stack(agents.run(run, InPlace)))


@WIDTHS
def test_new_data_during_the_average_are_an_error_and_not_a_failure(fleet: Fleets, width: int) -> None:
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
def test_parameters_shrunk_in_place_are_exchanged_in_place(fleet: Fleets, width: int) -> None:
    """As in structured pruning: the remaining entries start at the same address."""

    def run() -> Tensor:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(2))
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

    for result in fleet(2).run(run):
        assert torch.equal(result, torch.full((2 * width + 2,), 0.5))


@WIDTHS
def test_an_unmodified_parameter_is_not_copied_before_an_exchange(fleet: Fleets, width: int) -> None:
    """It stays in one of two buffers or, if it is small, always in one."""

    def run() -> int:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(2))
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


def assign(net: nn.Module) -> None:
    net.load_state_dict({name: one.clone() for name, one in net.state_dict().items()}, assign=True)


def another_layer(net: nn.Module) -> None:
    net[0] = nn.Linear(3, 3, bias=False)  # type: ignore[operator]


def another_parameter(net: nn.Module) -> None:
    net[1].weight = nn.Parameter(torch.ones(1, 3))  # type: ignore[index, union-attr]


def append_parameter(net: nn.Module) -> None:
    net[1].new = nn.Parameter(torch.ones(1, 3))  # type: ignore[index, union-attr]


@pytest.mark.parametrize(
    "change, names",
    [(assign, "'0.weight', '1.weight'"), (another_layer, "'0.weight'"), (another_parameter, "'1.weight'")],
)
def test_a_replaced_parameter_is_refused_by_name(
    fleet: Fleets, change: Callable[[nn.Module], None], names: str
) -> None:
    def run() -> None:
        net = model(3)
        optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net, ATC)
        for _ in range(2):
            net(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        change(net)
        before = flat(net)
        net(torch.ones(2, 3)).sum().backward()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"parameters {names} were replaced by others, and this"):
                optimizer.step()
        assert torch.equal(flat(net), before)
        optimizer.close()

    fleet(2).run(run)


def test_a_modified_model_that_keeps_its_parameters_trains_on(fleet: Fleets) -> None:
    """Parametrized, pruned, or without a submodule. A parameter without a wrapper causes a warning when it appears."""

    def run() -> None:
        net = model(3)
        optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net, ATC)

        def step() -> None:
            before = flat(net)
            optimizer.zero_grad()
            net(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            assert not torch.equal(flat(net), before)

        step()
        parametrize.register_parametrization(net[0], "weight", nn.Tanh())
        step()
        prune.l1_unstructured(net[1], "weight", amount=1)  # type: ignore[no-untyped-call]
        step()
        net.double()
        net.float()
        step()
        append_parameter(net)
        step()
        del net[0]
        step()
        optimizer.close()

    with pytest.warns(UserWarning, match=r"which are learnt: [01]\.new"):
        fleet(2).run(run)


# Parameters that share memory


class Tied(nn.Module):
    """Two layers that are one in memory, with a buffer that is a view of it, and two that overlap in a half."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight.data = self.embed.weight.data
        self.register_buffer("row", self.embed.weight.data[1])
        numbers = torch.arange(9.0) / 10
        self.left, self.right = nn.Parameter(numbers[:6]), nn.Parameter(numbers[3:])
        self.other = nn.Parameter(torch.ones(6))

    def forward(self, i: Tensor) -> Tensor:
        y: Tensor = self.head(self.embed(i)) * self.left * self.right * self.other
        return y

    @property
    def shares(self) -> bool:
        one = torch.equal(self.embed.weight, self.head.weight) and torch.equal(self.embed.weight[1], self.row)
        return one and torch.equal(self.left[3:], self.right[:3])


SHARING: dict[str, dict[str, Any]] = {
    "atc": {"algorithm": ATC},
    "awc": {"algorithm": AWC},
    "gradients": {"algorithm": shoal.algorithms.ParallelGradientDescent(1.0)},
    "atc, backward": {"algorithm": ATC, "overlap": "backward", "bucket_bytes": 1},
    "gradients, backward": {
        "algorithm": shoal.algorithms.ParallelGradientDescent(1.0),
        "overlap": "backward",
        "bucket_bytes": 1,
    },
    "equation": {"algorithm": ExactDiffusion(1.0, lazy=True)},
    "put": {"algorithm": AWC, "bucket_exchange": PutExchange},
    "get": {"algorithm": AWC, "bucket_exchange": GetExchange},
    "push-sum": {"algorithm": ATC, "bucket_exchange": PushSumExchange},
    "ad-psgd": {"algorithm": AWC, "bucket_exchange": PairwiseExchange},
}


def train(net: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        net(torch.tensor([step % 3, shoal.rank()])).square().sum().backward()
        optimizer.step()
        shoal.barrier()


@pytest.mark.parametrize("how", [*SHARING])
def test_parameters_that_share_memory_keep_sharing_it(fleet: Fleets, how: str) -> None:
    def run() -> tuple[Tensor, bool]:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(2))
        net = Tied()
        shoal.broadcast_parameters(net.state_dict(), root_rank=0)
        optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(net.parameters(), lr=0.05), net, **SHARING[how])
        train(net, optimizer, range(4))
        shares = net.shares
        optimizer.close()
        return flat(net), shares

    result, shares = zip(*fleet(2).run(run), strict=True)
    assert all(shares)
    assert how not in ("atc", "gradients", "atc, backward", "gradients, backward") or torch.allclose(*result, atol=1e-6)


@pytest.mark.parametrize("way", ["atc", "gradients"])
def test_tied_parameters_step_as_in_plain_training(fleet: Fleets, way: str) -> None:
    """With the same batches on all agents, the models equal a model trained without a wrapper."""
    torch.manual_seed(0)  # from some starts this loss diverges at this rate
    start = Tied().state_dict()

    def run(wrapped: bool, overlap: str | None = None) -> Tensor:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(shoal.size()))
        net = Tied()
        net.load_state_dict(start)
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        if wrapped:
            algorithm = SHARING[way]["algorithm"]
            optimizer = shoal.DecentralizedOptimizer(optimizer, net, algorithm, overlap=overlap, bucket_bytes=1)
        for step in range(4):
            optimizer.zero_grad()
            net(torch.tensor([step % 3, 5])).square().sum().backward()
            optimizer.step()
        return flat(net)

    plain = fleet(1).run(run, False)[0]
    for overlap in (None, "backward"):
        for result in fleet(2).run(run, True, overlap):
            assert torch.allclose(result, plain, rtol=0, atol=1e-6)


@pytest.mark.parametrize("late", [False, True], ids=["before", "after two steps"])
def test_a_model_in_shared_memory_stays_there(fleet: Fleets, late: bool) -> None:
    def run() -> None:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(2))
        net = model(60)
        optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(net.parameters(), lr=0.05), net, ATC)
        for step in range(4):
            if step == (2 if late else 0):
                net.share_memory()
                seen = [param.detach() for param in net.parameters()]
            optimizer.zero_grad()
            net(torch.ones(2, 60) * (1 + shoal.rank())).square().mean().backward()
            optimizer.step()
        assert all(param.is_shared() for param in net.parameters())
        assert all(torch.equal(one, param) for one, param in zip(seen, net.parameters(), strict=True))
        every = shoal.allgather(flat(net)[None])
        assert torch.allclose(every[0], every[1], atol=1e-6)
        optimizer.close()

    fleet(2).run(run)


def test_shared_memory_on_one_agent_only_works_and_ties_on_one_agent_only_raise(fleet: Fleets) -> None:
    """Shared memory concerns one agent alone. Ties concern all."""

    def run() -> None:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(2))
        net = model(3)
        if shoal.rank() == 0:
            net.share_memory()
        optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(net.parameters(), lr=0.05), net, ATC)
        for _ in range(2):
            net(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        optimizer.close()
        two = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        if shoal.rank() == 0:
            two[1].weight.data = two[0].weight.data  # type: ignore[union-attr]
        optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(two.parameters(), lr=0.05), two, ATC)
        two(torch.ones(2, 3)).sum().backward()
        with pytest.raises(shoal.Mismatch, match=r"1\.weight \[3, 3\] float32, in the memory of 0\.weight"):
            optimizer.step()

    fleet(2).run(run)
