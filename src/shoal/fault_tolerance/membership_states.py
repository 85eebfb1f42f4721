"""The states of the agents of a job, as one agent knows them, and the one table of their transitions.

The failure detector, the agreement on losses, admissions and the resolution of partitions all report events here. No
other module changes the membership. An event that the table does not list for a state is an error of Shoal: it is
refused, and nothing changes.

Messages of other agents can arrive late and several times. So each event that a message can cause is listed for every
state in which that message may arrive, often without an effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum

from ..operations.membership import NOT_YET, Departure, Membership, View


class State(Enum):
    """The state of an agent. The first two, and the last two, are members in this agent's view."""

    MEMBER = "takes part in the job"
    SUSPECT = "a sign of its end was noticed; its last messages may still arrive"
    LEFT = "has shut down in order"
    NEEDED = "has shut down, and an operation needs it: this counts as a loss"
    LOST = "its process has ended, or cannot continue"
    UNREACHABLE = "counts as lost, and may still run in another partition"
    NOT_STARTED = "the job began without it; it may join later"
    UNKNOWN = "this agent is joining, or the loss was before it joined"
    JOINING = "itself: it waits to be admitted"
    CUT_OFF = "itself: others count it as lost, or it missed messages"


class Event(Enum):
    """What happens to an agent."""

    SUSPECT = "a connection closed, a process ended, or a message announced the end"
    LEAVE = "its shutdown is confirmed"
    NEED = "an operation needs it after its shutdown"
    LOSE = "its loss is confirmed, and certain"
    LOSE_TOUCH = "its loss is confirmed, and the network may be the cause"
    ADMIT = "the members admit it"
    BEGIN_WITHOUT = "the job begins without it"
    ISOLATE = "this agent is joining, and has no news of the others yet"
    JOIN = "this agent itself begins to wait for admission"
    CUT_OFF = "this agent itself must not report losses any more"


_DEPARTED = (State.LOST, State.UNREACHABLE, State.NOT_STARTED)
TRANSITIONS: dict[tuple[State, Event], State] = {
    **{
        (state, event): after
        for state in (State.MEMBER, State.SUSPECT)
        for event, after in {
            Event.SUSPECT: State.SUSPECT,
            Event.LEAVE: State.LEFT,
            Event.LOSE: State.LOST,
            Event.LOSE_TOUCH: State.UNREACHABLE,
            Event.ADMIT: State.MEMBER,  # by two operations of admission in flight at once
            Event.CUT_OFF: State.CUT_OFF,
        }.items()
    },
    (State.MEMBER, Event.BEGIN_WITHOUT): State.NOT_STARTED,
    (State.MEMBER, Event.JOIN): State.JOINING,
    # Another agent reports as lost who has shut down here: it needs that agent.
    **{(State.LEFT, event): State.NEEDED for event in (Event.NEED, Event.LOSE, Event.LOSE_TOUCH)},
    **{(State.NEEDED, event): State.NEEDED for event in (Event.NEED, Event.LOSE, Event.LOSE_TOUCH)},
    **{(state, event): state for state in (State.LEFT, State.NEEDED) for event in (Event.SUSPECT, Event.LEAVE)},
    # The first cause of a loss remains, also if other agents report another one later.
    **{
        (state, event): state
        for state in (*_DEPARTED, State.UNKNOWN)
        for event in (Event.SUSPECT, Event.LEAVE, Event.LOSE, Event.LOSE_TOUCH)
    },
    # Members that admit this agent say which of the others have certainly ended.
    (State.UNKNOWN, Event.LOSE): State.LOST,
    (State.UNKNOWN, Event.BEGIN_WITHOUT): State.NOT_STARTED,
    **{(state, Event.ADMIT): State.MEMBER for state in (*_DEPARTED, State.LEFT, State.NEEDED, State.UNKNOWN)},
    # This agent may have had news of the others before it learned that the job runs already.
    **{
        (state, Event.ISOLATE): State.UNKNOWN
        for state in (*_DEPARTED, State.MEMBER, State.SUSPECT, State.LEFT, State.NEEDED, State.UNKNOWN)
    },
    (State.JOINING, Event.ADMIT): State.MEMBER,
    (State.JOINING, Event.CUT_OFF): State.CUT_OFF,
    (State.CUT_OFF, Event.CUT_OFF): State.CUT_OFF,
}
"""The next state, by state and event. What is not listed is refused."""

