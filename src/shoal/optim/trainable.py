"""The exchanged parameters of an optimizer: the trainable ones. All agents must have the same."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence

import torch

from ..dtensors import is_sharded
from ..errors import Mismatch
from ..operations.operation import Operation
from ..ops.arguments import LAYOUT
from ..ops.objects import allreduce_parameters
from ..runtime.agent import current
from .params import checksums_by_rank


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
    mine = [f"{_KINDS[one]} {called!r}" for one, called in zip(now, names, strict=True)]
    layouts = agent.engine.layout_exchange
    layouts.keep(operation, mine)
    for ranks in (error.ranks, range(agent.size)):
        for rank, theirs in layouts.others(operation, ranks, mutual=True).items():
            found = _difference(agent.rank, mine, rank, theirs, names)
            if found:
                return Mismatch(f"{error}. {found}", error.ranks)
    if LAYOUT not in str(error):
        return error
    frozen = [repr(called) for one, called in zip(now, names, strict=True) if not one]
    more = f" and {len(frozen) - _SHOWN} more" if len(frozen) > _SHOWN else ""
    what = ", ".join(frozen[:_SHOWN]) + more or "no parameters"
    return Mismatch(f"{error}. On rank {agent.rank} {what} are frozen: {_REMEDY}", error.ranks)


_SHOWN = 8
_REMEDY = "change requires_grad of a parameter on all agents, before the same step"
_KINDS = ("frozen", "trainable")


def difference_text(called: str, frozen_on: int, trainable_on: int) -> str:
    """The parameter that differs, and the remedy."""
    return f"The parameter {called!r} is frozen on rank {frozen_on} and trainable on rank {trainable_on}: {_REMEDY}"


def _difference(here: int, mine: Sequence[str], there: int, theirs: Sequence[str], names: Sequence[str]) -> str:
    for called, one, other in zip(names, mine, theirs, strict=False):
        kinds = one.partition(" ")[0], other.partition(" ")[0]
        if kinds[0] != kinds[1]:
            return f"The parameter {called!r} is {kinds[0]} on rank {here} and {kinds[1]} on rank {there}: {_REMEDY}"
    return ""
