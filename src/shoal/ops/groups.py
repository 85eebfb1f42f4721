"""``group=``: the callers of an operation, if not all agents.

Calls of a group are matched among its members alone. So they do not match calls of other groups that share members, or
calls of all agents, even under the same name. Agents outside the group make no call, and need not know of it.
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
"""Ranks, in any order, or a process group of ``torch.distributed`` whose ranks are the agents' ranks."""
_LISTED = 8
"""Ranks that the name of a group's calls lists."""


@dataclass(frozen=True, slots=True)
class CallerGroup:
    """The callers of an operation.

    Attributes:
        ranks: Ascending; None for all agents.
    """

    ranks: tuple[int, ...] | None = None

    def channel(self, op: str, name: str | None) -> str:
        """The key that matches a call."""
        channel = channel_name(op, name)
        return channel if self.ranks is None else f"{channel} of {_as_text(self.ranks)}"

    def check(self, op: str, argument: str, ranks: Iterable[int]) -> None:
        """ValueError for ranks that are not of it."""
        beyond = [] if self.ranks is None else [rank for rank in ranks if rank not in self.ranks]
        if beyond:
            raise ValueError(f"{op}: {argument} names ranks {beyond}, and its group is ranks {list(self.ranks or ())}")

    def rest(self, size: int) -> tuple[int, ...]:
        """The ranks of ``size`` agents that do not call it."""
        return () if self.ranks is None else tuple(rank for rank in range(size) if rank not in self.ranks)


ALL = CallerGroup()


def caller_group(op: str, group: Group | None, agent: Agent) -> CallerGroup:
    """The callers of an operation, from its ``group`` argument.

    Raises:
        TypeError, ValueError: It has an invalid rank, or lacks this agent; or ranks of processes differ from ranks of
            agents.
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


def _as_text(ranks: tuple[int, ...]) -> str:
    if len(ranks) <= _LISTED:
        return f"ranks {', '.join(map(str, ranks))}"
    return f"{len(ranks)} ranks ({crc32(repr(ranks).encode()):08x})"
