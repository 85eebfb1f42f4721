"""Models, optimizers and plain objects are synchronized exactly, and no received bytes can run code."""

from __future__ import annotations

import math
import pickle
import re
import time
from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest
import torch

import shoal
from shoal.engine.engine import Engine
from support import PROCESS_GROUP
from support.reference import incoming, reduced, same_bits
from support.samples import random_digraph, sample

Fleets = Callable[..., shoal.Fleet]

PLAIN = [
    None,
    True,
    7,
    2**80,
    1.5,
    float("inf"),
    "text, ünïcode",
    [1, [2, (3, "four")]],
    {"nested": {"key": [1, 2]}, 5: None, ("a", 1): "tuple key"},
    {1, 2, 3},
    (),
    [],
    {},
]


def same(one: Any, other: Any) -> bool:
    """Equal in type and value, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and same_bits(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_plain_objects_arrive_equal_from_every_root(fleet: Fleets, size: int) -> None:
    def run() -> None:
        for root in range(size):
            own = PLAIN if shoal.rank() == root else f"ignored {shoal.rank()}"
            assert same(shoal.broadcast_object(own, root_rank=root), PLAIN)

    fleet(size).run(run)


def test_tensors_inside_objects_arrive_bit_for_bit(fleet: Fleets) -> None:
    value = {
        "large": sample(0, (300, 40)),
        "list": [sample(1, (3,), torch.bfloat16), sample(2, (), torch.complex64), sample(3, (2,), torch.bool)],
        "strided": sample(4, (6, 5)).t(),
        "empty": torch.empty(0, 3),
        "with gradient": torch.nn.Parameter(sample(5, (2,))).detach(),
        "number": 3,
    }

    def run() -> None:
        assert same(shoal.broadcast_object(value if shoal.rank() == 1 else None, 1), value)

    fleet(3).run(run)


class Greeting:
    """A class that the weights-only loader does not know."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return print, ("this must never be printed",)


@pytest.mark.parametrize(
    "value",
    [Greeting(), [1, {"deep": Greeting()}], nx.DiGraph, lambda: None],
    ids=["object", "deep inside", "class", "function"],
)
def test_an_object_that_could_run_code_is_refused_at_the_root(
    fleet: Fleets, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> None:
        if shoal.rank() == 0:
            with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
                shoal.broadcast_object(value, 0)
        # Nothing was sent, so the next broadcast is matched as if the refused one had not been called.
        assert shoal.broadcast_object("fine" if shoal.rank() == 0 else None) == "fine"

    fleet(2).run(run)
    assert "never be printed" not in capsys.readouterr().out


def make_model(seed: int) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(5, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 200))
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        torch.nn.init.uniform_(param, -0.15, 0.15, generator=generator)
    model.get_buffer("1.num_batches_tracked").add_(seed)
    return model


WAYS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "state_dict": lambda model: model.state_dict(),
    "named_parameters": lambda model: model.named_parameters(),
    "parameters": lambda model: model.parameters(),
    "list of tensors": lambda model: list(model.parameters()),
    "list of pairs": lambda model: list(model.named_parameters()),
    "shuffled dict": lambda model: dict(sorted(model.state_dict().items(), key=lambda item: hash(item[0]))),
}


@pytest.mark.parametrize("way", WAYS)
def test_broadcast_parameters_copies_the_roots_values_in_place(fleet: Fleets, way: str) -> None:
    models = [make_model(seed) for seed in range(3)]
    expected = {name: tensor.clone() for name, tensor in models[2].state_dict().items()}

    def run() -> None:
        own = models[shoal.rank()]
        where = [parameter.data_ptr() for parameter in own.parameters()]
        assert shoal.broadcast_parameters(WAYS[way](own), root_rank=2) is None  # type: ignore[func-returns-value]
        assert [parameter.data_ptr() for parameter in own.parameters()] == where
        assert all(parameter.requires_grad for parameter in own.parameters())

    fleet(3).run(run)
    for model in models:
        result = model.state_dict() if "dict" in way else dict(model.named_parameters())
        assert all(same_bits(result[name], expected[name]) for name in result)


@pytest.mark.parametrize("way", WAYS)
def test_allreduce_parameters_averages_floating_point_entries(fleet: Fleets, transport: str, way: str) -> None:
    models = [make_model(seed) for seed in range(3)]
    before = [{name: tensor.clone() for name, tensor in model.state_dict().items()} for model in models]

    def run() -> None:
        shoal.bluefog.allreduce_parameters(WAYS[way](models[shoal.rank()]))

    fleet(3).run(run)
    models_of_0 = models[0].state_dict()
    for rank, model in enumerate(models):
        result = model.state_dict() if "dict" in way else dict(model.named_parameters())
        for name, tensor in result.items():
            if not tensor.is_floating_point():
                assert same_bits(tensor, before[rank][name])
                continue
            average = reduced("average", [one[name] for one in before])
            if transport == PROCESS_GROUP:  # which has an order of its own for large sums, and parameters are joined
                assert torch.allclose(tensor, average) and same_bits(tensor, models_of_0[name])
            else:
                assert same_bits(tensor, average), name


