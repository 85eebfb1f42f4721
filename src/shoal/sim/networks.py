"""Neural networks in a stacked fleet: the parameters of n copies of a module as the rows of one tensor, and back.

A row holds the parameters that are trained, one after the other in the order of ``named_parameters``; a tensor that is
used in two places occurs once. The rest of a module is the same for all agents and never changes: parameters that need
no gradient, and buffers. Two kinds of layers are therefore refused: layers that change their buffers during training,
and layers that draw random numbers, because two runs, or a simulated and a real agent, would draw different ones.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from ..algorithms.gradients import Loss

Criterion = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes outputs and targets, gives a tensor of one number."""


class StackedModel:
    """Copies of a module.

    Args:
        module: Any that works under :mod:`torch.func`. It is copied, not kept.
        size: How many.
        seed: Without one all agents begin with the module's own parameters. With one each begins with its own, drawn
            by the ``reset_parameters`` of its layers.

    Attributes:
        size: Number of agents n.
        dimension: Number of parameters d of one of them.
        start: ``[n, d]``, in the dtype and on the device of the module.

    Raises:
        ValueError: The module has nothing to train, parameters of several dtypes or devices, or a layer that cannot be
            had in a stacked fleet; the message has the reason, and an alternative.
    """

    def __init__(self, module: nn.Module, size: int, *, seed: int | None = None) -> None:
        if size < 1:
            raise ValueError(f"size={size}: pass a number of agents, at least 1")
        self._template = _Template(module)
        self.size, self.dimension = size, self._template.dimension
        flat = self._template.flatten(dict(module.named_parameters())).detach()
        self.start = flat.repeat(size, 1) if seed is None else _drawn(self._template, size, seed)

    def outputs(self, x: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """The outputs of every agent's network, without gradients.

        Args:
            x: Parameters, ``[n, d]``.
            inputs: ``[n, batch, ...]``, a part for each agent.

        Returns:
            ``[n, batch, ...]``.
        """
        with torch.no_grad():
            found: torch.Tensor = vmap(self._template.call)(x, inputs)
        return found

    def module(self, x: torch.Tensor) -> nn.Module:
        """A module of its own with the parameters ``[d]``: of one agent, or the mean of all."""
        if x.shape != (self.dimension,):
            raise ValueError(f"parameters of shape {list(x.shape)}: one network has [{self.dimension}]")
        found = copy.deepcopy(self._template.module)
        with torch.no_grad():
            for name, value in self._template.unflatten(x).items():
                found.get_parameter(name).copy_(value)
        return found


def loss_of(module: nn.Module, criterion: Criterion) -> Loss:
    """The loss of one agent's network, for :func:`shoal.sim.per_agent` and :func:`shoal.algorithms.own`.

    Args:
        module: As for :class:`StackedModel`, in the mode (``train`` or ``eval``) of its use.
        criterion: Such as :func:`torch.nn.functional.cross_entropy`.

    Returns:
        ``loss(x, inputs, targets)``: ``x`` is ``[d]``, the others ``[samples, ...]``. The function is thread-safe.

    Raises:
        ValueError: As for :class:`StackedModel`.
    """
    template = _Template(module)

    def loss(x: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return criterion(template.call(x, inputs), targets)

    return loss


class _Template:
    """A module as a function of its flat parameters."""

    def __init__(self, module: nn.Module) -> None:
        _check(module)
        self.module = copy.deepcopy(module)
        # A parameter leaves its .grad behind when it is copied, and a template has none to give away.
        self.module.zero_grad(set_to_none=True)
        trained = {name: one for name, one in self.module.named_parameters() if one.requires_grad}
        kinds = {(one.dtype, one.device) for one in trained.values()}
        if len(kinds) != 1:
            what = (
                " and ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds)) or "none that need a gradient"
            )
            raise ValueError(f"the module's parameters are {what}: a row of a fleet has one dtype and device")
        self._shapes = {name: one.shape for name, one in trained.items()}
        self._lengths = [shape.numel() for shape in self._shapes.values()]
        self.dimension = sum(self._lengths)
        self._own = threading.local()

    def flatten(self, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        """``[..., d]`` from a tensor ``[..., *shape]`` for each name."""
        parts = [
            parameters[name].flatten(-len(shape)) if shape else parameters[name].unsqueeze(-1)
            for name, shape in self._shapes.items()
        ]
        return torch.cat(parts, dim=-1)

    def unflatten(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """From ``[d]``, views of it by name."""
        parts = torch.split(x, self._lengths)
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}

    def call(self, x: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """The module's output with the parameters ``[d]``."""
        # While it is called, a module holds the parameters that it is called with: threads must not share one.
        module: nn.Module | None = getattr(self._own, "module", None)
        if module is None:
            module = self._own.module = copy.deepcopy(self.module)
        before = {name: one._version for name, one in module.named_buffers()}
        found: torch.Tensor = functional_call(module, self.unflatten(x), (inputs,))
        changed = [name for name, one in module.named_buffers() if one._version != before[name]]
        if changed:
            raise ValueError(f"the module changes its buffers {changed} when it is called; {_CONSTANT}")
        return found


_CONSTANT = (
    "in a fleet buffers are constants, the same for all agents. Use a layer that keeps no account of its inputs."
)


def _check(module: nn.Module) -> None:
    """Refuse layers that a stacked fleet cannot have."""
    for name, layer in module.named_modules():
        what = f"layer {name!r} ({type(layer).__name__})" if name else f"the module ({type(layer).__name__})"
        if isinstance(layer, _NormBase) and layer.track_running_stats and layer.training:
            raise ValueError(
                f"{what} keeps running statistics in buffers, which belong to no agent's parameters and would not be "
                "averaged with the neighbours. Use torch.nn.GroupNorm, or track_running_stats=False; with statistics "
                "that stay as they are, call eval() on the layer."
            )
        if isinstance(layer, _DropoutNd) and layer.training and layer.p > 0:
            raise ValueError(
                f"{what} draws random numbers that a seed of the fleet does not repeat. Leave it out (p=0), or call "
                "eval() on it; weight decay and noise in the data regularise as well."
            )
        if any(is_lazy(one) for one in layer.parameters(recurse=False)):
            raise ValueError(f"{what} does not know its shape yet. Pass a batch through the module first.")


def _drawn(template: _Template, size: int, seed: int) -> torch.Tensor:
    """Parameters that each of n agents drew for itself, ``[n, d]``."""
    copies = [copy.deepcopy(template.module) for _ in range(size)]
    on_gpu = [one.device.index for one in template.module.parameters() if one.is_cuda]
    with torch.random.fork_rng(sorted(set(on_gpu))):
        for rank, one in enumerate(copies):
            torch.manual_seed(seed * 1_000_003 + rank)
            for name, layer in one.named_modules():
                _reset(name, layer)
    stacked, _ = stack_module_state(copies)
    return template.flatten(stacked).detach()


def _reset(name: str, layer: nn.Module) -> None:
    reset = getattr(layer, "reset_parameters", None)
    if callable(reset):
        reset()
    elif any(one.requires_grad for one in layer.parameters(recurse=False)):
        raise ValueError(
            f"layer {name!r} ({type(layer).__name__}) has parameters and no reset_parameters() to draw them anew. "
            "Give it one, or leave out seed, so that all agents begin with the module's own."
        )
