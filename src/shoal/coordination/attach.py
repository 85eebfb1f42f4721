"""Sends an agent's tensors by process groups, if ``SHOAL_TRANSPORT=process-group``.

The members of a process group find each other through a store: each sends its address over Shoal's own links. So no
port is open for it, and the senders are authenticated.
"""

from __future__ import annotations

import base64
import datetime
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from ..engine.engine import Engine
from ..execution.control_messages import Service, read_json
from ..execution.membership import WHOLE, Plan
from ..transport.addresses import LOOPBACK
from ..transport.messages import Message
from ..transport.peer_address import TRANSPORTS
from ..transport.process_group import BACKENDS, MADE_HERE, GroupBackend, ProcessGroups, available
from .ordering import CALL, CollectiveOrdering

GROUP = "~group"
"""The name of messages about process groups."""
MOST_VALUES, MOST_BYTES = 1 << 12, 1 << 16
"""Limits of one agent: the values that are kept, and the bytes of each message. Values of an earlier membership are
dropped."""
Place = tuple[str, str]
PROCESS_GROUP = "process-group"
"""The value of ``SHOAL_TRANSPORT``."""


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
            engine.send_control([rank for rank in ranks if rank != engine.rank], GROUP, content, background=True)
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
        """An agent sends data about itself; see :class:`~.control_messages.Service`."""
        parsed = read_json(message, "a process group", partial(self._parsed, source), MOST_BYTES)
        self._keep(source, *parsed)

    def _parsed(self, source: int, content: Any) -> tuple[Place, bytes]:
        with self._changed:
            count = sum(sender == source for sender, _ in self._values.values())
        if count >= MOST_VALUES:
            raise ValueError(f"it has sent more than {MOST_VALUES} values for process groups")
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


@dataclass(frozen=True)
class BackendOptions:
    """The requested backend that moves tensors.

    Attributes:
        backend: The name of the backend of ``torch.distributed``.
        capacity: The capacity of the response cache.
        given: A process group of the script.
    """

    backend: str
    capacity: int
    given: Any = None

    @property
    def alike(self) -> dict[str, Any]:
        """The options that must be equal on all agents."""
        group = "of the script's" if self.given is not None else "of Shoal's"
        return {"SHOAL_PROCESS_GROUP": f"{self.backend}, {group}", "SHOAL_CACHE_CAPACITY": self.capacity}


def check_transport(name: str, where: str) -> None:
    """Raise ValueError for an unknown transport; an empty string is accepted."""
    if name and name not in (*TRANSPORTS, PROCESS_GROUP):
        raise ValueError(f"{where}={name!r}; it may be one of {', '.join((*TRANSPORTS, PROCESS_GROUP))}")


def check_backend(backend: str, given: Any, size: int, rank: int) -> str:
    """The name of the backend to use.

    Raises:
        ValueError: The backend is unknown or not available, or the script's own group does not have all agents.
    """
    if given is not None:
        if (given.size(), given.rank()) != (size, rank):
            raise ValueError(
                f"shoal.init(process_group=): this is rank {given.rank()} of {given.size()} in that group, and rank "
                f"{rank} of {size} agents; give a group of all, in the same order"
            )
        return str(given.name())
    if backend not in BACKENDS:
        raise ValueError(f"SHOAL_PROCESS_GROUP={backend!r}; it may be one of {', '.join(BACKENDS)}")
    if backend not in available():
        has = ", ".join(available()) or "none"
        raise ValueError(f"SHOAL_PROCESS_GROUP={backend}: this build of torch has {has}")
    if backend not in MADE_HERE:
        raise ValueError(f"SHOAL_PROCESS_GROUP={backend}: {BACKENDS[backend]}")
    return backend


def attach_backend(engine: Engine, wanted: BackendOptions) -> None:
    """Attach the backend to the engine: after the agents have met, and before the exchange starts.

    Raises:
        ValueError: Encryption is required, but the backend does not encrypt.
    """
    router = engine.router
    far = [rank for rank in range(engine.size) if rank != engine.rank and router.transport_to(rank) == "network"]
    if far and router.certificates is not None:
        raise ValueError(
            f"SHOAL_TLS=on, and SHOAL_TRANSPORT=process-group: what a process group of {wanted.backend} sends to ranks "
            f"{far} is not encrypted; leave one of the two out"
        )
    order, stores = CollectiveOrdering(engine, wanted.capacity), GroupStores(engine)
    given = None if wanted.given is None else (tuple(range(engine.size)), wanted.given)
    address = router.endpoints[engine.rank].host or LOOPBACK

    def make(plan: Plan) -> ProcessGroups:
        # A new label for each membership: the earlier one is given up, and waits under it fail at once.
        label = f"after {plan.losses} losses and {plan.n_admitted} admissions"
        # The script's group serves the whole job only: after a loss, a collective in it would wait for the lost agents.
        return ProcessGroups(
            engine.rank,
            GroupBackend(wanted.backend, address, given if plan == WHOLE else None),
            partial(stores.of, label),
            partial(stores.give_up, label),
            order.moved,
            order.failed,
        )

    order.move_by(make)
    engine.add_service(CALL, order)
    engine.add_service(GROUP, stores)
    engine.attach_backend(order, order.on_admission)
