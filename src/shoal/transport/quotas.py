"""The quotas of a peer, which limit what it can cost this agent.

A quota limits how much of an agent each peer may use: kept messages, memory, mappings, descriptors. No agent that runs
this code reaches them, whatever its script does. A peer that exceeds one counts as lost, by name, and its share is
freed. Tensors in the sender's own memory cost the receiver nothing and do not count.
"""

from __future__ import annotations

import os
import resource

from ..errors import ProtocolError

MESSAGES = 1 << 15
"""Messages of one peer that are kept until this agent needs them; also its announced tensors, and its questions.

A neighbour may be ahead by all calls that its script has in flight: three bursts of ten thousand calls fit. It
asks once for each call in flight. Each tensor may be a mapping, of which Linux gives a process 65,530."""
MACHINE_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
KEPT_BYTES = MACHINE_BYTES // 2
"""Bytes of tensors of one peer that arrived before this agent needs them, and as many bytes of announced ones.

A neighbour may be two rounds ahead with its whole model under each name. It keeps that memory itself until this agent
has read it. This agent has a model and a result of that size, which with these would exceed the machine's memory."""
SEGMENTS = 1 << 14
"""Memory files of one peer that are mapped: one for each of its tensors of more than 256 KiB in transit at a
time. The peer has a descriptor open for each, of which a process has some thousands."""


def descriptor_limit() -> int:
    """How many descriptors of one peer's windows are kept. This agent has one of its own for each, so the descriptors
    of a peer that behaves like this agent cannot exceed half of the process's limit.
    """
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


class Quota:
    """The use of one kind by one peer."""

    __slots__ = ("_counted", "count", "nbytes")

    def __init__(self, counted: str) -> None:
        self._counted = counted
        self.count = 0
        self.nbytes = 0

    def acquire(self, nbytes: int) -> None:
        """Charge one more, of this many bytes. ProtocolError if it exceeds the quota."""
        if self.count >= MESSAGES or self.nbytes + nbytes > KEPT_BYTES:
            raise ProtocolError(
                f"it has exceeded its quota of {MESSAGES:,} {self._counted}, or {KEPT_BYTES:,} bytes of them: there "
                f"are {self.count:,} of {self.nbytes:,} bytes, and it sent one more of {nbytes:,}"
            )
        self.count += 1
        self.nbytes += nbytes

    def release(self, nbytes: int) -> None:
        self.count -= 1
        self.nbytes -= nbytes
