"""Which parameters an optimizer has, what they are called, and which decentralized optimizer has claimed them."""

from __future__ import annotations

import warnings
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..dtensors import described, local
from ..engine.engine import Engine
from ..errors import Mismatch
from ..ops.collective import gather_by_rank
from ..ops.groups import Group
from ..world.agent import current

_owners: MutableMapping[torch.nn.Parameter, weakref.ref[object]] = WeakIdKeyDictionary()
"""By parameter: a weak reference to the optimizer of ours that has it. Not on the parameter, which may be saved."""


class Names:
    """The models' parameters that an optimizer has, in the models' order, with their names.

    Args:
        models: All whose parameters it has.
        optimizer: The wrapped one.

    Raises:
        TypeError: A model is none.
        ValueError: A parameter is no model's, or another decentralized optimizer has claimed it.
    """

    def __init__(self, models: Sequence[torch.nn.Module], optimizer: torch.optim.Optimizer) -> None:
        if not models or not all(isinstance(one, torch.nn.Module) for one in models):
            raise TypeError("model must be a torch.nn.Module, or a list of them")
        self._models, self._optimizer = models, optimizer
        self._names: dict[torch.nn.Parameter, str] = {}
        self._warned = False
        self.read(None)

    def __call__(self) -> dict[torch.nn.Parameter, str]:
        return self._names

    def read(self, owner: object) -> None:
        """Look again: the optimizer, which ``owner`` wraps, has other parameters now."""
        wanted = {param for group in self._optimizer.param_groups for param in group["params"]}
        found: dict[torch.nn.Parameter, str] = {}
        for name, param in self._all():
            if param in wanted:
                found.setdefault(param, name)
        unknown = len(wanted) - len(found)
        if unknown:
            raise ValueError(f"the optimizer has {unknown} parameters that are not the model's; pass all its models")
        for param, name in found.items():
            if _owner_of(param) not in (None, owner):
                raise ValueError(f"another decentralized optimizer has the parameter {name!r}; call its close() first")
        self._names = found

    def _all(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for number, model in enumerate(self._models):
            for name, param in model.named_parameters():
                yield name if len(self._models) == 1 else f"{number}.{name}", param

    def warn_of_others(self) -> None:
        """Warn once of parameters that are learnt and that no decentralized optimizer has."""
        if self._warned:
            return
        self._warned = True
        left_out = [name for name, param in self._all() if param.requires_grad and _owner_of(param) is None]
        if left_out:
            warnings.warn(
                f"no optimizer that averages has these parameters, which are learnt: {', '.join(left_out)}. They will "
                "drift apart between agents. Give them to this optimizer, or to another one.",
                stacklevel=4,
            )

    def claim(self, owner: object) -> None:
        """Claim the parameters for ``owner``, for as long as it lives: no other optimizer may take them."""
        for param in self._names:
            _owners[param] = weakref.ref(owner)

    def release(self) -> None:
        """Give up the claim on the parameters."""
        for param in self._names:
            _owners.pop(param, None)


def _owner_of(param: torch.nn.Parameter) -> object:
    reference = _owners.get(param)
    return None if reference is None else reference()


_unnamed: weakref.WeakKeyDictionary[Engine, int] = weakref.WeakKeyDictionary()


def name_of_optimizer() -> str:
    """The name of the next optimizer of this agent for which none is given: all agents make them in the same order."""
    engine = current("DecentralizedOptimizer").engine
    number = _unnamed[engine] = _unnamed.get(engine, 0) + 1
    return "optimizer" if number == 1 else f"optimizer{number}"


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


def check_that_models_agree(
    params: dict[torch.nn.Parameter, str], name: str, beside: str = "", *, group: Group | None = None
) -> None:
    """Compare names, shapes, dtypes, the order in memory, which part of the whole it is, and what travels beside each
    parameter with all agents, or with those of a group.

    Raises:
        Mismatch: Two agents' models differ; it names the first parameter that does.
    """
    lines = [
        f"{called} {list(local(param).shape)} {str(param.dtype)[6:]}"
        + described(param)
        + ("" if param.is_contiguous() or not is_dense(param) else f" of strides {list(param.stride())}")
        + beside
        for param, called in params.items()
    ]
    mine = torch.tensor(list("\n".join(lines).encode() or b" "), dtype=torch.uint8)
    here = current("optim").rank
    for rank, text in gather_by_rank(mine, f"{name}.parameters", group=group).items():
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


def check_that_values_agree(params: Mapping[torch.nn.Parameter, str], name: str) -> None:
    """Compare the parameters' values with all agents.

    Raises:
        Mismatch: Two agents' differ; it names the first parameter that does.
    """
    sums = [zlib.crc32(_bytes_of(param)) for param in params]
    here = current("optim").rank
    for rank, theirs in gather_by_rank(torch.tensor(sums, dtype=torch.int64), f"{name}.values").items():
        pairs = zip(params.values(), sums, theirs.tolist(), strict=True)
        different = [called for called, mine, its in pairs if mine != its]
        if different:
            raise Mismatch(
                f"{name}: gradients are averaged, which keeps models equal that are equal, and those of ranks {here} "
                f"and {rank} differ in {different[0]!r}. Call shoal.broadcast_parameters(model.state_dict(), "
                "root_rank=0) before the first step",
                (here, rank),
            )


def _bytes_of(param: torch.Tensor) -> memoryview:
    flat = local(param).detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if len(flat) else memoryview(b"")  # type: ignore[arg-type]


def is_dense(param: torch.Tensor) -> bool:
    """Whether the strides leave no gap, as in ``channels_last``."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True))
    return param.numel() > 0 and span == param.numel()
