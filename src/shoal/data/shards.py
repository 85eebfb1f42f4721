"""Uneven shards of a labelled dataset, to test algorithms on data that differ between agents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..runtime.agent import current


def dirichlet_shards(
    labels: Sequence[int] | torch.Tensor, agents: int | None = None, *, alpha: float = 0.5, seed: int = 0
) -> list[torch.Tensor]:
    """Deal a labelled dataset out unevenly, to try how an algorithm copes (Hsu, Qi, Brown 2019, arXiv:1909.06335).

    Each label is divided between the agents in proportions drawn from a Dirichlet distribution. No communication: all
    agents that give the same arguments get the same shards.

    Args:
        labels: The label of each sample, integers ``[m]``.
        agents: How many shards; as many as there are agents if None.
        alpha: Small: an agent has few labels, and shards differ much in size. Large: about the same share of all.
        seed: The seed of the draw; 0 or more.

    Returns:
        The sorted indices of each agent's samples, int64 ``[m_i]``. Every sample is in one shard; none is empty.

    Raises:
        ValueError: There are fewer samples than agents, or ``alpha`` is not above 0.
    """
    agents = current("dirichlet_shards").size if agents is None else agents
    given = np.asarray(labels)
    if len(given) < agents or not alpha > 0:
        raise ValueError(
            f"dirichlet_shards: {len(given)} samples for {agents} agents, alpha={alpha}, which must be > 0"
        )
    rng = np.random.default_rng(seed)
    parts: list[list[int]] = [[] for _ in range(agents)]
    for label in np.unique(given):
        of_label = rng.permutation(np.flatnonzero(given == label))
        cuts = np.cumsum(rng.dirichlet([alpha] * agents))[:-1] * len(of_label)
        for part, dealt in zip(parts, np.split(of_label, cuts.astype(int)), strict=True):
            part.extend(dealt.tolist())
    for part in parts:
        if not part:
            part.append(max(parts, key=len).pop())
    return [torch.tensor(sorted(part)) for part in parts]
