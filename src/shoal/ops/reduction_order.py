"""In which order the numbers of agents are reduced: by rank, or by rank on each machine and then by machine.

It decides about the last bits, so it looks at nothing but who takes part and where these are: not at the size of a
tensor, in what company it travels, or through what.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..arithmetic import HALF
from ..runtime.agent import Agent


def machines_among(agent: Agent, group: Sequence[int], dtype: torch.dtype) -> Sequence[Sequence[int]]:
    """The ranks of a group by machine, where the numbers of each machine are reduced by themselves first; else none.

    Not 16-bit numbers: where a machine's sum travels, they would be rounded once more.
    """
    return agent.grouping.equal_parts(group) if agent.grouping is not None and dtype not in HALF else ()


def places_by_machine(agent: Agent, group: Sequence[int], dtype: torch.dtype) -> Sequence[Sequence[int]]:
    """The same as places in the group."""
    return [[group.index(rank) for rank in ranks] for ranks in machines_among(agent, group, dtype)]
