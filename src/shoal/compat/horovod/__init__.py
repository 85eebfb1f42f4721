"""Horovod's names of its PyTorch front end, so that a script of its users runs on Shoal.

    import shoal.compat.horovod as hvd  # was: import horovod.torch as hvd

docs/horovod.md has the list and the differences.
"""

import typing as _typing

from ..._lazy_import import public_names as _public_names
from ...execution.operation import poll as poll
from ...execution.operation import synchronize as synchronize
from ...runtime.bootstrap import shutdown as shutdown
from ...runtime.queries import is_homogeneous as is_homogeneous
from ...runtime.queries import is_initialized as is_initialized
from ...runtime.queries import local_rank as local_rank
from ...runtime.queries import local_size as local_size
from ...runtime.queries import rank as rank
from ...runtime.queries import size as size
from .agents import ProcessSet as ProcessSet
from .agents import add_process_set as add_process_set
from .agents import allgather_object as allgather_object
from .agents import broadcast_object as broadcast_object
from .agents import broadcast_optimizer_state as broadcast_optimizer_state
from .agents import broadcast_parameters as broadcast_parameters
from .agents import ccl_built as ccl_built
from .agents import cross_rank as cross_rank
from .agents import cross_size as cross_size
from .agents import cuda_built as cuda_built
from .agents import ddl_built as ddl_built
from .agents import global_process_set as global_process_set
from .agents import gloo_built as gloo_built
from .agents import gloo_enabled as gloo_enabled
from .agents import init as init
from .agents import mpi_built as mpi_built
from .agents import mpi_enabled as mpi_enabled
from .agents import mpi_threads_supported as mpi_threads_supported
from .agents import nccl_built as nccl_built
from .agents import remove_process_set as remove_process_set
from .agents import rocm_built as rocm_built
from .agents import start_timeline as start_timeline
from .agents import stop_timeline as stop_timeline
from .async_ops import Adasum as Adasum
from .async_ops import Average as Average
from .async_ops import HorovodInternalError as HorovodInternalError
from .async_ops import Max as Max
from .async_ops import Min as Min
from .async_ops import Product as Product
from .async_ops import ReduceOp as ReduceOp
from .async_ops import Sum as Sum
from .async_ops import allgather_async as allgather_async
from .async_ops import allreduce_async as allreduce_async
from .async_ops import allreduce_async_ as allreduce_async_
from .async_ops import alltoall_async as alltoall_async
from .async_ops import broadcast_async as broadcast_async
from .async_ops import broadcast_async_ as broadcast_async_
from .async_ops import grouped_allgather_async as grouped_allgather_async
from .async_ops import grouped_allreduce_async as grouped_allreduce_async
from .async_ops import grouped_allreduce_async_ as grouped_allreduce_async_
from .async_ops import grouped_reducescatter_async as grouped_reducescatter_async
from .async_ops import reducescatter_async as reducescatter_async
from .async_ops import sparse_allreduce_async as sparse_allreduce_async
from .compression import Compression as Compression
from .differentiable import SyncBatchNorm as SyncBatchNorm
from .differentiable import allgather as allgather
from .differentiable import allreduce as allreduce
from .differentiable import allreduce_ as allreduce_
from .differentiable import alltoall as alltoall
from .differentiable import barrier as barrier
from .differentiable import broadcast as broadcast
from .differentiable import broadcast_ as broadcast_
from .differentiable import grouped_allgather as grouped_allgather
from .differentiable import grouped_allreduce as grouped_allreduce
from .differentiable import grouped_allreduce_ as grouped_allreduce_
from .differentiable import grouped_reducescatter as grouped_reducescatter
from .differentiable import reducescatter as reducescatter
from .optimizers import DistributedOptimizer as DistributedOptimizer
from .uneven_inputs import join as join

if not _typing.TYPE_CHECKING:  # which takes the names from the imports, and would take none from this list
    __all__ = _public_names(globals())
