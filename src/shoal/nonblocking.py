"""Operations that return at once, with a :class:`shoal.Handle`; ``handle.wait()`` returns what the blocking call would.

    handle = shoal.nonblocking.neighbor_allreduce(x)
    ...  # compute meanwhile
    mean = handle.wait()

Each has the arguments of the operation of its name in :mod:`shoal`; other operations have no such form. The tensor is
copied at the call, so it may change afterwards. A tensor that is given as ``out=`` must not be touched before the wait
ends.
"""

from .ops.collective import allgather_nonblocking as allgather
from .ops.collective import allreduce_nonblocking as allreduce
from .ops.collective import broadcast_nonblocking as broadcast
from .ops.gathering import neighbor_allgather_nonblocking as neighbor_allgather
from .ops.grouped import grouped_allgather_nonblocking as grouped_allgather
from .ops.grouped import grouped_allreduce_nonblocking as grouped_allreduce
from .ops.grouped import grouped_broadcast_nonblocking as grouped_broadcast
from .ops.grouped import grouped_neighbor_allreduce_nonblocking as grouped_neighbor_allreduce
from .ops.neighbor import neighbor_allreduce_nonblocking as neighbor_allreduce
from .ops.neighbor import pair_gossip_nonblocking as pair_gossip

__all__ = [
    "allgather",
    "allreduce",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_broadcast",
    "grouped_neighbor_allreduce",
    "neighbor_allgather",
    "neighbor_allreduce",
    "pair_gossip",
]