PRESENT = frozenset({State.MEMBER, State.SUSPECT, State.JOINING, State.CUT_OFF})
"""The states of members in a view."""
_DIED = frozenset(_DEPARTED)


class IllegalTransition(RuntimeError):
    """An event that cannot happen to an agent in its state: an error of Shoal."""


def departure_event(departure: Departure) -> Event:
    """The event of a confirmed departure."""
    if not departure.died:
        return Event.LEAVE
    return Event.LOSE_TOUCH if departure.silent or not departure.certain else Event.LOSE


class MembershipTable(Membership):
    """The state of each agent. Changed under the engine's lock; any thread may read its view."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._states = [State.MEMBER] * size
        self._causes: dict[int, str] = {}  # of each loss
        self._watchers: list[Callable[[View], None]] = []

    def watch(self, watcher: Callable[[View], None]) -> None:
        """Call ``watcher`` with the new view after every change. It must be quick and must not communicate."""
        self._watchers.append(watcher)

    def state(self, rank: int) -> State:
        """The state of an agent."""
        return self._states[rank]

    def apply(self, event: Event, rank: int, cause: str = "") -> State:
        """Take an event of one agent, with the cause of a loss. Returns its new state.

        Raises:
            IllegalTransition: The table does not list the event for the agent's state. Nothing has changed.
        """
        self.apply_to_all(event, {rank: cause})
        return self._states[rank]

    def apply_to_all(self, event: Event, causes: Mapping[int, str]) -> None:
        """Take an event of several agents, by rank with the causes of losses, as one change of the view."""
        after = {rank: self._next(rank, event) for rank in causes}
        if all(self._states[rank] is state for rank, state in after.items()):
            return
        unseen = all({self._states[rank], state} <= {State.MEMBER, State.SUSPECT} for rank, state in after.items())
        for rank, state in after.items():
            if state in _DIED and self._states[rank] is not state:
                self._causes[rank] = causes[rank]
            self._states[rank] = state
        if not unseen:  # a suspect is a member until its departure is confirmed
            self._renew()

    def begin_without(self, ranks: Iterable[int]) -> None:
        """Begin the job without agents that may join later."""
        self.apply_to_all(Event.BEGIN_WITHOUT, dict.fromkeys(ranks, NOT_YET))

    def stand_alone(self, rank: int) -> None:
        """Make this agent the only member, while it waits to be admitted."""
        self.apply_to_all(Event.ISOLATE, {other: "" for other in range(len(self._states)) if other != rank})
        self.apply(Event.JOIN, rank)

    def _next(self, rank: int, event: Event) -> State:
        state = self._states[rank]
        after = TRANSITIONS.get((state, event))
        if after is None:
            raise IllegalTransition(f"event {event.name} of rank {rank}, whose state is {state.name}")
        return after

    def _renew(self) -> None:
        states = self._states
        self.view = View(
            self.view.epoch + 1,
            self._ranks(*PRESENT),
            self._ranks(State.LEFT, State.NEEDED),
            {rank: self._causes[rank] for rank in self._ranks(*_DIED)},
            self._ranks(State.UNREACHABLE, State.UNKNOWN),
            self._ranks(State.NEEDED),
            State.JOINING in states,
            State.CUT_OFF in states,
        )
        for watcher in self._watchers:
            watcher(self.view)

    def _ranks(self, *states: State) -> tuple[int, ...]:
        return tuple(rank for rank, state in enumerate(self._states) if state in states)


def table_as_markdown() -> str:
    """The table of transitions for the documentation: a row for each state; a dash where an event is refused."""
    events = list(Event)
    rows = [["state", "the agent", *(f"`{event.name}`" for event in events)], ["---"] * (2 + len(events))]
    for state in State:
        after = [TRANSITIONS.get((state, event)) for event in events]
        rows.append([f"`{state.name}`", state.value, *("-" if one is None else one.name for one in after)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
