"""Quantities as people write them; what could mean two things is refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.netmodel.network import format_rate, format_seconds, parse_rate, parse_seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5ms", 5e-3),
        ("50us", 5e-5),
        ("50 µs", 5e-5),
        ("50μs", 5e-5),
        ("2ns", 2e-9),
        ("0.2s", 0.2),
        (".5s", 0.5),
        ("1e-3 s", 1e-3),
        ("1.5min", 90.0),
        ("5MS", 5e-3),
        ("0", 0.0),
        ("0ms", 0.0),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("1gbit", 1.25e8),
        ("25Gbit/s", 3.125e9),
        ("400Mbps", 5e7),
        ("8bit", 1.0),
        ("1tbit", 1.25e11),
        ("10 kbit/s", 1250.0),
        ("23GB/s", 2.3e10),
        ("1MiB/s", 1 << 20),
        ("500kB/s", 5e5),
    ],
)
def test_rates_are_bytes_a_second(text: str, rate: float) -> None:
    assert parse_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_seconds, "5", "it has no unit"),
        (parse_seconds, "5m", "'m' is no unit of it"),
        (parse_seconds, "fast", "Write a number and a unit"),
        (parse_seconds, "-5ms", "Write a number and a unit"),
        (parse_seconds, "", "Write a number and a unit"),
        (parse_seconds, "1e999s", "must be finite"),
        (parse_rate, "1", "it has no unit"),
        (parse_rate, "1gb/s", "it may be in bits or in bytes"),
        (parse_rate, "1GBps", "it may be in bits or in bytes"),
        (parse_rate, "1gb/S", "it may be in bits or in bytes"),
        (parse_rate, "1GBPS", "it may be in bits or in bytes"),
        (parse_rate, "0gbit", "above zero and finite"),
        (parse_rate, "10ms", "'ms' is no unit of it"),
    ],
)
def test_invalid_quantities_are_refused_with_the_valid_form(parse, text: str, message: str) -> None:
    with pytest.raises(ValueError, match="is not a") as caught:
        parse(text)
    assert message in str(caught.value)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.234, "1.23 s"),
        (5e-3, "5 ms"),
        (5e-5, "50 us"),
        (3e-9, "3 ns"),
        (0, "0 s"),
        (12345, "12,345 s"),
        (0.9999, "1 s"),
        (999.6, "1,000 s"),
        (9.999e-7, "1 us"),
    ],
)
def test_seconds_are_written_with_three_figures(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
    assert format_seconds(math.inf) == "never"


@pytest.mark.parametrize(
    ("rate", "text"),
    [(1.25e8, "1 Gbit/s"), (2.3e10, "184 Gbit/s"), (125.0, "1 kbit/s"), (1e-1, "0.8 bit/s"), (1.24999e8, "1 Gbit/s")],
)
def test_rates_are_written_in_bits(rate: float, text: str) -> None:
    assert format_rate(rate) == text
    assert format_rate(math.inf) == "no limit"


@given(st.floats(1e-6, 900.0))
def test_formatted_values_can_be_parsed(seconds: float) -> None:
    assert parse_seconds(format_seconds(seconds)) == pytest.approx(seconds, rel=6e-3)


@given(st.floats(1e3, 1e13))
def test_formatted_rates_can_be_parsed(rate: float) -> None:
    assert parse_rate(format_rate(rate).replace(",", "")) == pytest.approx(rate, rel=6e-3)
