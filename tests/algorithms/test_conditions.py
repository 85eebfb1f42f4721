"""Unreliable networks: the draws, and the verbs of an exchange against a model that moves one message at a time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import shoal
from shoal import algorithms
from shoal.algorithms import GradientDescent, GradientTracking, Run, own
from shoal.algorithms.runs.unreliable_mix import UnreliableMix
from shoal.netmodel import Link, Network
from shoal.sim import Conditions, StackedFleet, StackedMix, per_agent
from shoal.topology.families.one_peer import OnePeerExponential
from shoal.topology.families.static import ring
from shoal.topology.mixing import with_uniform_weights
from shoal.topology.schedule import Schedule, as_schedule
from support.least_squares import DIMENSION, loss, optimum, problem

Floats = NDArray[np.float64]
SLOW = tuple(np.linspace(0.2, 1, 8).tolist())
ALL = [
    Conditions(),
    Conditions(loss=0.3),
    Conditions(loss=0.3, protocol="memory"),
    Conditions(loss=0.3, protocol="handshake", participation=0.7),
    Conditions(delay=2),
    Conditions(delay=(0, 4), loss=0.2, protocol="memory", seed=3),
    Conditions(delay=(1, 3), speeds=SLOW),
    Conditions(participation=0.6, speeds=SLOW, loss=0.1, protocol="memory"),
    Conditions(participation=SLOW, noise=0.1, loss=0.1),
]


def one_way() -> nx.DiGraph:
    """Rows sum to one, columns do not."""
    return with_uniform_weights(nx.DiGraph([*((i, (i + 1) % 8) for i in range(8)), (0, 4), (2, 5), (6, 1)]))


TOPOLOGIES = [ring(8), OnePeerExponential(8), as_schedule(one_way())]


def start() -> torch.Tensor:
    return torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def unreliable(topology: Schedule, conditions: Conditions) -> UnreliableMix:
    return UnreliableMix(StackedMix(topology), conditions)


class Model:
    """One exchange in every tick, message by message.

    Attributes:
        x: The agents' values, [n, d].
        coming: Messages on their way: tick of arrival, tick of sending, receiver, sender, value.
    """

    def __init__(self, topology: Schedule, conditions: Conditions, x: torch.Tensor) -> None:
        self.topology, self.conditions, self.x = topology, conditions, x.numpy().copy()
        self.n = len(x)
        self.coming: list[tuple[int, int, int, int, Floats]] = []
        self.newest: dict[tuple[int, int], list[Any]] = {}
        self.inbox = np.zeros_like(self.x)
        self.lost: dict[tuple[int, int], Floats] = {}

    def _fate(self, tick: int, to: int, of: int) -> tuple[bool, int, Floats]:
        """Whether a message is lost, its delay, and its value with its noise."""
        key = np.array([to * self.n + of])
        link = np.array([min(to, of) * self.n + max(to, of)]) if self.conditions.protocol == "handshake" else key
        noisy = self.conditions.noisy(tick, 0, key, torch.from_numpy(self.x[[of]])).numpy()[0]
        return (
            bool(self.conditions.lost(tick, 0, link)[0]),
            int(self.conditions.ticks(tick, 0, key)[0]),
            noisy,
        )

    def _links(self, tick: int) -> list[tuple[int, int]]:
        edges = self.topology.edges(tick)
        return [(to, of) for to, of in zip(edges.destination.tolist(), edges.source.tolist(), strict=True) if to != of]

    def mix(self, tick: int) -> None:
        W, active = self.topology.matrix(tick), self.conditions.active(tick, self.n)
        both = self.conditions.protocol == "handshake"
        for to, of in self._links(tick):
            departed, delay, value = self._fate(tick, to, of)
            if active[of] and (active[to] or not both) and not departed:
                self.coming.append((tick + delay, tick, to, of, value.copy()))
        for message in sorted((one for one in self.coming if one[0] <= tick), key=lambda one: one[0]):
            _, sent, to, of, value = message
            if self.newest.get((to, of), [-1])[0] < sent:
                self.newest[to, of] = [sent, value, False]
        self.coming = [one for one in self.coming if one[0] > tick]
        new = self.x.copy()
        for to in np.flatnonzero(active):
            new[to] = W[to, to] * self.x[to]
            for of in (of for end, of in self._links(tick) if end == to):
                result = self.newest.get((to, of))
                if result is not None and (not result[2] or self.conditions.protocol == "memory"):
                    result[2] = True
                    new[to] += W[to, of] * result[1]
                else:
                    new[to] += W[to, of] * self.x[to]
        self.x = new

    def push(self, tick: int, C: Floats) -> None:
        active = self.conditions.active(tick, self.n)
        protocol = self.conditions.protocol
        new = np.where(active[:, None], C.diagonal()[:, None] * self.x, self.x)
        for to, of in self._links(tick):
            if not active[of]:
                continue
            departed, delay, value = self._fate(tick, to, of)
            if protocol == "handshake" and (departed or not active[to]):
                new[of] += C[to, of] * self.x[of]
                continue
            share = C[to, of] * value
            if protocol == "memory":
                share = share + self.lost.pop((to, of), 0.0)
            if not departed:
                self.coming.append((tick + delay, tick, to, of, share))
            elif protocol == "memory":
                self.lost[to, of] = share
        for _, _, to, _, share in (one for one in self.coming if one[0] <= tick):
            self.inbox[to] += share
        self.coming = [one for one in self.coming if one[0] > tick]
        new[active] += self.inbox[active]
        self.inbox[active] = 0
        self.x = new


def column_stochastic(topology: Schedule, tick: int) -> Floats:
    W = topology.matrix(tick)
    if np.allclose(W.sum(0), 1):
        return W
    edges = topology.edges(tick)
    linked = np.zeros_like(W)
    linked[edges.destination, edges.source] = 1
    return linked / linked.sum(0)


@pytest.mark.parametrize("conditions", ALL, ids=repr)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=repr)
def test_an_average_treats_messages_as_the_model_does(topology: Schedule, conditions: Conditions) -> None:
    x, mix, model = start(), unreliable(topology, conditions), Model(topology, conditions, start())
    for tick in range(14):
        mix.begin(tick)
        x = mix(x)
        model.mix(tick)
        np.testing.assert_allclose(x.numpy(), model.x, rtol=0, atol=1e-13)


@pytest.mark.parametrize("conditions", ALL, ids=repr)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=repr)
def test_a_push_treats_shares_as_the_model_does(topology: Schedule, conditions: Conditions) -> None:
    x, mix, model = start(), unreliable(topology, conditions), Model(topology, conditions, start())
    for tick in range(14):
        mix.begin(tick)
        x = mix.push(x)
        model.push(tick, column_stochastic(topology, tick))
        np.testing.assert_allclose(x.numpy(), model.x, rtol=0, atol=1e-13)


@pytest.mark.parametrize("conditions", [one for one in ALL if not one.noise], ids=repr)
def test_the_total_of_push_is_conserved_unless_lost_shares_are_dropped(conditions: Conditions) -> None:
    x, mix = start(), unreliable(TOPOLOGIES[2], conditions)
    total = x.sum(0)
    for tick in range(30):
        mix.begin(tick)
        x = mix.push(x)
    drift = float((x.sum(0) + mix.in_transit() - total).abs().max())
    forgotten = conditions.protocol == "plain" and conditions.loss > 0
    assert drift > 0.1 if forgotten else drift < 1e-12


@pytest.mark.parametrize("conditions", [one for one in ALL if not one.noise], ids=repr)
def test_agents_in_consensus_do_not_move(conditions: Conditions) -> None:
    mix, x = unreliable(TOPOLOGIES[2], conditions), torch.ones(8, 2, dtype=torch.float64)
    for tick in range(20):
        mix.begin(tick)
        x = mix.pull(x)
    assert (x - 1).abs().max() < 1e-14


def mean_after(algorithm: algorithms.Algorithm, topology: Schedule, conditions: Conditions, steps: int) -> Run:
    return StackedFleet(topology).run(algorithm, start(), torch.zeros_like, steps, conditions=conditions)


@pytest.mark.parametrize("protocol", ["plain", "memory", "handshake"])
def test_loss_moves_the_mean_of_an_average_but_not_of_a_handshake(protocol: Any) -> None:
    run = mean_after(GradientDescent(0.0), ring(8), Conditions(loss=0.3, protocol=protocol), 400)
    drift = float((run.x.mean(0) - start().mean(0)).abs().max())
    assert run.records[-1]["consensus"] < 1e-8
    assert drift < 1e-13 if protocol == "handshake" else drift > 1e-3


@pytest.mark.parametrize("protocol", ["plain", "memory", "handshake"])
def test_push_sum_reaches_the_mean_despite_loss_if_no_share_is_dropped(protocol: Any) -> None:
    run = mean_after(algorithms.PushSum(), OnePeerExponential(8), Conditions(loss=0.3, protocol=protocol), 400)
    error = float((run.estimate - start().mean(0)).abs().max())
    assert run.records[-1]["consensus"] < 1e-9
    assert error > 1e-3 if protocol == "plain" else error < 1e-9


def test_push_sum_reaches_the_mean_with_delays_and_slow_agents() -> None:
    conditions = Conditions(delay=(1, 5), speeds=SLOW, participation=0.9)
    run = mean_after(algorithms.PushSum(), TOPOLOGIES[2], conditions, 1500)
    assert float((run.estimate - start().mean(0)).abs().max()) < 1e-9


def delayed_matrices(graph: nx.DiGraph, conditions: Conditions, ticks: int) -> Floats:
    """The product of the matrices of all ticks, for shares that wait as values of further nodes.

    Equations 19 and 20 of Ying et al. 2021, arXiv:2111.04287, as one linear recursion: node (1 + d) n + i has the
    shares that reach agent i in d ticks, and a last node for each edge has its lost shares.
    """
    n, edges, longest = len(graph), sorted((to, of) for of, to in graph.edges if to != of), conditions.delays[1]
    nodes = (longest + 2) * n + len(edges)
    coming = n + n * np.arange(longest + 1)
    product = np.eye(nodes)
    for tick in range(ticks):
        active = conditions.active(tick, n)
        send, deliver = np.eye(nodes), np.eye(nodes)
        for j in np.flatnonzero(active):
            send[j, j] = share = 1 / (1 + sum(of == j for _, of in edges))
            for edge, (to, of) in enumerate(edges):
                if of == j:
                    key, lost = np.array([to * n + of]), nodes - len(edges) + edge
                    send[lost, lost] = 0
                    departed, delay = conditions.lost(tick, 0, key)[0], conditions.ticks(tick, 0, key)[0]
                    send[lost if departed else coming[delay] + to, [j, lost]] = share, 1
        for i in range(n):
            deliver[:, coming + i] = 0
            deliver[i if active[i] else coming[0] + i, coming[0] + i] = 1
            deliver[coming[:-1] + i, coming[1:] + i] = 1
        np.testing.assert_allclose((deliver @ send).sum(0), 1, rtol=0, atol=1e-14)
        product = deliver @ send @ product
    return product


@pytest.mark.parametrize("ticks", [9, 900])
@pytest.mark.parametrize(
    "conditions",
    [
        Conditions(delay=(1, 5), participation=SLOW),
        Conditions(delay=(0, 3), speeds=SLOW),
        Conditions(delay=(1, 3), loss=0.3, protocol="memory", participation=0.7),
    ],
    ids=repr,
)
def test_asynchronous_push_sum_is_a_recursion_with_nodes_for_delays(conditions: Conditions, ticks: int) -> None:
    """On simulated agents and, for the short run, on real ones."""
    graph, values = one_way(), start()
    x = delayed_matrices(graph, conditions, ticks)[:8, :8] @ np.c_[values.numpy(), np.ones(8)]
    run = StackedFleet(graph).run(algorithms.PushSum(), values, torch.zeros_like, ticks, conditions=conditions)
    np.testing.assert_allclose(run.x.numpy(), x[:, :-1], rtol=0, atol=1e-12)
    np.testing.assert_allclose(run.state[0].numpy(), x[:, -1:], rtol=0, atol=1e-12)
    if ticks > 9:
        assert float((run.estimate - values.mean(0)).abs().max()) < 1e-9
        return

    def agent() -> torch.Tensor:
        mine, nothing = values[shoal.rank()], torch.zeros_like
        return algorithms.run(algorithms.PushSum(), mine, nothing, graph, ticks, conditions=conditions).estimate

    np.testing.assert_allclose(
        torch.stack(shoal.Fleet(8).run(agent)).numpy(), x[:, :-1] / x[:, -1:], rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("protocol", ["plain", pytest.param("memory", marks=pytest.mark.slow), "handshake"])
def test_tracking_under_loss_is_exact_if_the_sum_of_its_second_variable_is_conserved(protocol: Any) -> None:
    conditions, x = Conditions(loss=0.2, protocol=protocol), torch.zeros(DIMENSION, dtype=torch.float64)
    fleet, gradient = StackedFleet(ring(8)), per_agent(loss, *problem(8))
    averages = fleet.run(GradientTracking(0.05), x, gradient, 800, conditions=conditions, every=0).x
    pushes = fleet.run(algorithms.PushDIGing(0.05), x, gradient, 800, conditions=conditions, every=0).estimate
    # Under "plain" w shrinks to 0, so the steps of PushDIGing grow until it has NaN.
    error, of_pushes = (float((one - optimum(8)).norm(dim=1).max()) for one in (averages, pushes))
    assert error < 1e-6 if protocol == "handshake" else not error < 1e-3
    assert not of_pushes < 1e-3 if protocol == "plain" else of_pushes < 1e-6


def least_squares(conditions: Conditions, seed: int = 0) -> Run:
    fleet = StackedFleet(ring(8), seed=seed)
    return fleet.run(
        GradientTracking(0.02), torch.zeros(DIMENSION), per_agent(loss, *_data()), 60, conditions=conditions
    )


def _data() -> tuple[torch.Tensor, ...]:
    return tuple(one.float() for one in problem(8))


def test_a_seed_reproduces_a_run_and_another_seed_does_not() -> None:
    first = least_squares(ALL[7])
    assert torch.equal(first.x, least_squares(ALL[7]).x)
    assert first.records == least_squares(ALL[7]).records
    other = Conditions(participation=0.6, speeds=SLOW, loss=0.1, protocol="memory", seed=1)
    assert not torch.equal(first.x, least_squares(other).x)


def test_empty_conditions_are_the_plain_run() -> None:
    fleet, data = StackedFleet(ring(8)), _data()
    plain = fleet.run(GradientTracking(0.02), torch.zeros(DIMENSION), per_agent(loss, *data), 60)
    result = least_squares(Conditions())
    assert torch.allclose(result.x, plain.x, rtol=0, atol=1e-6)
    assert (result.sent, result.exchanges) == (plain.sent, plain.exchanges)


@pytest.mark.parametrize("conditions", ALL, ids=repr)
@pytest.mark.parametrize("push", [False, True], ids=["tracking", "push-sum"])
def test_real_agents_have_the_same_conditions(conditions: Conditions, push: bool) -> None:
    algorithm = algorithms.PushDIGing(0.02) if push else GradientTracking(0.02)
    graph = TOPOLOGIES[2] if push else ring(8)
    A, b = problem(8)
    x = torch.zeros(DIMENSION, dtype=torch.float64)
    expected = StackedFleet(graph).run(algorithm, x, per_agent(loss, A, b), 12, conditions=conditions)

    def agent() -> Run:
        gradient = own(loss, A[shoal.rank()], b[shoal.rank()])
        return algorithms.run(algorithm, x, gradient, graph, 12, conditions=conditions)

    runs = shoal.Fleet(8).run(agent)
    assert (torch.stack([run.x for run in runs]) - expected.x).abs().max() < 1e-12
    assert sum(run.sent for run in runs) == expected.sent
    assert runs[0].records[-1] == pytest.approx(expected.records[-1])


@pytest.mark.parametrize(
    "conditions", [Conditions(loss=0.3, protocol="memory"), Conditions(participation=0.6), Conditions(speeds=0.5)]
)
@pytest.mark.parametrize("algorithm", [algorithms.SGP(0.1), GradientDescent(0.1)])
def test_a_single_real_agent_has_the_same_conditions(algorithm: algorithms.Algorithm, conditions: Conditions) -> None:
    """It has the rows of all agents, as a fleet, but its x is a vector."""
    x = start()[0]

    def on_agent() -> list[float]:
        return algorithms.run(algorithm, x, lambda x: x - 1, ring(1), 20, conditions=conditions).estimate.tolist()

    expected = StackedFleet(ring(1)).run(algorithm, x, lambda x: x - 1, 20, conditions=conditions).estimate
    assert (torch.tensor(shoal.Fleet(1).run(on_agent), dtype=torch.float64) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("epochs", [False, True])
def test_batches_under_conditions_are_those_of_the_plain_run(epochs: bool) -> None:
    fleet, gradient = StackedFleet(ring(8)), per_agent(loss, *problem(8), batch=2, epochs=epochs)
    zeros = torch.zeros(DIMENSION, dtype=torch.float64)
    plain = fleet.run(GradientDescent(0.05), zeros, gradient, 10)
    under = fleet.run(GradientDescent(0.05), zeros, gradient, 10, conditions=Conditions())
    assert (under.x - plain.x).abs().max() < 1e-12


def test_an_inactive_agent_keeps_its_values_and_sends_nothing() -> None:
    speeds = (0.25, *[1.0] * 7)
    fleet, x = StackedFleet(ring(8)), start()
    one, four = (
        fleet.run(GradientTracking(0.1), x, lambda x: x - 1, steps, conditions=Conditions(speeds=speeds))
        for steps in (3, 4)
    )
    assert torch.equal(one.x[0], x[0])
    assert torch.equal(one.state[1][0], x[0] - 1)
    assert not torch.equal(four.x[0], x[0])
    assert one.sent == 3 * 2 * 7 * 2 * x[0].nbytes


def test_agents_are_active_with_their_speeds_and_participation_rates() -> None:
    speeds = np.array([1.0, 0.5, 1 / 3, 0.29, 0.1])
    steps = sum(Conditions(speeds=speeds).active(tick, 5).astype(int) for tick in range(1000))
    assert np.abs(np.asarray(steps) - 1000 * speeds).max() < 1
    assert steps[3] == 290
    shares = [Conditions(participation=[0.2, 0.9]).active(tick, 2) for tick in range(4000)]
    assert np.abs(np.mean(shares, 0) - (0.2, 0.9)).max() < 0.03


def test_draws_have_the_requested_distribution() -> None:
    conditions, messages = Conditions(loss=0.2, delay=(2, 5), noise=0.5), np.arange(40_000)
    assert abs(conditions.lost(3, 1, messages).mean() - 0.2) < 0.01
    counts = np.bincount(conditions.ticks(3, 1, messages), minlength=7)
    assert (counts[[0, 1, 6]] == 0).all()
    assert np.abs(counts[2:6] / len(messages) - 0.25).max() < 0.01
    noise = conditions.noisy(3, 1, messages, torch.zeros(len(messages), 5, dtype=torch.float64))
    assert abs(float(noise.mean())) < 0.01
    assert abs(float(noise.std()) - 0.5) < 0.01
    assert abs(float((noise.abs() > 1).double().mean()) - 0.0455) < 0.005  # two deviations of a Gaussian
    for other in (conditions.lost(4, 1, messages), conditions.lost(3, 2, messages)):
        together = (other & conditions.lost(3, 1, messages)).mean()
        assert abs(together - 0.04) < 0.01


def test_draws_are_independent_of_the_algorithms() -> None:
    mix, conditions = StackedMix(ring(1000)), Conditions(participation=0.5)
    mix.begin(7)
    drawn = mix.uniform(torch.empty(1000, 1, dtype=torch.float64)).view(-1).numpy() < 0.5
    assert abs((drawn == conditions.active(7, 1000)).mean() - 0.5) < 0.1


def test_bytes_of_lost_messages_count_and_inactive_agents_send_none() -> None:
    nothing = torch.zeros_like
    fleet, x = StackedFleet(ring(8)), start()
    lossy = fleet.run(GradientDescent(0.0), x, nothing, 10, conditions=Conditions(loss=0.5))
    assert lossy.sent == 10 * 8 * 2 * x[0].nbytes
    shaken = fleet.run(
        GradientDescent(0.0), x, nothing, 10, conditions=Conditions(participation=0.5, protocol="handshake")
    )
    active = [Conditions(participation=0.5).active(tick, 8) for tick in range(10)]
    pairs = sum(int((one & np.roll(one, 1)).sum()) for one in active)
    assert shaken.sent == 2 * pairs * x[0].nbytes


def test_the_examples_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "unreliable-networks.md").read_text()
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(code, "docs/unreliable-networks.md", "exec", dont_inherit=True), names)
    first, pushed, gossip, second, third = capsys.readouterr().out.splitlines()
    assert first == "tensor(True)"
    assert pushed == "tensor(True) tensor(True)"
    reached, time = gossip.split()
    assert reached == "tensor(True)"
    assert 270 < int(time) < 330
    assert second == "tensor([1.5000, 1.5000, 1.5000, 1.5000])"
    assert third == "True"


def test_ten_thousand_agents_reach_the_mean() -> None:
    conditions = Conditions(loss=0.1, delay=(0, 2), participation=0.8, protocol="memory")
    x = torch.randn(10_000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    run = StackedFleet(OnePeerExponential(10_000)).run(
        algorithms.PushSum(), x, torch.zeros_like, 300, conditions=conditions, every=0
    )
    assert float((run.estimate - x.mean(0)).abs().max()) < 1e-4


@pytest.mark.parametrize(
    "algorithm",
    [algorithms.DecentralizedADMM(0.1, 1.0), algorithms.ParallelGradientDescent(0.1)],
    ids=repr,
)
def test_an_algorithm_without_neighbour_averaging_is_refused(algorithm: algorithms.Algorithm) -> None:
    with pytest.raises(ValueError, match=r"conditions apply to averages with the neighbours .* uses mix\."):
        mean_after(algorithm, ring(8), Conditions(loss=0.1), 2)


@pytest.mark.parametrize(
    "given",
    [
        {"loss": 1.0},
        {"loss": -0.1},
        {"delay": -1},
        {"delay": (3, 2)},
        {"delay": 1.5},
        {"noise": -1.0},
        {"participation": 0.0},
        {"participation": [0.5, 1.5]},
        {"speeds": [1.0, 10.0]},
        {"protocol": "tcp"},
        {"protocol": "handshake", "delay": 1},
    ],
    ids=str,
)
def test_numbers_out_of_range_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(given))}="):
        Conditions(**given)


def test_invalid_combinations_are_refused() -> None:
    fleet, x = StackedFleet(ring(8)), start()
    some = Conditions(loss=0.1)
    run = fleet.run(GradientDescent(0.0), x, torch.zeros_like, 1, conditions=some)
    with pytest.raises(ValueError, match="cannot be resumed"):
        fleet.run(GradientDescent(0.0), x, torch.zeros_like, 1, conditions=some, resume=run)
    with pytest.raises(ValueError, match="without conditions"):
        fleet.run(GradientDescent(0.0), x, torch.zeros_like, 1, conditions=some, network=Network(8, Link(1e-3)))
    with pytest.raises(ValueError, match="speeds has 3 numbers, and there are 8 agents"):
        fleet.run(GradientDescent(0.0), x, torch.zeros_like, 1, conditions=Conditions(speeds=[1.0, 0.5, 0.5]))
