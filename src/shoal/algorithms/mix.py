"""The communication of an algorithm: the few methods that its equation uses.

One text serves a fleet and an agent. In a stacked fleet ``x`` is ``[n, d]``, a row for each agent; in a real agent it
is ``[d]``. The last dimension is always the agent's own vector, so norms, sums and choices go along ``dim=-1``, and a
number that an agent has is ``[n, 1]`` or ``[1]``: it multiplies ``x`` either way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn

import torch

from ..compression import Compressor
from ..compression.random_numbers import HashStream, drawn
from ..ops.robust_rules import Robust
from .schedule_weights import Form

EVERYBODY = "all"
MACHINE = "machine"
COUNTERPARTS = "counterparts"


class Mix(ABC):
    """The exchange of one algorithm.

    Attributes:
        size: Number of agents.
        machines: Number of machines that they are on.
        round: The round of the topology, which selects W: the number of the step, or of the round if an algorithm has
            steps without exchanges between two rounds.
        step: The number of the step, which selects the random numbers.
        seed: The seed of the random numbers.
        sent: Bytes sent so far: by all agents of a stacked fleet, by this one in a real agent.
        exchanges: How often the algorithm has exchanged something; in a round it may do so several times.
        seconds: The simulated time of the steps on a network, if there is a model of one; else None.
        gradients: How many gradients each agent has taken, which is the number of its next batch.
        stacked: ``x`` has a row for each agent.
    """

    size: int
    machines: int
    stacked: ClassVar[bool] = False

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.round = self.step = 0
        self.sent = 0
        self.exchanges = self.gradients = 0
        self.seconds: float | None = None
        self._draws = 0

    @contextmanager
    def at_round(self, round_: int) -> Iterator[None]:
        """Exchange by the W of another round than that of the step, within the block."""
        before, self.round = self.round, round_
        try:
            yield
        finally:
            self.round = before

    def begin(self, step: int) -> bool:
        """Set the number of the next step, before it begins: the verbs then use the W of its round.

        Returns:
            Agents have been lost since the last step: :meth:`Algorithm.restart` comes first.
        """
        self.round = self.step = step
        self._draws = 0
        return False

    def end(self) -> None:  # noqa: B027 - only some mixes have something to do then
        """Called after each step."""

    # The next two are for loops, and not for equations.

    def follow(self, x: torch.Tensor, state: Any) -> None:  # noqa: B027 - only some topologies depend on values
        """Tell the values of the step that begins."""

    def kept(self, before: tuple[torch.Tensor, Any], after: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        """``x`` and the state after a step, from those before it and the step's result."""
        return after

    def __call__(
        self, x: torch.Tensor, *, nbytes: int | None = None, speaks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``W x`` with this round's W.

        Args:
            x: ``[n, d]`` or ``[d]``.
            nbytes: Bytes of an agent's message if it would be sent in a shorter form than ``x``, to be counted.
            speaks: If agents may be silent, the ones that are not: bool, ``[n, 1]`` or ``[1]``. ``x`` of a silent agent
                is zero, and it sends only a header.
        """
        return self._weigh("mix", x, nbytes, speaks)

    def compressed(self, x: torch.Tensor, compressor: Compressor) -> tuple[torch.Tensor, torch.Tensor]:
        """``W q`` and ``q``, where ``q = C(x)`` is what the neighbours make of an agent's message.

        Between agents of one machine, where copying is cheaper than decoding, ``q`` itself is handed over, with the
        same result; the bytes of the message are counted. A compressor without a wire format sends ``q``.
        """
        q = compressor(x, self)
        return self(q, nbytes=compressor.nbytes(q.shape[-1], q.dtype) if compressor.encodes else None), q

    def robust(self, x: torch.Tensor, rule: Robust) -> torch.Tensor:
        """What a robust rule makes of an agent's ``x`` and its neighbours', in place of ``W x``.

        Args:
            x: ``[n, d]`` or ``[d]``.
            rule: Such as :class:`shoal.robust.TrimmedMean`. Some rules use the weights of W, others only its edges.

        Raises:
            ValueError: An agent has fewer neighbours in the round than the rule needs.
        """
        raise TypeError(f"{type(self).__name__} has linear averages only, and {rule} is none")

    def _refuse(self, verb: str) -> NoReturn:
        """Raise TypeError: this exchange lacks a verb. Each of those below ``push`` may be lacking."""
        raise TypeError(f"{type(self).__name__} has no {verb}, which this algorithm uses")

    def pull(self, x: torch.Tensor) -> torch.Tensor:
        """``R x``, R row-stochastic on this round's edges: W itself if it is, else uniform over self and sources."""
        return self._weigh("pull", x)

    def push(self, x: torch.Tensor) -> torch.Tensor:
        """``C x``, C column-stochastic on this round's edges: W itself if it is, else each sender shares equally."""
        return self._weigh("push", x)

    @abstractmethod
    def _weigh(
        self, form: Form, x: torch.Tensor, nbytes: int | None = None, speaks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``W x``, or ``x`` times its row-stochastic (``"pull"``) or column-stochastic (``"push"``) form."""

    def average(self, x: torch.Tensor, group: str = EVERYBODY) -> torch.Tensor:
        """The mean over a group: ``"all"`` agents, the agents of the ``"machine"``, or the ``"counterparts"``, which
        have the same position on their machines.
        """
        self._refuse("average")

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """The agent's share of a tensor that all of its machine have: ``[n, d]`` to ``[n, d / agents of a machine]``,
        ``[d]`` to ``[about as many]``."""
        self._refuse("share")

    def whole(self, share: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The shares of a machine's agents, on all of them, in the shape of ``x``, which keeps its values for the share
        of a lost agent.
        """
        self._refuse("whole")

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """The agent's own row for each neighbour: ``[n, d]`` to ``[links, d]``, ``[d]`` to ``[deg, d]``."""
        self._refuse("spread")

    def gather(self, messages: torch.Tensor) -> torch.Tensor:
        """The sum of an agent's rows: ``[links, d]`` to ``[n, d]``, ``[deg, d]`` to ``[d]``."""
        self._refuse("gather")

    def by_agent(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of an agent's links below each other: ``[links, r, m]`` to ``[n, k r, m]``, where k is the highest
        number of neighbours and agents with fewer have zeros, ``[deg, r, m]`` to ``[1, deg r, m]``.
        """
        self._refuse("by_agent")

    def by_link(self, rows: torch.Tensor, r: int) -> torch.Tensor:
        """The inverse of :meth:`by_agent`."""
        self._refuse("by_link")

    def edges(self, messages: torch.Tensor, *, nbytes: int | None = None) -> torch.Tensor:
        """Send each neighbour its row, and have in its place what the neighbour sent. Same shape."""
        self._refuse("edges")

    def sign(self, like: torch.Tensor) -> torch.Tensor:
        """+1 for each row of ``edges`` where the agent's rank is below the neighbour's, else -1: ``[links, 1]``."""
        self._refuse("sign")

    @abstractmethod
    def _agents(self, like: torch.Tensor) -> torch.Tensor:
        """int64, the ranks: ``[n, 1]``, or ``[1]``."""

    @staticmethod
    def ones(x: torch.Tensor) -> torch.Tensor:
        """A one for each agent: ``[n, 1]`` or ``[1]``."""
        return x.new_ones((*x.shape[:-1], 1))

    def uniform(self, like: torch.Tensor) -> torch.Tensor:
        """Random numbers in [0, 1), shape and dtype of ``like`` (one row for each agent).

        They depend on the seed, the agent, the step, how often the step has asked, and the place, and on nothing else:
        stacked or real, an agent draws the same.
        """
        return self.stream(like).whole()

    def of_batch(self, number: int, use: int, like: torch.Tensor) -> torch.Tensor:
        """Random numbers in [0, 1) for an agent's ``number``-th batch or pass over its data, ``use`` telling several
        apart; shape and dtype of ``like`` (one row for each agent). They differ from those of :meth:`uniform`.
        """
        return drawn(self.seed, number, -use, self._agents(like), like).whole()

    # For the records of a run, and not for equations. A stacked fleet has all rows; a real agent asks the others.
    # Neither counts them as sent or as an exchange.

    def counted(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows ``[n, ...]`` of the agents that records are about: all, unless some are adversaries."""
        return rows

    def rows_of_all(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of all agents in rank order, ``[n, d]``."""
        return x

    def mean_of_all(self, x: torch.Tensor) -> torch.Tensor:
        """The mean over all agents, ``[d]``."""
        return x.mean(0)

    def sum_of_all(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over processes of a few numbers: in a stacked fleet they are those of all agents already."""
        return values

    def stream(self, like: torch.Tensor) -> HashStream:
        """The numbers of :meth:`uniform`, one range at a time; it counts as a call of :meth:`uniform`."""
        self._draws += 1
        return drawn(self.seed, self.step, self._draws, self._agents(like), like)


class Through(Mix):
    """Another's verbs, under the number of the step at which it was made."""

    def __init__(self, mix: Mix) -> None:
        super().__init__(mix.seed)
        self._mix, self.size, self.round, self.step = mix, mix.size, mix.round, mix.step

    def _weigh(
        self, form: Form, x: torch.Tensor, nbytes: int | None = None, speaks: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._mix._weigh(form, x, nbytes, speaks)

    def robust(self, x: torch.Tensor, rule: Robust) -> torch.Tensor:
        return self._mix.robust(x, rule)

    def average(self, x: torch.Tensor, group: str = EVERYBODY) -> torch.Tensor:
        return self._mix.average(x, group)

    def share(self, x: torch.Tensor) -> torch.Tensor:
        return self._mix.share(x)

    def whole(self, share: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self._mix.whole(share, x)

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        return self._mix.spread(x)

    def gather(self, messages: torch.Tensor) -> torch.Tensor:
        return self._mix.gather(messages)

    def by_agent(self, rows: torch.Tensor) -> torch.Tensor:
        return self._mix.by_agent(rows)

    def by_link(self, rows: torch.Tensor, r: int) -> torch.Tensor:
        return self._mix.by_link(rows, r)

    def edges(self, messages: torch.Tensor, *, nbytes: int | None = None) -> torch.Tensor:
        return self._mix.edges(messages, nbytes=nbytes)

    def sign(self, like: torch.Tensor) -> torch.Tensor:
        return self._mix.sign(like)

    def compressed(self, x: torch.Tensor, compressor: Compressor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._mix.compressed(x, compressor)

    def uniform(self, like: torch.Tensor) -> torch.Tensor:
        return self._mix.uniform(like)

    def stream(self, like: torch.Tensor) -> HashStream:
        return self._mix.stream(like)

    def _agents(self, like: torch.Tensor) -> torch.Tensor:
        return self._mix._agents(like)


class InItsRound(Through):
    """Another's verbs, in the round of that one: an algorithm with rounds of its own sets the topology's round."""

    def __init__(self, mix: Mix) -> None:
        self._mix, round_ = mix, mix.round
        super().__init__(mix)  # which begins with round 0
        self.round = round_

    @property
    def round(self) -> int:
        return self._mix.round

    @round.setter
    def round(self, round_: int) -> None:
        self._mix.round = round_


class Quiet(Through):
    """W = I, and nothing is sent. A new tensor each time, as of any exchange."""

    def _weigh(
        self, form: Form, x: torch.Tensor, nbytes: int | None = None, speaks: torch.Tensor | None = None
    ) -> torch.Tensor:
        return x.clone()

    def compressed(self, x: torch.Tensor, compressor: Compressor) -> tuple[torch.Tensor, torch.Tensor]:
        return Mix.compressed(self, x, compressor)

    def robust(self, x: torch.Tensor, rule: Robust) -> torch.Tensor:
        return x.clone()

    def average(self, x: torch.Tensor, group: str = EVERYBODY) -> torch.Tensor:
        return x.clone()

    def edges(self, messages: torch.Tensor, *, nbytes: int | None = None) -> torch.Tensor:
        raise ValueError(
            "between exchanges no neighbour sends a message, and this algorithm needs one from each. "
            "LocalSteps takes algorithms that communicate by averages."
        )
