"""The parameters of an optimizer: their names, the decentralized optimizer that has claimed them, and how they lie.

Parameters whose memory other tensors use, too, must stay in place when buckets are made (:func:`sharing`). The
trainable parameters are exchanged, and all agents must have the same (:func:`explained`).
"""

from __future__ import annotations

import warnings
import weakref
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence, ValuesView
from contextlib import contextmanager
from itertools import chain, compress, repeat
from operator import attrgetter, is_, itemgetter, not_
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..dtensors import described, is_sharded, local
from ..engine.engine import Engine
from ..errors import Mismatch
from ..execution.operation import Operation
from ..ops.arguments import LAYOUT, Group
from ..ops.collective import gather_by_rank
from ..ops.objects import allreduce_parameters, bytes_spanned
from ..runtime.agent import current

_owners: MutableMapping[torch.nn.Parameter, weakref.ref[Any]] = WeakIdKeyDictionary()
"""By parameter: a weak reference to its decentralized optimizer. Not on the parameter, which may be saved."""
_averaged: Counter[int] = Counter()
"""How many :func:`~shoal.consensus` blocks a parameter is in, by its id."""
STRIDES = " of strides"
"""Before the strides of a parameter whose order in memory is not that of its shape."""
_END = object()
_params_of_group = itemgetter("params")
_requires_grad, _grad = attrgetter("requires_grad"), attrgetter("grad")


