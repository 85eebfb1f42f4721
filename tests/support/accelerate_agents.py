"""The agents' functions in the tests of Accelerate."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import (  # by name, and before this process is an agent
    DataLoaderConfiguration,
    broadcast,
    broadcast_object_list,
    gather_object,
    pad_across_processes,
    reduce,
    synchronize_rng_states,
)
from accelerate.utils import gather as gather_tensors
from accelerate.utils.operations import DistributedOperationException
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import shoal
from shoal.frameworks.accelerate import ShoalAccelerator

EXAMPLES = 38


def accelerator(**options: Any) -> ShoalAccelerator:
    os.environ["LOCAL_RANK"] = os.environ["RANK"]  # as torchrun and shoal run set it
    torch.set_num_threads(1)
    made = ShoalAccelerator(cpu=True, **options)
    torch.manual_seed(1000 + made.process_index)  # different first weights, orders and masks, if nobody saw to it
    return made


def dataset() -> TensorDataset:
    number = torch.arange(EXAMPLES)
    return TensorDataset(torch.sin(number[:, None] * torch.arange(1.0, 5.0)), number)


class Stream(IterableDataset[int]):
    """The numbers of the examples, without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(EXAMPLES))


def prepared(made: ShoalAccelerator, batch: int = 2) -> tuple[nn.Module, Any, Any, DataLoader[Any]]:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 8, gamma=0.5)
    loader = DataLoader(dataset(), batch_size=batch, shuffle=True)
    result: tuple[nn.Module, Any, Any, DataLoader[Any]] = made.prepare(model, optimizer, schedule, loader)
    return result


def one_epoch(made: ShoalAccelerator, parts: tuple[nn.Module, Any, Any, DataLoader[Any]], skip: int = 0) -> list[int]:
    """Train; the numbers of the examples that were seen."""
    model, optimizer, schedule, loader = parts
    seen: list[int] = []
    for inputs, numbers in made.skip_first_batches(loader, skip) if skip else loader:
        with made.accumulate(model):
            made.backward((model(inputs)[:, 0] - numbers / EXAMPLES).square().mean())
            made.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        seen += numbers.tolist()
    return seen


def numbers_of(parts: tuple[nn.Module, Any, Any, DataLoader[Any]]) -> list[np.ndarray[Any, Any]]:
    """The complete state after training: parameters, moments, the rate, and the next random number."""
    model, optimizer, schedule, _ = parts
    moments = [one for state in optimizer.state.values() for _, one in sorted(state.items())]
    drawn = torch.rand(3)
    rate = torch.tensor(schedule.get_last_lr())
    return [one.detach().numpy().copy() for one in (*model.parameters(), *moments, rate, drawn)]


def prepare() -> dict[str, Any]:
    made = accelerator(gradient_accumulation_steps=2)
    parts = prepared(made)
    first = [param.detach().numpy().copy() for param in parts[0].parameters()]
    seen = [one_epoch(made, parts) for _ in range(2)]
    drawn = torch.utils.data.WeightedRandomSampler(torch.ones(EXAMPLES), 36, replacement=False)
    weighted = made.prepare(DataLoader(dataset(), batch_size=3, sampler=drawn))
    return {
        "weighted": [number for _, numbers in weighted for number in numbers.tolist()],
        "first": first,
        "seen": seen,
        "model": type(parts[0]).__name__,
        "optimizer": type(parts[1].optimizer).__name__,
        "rounds": parts[1].optimizer.rounds,
        "group": dist.is_initialized(),
        "main": made.is_main_process,
        "place": (made.process_index, made.num_processes, made.local_process_index),
    }


