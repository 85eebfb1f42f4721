"""Sends the messages of this agent, and tracks the receivers that still have to acknowledge them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from .. import clock
from ..errors import PeerLost, ShoalError
from ..transport.link import Link, Published
from ..transport.messages import (
    AGAIN,
    CERTAIN,
    COMMON,
    CONFIRM,
    DIED,
    HERE,
    MAX_DIMENSIONS,
    ON_DEVICE,
    SILENT,
    WANTS_REPLY,
    Kind,
    Message,
    Where,
)
from ..transport.router import Router
from ..transport.shared_memory import SharedMemoryLink
from .control_messages import pieces
from .events import COORDINATION, EdgeCounters, Events
from .matching import NO_FAILURE, SMALL_WINDOW, Channel, RoundFailure
from .membership import Departure, Membership
from .operation import Operation
from .publishing import Publisher
from .stage import Exchange, Send, Stage


class _Unacknowledged(NamedTuple):
    """A message to acknowledge: its receiver reads this agent's memory, or confirms that it expected the message."""

    receiver: int
    operation: Operation
    published: Published
    channel: Channel
    announced: tuple[Message, int, int] | None
    """For a tensor that the backend moves: its header, and the range of elements. A link sends it if the backend does
    not."""


def _bytes_of(send: Send) -> tuple[Published, int, int, tuple[int, ...]]:
    """The properties that consecutive messages must share, so that they are encoded once for several destinations."""
    return send.published, send.start, send.stop, send.shape


