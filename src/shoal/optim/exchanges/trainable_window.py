"""Whether neighbours that exchange through windows have the same trainable parameters.

Agents that exchange in step see it in the messages of a round (``params.py``). Exchanges through windows do not wait
for other agents, so each agent declares a change to its out-neighbours, in a small window of its own. A declaration
gives the first round with other trainable parameters. A receiver compares it with its own set of the same round, once
it has begun a later one. Until then the receiver may still make the same change.

An agent that finds a difference notifies its own out-neighbours before it raises, so that they raise the same error.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...errors import DeadlineExceeded, Mismatch
from ...runtime.agent import current
from ...windows import by_name as ops
from ...windows.registry import windows_of
from ...windows.window import named
from ..params import difference_text

_ROUNDS = 64
"""The number of its own changes that an agent remembers."""
_LOOK_AGAIN = 0.001
"""Seconds between two looks of an agent that waits for its neighbours' declarations."""

Round = tuple[int, int]
"""How often all have met, and the round since then. Both are the same for all agents in the same round."""


class _Declared(NamedTuple):
    """A declaration of an agent: its set of trainable parameters from a round on, or a difference that it has found."""

    round: Round
    different: int
    """The number of a parameter that differs, plus one; 0: none."""
    frozen_on: int
    trainable_on: int
    trainable: bytes

    def as_tensor(self) -> torch.Tensor:
        head = [*self.round, self.different, self.frozen_on, self.trainable_on]
        return torch.tensor([*head, *self.trainable], dtype=torch.float64, device="cpu")

    @classmethod
    def of(cls, theirs: torch.Tensor) -> _Declared:
        era, number, different, frozen, trainable, *flags = map(int, theirs.tolist())
        return cls((era, number), different, frozen, trainable, bytes(flags))


class TrainableWindow:
    """The declarations of one agent. All neighbours make it together.

    Args:
        name: The name of the window.
        optimizer: The name of the exchange in errors.
        names: The names of all parameters.
        trainable: A byte for each of them, 1 where it is trainable; all agents have agreed on it.
    """

    def __init__(self, name: str, optimizer: str, names: Sequence[str], trainable: bytes) -> None:
        self._name, self._optimizer, self._names = name, optimizer, names
        self._era = 0
        # Era -1 is before every round, so a neighbour's set of any round finds one of this agent's to compare with.
        self._own: deque[tuple[Round, bytes]] = deque([((-1, 0), trainable)], _ROUNDS)
        self._declared = trainable
        self._theirs: dict[int, _Declared] = {}
        self._puts: dict[int, int] = {}
        ops.win_create(torch.zeros(5 + len(trainable), dtype=torch.float64, device="cpu"), name, zero_init=True)

    def all_have_met(self) -> None:
        """The rounds of all agents are counted from 0 again."""
        # Agents have made different numbers of rounds. Only from a common meeting on does a round's number mean the
        # same on all of them.
        self._era += 1

    def begin(self, number: int, trainable: bytes) -> None:
        """A round begins with these parameters: declare it if they have changed, and look at the neighbours'.

        Raises:
            Mismatch: A neighbour has other trainable parameters in the same round.
        """
        # Declared before this agent looks: if two agents differ, both then detect it, whichever is ahead.
        self._declare((self._era, number), trainable)
        self._look((self._era, number))

    def await_neighbours(self, number: int, trainable: bytes) -> None:
        """Declare that a round is to begin with these parameters, and wait until all in-neighbours declare the same.
        For a change that they have to make together, because it creates a window.

        Raises:
            Mismatch: A neighbour has continued without this change.
            DeadlineExceeded: A neighbour has not reached this round.
        """
        agent, now = current("optim"), (self._era, number)
        self._declare(now, trainable)
        deadline = time.monotonic() + agent.engine.timeout
        window, looks = windows_of(agent).get("win_update", self._name), 0
        while True:
            self._look(now)
            missing = [rank for rank in window.there(window.sources) if not self._has_arrived(rank, now, trainable)]
            if not missing:
                return
            looks += 1
            # Nothing arrives from a dead neighbour, and a slot reports no loss; without this the wait would last until
            # the deadline.
            if looks % 64 == 0:
                window.check_neighbours(self._optimizer)
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"{self._optimizer}: rank {agent.rank} has unfrozen parameters in its round {number}, and waited "
                    f"{agent.engine.timeout:g} s for ranks {missing} to do the same; they have not come to that round",
                    missing,
                )
            time.sleep(_LOOK_AGAIN)

    def free(self) -> None:
        if self._name in ops.get_current_created_window_names():
            ops.win_free(self._name)

    def _has_arrived(self, rank: int, now: Round, trainable: bytes) -> bool:
        theirs = self._theirs.get(rank)
        return theirs is not None and (theirs.round > now or (theirs.round == now and theirs.trainable == trainable))

    def _declare(self, now: Round, trainable: bytes) -> None:
        if trainable == self._declared:
            return
        self._declared = trainable
        # A second change in the same round replaces the first: neighbours compare the set with which the round is made.
        if self._own[-1][0] == now:
            self._own.pop()
        self._own.append((now, trainable))
        self._publish(_Declared(now, 0, 0, 0, trainable))

    def _publish(self, declared: _Declared) -> None:
        window = windows_of(current("optim")).get("win_put", self._name)
        to = window.there(window.destinations)
        if to:
            ops.win_put(declared.as_tensor(), self._name, dst_weights=to)

    def _look(self, now: Round) -> None:
        """Raise Mismatch if a neighbour's set of a round before ``now`` is another than that of this agent."""
        window = named(self._name)
        for rank, slot in window.slots().items():
            if slot.puts != self._puts.get(rank, 0):
                # Read before update(): a declaration that arrives in between is read twice, which does no harm. In the
                # other order it would be missed.
                self._puts[rank] = slot.puts
                self._theirs[rank] = theirs = _Declared.of(window.update(0, {rank: 1}, clone=True))
                if theirs.different:
                    self._raise(theirs)
            before = self._theirs.get(rank)
            if before is None or before.round >= now:
                continue  # this agent may still make the same change
            mine = self._own_in(before.round)
            if mine is not None and mine != before.trainable:
                # Reported once: a script that catches the error and repairs its flags would otherwise get it again in
                # each round.
                del self._theirs[rank]
                self._raise(self._difference(rank, before, mine))

    def _own_in(self, number: Round) -> bytes | None:
        """The trainable parameters here in a round; None if they are no longer stored."""
        return next((flags for since, flags in reversed(self._own) if since <= number), None)

    def _difference(self, rank: int, theirs: _Declared, mine: bytes) -> _Declared:
        me = current("optim").rank
        at = next(at for at, (own, their) in enumerate(zip(mine, theirs.trainable, strict=True)) if own != their)
        frozen, trainable = (rank, me) if mine[at] else (me, rank)
        return _Declared(theirs.round, at + 1, frozen, trainable, self._declared)

    def _raise(self, found: _Declared) -> None:
        self._publish(found._replace(trainable=self._declared))
        text = difference_text(self._names[found.different - 1], found.frozen_on, found.trainable_on)
        raise Mismatch(f"{self._optimizer}: {text}", (found.frozen_on, found.trainable_on))
