"""The plan of a weighted average: what all calls of one name and one round have in common.

The first call of a name checks its round and resolves its messages, into a :class:`RoundPlan` of the agent. Later calls
look it up, and pay for none of that. A plan depends on the static topology, so :meth:`Agent.drop_plans` drops all plans
when that changes, or the membership.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ..engine.discovery import submit_to_all
from ..execution.operation import FailurePolicy, Family, FusionSpec, Handle, Operation
from ..execution.stage import Steps
from ..runtime.agent import Agent, StaticTopology
from ..topology import Mixing
from .arguments import ALL, CallerGroup, channel_name
from .fused_ops import DiscoveryFamily, NeighborFamily

MOST_PLANS = 1024
"""Plans of an agent. A script may use a new name in each step, so beyond them all are dropped."""
FORMS = {"static": 0, "push within": 1}
"""The forms with the edges of the static topology, on which both sides must then agree."""
IN_STAGES = ("push", "pull", "pull within")
"""The forms that begin with sender discovery."""

T = TypeVar("T")
Key = tuple[str, str | None, type, Mixing | None, str, bool, bool, CallerGroup]
"""The operation, the name and its type, the round (None: the static topology) and its form, ``checked``, ``everybody``
and ``members`` of :func:`~.neighbor.submit`."""


@dataclass(frozen=True, slots=True)
class AgentEdges:
    """A round as this agent knows it, without the ranks that an operation excludes.

    Attributes:
        mixing: The round.
        form: The side that knows its edges; see :func:`~.neighbor.submit`.
        static: The static topology.
        destinations: Those of ``mixing``, with their scales, in the order in which they are served.
        digest: The digest of the static topology and the form, if both sides have to agree on them.
        among: The ranks that take part, in the format of :class:`~shoal.execution.stage.BackendRequest`.
    """

    mixing: Mixing
    form: str
    static: StaticTopology
    destinations: dict[int, float]
    digest: int
    among: tuple[int, ...] | None

    @classmethod
    def of(
        cls, agent: Agent, mixing: Mixing, form: str, static: StaticTopology, among: tuple[int, ...] | None
    ) -> AgentEdges:
        order = mixing.rotated_destinations(agent.size)
        scales = {rank: mixing.destinations[rank] for rank in order}
        return cls(mixing, form, static, scales, digest_of(form, static), among)


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """The plan of the calls of one name and one round.

    Attributes:
        channel: The key that matches the calls.
        mixing: The round, of all agents that call it.
        form: The side that knows its edges; see :func:`~.neighbor.submit`.
        family: The family in which small calls are fused; None if they are not.
        in_stages: Sender discovery comes first. Then a call that has begun cannot continue after a loss.
    """

    channel: str
    mixing: Mixing
    form: str
    family: Family | None
    in_stages: bool
    _static: StaticTopology = field(repr=False)
    _members: CallerGroup
    _everybody: bool
    _edges: dict[tuple[int, ...], AgentEdges] = field(default_factory=dict, repr=False)

    def sources(self, agent: Agent) -> tuple[int, ...]:
        """The ranks from which this agent receives, if none is lost."""
        if self.form != "static":
            return self.mixing.source_ranks
        return self._static.without(self._members.rest(agent.size)).mixing.source_ranks

    def edges(
        self, agent: Agent, operation: Operation, replan: Callable[[tuple[int, ...]], Mixing] | None
    ) -> AgentEdges:
        """The edges of a call, without the ranks that it excludes.

        ``replan``: returns the round without lost agents; if not given, their weights go to this agent's own tensor.
        """
        gone = operation.excluded_ranks
        # All agents have agreed on the excluded ranks of this call, so the same ones give the same edges at both ends.
        known = self._edges.get(gone)
        if known is not None:
            return known
        form, static, mixing = self.form, self._static, self.mixing
        if form == "static":
            # An agent outside the group makes no call. With its edges left in, this agent would wait for it.
            static = static.without(tuple(sorted({*gone, *self._members.rest(agent.size)})))
            mixing = static.mixing
        elif gone:
            mixing = mixing.without(gone) if replan is None else replan(gone)
        found = AgentEdges.of(agent, mixing, form, static, self._among(agent, operation, static))
        if not gone or replan is None:  # another round may be the same, and another one without lost agents
            self._edges[gone] = found
        return found

    def _among(self, agent: Agent, operation: Operation, static: StaticTopology) -> tuple[int, ...] | None:
        size, form = agent.size, self.form
        if form in ("push", "pull") or (form == "push-pull" and self._everybody):
            return () if operation.among is None else tuple(operation.callers(size))
        return None if form == "push-pull" else static.component(operation.left_of(range(size)))


def plan_of(
    agent: Agent,
    op: str,
    name: str | None,
    mixing: Mixing | None,
    form: str,
    checked: bool,
    everybody: bool,
    members: CallerGroup,
) -> RoundPlan:
    """The plan of a call; for the arguments see :func:`~.neighbor.submit`. Raises as :func:`make_plan`."""
    plans = agent.plans
    if name is not None and not isinstance(name, str):
        channel_name(op, name)  # raises
    key: Key = op, name, type(name), mixing, form, checked, everybody, members
    plan: RoundPlan = plans.get(key) or make_plan(agent, plans, key)
    if plan.in_stages:  # without this check, an isolated agent's collective would end with its own tensor alone
        agent.engine.check_joined(op)
    return plan


def submit_planned(
    agent: Agent,
    op: str,
    plan: RoundPlan,
    steps: Callable[[Operation], Steps[T]] | FusionSpec,
    timeout: float | None,
    named: bool,
    among: Sequence[int] | None,
) -> Handle[T]:
    """Begin the operation of a call. If it has no sender discovery, it continues after a loss without the lost."""
    if plan.in_stages:
        return submit_to_all(agent.engine, op, plan.channel, steps, timeout, named, among=among)
    policy = FailurePolicy.SKIP_MISSING
    return agent.engine.submit(op, plan.channel, steps, timeout, named, on_loss=policy, among=among)


def make_plan(agent: Agent, plans: dict[Key, RoundPlan], key: Key) -> RoundPlan:
    """Check a round, resolve it, and keep the plan in ``plans``.

    Raises:
        ValueError: The name is invalid; or the round has ranks that do not call it, or edges beyond the static
            topology where it must stay within.
    """
    op, name, _, mixing, form, checked, everybody, members = key
    static = agent.topology
    if mixing is None:
        mixing, form = static.mixing, "static"
    else:
        members.check(op, "src_weights", mixing.source_ranks)
        members.check(op, "dst_weights", mixing.destination_ranks)
        if form in ("push", "pull") and not checked:
            _check_within(agent, op, mixing, form, static.mixing)
            form += " within"
    family: Family | None = None
    if form in ("push", "pull"):
        family = DiscoveryFamily(agent, mixing, form) if members is ALL else None
    elif form == "push-pull" or (form == "static" and members is ALL):
        family = NeighborFamily(agent, mixing, digest_of(form, static), checked and form == "push-pull")
    channel = members.channel(op, name)
    plan = RoundPlan(channel, mixing, form, family, form in IN_STAGES, static, members, everybody)
    # In the dictionary that the caller took: drop_plans() may have replaced it since, and a plan of the old topology
    # must not get into the new one.
    if len(plans) >= MOST_PLANS:
        plans.clear()
    plans[key] = plan
    return plan


def digest_of(form: str, static: StaticTopology) -> int:
    """The digest of the data of a round on which both sides of an edge must agree."""
    return static.digest ^ FORMS[form] if form in FORMS else 0


def _check_within(agent: Agent, op: str, mixing: Mixing, form: str, static: Mixing) -> None:
    allowed = static.destination_ranks if form == "push" else static.source_ranks
    asked = mixing.destination_ranks if form == "push" else mixing.source_ranks
    beyond = sorted(set(asked) - set(allowed))
    if beyond:
        raise ValueError(
            f"{op} on rank {agent.rank}: ranks {beyond} are no {'out' if form == 'push' else 'in'}-neighbours in the "
            "static topology, and with enable_topo_check=False a pure push or pull stays within it; leave the check "
            "on, or give both src_weights and dst_weights"
        )
