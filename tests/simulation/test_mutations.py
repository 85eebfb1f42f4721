"""The mutations that the simulated fleet is tried with: each is of a line that is there."""

from __future__ import annotations

from pathlib import Path

import pytest

import shoal
from support.simulation.mutations import MUTATIONS

PACKAGE = Path(shoal.__file__).parent


@pytest.mark.parametrize("place", range(len(MUTATIONS)))
def test_the_text_of_a_mutation_is_in_its_module(place: int) -> None:
    _, name, old, new = MUTATIONS[place]
    assert old != new and old in (PACKAGE / name).read_text(), f"{place}: {name} has no {old!r}"
