"""The order in which the numbers of agents are reduced: by rank, or by rank on each machine and then by machine.

The order decides the last bits. So it depends only on the participants and their machines: not on the size of a tensor,
on the tensors fused with it, or on the transport.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..arithmetic import HALF
from ..runtime.agent import Agent


def machines_among(agent: Agent, group: Sequence[int], dtype: torch.dtype) -> Sequence[Sequence[int]]:
    """The ranks of a group by machine, if the numbers of each machine are reduced separately first; else empty.

    Never for 16-bit numbers: sending a machine's sum would round them a second time.
    """
    return agent.grouping.equal_parts(group) if agent.grouping is not None and dtype not in HALF else ()


def places_by_machine(agent: Agent, group: Sequence[int], dtype: torch.dtype) -> Sequence[Sequence[int]]:
    """The result of :func:`machines_among`, as indices of the group."""
    return [[group.index(rank) for rank in ranks] for ranks in machines_among(agent, group, dtype)]
