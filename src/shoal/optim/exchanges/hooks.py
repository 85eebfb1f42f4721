"""Hooks of a model, which report the begin of a forward pass and each parameter's gradient.

They keep no object alive. :class:`BucketGradients` detects that the gradients of a bucket are complete, during the
backward pass. :class:`BackwardCounter` counts backward passes: if several precede an exchange or a step, all agents
must agree which is the last. Forward passes do not count, because an evaluation or a generator's own pass may add more
on one agent than on another.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from ...runtime.agent import bind
from .buckets import Bucket

_compiler: Any = torch.compiler  # its functions are untyped


class PassListener(Protocol):
    def _begin_pass(self) -> None: ...


class BeforeForward:
    """A forward pre-hook of a model. In a copy of the model, by ``deepcopy`` or from a file, it does nothing."""

    def __init__(self, model: torch.nn.Module | None = None, optimizer: PassListener | None = None) -> None:
        _leave_uncompiled()
        self._model = weakref.ref(model) if model is not None else None
        self._optimizer = weakref.ref(optimizer) if optimizer is not None else None

    def __reduce__(self) -> tuple[type[BeforeForward], tuple[()]]:
        return BeforeForward, ()

    def __call__(self, module: torch.nn.Module, _args: Any) -> None:
        optimizer = self._optimizer() if self._optimizer is not None else None
        mine = self._model is not None and self._model() is module
        if optimizer is not None and mine and module.training and torch.is_grad_enabled():
            optimizer._begin_pass()


@functools.cache
def _leave_uncompiled() -> None:
    """A compiled model is compiled around its hook. Only where there is one: as a decorator this would import torch's
    compiler with ``import shoal``, seconds that only training needs (an optimizer of torch's imports it anyway)."""
    BeforeForward.__call__ = _compiler.disable(BeforeForward.__call__)  # type: ignore[method-assign]


class GradientListener(Protocol):
    def on_gradient(self, param: torch.Tensor) -> None: ...


def add_gradient_listener(param: torch.nn.Parameter, listener: GradientListener) -> RemovableHandle:
    """Call ``listener.on_gradient(param)`` when a backward pass has left its gradient, while the listener lives."""
    reference = weakref.ref(listener)

    def tell(param: torch.Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive.on_gradient(param)

    register: Callable[[Any], RemovableHandle] = param.register_post_accumulate_grad_hook
    return register(tell)


class BucketGradients:
    """Calls ``ready(number)`` when all parameters of a bucket have their gradients.

    Args:
        ready: Runs in the thread of the backward pass, for the agent that created this object.
    """

    def __init__(self, ready: Callable[[int], None]) -> None:
        self._ready = bind(ready)
        self._hooks: dict[torch.nn.Parameter, RemovableHandle] = {}
        self._buckets: Sequence[Bucket] | None = None
        self._active: Sequence[int] | None = None
        self._of: dict[torch.nn.Parameter, int] = {}
        self._missing: dict[int, set[torch.nn.Parameter]] = {}
        self._armed = self._has_left = False
        self._failed: BaseException | None = None

    @property
    def armed(self) -> bool:
        """A pass has begun whose step has not come yet."""
        return self._armed

    def arm(self, buckets: Sequence[Bucket], active: Sequence[int]) -> None:
        """Use the gradients of the next backward pass for the step. Raises the error of an earlier pass, if any.

        If other parameters are trainable than at the last forward pass, and no bucket has been sent, the count
        restarts.

        Args:
            buckets: All buckets.
            active: The numbers of the buckets that are exchanged in this step.
        """
        # Raised once: an error that stays would fail each later pass, also after the script has handled it.
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed
        # A bucket has left: neighbours wait for the others of the same round. A new count now would let their
        # parameters complete a second time.
        if self._armed and (self._has_left or (buckets is self._buckets and active is self._active)):
            return
        self._armed, self._has_left, self._active = True, False, active
        if buckets is not self._buckets:
            self._buckets = buckets
            self._of = {param: number for number, bucket in enumerate(buckets) for param in bucket.params}
        # A frozen parameter gets no gradient. A bucket that waits for it would leave in step() only, and nothing of it
        # would be overlapped.
        self._missing = {
            number: {param for param in buckets[number].params if param.requires_grad} for number in active
        }
        # One hook for each parameter: a second one would report the same gradient twice, which counts as a second
        # backward pass.
        for param in set().union(*self._missing.values()).difference(self._hooks):
            self._hooks[param] = add_gradient_listener(param, self)

    def late(self) -> list[int]:
        """The incomplete buckets, in order: the step continues without the missing gradients."""
        found = list(self._missing)
        # Disarmed: another backward pass before the next forward pass must not start buckets of this step again.
        self._missing, self._armed = {}, False
        return found

    def on_gradient(self, param: torch.Tensor) -> None:
        """Called by a hook: a parameter has its gradient.

        An error is kept for the step, or for the next forward pass. If a hook raised during a backward pass, torch
        would never release the parameters without gradients, or their memory.
        """
        if not self._armed or self._failed is not None:
            return
        assert isinstance(param, torch.nn.Parameter)
        number = self._of.get(param)
        if number is None or self._active is None or number not in self._active:
            return  # it was frozen when the pass began
        # A bucket that has left is not in this dictionary any more. A second gradient would be added after the bucket
        # was stepped, and be lost.
        missing = self._missing.get(number, set())
        if param not in missing:
            self._failed = RuntimeError(
                'overlap="backward": a parameter got a second gradient before step(), and its bucket steps with the '
                "first one. With k backward passes for a step set num_steps_per_communication=k. After a backward pass "
                "that failed, call step() before the next: the neighbours wait for the buckets that have not left. "
                "Parameters that another model's loss reaches must not be learnt then: requires_grad_(False)"
            )
            return
        missing.discard(param)
        if not missing:
            del self._missing[number]
            self._has_left = True
            try:
                # The hook runs inside the backward pass. The step of the bucket's parameters must not be recorded in a
                # graph.
                with torch.no_grad():
                    self._ready(number)
            except BaseException as error:
                self._failed = error

    def close(self) -> None:
        """Take all hooks away."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()


class BackwardCounter:
    """The backward passes since the last exchange. A step without any, as one with a closure, counts as one.

    Attributes:
        stepping: The optimizer is in the middle of a step.
    """

    def __init__(self) -> None:
        self._before = 0  # in earlier steps
        self._of: dict[torch.Tensor, int] = {}  # since the last step, by parameter; not all take part in all
        self._hooks: dict[torch.nn.Parameter, RemovableHandle] = {}
        self._watched: Mapping[torch.nn.Parameter, str] | None = None
        self._frozen: list[torch.nn.Parameter] = []
        self.stepping = False

    @property
    def next(self) -> int:
        """The number of the pass that comes next, from 1 on."""
        return self._before + self._since_step + 1

    @property
    def _since_step(self) -> int:
        # The largest count: a parameter that takes no part in some passes lags, and a sum would count one pass for each
        # parameter.
        return max(self._of.values(), default=0)

    def watch(self, params: Mapping[torch.nn.Parameter, str]) -> None:
        """Add hooks to the trainable parameters; frozen ones are checked again at the next call."""
        if params is not self._watched:
            self._watched, self._frozen = params, [param for param in params if param not in self._hooks]
        if not self._frozen:
            return
        learnt = [param for param in self._frozen if param.requires_grad]
        for param in learnt:
            self._hooks[param] = add_gradient_listener(param, self)
        if learnt:
            self._frozen = [param for param in self._frozen if param not in self._hooks]

    def begin_step(self) -> int:
        """Begin a step. Returns the number of passes, including the step's own. Passes in its closure are not
        counted.
        """
        self.stepping = True
        # At least 1: the passes of a closure run inside the step. Without it such an agent would never reach its
        # exchange, and the others would wait.
        self._before += max(1, self._since_step)
        self._of.clear()
        return self._before

    def end_step(self, exchanged: bool) -> None:
        """End a step; after an exchange (``exchanged``) the count restarts at 0."""
        self.stepping = False
        if exchanged:
            self._before = 0

    def on_gradient(self, param: torch.Tensor) -> None:
        """A hook's word that a parameter has its gradient."""
        # A closure may run any number of passes, and not as many on each agent. Counted, they would move the exchange
        # to another step on this agent.
        if not self.stepping:
            self._of[param] = self._of.get(param, 0) + 1

    @property
    def kept(self) -> int:
        """The count that has to be saved between steps."""
        return self._before

    def load(self, kept: int) -> None:
        """Go on from a count that was saved."""
        self._before = kept
        self._of.clear()

    def close(self) -> None:
        """Take all hooks away."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._watched = None
