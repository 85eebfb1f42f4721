"""Windows of more than 2 GiB: both ends and the middle of a tensor whose elements a 32-bit number does not count."""

from __future__ import annotations

import networkx as nx
import pytest
import torch

import shoal
from support.world import World

NUMEL = 2**31 + 4099
MIDDLE = 2**30 + 7
PLACES = (0, MIDDLE, 2**31 - 1, 2**31, NUMEL - 1)

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]


def put_and_update() -> list[int]:
    """Agent 0 puts and accumulates to agent 1, which updates and then gets; what agent 1 found in PLACES each time.

    Only one tensor and two slots are backed by memory: zeros that nobody has written to take none.
    """
    shoal.set_topology(nx.DiGraph([(0, 1)]))
    sender = shoal.rank() == 0
    sent = torch.zeros(NUMEL if sender else 0, dtype=torch.uint8)
    x = sent if sender else shoal.windows.empty(NUMEL, dtype=torch.uint8).zero_()
    shoal.bluefog.win_create(x, "x", zero_init=True)
    results: list[int] = []
    if sender:
        for k, place in enumerate(PLACES):
            sent[place] = k + 1
        shoal.bluefog.win_put(sent, "x")
        shoal.bluefog.win_accumulate(sent, "x", dst_weights={1: 10})
    shoal.barrier()
    if not sender:
        assert shoal.bluefog.win_update_then_collect("x") is x
        results += [int(x[place]) for place in PLACES]
        results.append(int(x.count_nonzero()))
        shoal.bluefog.win_get("x")
        shoal.bluefog.win_update("x", 0, {0: 1})
        results += [int(x[place]) for place in PLACES]
    shoal.barrier()
    shoal.bluefog.win_free("x")
    return results


EXPECTED = [[], [11, 22, 33, 44, 55, len(PLACES), 1, 2, 3, 4, 5]]


@pytest.mark.transport("threads")
def test_a_window_of_more_than_two_gigabytes_between_threads() -> None:
    assert shoal.Fleet(2, transport="threads", timeout=200.0).run(put_and_update) == EXPECTED


@pytest.mark.transport("shared_memory")
def test_a_window_of_more_than_two_gigabytes_between_processes() -> None:
    with World(2, timeout=200.0) as world:
        assert world.results(put_and_update, patience=250.0) == EXPECTED
