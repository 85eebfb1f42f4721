"""``group=``: who calls an operation, if not all agents do.

Calls of a group are matched among its members alone, so groups that share members, and calls of all, do not meet even
under one name. Who is no member calls nothing, and need not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias
from zlib import crc32

import torch.distributed as dist

from ..runtime.agent import Agent
from ..topology._validate import as_int
from .arguments import channel_name

Group: TypeAlias = "Sequence[int] | dist.ProcessGroup"
"""Ranks, in any order, or a process group of ``torch.distributed`` whose processes have the ranks that agents have."""
_LISTED = 8
"""Ranks that the name of a group's calls lists."""


@dataclass(frozen=True, slots=True)
class CallerGroup:
    """Who calls an operation.

    Attributes:
        ranks: Ascending; None for all agents.
    """

    ranks: tuple[int, ...] | None = None

    def channel(self, op: str, name: str | None) -> str:
        """What a call is matched by."""
        channel = channel_name(op, name)
        return channel if self.ranks is None else f"{channel} of {_told(self.ranks)}"

    def check(self, op: str, argument: str, ranks: Iterable[int]) -> None:
        """ValueError for ranks that are not of it."""
        beyond = [] if self.ranks is None else [rank for rank in ranks if rank not in self.ranks]
        if beyond:
            raise ValueError(f"{op}: {argument} names ranks {beyond}, and its group is ranks {list(self.ranks or ())}")

    def rest(self, size: int) -> tuple[int, ...]:
        """Those of ``size`` agents that do not call it."""
        return () if self.ranks is None else tuple(rank for rank in range(size) if rank not in self.ranks)


ALL = CallerGroup()


def caller_group(op: str, group: Group | None, agent: Agent) -> CallerGroup:
    """Who calls an operation, by its ``group`` argument.

    Raises:
        TypeError, ValueError: It names what is no rank, or not this agent; or processes have other ranks than agents.
    """
    if group is None:
        return ALL
    if dist.is_available() and isinstance(group, dist.ProcessGroup):
        ranks = dist.get_process_group_ranks(group)
        if dist.get_rank() != agent.rank or dist.get_world_size() != agent.size:
            raise ValueError(
                f"{op}: the process that is rank {dist.get_rank()} of {dist.get_world_size()} in torch.distributed is "
                f"rank {agent.rank} of {agent.size} here, so what its groups say is of others; give a list of ranks"
            )
    elif isinstance(group, (str, bytes)) or not isinstance(group, Iterable):
        raise TypeError(f"{op}: group must be a list of ranks or a process group, not {group!r}")
    else:
        ranks = [as_int(one, "group") for one in group]
    beyond = sorted(rank for rank in ranks if not 0 <= rank < agent.size)
    if beyond or len(set(ranks)) != len(ranks):
        what = f"ranks {beyond}, of {agent.size} agents" if beyond else "a rank twice"
        raise ValueError(f"{op} on rank {agent.rank}: group names {what}: {list(ranks)}")
    if agent.rank not in ranks:
        raise ValueError(
            f"{op} on rank {agent.rank}: group is ranks {sorted(ranks)}, and this agent, which is none of them, must "
            "not call it"
        )
    return ALL if len(ranks) == agent.size else CallerGroup(tuple(sorted(ranks)))


def _told(ranks: tuple[int, ...]) -> str:
    if len(ranks) <= _LISTED:
        return f"ranks {', '.join(map(str, ranks))}"
    return f"{len(ranks)} ranks ({crc32(repr(ranks).encode()):08x})"
