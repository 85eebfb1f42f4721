"""A script for BlueFog runs after its import has changed, and the page about its names says what became of each."""

from __future__ import annotations

import importlib
import inspect
import re
import time
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import shoal
import shoal.bluefog as bf
from shoal.execution import operation as handles
from support.scripts import in_processes
from support.world import World

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "bluefog.md").read_text()
(CALLS,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

BLUEFOGS = re.findall(
    r"\w+",
    """
    init shutdown size rank local_size local_rank machine_size machine_rank is_homogeneous load_topology
    set_topology load_machine_topology set_machine_topology is_topo_weighted is_machine_topo_weighted
    in_neighbor_ranks out_neighbor_ranks in_neighbor_machine_ranks out_neighbor_machine_ranks
    mpi_threads_supported unified_mpi_window_model_supported nccl_built set_skip_negotiate_stage
    get_skip_negotiate_stage suspend resume barrier allreduce allreduce_ allreduce_nonblocking
    allreduce_nonblocking_ broadcast broadcast_ broadcast_nonblocking broadcast_nonblocking_ allgather
    allgather_nonblocking neighbor_allgather neighbor_allgather_nonblocking neighbor_allreduce
    neighbor_allreduce_nonblocking hierarchical_neighbor_allreduce hierarchical_neighbor_allreduce_nonblocking
    pair_gossip pair_gossip_nonblocking poll wait synchronize win_create win_free win_put win_put_nonblocking
    win_accumulate win_accumulate_nonblocking win_get win_get_nonblocking neighbor_win_put
    neighbor_win_put_nonblocking neighbor_win_accumulate neighbor_win_accumulate_nonblocking neighbor_win_get
    neighbor_win_get_nonblocking win_update win_update_then_collect win_wait win_poll win_mutex
    get_win_version get_current_created_window_names turn_on_win_ops_with_associated_p
    turn_off_win_ops_with_associated_p win_associated_p broadcast_parameters allreduce_parameters
    broadcast_optimizer_state timeline_start_activity timeline_end_activity timeline_context GetRecvWeights
    GetSendWeights IsRegularGraph IsTopologyEquivalent ExponentialTwoGraph ExponentialGraph
    FullyConnectedGraph MeshGrid2DGraph RingGraph StarGraph SymmetricExponentialGraph
    GetDynamicOnePeerSendRecvRanks GetExp2DynamicSendRecvMachineRanks GetInnerOuterRingDynamicSendRecvRanks
    GetInnerOuterExpo2DynamicSendRecvRanks InferSourceFromDestinationRanks InferDestinationFromSourceRanks
    topology_util CommunicationType DistributedGradientAllreduceOptimizer DistributedAdaptWithCombineOptimizer
    DistributedAdaptThenCombineOptimizer DistributedWinPutOptimizer DistributedAllreduceOptimizer
    DistributedNeighborAllreduceOptimizer DistributedHierarchicalNeighborAllreduceOptimizer
    DistributedPushSumOptimizer DistributedPullGetOptimizer
    """,
)
"""The public names of bluefog.torch 0.3, with those of its operations and optimizers that it does not re-export."""


def rows(section: str) -> dict[str, str]:
    """Each name of the first column of a section's table, with the text of its second column."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    table = re.findall(r"^\| (`.*?) \| ?(.*) \|$", text, re.MULTILINE)
    results = [(name, output) for names, output in table for name in re.findall(r"`(\w+)`", names)]
    assert len(results) == len(dict(results)), "a name is there twice"
    return dict(results)


SAME, ALIASES, ONLY = rows("Unchanged names"), rows("Aliases"), rows("Only in `shoal.bluefog`")
DIFFERENT = rows("Different in `shoal.bluefog`")


def test_every_name_of_bluefog_is_in_the_module() -> None:
    assert sorted(bf.__all__) == sorted(BLUEFOGS)  # type: ignore[attr-defined]
    assert [name for name in bf.__all__ if not hasattr(bf, name)] == []  # type: ignore[attr-defined]


def test_the_page_maps_every_name_of_bluefog() -> None:
    assert sorted([*SAME, *DIFFERENT, *ALIASES, *ONLY]) == sorted(bf.__all__)  # type: ignore[attr-defined]
    assert [name for name in rows("Unsupported names") if hasattr(bf, name)] == []


@pytest.mark.parametrize("name", SAME)
def test_a_name_listed_as_equal_is_shoals_own(name: str) -> None:
    assert getattr(bf, name) is getattr(shoal, name)
    assert name in shoal.__all__


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_name_listed_as_different_is_another_function_than_shoals(name: str) -> None:
    home = shoal.nonblocking if name.endswith("_nonblocking") else shoal
    assert getattr(bf, name) is not getattr(home, name.removesuffix("_nonblocking"))
    assert name.removesuffix("_nonblocking") in home.__all__


def test_a_second_init_sets_the_exponential_graph_unless_another_is_passed() -> None:
    def run() -> list[bool]:
        results = []
        for again in (bf.init, lambda: bf.init(bf.StarGraph), shoal.init):
            shoal.set_topology(shoal.topology.RingGraph(4), is_weighted=True)
            again()
            graphs = [bf.ExponentialTwoGraph(4), bf.StarGraph(4), bf.RingGraph(4)]
            results.append([bf.IsTopologyEquivalent(bf.load_topology(), graph) for graph in graphs])
            results.append(bf.is_topo_weighted())
        return results

    here = [[True, False, False], False, [False, True, False], False, [False, False, True], True]
    assert shoal.Fleet(4).run(run) == [here] * 4


@pytest.mark.parametrize(("old", "new"), [("neighbor_weights", "src_weights"), ("send_neighbors", "dst_weights")])
def test_an_argument_of_an_older_bluefog_is_an_error_that_names_the_present_one(old: str, new: str) -> None:
    for operation in (bf.neighbor_allreduce, bf.neighbor_allreduce_nonblocking):
        with pytest.raises(TypeError, match=rf"neighbor_allreduce\w*: {old}= was renamed in BlueFog 0.3; give {new}="):
            operation(torch.ones(1), self_weight=0.5, **{old: {0: 0.5}})


@pytest.mark.parametrize("name", ALIASES)
def test_an_alias_is_the_object_listed_on_the_page(name: str) -> None:
    """It is an object of one of Shoal's packages, or makes one of a class, and is not among Shoal's public names."""
    (native,) = re.findall(r"`shoal\.([\w.]+)`", ALIASES[name])
    own = reduce(getattr, native.split("."), shoal)
    homes = (shoal.topology, shoal.optim, shoal.windows.by_name, handles, shoal)
    makes = inspect.isclass(own) and inspect.signature(getattr(bf, name)).return_annotation is own
    assert makes or own is getattr(bf, name) or any(getattr(home, name, None) is getattr(bf, name) for home in homes)
    assert name not in shoal.__all__
    public = Path(__file__).with_name("public_names.txt").read_text().split()
    assert any(f"shoal.{native}.".startswith(f"{listed}.") for listed in public)


OVER_NEIGHBOURS = ("AdaptThenCombine", "AdaptWithCombine", "NeighborAllreduce")


@pytest.mark.parametrize("name", OVER_NEIGHBOURS)
def test_an_optimizer_averages_on_the_static_topology_and_shoals_with_one_peer(name: str) -> None:
    def run() -> list[float]:
        results = []
        for make in (getattr(bf, f"Distributed{name}Optimizer"), shoal.DecentralizedOptimizer):
            model = torch.nn.Linear(1, 1, bias=False)
            model.weight.data.fill_(float(shoal.rank()))
            optimizer = make(torch.optim.SGD(model.parameters(), lr=0.0), model)
            model(torch.ones(1)).backward()
            optimizer.step()
            results.append(model.weight.item())
            optimizer.close()
        return results

    # On the exponential graph agent 0 averages with 3 and 2, and in the first round of one peer at a time with 3.
    assert shoal.Fleet(4).run(run)[0] == pytest.approx([(0 + 2 + 3) / 3, (0 + 3) / 2])


PARAMETERS = {
    "init": "topology_fn is_weighted",
    "set_topology": "topology is_weighted",
    "set_machine_topology": "topology is_weighted",
    "set_skip_negotiate_stage": "value",
    "allreduce allreduce_nonblocking allreduce_ allreduce_nonblocking_": "tensor average is_hierarchical_local name",
    "broadcast broadcast_nonblocking broadcast_ broadcast_nonblocking_": "tensor root_rank name",
    "allgather allgather_nonblocking": "tensor name",
    "neighbor_allgather neighbor_allgather_nonblocking": "tensor * src_ranks dst_ranks enable_topo_check name",
    "neighbor_allreduce neighbor_allreduce_nonblocking": (
        "tensor * self_weight src_weights dst_weights enable_topo_check name"
    ),
    "hierarchical_neighbor_allreduce hierarchical_neighbor_allreduce_nonblocking": (
        "tensor * self_weight src_machine_weights dst_machine_weights enable_topo_check name"
    ),
    "pair_gossip pair_gossip_nonblocking": "tensor target_rank self_weight pair_weight name",
    "poll wait synchronize win_poll win_wait": "handle",
    "win_create": "tensor name zero_init",
    "win_free get_win_version win_associated_p": "name",
    "win_put win_put_nonblocking neighbor_win_put win_accumulate win_accumulate_nonblocking neighbor_win_accumulate": (
        "tensor name self_weight dst_weights require_mutex"
    ),
    "win_update": "name self_weight neighbor_weights reset clone require_mutex",
    "win_update_then_collect": "name require_mutex",
    "win_mutex": "name for_self ranks",
    "broadcast_parameters allreduce_parameters": "params",
    "broadcast_optimizer_state": "optimizer root_rank",
    "timeline_start_activity timeline_context": "tensor_name activity_name",
    "timeline_end_activity": "tensor_name",
    "InferSourceFromDestinationRanks": "dst_ranks construct_adjacency_matrix",
    "InferDestinationFromSourceRanks": "src_ranks construct_adjacency_matrix",
    "GetRecvWeights GetSendWeights": "topo rank",
    "ExponentialGraph SymmetricExponentialGraph": "size base",
    "ExponentialTwoGraph FullyConnectedGraph": "size",
    "MeshGrid2DGraph": "size shape",
    "StarGraph": "size center_rank",
    "RingGraph": "size connect_style",
    "GetDynamicOnePeerSendRecvRanks": "topo self_rank",
    "GetExp2DynamicSendRecvMachineRanks": "world_size local_size self_rank local_rank",
    "GetInnerOuterRingDynamicSendRecvRanks GetInnerOuterExpo2DynamicSendRecvRanks": "world_size local_size self_rank",
    "DistributedAdaptThenCombineOptimizer DistributedAdaptWithCombineOptimizer": (
        "optimizer model communication_type num_steps_per_communication"
    ),
    "DistributedGradientAllreduceOptimizer DistributedNeighborAllreduceOptimizer DistributedAllreduceOptimizer": (
        "optimizer model num_steps_per_communication"
    ),
    "DistributedWinPutOptimizer": "optimizer model num_steps_per_communication window_prefix",
}
"""BlueFog's, in its order; after the star they are only by name."""


@pytest.mark.parametrize("names", PARAMETERS)
def test_the_parameters_are_bluefogs_in_its_order(names: str) -> None:
    by_place, _, by_name = PARAMETERS[names].partition(" * ")
    for name in names.split():
        ours = inspect.signature(getattr(bf, name)).parameters
        assert list(ours)[: len(by_place.split())] == by_place.split(), name
        assert set(by_name.split()) <= set(ours), name


def test_names_only_for_bluefog_scripts_are_not_in_shoal() -> None:
    assert [name for name in ONLY if name in dir(shoal)] == []


def test_shoals_own_names_are_all_of_its_public_ones_but_the_aliases() -> None:
    assert len(shoal.__all__) == len(set(shoal.__all__))
    public = {name for name, value in vars(shoal).items() if name[0] != "_" and not isinstance(value, ModuleType)}
    modules = {name for name in shoal.__all__ if isinstance(getattr(shoal, name), ModuleType)}
    assert set(shoal.__all__) - modules == public - set(ALIASES)
    assert modules >= {"algorithms", "data", "optim", "topology", "windows"}


def test_the_links_of_the_page_have_targets() -> None:
    targets = re.findall(r"\]\(([^)#]+)", PAGE)
    assert len(targets) >= 5
    assert [target for target in targets if not (DOCS / target).exists()] == []


def test_queries_about_the_library_work_without_an_agent() -> None:
    assert (bf.mpi_threads_supported(), bf.unified_mpi_window_model_supported(), bf.nccl_built()) == (True, True, False)


def test_queries_about_an_agent_need_one() -> None:
    for call in (bf.suspend, bf.resume, bf.get_skip_negotiate_stage, lambda: bf.set_skip_negotiate_stage(True)):
        with pytest.raises(shoal.NotInitialized):
            call()


def test_each_agent_keeps_its_skip_negotiation_setting() -> None:
    def run() -> list[bool]:
        results = [bf.get_skip_negotiate_stage()]
        bf.set_skip_negotiate_stage(bf.rank() == 1)
        bf.set_skip_negotiate_stage(bf.rank() == 1)
        bf.barrier()
        results.append(bf.get_skip_negotiate_stage())
        bf.set_skip_negotiate_stage(False)
        return [*results, bf.get_skip_negotiate_stage()]

    assert shoal.Fleet(2).run(run) == [[False, False, False], [False, True, False]]


def test_operations_work_between_suspend_and_resume() -> None:
    def run() -> float:
        bf.suspend()
        result = bf.allreduce(torch.tensor(float(bf.rank()))).item()
        bf.resume()
        return result

    assert shoal.Fleet(2).run(run) == [0.5, 0.5]


def idle_seconds() -> float:
    """Processor time of this agent's process, in all of its threads, while it does nothing for a second."""
    shoal.barrier()
    time.sleep(0.2)
    before = time.process_time()
    time.sleep(1.0)
    return time.process_time() - before


def test_an_idle_agent_uses_no_processor_time() -> None:
    """So there is nothing to suspend."""
    world = World(2)
    try:
        assert max(world.results(idle_seconds)) < 0.02
    finally:
        world.close()


SCRIPT = """
import torch
import bluefog.torch as bf
from bluefog.common import topology_util

bf.init()
assert bf.mpi_threads_supported() and not bf.nccl_built()
bf.set_topology(topology_util.ExponentialTwoGraph(bf.size()), is_weighted=True)
rank, size = bf.rank(), bf.size()

# Average consensus, on a dynamic graph of one peer.
x = torch.tensor([float(rank)])
peers = topology_util.GetDynamicOnePeerSendRecvRanks(bf.load_topology(), rank)
for _ in range(2):
    send, receive = next(peers)
    share = 1 / (len(receive) + 1)
    x = bf.neighbor_allreduce(
        x, name="x", self_weight=share, src_weights={one: share for one in receive}, dst_weights=send,
        enable_topo_check=True,
    )
print(x.item())

# Push-sum over windows.
bf.set_skip_negotiate_stage(True)
assert bf.get_skip_negotiate_stage()
bf.turn_on_win_ops_with_associated_p()
y = torch.tensor([float(rank)], dtype=torch.float64)
assert bf.win_create(y, name="y", zero_init=True)
share = 1.0 / (len(bf.out_neighbor_ranks()) + 1)
for _ in range(30):
    handle = bf.win_accumulate_nonblocking(
        y, name="y", self_weight=share, dst_weights={one: share for one in bf.out_neighbor_ranks()}, require_mutex=True
    )
    assert bf.win_wait(handle)
    bf.barrier()
    bf.win_update_then_collect(name="y")
    bf.barrier()
print(round(y.item() / bf.win_associated_p(name="y"), 6))
bf.barrier()
bf.win_free(name="y")
bf.turn_off_win_ops_with_associated_p()

# Training.
torch.manual_seed(rank)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
bf.broadcast_parameters(model.state_dict(), root_rank=0)
bf.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = bf.DistributedWinPutOptimizer(optimizer, model=model)
optimizer.force_barrier = True
for step in range(30):
    optimizer.zero_grad()
    with bf.timeline_context("step", "compute"):
        torch.nn.functional.mse_loss(model(torch.eye(2)), torch.tensor([[1.0], [-1.0]])).backward()
    optimizer.step()
bf.barrier()
optimizer.unregister_window()
assert bf.get_current_created_window_names() == []
bf.suspend()
bf.resume()
optimizer.close()
optimizer = bf.DistributedNeighborAllreduceOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
optimizer.communication_type = bf.CommunicationType.allreduce
loss = torch.nn.functional.mse_loss(model(torch.eye(2)), torch.tensor([[1.0], [-1.0]]))
loss.backward()
optimizer.step()
handle = bf.allreduce_nonblocking(loss.detach(), average=True, name="loss")
while not bf.poll(handle):
    pass
print(bf.synchronize(handle).item() < 1)
bf.shutdown()
"""


def ran(script: str, folder: Path) -> list[str]:
    path = folder / "consensus.py"
    path.write_text(script)
    return in_processes(4, path)


def test_a_script_runs_after_its_import_has_changed(tmp_path: Path) -> None:
    changed = SCRIPT
    removed, added = (re.findall(rf"^\{sign} (.*)$", PAGE, re.MULTILINE)[:2] for sign in "-+")
    for old, new in zip(removed, added, strict=True):
        assert old in changed
        changed = changed.replace(old, new)
    assert "bluefog.torch" not in changed
    assert ran(changed, tmp_path) == ["1.5\n1.5\nTrue\n"] * 4


def test_a_script_runs_with_a_prefix_before_the_names_of_its_modules(tmp_path: Path) -> None:
    changed = re.sub(r"(?m)^(import|from) (bluefog\.)", r"\1 shoal.compat.\2", SCRIPT)
    imports = [line for line in changed.splitlines() if "bluefog" in line]
    assert len(imports) == 2
    for line in imports:
        assert line in re.findall(r"`(.*?)`", PAGE)
    assert ran(changed, tmp_path) == ["1.5\n1.5\nTrue\n"] * 4


def test_the_package_contains_the_same_names() -> None:
    package = importlib.import_module("shoal.compat.bluefog.torch")
    assert {name: getattr(package, name) for name in package.__all__} == {
        name: getattr(bf, name)
        for name in bf.__all__  # type: ignore[attr-defined]
    }
    graphs = importlib.import_module("shoal.compat.bluefog.common").topology_util
    public = [name for name in vars(shoal.topology_util) if name[0] != "_"]
    assert len(public) > 20
    assert [name for name in public if getattr(graphs, name) is not getattr(shoal.topology_util, name)] == []


def test_the_calls_on_the_page_give_the_documented_averages() -> None:
    """On a ring of four, with agent 1 as the reader for the pull."""

    def run() -> list[float]:
        rank = shoal.rank()
        pull, push = {3: 0.5} if rank != 3 else {0: 0.5}, {1: 0.5} if rank != 1 else {2: 0.5}
        code = CALLS.replace("dst_weights={1: 0.5}", "dst_weights=push").replace("0.5, {3: 0.5})", "0.5, pull)")
        names: dict[str, Any] = {"x": torch.tensor([float(rank)]), "pull": pull, "push": push, "seen": []}
        code = code.replace("{3: 0.5}, {1: 1.0}", "{(bf.rank() - 1) % 4: 0.5}, {(bf.rank() + 1) % 4: 1.0}")
        exec(
            re.sub(r"^y = .*$", r"\g<0>\nseen.append(y.item())", code.replace("   #", "  #"), flags=re.MULTILINE), names
        )
        return names["seen"]

    results = shoal.Fleet(4).run(run)
    ring = [sum([(rank - 1) % 4, rank, (rank + 1) % 4]) / 3 for rank in range(4)]
    pushed = [0.5 * 0, 0.5 * 1 + 0.5 * (0 + 2 + 3), 0.5 * 2 + 0.5 * 1, 0.5 * 3]
    for rank, (static, pull, push, push_pull, handle) in enumerate(results):
        assert torch.tensor([static, handle]).allclose(torch.tensor([ring[rank]] * 2))
        assert pull == 0.5 * rank + 0.5 * (3 if rank != 3 else 0)
        assert push == pushed[rank]
        assert push_pull == 0.5 * rank + 0.5 * ((rank - 1) % 4)
