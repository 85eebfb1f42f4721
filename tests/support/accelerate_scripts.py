"""Accelerate's own checks on an agent of Shoal: ``shoal run -n 2 accelerate_scripts.py`` prints each that passed.

The names are those of `accelerate.test_utils.scripts`. Every check of ``test_script``, ``test_ops`` and ``test_sync``
is in `CHECKS` or in `LEFT_OUT`, which a test compares with the modules.
"""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType

import accelerate
import torch
from accelerate.state import PartialState

SCRIPTS = "accelerate.test_utils.scripts"
OPS = (
    "test_gather",
    "test_gather_object",
    "test_gather_non_contiguous",
    "test_broadcast",
    "test_pad_across_processes",
    "test_reduce_sum",
    "test_reduce_mean",
    "test_reduce_max",
    "test_op_checker",
)
"""Of ``test_ops``; each takes the process state."""
CHECKS = {
    "test_script": (
        "init_state_check",
        "process_execution_check",
        "test_split_between_processes_list",
        "test_split_between_processes_nested_dict",
        "test_split_between_processes_tensor",
        "test_split_between_processes_evenly",
        "rng_sync_check",
        "dl_preparation_check",
        "custom_sampler_check",
        "check_seedable_sampler",
        "check_seedable_sampler_with_data_seed",
        "check_seedable_sampler_in_batch_sampler_shard",
        "test_trigger",
        "test_reinstantiated_state",  # last: it takes the state away
    ),
    "test_ops": OPS,
    "test_sync": ("test_dataloader_break",),
}
_EQUAL = "demands equal models or gradients on all processes; Shoal's agents have a model each"
LEFT_OUT = {
    "test_script": {
        "training_check": _EQUAL,
        "central_dl_preparation_check": "rank 0 sends all samples (dispatch_batches), which ShoalAccelerator refuses",
        "test_split_between_processes_dataset": "needs the package datasets",
    },
    "test_ops": {"test_copy_tensor_to_devices": "returns at once without several GPUs"},
    "test_sync": {
        "test_noop_sync": "is for one process",
        "test_distributed_sync": _EQUAL,
        "test_distributed_sync_multiple_fwd": _EQUAL,
        "test_gradient_accumulation": _EQUAL,
        "test_gradient_accumulation_with_opt_and_scheduler": _EQUAL,
    },
}


def checks_of(script: ModuleType) -> set[str]:
    """The checks that a script defines."""
    own = {name for name, value in vars(script).items() if getattr(value, "__module__", None) == script.__name__}
    return {name for name in own if name.startswith(("test_", "check_seedable")) or name.endswith("_check")}


def main() -> None:
    from shoal.frameworks.accelerate import ShoalAccelerator

    torch.set_num_threads(1)
    accelerate.Accelerator = ShoalAccelerator  # before a script imports it by name
    ShoalAccelerator(cpu=True)
    state = [PartialState()]
    for name in ("test_ops", "test_sync", "test_script"):
        script = import_module(f"{SCRIPTS}.{name}")
        for check in CHECKS[name]:
            getattr(script, check)(*(state if name == "test_ops" else ()))
            os.write(1, f"passed {name}.{check}\n".encode())


if __name__ == "__main__":
    main()
