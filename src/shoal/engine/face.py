"""The face of the engine: what modules outside of it read and set. They use no part of the engine by itself.

:class:`~shoal.engine.engine.Engine` adds the calls of its parts that others make, such as ``publish``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from ..config import Config
from ..errors import ShoalError
from ..fault_tolerance.agreement import Agreement, MembershipChange
from ..fault_tolerance.membership_states import MembershipTable
from ..fault_tolerance.rejoin import Rejoin
from ..operations.backend_stages import CollectiveBackend
from ..operations.deadlock import Deadlocks
from ..operations.devices import Devices
from ..operations.lifecycle import Lifecycle
from ..operations.membership import Plan, View
from ..operations.publishing import Publisher
from ..operations.sender import Sender
from ..operations.services import Services
from ..transport.authentication.tls import Certificates
from ..transport.peer_address import PeerId
from ..transport.router import Router
from .stalls import Stalls
from .watchdog import Watchdog


class EngineFace:
    """The settings and the state of one agent's engine."""

    compresses_locally: bool
    """Compressors encode messages within this machine, too."""
    agreement: Agreement
    deadlocks: Deadlocks
    devices: Devices
    lifecycle: Lifecycle
    membership: MembershipTable
    publisher: Publisher
    rejoin: Rejoin
    router: Router
    sender: Sender
    services: Services
    stalls: Stalls
    watchdog: Watchdog

    def configure(self, config: Config, certificates: Certificates | None) -> None:
        """Set what the environment variables say. Call it before the start."""
        self.rejoin.extend_timeout(config.entry_timeout)
        self.publisher.require_finite(config.check_finite)
        self.compresses_locally = config.compress_locally
        self.devices.use_device_memory(config.device_memory)
        self.watchdog.drop_silent_after(config.drop_after)
        self.stalls.report_after(config.stall_seconds)
        self.router.encrypt_with(certificates)

    def attach_backend(self, backend: CollectiveBackend, on_entry: Callable[[], None]) -> None:
        """Let a backend move tensors. ``on_entry`` is called when agents are admitted. Call it before the start."""
        if self.agreement.active:
            self.sender.keep_backend_tensors()
        self.rejoin.notify_of_entry(on_entry)
        self.lifecycle.backend_stages.carry_with(backend)

    @property
    def view(self) -> View:
        """The members, and how each of the others was lost. Under the engine's lock, or an immutable copy of it."""
        return self.membership.view

    @property
    def alive(self) -> tuple[int, ...]:
        """The members as this agent knows them, ascending."""
        return self.membership.view.alive

    def has_left(self, rank: int) -> bool:
        """Whether an agent has shut down."""
        return rank in self.membership.view.left

    def reason_of_loss(self, rank: int) -> str:
        """How an agent was lost; empty if it was not."""
        return self.membership.view.died.get(rank, "")

    @property
    def agreed_members(self) -> tuple[int, ...]:
        """The members on which all have agreed, ascending; without agreements those that this agent knows."""
        return self.agreement.alive if self.agreement.active else self.membership.view.alive

    def on_membership_change(self, listener: Callable[[MembershipChange], None]) -> None:
        """Call ``listener`` in the driving thread with every change on which the members agree."""
        self.agreement.listeners.append(listener)

    @property
    def is_joining(self) -> bool:
        """Whether this agent was started again or later, and has not been admitted yet."""
        return self.membership.view.is_joining

    @property
    def survives_losses(self) -> bool:
        """Whether operations continue without lost agents (``on_loss="continue"``)."""
        return self.agreement.active

    @property
    def is_agreeing(self) -> bool:
        """Whether the survivors are agreeing on a loss, so that no operation begins."""
        return self.lifecycle.gate.paused

    @property
    def is_closing(self) -> bool:
        """Whether this agent has shut down, or is about to, so that no operation begins any more."""
        return self.lifecycle.gate.closing

    @property
    def current_plan(self) -> Plan:
        """The plan of operations that begin now."""
        return self.lifecycle.gate.plan

    @property
    def attempt(self) -> int:
        """The number of losses and admissions on which the members have agreed."""
        return self.lifecycle.gate.plan.attempt

    @property
    def ended(self) -> ShoalError | None:
        """The error of collective operations, which are not possible any more; None while they are."""
        return self.lifecycle.gate.ended

    def reason_against(self, one_sided: bool) -> ShoalError | None:
        """The error of operations that are not possible any more; ``one_sided`` ones may survive a loss."""
        return self.lifecycle.gate.reason_against(one_sided)

    @property
    def backend(self) -> CollectiveBackend | None:
        """The backend that moves tensors instead of links; None if there is none."""
        return self.lifecycle.backend_stages.backend

    @property
    def stall_seconds(self) -> float:
        """Seconds without progress after which a waiting call is logged."""
        return self.stalls.after

    def is_far(self, rank: int) -> bool:
        """Whether messages to an agent use the network, or are to be compressed as if they did."""
        return self.compresses_locally or self.backend is not None or self.router.transport_to(rank) == "network"

    @property
    def can_fuse(self) -> bool:
        """Whether operations that begin now may be fused: all of them use links, among all agents.

        After a loss, rounds in progress may have different plans.
        """
        return self.lifecycle.backend_stages.backend is None and not self.lifecycle.gate.plan.gone

    @property
    def can_fuse_multistage(self) -> bool:
        """Whether operations that restart after a loss may be fused too: only if losses are not survived.

        Otherwise agents that fuse and agents that do not would restart at different stages.
        """
        return self.can_fuse and not self.agreement.active

    @property
    def bytes_sent(self) -> int:
        """Bytes of tensors that this agent has sent so far."""
        return self.sender.bytes_sent

    @property
    def place(self) -> PeerId:
        """The process and machine of this agent."""
        return self.router.place

    @property
    def incarnation(self) -> int:
        """The number of restarts of this agent."""
        return self.router.place.incarnation

    @property
    def host(self) -> str:
        """The name of this agent's machine."""
        return self.router.place.host

    @property
    def inbox_address(self) -> str:
        """The address of this agent's inbox, for agents of the same process."""
        return self.router.inbox.address

    def holds_topology(self) -> list[str]:
        """The names of the objects that depend on the current topology."""
        return [name for service in self.services.all() for name in service.holds_topology()]

    def expect_no_calls_of(self, threads: Iterable[threading.Thread]) -> None:
        """Tell the deadlock detector that these threads do not call Shoal."""
        self.deadlocks.bystanders.update(threads)
