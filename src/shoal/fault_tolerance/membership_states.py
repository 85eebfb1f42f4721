"""The states of the agents of a job, as one agent knows them, and the one table of their transitions.

The failure detector, the agreement on losses, admissions and the resolution of partitions all report events here. No
other module changes the membership. An event that the table does not list for a state is an error of Shoal: it is
refused, and nothing changes.

Messages of other agents can arrive late and several times. So each event that a message can cause is listed for every
state in which that message may arrive, often without an effect.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum

from ..execution.membership import NOT_YET, Departure, Membership, View


class AgentState(Enum):
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


class AgentEvent(Enum):
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


def _transitions() -> dict[tuple[AgentState, AgentEvent], AgentState]:
    state, event = AgentState, AgentEvent
    losses = (event.LOSE, event.LOSE_TOUCH)
    shut_down, departed = (state.LEFT, state.NEEDED), (state.LOST, state.UNREACHABLE, state.NOT_STARTED)
    table: dict[tuple[AgentState, AgentEvent], AgentState] = {}
    for current in (state.MEMBER, state.SUSPECT):
        table[current, event.SUSPECT] = state.SUSPECT
        table[current, event.LEAVE] = state.LEFT
        table[current, event.LOSE] = state.LOST
        table[current, event.LOSE_TOUCH] = state.UNREACHABLE
        table[current, event.ADMIT] = state.MEMBER  # by two operations of admission in flight at once
        table[current, event.CUT_OFF] = state.CUT_OFF
    table[state.MEMBER, event.BEGIN_WITHOUT] = state.NOT_STARTED
    table[state.MEMBER, event.JOIN] = state.JOINING
    for current in shut_down:
        table[current, event.SUSPECT] = table[current, event.LEAVE] = current
        # Another agent that reports the loss of an agent that has shut down in order needs that agent.
        table.update({(current, need): state.NEEDED for need in (event.NEED, *losses)})
    for current in (*departed, state.UNKNOWN):  # the first cause of a loss remains, whatever other agents report later
        table.update({(current, sign): current for sign in (event.SUSPECT, event.LEAVE, *losses)})
    # The members that admit this agent report which other agents have certainly ended.
    table[state.UNKNOWN, event.LOSE] = state.LOST
    table[state.UNKNOWN, event.BEGIN_WITHOUT] = state.NOT_STARTED
    for current in (*departed, *shut_down, state.UNKNOWN):
        table[current, event.ADMIT] = state.MEMBER
    # This agent may have news of the others before it learns that the job runs already.
    for current in (*departed, *shut_down, state.UNKNOWN, state.MEMBER, state.SUSPECT):
        table[current, event.ISOLATE] = state.UNKNOWN
    table[state.JOINING, event.ADMIT] = state.MEMBER
    table[state.JOINING, event.CUT_OFF] = table[state.CUT_OFF, event.CUT_OFF] = state.CUT_OFF
    return table


TRANSITIONS = _transitions()
"""The next state, by state and event. Other transitions are refused."""

PRESENT = frozenset({AgentState.MEMBER, AgentState.SUSPECT, AgentState.JOINING, AgentState.CUT_OFF})
"""The states of members in a view."""
_DIED = frozenset({AgentState.LOST, AgentState.UNREACHABLE, AgentState.NOT_STARTED})
_MEMBERS = frozenset({AgentState.MEMBER, AgentState.SUSPECT})


class IllegalTransition(RuntimeError):
    """An event that cannot happen to an agent in its state: an error of Shoal."""


def departure_event(departure: Departure) -> AgentEvent:
    """The event of a confirmed departure."""
    if not departure.died:
        return AgentEvent.LEAVE
    # A silent agent is excluded for certain, but its process may still run in another partition. In state LOST it would
    # never be probed.
    return AgentEvent.LOSE_TOUCH if departure.silent or not departure.certain else AgentEvent.LOSE


class MembershipTable(Membership):
    """The state of each agent. Changed under the engine's lock; any thread may read its view."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._states = [AgentState.MEMBER] * size
        self._causes: dict[int, str] = {}  # of each loss
        self._watchers: list[Callable[[View], None]] = []

    def watch(self, watcher: Callable[[View], None]) -> None:
        """Call ``watcher`` with the new view after every change. It must be quick and must not communicate."""
        self._watchers.append(watcher)

    def state(self, rank: int) -> AgentState:
        """The state of an agent."""
        return self._states[rank]

    def apply(self, event: AgentEvent, rank: int, cause: str = "") -> AgentState:
        """Take an event of one agent, with the cause of a loss. Returns its new state.

        Raises:
            IllegalTransition: The table does not list the event for the agent's state. Nothing has changed.
        """
        self.apply_to_all(event, {rank: cause})
        return self._states[rank]

    def apply_to_all(self, event: AgentEvent, causes: Mapping[int, str]) -> None:
        """Take an event of several agents, by rank with the causes of losses, as one change of the view."""
        # All next states first: a refused event must change the state of no agent.
        after = {rank: self._next(rank, event) for rank in causes}
        # Several agents send the same notice. A new view for each would call the watchers again: the partition resolver
        # would probe at once.
        if all(self._states[rank] is state for rank, state in after.items()):
            return
        unseen = all({self._states[rank], state} <= _MEMBERS for rank, state in after.items())
        for rank, state in after.items():
            if state in _DIED and self._states[rank] is not state:
                self._causes[rank] = causes[rank]
            self._states[rank] = state
        if not unseen:  # a suspect is a member until its departure is confirmed
            self._renew()

    def begin_without(self, ranks: Iterable[int]) -> None:
        """Begin the job without agents that may join later."""
        self.apply_to_all(AgentEvent.BEGIN_WITHOUT, dict.fromkeys(ranks, NOT_YET))

    def stand_alone(self, rank: int) -> None:
        """Make this agent the only member, while it waits to be admitted."""
        self.apply_to_all(AgentEvent.ISOLATE, {other: "" for other in range(len(self._states)) if other != rank})
        self.apply(AgentEvent.JOIN, rank)

    def _next(self, rank: int, event: AgentEvent) -> AgentState:
        state = self._states[rank]
        after = TRANSITIONS.get((state, event))
        if after is None:
            raise IllegalTransition(f"event {event.name} of rank {rank}, whose state is {state.name}")
        return after

    def _renew(self) -> None:
        states = self._states
        # A new object, assigned once: other threads read the view without the lock, and must not see half a change.
        self.view = View(
            self.view.epoch + 1,
            self._ranks(*PRESENT),
            self._ranks(AgentState.LEFT, AgentState.NEEDED),
            {rank: self._causes[rank] for rank in self._ranks(*_DIED)},
            self._ranks(AgentState.UNREACHABLE, AgentState.UNKNOWN),
            self._ranks(AgentState.NEEDED),
            AgentState.JOINING in states,
            AgentState.CUT_OFF in states,
        )
        for watcher in self._watchers:
            watcher(self.view)

    def _ranks(self, *states: AgentState) -> tuple[int, ...]:
        return tuple(rank for rank, state in enumerate(self._states) if state in states)


def partition_order(part: Collection[int]) -> tuple[int, int]:
    """A sort key of partitions: the greatest continues.

    A partition with more agents is greater; among equal sizes, the one with the lowest rank is greatest.
    """
    return len(part), -min(part, default=0)
