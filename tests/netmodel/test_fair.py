"""Max-min fairness: a flow can gain capacity only at the cost of a flow that has no more."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.netmodel.simulation import fair_rates

CLOSE = 1e-6


@st.composite
def sharing(draw) -> tuple[np.ndarray, np.ndarray]:
    """Messages that each pass a few different things, some of them without limit."""
    things, passed = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    capacity = [draw(st.one_of(st.floats(0.5, 1e3), st.sampled_from([1.0, 2.0, 4.0]))) for _ in range(things)]
    capacity += [np.inf] * passed
    rows = []
    for _ in range(draw(st.integers(1, 12))):
        some = draw(st.lists(st.integers(0, things - 1), max_size=passed, unique=True))
        rows.append([*some, *range(things, things + passed - len(some))])
    return np.array(rows, dtype=np.int64), np.array(capacity)


few = settings(max_examples=200)


@few
@given(given_=sharing())
def test_no_link_exceeds_its_capacity(given_: tuple[np.ndarray, np.ndarray]) -> None:
    shared, capacity = given_
    rates = fair_rates(shared, capacity)
    used = np.zeros(len(capacity))
    np.add.at(used, shared, rates[:, None])
    limited = np.isfinite(capacity)
    assert (used[limited] <= capacity[limited] * (1 + CLOSE)).all()


@few
@given(given_=sharing())
def test_every_message_has_a_full_bottleneck_in_which_no_other_has_a_higher_rate(
    given_: tuple[np.ndarray, np.ndarray],
) -> None:
    """The property that defines max-min fairness (Bertsekas and Gallager, section 6.5.2)."""
    shared, capacity = given_
    rates = fair_rates(shared, capacity)
    used = np.zeros(len(capacity))
    np.add.at(used, shared, rates[:, None])
    for passes, rate in zip(shared, rates, strict=True):
        limits = [thing for thing in passes if np.isfinite(capacity[thing])]
        if not limits:
            assert rate == np.inf
            continue
        assert any(
            used[thing] >= capacity[thing] * (1 - CLOSE)
            and rate >= rates[(shared == thing).any(axis=1)].max() * (1 - CLOSE)
            for thing in limits
        )


@few
@given(given_=sharing(), factor=st.floats(0.01, 100.0))
def test_rates_scale_with_capacities(given_: tuple[np.ndarray, np.ndarray], factor: float) -> None:
    shared, capacity = given_
    np.testing.assert_allclose(fair_rates(shared, factor * capacity), factor * fair_rates(shared, capacity), rtol=1e-5)


@few
@given(given_=sharing(), seed=st.integers(0, 1000))
def test_the_order_of_messages_has_no_effect(given_: tuple[np.ndarray, np.ndarray], seed: int) -> None:
    shared, capacity = given_
    order = np.random.default_rng(seed).permutation(len(shared))
    np.testing.assert_allclose(fair_rates(shared[order], capacity), fair_rates(shared, capacity)[order], rtol=1e-6)


def test_a_message_limited_elsewhere_leaves_capacity_to_the_others() -> None:
    """Three messages share a NIC of 9. One of them passes a port of 1: the rates are 1, 4 and 4."""
    shared = np.array([[0, 1], [0, 2], [0, 2]])
    assert fair_rates(shared, np.array([9.0, 1.0, np.inf])).tolist() == [1.0, 4.0, 4.0]


def test_successive_bottlenecks_are_found() -> None:
    """A chain in which one bottleneck's remainder limits the next: 2, then 3 of 5, then 7 of 10."""
    shared = np.array([[0, 9], [0, 1], [1, 2], [2, 9]])
    assert fair_rates(shared, np.array([4.0, 5.0, 10.0, *[np.inf] * 7])).tolist() == [2.0, 2.0, 3.0, 7.0]


def test_without_messages_there_are_no_rates() -> None:
    assert fair_rates(np.empty((0, 3), np.int64), np.array([1.0, 2.0])).shape == (0,)
