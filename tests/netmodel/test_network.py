"""Links and networks: the links on a message's path, and refused arguments."""

import math

import numpy as np
import pytest

from shoal.netmodel import Link, Network

FAST, SLOW = Link(1e-6, 1e9), Link(5e-3, 1e6, 2e-3)


def paths(network: Network, source: int, destination: int):
    result = network.paths(np.array([source]), np.array([destination]))
    return {name: column[0] for name, column in result._asdict().items()}


def test_messages_on_one_link_share_overheads_and_bytes_but_not_latency() -> None:
    link = Link(latency=0.5, bandwidth=100.0, overhead=0.25)
    assert link.seconds(200.0) == 0.25 + 2.0 + 0.5
    assert link.seconds(200.0, messages=3) == 3 * (0.25 + 2.0) + 0.5


def test_a_link_without_limit_takes_no_time() -> None:
    assert Link().seconds(1e12, 1000) == 0.0


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"latency": -1.0}, "latency is -1.0. Pass seconds"),
        ({"latency": math.inf}, "latency is inf"),
        ({"latency": math.nan}, "latency is nan"),
        ({"overhead": -1e-9}, "overhead is -1e-09"),
        ({"bandwidth": 0.0}, "bandwidth is 0.0. Pass bytes a second"),
        ({"bandwidth": math.nan}, "bandwidth is nan"),
        ({"download": 0.0}, "download is 0.0. Pass bytes a second, above zero, or None"),
        ({"download": math.nan}, "download is nan"),
    ],
)
def test_an_impossible_link_is_refused(change: dict[str, float], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Link(**change)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"size": 0}, "size is 0"),
        ({"agents_per_machine": 0}, "agents_per_machine is 0"),
        ({"nics": {2: FAST}}, "NIC 2 is named, but they count from 0 to 1"),
        ({"ports": {-1: FAST}}, "port -1 is named, but they count from 0 to 3"),
        ({"links": {(0, 1): Link(download=1.0)}}, "a single link, has one direction and so no download"),
        ({"flow": Link(download=1.0)}, "a flow, or a single link, has one direction"),
        ({"links": {(0, 4): FAST}}, r"link \(0, 4\) is named, but agents count from 0 to 3"),
        ({"links": {(0, 1, 2): FAST}}, r"link \(0, 1, 2\) is named, but a link joins two agents"),
        ({"links": {(0, 0): FAST}}, r"link \(0, 0\) is named, but a link joins two agents"),
    ],
)
def test_an_impossible_network_is_refused(arguments: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Network(**{"size": 4, "between": FAST, "agents_per_machine": 2, **arguments})


@pytest.mark.parametrize("size", [2.5, float("nan")])
def test_numbers_of_agents_are_whole(size: float) -> None:
    with pytest.raises(TypeError, match="size must be an int"):
        Network(size, FAST)  # type: ignore[arg-type]


def test_ranks_fill_machine_after_machine_and_the_last_may_have_fewer() -> None:
    network = Network(7, FAST, agents_per_machine=3)
    assert network.machines == 3
    assert network.machine_of(np.arange(7)).tolist() == [0, 0, 0, 1, 1, 1, 2]


def test_a_message_inside_a_machine_passes_two_ports_and_no_nic() -> None:
    network = Network(4, SLOW, agents_per_machine=2, inside=FAST)
    inside, between = paths(network, 0, 1), paths(network, 1, 2)
    assert (inside["latency"], inside["overhead"], inside["alone"]) == (1e-6, 0.0, 1e9)
    assert (between["latency"], between["overhead"], between["alone"]) == (5e-3, 2e-3, 1e6)
    assert np.isinf(network.capacity[inside["shared"][2:]]).all()
    assert network.capacity[between["shared"]].tolist() == [1e9, 1e9, 1e6, 1e6]


def test_the_two_directions_share_nothing() -> None:
    network = Network(2, FAST)
    assert not set(paths(network, 0, 1)["shared"]) & set(paths(network, 1, 0)["shared"])


def test_agents_of_one_machine_share_its_nic_and_not_their_ports() -> None:
    network = Network(4, FAST, agents_per_machine=2, inside=FAST)
    first, second = paths(network, 0, 2)["shared"], paths(network, 1, 3)["shared"]
    assert (first == second).tolist() == [False, False, True, True]


def test_a_path_has_the_largest_latency_and_the_smallest_bandwidth_along_it() -> None:
    network = Network(
        4,
        Link(1e-3, 1e8),
        agents_per_machine=2,
        inside=Link(1e-4, 1e9),
        nics={1: Link(7e-3, 5e7)},
        ports={3: Link(9e-3, 1e6, 4e-4)},
    )
    assert (paths(network, 0, 2)["latency"], paths(network, 0, 2)["alone"]) == (7e-3, 5e7)
    assert (paths(network, 2, 0)["latency"], paths(network, 2, 0)["alone"]) == (7e-3, 5e7)
    assert (paths(network, 0, 3)["latency"], paths(network, 0, 3)["alone"]) == (9e-3, 1e6)
    assert paths(network, 3, 2)["overhead"] == 4e-4
    assert (paths(network, 0, 1)["latency"], paths(network, 0, 1)["alone"]) == (1e-4, 1e9)


def test_a_flow_limits_pairs_on_different_machines_only() -> None:
    network = Network(4, Link(0.0, 1e9), agents_per_machine=2, flow=Link(1e-3, 1e8))
    assert paths(network, 0, 2)["alone"] == paths(network, 0, 2)["limit"] == 1e8
    assert paths(network, 0, 2)["latency"] == 1e-3
    assert paths(network, 0, 1)["limit"] == math.inf


def test_a_single_link_of_one_direction_replaces_the_flow() -> None:
    network = Network(3, Link(0.0, 1e9), flow=Link(0.0, 1e8), links={(0, 2): Link(2e-3, 5e8), (1, 0): SLOW})
    assert (paths(network, 0, 2)["limit"], paths(network, 0, 2)["latency"]) == (5e8, 2e-3)
    assert (paths(network, 2, 0)["limit"], paths(network, 2, 0)["latency"]) == (1e8, 0.0)
    assert (paths(network, 1, 0)["alone"], paths(network, 1, 0)["overhead"]) == (1e6, 2e-3)


def test_a_nic_may_receive_at_another_rate_than_it_sends() -> None:
    network = Network(3, Link(0.0, 2e6, download=8e6), nics={2: Link(0.0, 16e6, download=1e6)})
    assert (
        paths(network, 0, 1)["alone"] == paths(network, 1, 0)["alone"] == 2e6
    )  # out of the one is slower than into the other
    assert paths(network, 0, 2)["alone"] == 1e6
    assert paths(network, 2, 0)["alone"] == 8e6
    assert Link(0.5, 2e6, download=8e6).seconds(4e6) == Link(0.5, 8e6, download=2e6).seconds(4e6) == 2.5


def test_a_port_may_receive_at_another_rate_than_it_sends() -> None:
    network = Network(2, FAST, agents_per_machine=2, inside=Link(0.0, 3e6, download=7e6), ports={1: Link(0.0, 9e6)})
    assert (paths(network, 0, 1)["alone"], paths(network, 1, 0)["alone"]) == (3e6, 7e6)
