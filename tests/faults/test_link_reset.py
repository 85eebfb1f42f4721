"""A connection between two machines is reset, as by a firewall: the two have lost each other, nobody else is blamed."""

from __future__ import annotations

import subprocess
import time

import pytest

from support.fault_points import average_until_it_fails
from support.namespaces import network_namespaces
from support.world import World


@pytest.mark.transport("network")
@pytest.mark.transport("namespaces")
def test_when_two_machines_lose_each_other_no_third_one_is_blamed() -> None:
    with network_namespaces(4) as machines, World(4, namespaces=machines) as world:
        pending = [world.run_on(rank, average_until_it_fails, 16) for rank in range(4)]
        time.sleep(0.5)  # in the middle of the work
        at = time.monotonic()
        for here, there in ((1, 2), (2, 1)):
            subprocess.run(
                ["ip", "netns", "exec", machines[here].name, "ss", "-K", "dst", machines[there].address],
                check=True,
                capture_output=True,
            )
        outcomes = [one.outcome() for one in pending]
        for one in outcomes:
            assert one.error == "PeerLost", f"rank {one.rank}: {one.error}: {one.trace}"
            expected = {1: (2,), 2: (1,)}.get(one.rank, (1, 2))
            assert one.ranks == expected, f"rank {one.rank}: {one.message}"
            assert one.ended - at < 3.0
        world.destroy()
