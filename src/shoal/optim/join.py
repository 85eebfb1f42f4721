"""Agents with different numbers of batches: an agent without batches takes part until no agent has one.

In a round an agent without batches exchanges its unchanged parameters, so its neighbours' averages keep their weights,
and its own model moves towards theirs. If gradients are averaged it does not count: the mean is over the agents that
have batches, and all take the step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from ..operations.operation import Handle
from ..ops.collective import allreduce_nonblocking
from ..runtime.agent import current
from .exchanges.bucket_exchange import BucketExchange
from .strategies import StepStrategy

_PAUSE_SECONDS = 0.002
"""Seconds between two rounds of an agent that only forwards received data."""
_in_loop: ContextVar[bool] = ContextVar("in_loop", default=False)
"""An optimizer of this thread has joined its loop."""


class Join:
    """Counts the remaining agents, by one small all-reduce that overlaps each round.

    Args:
        bucket_exchange: The parameters.
        strategy: The steps of a round.
        name: Matches the counts of different agents.

    Attributes:
        active: This agent is inside :meth:`loop`, and there are others.
    """

    def __init__(self, bucket_exchange: BucketExchange, strategy: StepStrategy, name: str) -> None:
        self._bucket_exchange, self._strategy, self._name = bucket_exchange, strategy, name
        self.active = False

    @contextmanager
    def loop(self) -> Iterator[None]:
        """Around a loop over this agent's batches; behind it the agent takes part without batches.

        Raises:
            ValueError: Another optimizer has joined the loop, or agents without batches could not take part.
            RuntimeError: The loop was left between a forward pass and its step.
        """
        if _in_loop.get():
            raise ValueError(
                "join() inside another optimizer's join(): agents without batches would wait in one while the others "
                "wait in the other. Deal out equally many batches (shoal.AgentSampler), or let one optimizer have all "
                "models"
            )
        alone = current("optimizer.join").size == 1
        if not alone:
            self._strategy.check_that_it_can_follow()
            with torch.no_grad():
                self._bucket_exchange.prepare()
        self.active = not alone
        token = _in_loop.set(True)
        try:
            yield
            if not alone:
                with torch.no_grad():
                    self._follow()
        finally:
            _in_loop.reset(token)
            self.active = False

    @contextmanager
    def round(self, due: bool) -> Iterator[None]:
        """Around a round of an agent that has batches; ``due``: there is an exchange in it."""
        if not self.active or not due or not self._bucket_exchange.in_step:
            yield
            return
        by_hand = self._bucket_exchange.settings.by_hand
        if by_hand:
            raise ValueError(
                f"{self._name}: join() cannot go on with weights that are set for each round ({', '.join(by_hand)}) "
                "when the batches have ended; give the schedule as topology="
            )
        present = self._bucket_exchange.present = self._count(1.0)
        try:
            yield
            present.wait()
        finally:
            self._bucket_exchange.present = None

    def _follow(self) -> None:
        """Take part without batches until no agent has any."""
        if self._bucket_exchange.under_way:
            raise RuntimeError(
                f"{self._name}: the batches ended between a forward pass and step(), with an exchange under way; leave "
                "the loop after step()"
            )
        if not self._bucket_exchange.in_step:
            self._follow_through_windows()
            return
        while True:
            present = self._bucket_exchange.present = self._count(0.0)
            if present.wait()[0] == 0:
                break
            self._strategy.follow()
            self._bucket_exchange.equalize()
        self._bucket_exchange.present = None

    def _follow_through_windows(self) -> None:
        ended = self._count(1.0)
        while not ended.poll():
            self._strategy.follow()
            self._bucket_exchange.equalize()
            time.sleep(_PAUSE_SECONDS)
        ended.wait()
        self._bucket_exchange.settle()

    def _count(self, present: float) -> Handle[torch.Tensor]:
        # Present agents are counted too, or agents that learn of a loss at different moments would not stay equal.
        return allreduce_nonblocking(torch.tensor([present, 1.0]), average=False, name=f"{self._name}.present")
