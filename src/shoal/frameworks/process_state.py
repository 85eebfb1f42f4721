"""The rank of a process and the number of agents for Accelerate, which Transformers uses as well.

Both read their rank from Accelerate's ``PartialState``, one for each process. By default it reads a launcher's
variables and opens a process group, which is not needed here: models are not wrapped, and agents communicate by Shoal.
So the state is made earlier, with this agent's rank and without a process group.
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Iterator

import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState

from ..ops.arguments import Internal
from ..ops.collective import barrier
from ..runtime.agent import current
from ..runtime.bootstrap import init
from ..runtime.queries import is_initialized, local_rank
from .functions import meet_through_shoal
from .requirements import check_agent

_ASKED = ("LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""The variables by which Accelerate finds out whether it is one of several."""
_FRAMEWORKS = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config",
}


class Decentralized(str, enum.Enum):
    """The value of Accelerate's ``distributed_type``: unknown to Accelerate, so that it neither wraps nor reduces
    anything.
    """

    SHOAL = "SHOAL"


def process_state(cpu: bool = False) -> PartialState:
    """Accelerate's state of this process, as an agent of Shoal; the process becomes one if it is none yet.

    Args:
        cpu: Train on the CPU, even if there is an accelerator.

    Raises:
        ValueError: Accelerate has opened a process group already, or a requested feature is impossible with a separate
            model for each agent.
    """
    for variable, what in _FRAMEWORKS.items():
        if os.environ.get(variable, "false").lower() == "true":
            raise ValueError(
                f"{variable}={os.environ[variable]}: {what} shares one model between processes, and Shoal's agents "
                "have a model each. Leave it out"
            )
    there = PartialState._shared_state
    if there and there["distributed_type"] not in (DistributedType.NO, Decentralized.SHOAL):
        raise ValueError(
            f"Accelerate has already opened a process group ({there['distributed_type'].value}), for an Accelerator or "
            "TrainingArguments of its own. Make Shoal's in their place: shoal.frameworks.accelerate.ShoalAccelerator, "
            "or shoal.frameworks.transformers.ShoalTrainingArguments"
        )
    if not is_initialized():
        init()
    agent = current("shoal.frameworks")
    check_agent(agent, "Accelerate and Transformers")
    cpu = cpu or os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1", "yes")
    if not there or there["distributed_type"] is not Decentralized.SHOAL or there["num_processes"] != agent.size:
        AcceleratorState._reset_state(reset_partial_state=True)
        meet_through_shoal(Decentralized.SHOAL)
        with _asked_nobody():
            PartialState(cpu=cpu)
        there.update(
            distributed_type=Decentralized.SHOAL,
            num_processes=agent.size,
            process_index=agent.rank,
            local_process_index=local_rank(),
            wait_for_everyone=wait_for_everyone,
        )
        if there["device"].type == "cuda":
            there["device"] = torch.device("cuda", local_rank() % torch.cuda.device_count())
            torch.cuda.set_device(there["device"])
    return PartialState()


def wait_for_everyone() -> None:
    """All agents meet here."""
    barrier(Internal("frameworks.wait_for_everyone"))


@contextlib.contextmanager
def _asked_nobody() -> Iterator[None]:
    """Without the launcher's variables, which Shoal has read."""
    kept = {name: os.environ.pop(name) for name in _ASKED if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)