class Sender:
    """The sending side of one agent. Used under the engine's lock."""

    def __init__(
        self, rank: int, router: Router, membership: Membership, events: Events, on_closed: Callable[[int, str], None]
    ) -> None:
        self.bytes_sent = 0
        self.keeps_backend_tensors = False  # until the receivers have the tensors that a backend moves
        self.has_sent_shutdown = False
        self.edge_counters = EdgeCounters()
        self._rank = rank
        self._router = router
        self._membership = membership
        self._events = events
        self._on_closed = on_closed
        self._tokens = itertools.count(1)
        self._unacknowledged: dict[int, _Unacknowledged] = {}
        self._news: list[Message] = []  # notices of losses
        self.dirty: dict[Link, None] = {}  # links with messages that have not been passed to the system

    def post(self, channel: Channel, operation: Operation, stage: Stage) -> None:
        """Send the messages of a stage."""
        exchange = stage.exchange
        # Small messages stay in the receiver's memory until it takes them. It acknowledges some of them; without that a
        # sender could be any number of rounds ahead.
        often = exchange.checked or operation.round % (SMALL_WINDOW // 4) == 0
        flags = (CONFIRM if exchange.checked else 0) | (COMMON if exchange.coordinates else 0)
        flags |= ON_DEVICE if exchange.on_device else 0
        tail = b""
        last: Send | None = None
        view = self._membership.view
        lost = operation.lost_ranks if view.epoch else ()
        links: list[tuple[Send, Link]] = []
        for send in exchange.sends:
            # The operation fails, or continues without it. An agent admitted in its place would refuse the message.
            if view.epoch and (send.destination not in view.alive or send.destination in lost):
                continue
            link = self._link(send.destination)
            # The peer is a suspect now. The unposted stage shows Failures that its operation needs the peer. Nothing of
            # it has been sent: after the loss a stage is posted as a whole, and a fused one by its members.
            if link is None:
                return
            links.append((send, link))
        for send, link in links:
            published = send.published
            nbytes = (send.stop - send.start) * published.data.element_size()
            by_backend = stage.to_move and nbytes > 0  # it has arrived when the stage ends, and needs no answer
            # After a loss, links have to send kept tensors. An operation that restarts sends all its tensors again.
            keeps = by_backend and self.keeps_backend_tensors and not operation.restarts
            reply = keeps if stage.to_move else often or published.region is not None
            token = next(self._tokens)
            # The link reuses a tail that is not empty: one of other bytes would send this receiver another's tensor.
            if last is None or _bytes_of(last) != _bytes_of(send):
                tail = b""
            message = Message(
                Kind.DATA,
                operation.op,
                operation.name,
                operation.round,
                stage.number - exchange.stage_lead,
                token,
                flags | (WANTS_REPLY if reply else 0),
                exchange.digest,
                send.scale,
                published.data.dtype,
                send.shape,
                nbytes=nbytes,
                p=send.p,
                tail=tail,
            )
            if by_backend:
                message.where = Where.CARRIED
            if reply:
                if published.lease is not None:
                    # Without this hold, the end of the operation would free memory that the receiver still reads.
                    published.lease.hold()
                kept = (message, send.start, send.stop) if by_backend else None
                self._unacknowledged[token] = _Unacknowledged(send.destination, operation, published, channel, kept)
                channel.sent(operation.round, send.destination)
                # A zero-copy tensor is the caller's: if the operation ended earlier, the caller could change it under a
                # reader. A tensor of the backend has arrived when its stage ends, so it needs no confirmation.
                if (exchange.checked and not by_backend) or published.zero_copy:
                    operation.expect_confirmation(token, send.destination)
            if exchange.carried is not None and exchange.carried.confirm and stage.to_move:
                stage.expect_confirmation(send.destination)
            # Taken before the post: the receiver may have the message before post() returns.
            posted = clock.perf_counter_ns() if self._events.active else 0
            if by_backend:
                link.post(message)
            else:
                link.post(message, published, send.start, send.stop)
            last, tail = send, message.tail
            if not operation.background:
                self.bytes_sent += nbytes
                if self.edge_counters.counts and not exchange.coordinates:
                    self.edge_counters.sent(operation.op, operation.name, operation.round, send.destination, nbytes)
            if self._events.active:
                about = operation.op, operation.name, operation.round
                why = COORDINATION if exchange.coordinates or operation.background else ""
                self._events.emit("sent", *about, 0, send.destination, nbytes, why, stage.number, posted)
        stage.posted = True

    def keep_backend_tensors(self) -> None:
        """Keep tensors that the backend moves until they have arrived: after a loss, links may have to send them."""
        self.keeps_backend_tensors = True

    def send_by_links(self) -> None:
        """Send over links the tensors that the backend should have moved and has not, as far as this agent knows."""
        alive = self._membership.view.alive
        for sent in list(self._unacknowledged.values()):
            if sent.announced is None or sent.receiver not in alive:
                continue
            header, start, stop = sent.announced
            link = self._link(sent.receiver)
            if link is not None:
                # A receiver that has the tensor drops this copy. Without the flag it would refuse it as unexpected.
                flags = header.flags | AGAIN
                message = replace(header, where=Where.NOWHERE, tail=b"", payload=None, flags=flags)
                link.post(message, sent.published, start, stop)

    def count_sent(self, nbytes: int) -> None:
        """Count tensor bytes that are sent without this sender."""
        self.bytes_sent += nbytes

    def send_message(self, peer: int, message: Message) -> None:
        """Send a message without a tensor."""
        if peer in self._membership.view.alive:
            link = self._link(peer)
            if link is not None:
                link.post(message)

    def send_control(
        self, peers: Iterable[int], name: str, content: Any, op: str = "", background: bool = False
    ) -> None:
        """Send a control message: plain data as JSON, outside of all operations.

        Args:
            peers: The destinations, without this agent.
            name: The name of the message, which begins with the prefix of the service that receives it.
            content: Anything that ``json`` can write.
            op: The operation of the message; its name if empty.
            background: Whether the message does not count as the caller's traffic.
        """
        text = json.dumps(content).encode()
        self.send_bytes(peers, Message(Kind.CONTROL, op or name, name, shape=(len(text),)), text, background)

    def send_bytes(self, peers: Iterable[int], message: Message, body: bytes, background: bool = False) -> None:
        """Send a control message with the fields of ``message``. Its dtype and shape are those of the body."""
        parts = pieces(message, body)
        about, why = (message.op, message.name, message.round), COORDINATION if background else ""
        for peer in peers:
            link = self._link(peer) if peer in self._membership.view.alive else None
            if link is None:
                continue
            for piece in parts:
                posted, nbytes = clock.perf_counter_ns(), len(piece.body)
                link.post(piece)
                if not background:
                    self.bytes_sent += nbytes
                    if self.edge_counters.counts:
                        self.edge_counters.sent(*about, peer, nbytes)
                if self._events.active:
                    self._events.emit("sent", *about, 0, peer, nbytes, why, 0, posted)

    def share(self, peer: int, ident: int, fd: int, lockable: bool) -> None:
        """Let a peer on this machine map one of this agent's memory files; no effect for other or lost peers."""
        link = self._link(peer) if peer in self._membership.view.alive else None
        if isinstance(link, SharedMemoryLink):
            link.share(ident, fd, lockable)

    def acknowledge(self, source: int, message: Message) -> None:
        """Allow the sender of a message to reuse its memory. Only the first call for a message has an effect."""
        if message.flags & WANTS_REPLY:
            payload = message.payload
            if payload is not None and not payload.complete:
                # The sender still reads this memory. If it changed now, the rest would fail its check.
                payload.on_more = partial(self._acknowledge_arrived, source, message)
                return
            # Acknowledged twice, a part would count for another one, whose memory the sender would reuse too early.
            message.flags &= ~WANTS_REPLY
            if self._is_last(message):
                self.send_message(source, Message(Kind.DONE, token=message.token))
            else:
                self.send_message(
                    source, Message(Kind.DONE, message.op, message.name, message.round, token=message.token)
                )

    def _acknowledge_arrived(self, source: int, message: Message) -> None:
        """Acknowledge a message if the piece that has arrived was its last."""
        if message.payload is not None and message.payload.complete:
            message.payload.on_more = None
            self.acknowledge(source, message)

    def refuse(self, source: int, message: Message, text: str, lost: int | None = None) -> None:
        """Notify a peer that its message does not match, and of the reason.

        ``lost``: the agent whose loss is the reason.
        """
        # The token frees the sender's memory and ends its wait for confirmations. So only the last part may return it.
        if message.payload is not None and not message.payload.complete:
            token = 0  # as above: the sender may not free the memory yet
            self.acknowledge(source, message)
        else:
            answers = not message.flags & WANTS_REPLY or self._is_last(message)
            token, message.flags = message.token if answers else 0, 0  # a refusal is an answer
        refusal = Message(Kind.REFUSE, message.op, message.name, message.round, message.stage, token, text=text)
        if lost is not None:
            refusal.flags, refusal.digest = DIED, lost
        self.send_message(source, refusal)

    @staticmethod
    def _is_last(message: Message) -> bool:
        """Whether all other parts of a message have been acknowledged."""
        parts = message.part_of
        if parts is not None:
            parts.left -= 1
        return parts is None or not parts.left

    def deny(self, peer: int, call: Operation | Message, stage: int, failure: RoundFailure = NO_FAILURE) -> None:
        """Notify a waiting peer that this agent's message will not come, and of the reason if the call failed."""
        # The shutdown message follows. A denial would end the peer's call with a mismatch instead of this agent's
        # departure.
        if failure.leaving:
            return
        flags, about = DIED if failure.own else 0, failure.about[:MAX_DIMENSIONS]
        self.send_message(
            peer, Message(Kind.DENY, call.op, call.name, call.round, stage, 0, flags, shape=about, text=failure.reason)
        )

    def send_waits(self, peer: int, call: Message, waiting_for: list[int]) -> None:
        """Notify a waiting peer that this agent waits for other agents first."""
        shape = tuple(waiting_for[:MAX_DIMENSIONS])
        self.send_message(peer, Message(Kind.WAITS, call.op, call.name, call.round, call.stage, shape=shape))

    def answer(self, peer: int, operation: Operation, stage: Stage, only_if_here: bool) -> None:
        """Answer a peer's probe of a stage that this agent has reached."""
        if only_if_here:
            self.send_reached(peer, operation, stage.number)
        elif not stage.will_send(peer, stage.number):
            self.deny(peer, operation, stage.number)

    def send_reached(self, peer: int, call: Operation | Message, stage: int) -> None:
        """Notify a probing peer that this agent has reached a stage whose tensors do not travel over links."""
        self.send_message(peer, Message(Kind.DENY, call.op, call.name, call.round, stage, flags=HERE))

    def pass_on(self, gone: Departure) -> None:
        """Notify all linked peers that an agent is lost or has shut down, except that agent and the agent that noticed.

        A lost agent may be alive and excluded because of a message that it sent. It is notified too if this agent
        noticed: it must not conclude that all other agents are lost.
        """
        flags = (DIED if gone.died else 0) | (CERTAIN if gone.certain else 0) | (SILENT if gone.silent else 0)
        notice = Message(
            Kind.NOTICE, round=gone.reported_by, token=gone.rank, flags=flags, digest=gone.because + 1, text=gone.cause
        )
        if gone.died:
            self._news.append(notice)
        for peer in list(self._router.links):
            if peer not in (gone.rank, gone.reported_by):
                self.send_message(peer, notice)
        condemned = self._router.links.get(gone.rank)
        if condemned is not None and gone.died and gone.reported_by == self._rank:
            condemned.post(notice)
            # Flushed at once, because Failures drops this link as soon as the loss is confirmed.
            condemned.flush()

    def forget_news(self, ranks: tuple[int, ...]) -> None:
        """Drop the notices of earlier losses of ranks that have been admitted again."""
        # Sent first on a new link, an old notice would exclude the admitted agent again.
        self._news = [notice for notice in self._news if notice.token not in ranks]

    def send_shutdown(self, farewell: str, died: bool, ended: ShoalError | None, missed: int = -1) -> None:
        """Send the shutdown message to every linked peer.

        If this agent shuts down after a loss, the message first names the lost agents, so that no peer takes this agent
        for the cause. It also names the rank that this agent ``missed`` in a one-sided call; -1 for none.
        """
        if not self._news and isinstance(ended, PeerLost) and min(ended.ranks, default=-1) >= 0:
            self.pass_on(Departure(ended.ranks[0], str(ended), died=True, reported_by=self._rank, certain=True))
        lost, cause = (self._news[0].token, self._news[0].text) if self._news else (missed, "")
        for peer in list(self._router.links):
            flags, because = (DIED | CERTAIN, 0) if died else (0, missed + 1)
            last = Message(Kind.NOTICE, round=self._rank, token=self._rank, flags=flags, digest=because, text=farewell)
            self.send_message(peer, last)
        # From here on _link() opens none: a new link would lack the shutdown message, and its end would look like a
        # failure.
        self.has_sent_shutdown = True
        self._router.send_shutdown(lost, cause)

    def reach(self, peer: int) -> bool:
        """Ensure that a link to a peer exists or is being opened; the link detects the end of the peer's process.

        False if the link has ended already.
        """
        return self._router.reaches(peer) if peer in self._router.links else self._link(peer) is not None

    def _link(self, peer: int) -> Link | None:
        """The link to a peer, marked for flushing; None if it cannot be opened, or not any more."""
        link = self._router.links.get(peer)
        if link is not None:
            self.dirty[link] = None
            return link
        if self.has_sent_shutdown:
            return None
        try:
            link = self._router.link(peer)
        except OSError as error:
            self._on_closed(peer, f"connecting to it failed: {error.strerror or error}")
            return None
        self.dirty[link] = None
        for notice in self._news:  # later messages may be consequences of a loss that the peer does not know
            link.post(notice)
        return link

    def flush(self) -> None:
        """Pass queued bytes to the operating system."""
        if self._router.arena.retired:
            self._router.retire_memory()
        while self.dirty:
            self.dirty.popitem()[0].flush()

    def acknowledged(self, receiver: int, token: int) -> tuple[Operation, Channel] | None:
        """Free the memory that was held for a receiver that has acknowledged its message.

        None if the message is not waiting for this receiver, since no agent can acknowledge for another.
        """
        sent = self._unacknowledged.get(token)
        if sent is None or sent.receiver != receiver:
            return None
        del self._unacknowledged[token]
        if sent.published.lease is not None:
            sent.published.lease.release()
        sent.channel.acknowledged(sent.operation.round, sent.receiver)
        sent.operation.confirmed(token)
        return sent.operation, sent.channel

    def confirmed_in_part(self, receiver: int, message: Message) -> Operation | None:
        """The operation whose tensor a receiver has confirmed, of a message with several tensors; None if unknown."""
        sent = self._unacknowledged.get(message.token)
        parts = sent.operation.parts if sent is not None and sent.receiver == receiver else ()
        # The token stays until all parts are acknowledged, because they share one published memory.
        for part in parts:
            if (part.name, part.round) == (message.name, message.round):
                part.confirmed(message.token)
                return part
        return None

    def unacknowledged_by(self, rank: int) -> list[int]:
        """The tokens that a peer has not acknowledged."""
        return [token for token, sent in self._unacknowledged.items() if sent.receiver == rank]

    def forget_failed(self) -> None:
        """At shutdown, stop waiting for acknowledgements of failed rounds. Late readers may still read the memory."""
        failed = [token for token, sent in self._unacknowledged.items() if isinstance(sent.operation.error, ShoalError)]
        for token in failed:
            del self._unacknowledged[token]

    def receivers_behind(self, name: str) -> list[int]:
        """The receivers that have not acknowledged messages of a name, ascending."""
        return sorted({sent.receiver for sent in self._unacknowledged.values() if sent.operation.name == name})

    @property
    def drained(self) -> bool:
        """Whether no acknowledgement is outstanding."""
        return not self._unacknowledged

    @property
    def empty(self) -> bool:
        """Whether all bytes have been passed to the operating system."""
        return all(link.idle for link in self._router.links.values())


def send_alone(publisher: Publisher, sender: Sender, peer: int, message: Message, tensor: torch.Tensor) -> None:
    """Send a peer a copy of a tensor outside of the operations of this agent, as an answer.

    Args:
        publisher, sender: This agent's publisher and sender.
        peer: The destination.
        message: A message with the operation, name, round, stage and digest to send.
        tensor: Any dtype.
    """
    alone = Operation(message.op, message.name, message.round, float("inf"))
    # Exempt from SHOAL_CHECK_FINITE: an error here would leave the peer without its answer.
    alone.one_sided = True
    published = publisher.publish(alone, tensor)
    send = Send(peer, published, 0, published.data.numel(), tuple(tensor.shape))
    exchange = Exchange([send], (), digest=message.digest)
    sender.post(Channel(message.name), alone, Stage(message.stage, exchange, set(), {}))
    # No generator ends this operation and releases them. The receiver has a hold of its own until it acknowledges.
    for lease in alone.leases:
        lease.release()