def test_non_contiguous_parameters_are_written_in_place(fleet: Fleets) -> None:
    def run() -> torch.Tensor:
        memory = sample(shoal.rank(), (4, 6))
        shoal.broadcast_parameters({"weight": memory.t()[1:]}, root_rank=1)
        return memory

    for rank, memory in enumerate(fleet(2).run(run)):
        assert same_bits(memory[:, 1:], sample(1, (4, 6))[:, 1:])
        assert same_bits(memory[:, 0], sample(rank, (4, 6))[:, 0])


Exchanges: dict[str, Callable[[Any], None]] = {
    "broadcast": lambda params: shoal.broadcast_parameters(params, root_rank=1),
    "allreduce": shoal.bluefog.allreduce_parameters,
}
every_exchange = pytest.mark.parametrize("kind", Exchanges)


def expected_of(kind: str, inputs: list[torch.Tensor]) -> torch.Tensor:
    return inputs[1] if kind == "broadcast" else reduced("average", inputs)


@every_exchange
def test_names_of_the_same_memory_are_exchanged_once(fleet: Fleets, kind: str) -> None:
    names = [f"name {number}" for number in range(6)]

    def run() -> tuple[torch.Tensor, int]:
        memory = sample(shoal.rank(), (5000,))
        view = memory.view(50, 100)
        before = shoal.observability.bytes_sent()
        if shoal.rank() == 2:
            time.sleep(0.05)  # late: the others' first result is there before their last exchange begins
        Exchanges[kind](dict.fromkeys(names, view) | {"flat": memory.view(50, 100)})
        return memory, shoal.observability.bytes_sent() - before

    inputs = [sample(rank, (5000,)) for rank in range(3)]
    for memory, sent in fleet(3).run(run):
        assert same_bits(memory, expected_of(kind, inputs))
        assert sent < 3 * 5000 * 4


@every_exchange
def test_tensors_that_share_part_of_their_memory_are_exchanged_in_sequence(fleet: Fleets, kind: str) -> None:
    def run() -> torch.Tensor:
        memory = torch.full((400_000,), float(shoal.rank()))
        parts = {f"part {begin}": memory[begin : begin + 100_000] for begin in range(0, 300_001, 50_000)}
        if shoal.rank() == 2:
            time.sleep(0.05)
        Exchanges[kind]({"all": memory, **parts, "columns": memory.view(2, 200_000)[:, 100:300]})
        return memory

    for memory in fleet(3).run(run):
        assert (memory == 1).all()


