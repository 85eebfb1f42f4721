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
from ..operations.services import MinimalService, read_json
from ..transport.wire import Message

WORD = "~group"
MOST_WORDS, MOST_BYTES = 1 << 12, 1 << 16
"""Of one agent that are kept, and of each."""
Place = tuple[str, str]


class GroupStores(MinimalService):
    """The data that the agents have sent about themselves as members of process groups."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._values: dict[Place, bytes] = {}
        self._by: dict[int, int] = {}  # how many values each agent has sent
        self._changed = threading.Condition(threading.Lock())
        self._given_up: set[str] = set()  # labels
        self.patience = engine.timeout

    def of(self, label: str, ranks: tuple[int, ...]) -> GroupStore:
        """The store of a new group of these ranks; all of them make it, under this label."""
        return GroupStore(self, label, ranks)

    def send(self, group: str, ranks: tuple[int, ...], key: str, value: bytes) -> None:
        """Send a value to all members of a group."""
        self._keep((group, key), value)
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
            return self._values[group, key]

    def _keep(self, place: Place, value: bytes) -> None:
        with self._changed:
            self._values[place] = value
            self._changed.notify_all()

    def serve(self, source: int, message: Message) -> None:
        """An agent sends data about itself; see :class:`~.services.Service`."""
        self._keep(*read_json(message, "a process group", partial(self._parsed, source), MOST_BYTES))

    def _parsed(self, source: int, content: Any) -> tuple[Place, bytes]:
        self._by[source] = count = self._by.get(source, 0) + 1
        if count > MOST_WORDS:
            raise ValueError(f"it is a member of more than {MOST_WORDS} process groups")
        group, key, value = content
        return (str(group), str(key)), base64.b64decode(value)

    def give_up(self, label: str) -> None:
        """End all waits for other agents under this label."""
        with self._changed:
            self._given_up.add(label)
            self._changed.notify_all()


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
            raise RuntimeError(f"nobody has said {keys} within {seconds:g} s")

    def all_agree(self, what: str, here: bool) -> bool:
        """Send a boolean to all members and wait for theirs. Returns whether all have sent True."""
        engine = self._stores.engine
        self.set(f"{what} {engine.rank}", b"1" if here else b"0")
        keys = [f"{what} {rank}" for rank in self._ranks]
        self._stores.wait(self._label, self._group, keys, None)
        return all(self._stores.get(self._group, key) == b"1" for key in keys)

    def check(self, keys: list[str]) -> bool:
        return self._stores.wait(self._label, self._group, keys, 0.0)
