"""What an agent asks to have moved, until it is."""

from __future__ import annotations

from dataclasses import dataclass

from ..engine.operation import Operation, Stage
from ..transport.link import Lease
from ..transport.movement import Movement
from .request import Request


@dataclass(eq=False, slots=True)
class Asked:
    """What this agent has asked for and has not been told to move.

    Attributes:
        leases: Of the memory that is to be sent.
        committed: It was said in the round that is under way: others may move theirs because of it.
        withdrawn: It has failed here.
    """

    request: Request
    operation: Operation
    stage: Stage
    movement: Movement
    leases: list[Lease]
    committed: bool = False
    withdrawn: bool = False

    @property
    def partners(self) -> set[int]:
        """Without whom it cannot be moved."""
        return self.stage.needs | self.stage.arrived.keys()

    def release(self) -> None:
        for lease in self.leases:
            lease.release()
        self.leases = []
