"""An optimizer of the script, whose steps use the average of all agents' gradients.

The gradients are averaged during the backward pass. Parameters are grouped. A group is copied and sent when all of its
gradients are complete, so the script's gradients stay unchanged until :meth:`Gradients.synchronize` replaces them with
the averages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ...execution.operation import Handle
from ...optim.exchanges.buckets import OVERLAPPED_BUCKET_BYTES, as_given, by_count
from ...optim.exchanges.hooks import add_gradient_listener
from ...optim.optimizer import DecentralizedOptimizer
from ...optim.params import check_that_models_agree, name_of_optimizer
from ...runtime.agent import bind
from ...topology._validate import check_size
from .agents import ProcessSet, global_process_set, group_of
from .async_ops import Average, ReduceOp, ScaledReduction, Sum, parse_reduction, reduce_many
from .compression import Compression

_GRADIENTS = "_shoal_gradients"


class Distributed(torch.optim.Optimizer):
    """The methods that :func:`DistributedOptimizer` adds to the class of an optimizer."""

    def synchronize(self) -> None:
        """Wait for the averages, and put them in the gradients' place: to clip them, or to look at them, before
        ``step()``, which then has nothing to wait for."""
        _wrapped_class(self).synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Steps inside take the gradients as they are, after :meth:`synchronize`."""
        held = vars(self)
        before = held.get("_shoal_synchronizes", True)
        held["_shoal_synchronizes"] = False
        try:
            yield
        finally:
            held["_shoal_synchronizes"] = before

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From the next step on gradients leave after so many backward passes."""
        _wrapped_class(self).passes = check_size(passes, "backward_passes_per_step")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the class's own; not while the gradients are on their way."""
        _wrapped_class(self).before_zero_grad()
        super().zero_grad(set_to_none)

    def __getstate__(self) -> dict[str, Any]:
        # A copy would have this class, but nothing that averages its gradients.
        raise TypeError("a distributed optimizer cannot be pickled or copied; save its state_dict()")

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # A GradScaler reads this before it checks the gradients: it has to see the gradients of all agents, or one
        # would leave out a step that the others take.
        if vars(self).get("_shoal_synchronizes", True):
            _wrapped_class(self).synchronize()
        return bool(vars(self).get("_step_supports_amp_scaling", False))


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.nn.Parameter]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Make the steps of an optimizer use the average of all agents' gradients. All agents call it.

    The result is the given optimizer, with its state, its hooks and its schedulers; its class becomes a subclass of the
    former one. Groups of gradients are sent during the backward pass, as soon as they are complete.

    Args:
        optimizer: Any optimizer of torch except LBFGS.
        named_parameters: ``model.named_parameters()``, for messages; all parameters of the optimizer.
        compression: The form in which gradients are sent.
        backward_passes_per_step: The number of backward passes whose gradients are added before they are sent.
        op: ``Average`` or ``Sum``.
        gradient_predivide_factor: With ``Average``, gradients are divided by it before they are added, and the sum is
            multiplied by it.
        num_groups: The number of groups of about equal size; groups of 4 MiB if not given.
        groups: The same, or lists of parameters that are sent together; other parameters are grouped by default.
        sparse_as_dense: Ignored: sparse gradients are sent dense, and are sparse again before the step, as with True in
            Horovod. They are sparse on all agents if one agent's is.
        process_set: The agents; other agents step alone.

    Raises:
        TypeError, ValueError: ``optimizer`` is no such optimizer, or an option is invalid.
        Mismatch: The agents' parameters differ; the error names the first one.
    """
    called = "DistributedOptimizer"
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{called}: an optimizer of torch is wanted, not {optimizer!r}")
    if isinstance(optimizer, (Distributed, DecentralizedOptimizer)):
        raise ValueError(f"{called}: this optimizer is distributed already; give the one of torch")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(f"{called}: LBFGS searches along a line by one agent's own loss; take SGD or Adam")
    how = parse_reduction(called, None, op)
    if how.op not in (Average, Sum):
        raise ValueError(
            f"{called}: op={ReduceOp(op).name}; gradients are averaged or added up: hvd.Average or hvd.Sum"
        )
    if gradient_predivide_factor != 1.0:
        if how.op is not Average or not gradient_predivide_factor > 0:
            raise ValueError(
                f"{called}: gradient_predivide_factor={gradient_predivide_factor!r}; it is a positive number, and goes "
                "with op=hvd.Average"
            )
        how = ScaledReduction(Average, 1 / gradient_predivide_factor, gradient_predivide_factor)
    if num_groups and groups is not None:
        raise ValueError(f"{called}: num_groups={num_groups!r} and groups exclude each other; leave num_groups out")
    if isinstance(groups, int) or num_groups:
        groups = _count(called, num_groups or groups)
    passes = check_size(backward_passes_per_step, "backward_passes_per_step")
    named = _named(called, optimizer, named_parameters)
    options = AveragingOptions(compression, passes, how, groups)
    gradients = Gradients(optimizer, named, options, process_set)
    own: Any = type(optimizer)
    optimizer.__class__ = type(own.__name__, (Distributed, own), {"__doc__": own.__doc__, "__module__": own.__module__})
    vars(optimizer)[_GRADIENTS] = gradients
    optimizer.register_step_pre_hook(_before_step)
    return optimizer


def _count(called: str, groups: Any) -> int | None:
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 0:
        raise ValueError(f"{called}: groups={groups!r}; it is a number of groups, or lists of parameters")
    return groups or None


def _named(
    called: str, optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> dict[torch.nn.Parameter, str]:
    """The optimizer's parameters with their names, in the order given."""
    every = [
        (f"parameter {at} of group {number}", param)
        for number, group in enumerate(optimizer.param_groups)
        for at, param in enumerate(group["params"])
    ]
    if named is None:
        return {param: name for name, param in every}
    given = list(named)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in given):
        raise ValueError(f"{called}: named_parameters are pairs of a name and a parameter: model.named_parameters()")
    names = [name for name, _ in given]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{called}: named_parameters has {', '.join(map(repr, twice))} twice")
    found = {param: name for name, param in given}
    unnamed = [label for label, param in every if param not in found]
    if unnamed:
        raise ValueError(f"{called}: named_parameters lacks {len(unnamed)} that the optimizer has, first {unnamed[0]}")
    held = {param for _, param in every}
    return {param: name for param, name in found.items() if param in held}


