"""100,000 agents: the rounds of sparse topologies are arrays, made in a fraction of a second and in linear memory."""

from time import process_time

import numpy as np
import pytest

from shoal.topology import find
from support.limits import slowness

MANY = {"one-peer-hypercube": 2**17, "hypercube": 2**17}
FAST = [
    "ring",
    "exponential",
    "symmetric-exponential",
    "torus",
    "hypercube",
    "one-peer-exponential",
    "one-peer-hypercube",
    "shift-one",
    "random-matchings",
    "ring-random",
    "od-equi-dyn",
    "ceca",
    "ceca-pairs",
    "base-2",
    "base-5",
    "inner-outer-exponential",
]


@pytest.mark.parametrize("name", FAST)
def test_a_round_of_100_000_agents_takes_a_fraction_of_a_second(name):
    size = MANY.get(name, 100_000)
    begin = process_time()
    schedule = find(name).schedule(size)
    destination, source, weight = schedule.edges(3)
    assert process_time() - begin < slowness()
    assert (np.diff(destination * size + source) > 0).all()
    np.testing.assert_allclose(np.bincount(destination, weight, size), 1.0, rtol=0, atol=1e-12)
    np.testing.assert_allclose(np.bincount(source, weight, size), 1.0, rtol=0, atol=1e-12)


def test_one_of_100_000_agents_computes_only_its_own_part():
    schedule = find("random-matchings").schedule(100_000)
    view = schedule.mixing(5, 99_999)
    assert schedule.mixing(5, view.source_ranks[0]).source_ranks == (99_999,)
