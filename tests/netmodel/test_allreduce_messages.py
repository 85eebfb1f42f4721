"""Averages over everybody as exchanges: they add up to the mean, and cost what the textbooks say."""

import numpy as np
import pytest

from shoal.netmodel import (
    Link,
    Network,
    Step,
    hierarchical,
    hierarchical_allreduce,
    parameter_server,
    ring_allreduce,
    rounds_of,
    simulate,
    tree_allreduce,
)
from shoal.netmodel.messages import direct_allreduce
from shoal.topology import OnePeerExponential

SIZES = [2, 3, 5, 8, 13]
NBYTES = 840.0
LINK = Link(latency=0.5, bandwidth=100.0, overhead=0.125)


def seconds(size: int, step: Step, link: Link = LINK, local: int = 1, inside: Link | None = None) -> float:
    return simulate(Network(size, link, local, inside or Link()), [step]).seconds


def sent(step: Step, size: int) -> np.ndarray:
    """Bytes that leave each agent."""
    return sum(np.bincount(one.source, one.nbytes, size) for one in step)


def received(step: Step, size: int) -> np.ndarray:
    return sum(np.bincount(one.destination, one.nbytes, size) for one in step)


@pytest.mark.parametrize("size", SIZES)
def test_a_ring_has_2_n_minus_1_steps_of_a_share(size: int) -> None:
    """Patarasuk and Yuan: 2 (n - 1) (alpha + M / (n B))."""
    step = ring_allreduce(size, NBYTES)
    assert len(step) == 2 * (size - 1)
    assert seconds(size, step) == pytest.approx(2 * (size - 1) * (0.5 + 0.125 + NBYTES / size / 100.0))
    np.testing.assert_allclose(sent(step, size), 2 * (size - 1) / size * NBYTES)


@pytest.mark.parametrize("size", SIZES)
def test_a_ring_sends_to_the_next_only(size: int) -> None:
    for one in ring_allreduce(size, NBYTES):
        assert ((one.source + 1) % size == one.destination).all()
        assert sorted(one.source.tolist()) == list(range(size))


@pytest.mark.parametrize("size", SIZES)
def test_direct_has_two_steps_of_n_minus_1_messages_of_a_share(size: int) -> None:
    step = direct_allreduce(size, NBYTES)
    assert len(step) == 2
    assert seconds(size, step) == pytest.approx(2 * ((size - 1) * (0.125 + NBYTES / size / 100.0) + 0.5))
    for one in step:
        assert len({*zip(one.source.tolist(), one.destination.tolist(), strict=True)}) == size * (size - 1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("server", [0, 1])
def test_a_parameter_server_receives_from_all_and_replies_to_all(size: int, server: int) -> None:
    step = parameter_server(size, NBYTES, server)
    assert seconds(size, step) == pytest.approx(2 * ((size - 1) * (0.125 + NBYTES / 100.0) + 0.5))
    loads = np.full(size, NBYTES)
    loads[server] = (size - 1) * NBYTES
    np.testing.assert_allclose(sent(step, size), loads)
    np.testing.assert_allclose(received(step, size), loads)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("chunks", [1, 4])
def test_two_trees_send_what_a_ring_does_in_a_logarithm_of_steps(size: int, chunks: int) -> None:
    step = tree_allreduce(size, NBYTES, chunks)
    depth = size.bit_length() - 1
    assert len(step) == 2 * depth + chunks - 1
    # Every agent but the root of a tree sends its half up, and it comes down again to every agent but the root.
    assert sent(step, size).sum() == pytest.approx(2 * (size - 1) * NBYTES)
    assert received(step, size).sum() == pytest.approx(2 * (size - 1) * NBYTES)
    # An inner node of one tree, with two children, is a leaf of the other: (1 + 2 + 1) halves at most.
    assert sent(step, size).max() <= 2 * NBYTES * (1 + 1e-12)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_the_chunks_of_a_tree_go_from_leaves_to_root_and_back(size: int, chunks: int) -> None:
    """In the first tree, a node forwards a chunk in a later exchange than that of its children's chunk."""
    rising: dict[int, list[int]] = {}
    falling: dict[int, list[int]] = {}
    for turn, one in enumerate(tree_allreduce(size, NBYTES, chunks)):
        half = len(one) // 2
        for out, into in zip(one.source[:half].tolist(), one.destination[:half].tolist(), strict=True):
            (rising if into < out else falling).setdefault(max(out, into), []).append(turn)
    for child in range(1, size):
        parent = (child - 1) // 2
        assert len(rising[child]) == len(falling[child]) == chunks
        for chunk in range(chunks):
            if parent:
                assert rising[child][chunk] < rising[parent][chunk]
                assert falling[parent][chunk] < falling[child][chunk]
            else:
                assert rising[child][chunk] < falling[child][chunk]


def test_chunks_keep_the_levels_of_a_tree_busy() -> None:
    link = Link(1e-6, 1e9)
    one, many = (seconds(64, tree_allreduce(64, 1e8, chunks), link) for chunks in (1, 32))
    # Half of the bytes up six levels and down again with two children at a NIC, against close to twice the bytes.
    assert many < 0.35 * one
    assert many > 2 * 1e8 / 1e9


def test_a_tree_without_chunks_is_refused() -> None:
    with pytest.raises(ValueError, match="chunks is 0"):
        tree_allreduce(4, NBYTES, 0)


def test_machines_average_their_shares_inside_then_between_then_inside() -> None:
    """Two machines of four: shares of M / 4 to three others, M / 4 each through the NIC both ways, shares again."""
    inside = Link(0.25, 1000.0)
    result = seconds(8, hierarchical_allreduce(2, 4, NBYTES), Link(0.5, 100.0), local=4, inside=inside)
    around = 3 * NBYTES / 4 / 1000.0 + 0.25
    between = 2 * (4 * NBYTES / 4 / 2 / 100.0 + 0.5)
    assert result == pytest.approx(2 * around + between)


def test_each_agent_carries_its_share_between_machines() -> None:
    between = [one for (one,) in rounds_of(OnePeerExponential(3), NBYTES, 2)]
    step = hierarchical(3, 4, NBYTES, between)
    assert len(step) == 4
    for hop, one in zip((1, 2), step[1:3], strict=True):
        assert (one.nbytes == NBYTES / 4).all()
        assert ((one.source // 4 + hop) % 3 == one.destination // 4).all()
        assert (one.source % 4 == one.destination % 4).all()


def test_machines_of_one_agent_have_no_inner_messages() -> None:
    assert len(hierarchical_allreduce(5, 1, NBYTES)) == len(ring_allreduce(5, NBYTES))


@pytest.mark.parametrize("make", [ring_allreduce, direct_allreduce, parameter_server, tree_allreduce])
def test_a_single_agent_has_no_peers(make) -> None:
    assert list(make(1, NBYTES)) == []


@pytest.mark.parametrize(
    ("make", "least"), [(ring_allreduce, 1.0), (direct_allreduce, 1.0), (tree_allreduce, 1.0), (parameter_server, 1.0)]
)
@pytest.mark.parametrize("size", [2, 5, 8])
def test_every_agents_bytes_can_reach_every_other(make, least: float, size: int) -> None:
    """The set of agents whose data each agent has, exchange by exchange. Without it no average could be right."""
    arrived = [{rank} for rank in range(size)]
    for one in make(size, NBYTES):
        before = [set(names) for names in arrived]
        for out, into in zip(one.source.tolist(), one.destination.tolist(), strict=True):
            arrived[into] |= before[out]
    assert all(len(names) == size for names in arrived)
    assert min(received(make(size, NBYTES), size)) >= least * NBYTES
