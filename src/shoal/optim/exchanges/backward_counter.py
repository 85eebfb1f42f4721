"""Counts backward passes: if several precede an exchange or a step, all agents must agree which is the last. Forward
passes do not count, because an evaluation or a generator's own pass may add more on one agent than on another.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.utils.hooks import RemovableHandle

from .hooks import add_gradient_listener


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

    def came(self, param: torch.Tensor) -> None:
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
