"""Wrong arguments are refused before any message is sent, with the error and a remedy, and do no later harm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch

import shoal

Fleets = Callable[..., shoal.Fleet]
Operation = Callable[..., Any]

TENSOR_OPERATIONS: dict[str, Operation] = {
    "neighbor_allreduce": shoal.neighbor_allreduce,
    "neighbor_allreduce_nonblocking": shoal.nonblocking.neighbor_allreduce,
    "neighbor_allgather": shoal.neighbor_allgather,
    "neighbor_allgather_nonblocking": shoal.nonblocking.neighbor_allgather,
    "hierarchical_neighbor_allreduce": shoal.bluefog.hierarchical_neighbor_allreduce,
    "pair_gossip": lambda x: shoal.pair_gossip(x, 1 - shoal.rank()),
    "allreduce": shoal.allreduce,
    "allreduce_nonblocking": shoal.nonblocking.allreduce,
    "allgather": shoal.allgather,
    "broadcast": lambda x: shoal.broadcast(x, 0),
    "broadcast_nonblocking": lambda x: shoal.nonblocking.broadcast(x, 0),
}


def refuses(fleet: Fleets, size: int, cases: list[tuple[Operation, type[Exception], str]]) -> None:
    """Every case raises on every agent, with the words; afterwards the agents still agree on every count."""

    def run() -> None:
        for call, error, message in cases:
            with pytest.raises(error, match=message):
                call()
        assert shoal.neighbor_allreduce(torch.ones(2)).tolist() == [1.0, 1.0]
        assert shoal.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]

    fleet(size).run(run)


def test_every_operation_refuses_inputs_that_are_not_tensors(fleet: Fleets) -> None:
    things = [None, 3.0, [1.0, 2.0], np.ones(3), "tensor", torch.nn.Linear(1, 1)]
    cases: list[tuple[Operation, type[Exception], str]] = [
        (lambda op=op, thing=thing: op(thing), TypeError, type(thing).__name__)
        for op in TENSOR_OPERATIONS.values()
        for thing in things
    ]
    refuses(fleet, 2, cases)


def test_sparse_and_quantized_tensors_are_refused(fleet: Fleets) -> None:
    sparse = torch.eye(3).to_sparse()
    cases: list[tuple[Operation, type[Exception], str]] = [
        (lambda op=op: op(sparse), TypeError, "dense") for op in TENSOR_OPERATIONS.values()
    ]
    refuses(fleet, 2, cases)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool], ids=str)
def test_integers_have_no_weighted_average_and_the_message_has_the_remedy(fleet: Fleets, dtype: torch.dtype) -> None:
    x = torch.ones(3, dtype=dtype)
    averages: list[Operation] = [
        lambda: shoal.neighbor_allreduce(x),
        lambda: shoal.neighbor_allreduce(x, 1, {1 - shoal.rank(): 1}, {1 - shoal.rank(): 1}),
        lambda: shoal.bluefog.hierarchical_neighbor_allreduce(x),
        lambda: shoal.pair_gossip(x, 1 - shoal.rank()),
        lambda: shoal.allreduce(x),
    ]
    refuses(fleet, 2, [(call, TypeError, r"convert it with tensor\.float\(\)") for call in averages])


def test_zero_dimensional_tensors_cannot_be_concatenated(fleet: Fleets) -> None:
    x = torch.tensor(1.0)
    cases: list[tuple[Operation, type[Exception], str]] = [
        (lambda: shoal.allgather(x), ValueError, r"view\(1\)"),
        (lambda: shoal.neighbor_allgather(x), ValueError, r"view\(1\)"),
    ]
    refuses(fleet, 2, cases)


@pytest.mark.parametrize("name", ["", "~mine", "x" * 1025, "ü" * 600, 3, b"bytes", ["list"]])
def test_invalid_names_are_refused(fleet: Fleets, name: Any) -> None:
    x = torch.ones(2)
    calls: list[Operation] = [
        lambda: shoal.neighbor_allreduce(x, name=name),
        lambda: shoal.neighbor_allgather(x, name),
        lambda: shoal.bluefog.hierarchical_neighbor_allreduce(x, name=name),
        lambda: shoal.pair_gossip(x, 1 - shoal.rank(), name=name),
        lambda: shoal.allreduce(x, name=name),
        lambda: shoal.broadcast(x, 0, name),
        lambda: shoal.allgather(x, name),
        lambda: shoal.barrier(name),
        lambda: shoal.broadcast_object(3, 0, name),
    ]
    refuses(fleet, 2, [(call, ValueError, "name") for call in calls])


@pytest.mark.parametrize("name", ["a", "layer.0/weight:0", "名前", " spaces ", "x" * 1024, "with\nnewline", "\0"])
def test_any_other_string_is_a_name(fleet: Fleets, name: str) -> None:
    assert fleet(2).run(lambda: shoal.neighbor_allreduce(torch.ones(1), name).item()) == [1.0, 1.0]


def test_a_name_passed_twice_is_refused(fleet: Fleets) -> None:
    cases: list[tuple[Operation, type[Exception], str]] = [
        (lambda: shoal.neighbor_allreduce(torch.ones(1), "a", name="b"), ValueError, "twice"),
        (lambda: shoal.bluefog.hierarchical_neighbor_allreduce(torch.ones(1), "a", name="b"), ValueError, "twice"),
    ]
    refuses(fleet, 1, cases)


def mixed(**arguments: Any) -> Operation:
    return lambda: shoal.neighbor_allreduce(torch.ones(2), **arguments)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (mixed(self_weight=0.5), ValueError, "self_weight together with"),
        (mixed(src_weights={1: 0.5}), ValueError, "self_weight together with"),
        (mixed(dst_weights={1: 0.5}), ValueError, "self_weight together with"),
        (mixed(src_weights={}, dst_weights={}), ValueError, "self_weight together with"),
        (mixed(self_weight=0.5, src_weights=[1]), TypeError, "dict"),
        (mixed(self_weight=0.5, src_weights=3), TypeError, "dict"),
        (mixed(self_weight=0.5, src_weights="1"), TypeError, "dict"),
        (mixed(self_weight=0.5, dst_weights=3), TypeError, "list"),
        (mixed(self_weight=0.5, dst_weights="1"), TypeError, "list"),
        (mixed(self_weight=0.5, src_weights={0: 0.5}), ValueError, "itself"),
        (mixed(self_weight=0.5, dst_weights={0: 0.5}), ValueError, "itself"),
        (mixed(self_weight=0.5, dst_weights=[0]), ValueError, "itself"),
        (mixed(self_weight=0.5, src_weights={}, dst_weights=[0]), ValueError, "itself"),
        (mixed(self_weight=0.5, src_weights={3: 0.5}), ValueError, "out of range"),
        (mixed(self_weight=0.5, src_weights={-1: 0.5}), ValueError, "-1"),
        (mixed(self_weight=0.5, dst_weights=[7]), ValueError, "out of range"),
        (mixed(self_weight=0.5, dst_weights=[1, 1]), ValueError, "twice"),
        (mixed(self_weight=0.5, src_weights={1.0: 0.5}), TypeError, "int"),
        (mixed(self_weight=0.5, src_weights={"1": 0.5}), TypeError, "int"),
        (mixed(self_weight=0.5, src_weights={True: 0.5}), TypeError, "int"),
        (mixed(self_weight=0.5, src_weights={1: "half"}), TypeError, "real number"),
        (mixed(self_weight=0.5, src_weights={1: None}), TypeError, "real number"),
        (mixed(self_weight=0.5, src_weights={1: 1j}), TypeError, "real number"),
        (mixed(self_weight=0.5, src_weights={1: float("nan")}), ValueError, "finite"),
        (mixed(self_weight=0.5, dst_weights={1: float("inf")}), ValueError, "finite"),
        (mixed(self_weight=float("nan"), src_weights={1: 0.5}), ValueError, "finite"),
        (mixed(self_weight=float("-inf"), dst_weights={1: 0.5}), ValueError, "finite"),
        (mixed(self_weight=10**400, dst_weights={1: 0.5}), ValueError, "finite"),
        (mixed(self_weight=[0.5], src_weights={1: 0.5}), TypeError, "real number"),
        (mixed(self_weight=True, src_weights={1: 0.5}), TypeError, "real number"),
    ],
)
def test_invalid_weights_are_refused(fleet: Fleets, call: Operation, error: type[Exception], message: str) -> None:
    def run() -> None:
        if shoal.rank() == 0:
            with pytest.raises(error, match=message):
                call()
        assert shoal.neighbor_allreduce(torch.ones(2)).tolist() == [1.0, 1.0]

    fleet(3).run(run)


@pytest.mark.parametrize("form", ["src_weights", "dst_weights"])
def test_without_the_check_a_rank_that_is_not_a_neighbour_is_refused_locally(fleet: Fleets, form: str) -> None:
    def run() -> None:
        shoal.set_topology(shoal.topology.RingGraph(4))
        far = (shoal.rank() + 2) % 4
        arguments: dict[str, Any] = {"self_weight": 1.0, form: {far: 1.0}, "enable_topo_check": False}
        with pytest.raises(
            ValueError, match=rf"ranks \[{far}\] are no {'in' if form == 'src_weights' else 'out'}-neigh"
        ):
            shoal.neighbor_allreduce(torch.ones(2), **arguments)

    fleet(4).run(run)


def test_numpy_weights_and_ranks_are_accepted(fleet: Fleets) -> None:
    def run() -> float:
        other = np.int64(1 - shoal.rank())
        x = torch.tensor(float(shoal.rank()))
        return shoal.neighbor_allreduce(x, np.float64(0.5), {other: np.float32(0.5)}, {other: np.int32(2)}).item()

    assert fleet(2).run(run) == [1.0, 0.5]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"src_ranks": [1]}, ValueError, "both src_ranks and dst_ranks"),
        ({"dst_ranks": [1]}, ValueError, "both src_ranks and dst_ranks"),
        ({"src_ranks": [0], "dst_ranks": []}, ValueError, "itself"),
        ({"src_ranks": [3], "dst_ranks": []}, ValueError, "ranks"),
        ({"src_ranks": [], "dst_ranks": [-1]}, ValueError, "ranks"),
        ({"src_ranks": [1, 1], "dst_ranks": []}, ValueError, "twice"),
        ({"src_ranks": "1", "dst_ranks": []}, TypeError, "list of ranks"),
        ({"src_ranks": 1, "dst_ranks": []}, TypeError, "list of ranks"),
        ({"src_ranks": [1.0], "dst_ranks": []}, TypeError, "no rank"),
        ({"src_ranks": [True], "dst_ranks": []}, TypeError, "no rank"),
    ],
)
def test_invalid_ranks_of_a_gather_are_refused(
    fleet: Fleets, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    def run() -> None:
        if shoal.rank() == 0:
            with pytest.raises(error, match=message):
                shoal.neighbor_allgather(torch.ones(2), **arguments)
        assert shoal.neighbor_allreduce(torch.ones(2)).tolist() == [1.0, 1.0]

    fleet(3).run(run)


def test_an_out_that_cannot_hold_the_result_is_refused(fleet: Fleets) -> None:
    x = torch.ones(2, 3)
    operations: list[Operation] = [
        shoal.neighbor_allreduce,
        shoal.bluefog.hierarchical_neighbor_allreduce,
        shoal.allreduce,
        lambda x, out: shoal.broadcast(x, 0, out=out),
    ]
    outs: list[tuple[Any, type[Exception], str]] = [
        (torch.ones(3, 2), ValueError, r"\[3, 2\].*\[2, 3\]"),
        (torch.ones(6), ValueError, "shape"),
        (torch.ones(2, 3, dtype=torch.float64), ValueError, "float64"),
        (torch.ones(2, 3, requires_grad=True), ValueError, "requires grad"),
        (np.ones((2, 3)), ValueError, "out"),
        (torch.ones(2, 3, device="meta"), ValueError, "memory of its own"),
        (torch.ones(2, 3).to_sparse(), ValueError, "dense tensor"),
        (torch.ones(1, 3).expand(2, 3), ValueError, "elements of out share memory"),
        (torch.ones(6).as_strided((2, 3), (1, 1)), ValueError, "elements of out share memory"),
    ]
    cases: list[tuple[Operation, type[Exception], str]] = [
        (lambda op=op, out=out: op(x, out=out), error, message) for op in operations for out, error, message in outs
    ]
    refuses(fleet, 2, cases)


def test_a_rule_that_is_none_and_a_long_name_are_refused(fleet: Fleets) -> None:
    x = torch.ones(2)
    rule: Any = "median"
    refuses(
        fleet,
        2,
        [
            (lambda: shoal.neighbor_allreduce(x, robust=rule), TypeError, "robust='median' is no rule; .*FiniteOnly"),
            (lambda: shoal.allreduce(x, name="n" * 5000), ValueError, r"^.{0,300}$"),
        ],
    )


def test_collections_of_parameters_and_optimizers_are_checked(fleet: Fleets) -> None:
    model: Any = torch.nn.Linear(1, 1)
    refuses(
        fleet,
        2,
        [
            (lambda: shoal.broadcast_parameters(model), TypeError, r"takes model.state_dict\(\).*, not a Linear"),
            (
                lambda: shoal.bluefog.allreduce_parameters(model),
                TypeError,
                r"takes model.state_dict\(\).*, not a Linear",
            ),
            (lambda: shoal.broadcast_parameters(torch.nn.Sequential(model)), TypeError, "not a Sequential"),  # type: ignore[arg-type]
            (lambda: shoal.broadcast_parameters(None), TypeError, "not a NoneType"),  # type: ignore[arg-type]
            (lambda: shoal.bluefog.broadcast_optimizer_state(model), TypeError, "takes an optimizer, not a Linear"),
        ],
    )


def test_an_out_whose_elements_share_memory_is_refused(fleet: Fleets) -> None:
    """torch itself refuses to write to an expanded tensor. Nothing may be written before that error."""
    out = torch.zeros(1).expand(3)

    def run() -> None:
        for call in (shoal.neighbor_allreduce, shoal.allreduce):
            with pytest.raises((ValueError, RuntimeError), match=r"out|memory location"):
                call(torch.ones(3), out=out)

    fleet(1).run(run)
    assert out.tolist() == [0.0] * 3


@pytest.mark.parametrize("root", [-1, 2, 1.0, "0", None, True])
def test_an_invalid_root_is_refused(fleet: Fleets, root: Any) -> None:
    x = torch.ones(2)
    calls: list[Operation] = [
        lambda: shoal.broadcast(x, root),
        lambda: shoal.bluefog.broadcast_(x, root),
        lambda: shoal.nonblocking.broadcast(x, root),
        lambda: shoal.broadcast_object(3, root),
        lambda: shoal.broadcast_parameters({"x": x}, root),
        lambda: shoal.bluefog.broadcast_optimizer_state(torch.optim.SGD([torch.nn.Parameter(x)], lr=0.1), root),
    ]
    refuses(fleet, 2, [(call, ValueError, "root_rank") for call in calls])


@pytest.mark.parametrize("op", ["mean", "SUM", "", 3])
def test_an_unknown_reduction_is_refused_with_the_valid_ones(fleet: Fleets, op: Any) -> None:
    refuses(fleet, 2, [(lambda: shoal.allreduce(torch.ones(1), op=op), ValueError, "sum, average, product, min, max")])


def edges(*given: tuple[int, int]) -> nx.DiGraph:
    return nx.DiGraph(given)


@pytest.mark.parametrize(
    ("graph", "error", "message"),
    [
        (nx.Graph([(0, 1), (1, 2)]), TypeError, r"to_directed\(\)"),
        (nx.MultiDiGraph([(0, 1), (0, 1), (1, 2)]), TypeError, "MultiDiGraph"),
        ([[0.5, 0.5], [0.5, 0.5]], TypeError, "list"),
        (np.eye(3), TypeError, "ndarray"),
        (edges((0, 1)), ValueError, "2 nodes and there are 3 agents"),
        (shoal.topology.RingGraph(4), ValueError, "4 nodes and there are 3 agents"),
        (edges((1, 2), (2, 3)), ValueError, "0 to 2"),
        (nx.DiGraph([("a", "b"), ("b", "c")]), ValueError, "0 to 2"),
    ],
)
def test_a_topology_of_the_wrong_type_or_size_is_refused_and_the_old_one_stays(
    fleet: Fleets, graph: Any, error: type[Exception], message: str
) -> None:
    def run() -> None:
        before = shoal.load_topology()
        with pytest.raises(error, match=message):
            shoal.set_topology(graph)
        assert shoal.load_topology() is before
        with pytest.raises(error, match=message.replace("agents", "machines")):
            shoal.bluefog.set_machine_topology(graph)
        assert shoal.bluefog.load_machine_topology() is None
        assert shoal.allreduce(torch.ones(1)).item() == 1.0

    fleet(3, agents_per_machine=1).run(run)


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), "heavy", 1j])
def test_a_topology_with_invalid_weights_is_refused_at_first_use(fleet: Fleets, weight: Any) -> None:
    def run() -> None:
        graph = nx.DiGraph(shoal.topology.RingGraph(2))
        graph.edges[0, 1]["weight"] = weight
        graph.edges[1, 0]["weight"] = weight
        before = shoal.load_topology()
        with pytest.raises((ValueError, TypeError)):
            shoal.set_topology(graph, is_weighted=True)
        assert shoal.load_topology() is before

    fleet(2).run(run)


def test_a_fleet_without_agents_or_with_an_unknown_transport_is_refused() -> None:
    for size in (0, -1, 2.0, "4", True, None):
        with pytest.raises((ValueError, TypeError), match="positive"):
            shoal.Fleet(size)  # type: ignore[arg-type]
    for per_machine in (0, -2):
        with pytest.raises(ValueError, match="agents_per_machine"):
            shoal.Fleet(2, agents_per_machine=per_machine)
    for timeout in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="timeout"):
            shoal.Fleet(2, timeout=timeout).run(shoal.rank)
    with pytest.raises(ValueError, match="threads, shared_memory, network"):
        shoal.Fleet(2, transport="pigeons").run(shoal.rank)