def gather() -> dict[str, Any]:
    made = accelerator()
    rank, result = made.process_index, {}
    loader = made.prepare(DataLoader(dataset(), batch_size=4))
    result["numbers"] = torch.cat([made.gather_for_metrics(numbers) for _, numbers in loader]).tolist()
    result["objects"] = [name for _, numbers in loader for name in made.gather_for_metrics([f"a{n}" for n in numbers])]
    result["nested"] = made.gather({"bool": torch.tensor([rank == 1]), "nan": [torch.tensor(float("nan"))]})
    result["nested"] = str(result["nested"])
    result["reduced"] = [made.reduce(torch.tensor(float(rank)), how).item() for how in ("sum", "mean", "max")]
    result["padded"] = made.pad_across_processes(torch.full((1, rank + 1), rank), dim=1, pad_index=-1).tolist()
    for name, options in (("stream", {}), ("full rounds", {"drop_last": True})):
        streamed = made.prepare(DataLoader(Stream(), batch_size=4, **options))
        for _ in range(2):
            result[name] = torch.cat([made.gather_for_metrics(numbers) for numbers in streamed]).tolist()
    if rank == 2:
        made.set_trigger()
    result["trigger"] = made.check_trigger()
    return result


def other_structures() -> dict[str, Any]:
    """The outcomes of calls in which one agent has one tensor more, and the results of the next ones."""
    made = accelerator()
    one = torch.tensor([float(made.process_index)])
    outcomes = []
    for call in (made.gather, made.reduce, made.pad_across_processes):
        try:
            call({"a": one, "b": [one]} if made.process_index == 1 else {"a": one})
            outcomes.append("no error")
        except shoal.Mismatch:
            outcomes.append("Mismatch")
        shoal.barrier()
    gathered = [made.gather({"a": one, "b": [10 * step + one]}) for step in range(3)]
    return {
        "outcomes": outcomes,
        "gathered": [(found["a"].tolist(), found["b"][0].tolist()) for found in gathered],
        "reduced": [[total.item() for total in made.reduce((one, step * one))] for step in range(3)],
    }


def own_samples() -> dict[str, Any]:
    """An epoch with a sampler that has dealt the samples out: what this agent sees, and what is gathered."""
    made = accelerator()
    loader = made.prepare(DataLoader(dataset(), batch_size=2, sampler=shoal.data.AgentSampler(dataset())))
    again = made.skip_first_batches(loader, 4)
    return {
        "seen": [number for _, numbers in loader for number in numbers.tolist()],
        "gathered": [number for _, numbers in loader for number in made.gather_for_metrics(numbers).tolist()],
        "last": [number for _, numbers in again for number in made.gather_for_metrics(numbers).tolist()],
    }


def two_models() -> list[int]:
    """The models that each optimizer is given, as bits of their numbers."""
    given: list[int] = []
    models = [nn.Linear(2, 2), nn.Linear(2, 1)]

    def wrapper(optimizer: torch.optim.Optimizer, theirs: list[nn.Module]) -> shoal.DecentralizedOptimizer:
        given.append(sum(2**number for number, model in enumerate(models) if model in theirs))
        return shoal.DecentralizedOptimizer(optimizer, theirs, mix_state=())

    made = accelerator(wrapper=wrapper)
    made.prepare(*models, torch.optim.SGD(models[0].parameters()), torch.optim.SGD(models[1].parameters()))
    models += [nn.Linear(1, 1), nn.Linear(1, 1)]
    made.prepare(*models[2:], torch.optim.SGD([*models[2].parameters(), *models[3].parameters()]))
    return given


def configuration() -> tuple[Any, Any]:
    """What a script's own configuration of its loaders has, after an accelerator was made with it."""
    loading = DataLoaderConfiguration()
    accelerator(dataloader_config=loading)
    return loading.dispatch_batches, loading.data_seed


