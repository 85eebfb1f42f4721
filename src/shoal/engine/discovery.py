"""Sender discovery: finds the senders or receivers of a round if only one side of each edge knows the edge.

Each agent names some other agents (destinations of a push, or sources of a pull), and learns which ranks name it.
Notices are passed on in ``ceil(log2 n)`` steps. In step k an agent sends to the agent 2^k ranks ahead every notice
whose remaining distance contains that power of two. This is Bruck's all-to-all, restricted to the notices that exist.
So an agent sends and receives ``ceil(log2 n)`` small messages for any graph, and every notice reaches its agent.

Without any named agents it is a barrier. :func:`submit_to_all` ends collective operations that survive losses with it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeVar

import torch

from ..errors import Mismatch
from ..execution.operation import FailurePolicy, FusionSpec, Handle, Operation
from ..execution.stage import Arrived, Exchange, Send, Steps
from ..fault_tolerance.recovery import copy_for_cache
from .engine import Engine

T = TypeVar("T")

_ALL_HAVE_IT = 128
"""The stage after those of any collective operation, in which agents confirm that they have its result."""


def discover(
    engine: Engine, operation: Operation, named: Iterable[int], first_stage: int | None = None
) -> Generator[Exchange, Arrived, list[int]]:
    """The ranks that name this agent, ascending, given the ranks that it names. Mismatch for impossible ranks.

    Only the agents of the operation's plan take part: distances count these, not all ranks. If agents reach it after
    different numbers of stages, ``first_stage`` is the number of the first stage.
    """
    gone, group = operation.excluded_ranks, operation.callers(engine.size)
    rank, size = group.index(engine.rank), len(group)
    notices = [
        (rank, group.index(other) if gone or operation.among is not None else other)
        for other in named
        if other not in gone
    ]
    step = 1
    while step < size:
        passing = [notice for notice in notices if (notice[1] - rank) % size & step]
        notices = [notice for notice in notices if not (notice[1] - rank) % size & step]
        pairs = torch.tensor(passing, dtype=torch.int32, device="cpu").view(-1)
        ahead, behind = group[(rank + step) % size], group[(rank - step) % size]
        send = Send(ahead, engine.publisher.publish(operation, pairs), 0, pairs.numel(), tuple(pairs.shape))
        stage = None if first_stage is None else first_stage + step.bit_length() - 1
        arrived = yield Exchange([send], [behind], torch.int32, coordinates=True, stage=stage)
        message = arrived[behind]
        assert message.payload is not None
        flat = message.payload.data.tolist()
        # These values decide where this agent sends later messages, so they are checked.
        if len(flat) % 2 or not all(0 <= other < size for other in flat):
            problem = f"rank {behind} forwarded notices that are no pairs of {size} ranks"
            raise Mismatch(f"{operation}: {problem}", (behind, engine.rank))
        notices += list(zip(flat[::2], flat[1::2], strict=True))
        step *= 2
    found = sorted({group[origin] for origin, other in notices if other == rank})
    if len(found) != len(notices):
        raise Mismatch(f"{operation}: an agent forwarded a notice twice, or to the wrong agent", (engine.rank,))
    return found


def submit_to_all(
    engine: Engine,
    op: str,
    name: str,
    steps: Callable[[Operation], Steps[T]] | FusionSpec,
    timeout: float | None = None,
    alone: bool = True,
    take: Callable[[torch.Tensor], T] | None = None,
    background: bool = False,
    among: Sequence[int] | None = None,
) -> Handle[T]:
    """Begin a collective operation, whose result is equal on all its callers; see :meth:`Engine.submit`.

    With ``on_loss="continue"`` it restarts among the survivors after a loss, unless it has ended on one of them. In
    that case the others take that agent's result. With ``take``, the result is sent after a loss; otherwise the
    operation ends only when all agents have it.

    Args:
        engine, op, name, steps, timeout, alone, background, among: See :meth:`Engine.submit`.
        take: Computes the result from another agent's tensor, which is empty if the result is None. Only for operations
            that no agent ends before all have begun; their result is that tensor, or None.
    """
    if isinstance(steps, FusionSpec):  # only if losses are not survived
        return engine.submit(op, name, steps, timeout, alone, background=background, among=among)

    def held_by_all(operation: Operation) -> Steps[T]:
        recovery = operation.recovery
        assert recovery is not None
        recovery.take = take
        result = yield from steps(operation)
        recovery.copy = copy_for_cache(result, engine.pool) if take is not None else None
        if recovery.copy is not None:
            return result
        # Nothing is kept to be sent after a loss. If one agent ended now, a loss could restart only the others.
        recovery.result = (result,)  # the other agents have still to confirm it
        yield from discover(engine, operation, (), _ALL_HAVE_IT)
        return result

    begins = held_by_all if engine.agreement.active else steps
    return engine.submit(
        op, name, begins, timeout, alone, on_loss=FailurePolicy.RETRY, background=background, among=among
    )
