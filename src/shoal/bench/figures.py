"""The measurements of an agent, in the form sent to the process that started the job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figures:
    """The measurements on tensors of one size.

    Attributes:
        kind: The kind of measurement, which defines the values.
        nbytes: Bytes of one agent's tensor.
        agents: The number of agents.
        values: By case; seconds of the slowest agent in each repetition, or bytes of the agent that holds most.
    """

    kind: str
    nbytes: int
    agents: int
    values: dict[str, list[float]]
