"""The exchange of an algorithm under :class:`~shoal.algorithms.runs.conditions.Conditions`, simulated or real.

The links carry every message that is sent, at once. The receiver then drops, delays and distorts it, by draws that all
agents know. So the same code serves the rows of a stacked fleet and the one row of a real agent.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_map

from ..mix import Mix
from ..schedule_weights import Form, Ranks, RoundWeights, Weights
from .conditions import HANDSHAKE, MEMORY, Conditions
from .run import Run

Chosen = NDArray[np.bool_]


class CarriesMessages(Mix):
    """The exchange below :class:`UnreliableMix`, which also sends messages one by one."""

    @property
    @abstractmethod
    def here(self) -> Ranks:
        """The agents whose rows this process has, ascending, int64."""

    @abstractmethod
    def round_weights(self) -> RoundWeights:
        """The edges of the round, of all agents."""

    @abstractmethod
    def fetch(self, x: torch.Tensor, destination: Ranks, source: Ranks) -> torch.Tensor:
        """Send values along edges of the round: ``[m, d]``, a row for each that leads to an agent of :attr:`here`.

        Args:
            x: The values of this process's agents, ``[n, d]`` or ``[d]``.
            destination, source: The edges of all agents that are used, ascending by destination and then by source.
        """


class UnreliableMix(Mix):
    """The verbs ``mix``, ``pull`` and ``push`` under given conditions.

    Args:
        inner: The exchange without them.
        conditions: The conditions.

    Raises:
        ValueError: The conditions are for another number of agents.
    """

    def __init__(self, inner: CarriesMessages, conditions: Conditions) -> None:
        super().__init__(inner.seed)
        conditions.check_size(inner.size)
        self._inner, self.conditions, self._here = inner, conditions, inner.here
        self.size, self.machines = inner.size, inner.machines
        self._local = np.zeros(self.size, np.int64)
        self._local[self._here] = np.arange(len(self._here))
        self._exchange = 0
        self._mailboxes: dict[tuple[Form, int], _Mailbox] = {}
        self._inboxes: dict[int, _Inbox] = {}
        self._active = np.ones(self.size, np.bool_)

    @property
    def stacked(self) -> bool:  # type: ignore[override]
        # Not by the number of rows: a single real agent has all of them too, and its x is [d].
        return self._inner.stacked

    def begin(self, step: int) -> bool:
        super().begin(step)
        lost = self._inner.begin(step)
        self._exchange, self._active = 0, self.conditions.active(step, self.size)
        return lost

    def end(self) -> None:
        self._inner.end()

    def follow(self, x: torch.Tensor, state: Any) -> None:
        self._inner.follow(x, state)

    def kept(self, before: tuple[torch.Tensor, Any], after: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        """The values of the active agents after the step, and of the others before it."""
        if self._active.all():
            return after
        if not self.stacked:
            return after if self._active[self._here[0]] else before
        active = torch.from_numpy(self._active.copy())

        def chosen(new: Any, old: Any) -> Any:
            if not isinstance(new, torch.Tensor) or not new.dim() or len(new) != self.size:
                return new
            return torch.where(active.to(new.device).view(-1, *[1] * (new.dim() - 1)), new, old)

        return chosen(after[0], before[0]), tree_map(chosen, after[1], before[1])

    def in_transit(self) -> torch.Tensor | float:
        """The sum of all shares of ``push`` that are on their way, or were lost and will come again, ``[d]``; 0 for
        none. Each exchange of a step counts, so it is meant for algorithms with one.
        """
        return sum((inbox.total() for inbox in self._inboxes.values()), 0.0)

    def _weigh(
        self, form: Form, x: torch.Tensor, nbytes: int | None = None, speaks: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._pushed(x) if form == "push" else self._pulled(form, x, nbytes, speaks)

    def _pushed(self, x: torch.Tensor) -> torch.Tensor:
        sent = self._send("push", x)
        weights = sent.weights[sent.edges]
        # The share that an agent keeps: its own, and of messages that a handshake refused.
        kept = np.where(sent.own, sent.weights, 0.0)
        if self.conditions.protocol == HANDSHAKE:
            # Also of messages from here to other processes, whose loss this agent draws as its receiver does.
            links = self._links(sent.destination[sent.used], sent.source[sent.used])
            refused = ~sent.own
            refused[sent.used[~self.conditions.lost(self.step, sent.number, links)]] = False
            kept[refused] = sent.weights[refused]
        shares = torch.from_numpy(np.bincount(sent.source, weights=kept, minlength=self.size)[self._here])
        rows = self._rows(x)
        wide = torch.promote_types(x.dtype, torch.float32)
        inbox = self._inboxes.get(sent.number)
        if inbox is None:
            inbox = self._inboxes[sent.number] = _Inbox(torch.zeros_like(rows, dtype=wide))
        lots = _times(sent.values.to(wide), weights)
        arrives, when = sent.arrives, self.step + sent.ticks
        if self.conditions.protocol == MEMORY:
            lots = inbox.with_lost(sent.keys, lots, arrives)
        inbox.add(lots, sent.to, when, arrives)
        active = self._active[self._here]
        out = _times(rows.to(wide), shares) + inbox.taken(self.step, active)
        return self._result(x, out, active)

    def _pulled(
        self, form: Form, x: torch.Tensor, nbytes: int | None = None, speaks: torch.Tensor | None = None
    ) -> torch.Tensor:
        sent = self._send(form, x, nbytes, speaks)
        active = self._active[self._here]
        to_us = np.flatnonzero(~sent.own & self._is_here(sent.destination))
        if self.conditions.messages_wait:
            box = self._mailboxes.setdefault((form, sent.number), _Mailbox(self.conditions.protocol == MEMORY))
            arrives = sent.arrives
            box.put(sent.keys[arrives], sent.values[torch.from_numpy(arrives)], self.step, sent.ticks[arrives])
            box.deliver(self.step)
            keys = sent.destination[to_us] * self.size + sent.source[to_us]
            found, values = box.read(keys, self._active[sent.destination[to_us]])
            used = to_us[found]
        else:
            used, values = sent.edges[sent.arrives], sent.values[torch.from_numpy(sent.arrives)]
        # The weight of a message that has not come is the agent's own.
        kept = sent.weights.copy()
        kept[used] = 0.0
        own = np.bincount(sent.destination, weights=kept, minlength=self.size)[self._here]
        rows = self._rows(x)
        wide = torch.promote_types(x.dtype, torch.float32)
        out = _times(rows.to(wide), torch.from_numpy(own))
        if len(used):
            to = torch.from_numpy(self._local[sent.destination[used]]).to(x.device)
            out.index_add_(0, to, _times(values.to(wide), sent.weights[used]))
        return self._result(x, out, active)

    def _send(
        self, form: Form, x: torch.Tensor, nbytes: int | None = None, speaks: torch.Tensor | None = None
    ) -> _Sent:
        """Send the messages of an exchange, and draw what becomes of each that comes here."""
        self._inner.round = self.round
        round_ = self._inner.round_weights()
        destination, source = round_.destination, round_.source
        used = ~round_.own & self._active[source]
        if self.conditions.protocol == HANDSHAKE:
            used &= self._active[destination]
        number, self._exchange = self._exchange, self._exchange + 1
        self.exchanges += 1
        ours = used & self._is_here(source)
        if speaks is not None:
            ours = speaks.view(-1).cpu().numpy()[self._local[source[ours]]]
        each = self._rows(x)[0].nbytes if nbytes is None else nbytes
        self.sent += int(np.count_nonzero(ours)) * each
        values = self._inner.fetch(x, destination[used], source[used])
        edges = np.flatnonzero(used & self._is_here(destination))
        to, of = destination[edges], source[edges]
        keys = to * self.size + of
        values = self.conditions.noisy(self.step, number, keys, values)
        arrives = ~self.conditions.lost(self.step, number, self._links(to, of))
        ticks = self.conditions.ticks(self.step, number, keys)
        local = torch.from_numpy(self._local[to]).to(x.device)
        weights: Weights = getattr(round_, form)
        sent = np.flatnonzero(used)
        return _Sent(number, destination, source, round_.own, weights, sent, edges, keys, local, values, arrives, ticks)

    def _links(self, to: Ranks, of: Ranks) -> Ranks:
        """The numbers by which losses are drawn: both directions of a link share the luck of a handshake."""
        if self.conditions.protocol == HANDSHAKE:
            to, of = np.minimum(to, of), np.maximum(to, of)
        return to * self.size + of

    def _is_here(self, ranks: Ranks) -> Chosen:
        return np.ones(len(ranks), np.bool_) if self.stacked else ranks == self._here[0]

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.stacked else x.unsqueeze(0)

    def _result(self, x: torch.Tensor, out: torch.Tensor, active: Chosen) -> torch.Tensor:
        """The result in the shape and dtype of x; an agent that is not active has its own value."""
        out = out.to(x.dtype)
        if not active.all():
            out = torch.where(torch.from_numpy(active).to(x.device).unsqueeze(1), out, self._rows(x))
        return out.view(x.shape)

    def _refuse(self, verb: str) -> NoReturn:
        raise ValueError(
            f"conditions apply to averages with the neighbours (mix, pull, push), and this algorithm uses mix.{verb}. "
            "Run it without conditions, or take an algorithm that communicates by these averages alone."
        )

    def rows_of_all(self, x: torch.Tensor) -> torch.Tensor:
        return self._inner.rows_of_all(x)

    def mean_of_all(self, x: torch.Tensor) -> torch.Tensor:
        return self._inner.mean_of_all(x)

    def sum_of_all(self, values: torch.Tensor) -> torch.Tensor:
        return self._inner.sum_of_all(values)

    def _agents(self, like: torch.Tensor) -> torch.Tensor:
        return self._inner._agents(like)


def under(conditions: Conditions, exchange: CarriesMessages, resume: Run | None) -> UnreliableMix:
    """The exchange of a new run under conditions.

    Raises:
        ValueError: A run is to be resumed, whose messages in transit are not stored.
    """
    if resume is not None:
        raise ValueError(
            "a run under conditions cannot be resumed, because its messages in transit are not stored. Run all steps "
            "in one call"
        )
    return UnreliableMix(exchange, conditions)


class _Sent(NamedTuple):
    """The messages of an exchange.

    Attributes:
        number: Of the exchange in its step, from 0.
        destination, source, own, weights: Of all edges of the round.
        used: The messages of all agents, as numbers of these edges.
        edges: The messages to agents of this process, as numbers of these edges, [m].
        keys: ``destination * n + source`` of each, [m].
        to: The row of the receiver, int64 [m].
        values: The messages with their noise, [m, d].
        arrives: Whether each is not lost, [m].
        ticks: The delay of each, [m].
    """

    number: int
    destination: Ranks
    source: Ranks
    own: Chosen
    weights: Weights
    used: Ranks
    edges: Ranks
    keys: Ranks
    to: torch.Tensor
    values: torch.Tensor
    arrives: Chosen
    ticks: Ranks


class _Mailbox:
    """The newest message of each edge, for one exchange of a step.

    Args:
        remembers: A message may be used more than once.
    """

    def __init__(self, remembers: bool) -> None:
        self._remembers = remembers
        self._keys = np.empty(0, np.int64)
        self._sent = np.empty(0, np.int64)
        self._fresh = np.empty(0, np.bool_)
        self._values: torch.Tensor | None = None
        self._on_their_way: dict[int, list[tuple[Ranks, torch.Tensor, int]]] = {}

    def put(self, keys: Ranks, values: torch.Tensor, now: int, ticks: Ranks) -> None:
        """Send messages ``[m, d]`` along edges; each arrives after its number of ticks."""
        for tick in np.unique(ticks).tolist():
            chosen = np.flatnonzero(ticks == tick)
            message = keys[chosen], values[torch.from_numpy(chosen)], now
            self._on_their_way.setdefault(now + tick, []).append(message)

    def deliver(self, now: int) -> None:
        """Take the messages that have arrived. A late message does not replace a newer one."""
        for tick in sorted(due for due in self._on_their_way if due <= now):
            for keys, values, sent in self._on_their_way.pop(tick):
                slots = self._slots(keys, values)
                newer = np.flatnonzero(self._sent[slots] < sent)
                into = slots[newer]
                assert self._values is not None
                self._values[torch.from_numpy(into)] = values[torch.from_numpy(newer)]
                self._sent[into], self._fresh[into] = sent, True

    def read(self, keys: Ranks, reading: Chosen) -> tuple[Ranks, torch.Tensor]:
        """The messages that agents use: the numbers of their edges, int64 [k], and the values, ``[k, d]``.

        Args:
            keys: The edges of the round.
            reading: Those whose agent is active, bool; only these messages count as used.
        """
        nothing = np.empty(0, np.int64)
        if self._values is None:
            return nothing, torch.empty(0, device="cpu")
        slots = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        known = (self._keys[slots] == keys) & reading
        found = np.flatnonzero(known & (self._sent[slots] >= 0 if self._remembers else self._fresh[slots]))
        self._fresh[slots[found]] = False
        return found, self._values[torch.from_numpy(slots[found])]

    def _slots(self, keys: Ranks, like: torch.Tensor) -> Ranks:
        """The place of each edge, with new places for new edges."""
        if self._values is None:
            self._values = like.new_empty(0, like.shape[1])
        # Without assume_unique numpy hashes, which takes ten times as long on keys as regular as these.
        new = np.setdiff1d(keys, self._keys, assume_unique=True)
        if len(new):
            self._keys, self._values, order = _inserted(self._keys, self._values, new)
            self._sent = np.concatenate([self._sent, np.full(len(new), -1)])[order]
            self._fresh = np.concatenate([self._fresh, np.zeros(len(new), np.bool_)])[order]
        return np.searchsorted(self._keys, keys)


class _Inbox:
    """The shares that were pushed to each agent and not yet taken, for one exchange of a step.

    Args:
        empty: Zeros, ``[rows, d]``.
    """

    def __init__(self, empty: torch.Tensor) -> None:
        self._there = empty
        self._on_their_way: dict[int, torch.Tensor] = {}
        self._keys = np.empty(0, np.int64)
        self._lost = empty[:0]

    def total(self) -> torch.Tensor:
        """The sum of all shares that no agent has taken, ``[d]``."""
        coming = sum((message.sum(0) for message in self._on_their_way.values()), torch.zeros_like(self._there[0]))
        return self._there.sum(0) + self._lost.sum(0) + coming

    def with_lost(self, keys: Ranks, shares: torch.Tensor, arrives: Chosen) -> torch.Tensor:
        """The shares ``[m, d]`` with what earlier messages of their edges have lost; the lost ones are kept."""
        # Without assume_unique numpy hashes, which takes ten times as long on keys as regular as these.
        new = np.setdiff1d(keys, self._keys, assume_unique=True)
        if len(new):
            self._keys, self._lost, _ = _inserted(self._keys, self._lost, new)
        slots = torch.from_numpy(np.searchsorted(self._keys, keys))
        whole = shares + self._lost[slots]
        self._lost[slots] = torch.where(torch.from_numpy(arrives).to(shares.device).unsqueeze(1), 0.0, whole)
        return whole

    def add(self, shares: torch.Tensor, to: torch.Tensor, when: Ranks, arrives: Chosen) -> None:
        """Send shares ``[m, d]`` to rows ``to``, to arrive in tick ``when`` if they arrive at all."""
        for tick in np.unique(when[arrives]).tolist():
            chosen = torch.from_numpy(np.flatnonzero(arrives & (when == tick))).to(to.device)
            coming = self._on_their_way.setdefault(tick, torch.zeros_like(self._there))
            coming.index_add_(0, to[chosen], shares[chosen])

    def taken(self, now: int, active: Chosen) -> torch.Tensor:
        """The shares that have arrived for each agent, summed; the active agents take them."""
        for tick in sorted(due for due in self._on_their_way if due <= now):
            self._there = self._there + self._on_their_way.pop(tick)
        found = self._there
        takes = torch.from_numpy(active).to(found.device).unsqueeze(1)
        self._there = torch.where(takes, 0.0, found)
        return found


def _inserted(keys: Ranks, rows: torch.Tensor, new: Ranks) -> tuple[Ranks, torch.Tensor, Ranks]:
    """Ascending keys and their rows ``[m, d]`` with new keys among them, whose rows are zero.

    Also the order: the place of each in the old ones followed by the new ones.
    """
    both = np.concatenate([keys, new])
    order = np.argsort(both, kind="stable")
    more = rows.new_zeros(len(new), rows.shape[1])
    return both[order], torch.cat([rows, more])[torch.from_numpy(order)], order


def _times(rows: torch.Tensor, weights: Weights | torch.Tensor) -> torch.Tensor:
    """Rows ``[m, d]``, each times its weight ``[m]``."""
    return rows * torch.as_tensor(weights, device=rows.device, dtype=rows.dtype).unsqueeze(1)
