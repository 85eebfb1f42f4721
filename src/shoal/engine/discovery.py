"""Who names me? Finds the partners of a round in which only one side of each edge knows of it.

Each agent names some others (those it pushes to, or those it pulls from), and learns which name it. Notices travel in
``ceil(log2 n)`` steps: in step k an agent passes on, to the agent 2^k ranks ahead, every notice whose way still has
that power of two in it (Bruck's all-to-all, with only the notices that exist). So an agent sends and receives
``ceil(log2 n)`` small messages whatever the graph, and every agent hears of every notice for it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable

import torch

from ..engine.engine import Engine
from ..engine.operation import Arrived, Exchange, Operation, Send
from ..errors import Mismatch


def discover(engine: Engine, operation: Operation, named: Iterable[int]) -> Generator[Exchange, Arrived, list[int]]:
    """The ranks that name this agent, ascending, given the ranks that it names. Mismatch for what cannot be."""
    rank, size = engine.rank, engine.size
    notices = [(rank, other) for other in named]
    step = 1
    while step < size:
        passing = [notice for notice in notices if (notice[1] - rank) % size & step]
        notices = [notice for notice in notices if not (notice[1] - rank) % size & step]
        pairs = torch.tensor(passing, dtype=torch.int32).view(-1)
        ahead, behind = (rank + step) % size, (rank - step) % size
        send = Send(ahead, engine.publisher.publish(operation, pairs), 0, pairs.numel(), tuple(pairs.shape))
        arrived = yield Exchange([send], [behind], torch.int32)
        message = arrived[behind]
        assert message.payload is not None
        flat = message.payload.data.tolist()
        # What this agent passes on, or answers, goes where these say.
        if len(flat) % 2 or not all(0 <= one < size for one in flat):
            raise Mismatch(f"{operation}: rank {behind} passed on what are no pairs of {size} ranks", (behind, rank))
        notices += list(zip(flat[::2], flat[1::2], strict=True))
        step *= 2
    found = sorted({origin for origin, other in notices if other == rank})
    if len(found) != len(notices):
        raise Mismatch(f"{operation}: one of the agents passed on notices twice, or for others than this one", (rank,))
    return found
