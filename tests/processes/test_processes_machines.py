"""Machines as agents see them: the transport to each rank, the ranks of each machine, and the listeners of each."""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.runtime.agent import current
from shoal.transport.network_link import NetworkLink
from support.agent_main import holdings
from support.namespaces import INTERFACE, network_namespaces
from support.world import World

NETWORK = {"SHOAL_TRANSPORT": "network"}


def transports() -> list[str]:
    """The transport to each other rank."""
    router = current().engine.router
    return [router.transport_to(other) for other in range(shoal.size()) if other != shoal.rank()]


def machine() -> tuple[int, int, int, int, bool]:
    return (
        shoal.bluefog.machine_size(),
        shoal.bluefog.machine_rank(),
        shoal.local_size(),
        shoal.local_rank(),
        shoal.bluefog.is_homogeneous(),
    )


def listening() -> list[str]:
    """The TCP addresses that this process listens on, without the ports; one may have several listeners."""
    own = {target for _, target in holdings().descriptors}
    results = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in own:
                results.append(_address(local.partition(":")[0]))
    return sorted(set(results))


def _address(text: str) -> str:
    words = struct.unpack(f">{len(text) // 8}I", bytes.fromhex(text))
    packed = struct.pack(f"={len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)


def average() -> list[float]:
    shoal.set_topology(shoal.topology.FullyConnectedGraph(shoal.size()))
    return [shoal.neighbor_allreduce(torch.full((n,), float(shoal.rank())))[-1].item() for n in (1, 100_000)]


def assert_average(world: World) -> None:
    expected = [(world.size - 1) / 2] * 2
    assert world.results(average) == [pytest.approx(expected)] * world.size


@pytest.mark.transport("shared_memory")
@pytest.mark.transport("network")
@pytest.mark.transport("namespaces")
def test_agents_share_memory_within_a_machine_and_use_the_network_between_machines() -> None:
    with network_namespaces(2) as machines, World(4, namespaces=machines) as world:
        near, far = "shared_memory", "network"
        assert world.results(transports) == [[near, far, far], [near, far, far], [far, far, near], [far, far, near]]
        assert world.results(machine) == [(2, m, 2, local, True) for m in range(2) for local in range(2)]
        assert_average(world)
        assert world.results(listening) == [[machine.address] for machine in machines for _ in range(2)]


@pytest.mark.transport("network")
@pytest.mark.transport("namespaces")
def test_machines_of_different_sizes_work_and_have_no_hierarchical_average() -> None:
    with network_namespaces(2) as machines, World(3, namespaces=machines) as world:
        assert world.results(machine) == [(2, 0, 2, 0, False), (2, 0, 2, 1, False), (2, 1, 1, 0, False)]
        assert_average(world)
        for one in world.run(average_by_machines):
            assert one.error == "ValueError"
            assert "[2, 1]" in one.message


def average_by_machines() -> None:
    shoal.bluefog.set_machine_topology(shoal.topology.RingGraph(shoal.bluefog.machine_size()))
    shoal.bluefog.hierarchical_neighbor_allreduce(torch.ones(3))


@pytest.mark.transport("network")
@pytest.mark.transport("namespaces")
@pytest.mark.parametrize("interface", [INTERFACE, "10.77.0.1"])
def test_a_network_job_listens_on_the_requested_interface(interface: str) -> None:
    environment = {"SHOAL_INTERFACE": interface, **NETWORK}
    with network_namespaces(1) as machines, World(2, namespaces=machines, environment=environment) as world:
        assert world.results(listening) == [[machines[0].address]] * 2
        assert_average(world)


@pytest.mark.transport("network")
@pytest.mark.transport("namespaces")
@pytest.mark.parametrize("name", ["eth0.100", "br-1_a", "eth@7"])
def test_an_interface_may_have_any_name_that_linux_allows(name: str) -> None:
    """A VLAN's name has a dot. It is also found by an alias, and in the form of "ip link"."""
    with network_namespaces(1) as machines:
        machines[0].rename_link(name)
        machines[0].add_address("10.77.0.50/24", name, f"{name}:1")
        for interface, address in [(name, "10.77.0.1"), (f"{name}@eth0", "10.77.0.1"), (f"{name}:1", "10.77.0.50")]:
            environment = {"SHOAL_INTERFACE": interface, "MASTER_ADDR": "127.0.0.1", **NETWORK}
            with World(2, namespaces=machines, environment=environment) as world:
                assert world.results(listening) == [[address]] * 2
                assert_average(world)


@pytest.mark.transport("network")
@pytest.mark.transport("namespaces")
@pytest.mark.parametrize("interface", ["", INTERFACE])
def test_machines_that_meet_over_ipv6_listen_there(interface: str) -> None:
    with network_namespaces(2) as machines:
        environment = {"MASTER_ADDR": machines[0].address6, "SHOAL_INTERFACE": interface}
        with World(2, namespaces=machines, environment=environment) as world:
            assert world.results(listening) == [[machine.address6] for machine in machines]
            assert_average(world)


@pytest.mark.transport("network")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
@pytest.mark.parametrize("variable", ["MASTER_ADDR", "SHOAL_RENDEZVOUS"])
def test_agents_meet_at_an_ipv6_address_of_the_loopback(host: str, variable: str) -> None:
    with World(2, init=False, environment=NETWORK) as world:
        value = host if variable == "MASTER_ADDR" else "[::1]:18431"
        pending = [world.run_on(rank, init_with, {variable: value}) for rank in range(2)]
        assert [(one.error, one.message) for one in [one.outcome() for one in pending]] == [("", "")] * 2
        assert_average(world)


def init_where(name: str, addresses: list[str], variables: Mapping[str, str]) -> list[str]:
    """Become an agent of a job whose rendezvous has a name, on a machine whose /etc/hosts says what that means."""
    real = socket.getaddrinfo

    def resolve(host: Any, *args: Any, **kwargs: Any) -> Any:
        return [one for address in (addresses if host == name else [host]) for one in real(address, *args, **kwargs)]

    socket.getaddrinfo = resolve
    try:
        init_with({"MASTER_ADDR": name, **variables})
    finally:
        socket.getaddrinfo = real
    return listening()


@pytest.mark.transport("network")
@pytest.mark.transport("namespaces")
@pytest.mark.parametrize("far", [["10.77.0.1"], ["fd77::1"], ["fd77::99", "10.77.0.1"]], ids=str)
def test_a_machine_whose_host_name_resolves_to_loopback_listens_on_a_reachable_address(far: list[str]) -> None:
    """As Debian's /etc/hosts has it. An unreachable address of the name does not prevent connections."""
    with network_namespaces(2) as machines, World(2, namespaces=machines, init=False) as world:
        near = world.run_on(0, init_where, "debian", ["127.0.1.1"], {})
        other = world.run_on(1, init_where, "debian", far, {})
        address = far[-1]
        results = [near.outcome(), other.outcome()]
        assert [one.value for one in results] == [[address], [address[:-1] + "2"]], results[0].trace + results[1].trace
        assert_average(world)


@pytest.mark.transport("network")
def test_a_rendezvous_name_with_several_addresses_is_found_at_any() -> None:
    with World(2, init=False, environment=NETWORK) as world:
        pending = [world.run_on(r, init_where, "localhost", ["::1", "127.0.0.1"], {}) for r in range(2)]
        assert [one.outcome().error for one in pending] == ["", ""]
        assert_average(world)


def test_a_foreign_address_is_refused() -> None:
    environment = {"SHOAL_INTERFACE": "192.0.2.7", **NETWORK}
    with World(2, environment=environment, init=False, timeout=5.0) as world:
        for one in world.run(shoal.init):
            assert one.error == "ValueError"
            assert "192.0.2.7" in one.message and "no address of this machine" in one.message


def test_a_missing_interface_is_refused_with_the_existing_ones() -> None:
    with World(2, environment={"SHOAL_INTERFACE": "nowhere0", **NETWORK}, init=False, timeout=5.0) as world:
        for one in world.run(shoal.init):
            assert one.error == "ValueError"
            assert "nowhere0" in one.message and "lo" in one.message


@pytest.mark.transport("shared_memory")
def test_a_job_on_one_machine_listens_on_no_port() -> None:
    with World(3) as world:
        assert_average(world)
        assert world.results(listening) == [[]] * 3


@pytest.mark.transport("network")
def test_a_network_job_on_one_machine_listens_only_on_loopback() -> None:
    with World(3, environment=NETWORK) as world:
        assert_average(world)
        assert world.results(listening) == [["127.0.0.1"]] * 3
        assert world.results(transports) == [["network"] * 2] * 3


def test_a_transport_that_cannot_reach_all_agents_is_refused_with_one_that_can() -> None:
    with World(2, environment={"SHOAL_TRANSPORT": "threads"}, init=False, timeout=5.0) as world:
        for one in world.run(shoal.init):
            assert one.error == "ValueError"
            assert "SHOAL_TRANSPORT=threads" in one.message and "shared_memory" in one.message


# SHOAL_AGENTS_PER_MACHINE


@pytest.mark.transport("shared_memory")
@pytest.mark.parametrize(
    ("per_machine", "expected"),
    [
        (1, [(4, 0, 1, 0, True), (4, 1, 1, 0, True), (4, 2, 1, 0, True), (4, 3, 1, 0, True)]),
        (2, [(2, 0, 2, 0, True), (2, 0, 2, 1, True), (2, 1, 2, 0, True), (2, 1, 2, 1, True)]),
        (3, [(2, 0, 3, 0, False), (2, 0, 3, 1, False), (2, 0, 3, 2, False), (2, 1, 1, 0, False)]),
        (9, [(1, 0, 4, local, True) for local in range(4)]),
    ],
)
def test_agents_per_machine_groups_ranks_and_changes_no_transport(
    per_machine: int, expected: list[tuple[int, int, int, int, bool]]
) -> None:
    with World(4, environment={"SHOAL_AGENTS_PER_MACHINE": str(per_machine)}) as world:
        assert world.results(machine) == expected
        assert world.results(transports) == [["shared_memory"] * 3] * 4
        assert_average(world)


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_agents_per_machine_must_be_a_positive_integer(value: str) -> None:
    with World(1, environment={"SHOAL_AGENTS_PER_MACHINE": value}, init=False) as world:
        [one] = world.run(shoal.init)
        assert one.error == "ValueError"
        assert f"SHOAL_AGENTS_PER_MACHINE={value!r}" in one.message


def init_with(variables: Mapping[str, str]) -> None:
    import os

    os.environ.update(variables)
    shoal.init()


def test_agents_that_disagree_about_agents_per_machine_name_each_other() -> None:
    with World(3, init=False, timeout=5.0) as world:
        pending = [world.run_on(r, init_with, {"SHOAL_AGENTS_PER_MACHINE": "3" if r < 2 else "1"}) for r in range(3)]
        outcomes = [one.outcome() for one in pending]
        assert [(outcome.error, outcome.ranks) for outcome in outcomes] == [("Mismatch", (2,))] * 2 + [
            ("Mismatch", (0, 1))
        ]


def averages_and_reversed_links() -> tuple[list[float], list[int]]:
    """Small and large averages, and the ranks to which this agent sends over connections that they have opened."""
    shoal.set_topology(shoal.topology.FullyConnectedGraph(shoal.size()))
    results = [float(shoal.neighbor_allreduce(torch.full((n,), float(shoal.rank())))[-1]) for n in (3, 300_000)]
    links = current().engine.router.links
    reversed_ones = [rank for rank, link in links.items() if isinstance(link, NetworkLink) and link.is_reversed]
    shoal.barrier()
    return results, sorted(reversed_ones)


@pytest.mark.transport("network")
@pytest.mark.transport("namespaces")
def test_agents_behind_an_inbound_firewall_open_the_connections_of_both_directions() -> None:
    with network_namespaces(2) as machines:
        machines[1].let_no_connection_in()
        with World(4, namespaces=machines, timeout=60.0) as world:
            result = world.results(averages_and_reversed_links)
    assert [averages for averages, _ in result] == [[1.5, 1.5]] * 4
    assert [links for _, links in result] == [[2, 3], [2, 3], [], []]
