"""Keeps which tensors each call of several tensors has on this agent, so that an error can name the first difference.

Agents compare digests of their lists. Only agents whose call has failed request the lists from each other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch

from .. import clock
from .._signals import deferred
from ..transport.messages import Kind, Message
from .control_messages import Service
from .matching import Key
from .membership import Membership
from .operation import Operation
from .progress import Progress
from .sender import Sender

TENSORS = "~tensors"
"""The prefix of a request for a list, and of its answer, before the name of the failed call. Both have its round."""
_REQUEST, _ANSWER = "request", "answer"
KEPT = 128
"""The number of calls whose lists are kept, failed or not: a call may fail later on another agent."""
ANSWER_WITHIN = 1.0
"""Seconds that an error waits for the lists of other agents."""
_LONGEST = 200
"""Characters of another agent's tensor that are shown at most."""

Layout = Sequence[tuple[tuple[int, ...], torch.dtype] | str]
"""Shapes and dtypes, in the order of the call; a dimension of -1 may have any size. A string is the caller's
description of a tensor."""


class LayoutExchange(Service):
    """The tensor lists of one agent, and the lists that other agents have sent."""

    def __init__(self, rank: int, membership: Membership, sender: Sender, progress: Progress) -> None:
        self._rank, self._membership, self._sender, self._progress = rank, membership, sender, progress
        self._kept: OrderedDict[Key, Layout] = OrderedDict()
        self._asked_early: OrderedDict[tuple[int, Key], None] = OrderedDict()  # by rank and call, without a list yet
        self._answers: dict[tuple[int, Key], str | None] = {}  # by rank and call
        self._answered: OrderedDict[tuple[int, Key], None] = OrderedDict()

    def keep(self, operation: Operation, layout: Layout) -> None:
        """Keep the list of a call of several tensors that begins."""
        key = operation.name, operation.round
        with deferred, self._progress.lock:
            self._kept[key] = layout
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            for question in [request for request in self._asked_early if request[1] == key]:
                del self._asked_early[question]
                self._answer(question[0], key, layout)

    def difference(self, operation: Operation, layout: Layout, ranks: Sequence[int]) -> str:
        """A description of the first tensor in which one of ``ranks`` differs from this agent; empty if none is known.

        Waits for their answers, for up to a second.
        """
        mine = described(layout)
        for rank, theirs in self.others(operation, ranks).items():
            if theirs != mine:
                return _first_difference(self._rank, mine, rank, theirs)
        return ""

    def others(self, operation: Operation, ranks: Sequence[int], *, mutual: bool = False) -> dict[int, list[str]]:
        """The described lists of those other agents that answer within a second, by rank.

        ``mutual``: also wait, within this second, until they have requested this agent's list, because this agent may
        end soon after its error.
        """
        key = operation.name, operation.round
        with deferred, self._progress.lock:
            alive = self._membership.view.alive
            asked = {(rank, key) for rank in ranks if rank != self._rank and rank in alive}
            # A driving thread, as in a callback, cannot wait for answers: it is the one that would have to receive
            # them.
            if not asked or self._progress.is_driving or self._progress.stopped:
                return {}
            self._answers.update(dict.fromkeys(asked))
            for rank, key in sorted(asked):
                self._send(rank, _REQUEST, key)
        limit = clock.monotonic() + ANSWER_WITHIN
        self._progress.drive_until(
            lambda: all(
                self._answers.get(question) is not None and (question in self._answered or not mutual)
                for question in asked
            ),
            limit,
        )
        with deferred, self._progress.lock:
            answers = {rank: self._answers.pop((rank, key), None) for rank, key in sorted(asked)}
        return {
            rank: [line[:_LONGEST] for line in answer.split("\n")] if answer else []
            for rank, answer in answers.items()
            if answer is not None
        }

    # Messages of other agents. Under the engine's lock.

    def serve(self, source: int, message: Message) -> None:
        """Take an agent's answer, or send it the list of this agent's call, once that is known."""
        key = message.name.removeprefix(f"{TENSORS} "), message.round
        if message.op == _ANSWER:
            # Only requested answers are stored; others would remain in memory for good.
            if (source, key) in self._answers:
                self._answers[source, key] = str(message.body, errors="replace")
            return
        layout = self._kept.get(key)
        if layout is not None:
            self._answer(source, key, layout)
            return
        self._asked_early[source, key] = None  # the calling thread may be about to keep it
        # Bounded, because a peer may name any number of calls that this agent never makes.
        if len(self._asked_early) > KEPT:
            self._asked_early.popitem(last=False)

    def _answer(self, source: int, key: Key, layout: Layout) -> None:
        self._send(source, _ANSWER, key, "\n".join(described(layout)).encode(errors="replace"))
        self._answered[source, key] = None
        if len(self._answered) > KEPT:
            self._answered.popitem(last=False)

    def _send(self, rank: int, op: str, key: Key, body: bytes = b"") -> None:
        message = Message(Kind.CONTROL, op, f"{TENSORS} {key[0]}", key[1], shape=(len(body),))
        self._sender.send_bytes([rank], message, body, background=True)


def described(layout: Layout) -> list[str]:
    """A description of each tensor."""
    return [
        item
        if isinstance(item, str)
        else f"[{', '.join('*' if size < 0 else str(size) for size in item[0])}] {str(item[1]).removeprefix('torch.')}"
        for item in layout
    ]


def _first_difference(here: int, mine: list[str], there: int, theirs: list[str]) -> str:
    at = next((at for at, (own, other) in enumerate(zip(mine, theirs, strict=False)) if own != other), None)
    many = len(theirs), len(mine)
    counts = f"; there are {many[0]} on rank {there} and {many[1]} on rank {here}" if len(set(many)) == 2 else ""
    if at is not None:
        return f"tensors[{at}] is {theirs[at]} on rank {there} and {mine[at]} on rank {here}{counts}"
    at = min(len(mine), len(theirs))
    longer, rank = (mine, here) if len(mine) > at else (theirs, there)
    return f"tensors[{at}], {longer[at]}, is on rank {rank} alone{counts}"