@contextmanager
def holding_mean(params: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Within it the parameters count as those that hold the mean of all agents."""
    ids = [id(param) for param in params]
    _averaged.update(ids)
    try:
        yield
    finally:
        _averaged.subtract(ids)
        for key in ids:
            if not _averaged[key]:
                del _averaged[key]


def check_not_averaged(call: str, params: Iterable[torch.nn.Parameter]) -> None:
    """Raise RuntimeError for a call that would use the mean of all agents as this agent's own parameters."""
    if _averaged and any(id(param) in _averaged for param in params):
        raise RuntimeError(
            f"{call} inside `with shoal.consensus(model):`, where the parameters hold the mean of all agents: this "
            "agent's own come back at the end of the block. Make the call after it"
        )


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
        if not models or not all(isinstance(model, torch.nn.Module) for model in models):
            raise TypeError("model must be a torch.nn.Module, or a list of them")
        self._models, self._optimizer = models, optimizer
        self._names: dict[torch.nn.Parameter, str] = {}
        self._views: list[ValuesView[object]] = []
        self._last: list[object] = []
        self._looked = False
        self._trainable: bytes | None = None
        self._passed = False  # a forward pass has begun since the last step
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
        self._names, self._trainable = found, None
        self._remember()

    def _remember(self) -> None:
        """Note which modules and parameters the models have now."""
        modules = [module for model in self._models for module in model.modules()]
        self._views = [view for module in modules for view in (module._parameters.values(), module._modules.values())]
        self._last = [*self._members()]

    def _members(self) -> Iterator[object]:
        """The modules and parameters of the models, and the parameters of the optimizer's groups."""
        groups = map(_params_of_group, self._optimizer.param_groups)
        return chain(chain.from_iterable(self._views), chain.from_iterable(groups), (_END,))

    def _are_as_remembered(self) -> bool:
        """Whether models and groups have the same modules and parameters, without Python code for each: it is asked in
        every step. The end is compared, too, since one of the two may be longer."""
        return all(map(is_, self._members(), self._last))

    def _all(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for number, model in enumerate(self._models):
            for name, param in model.named_parameters():
                yield name if len(self._models) == 1 else f"{number}.{name}", param

    def check_modules(self) -> None:
        """Compare the models' modules and parameters with those of the last call, before each step.

        Warns of trainable parameters that no decentralized optimizer has: at the first call, and after a change.

        Raises:
            RuntimeError: A model has replaced one of these parameters, or a group has others, or they hold the mean of
                all agents.
        """
        if _averaged:
            check_not_averaged("optimizer.step", self())
        if self._looked and self._are_as_remembered():
            return
        now = dict(self._all())
        there = set(now.values())
        # FSDP2 replaces the shards by the whole parameter for a pass.
        replaced = [
            name for param, name in self._names.items() if param not in there and name in now and not is_sharded(param)
        ]
        if replaced:
            raise RuntimeError(
                f"the model's parameters {', '.join(map(repr, replaced))} were replaced by others, and this "
                "optimizer would still step and average the earlier ones. Change parameters in place (param.copy_(), "
                "load_state_dict() without assign=True), or call close() and create an optimizer of the new parameters"
            )
        grouped = chain.from_iterable(map(_params_of_group, self._optimizer.param_groups))
        added = sum(param not in self._names for param in grouped)
        if added:
            raise RuntimeError(
                f"the optimizer's param_groups have {added} parameters that were put there past this optimizer, which "
                "would step them and never average them. Take them out again, and call add_param_group() of the "
                "decentralized optimizer"
            )
        self._remember()
        self._looked = True
        left_out = [name for name, param in now.items() if param.requires_grad and _owner_of(param) is None]
        if left_out:
            warnings.warn(
                f"no optimizer that averages has these parameters, which are learnt: {', '.join(left_out)}. They will "
                "drift apart between agents. Give them to this optimizer, or to another one.",
                stacklevel=4,
            )

    def sharing(self) -> list[list[torch.nn.Parameter]]:
        """The parameters that share memory, as :func:`~shoal.optim.params.sharing` gives them."""
        return sharing(self._models, self._names)

    @property
    def trainable(self) -> dict[torch.nn.Parameter, str]:
        """The parameters that require gradients now."""
        return {param: name for param, name in self._names.items() if param.requires_grad}

    def refresh(self) -> None:
        """Look which require gradients: once for each step, as every look costs something for each parameter."""
        self._trainable = bytes(map(_requires_grad, self._names))

    def are_trainable(self) -> bytes:
        """A byte for each parameter, 1 where it required gradients at the last :meth:`refresh`."""
        if self._trainable is None:
            self.refresh()
        return self._trainable or b""

    def any_trainable(self) -> bool:
        """Whether any of them requires gradients. A frozen model runs within another one's step, such as the
        discriminator of a GAN within the generator's."""
        return any(map(_requires_grad, self._names))

    def begin_pass(self) -> None:
        """A forward pass begins with which an exchange may begin."""
        self.refresh()
        self._passed = True

    def begin_step(self, settled: bool) -> None:
        """A step begins; ``settled``: what it exchanges is what was trainable at the forward pass, if there was one."""
        if not (settled and self._passed):
            self.refresh()
        self._passed = False
        self._drop_gradients_of_frozen()

    def _drop_gradients_of_frozen(self) -> None:
        """Remove the gradients that frozen parameters still have: the wrapped optimizer would step these parameters by
        this agent's own gradients, and no exchange would bring the agents' together again. Warns of gradients that are
        not zero."""
        flags = self.are_trainable()
        if 0 not in flags or all(map(is_, map(_grad, compress(self._names, map(not_, flags))), repeat(None))):
            return  # no Python code for each parameter, because every step calls this
        frozen = [param for param in compress(self._names, map(not_, flags)) if param.grad is not None]
        lost = [self._names[param] for param in frozen if _is_not_zero(param.grad)]
        for param in frozen:
            param.grad = None
        if lost:
            warnings.warn(
                f"the frozen parameters {', '.join(map(repr, lost))} have gradients, which are dropped: a parameter "
                "with requires_grad=False is neither stepped nor averaged. Freeze parameters between step() and the "
                "next backward pass",
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


def _is_not_zero(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and bool(local(gradient).count_nonzero())


def _owner_of(param: torch.nn.Parameter) -> Any:
    reference = _owners.get(param)
    return None if reference is None else reference()


def is_being_read(param: torch.nn.Parameter) -> bool:
    """Whether neighbours read the parameter's memory from its forward pass until the next step."""
    owner = _owner_of(param)
    return owner is not None and owner.reads_parameters and not is_sharded(param)


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
    params: dict[torch.nn.Parameter, str],
    name: str,
    beside: str = "",
    *,
    shared: Sequence[Sequence[torch.nn.Parameter]] = (),
    group: Group | None = None,
) -> None:
    """Compare the models of all agents, or of a group: names, shapes, dtypes, memory layout, sharding, trainable flags,
    shared memory, and the state that is averaged beside each parameter.

    Raises:
        Mismatch: Two agents' models differ; it names the first parameter that does.
    """
    tied = {param: f", in the memory of {params[alike[0]]}" for alike in shared for param in alike[1:]}
    lines = [
        f"{called} {list(local(param).shape)} {str(param.dtype)[6:]}"
        + described(param)
        + ("" if param.is_contiguous() or not is_dense(param) else f"{STRIDES} {list(param.stride())}")
        + ("" if param.requires_grad else ", frozen")
        + tied.get(param, "")
        + beside
        for param, called in params.items()
    ]
    mine = torch.tensor(list("\n".join(lines).encode() or b" "), dtype=torch.uint8, device="cpu")
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
        in_memory = STRIDES in ours or STRIDES in other
        remedy = ". On both: param.data = param.data.contiguous(), before the optimizer is made" if in_memory else ""
        raise Mismatch(
            f"{name}: the models differ: rank {here} has the parameter {ours} where rank {rank} has {other}{remedy}",
            (here, rank),
        )


def check_that_values_agree(params: Mapping[torch.nn.Parameter, str], name: str) -> None:
    """Compare the parameters' values with all agents.

    Raises:
        Mismatch: Two agents' differ; it names the first parameter that does.
    """
    here = current("optim").rank
    by_rank = checksums_by_rank(params, f"{name}.values")
    for rank, theirs in by_rank.items():
        pairs = zip(params.values(), by_rank[here], theirs, strict=True)
        different = [called for called, mine, its in pairs if mine != its]
        if different:
            raise Mismatch(
                f"{name}: gradients are averaged, which keeps models equal that are equal, and those of ranks {here} "
                f"and {rank} differ in {different[0]!r}. Call shoal.broadcast_parameters(model.state_dict(), "
                "root_rank=0) before the first step",
                (here, rank),
            )


def checksums_by_rank(params: Iterable[torch.Tensor], name: str) -> dict[int, list[int]]:
    """The checksums of all agents' parameters, by rank, this agent's among them. All agents call it."""
    sums = torch.tensor([zlib.crc32(_bytes_of(param)) for param in params], dtype=torch.int64, device="cpu")
    return {rank: theirs.tolist() for rank, theirs in gather_by_rank(sums, name).items()}


def _bytes_of(param: torch.Tensor) -> memoryview:
    flat = local(param).detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if len(flat) else memoryview(b"")  # type: ignore[arg-type]


def is_dense(param: torch.Tensor) -> bool:
    """Whether the strides leave no gap, as in ``channels_last``."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True))
    return param.numel() > 0 and span == param.numel()


Param = torch.nn.Parameter


def sharing(models: Sequence[torch.nn.Module], params: Iterable[Param]) -> list[list[Param]]:
    """The parameters that share memory with another parameter or a buffer of the models, or with another process.

    Views that a program holds elsewhere are not found.

    Args:
        models: Their parameters and buffers are compared.
        params: The parameters to be checked, in the models' order.

    Returns:
        Lists of parameters that overlap each other or the same buffer; one in shared memory (``share_memory()``) is a
        list by itself. Each list is in the models' order.
    """
    by_storage: defaultdict[tuple[torch.device, int], list[torch.Tensor]] = defaultdict(list)
    for tensor in {tensor: None for model in models for tensor in (*model.parameters(), *model.buffers())}:
        if not is_sharded(tensor) and tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
            by_storage[tensor.device, tensor.untyped_storage().data_ptr()].append(tensor)
    number_of: dict[torch.Tensor, int] = {}
    for tensors in by_storage.values():
        for group in _overlapping(tensors) if len(tensors) > 1 else ():
            number_of.update(dict.fromkeys(group, len(number_of)))
    found: defaultdict[int, list[Param]] = defaultdict(list)
    alone: list[list[Param]] = []
    for param in params:
        if param in number_of:
            found[number_of[param]].append(param)
        elif param.is_cpu and not is_sharded(param) and param.is_shared():  # type: ignore[no-untyped-call]
            alone.append([param])  # on other devices all are shared
    return [*found.values(), *alone]


def _overlapping(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors of one storage that overlap another one, in groups."""
    groups: list[list[torch.Tensor]] = []
    end = 0
    for begin, stop, tensor in sorted(
        ((*bytes_spanned(tensor), tensor) for tensor in tensors), key=lambda item: item[:2]
    ):
        if groups and begin < end:
            groups[-1].append(tensor)
        else:
            groups.append([tensor])
        end = max(end, stop)
    return [group for group in groups if len(group) > 1]


def digest_of(layout: Iterable[Iterable[str]]) -> int:
    """A digest of the exchanged parameters: their names in each bucket. Never 0, which stands for all."""
    return zlib.crc32("\n".join("\t".join(names) for names in layout).encode()) or 1


def equalize_frozen(params: Mapping[torch.nn.Parameter, str], name: str) -> None:
    """Average the frozen parameters that differ between agents, over all agents. All agents call it together, because
    exchanges do not include frozen parameters. Instances of subclasses of tensors, such as quantized weights, are left
    as they are.

    Args:
        params: All parameters of the optimizer, with their names; the same ones are frozen on all agents.
        name: Matches the comparisons of different agents.

    Raises:
        Mismatch: A parameter that differs has an integer dtype, which has no average; the error names it.
    """
    frozen = {called: param for param, called in params.items() if not param.requires_grad and _is_plain(param)}
    if not frozen:
        return
    columns = zip(*checksums_by_rank(frozen.values(), f"{name}.frozen").values(), strict=True)
    different = [called for called, sums in zip(frozen, columns, strict=True) if len(set(sums)) > 1]
    whole = [called for called in different if not (frozen[called].is_floating_point() or frozen[called].is_complex())]
    if whole:
        raise Mismatch(
            f"{name}: the frozen parameter {whole[0]!r} differs between agents, and {frozen[whole[0]].dtype} has no "
            "average. Call shoal.broadcast_parameters(model.state_dict(), root_rank=0) before the first step"
        )
    if different:
        allreduce_parameters({called: frozen[called] for called in different})


def _is_plain(param: torch.Tensor) -> bool:
    kind = type(param) in (torch.Tensor, torch.nn.Parameter) or is_sharded(param)
    return kind and param.layout is torch.strided and not param.is_meta


def explained(error: Mismatch, operation: Operation, params: Mapping[torch.nn.Parameter, str], now: bytes) -> Mismatch:
    """The error of an exchange, with the parameter that another agent has frozen and this one has not, or the reverse.

    Asks the agents that the error names, and then all, for up to a second each; those whose exchange failed answer.

    Args:
        error: The error of the exchange.
        operation: The exchange.
        params: All parameters of the optimizer, with their names.
        now: A byte for each of them, 1 where it was trainable.
    """
    agent, names = current("optim"), list(params.values())
    mine = [f"{_KINDS[flag]} {called!r}" for flag, called in zip(now, names, strict=True)]
    layouts = agent.engine.layout_exchange
    layouts.keep(operation, mine)
    for ranks in (error.ranks, range(agent.size)):
        for rank, theirs in layouts.others(operation, ranks, mutual=True).items():
            found = _difference(agent.rank, mine, rank, theirs, names)
            if found:
                return Mismatch(f"{error}. {found}", error.ranks)
    if LAYOUT not in str(error):
        return error
    frozen = [repr(called) for flag, called in zip(now, names, strict=True) if not flag]
    more = f" and {len(frozen) - _SHOWN} more" if len(frozen) > _SHOWN else ""
    listed = ", ".join(frozen[:_SHOWN]) + more or "no parameters"
    return Mismatch(f"{error}. On rank {agent.rank} {listed} are frozen: {_REMEDY}", error.ranks)


_SHOWN = 8
_REMEDY = "change requires_grad of a parameter on all agents, before the same step"
_KINDS = ("frozen", "trainable")


def difference_text(called: str, frozen_on: int, trainable_on: int) -> str:
    """The parameter that differs, and the remedy."""
    return f"The parameter {called!r} is frozen on rank {frozen_on} and trainable on rank {trainable_on}: {_REMEDY}"


def _difference(here: int, mine: Sequence[str], there: int, theirs: Sequence[str], names: Sequence[str]) -> str:
    for called, own, their in zip(names, mine, theirs, strict=False):
        kinds = own.partition(" ")[0], their.partition(" ")[0]
        if kinds[0] != kinds[1]:
            return f"The parameter {called!r} is {kinds[0]} on rank {here} and {kinds[1]} on rank {there}: {_REMEDY}"
    return ""
