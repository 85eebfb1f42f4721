"""The rendezvous of a process group's members: each sends its address over Shoal's own links.

No port is open for it, and the senders are authenticated.
"""

from __future__ import annotations

import base64
import datetime
import threading
from functools import partial
from typing import Any

import torch.distributed as dist

from ..engine.engine import Engine
from ..operations.control_messages import read_json
from ..operations.services import Service
from ..transport.wire import Message

WORD = "~group"
MOST_WORDS, MOST_BYTES = 1 << 12, 1 << 16
"""Of one agent that are kept, and of each. Those of an earlier membership are not kept."""
Place = tuple[str, str]


class GroupStores(Service):
    """The data that the agents have sent about themselves as members of process groups."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._values: dict[Place, tuple[int, bytes]] = {}  # each with its sender
        self._changed = threading.Condition(threading.Lock())
        self._given_up: set[str] = set()  # labels
        self.patience = engine.timeout

    def of(self, label: str, ranks: tuple[int, ...]) -> GroupStore:
        """The store of a new group of these ranks; all of them make it, under this label."""
        return GroupStore(self, label, ranks)

    def send(self, group: str, ranks: tuple[int, ...], key: str, value: bytes) -> None:
        """Send a value to all members of a group."""
        self._keep(self.engine.rank, (group, key), value)
        engine, content = self.engine, [group, key, base64.b64encode(value).decode()]
        with engine.lock:
            engine.send_control([rank for rank in ranks if rank != engine.rank], WORD, content, background=True)
            engine.wake()

    def wait(self, label: str, group: str, keys: list[str], seconds: float | None) -> bool:
        """Wait until all keys of a group have arrived. False after ``seconds``; None waits for ever.

        Raises:
            RuntimeError: The label was given up.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: label in self._given_up or all((group, key) in self._values for key in keys), seconds
            )
            if label in self._given_up:
                raise RuntimeError("this agent leaves, or has lost another")
            return all((group, key) in self._values for key in keys)

    def get(self, group: str, key: str) -> bytes:
        with self._changed:
            return self._values[group, key][1]

    def _keep(self, source: int, place: Place, value: bytes) -> None:
        with self._changed:
            # A late value of a membership that is over would be kept for good.
            if not any(_is_under(label, place) for label in self._given_up):
                self._values[place] = source, value
            self._changed.notify_all()

    def serve(self, source: int, message: Message) -> None:
        """An agent sends data about itself; see :class:`~.services.Service`."""
        parsed = read_json(message, "a process group", partial(self._parsed, source), MOST_BYTES)
        self._keep(source, *parsed)

    def _parsed(self, source: int, content: Any) -> tuple[Place, bytes]:
        with self._changed:
            count = sum(sender == source for sender, _ in self._values.values())
        if count >= MOST_WORDS:
            raise ValueError(f"it is a member of more than {MOST_WORDS} process groups")
        group, key, value = content
        return (str(group), str(key)), base64.b64decode(value)

    def give_up(self, label: str) -> None:
        """End all waits for other agents under this label, and drop the values under it."""
        with self._changed:
            self._given_up.add(label)
            # Kept, the values of many memberships would in the end exceed the limit of a correct agent.
            self._values = {place: value for place, value in self._values.items() if not _is_under(label, place)}
            self._changed.notify_all()


def _is_under(label: str, place: Place) -> bool:
    return place[0].startswith(f"{label} ")


class GroupStore(dist.Store):  # type: ignore[name-defined, misc]
    """The store of one group, in the interface that torch needs."""

    def __init__(self, stores: GroupStores, label: str, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self._stores, self._label, self._ranks = stores, label, ranks
        self._group = f"{label} {','.join(map(str, ranks))}"

    def set(self, key: str, value: Any) -> None:
        self._stores.send(self._group, self._ranks, key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._stores.get(self._group, key)

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        seconds = self._stores.patience if timeout is None else timeout.total_seconds()
        if not self._stores.wait(self._label, self._group, keys, seconds):
            raise RuntimeError(f"no agent has set {keys} within {seconds:g} s")

    def all_agree(self, question: str, here: bool) -> bool:
        """Send a boolean to all members and wait for theirs. Returns whether all have sent True."""
        engine = self._stores.engine
        self.set(f"{question} {engine.rank}", b"1" if here else b"0")
        keys = [f"{question} {rank}" for rank in self._ranks]
        self._stores.wait(self._label, self._group, keys, None)
        return all(self._stores.get(self._group, key) == b"1" for key in keys)

    def check(self, keys: list[str]) -> bool:
        return self._stores.wait(self._label, self._group, keys, 0.0)
