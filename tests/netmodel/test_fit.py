"""The fit finds the NIC that made the observations, and says when there is none in them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.netmodel import Link
from shoal.netmodel.probe import Observation, fit_link

SIZES = (1_000, 64_000, 1_000_000, 8_000_000)


def observed(link: Link, degrees: tuple[int, ...] = (1, 2, 3), noise: float = 0.0) -> list[Observation]:
    return [
        Observation(degree, nbytes, link.seconds(nbytes, degree) * (1 + noise * (-1) ** (index + degree)))
        for degree in degrees
        for index, nbytes in enumerate(SIZES)
    ]


@settings(max_examples=80)
@given(latency=st.floats(1e-5, 1e-1), bandwidth=st.floats(1e6, 1e10), overhead=st.floats(1e-5, 1e-2))
def test_known_parameters_are_recovered(latency: float, bandwidth: float, overhead: float) -> None:
    result = fit_link(observed(Link(latency, bandwidth, overhead)))
    # Where bytes take a thousandth of a microsecond beside latencies of a tenth of a second, digits are lost.
    assert result.bandwidth == pytest.approx(bandwidth, rel=1e-3)
    assert result.latency == pytest.approx(latency, rel=1e-3)
    assert result.overhead == pytest.approx(overhead, rel=1e-3)


def test_a_nic_without_latency_or_overhead_gets_none() -> None:
    for link in (Link(0.0, 1e8, 1e-3), Link(1e-3, 1e8, 0.0), Link(0.0, 1e8, 0.0)):
        result = fit_link(observed(link))
        assert result.bandwidth == pytest.approx(1e8)
        assert (result.latency, result.overhead) == (
            pytest.approx(link.latency, abs=1e-9),
            pytest.approx(link.overhead, abs=1e-9),
        )


def test_negative_estimates_become_none() -> None:
    """Times that grow faster than the bytes: a line through them has a negative intercept."""
    result = fit_link([Observation(1, 1e6, 0.01), Observation(1, 1e7, 0.2), Observation(1, 1e8, 2.2)])
    assert (result.latency, result.overhead) == (0.0, 0.0)
    assert 4e7 < result.bandwidth < 1e8


def test_with_one_degree_an_overhead_counts_as_latency() -> None:
    result = fit_link(observed(Link(1e-3, 1e8, 2e-3), degrees=(1,)))
    assert result.latency == pytest.approx(3e-3)
    assert result.overhead == 0.0


def test_relative_errors_are_fitted_so_that_short_messages_count() -> None:
    """Five percent up and down: the error of the longest run exceeds the sum of all short ones."""
    link = Link(2e-3, 1e8, 1e-3)
    result = fit_link(observed(link, noise=0.05))
    assert result.bandwidth == pytest.approx(link.bandwidth, rel=0.1)
    for one in observed(link):
        assert result.seconds(one.nbytes, one.degree) == pytest.approx(one.seconds, rel=0.12)


@pytest.mark.parametrize(
    ("observations", "match"),
    [
        ([], "one size only"),
        ([Observation(1, 8.0, 1.0), Observation(2, 8.0, 2.0)], "one size only"),
        ([Observation(1, 8.0, 1.0), Observation(1, 9.0, 0.0)], "no positive time"),
        ([Observation(0, 8.0, 1.0), Observation(1, 9.0, 1.0)], "no positive time or no message"),
        ([Observation(1, 1e6, 2.0), Observation(1, 2e6, 1.0), Observation(1, 4e6, 0.5)], "did not take longer"),
    ],
)
def test_uninformative_observations_are_refused(observations: list[Observation], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        fit_link(observations)
