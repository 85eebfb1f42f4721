"""Recommendations: a recommended topology can be trained with, and changes with each argument."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

import shoal
from shoal.algorithms import GradientDescent, LocalSteps, check
from shoal.compression import Sign, TopK
from shoal.netmodel import Link, Network, Recommendation, Training, recommend
from shoal.netmodel.recommendation import AS_FAST, Candidate, _ranked
from shoal.sim import StackedFleet
from shoal.topology import RingStarDelegates, find

NIC, INSIDE = Link(1e-3, 1.25e8), Link(0.0, 4e9)
NBYTES = 1e7
PLAIN = Training()
FLEETS = [(3, 1), (6, 1), (8, 1), (8, 4), (8, 8), pytest.param(24, 4, marks=pytest.mark.soak)]
LR, STEPS, COLUMNS = 0.02, 750, 20


@cache
def _recommended(size: int, local: int, nic: Link, training: Training) -> Recommendation:
    return recommend(Network(size, nic, local, INSIDE), NBYTES, training=training)


def recommended(size: int, local: int = 1, nic: Link = NIC, training: Training = PLAIN) -> Recommendation:
    return _recommended(size, local, nic, training)


def to_train(size: int, local: int, difference: float) -> Candidate:
    """The recommendation for data with this difference, from the cached candidates for shuffled data."""
    one, training = recommended(size, local), Training(difference)
    candidates = (
        replace(each, training_seconds=each.seconds_per_step * training.times_the_steps(each.steps_apart))
        for each in one.candidates
    )
    return replace(one, training=training, candidates=tuple(candidates)).to_train[0]


def named(recommendation: Recommendation, name: str) -> Candidate:
    (one,) = (one for one in recommendation.candidates if one.name == name)
    return one


def points(size: int) -> torch.Tensor:
    """Where each agent alone would go."""
    return torch.randn(size, COLUMNS, dtype=torch.float64, generator=torch.Generator().manual_seed(size))


@cache
def ends_from_the_optimum(size: int, local: int, name: str) -> float:
    """The worst agent's distance, as a share of how far agents' own optima are from it, root mean square."""
    own, one = points(size), named(recommended(size, local), name)
    algorithm = LocalSteps(GradientDescent(LR), 1)
    schedule = find("all-reduce").schedule(size) if one.schedule is None else one.schedule
    run = StackedFleet(schedule).run(algorithm, torch.zeros(COLUMNS, dtype=torch.float64), lambda x: x - own, STEPS)
    distance = (run.x - own.mean(0)).square().sum(1).max().sqrt()
    return float(distance / (own - own.mean(0)).square().sum(1).mean().sqrt())


@pytest.mark.parametrize(("size", "local"), FLEETS)
def test_topologies_for_training_are_those_accepted_by_the_optimizers_algorithms(size: int, local: int) -> None:
    able = recommended(size, local).to_train
    assert len(able) > 5
    for one in able:
        if one.schedule is not None:
            for algorithm in (GradientDescent(1.0), GradientDescent(1.0, atc=False)):
                check("D-PSGD", algorithm.needs, one.schedule)


@pytest.mark.parametrize("difference", [0.0, 0.01, 0.1])
@pytest.mark.parametrize(("size", "local"), FLEETS)
def test_recommended_training_ends_within_the_predicted_distance(size: int, local: int, difference: float) -> None:
    """With maximally different data. The mean of all ends at the optimum."""
    best = to_train(size, local, difference)
    together = ends_from_the_optimum(size, local, recommended(size, local).candidates[0].name)
    assert together < 1e-6
    # Told is the root mean square over agents; the worst one is a few times as far.
    assert ends_from_the_optimum(size, local, best.name) < together + LR * (0.02 + 3 * best.steps_apart)
    assert best.steps_apart < 3.5


def test_topologies_on_which_d_psgd_does_not_converge_are_not_for_training() -> None:
    """In single rounds of ring-star by delegates, W is row-stochastic, so the fixed point differs."""
    delegates = named(recommended(12, 4), "ring-star-delegates")
    assert "GradientDescent needs W to be doubly stochastic" in delegates.refused
    assert delegates not in recommended(12, 4).to_train
    assert not any("To train, take ring-star-delegates" in text for text in recommended(12, 4).advice())

    class Unchecked(GradientDescent):
        needs = ()  # type: ignore[assignment]

    own = points(12)
    start = torch.zeros(COLUMNS, dtype=torch.float64)
    run = StackedFleet(RingStarDelegates(12, 4)).run(Unchecked(LR), start, lambda x: x - own, STEPS)
    share = (run.x.mean(0) - own.mean(0)).norm() / (own - own.mean(0)).square().sum(1).mean().sqrt()
    assert share > 0.2


def test_agents_train_with_the_recommendation() -> None:
    """Threads, a user's optimizer, and machines with four agents and with two."""
    size = 8
    best, *_ = recommended(size, training=Training(0.01)).to_train
    own, rate = points(size).float(), 0.05
    topology = best.topology
    assert topology is not None and best.trained_by == "neighbor_allreduce"

    def agent() -> float:
        model = torch.nn.Linear(COLUMNS, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(model.parameters(), rate), model, topology=topology)
        for _ in range(120):
            optimizer.zero_grad()
            (0.5 * (model.weight[0] - own[shoal.rank()]).square().sum()).backward()
            optimizer.step()
        return float((model.weight[0].detach() - own.mean(0)).norm())

    spread = float((own - own.mean(0)).square().sum(1).mean().sqrt())
    furthest = max(shoal.Fleet(size, timeout=50.0).run(agent))
    assert furthest < spread * (rate * (0.02 + 3 * best.steps_apart) + 0.95**120)


