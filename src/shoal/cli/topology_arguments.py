"""The command-line arguments of ``shoal topology``, and the errors for invalid ones."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def count(text: str) -> int:
    """A number of agents, of machines, of rounds: 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of them: write 1 or more")
    return int(text)


def above_zero(text: str) -> float:
    """Any finite number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above zero")
    return value


def zero_or_more(text: str) -> float:
    """Any finite number that is not below zero."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, zero or more")
    return value


def quantity(parse: Callable[[str], T]) -> Callable[[str], T]:
    """The parser of a unit with its own words in argparse's message, which has none for a ``ValueError``."""

    def checked(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked


def refuse_negatives_by_value(parser: argparse.ArgumentParser) -> None:
    """Refuse ``--latency -5ms`` as a negative value: argparse treats ``-5ms`` as an option, and ``-5`` as a number.

    From Python 3.14 on argparse itself treats both as numbers.
    """
    parser._negative_number_matcher = re.compile(r"-\.?\d")
