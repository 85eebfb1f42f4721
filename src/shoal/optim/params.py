"""Which parameters an optimizer has, what they are called, and which decentralized optimizer has claimed them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ..errors import Mismatch
from ..ops.collective import allgather
from ..runtime.agent import current

_OWNER = "_shoal_optimizer"
"""On a parameter: a weak reference to the decentralized optimizer that has it."""


def names_of(
    models: Sequence[torch.nn.Module], optimizer: torch.optim.Optimizer, owner: object = None
) -> dict[torch.nn.Parameter, str]:
    """The models' parameters that the optimizer has, in the models' order, with their names.

    Raises:
        TypeError: A model is none.
        ValueError: A parameter is no model's, or another decentralized optimizer than ``owner`` has claimed it.
    """
    if not models or not all(isinstance(one, torch.nn.Module) for one in models):
        raise TypeError("model must be a torch.nn.Module, or a list of them")
    wanted = {param for group in optimizer.param_groups for param in group["params"]}
    found: dict[torch.nn.Parameter, str] = {}
    left_out = []
    for number, model in enumerate(models):
        for name, param in model.named_parameters():
            full = name if len(models) == 1 else f"{number}.{name}"
            if param in wanted:
                found.setdefault(param, full)
            elif param.requires_grad and _owner_of(param) is None:
                left_out.append(full)
    strangers = len(wanted) - len(found)
    if strangers:
        raise ValueError(f"the optimizer has {strangers} parameters that are not the model's; pass all its models")
    for param, name in found.items():
        if _owner_of(param) not in (None, owner):
            raise ValueError(f"another decentralized optimizer has the parameter {name!r}; call its close() first")
    if left_out:
        warnings.warn(
            f"no optimizer that averages has these parameters, which are learnt: {', '.join(left_out)}. They will "
            "drift apart between agents. Give them to this optimizer, or to another one before it.",
            stacklevel=4,
        )
    return found


def claim(params: Iterable[torch.nn.Parameter], owner: object) -> None:
    """Mark parameters as the owner's, for as long as it lives."""
    for param in params:
        setattr(param, _OWNER, weakref.ref(owner))


def release(params: Iterable[torch.nn.Parameter]) -> None:
    """Take the marks away."""
    for param in params:
        if hasattr(param, _OWNER):
            delattr(param, _OWNER)


def _owner_of(param: torch.nn.Parameter) -> object:
    reference = getattr(param, _OWNER, None)
    return None if reference is None else reference()


@contextmanager
def only(optimizer: torch.optim.Optimizer, params: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """The optimizer has these parameters alone, in its groups as they are."""
    wanted = set(params)
    whole = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [param for param in group["params"] if param in wanted]
    try:
        yield
    finally:
        for group, all_of_it in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = all_of_it


def check_that_models_agree(params: dict[torch.nn.Parameter, str], name: str) -> None:
    """Compare names, shapes and dtypes with all agents.

    Raises:
        Mismatch: Two agents' models differ; it names the first parameter that does.
    """
    lines = [f"{called} {list(param.shape)} {str(param.dtype)[6:]}" for param, called in params.items()]
    mine = torch.tensor(list("\n".join(lines).encode() or b" "), dtype=torch.uint8)
    lengths = allgather(torch.tensor([len(mine)]), name=f"{name}.length").tolist()
    texts = torch.split(allgather(mine, name=f"{name}.parameters"), lengths)
    here = current("optim").rank
    for rank, text in enumerate(texts):
        theirs = bytes(text.tolist()).decode().split("\n")
        if theirs == (lines or [" "]):
            continue
        longest = max(len(lines), len(theirs))
        pairs = zip(
            [*lines, *["nothing"] * (longest - len(lines))],
            [*theirs, *["nothing"] * (longest - len(theirs))],
            strict=True,
        )
        ours, other = next(pair for pair in pairs if pair[0] != pair[1])
        raise Mismatch(
            f"{name}: the models differ: rank {here} has the parameter {ours} where rank {rank} has {other}",
            (here, rank),
        )
