"""Detects that the gradients of a bucket are complete, during the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from ...runtime.agent import bind
from .buckets import Bucket
from .hooks import add_gradient_listener


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

    def came(self, param: torch.Tensor) -> None:
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