def _wrapped_class(optimizer: torch.optim.Optimizer) -> Gradients:
    found: Gradients = vars(optimizer)[_GRADIENTS]
    return found


def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradients become averages: now, or each time that a closure has made them."""
    gradients, synchronizes = _wrapped_class(optimizer), vars(optimizer).get("_shoal_synchronizes", True)
    closure: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None or not synchronizes:
        gradients.before_step(synchronizes)
        return None

    def evaluated() -> Any:
        loss = closure()
        gradients.before_step(True)
        return loss

    return (args[0], evaluated), {name: value for name, value in kwargs.items() if name != "closure"}


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

    def on_gradient(self, param: torch.Tensor) -> None:
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
        elif all(
            self._counts.get(member, 0) == self._passes for member in self._groups[number] if member.requires_grad
        ):
            try:
                with torch.no_grad():
                    self._send(number)
            except BaseException as error:
                self._failed = error

    def _leave(self, number: int) -> None:
        """Send a group: zeros for gradients that this agent has not, and at the end which parameters it steps, and
        which of them have sparse gradients."""
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
        flags = [
            [float(param.requires_grad or param.grad is not None) for param in group],
            [float(param in self._sparse) for param in group],
        ]
        sent.append(torch.tensor(flags, dtype=dtype, device=sent[0].device))
        name = f"{self._name}.{number}"
        handle = reduce_many("DistributedOptimizer", sent, self._how, name, self._process_set)
        self._under_way[number] = handle, contexts

    def synchronize(self) -> None:
        """Replace the gradients by the averages, after sending the remaining groups. Once for each step."""
        failed, self._failed = self._failed, None
        if failed is not None:
            for handle, _ in self._send_remaining().values():  # the next round must begin clean
                handle.wait()
            raise failed
        if self._is_synchronized or not self._active:
            return
        with torch.no_grad():
            self._add_trainable_parameters()
            for number, (handle, contexts) in sorted(self._send_remaining().items()):
                *means, flags = handle.wait()
                several = zip(self._groups[number], means, contexts, *flags.tolist(), strict=True)
                for param, mean, context, somewhere, sparse in several:
                    if sparse:  # also on an agent without a gradient, or SparseAdam would fail on that one only
                        self._sparse.add(param)
                    # One that some agents have frozen takes the others' steps, or the models would part.
                    if somewhere:
                        self._put(param, self._compression.decompress(mean, context))
        self._is_synchronized = True

    @torch.no_grad()
    def _send_remaining(self) -> dict[int, tuple[Handle[list[torch.Tensor]], list[Any]]]:
        """Send the groups that have not been sent. Returns the handles and contexts of all, which are no more kept."""
        for number in range(len(self._groups)):
            if number not in self._under_way:
                self._leave(number)
        under_way, self._under_way = self._under_way, {}
        self._counts.clear()
        return under_way

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

    def before_zero_grad(self) -> None:
        """The script clears the gradients: they are no averages any more."""
        if self._under_way:
            raise RuntimeError(
                "zero_grad() between backward() and step(): the gradients are on their way to the others, and "
                "the averages would be lost; call step(), or synchronize(), first"
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
        chosen = [[item for item in group if not isinstance(item, Param) or item.requires_grad] for group in groups]
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
