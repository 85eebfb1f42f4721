"""What an agent measures, as it travels to whoever started the job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figures:
    """What was measured on tensors of one size.

    Attributes:
        kind: Which measurement; it says what the values are.
        nbytes: Bytes of one agent's tensor.
        agents: How many took part.
        values: By case; seconds of the slowest agent in each repetition, or bytes of the agent that holds most.
    """

    kind: str
    nbytes: int
    agents: int
    values: dict[str, list[float]]
