"""An optimizer of the script, whose steps use the average of all agents' gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...optim.optimizer import DecentralizedOptimizer
from ...topology._validate import check_size
from .gradient_averaging import AveragingOptions, Gradients
from .process_sets import ProcessSet, global_process_set
from .reduce_options import Average, Compression, ReduceOp, ScaledReduction, Sum, parse_reduction

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
        _wrapped_class(self).begin_anew()
        super().zero_grad(set_to_none)

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
            Horovod.
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
        raise ValueError(f"{called}: num_groups={num_groups!r} and groups say the same; leave num_groups out")
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
    if any(not isinstance(one, tuple) or len(one) != 2 for one in given):
        raise ValueError(f"{called}: named_parameters are pairs of a name and a parameter: model.named_parameters()")
    names = [name for name, _ in given]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{called}: named_parameters has {', '.join(map(repr, twice))} twice")
    found = {param: name for name, param in given}
    unnamed = [what for what, param in every if param not in found]
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
