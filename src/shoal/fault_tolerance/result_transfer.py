"""Transfers results after a loss: agents on which a collective operation has ended send its result to the others."""

from __future__ import annotations

from functools import partial

import torch

from ..operations.control_messages import ControlMessages, when_arrived
from ..operations.lifecycle import Lifecycle
from ..operations.matching import Matcher
from ..operations.membership import Membership
from ..operations.services import MinimalService
from ..transport.wire import Kind, Message
from .recovery import take_result
from .result_cache import ResultCache

RESULT = "~result"


class ResultTransfer(MinimalService):
    """The result transfer of one agent. Used under the engine's lock.

    Args:
        control: The control messages of this agent.
    """

    def __init__(
        self,
        matcher: Matcher,
        membership: Membership,
        lifecycle: Lifecycle,
        result_cache: ResultCache,
        control: ControlMessages,
    ) -> None:
        self._matcher = matcher
        self._membership = membership
        self._lifecycle = lifecycle
        self._result_cache = result_cache
        self._control = control

    def send(self, rank: int, name: str, round_: int) -> None:
        """Send an agent a cached result."""
        result = self._result_cache.results[name, round_].result
        self._control.send_tensor(rank, Message(Kind.DATA, RESULT, f"{RESULT} {name}", round_), result)

    def serve(self, source: int, message: Message) -> None:
        """Take a result that another agent sends; see :class:`~.services.Service`."""
        when_arrived(message, partial(self._take, source, message))

    def _take(self, source: int, message: Message, data: torch.Tensor) -> None:
        result = data.clone().view(message.shape)
        self._control.acknowledge(source, message)
        operation = self._matcher.active(message.name.removeprefix(f"{RESULT} "), message.round)
        if operation is not None and operation.restarts and source in self._membership.view.alive:
            take_result(self._lifecycle, operation, result)
