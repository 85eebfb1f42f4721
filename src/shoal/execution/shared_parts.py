"""The parts of one agent that most other parts use: one object for their constructors."""

from __future__ import annotations

from dataclasses import dataclass

from ..transport.router import Router
from .events import Events
from .matching import Matcher
from .membership import Membership
from .progress import Progress
from .sender import Sender


@dataclass(frozen=True)
class SharedParts:
    """The parts of one agent that carry its messages, match them, and know its members.

    Attributes:
        rank: The rank of the agent.
        size: The number of ranks of the job.
        membership: The members. Only a part that is given the table of states can change it.
    """

    rank: int
    size: int
    router: Router
    events: Events
    membership: Membership
    matcher: Matcher
    progress: Progress
    sender: Sender