def test_training_has_no_second_buffer() -> None:
    """CECA of six agents: three rounds for averaging, sixteen for W alone; and the pairs need none for 6 2^k."""
    six = recommended(6)
    assert (named(six, "ceca with its second buffer").rounds, named(six, "ceca").rounds) == (3, 16)
    assert "second buffer" in named(six, "ceca with its second buffer").refused
    assert (named(six, "ceca-pairs").rounds, named(six, "ceca-pairs").refused) == (3, "")
    assert "ceca with its second buffer" not in {one.name for one in recommended(8).candidates}


def test_fewer_rounds_decide_between_equally_fast_topologies() -> None:
    def one(name: str, rounds: int, seconds: float) -> Candidate:
        return Candidate(name, "", rounds, False, 1.0, 0.0, 1.0, seconds)

    listed = [one("17", 17, 40.0), one("6", 6, 40.1), one("1", 1, 40.0 * (1 + 2 * AS_FAST)), one("2", 2, 90.0)]
    ranked = _ranked(listed, lambda one: one.seconds, lambda one: (one.rounds or 0, 0))
    assert [one.name for one in ranked] == ["6", "17", "1", "2"]


@pytest.mark.parametrize(("size", "local"), [(6, 1), (24, 4)])
def test_no_equally_fast_topology_has_fewer_rounds_than_the_recommended_one(size: int, local: int) -> None:
    able = recommended(size, local).to_train
    fastest = min(one.training_seconds for one in able)
    as_fast = [one for one in able if one.training_seconds <= fastest * (1 + 0.99 * AS_FAST)]
    assert able[0].rounds == min(one.rounds or 0 for one in as_fast)
    assert any("Times within 5% count as equal" in text for text in recommended(size, local).advice())


def test_the_slower_direction_of_a_nic_limits_a_round() -> None:
    """At a tenth of the outgoing rate, one message a round takes ten times as long. A server sends n - 1 replies."""
    usual = recommended(6)
    slow_out = recommended(6, nic=Link(1e-3, 1.25e7, download=1.25e8))
    slow_in = recommended(6, nic=Link(1e-3, 1.25e8, download=1.25e7))
    for name, ratio in (("ceca-pairs", 0.801 / 0.081), ("ring", 1.601 / 0.161)):
        for slow in (slow_out, slow_in):
            measured = named(slow, name).seconds_per_round / named(usual, name).seconds_per_round
            assert measured == pytest.approx(ratio, rel=1e-3)
    # Five send a model each at 12.5 MB/s, which the server has room for; and it sends five at 12.5 MB/s in all.
    server = named(slow_out, "all-reduce (parameter server)")
    assert server.seconds_per_round == pytest.approx(0.8 + 5 * 0.8 + 0.002, rel=1e-3)
    delegates = [named(one, "ring-star-delegates").seconds_per_round for one in (usual, slow_out)]
    assert delegates[0] < delegates[1]


