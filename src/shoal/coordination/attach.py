"""Sends an agent's tensors by process groups, if ``SHOAL_TRANSPORT=process-group``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from ..engine.engine import Engine
from ..operations.membership import WHOLE, Plan
from ..transport.addresses import LOOPBACK
from ..transport.peer_address import TRANSPORTS
from ..transport.process_group import BACKENDS, MADE_HERE, GroupBackend, ProcessGroups, available
from .group_store import WORD, GroupStores
from .ordering import CALL, CollectiveOrdering

PROCESS_GROUP = "process-group"
"""The value of ``SHOAL_TRANSPORT``."""


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
        label = f"after {plan.attempt} losses, with {plan.entered} that have entered"
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
    engine.add_service(WORD, stores)
    engine.attach_backend(order, order.enter)
