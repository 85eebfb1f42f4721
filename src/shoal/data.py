"""The samples of an agent: equal numbers in an epoch, from a common dataset or from shards of its own of any sizes.

Agents that average with each other take equally many steps, or one would wait for a neighbour that has ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from .errors import Mismatch
from .execution.membership import WHOLE
from .ops.arguments import Internal
from .ops.collective import gather_by_rank
from .runtime.agent import agent_context, current
from .topology._validate import as_int

__all__ = ["AgentSampler", "dirichlet_shards"]

_AGREED = ("a shard", "seed", "shuffle", "pad", "a dataset of the length")
Indices = np.ndarray[Any, np.dtype[np.int64]]


def _indices(shard: Sequence[int] | torch.Tensor) -> Indices:
    """The indices of a shard, in memory of its own.

    Raises:
        TypeError: They are no whole numbers, such as a mask, which would be taken for the indices 0 and 1.
        ValueError: They are not in one dimension.
    """
    found: Indices = np.asarray(shard).copy()  # a tensor's memory is the caller's, who may change it
    if found.size and found.dtype.kind not in "iu":
        raise TypeError(
            f"AgentSampler: shard has {found.dtype} and wants indices, which are whole numbers; of a mask take "
            "mask.nonzero().view(-1)"
        )
    if found.ndim != 1:
        raise ValueError(
            f"AgentSampler: shard has shape {list(found.shape)} and wants one dimension; give shard.reshape(-1)"
        )
    return found


def _checked_seed(called: str, seed: object) -> int:
    checked = as_int(seed, f"{called}: seed")
    if not 0 <= checked < 1 << 63:
        raise ValueError(f"{called}: seed={checked} must be 0 or more, and below 2**63")
    return checked


# The base class has only one purpose: Lightning, Fabric, Accelerate and Ray Train leave a DistributedSampler as it is,
# and deal the samples of any other out a second time. None of its code and attributes is used.
class AgentSampler(DistributedSampler[int]):
    """This agent's samples, in an order of its own for each epoch; for ``DataLoader(dataset, sampler=...)``.

    Without a shard, the dataset is common to all: in each epoch it is shuffled and dealt out evenly, no sample twice.
    The remaining ``len(dataset) % n`` are left out of the epoch, unless ``pad`` fills it up with repeated samples.

    With a shard, its samples are this agent's alone. Shards differ in size, m_i. An epoch has the mean of the sizes for
    each agent, which repeats its shard in random orders: a small shard more than once in an epoch, a large one in
    parts. Multiply the loss by :attr:`weight`, n·m_i / (m_1 + … + m_n). Agents count alike in an average, so without it
    a sample in a small shard would count more than one in a large shard; with it the mean over the agents' losses is
    the mean over all samples::

        sampler = shoal.data.AgentSampler(dataset, shard=mine)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler)
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)
            for inputs, labels in loader:
                loss = sampler.weight * criterion(model(inputs), labels)

    All agents create it together; it raises an error if their datasets or arguments differ. The order is a function of
    ``seed``, epoch and rank. ``state_dict()`` belongs into the checkpoint, and resumes in the middle of an epoch.

    With ``on_loss="continue"`` an epoch has the same length for the whole job, so a learning-rate schedule that counts
    steps keeps its meaning. Each epoch is distributed over the agents present at its begin, the same on all of them.
    After a loss it covers a part of the dataset, a different part in each epoch, and a lost shard is gone. A restarted
    or joining agent has the length and the position of the others if the sampler is a part of the
    :class:`~shoal.Checkpoint`. With more agents than at the start, samples are used more than once in an epoch.

    A ``DataLoader`` with worker processes has taken more from the sampler than the model has seen; after loading, set
    the begin: ``sampler.set_epoch(epoch, start=batches * batch_size)``.

    Args:
        dataset: Anything with a length.
        shard: Indices of this agent's samples; ``range(len(dataset))`` if the dataset is its own.
        seed: The seed of the order; 0 or more, the same on all agents.
        shuffle: Keep the order of the dataset, or of the shard, if False.
        pad: Without a shard: give each agent ``ceil`` instead of ``floor`` of ``len(dataset) / n``.
        timeout: Seconds until the deadline of the exchange with the others.

    Attributes:
        weight: The factor of the loss; 1 without shards.
        epoch: The current epoch, or the next one.

    Raises:
        TypeError: ``shard`` or ``seed`` is of no whole numbers.
        ValueError: An agent has no samples; ``seed`` is negative, or 2**63 or more; ``shard`` is not in one dimension.
        Mismatch: Agents have datasets of different lengths, or different arguments.
    """

    def __init__(
        self,
        dataset: Sized,
        shard: Sequence[int] | torch.Tensor | None = None,
        *,
        seed: int = 0,
        shuffle: bool = True,
        pad: bool = False,
        timeout: float | None = None,
    ) -> None:
        agent, seed = current("AgentSampler"), _checked_seed("AgentSampler", seed)
        self._rank, self._size, self._seed, self._shuffle = agent.rank, agent.size, seed, shuffle
        self._shard: Indices | None = None if shard is None else _indices(shard)
        self._total = len(dataset if self._shard is None else self._shard)
        self._pad = pad
        self._asked = self._total, self._shard is not None, seed, shuffle, pad, timeout
        self._totals, _ = _agreed(*self._asked, None)
        self._entered = 0
        self._is_joining = agent.engine.is_joining
        """The length is a guess until this agent has entered, or has loaded the others' state."""
        begin = list(range(agent.launch.begins)) if self._is_joining else list(self._totals)
        self._length, self._agents = self._length_for(begin), len(begin)
        empty = [rank for rank, total in self._totals.items() if not total]
        if empty or not self._length:
            raise ValueError(
                f"the shards of ranks {empty} are empty: each agent needs a sample at least"
                if shard is not None
                else f"{self._total} samples cannot be dealt out to {self._size} agents; pad=True deals some twice"
            )
        self._deal(list(self._totals))
        self.epoch = 0
        self._start = self._position = 0

    def _length_for(self, there: list[int]) -> int:
        """Samples of an agent in an epoch of a job that begins with these agents."""
        if self._shard is None:
            return -(-self._total // len(there)) if self._pad else self._total // len(there)
        return -(-sum(self._totals[rank] for rank in there) // len(there))

    def _deal(self, there: list[int]) -> None:
        """Distribute the samples over these agents, which include this one. The length of an epoch stays."""
        self._there = there
        samples = sum(self._totals[rank] for rank in there)
        self.weight = 1.0 if self._shard is None else len(there) * self._total / samples

    def _update_members(self) -> None:
        """At the begin of an epoch: distribute the samples over the current agents, the same on all of them."""
        agent = agent_context().agent
        gone, entered = WHOLE if agent is None else agent.engine.plan("~samples")
        if entered != self._entered:  # all agents see this in the same epoch
            self._totals, length = _agreed(*self._asked, None if self._is_joining else self._length)
            self._length, self._entered, self._is_joining = length or self._length, entered, False
        there = [rank for rank in self._totals if rank not in gone]
        if there != self._there:
            self._deal(there)

    def __len__(self) -> int:
        """Samples of this agent in an epoch, as many as of any other."""
        return self._length

    def __iter__(self) -> Iterator[int]:
        """The epoch from its begin, or from the position of a loaded state; at its end the next epoch follows."""
        if not self._start:  # in the middle of an epoch the others are not here
            self._update_members()
        epoch, self._position, self._start = self.epoch, self._start, 0
        for index in self._epoch_of(epoch)[self._position :]:
            self._position += 1
            yield int(index)
        self.epoch, self._position = epoch + 1, 0

    def set_epoch(self, epoch: int, start: int | None = None) -> None:
        """Set the next epoch. If it is the epoch of a loaded state, it begins at the loaded position.

        Args:
            epoch: From 0 on; the same on all agents.
            start: How many of its samples to skip.
        """
        if epoch != self.epoch:
            self.epoch, self._start = epoch, 0
        if start is not None:
            self._start = start
        self._position = self._start

    def state_dict(self) -> dict[str, Any]:
        """The current epoch and the position in it."""
        return {
            "epoch": self.epoch,
            "position": self._position,
            "seed": self._seed,
            "length": self._length,
            "agents": self._agents,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a state. With another number of agents it resumes after the same share of the epoch, so a common
        dataset without shards continues after the used samples.

        Raises:
            ValueError: As many agents had more or fewer samples.
        """
        length, agents = state_dict["length"], state_dict["agents"]
        if self._is_joining:  # of the agents that it joins
            self._length, self._agents, self._is_joining = length, agents, False
        if agents == self._agents and length != self._length:
            raise ValueError(
                f"the state is of epochs of {length} samples for each agent, and now there are {self._length}: the "
                "dataset or the shards are not the same. To use these, begin an epoch with set_epoch(epoch)."
            )
        self.epoch, self._seed = state_dict["epoch"], state_dict["seed"]
        self._start = self._position = round(state_dict["position"] * self._length / length)

    def _epoch_of(self, epoch: int) -> Indices:
        if self._shard is None:
            count = len(self._there)
            dealt = np.resize(self._order(epoch), self._length * count)  # begins again where it is too short
            return dealt[self._there.index(self._rank) :: count]
        first, last = epoch * self._length, (epoch + 1) * self._length - 1
        passes = range(first // self._total, last // self._total + 1)
        begin = first - passes[0] * self._total
        stream = np.concatenate([self._order(number, self._rank) for number in passes])
        found: Indices = self._shard[stream[begin : begin + self._length]]
        return found

    def _order(self, *which: int) -> Indices:
        if not self._shuffle:
            return np.arange(self._total)
        return np.random.default_rng((self._seed, *which)).permutation(self._total)


def _agreed(
    total: int, sharded: bool, seed: int, shuffle: bool, pad: bool, timeout: float | None, length: int | None
) -> tuple[dict[int, int], int]:
    """How many samples each agent has, and the length of an epoch (0 if no agent knows it), if all else is equal."""
    agent = current("AgentSampler")
    if agent.engine.is_joining:  # the others' are known when it has entered; until then they are taken for as large
        return dict.fromkeys({*range(agent.launch.begins), agent.rank}, total), 0
    here = agent.rank
    own = torch.tensor([sharded, seed, shuffle, pad, total, length or 0], device="cpu")
    found = {rank: row.tolist() for rank, row in gather_by_rank(own, Internal("AgentSampler"), timeout=timeout).items()}
    for rank, theirs in found.items():
        for setting, ours, other in zip(_AGREED, own.tolist()[:-1], theirs[:-1], strict=True):
            if ours != other and not (sharded and setting == _AGREED[-1]):
                raise Mismatch(f"AgentSampler: rank {here} has {setting}: {ours}; rank {rank}: {other}", (here, rank))
    return {rank: row[-2] for rank, row in found.items()}, max(row[-1] for row in found.values())


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
        TypeError: ``agents`` or ``seed`` is no whole number.
        ValueError: ``labels`` has not one dimension; there are fewer samples than agents, or no agent; ``alpha`` is not
            above 0 and finite; or ``seed`` is negative, or 2**63 or more.
    """
    agents = current("dirichlet_shards").size if agents is None else as_int(agents, "dirichlet_shards: agents")
    given = np.asarray(labels)
    if given.ndim != 1:
        shown = f"of shape {list(given.shape)}" if given.ndim else f"a {type(labels).__name__}"
        raise ValueError(f"dirichlet_shards: labels is {shown}; give a list or tensor of one label for each sample")
    if not 1 <= agents <= len(given):
        raise ValueError(f"dirichlet_shards: {len(given)} samples for {agents} agents; give each at least one sample")
    if not 0 < alpha < math.inf:
        raise ValueError(f"dirichlet_shards: alpha={alpha} must be above 0 and finite")
    rng = np.random.default_rng(_checked_seed("dirichlet_shards", seed))
    alpha = min(alpha, 1e100)  # proportions are equal from there on, and a sum of larger numbers would be infinite
    parts: list[list[int]] = [[] for _ in range(agents)]
    for label in np.unique(given):
        of_label = rng.permutation(np.flatnonzero(given == label))
        cuts = np.cumsum(rng.dirichlet([alpha] * agents))[:-1] * len(of_label)
        for part, dealt in zip(parts, np.split(of_label, cuts.astype(int)), strict=True):
            part.extend(dealt.tolist())
    for part in parts:
        if not part:
            part.append(max(parts, key=len).pop())
    return [torch.tensor(sorted(part), device="cpu") for part in parts]
