"""The samples of an agent: equal numbers from a common dataset, or from shards of its own."""

from .sampler import AgentSampler as AgentSampler
from .shards import dirichlet_shards as dirichlet_shards

__all__ = ["AgentSampler", "dirichlet_shards"]
