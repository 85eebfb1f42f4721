#!/usr/bin/env python3
"""Writes docs/environment.md, the reference of the environment variables, from the table in ``shoal.config``.

    PYTHONPATH=src python tools/environment_page.py

``tests/test_reference_pages.py`` checks that the page is current.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from shoal import config

PAGE = Path(__file__).parents[1] / "docs" / "environment.md"
HEAD = """\
# Environment variables

<!-- Written by tools/environment_page.py. -->

`shoal.init()` and the launchers read these variables. An empty variable counts as unset. `shoal doctor` prints the
variables that are set. It and `shoal.init()` warn about a misspelled name.

The variables of a job must have the same value on all agents, except for addresses, ports, folders and the variables
that launchers set. `shoal.init()` raises [`Mismatch`](troubleshooting.md#mismatch) if agents differ in `SHOAL_ON_LOSS`,
`SHOAL_ON_PARTITION`, `SHOAL_AGENTS_PER_MACHINE`, `SHOAL_TLS` or `SHOAL_TRANSPORT=process-group`.
"""
OF_LAUNCHERS = "`shoal run` sets these for its agents. Set them only if you write a launcher."
TAIL = """\
Rank, number of agents and address come from the variables of the launcher: `RANK`, `WORLD_SIZE`, `LOCAL_RANK`,
`MASTER_ADDR` and `MASTER_PORT` (torchrun and `shoal run`), or those of Open MPI, PMI, Slurm and Kubernetes
([rendezvous](rendezvous.md#rendezvous-address)).
"""
BUILD = config.Variable(
    "SHOAL_BUILD_NATIVE",
    config.TENSORS,
    "`0` or `1`",
    "compile if there is a compiler",
    "At installation: `0` compiles no kernels, `1` makes a missing compiler an error.",
    str,
)
"""``hatch_build.py`` reads it, before there is a package."""


def page() -> str:
    """The Markdown of the page."""
    variables = [*config.VARIABLES, BUILD]
    sections = list(dict.fromkeys(variable.section for variable in variables))
    return "\n".join([HEAD, *(line for one in sections for line in _section(one, variables)), TAIL])


def _section(section: str, variables: Sequence[config.Variable]) -> Iterator[str]:
    yield f"## {section}\n"
    is_launchers = section == config.LAUNCHERS
    columns = ["variable", "value", *([] if is_launchers else ["default"]), "effect"]
    if is_launchers:
        yield f"{OF_LAUNCHERS}\n"
    yield f"| {' | '.join(columns)} |"
    yield f"| {' | '.join('---' for _ in columns)} |"
    for one in variables:
        if one.section == section:
            cells = [f"`{one.name}`", one.values, *([] if is_launchers else [one.default]), one.effect]
            yield f"| {' | '.join(cells)} |"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(page())
