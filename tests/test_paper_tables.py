"""The tables that papers print: formulas to the letter, and beside them what one counts, on paper and in a schedule."""

import re
import sys
from pathlib import Path

import pytest

from shoal.topology import RingStarDelegates, alpha_beta, average_age, find, traffic

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from papers.protocols import Counted, count_messages, ring_allreduce
from papers.tables import (
    BusiestRow,
    PrimitiveRow,
    RingStarRow,
    bluefog_table,
    busiest_node_table,
    ring_star_table,
)

NETWORK = {"nbytes": 1000.0, "latency": 0.25, "bandwidth": 500.0}
SIZES = [(1, 1), (2, 2), (4, 2), (5, 1), (12, 3), (15, 5), (24, 24), (36, 6)]


def value(formula: str, **symbols: float) -> float:
    """A printed formula, in which what stands side by side is multiplied."""
    spelled = re.sub(r"(?<=[\w)]) +(?=[(\w])|(?<=\d)(?=\()", "*", formula)
    return float(eval(spelled, {"__builtins__": {}}, symbols))


def ring_star(workers: int, group: int) -> dict[str, RingStarRow]:
    return {row.topology: row for row in ring_star_table(workers, group, **NETWORK)}


def bluefog(agents: int) -> dict[str, PrimitiveRow]:
    return {row.primitive: row for row in bluefog_table(agents, **NETWORK)}


def busiest(agents: int, degree: int) -> dict[str, BusiestRow]:
    return {row.pattern: row for row in busiest_node_table(agents, degree, nbytes=1000.0)}


def test_the_ring_star_table_is_printed_as_the_paper_prints_it() -> None:
    rows = ring_star(16, 4).values()
    assert [(row.topology, row.averaging, row.formula, row.age) for row in rows] == [
        ("Allreduce", "dense", "2(V - 1) alpha + 2 K beta", "O(1)"),
        ("Ring", "sparse", "2 alpha + 2 K beta", "O(V)"),
        ("RingRandom", "sparse", "2 alpha + 2 K beta", "O(log(V))"),
        ("Ring-Star (proposed)", "sparse", "(2(L - 1) + 2) alpha + 2 K beta", "O(G)"),
        ("Ring-Star over RingRandom", "sparse", "(2(L - 1) + 2) alpha + 2 K beta", "O(log(G))"),
    ]


@pytest.mark.parametrize(("workers", "group"), SIZES)
def test_ring_star_seconds_are_the_value_of_the_formula(workers: int, group: int) -> None:
    for row in ring_star_table(workers, group, **NETWORK):
        symbols = {"V": workers, "L": group, "K": 1000.0, "alpha": 0.25, "beta": 1 / 500}
        assert row.seconds == pytest.approx(value(row.formula, **symbols))
        assert row.seconds == pytest.approx(alpha_beta(row.handshakes, row.bytes, 0.25, 500.0))


def test_ring_star_counts_beside_the_formulas_equal_explicit_messages() -> None:
    """16 workers in groups of 4, 1000 bytes: steps, messages and bytes at the busiest worker."""
    assert {name: row.counted for name, row in ring_star(16, 4).items()} == {
        "Allreduce": Counted(30, 30, 30 * 1000 / 16),
        "Ring": Counted(1, 2, 2000.0),
        "RingRandom": Counted(1, 1, 1000.0),
        # Three models in, two neighbours, three models out.
        "Ring-Star (proposed)": Counted(3, 8, 8000.0),
        "Ring-Star over RingRandom": Counted(3, 7, 7000.0),
    }