@every_exchange
def test_expanded_and_empty_tensors_are_exchanged_too(fleet: Fleets, kind: str) -> None:
    def run() -> list[float]:
        one = torch.full((1, 3), float(shoal.rank()))
        Exchanges[kind]({"expanded": one.expand(7, 3), "empty": torch.empty(0, 3), "other": torch.empty(0)})
        return one.view(-1).tolist()

    assert fleet(3).run(run) == [[1.0] * 3] * 3


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Operations that all agents of the process submit concurrently."""
    submitted: list[str] = []
    submit = Engine.submit

    def counted(engine: Engine, op: str, *args: Any, **options: Any) -> Any:
        submitted.append(op)
        return submit(engine, op, *args, **options)

    monkeypatch.setattr(Engine, "submit", counted)
    return submitted


def mixed_tensors(rank: int) -> dict[str, torch.Tensor]:
    """Small tensors of several dtypes and layouts, and a large one."""
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool]
    result = {f"{n:03d}": sample(100 * rank + n, (n % 4, 3), dtypes[n % 6]) for n in range(180)}
    result["columns"] = sample(rank, (5, 7)).t()[1:]
    result["conjugate"] = sample(rank, (4,), torch.complex64).conj()
    result["number"] = torch.tensor(float(rank))
    result["large"] = sample(rank, (90_000,))
    return result


@every_exchange
def test_small_tensors_are_fused_with_the_bits_of_single_calls(
    fleet: Fleets, transport: str, kind: str, operations: list[str]
) -> None:
    single: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "broadcast": lambda x: shoal.broadcast(x, 1),
        "allreduce": lambda x: shoal.allreduce(x) if x.is_floating_point() or x.is_complex() else x,
    }

    def run() -> int:
        expected = {name: single[kind](one) for name, one in mixed_tensors(shoal.rank()).items()}
        result = mixed_tensors(shoal.rank())
        shoal.barrier()
        before = len(operations)
        shoal.barrier()
        Exchanges[kind](result)
        shoal.barrier()
        for name, one in result.items():
            if transport == PROCESS_GROUP and kind == "allreduce" and one.dtype == torch.bfloat16:
                assert torch.allclose(one, expected[name])
            else:
                assert same_bits(one.resolve_conj(), expected[name].resolve_conj()), name
        return sum(op.startswith(kind) for op in operations[before:])

    assert max(fleet(3).run(run)) == 3 * ((6 if kind == "broadcast" else 4) + 1)  # the dtypes, and the large one


@every_exchange
def test_tensors_that_overlap_on_one_agent_only_are_exchanged(fleet: Fleets, kind: str) -> None:
    def run() -> list[float]:
        memory = torch.full((6,), float(shoal.rank()))
        parts = {"a": memory[:4], "b": memory[2:]} if shoal.rank() == 0 else {"a": memory[:4], "b": memory[2:].clone()}
        Exchanges[kind]({**parts, "c": torch.ones(3)})
        return parts["b"].tolist()

    # One of the two has averaged the first two numbers before, as a part of the other tensor.
    expected = [1.0] * 4 if kind == "broadcast" else [0.75, 0.75, 0.5, 0.5]
    assert fleet(2).run(run) == [expected] * 2


@every_exchange
def test_an_error_names_the_non_finite_tensors_of_a_fused_message(
    fleet: Fleets, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("SHOAL_CHECK_FINITE", "1")

    def run() -> str:
        params = {name: torch.ones(3) for name in "abc"}
        if shoal.rank() == 1:
            params["b"][1] = math.nan
        with pytest.raises(shoal.ShoalError) as caught:
            Exchanges[kind](params)
        return str(caught.value)

    results = fleet(2).run(run)
    assert "'broadcast_parameters.a and 2 more'" in results[0] or "'allreduce_parameters.a and 2 more'" in results[0]
    assert results[1].endswith("The tensors with such numbers: b")


@every_exchange
@pytest.mark.parametrize("how", ["tied", "names", "shape", "dtype", "none"])
def test_agents_with_other_tensors_raise_a_mismatch_and_nothing_is_changed(fleet: Fleets, kind: str, how: str) -> None:
    def run() -> None:
        a, b = torch.zeros(3), torch.zeros(3)
        params = {"a": a, "b": b}
        if shoal.rank() == 2:
            changed: dict[str, dict[str, torch.Tensor]] = {
                "tied": {"a": a, "b": a},
                "names": {"a": a, "c": b},
                "shape": {"a": a, "b": b.view(3, 1)},
                "dtype": {"a": a, "b": b.double()},
                "none": {},
            }
            params = changed[how]
        messages = {
            "tied": "'b' .*tied to 'a'",
            "names": "'c'",
            "shape": r"\[3, 1\]",
            "dtype": "float64",
            "none": "none",
        }
        with pytest.raises(shoal.Mismatch, match=r"rank 0 has 'b'|rank 0 has 'a'") as caught:
            Exchanges[kind](params)
        assert re.search(f"only rank 2 has.*{messages[how]}", str(caught.value))
        assert caught.value.ranks == (0, 2)
        assert not a.any()
        assert not b.any()
        assert shoal.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]

    fleet(3).run(run)


def test_duplicate_names_and_parameters_that_are_not_tensors_are_refused(fleet: Fleets) -> None:
    def run() -> None:
        for call in (shoal.broadcast_parameters, shoal.bluefog.allreduce_parameters):
            with pytest.raises(ValueError, match="same name"):
                call([("a", torch.ones(1)), ("a", torch.ones(1))])
            with pytest.raises(TypeError, match="int"):
                call({"step": 3})  # type: ignore[arg-type]

    fleet(1).run(run)


Optimizers = dict[str, Callable[[Any], torch.optim.Optimizer]]
OPTIMIZERS: Optimizers = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3, betas=(0.8, 0.95), eps=1e-7, weight_decay=0.1),
    "AdamW with amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD without momentum": lambda p: torch.optim.SGD(p, lr=1 / 3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.02, centered=True, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.2),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh elsewhere", "used elsewhere"])
def test_the_roots_optimizer_state_arrives_exactly_and_no_step_is_taken(fleet: Fleets, kind: str, fresh: bool) -> None:
    def prepare(rank: int) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
        model = torch.nn.Linear(4, 3)
        optimizer = OPTIMIZERS[kind](model.parameters())
        optimizer.param_groups[0]["lr"] *= 1.1 + rank
        for _ in range(0 if fresh and rank != 1 else rank + 2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        return model, optimizer

    worlds = [prepare(rank) for rank in range(3)]
    parameters = [[p.detach().clone() for p in model.parameters()] for model, _ in worlds]
    expected = worlds[1][1].state_dict()

    def run() -> None:
        shoal.bluefog.broadcast_optimizer_state(worlds[shoal.rank()][1], root_rank=1)

    fleet(3).run(run)
    for (model, optimizer), before in zip(worlds, parameters, strict=True):
        assert same(optimizer.state_dict(), expected)
        assert all(map(same_bits, model.parameters(), before))


def test_after_the_broadcast_equal_gradients_keep_the_agents_equal(fleet: Fleets) -> None:
    def run() -> torch.Tensor:
        model = torch.nn.Linear(3, 2)
        torch.nn.init.constant_(model.weight, shoal.rank())
        torch.nn.init.constant_(model.bias, 0.0)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(shoal.rank() + 1):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        shoal.broadcast_parameters(model.state_dict(), 0)
        shoal.bluefog.broadcast_optimizer_state(optimizer, 0)
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return model.weight.detach()

    results = fleet(3).run(run)
    assert all(same_bits(one, results[0]) for one in results)


def test_a_state_of_none_is_preserved(fleet: Fleets) -> None:
    """SGD without momentum keeps ``momentum_buffer: None``, on which BlueFog fails."""

    def run() -> Any:
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        parameter.grad = torch.ones(2)
        optimizer.step()
        optimizer.state[parameter]["momentum_buffer"] = None
        shoal.bluefog.broadcast_optimizer_state(optimizer, 0)
        return optimizer.state_dict()["state"]

    assert fleet(2).run(run) == [{0: {"momentum_buffer": None}}] * 2


def test_lbfgs_is_refused(fleet: Fleets) -> None:
    def run() -> None:
        with pytest.raises(ValueError, match="LBFGS"):
            shoal.bluefog.broadcast_optimizer_state(torch.optim.LBFGS([torch.nn.Parameter(torch.ones(1))]))

    fleet(1).run(run)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_infer_finds_the_reverse_lists_of_random_digraphs(fleet: Fleets, size: int) -> None:
    sends = [[list(own) for own in random_digraph(size, seed)] for seed in range(6)]

    def run() -> list[tuple[Any, Any]]:
        rank = shoal.rank()
        return [
            (
                shoal.bluefog.InferSourceFromDestinationRanks(send[rank]),
                shoal.bluefog.InferDestinationFromSourceRanks(incoming(send)[rank]),
            )
            for send in sends
        ]

    for rank, results in enumerate(fleet(size).run(run)):
        for send, (sources, destinations) in zip(sends, results, strict=True):
            assert sources == incoming(send)[rank]
            assert destinations == sorted(send[rank])


@pytest.mark.parametrize("size", [1, 2, 5])
def test_infer_gives_the_matrix_of_uniform_weights_with_columns_that_sum_to_one(fleet: Fleets, size: int) -> None:
    """``A[i, j]`` weighs the edge from i to j: each agent j weighs itself and its sources by 1 / (in-degree + 1)."""
    sends = [list(own) for own in random_digraph(size, 4)]
    receives = incoming(sends)
    expected = torch.zeros(size, size)
    for j, sources in enumerate(receives):
        for i in [j, *sources]:
            expected[i, j] = 1.0 / (len(sources) + 1)

    def run() -> None:
        rank = shoal.rank()
        sources, one = shoal.bluefog.InferSourceFromDestinationRanks(sends[rank], True)
        destinations, other = shoal.bluefog.InferDestinationFromSourceRanks(
            receives[rank], construct_adjacency_matrix=True
        )
        assert (sources, destinations) == (receives[rank], sorted(sends[rank]))
        torch.testing.assert_close(one, expected)
        torch.testing.assert_close(other, expected)
        assert isinstance(one, torch.Tensor)
        torch.testing.assert_close(one.sum(0), torch.ones(size))

    fleet(size).run(run)


@pytest.mark.parametrize(
    ("ranks", "error"),
    [([0], ValueError), ([7], ValueError), ([1, 1], ValueError), ([1.0], TypeError), ("1", TypeError)],
)
def test_infer_refuses_invalid_rank_lists(fleet: Fleets, ranks: Any, error: type[Exception]) -> None:
    def run() -> None:
        if shoal.rank() == 0:
            for infer in (shoal.bluefog.InferSourceFromDestinationRanks, shoal.bluefog.InferDestinationFromSourceRanks):
                with pytest.raises(error):
                    infer(ranks)

    fleet(2).run(run)