def functions() -> dict[str, Any]:
    """The results of the functions of ``accelerate.utils``."""
    rank = accelerator().process_index
    nested = {"bool": torch.tensor([rank == 1]), "nan": [torch.tensor([float("nan"), rank])]}
    halves = torch.full((1, 2), float(rank), dtype=torch.bfloat16)
    given = torch.full((2,), float(rank), requires_grad=True)
    synchronize_rng_states(["torch"])
    result = {
        "gathered": gather_tensors(torch.tensor(rank)).tolist(),
        "nested": str(gather_tensors(nested)),
        "halves": gather_tensors(halves).tolist(),
        "objects": gather_object([f"a{rank}", rank]),
        "reduced": [reduce(torch.tensor([float(rank)]), how).item() for how in ("sum", "mean", "max", "none")],
        "broadcast": broadcast(given, from_process=2).tolist(),
        "objects of 1": broadcast_object_list([rank, {"rank": rank}], from_process=1),
        "padded": pad_across_processes(torch.full((1, rank + 1), rank), dim=1, pad_index=-1).tolist(),
        "drawn": torch.rand(()).item(),
    }
    PartialState().debug = True  # makes agents compare the shapes of gathered tensors
    try:
        gather_tensors(torch.ones(rank + 1))
    except DistributedOperationException as error:
        result["shapes"] = str(error)
    finally:
        PartialState().debug = False
    return result


def save_and_resume(folder: str) -> dict[str, Any]:
    """Two epochs, saved in the middle of one; and resumed from there with new objects."""
    made = accelerator()
    parts = prepared(made)
    one_epoch(made, parts)
    made.save_state(folder)
    saved = [param.detach().numpy().copy() for param in parts[0].parameters()]
    whole_seen = one_epoch(made, parts)
    full = numbers_of(parts)

    made = accelerator()
    parts = prepared(made)
    made.load_state(folder)
    seen = one_epoch(made, parts)
    again = numbers_of(parts)

    made = accelerator()
    parts = prepared(made)
    made.load_state(folder, start="consensus")
    mean = [param.detach().numpy().copy() for param in parts[0].parameters()]
    result = {"whole": full, "again": again, "seen": (whole_seen, seen), "mean": mean, "saved": saved}
    return result | {"drawn": torch.rand(()).item()}


def save_model(folder: str) -> dict[str, Any]:
    made = accelerator(wrapper=_without_exchange)
    parts = prepared(made)
    one_epoch(made, parts)
    made.save_model(parts[0], folder)
    made.wait_for_everyone()
    from safetensors.torch import load_file

    saved = load_file(Path(folder) / "model.safetensors")
    own = {name: value.numpy().copy() for name, value in parts[0].state_dict().items()}
    return {"own": own, "saved": {name: value.numpy().copy() for name, value in saved.items()}}


def _without_exchange(optimizer: torch.optim.Optimizer, models: list[nn.Module]) -> shoal.DecentralizedOptimizer:
    """Agents that exchange nothing: their models go different ways."""
    kind = shoal.optim.CommunicationType.empty
    return shoal.DecentralizedOptimizer(optimizer, models, communication_type=kind, mix_state=())


def refused(what: str) -> str:
    """With which error something is refused."""
    try:
        if what == "optimizer first":
            accelerator().prepare(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))
        elif what == "join":
            with accelerator().join_uneven_inputs([]):
                pass
        elif what == "hook":
            accelerator().register_save_state_pre_hook(lambda *_: None)
        elif what == "environment":
            os.environ["ACCELERATE_USE_FSDP"] = "true"
            try:
                accelerator()
            finally:
                del os.environ["ACCELERATE_USE_FSDP"]
        elif what == "dispatch":
            accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
        elif what == "dispatching loader":
            from accelerate.data_loader import prepare_data_loader

            accelerator()
            loader = torch.utils.data.DataLoader(torch.arange(4.0))
            prepare_data_loader(loader, dispatch_batches=True, put_on_device=True, device=torch.device("cpu"))
        elif what == "group":
            accelerator()
            AcceleratorState._reset_state(reset_partial_state=True)
            PartialState(cpu=True)  # as an Accelerator, or TrainingArguments, of its own makes it
            try:
                accelerator()
            finally:
                shoal.barrier()  # rank 0 has the store in which the others may still meet
                dist.destroy_process_group()
                AcceleratorState._reset_state(reset_partial_state=True)
        elif what == "object":
            accelerator().gather_for_metrics([object()])
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"
