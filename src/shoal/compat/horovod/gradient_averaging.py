"""The gradients of one optimizer, averaged over the agents during the backward pass.

Parameters are grouped. A group is copied and sent when all of its gradients are complete, so the script's gradients
stay unchanged until :meth:`Gradients.synchronize` replaces them with the averages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ...operations.operation import Handle
from ...optim.exchanges.buckets import OVERLAPPED_BUCKET_BYTES
from ...optim.exchanges.grouping import as_given, by_count
from ...optim.exchanges.hooks import add_gradient_listener
from ...optim.params import check_that_models_agree, name_of_optimizer
from ...runtime.agent import bind
from .async_ops import reduce_many
from .process_sets import ProcessSet, group_of
from .reduce_options import ScaledReduction

Param = torch.nn.Parameter


@dataclass(frozen=True)
class AveragingOptions:
    """How gradients are averaged.

    Attributes:
        compression: The form in which gradients are sent.
        passes: The number of backward passes after which they are sent.
        how: The reduction.
        groups: The number of groups, or the groups.
    """

    compression: Any
    passes: int
    how: ScaledReduction
    groups: int | Sequence[Sequence[Param]] | None


class Gradients:
    """The averaged gradients of one optimizer.

    Args:
        optimizer: The optimizer of the parameters.
        named: The names of the parameters.
        options: The form in which they are sent, and when.
        process_set: The agents.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named: Mapping[Param, str],
        options: AveragingOptions,
        process_set: ProcessSet,
    ) -> None:
        self._optimizer, self._compression, self._how = optimizer, options.compression, options.how
        self._process_set = process_set
        self._passes = options.passes
        self._send = bind(self._leave)
        self._name = f"horovod.{name_of_optimizer()}"
        self._hooks: dict[Param, RemovableHandle] = {}
        self._groups: list[list[Param]] = []
        self._of: dict[torch.Tensor, int] = {}
        self._counts: dict[torch.Tensor, int] = {}
        self._under_way: dict[int, tuple[Handle[list[torch.Tensor]], list[Any]]] = {}
        self._sparse: set[Param] = set()
        self._failed: BaseException | None = None
        self._is_synchronized = False
        learnt = {param: name for param, name in named.items() if param.requires_grad}
        group = group_of("DistributedOptimizer", process_set)
        self._active = process_set.size() > 1 and process_set.included()
        if not self._active:
            return
        check_that_models_agree(learnt, self._name, group=group)
        self._add(_laid_out(learnt, options.groups))

    def _add(self, groups: Iterable[list[Param]]) -> None:
        for group in groups:
            for param in group:
                self._of[param] = len(self._groups)
                self._hooks[param] = add_gradient_listener(param, self)
            self._groups.append(group)

    @property
    def passes(self) -> int:
        """After how many backward passes gradients leave."""
        return self._passes

    @passes.setter
    def passes(self, count: int) -> None:
        if self._under_way:
            raise RuntimeError(
                "set_backward_passes_per_step: gradients are on their way; call it between step() and the next "
                "backward pass"
            )
        self._passes = count
        self._counts.clear()

    @property
    def under_way(self) -> bool:
        """Some groups have been sent, and have not been synchronized."""
        return bool(self._under_way)

    def came(self, param: torch.Tensor) -> None:
        """Called by a hook: a parameter has its gradient. Errors are kept for the step, because an error inside a
        backward pass would keep the parameters in memory for ever.
        """
        self._is_synchronized = False
        if self._failed is not None:
            return
        self._counts[param] = count = self._counts.get(param, 0) + 1
        number = self._of[param]
        if number in self._under_way:
            self._failed = RuntimeError(
                f"a parameter of {type(self._optimizer).__name__} got a gradient from {count} backward passes before "
                f"step(), and {self._passes} are expected: its group has left. For more passes in a step give "
                "DistributedOptimizer backward_passes_per_step"
            )
        elif all(self._counts.get(one, 0) == self._passes for one in self._groups[number] if one.requires_grad):
            try:
                with torch.no_grad():
                    self._send(number)
            except BaseException as error:
                self._failed = error

    def _leave(self, number: int) -> None:
        """Send a group: zeros for gradients that this agent has not, and at the end which parameters it steps."""
        sent, contexts = [], []
        group = self._groups[number]
        for param in group:
            gradient = param.grad
            if gradient is None:
                gradient = torch.zeros_like(param)
            elif gradient.is_sparse:
                self._sparse.add(param)
                gradient = gradient.to_dense()
            form, context = self._compression.compress(gradient)
            sent.append(form)
            contexts.append(context)
        # In the dtype of the others, so that it is in the same message.
        dtype = sent[0].dtype if sent[0].is_floating_point() else torch.float32
        steps = [float(param.requires_grad or param.grad is not None) for param in group]
        sent.append(torch.tensor(steps, dtype=dtype, device=sent[0].device))
        name = f"{self._name}.{number}"
        handle = reduce_many("DistributedOptimizer", sent, self._how, name, self._process_set)
        self._under_way[number] = handle, contexts

    def synchronize(self) -> None:
        """Replace the gradients by the averages, after sending the remaining groups. Once for each step."""
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed
        if self._is_synchronized or not self._active:
            return
        with torch.no_grad():
            self._add_trainable_parameters()
            for number in range(len(self._groups)):
                if number not in self._under_way:
                    self._leave(number)
            under_way, self._under_way = self._under_way, {}
            self._counts.clear()
            for number in sorted(under_way):
                handle, contexts = under_way[number]
                *means, steps = handle.wait()
                several = zip(self._groups[number], means, contexts, steps.tolist(), strict=True)
                for param, mean, context, somewhere in several:
                    # One that some agents have frozen takes the others' steps, or the models would part.
                    if somewhere:
                        self._put(param, self._compression.decompress(mean, context))
        self._is_synchronized = True

    def _put(self, param: Param, mean: torch.Tensor) -> None:
        if param in self._sparse:
            param.grad = mean.to_sparse(1)
        elif param.grad is None or param.grad.is_sparse:
            param.grad = mean.to(param.dtype)
        else:
            param.grad.copy_(mean)

    def _add_trainable_parameters(self) -> None:
        """Parameters that were not when the groups were made, or that the optimizer did not have."""
        every = [param for group in self._optimizer.param_groups for param in group["params"]]
        new = [param for param in every if param.requires_grad and param not in self._of]
        if new:
            self._add([new])

    def before_step(self, synchronizes: bool) -> None:
        """A step begins."""
        if synchronizes:
            self.synchronize()
        elif self._under_way or self._failed is not None:
            raise RuntimeError(
                "step() inside skip_synchronize(): the gradients are on their way, and would be averaged after the "
                "step; call optimizer.synchronize() first"
            )
        self._is_synchronized = False

    def begin_anew(self) -> None:
        """The gradients are no more those of before."""
        if self._under_way:
            raise RuntimeError(
                "zero_grad() between backward() and step(): the gradients are on their way to the others, and what "
                "comes back would be lost; call step(), or synchronize(), first"
            )
        self._is_synchronized = False


def _laid_out(learnt: Mapping[Param, str], groups: int | Sequence[Sequence[Param]] | None) -> list[list[Param]]:
    """The groups of parameters: in the order in which gradients are computed, the last layers first."""
    called = {name: param for param, name in learnt.items()}
    found: list[list[Param]] = []
    if isinstance(groups, int):
        layout = by_count(learnt, min(groups, len(learnt)))
        return [[called[name] for name in names] for names in layout]
    if groups is not None:
        chosen = [[one for one in group if not isinstance(one, Param) or one.requires_grad] for group in groups]
        found = [[called[name] for name in names] for names in as_given(learnt, chosen)]
    held = {param for group in found for param in group}
    room = 0
    for param in list(learnt)[::-1]:
        if param in held:
            continue
        if room < param.nbytes:
            found.append([])
            room = max(OVERLAPPED_BUCKET_BYTES, param.nbytes)
        found[-1].append(param)
        room -= param.nbytes
    return found
