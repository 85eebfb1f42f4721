"""Topologies as text: requirements, costs, properties, rounds and matrices.

The command ``shoal topology`` prints these, and the page of all topologies is made of them. The
types of its arguments are here too, with the errors for invalid ones.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from fractions import Fraction
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from ..topology.analysis.overview import Analysis
from ..topology.families.catalog import CATALOG, Topology
from ..topology.schedule import Schedule

Option = int | float | str
Rows = list[tuple[str, str]]

LARGEST_MATRIX = 12
_SIZES_TRIED = 64
_LARGEST_DENOMINATOR = 999
_WIDTH_IN_FILE = 132


def lookup(name: str) -> Topology:
    """The topology of this name, written with hyphens or underscores.

    Raises:
        ValueError: there is none; the message names similar ones.
    """
    plain = name.lower().replace("_", "-")
    if plain in CATALOG:
        return CATALOG[plain]
    near = [known for known in CATALOG if plain in known] or get_close_matches(plain, CATALOG, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(f"there is no topology {name!r}. {hint}shoal topology list shows all.")


def options_of(topology: Topology) -> dict[str, object]:
    """The options of its `make` with their defaults, besides the numbers of agents and of agents on a machine."""
    return {name: default for name, default in topology.options.items() if name != "agents_per_machine"}


def build(
    topology: Topology, size: int, agents_per_machine: int | None, options: Mapping[str, Option]
) -> tuple[Schedule, int]:
    """The topology for `size` agents, and the number of agents on a machine.

    A topology with machines of its own gets the given number, or the accepted one closest to the square root of `size`.
    For other topologies, one agent a machine is assumed by default.

    Raises:
        ValueError: an option that it does not have, or a number of agents that it refuses, with its reason.
    """
    known = options_of(topology)
    foreign = [name for name in options if name not in known]
    if foreign:
        accepted = f"It has {', '.join(known)}." if known else "It has no options."
        raise ValueError(f"{topology.name} has no option {foreign[0]!r}. {accepted}")
    if not topology.agents_per_machine:
        return topology.schedule(size, **options), agents_per_machine or 1  # type: ignore[arg-type]
    if agents_per_machine is not None:
        schedule = topology.schedule(size, agents_per_machine=agents_per_machine, **options)  # type: ignore[arg-type]
        return schedule, agents_per_machine
    divisors = [local for local in range(1, size + 1) if size % local == 0]
    divisors.sort(key=lambda local: max(local * local, size) / min(local * local, size))
    refused: ValueError | None = None
    for local in divisors:
        try:
            return topology.schedule(size, agents_per_machine=local, **options), local  # type: ignore[arg-type]
        except ValueError as error:
            refused = refused or error
    raise refused or ValueError(f"size must be at least 1, got {size}.")


def sizes(topology: Topology) -> str:
    """For how many agents it can be made."""
    reasons = {size: topology.refuses(size) for size in range(1, _SIZES_TRIED + 1)}
    accepted = [size for size, reason in reasons.items() if not reason]
    if len(accepted) == len(reasons):
        return "any number of agents"
    if accepted == list(range(accepted[0], _SIZES_TRIED + 1)):
        return f"{accepted[0]} agents or more"
    if len(accepted) > _SIZES_TRIED // 2:
        refused = [size for size, reason in reasons.items() if reason]
        return f"any number of agents but {_sequence(refused)}"
    return f"{_sequence(accepted)} agents"


def needs(topology: Topology) -> str:
    """The requirements for its use, as a sentence without a full stop."""
    wanted = [sizes(topology)]
    if topology.agents_per_machine:
        wanted.append("the same number on every machine")
    if "seed" in options_of(topology):
        wanted.append("the same seed on every agent")
    return ", ".join(wanted)


def preserves(topology: Topology) -> str:
    """A short description of the guarantees of its weights in every round."""
    if topology.symmetric:
        return "symmetric, doubly stochastic" if topology.doubly else "symmetric"
    return "directed, doubly stochastic" if topology.doubly else "directed, rows sum to one"


def repeats(period: int | None) -> str:
    """The number of rounds after which a schedule repeats."""
    if period is None:
        return "never repeats"
    return "static" if period == 1 else f"{period} rounds"


def costs(analysis: Analysis) -> Rows:
    """The costs of a round, as labels and figures."""
    traffic = analysis.traffic
    busiest = format_figure(traffic.busiest_messages)
    if traffic.most_messages > traffic.busiest_messages + 1e-9:
        busiest += f", at most {traffic.most_messages}"
    rows = [
        ("messages a round, busiest agent", busiest),
        ("partners a round, busiest agent", format_figure(traffic.busiest_handshakes)),
        ("messages a round, all agents", format_figure(traffic.messages)),
    ]
    if analysis.agents_per_machine > 1:
        rows.append(("agents that share a NIC at once", str(traffic.most_senders_on_a_nic)))
    return rows


def gives(analysis: Analysis) -> Rows:
    """The quality of its averaging, as labels and figures."""
    over = "" if analysis.gap_rounds == 1 else f" over {analysis.gap_rounds} rounds"
    smallest = analysis.smallest_eigenvalue
    return [
        ("exact average after", exact(analysis)),
        (f"rounds to a consensus error of {analysis.error:g}", str(analysis.rounds)),
        ("spectral gap", f"{analysis.gap}{over}"),
        ("smallest eigenvalue", "" if smallest is None else str(smallest)),
        ("average age, in rounds", str(analysis.age)),
    ]


def exact(analysis: Analysis) -> str:
    """The number of rounds after which every agent holds the exact average."""
    length = analysis.exact_length
    return "never" if length is None else f"{length} round{'s' if length != 1 else ''}"


def round_text(schedule: Schedule, round: int, most: int = 32) -> str:
    """The edges of a round: ``0-1`` for an exchange, ``0>1`` for a one-way message, the first `most` of them."""
    edges = schedule.edges(round)
    pairs = {
        (int(source), int(destination))
        for source, destination in zip(edges.source, edges.destination, strict=True)
        if source != destination
    }
    found = [
        f"{source}-{destination}" if (destination, source) in pairs else f"{source}>{destination}"
        for source, destination in sorted(pairs)
        if source < destination or (destination, source) not in pairs
    ]
    more = f" ... and {len(found) - most} more" if len(found) > most else ""
    return " ".join(found[:most]) + more if found else "nobody"


def matrix_text(matrix: NDArray[np.float64]) -> list[str]:
    """The rows of a mixing matrix, entries as fractions where they are ones, a dot for zero."""
    cells = [[_entry(float(value)) for value in row] for row in matrix]
    width = max(len(cell) for row in cells for cell in row)
    return [" ".join(cell.rjust(width) for cell in row) for row in cells]


def without_infinity(value: object) -> object:
    """The same for JSON, which has no infinity: None replaces it."""
    if isinstance(value, dict):
        return {name: without_infinity(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_infinity(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def format_figure(value: float) -> str:
    """Three digits, or all of a whole number."""
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e9 else f"{value:.3g}"


def _entry(value: float) -> str:
    if value == 0.0:
        return "."
    near = Fraction(value).limit_denominator(_LARGEST_DENOMINATOR)
    return str(near) if abs(float(near) - value) < 1e-12 else f"{value:.3f}"


def _sequence(numbers: Iterable[int]) -> str:
    listed = list(numbers)
    return ", ".join(map(str, listed[:8])) + (", ..." if len(listed) > 8 else "")


T = TypeVar("T")


def count(text: str) -> int:
    """A number of agents, of machines, of rounds: 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of them: write 1 or more")
    return int(text)


def above_zero(text: str) -> float:
    """Any finite number above zero."""
    value = _finite(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above zero")
    return value


def zero_or_more(text: str) -> float:
    """Any finite number that is not below zero."""
    value = _finite(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, zero or more")
    return value


def _finite(text: str) -> float:
    """The number that a text is; not a number if it is none, or infinite."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def quantity(parse: Callable[[str], T]) -> Callable[[str], T]:
    """The parser of a unit with its own words in argparse's message, which has none for a ``ValueError``."""

    def checked(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked


def console() -> Console:
    """The standard output. A file has no width, and rich would take it for 80 columns."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH_IN_FILE, highlight=False)


def refuse_negatives_by_value(parser: argparse.ArgumentParser) -> None:
    """Refuse ``--latency -5ms`` as a negative value: argparse treats ``-5ms`` as an option, and ``-5`` as a number.

    From Python 3.14 on argparse itself treats both as numbers.
    """
    parser._negative_number_matcher = re.compile(r"-\.?\d")