@pytest.mark.parametrize(("workers", "group"), SIZES)
def test_ring_star_handshakes_are_those_of_its_schedule(workers: int, group: int) -> None:
    """Except for one group, whose single delegate has no neighbours, and two, which are each other's only neighbour."""
    row = ring_star(workers, group)["Ring-Star (proposed)"]
    counted = traffic(RingStarDelegates(workers, group), nbytes=1000.0)
    assert row.counted is not None
    assert row.counted.messages == pytest.approx(3 * counted.busiest_messages)
    assert row.counted.bytes == pytest.approx(3 * counted.busiest_bytes)
    missing = {1: 2, 2: 1}.get(workers // group, 0)
    assert row.handshakes - row.counted.messages == missing


@pytest.mark.parametrize("workers", [2, 5, 64])
def test_the_all_reduce_of_the_table_contradicts_that_of_the_text(workers: int) -> None:
    row = ring_star(workers, 1)["Allreduce"]
    assert row.handshakes == 2 * (workers - 1) == row.counted.messages
    assert f"2(V - 1) = {2 * (workers - 1)} handshakes, the text of section 2.3 V - 1 = {workers - 1}." in row.note


@pytest.mark.parametrize("workers", [2, 4, 64])
def test_ring_star_of_one_group_costs_more_than_the_all_reduce_that_it_is(workers: int) -> None:
    rows = ring_star(workers, workers)
    row = rows["Ring-Star (proposed)"]
    assert row.handshakes == 2 * workers
    assert row.counted.messages == rows["Allreduce"].handshakes == 2 * (workers - 1)
    assert f"At L = V it is 2 V = {2 * workers}, but {2 * (workers - 1)}" in row.note


def test_ring_star_of_groups_of_one_is_the_ring() -> None:
    rows = ring_star(12, 1)
    assert rows["Ring-Star (proposed)"].handshakes == rows["Ring"].handshakes == 2
    assert rows["Ring-Star (proposed)"].counted == rows["Ring"].counted
    assert rows["Ring-Star (proposed)"].counted_age == pytest.approx(rows["Ring"].counted_age)


def test_counted_ages_are_those_of_the_topologies_in_averagings() -> None:
    rows = ring_star(64, 8)
    assert rows["Allreduce"].counted_age == 1.0
    assert rows["Ring"].counted_age == average_age(find("ring").schedule(64)).mean
    assert rows["RingRandom"].counted_age == average_age(find("ring-random").schedule(64)).mean
    assert rows["Ring-Star (proposed)"].counted_age == pytest.approx(
        average_age(find("ring-star").schedule(64, agents_per_machine=8)).mean
    )


def test_counted_ages_grow_as_the_printed_orders() -> None:
    """Four times as many workers in groups of the same size: four times, or by a term, or not at all."""
    small, large = ring_star(64, 4), ring_star(256, 4)

    def growth(name: str) -> float:
        return large[name].counted_age / small[name].counted_age

    assert growth("Allreduce") == 1.0
    assert growth("Ring") == pytest.approx(4.0, rel=0.05)
    assert growth("Ring-Star (proposed)") == pytest.approx(4.0, rel=0.2)
    assert 1.0 < growth("RingRandom") < 2.0
    assert 1.0 < growth("Ring-Star over RingRandom") < 2.0


def test_random_pairs_of_an_odd_number_are_not_counted() -> None:
    rows = ring_star(15, 5)
    assert rows["RingRandom"].counted is None and rows["RingRandom"].counted_age is None
    assert rows["Ring-Star over RingRandom"].counted is None
    assert rows["RingRandom"].handshakes == 2


def test_the_bluefog_table_is_printed_as_the_paper_prints_it() -> None:
    rows = bluefog(8).values()
    assert [(row.primitive, row.formula, row.averaging, row.needs) for row in rows] == [
        ("Parameter Server", "n M / B + n L", "global", "a central node"),
        ("Ring-Allreduce", "2 M / B + 2 n L", "global", ""),
        ("Byte-PS", "M / B + n L", "global", "extra nodes"),
        ("BlueFog, partial averaging", "M / B + L", "partial", ""),
    ]


@pytest.mark.parametrize("agents", [1, 2, 7, 64])
def test_bluefog_seconds_are_the_value_of_the_formula(agents: int) -> None:
    for row in bluefog_table(agents, **NETWORK):
        assert row.seconds == pytest.approx(value(row.formula, n=agents, M=1000.0, B=500.0, L=0.25)), row.primitive


@pytest.mark.parametrize("n", [2, 3, 8, 100])
def test_bluefog_counts_equal_explicit_messages(n: int) -> None:
    result = {name: row.counted for name, row in bluefog(n).items()}
    assert (result["Parameter Server"].steps, result["Parameter Server"].messages) == (2, 2 * n)
    assert result["Parameter Server"].bytes == 2 * n * 1000
    assert (result["Ring-Allreduce"].steps, result["Ring-Allreduce"].messages) == (2 * (n - 1), 2 * (n - 1))
    assert result["Ring-Allreduce"].bytes == pytest.approx(2 * (n - 1) / n * 1000)
    assert (result["Byte-PS"].steps, result["Byte-PS"].messages) == (2, 2 * n)
    assert result["Byte-PS"].bytes == pytest.approx(2000)
    assert result["BlueFog, partial averaging"] == Counted(1, 1, 1000.0)


def test_partial_averaging_is_the_only_row_whose_cost_does_not_grow() -> None:
    few, many = bluefog(4), bluefog(400)
    constant = [name for name in few if few[name].seconds == many[name].seconds]
    assert constant == ["BlueFog, partial averaging"]
    assert [name for name in few if few[name].counted == many[name].counted] == constant


def order(few: float, many: float, times: int) -> str:
    """How something grows when what it depends on becomes so many times as much."""
    if many == pytest.approx(few, rel=0.1):
        return "O(1)"
    assert many == pytest.approx(times * few, rel=0.1)
    return "O(n)"


def test_baguas_orders_are_those_of_the_counts() -> None:
    few, many = busiest(64, 2), busiest(640, 2)
    for name in ("Parameter Server", "Allreduce (Ring)", "BytePS", "Decentralized, 1 peer"):
        one, other = few[name], many[name]
        # Messages that come at the same time count as one in BAGUA's latency.
        assert order(one.counted.steps, other.counted.steps, 10) == one.latency, name
        assert order(one.counted.bytes, other.counted.bytes, 10) == one.bandwidth, name


def test_d_peers_cost_d_messages_and_d_models_for_any_number_of_agents() -> None:
    for degree in (1, 3, 9):
        row = busiest(16, degree)["Decentralized, d peers"]
        assert (row.latency, row.bandwidth) == ("O(d)", "O(d)")
        assert (row.counted.messages, row.counted.bytes) == (degree, degree * 1000.0)
        assert row.counted == busiest(160, degree)["Decentralized, d peers"].counted


def test_the_busiest_node_table_is_printed_as_bagua_prints_it() -> None:
    printed = {name: (row.latency, row.bandwidth) for name, row in busiest(8, 2).items()}
    assert printed["Allreduce (Ring)"] == ("O(n)", "O(1)")
    assert printed["Parameter Server"] == ("O(1)", "O(n)")
    assert printed["Decentralized, 1 peer"] == ("O(1)", "O(1)")
    assert "Not in BAGUA's table" in busiest(8, 2)["BytePS"].note


def test_one_agent_sends_nothing() -> None:
    assert bluefog(1)["Ring-Allreduce"].counted == bluefog(1)["BlueFog, partial averaging"].counted == Counted(0, 0, 0)
    assert ring_star(1, 1)["Ring-Star (proposed)"].counted == Counted(0, 0, 0)
    assert count_messages(ring_allreduce(1, 8.0)) == Counted(0, 0, 0)


def test_a_table_of_zero_agents_or_of_incomplete_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="workers must be at least 1"):
        ring_star_table(0, 1, **NETWORK)
    with pytest.raises(ValueError, match="10 agents do not fill groups of 4"):
        ring_star_table(10, 4, **NETWORK)
    with pytest.raises(ValueError, match="agents must be at least 1"):
        bluefog_table(0, **NETWORK)
    with pytest.raises(ValueError, match="an agent among 4 has at most 3 peers, not 4"):
        busiest_node_table(4, 4, nbytes=1.0)
    with pytest.raises(ValueError, match="nbytes is -1"):
        busiest_node_table(4, 1, nbytes=-1.0)
    with pytest.raises(ValueError, match="bandwidth is 0"):
        bluefog_table(4, nbytes=1.0, latency=0.0, bandwidth=0.0)