def test_local_steps_share_a_round_and_increase_disagreement() -> None:
    each, fourth = (named(recommended(8, training=Training(0.1, every)), "one-peer-exponential") for every in (1, 4))
    assert fourth.seconds_per_step == pytest.approx(each.seconds_per_step / 4)
    assert fourth.steps_apart > 3 * each.steps_apart
    computing = named(recommended(8, training=Training(0.1, 4, compute=1.0)), "one-peer-exponential")
    assert computing.seconds_per_step == pytest.approx(1.0 + fourth.seconds_per_step)


def test_compression_shortens_messages_and_has_its_algorithms_requirements() -> None:
    half = recommended(8, training=Training(compression=0.5))
    assert named(half, "ring").seconds_per_step == pytest.approx(0.001 + 0.08, rel=0.01)
    assert named(half, "ring").seconds == named(recommended(8), "ring").seconds  # averaging itself is not compressed
    signs = recommended(8, training=Training(compression=Sign()))
    assert named(signs, "ring").seconds_per_step == pytest.approx(0.001 + 0.16 / 32, rel=0.02)
    assert named(signs, "ring").steps_apart > 1.3 * named(recommended(8), "ring").steps_apart
    assert "ChocoSGD needs" in named(signs, "one-peer-exponential").refused
    assert all(one.schedule is None or one.schedule.period == 1 for one in signs.to_train)
    assert any("still sends whole tensors" in text for text in signs.advice())


def test_recommended_compressed_training_converges() -> None:
    from shoal.algorithms import ChocoSGD

    training = Training(compression=TopK(0.25))
    able = [one for one in recommended(8, training=training).to_train if one.schedule is not None]
    own = points(8)
    start = torch.zeros(COLUMNS, dtype=torch.float64)
    assert able[0].schedule is not None
    algorithm = ChocoSGD(LR, training.kept, TopK(0.25))
    run = StackedFleet(able[0].schedule).run(algorithm, start, lambda x: x - own, STEPS)
    distance = (run.x - own.mean(0)).square().sum(1).mean().sqrt() / (own - own.mean(0)).square().sum(1).mean().sqrt()
    assert distance < 2 * LR * able[0].steps_apart


def test_more_heterogeneous_data_give_closer_agents() -> None:
    """Equal data: the shortest steps. Very different data: fast consensus, though each step takes longer."""
    apart = [recommended(8, training=Training(difference)).to_train[0] for difference in (0.0, 0.01, 1.0)]
    assert apart[0].steps_apart >= apart[1].steps_apart > apart[2].steps_apart == 0.0
    assert apart[0].seconds_per_step <= apart[1].seconds_per_step < apart[2].seconds_per_step


def test_rounds_after_an_exact_average_count_in_training() -> None:
    """Gossip with a global average: exact after three rounds of one message, and every eighth has seven."""
    one = named(recommended(8), "gossip-pga")
    assert one.rounds == 3
    assert one.seconds_per_round == pytest.approx(0.081, rel=1e-3)
    assert one.seconds_per_step == pytest.approx((7 * 0.081 + 7 * 0.08 + 0.001) / 8, rel=1e-2)


def test_machines_are_trained_as_in_the_optimizer() -> None:
    one = named(recommended(12, 4), "one-peer-exponential of machines")
    assert one.trained_by == "hierarchical_neighbor_allreduce"
    assert one.topology is not None and one.topology.size == 3
    assert one.schedule is not None and one.schedule.size == 12


def test_advice_is_given_where_the_best_takes_no_time() -> None:
    """Only one link takes time, and some topologies do not use it."""
    found = recommend(Network(8, Link(), links={(0, 1): Link(latency=0.1)}), 1e6)
    assert found.candidates[0].seconds == 0
    assert found.advice()


def test_a_network_without_costs_is_refused_with_a_message() -> None:
    with pytest.raises(ValueError, match="no message takes any time on this network"):
        recommend(Network(8, NIC, 8), NBYTES)
