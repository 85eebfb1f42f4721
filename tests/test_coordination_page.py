"""docs/coordination.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from shoal.coordination.ordering import CAPACITY
from shoal.coordination.round import FAN_OUT, FLAT
from shoal.ops.backend_ops import GATHERED_BYTES
from shoal.transport.process_group import BACKENDS, CONNECT_SECONDS, MADE_HERE

PAGE = " ".join((Path(__file__).parents[1] / "docs" / "coordination.md").read_text().split())


def test_the_numbers_on_the_page_are_those_of_the_code() -> None:
    assert f"{CAPACITY:,} operations used last (`SHOAL_CACHE_CAPACITY`)" in PAGE
    assert (FAN_OUT, FLAT) == (8, 64) and "a tree with eight branches if there are more than 64 agents" in PAGE
    assert f"all-reduces of up to {GATHERED_BYTES >> 10} KiB from all others together" in PAGE
    assert CONNECT_SECONDS == 2 and "Gloo gives up after two seconds only" in PAGE


def test_the_page_names_all_backends_and_how_their_groups_are_created() -> None:
    rows = dict(re.findall(r"\| `(\w+)`(?: \(default\))? \| ([^|]*) \|", PAGE))
    assert set(rows) == set(BACKENDS)
    assert [name for name, description in rows.items() if description.startswith("Shoal makes")] == list(MADE_HERE)
