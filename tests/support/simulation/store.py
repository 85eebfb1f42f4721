"""The store that the launcher serves: it outlives every agent, so no agent that crashes can hold its lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.errors import DeadlineExceeded

from .scheduler import Scheduler, Task


class Store:
    """See :class:`shoal.rendezvous.store.Store`."""

    def __init__(self, scheduler: Scheduler, address_of: Callable[[int], str]) -> None:
        self._scheduler, self._address_of = scheduler, address_of
        self._values: dict[str, bytes] = {}
        self._waiting: list[Task] = []

    @property
    def address(self) -> str:
        me = self._scheduler.current
        assert me is not None
        return self._address_of(me.agent)

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._scheduler.wake(task)

    def get(self, key: str, deadline: float) -> bytes:
        return self.first([key], deadline)[1]

    def first(self, keys: Sequence[str], deadline: float) -> tuple[str, bytes]:
        while True:
            for key in keys:
                if key in self._values:
                    return key, self._values[key]
            if self._scheduler.now >= deadline:
                raise DeadlineExceeded(f"no agent set the key {keys[0]!r} in time")
            me = self._scheduler.current
            assert me is not None
            self._waiting.append(me)
            self._scheduler.block(deadline)

    def has(self, key: str) -> bool:
        return key in self._values

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self.set(key, str(total).encode())
        return total

    def delete(self, key: str) -> None:
        self._values.pop(key, None)

    def close(self) -> None:
        """Others may still use it."""
