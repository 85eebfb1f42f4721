"""Neural networks in a stacked fleet: n copies of a module as the rows of one tensor, and the gradients of them.

A row holds the parameters that are trained, one after the other in the order of ``named_parameters``; a tensor that is
used in two places occurs once. Running statistics of batch norm are each agent's own, as on real agents, and no
exchange averages them. The rest of a module is the same for all agents and never changes: parameters that need no
gradient, and other buffers. Layers that change other buffers are therefore refused, and so are layers that draw random
numbers, because two runs, or a simulated and a real agent, would draw different ones.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from ..algorithms.algorithm import Gradient
from ..algorithms.mix import Mix
from ..algorithms.runs.gradients import Augment, Batches, Loss, augmented

Statistics = dict[str, torch.Tensor]
"""Running statistics by the name of their buffer, ``[n, ...]``."""
Criterion = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes outputs and targets, gives a tensor of one number."""


class NetworkFunction(Protocol):
    """A network's output, from its parameters ``[d]``, inputs, and the running statistics, which it updates."""

    def __call__(self, x: torch.Tensor, inputs: torch.Tensor, statistics: Statistics | None = None) -> torch.Tensor: ...


@dataclass(frozen=True)
class Networks:
    """The networks of all agents.

    Attributes:
        call: The output of one of them.
        statistics: Their running statistics, which a call updates.
        begin: Sets the statistics to those of the module, before the first gradient of a run.
    """

    call: NetworkFunction
    statistics: Statistics
    begin: Callable[[], None]


@dataclass(frozen=True)
class Samples:
    """A dataset, and each agent's part of it.

    Attributes:
        inputs: ``[m, ...]``.
        targets: ``[m, ...]``.
        parts: The indices of each agent's samples, int64 ``[m_i]``.
        batches: Draws the positions within a part.
        augment: Changes the inputs of a batch.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    parts: list[torch.Tensor]
    batches: Batches
    augment: Augment | None


class NetworkGradient(Gradient):
    """What :meth:`shoal.sim.StackedModel.gradient` returns.

    Attributes:
        epoch_steps: How many gradients each agent takes in a pass over its part, int64 ``[n]``.
    """

    def __init__(
        self, networks: Networks, samples: Samples, criterion: Criterion, decay: float | torch.Tensor, vectorize: bool
    ) -> None:
        self._networks, self._samples, self._criterion = networks, samples, criterion
        self._padded = torch.nn.utils.rnn.pad_sequence(samples.parts, batch_first=True)
        self._decay, self._vectorize = decay, vectorize
        self._sample: tuple[torch.Tensor, torch.Tensor] | None = None
        self.epoch_steps = samples.batches.per_epoch
        super().__init__(self._of_sample, self._of_all, self._choose, self._losses)

    def _choose(self, mix: Mix) -> None:
        if mix.gradients == 0:
            self._networks.begin()
        samples = self._samples
        agents, size = len(samples.parts), samples.batches.size
        chosen = self._padded.gather(1, samples.batches(mix)).flatten()
        inputs = samples.inputs[chosen.to(samples.inputs.device)]
        inputs = augmented(samples.augment, inputs, mix, agents)
        targets = samples.targets[chosen.to(samples.targets.device)]
        of_agents = (tensor.reshape(agents, size, *tensor.shape[1:]) for tensor in (inputs, targets))
        self._sample = next(of_agents), next(of_agents)

    def _of_sample(self, x: torch.Tensor) -> torch.Tensor:
        return self._decayed(x, self._gradients(x, *self._drawn(), self._networks.statistics))

    def _gradients(
        self, x: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor, statistics: Statistics
    ) -> torch.Tensor:
        """The gradients on samples ``[n, batch, ...]``, which enter the statistics."""
        if not self._vectorize:
            rows = zip(x, inputs, targets, strict=True)
            return torch.stack([self._alone(*row, _row(statistics, rank)) for rank, row in enumerate(rows)])

        def loss(
            x: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor, mine: Statistics
        ) -> tuple[torch.Tensor, Statistics]:
            return self._criterion(self._networks.call(x, inputs, mine), targets), mine

        # The transforms may not change their arguments in place, so they get copies and return them.
        found, after = vmap(grad(loss, has_aux=True))(x, inputs, targets, _copied(statistics))
        for name, value in after.items():
            statistics[name].copy_(value)
        gradients: torch.Tensor = found
        return gradients

    def _alone(
        self, x: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor, statistics: Statistics
    ) -> torch.Tensor:
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            loss = self._criterion(self._networks.call(at, inputs, statistics), targets)
        return torch.autograd.grad(loss, at)[0]

    def _of_all(self, x: torch.Tensor) -> torch.Tensor:
        """On each agent's whole part as one batch, which enters no statistics."""
        found = []
        for rank, (row, part) in enumerate(zip(x, self._samples.parts, strict=True)):
            inputs, targets = (data[part.to(data.device)] for data in (self._samples.inputs, self._samples.targets))
            found.append(self._alone(row, inputs, targets, _copied(_row(self._networks.statistics, rank))))
        return self._decayed(x, torch.stack(found))

    def _losses(self, x: torch.Tensor) -> torch.Tensor:
        """Without the term of weight decay; the samples enter no statistics."""

        def loss(x: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor, mine: Statistics) -> torch.Tensor:
            return self._criterion(self._networks.call(x, inputs, mine), targets)

        found = each_row(loss, self._vectorize)(x, *self._drawn(), _copied(self._networks.statistics))
        return found.detach()

    def _decayed(self, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        if isinstance(self._decay, torch.Tensor):
            return gradient + self._decay * x
        return gradient.add(x, alpha=self._decay) if self._decay else gradient

    def _drawn(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._sample is None:
            raise ValueError("no batch has been drawn: pass this gradient to StackedFleet.run")
        return self._sample


def each_row(function: Callable[..., torch.Tensor], vectorize: bool) -> Callable[..., torch.Tensor]:
    """The function of one agent's tensors, and of a dict of them, on all agents' at once or one after the other."""
    if vectorize:
        found: Callable[..., torch.Tensor] = vmap(function)
        return found

    def one_by_one(*arguments: torch.Tensor | Statistics) -> torch.Tensor:
        def of(rank: int) -> list[torch.Tensor | Statistics]:
            return [_row(argument, rank) if isinstance(argument, Mapping) else argument[rank] for argument in arguments]

        return torch.stack([function(*of(rank)) for rank in range(len(arguments[0]))])

    return one_by_one


def _row(statistics: Statistics, rank: int) -> Statistics:
    return {name: value[rank] for name, value in statistics.items()}


def _copied(statistics: Statistics) -> Statistics:
    return {name: value.clone() for name, value in statistics.items()}


class StackedModel:
    """Copies of a module.

    Args:
        module: Any that works under :mod:`torch.func`, in the mode of its use: in ``train()`` batch norm uses the
            statistics of a batch, and keeps running ones. It is copied, not kept.
        size: How many.
        seed: Without one all agents begin with the module's own parameters. With one each begins with its own, drawn
            by the ``reset_parameters`` of its layers.

    Attributes:
        size: Number of agents n.
        dimension: Number of parameters d of one of them.
        start: ``[n, d]``, in the dtype and on the device of the module.
        statistics: The agents' running statistics by the names of their buffers, ``[n, ...]`` each; empty without batch
            norm in training. A run of :meth:`gradient` begins with the module's and changes them in each step. They are
            no part of :class:`shoal.algorithms.Run`: save them beside it to continue in another process.

    Raises:
        ValueError: The module has nothing to train, parameters of several dtypes or devices, or a layer that cannot be
            had in a stacked fleet; the message has the reason, and an alternative.
    """

    def __init__(self, module: nn.Module, size: int, *, seed: int | None = None) -> None:
        if size < 1:
            raise ValueError(f"size={size}: pass a number of agents, at least 1")
        self._template = _Template(module, statistics=True)
        self._evaluation = _Template(copy.deepcopy(module).eval()) if self._template.statistics else self._template
        # Convolutions with a weight for each agent are slow on a CPU.
        convolves = any(isinstance(layer, _ConvNd) for layer in module.modules())
        self._vectorize = not (convolves and next(module.parameters()).is_cpu)
        self.size, self.dimension = size, self._template.dimension
        self.statistics = {
            name: value.expand(size, *value.shape).clone() for name, value in self._template.statistics.items()
        }
        flat = self._template.flatten(dict(module.named_parameters())).detach()
        self.start = flat.repeat(size, 1) if seed is None else _drawn(self._template, size, seed)

    def gradient(
        self,
        criterion: Criterion,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        parts: Sequence[torch.Tensor],
        batch: int,
        *,
        epochs: bool = True,
        augment: Augment | None = None,
        weight_decay: float | Callable[[str], float] = 0.0,
        vectorize: bool | None = None,
    ) -> NetworkGradient:
        """The gradients of all networks on batches of a dataset, for :meth:`StackedFleet.run`.

        Every gradient in a step gets a batch of its own.

        Args:
            criterion: Such as :func:`torch.nn.functional.cross_entropy`.
            inputs: All samples, ``[m, ...]``.
            targets: Theirs, ``[m, ...]``.
            parts: The indices of each agent's samples, n tensors int64 ``[m_i]``, of any lengths:
                :func:`shoal.data.dirichlet_shards` makes such.
            batch: Samples for each gradient.
            epochs: As for :func:`shoal.algorithms.own`: passes without replacement, each agent's own.
            augment: Changes the inputs of each batch, such as :func:`shoal.sim.flipped_and_shifted`.
            weight_decay: Its product with the parameters is added to the gradient, as ``torch.optim.SGD`` does: a
                number, or a function of a parameter's name, for example to leave biases out.
            vectorize: Compute all agents at once by ``vmap``; if False one after the other, which gives the bits of
                separate modules. If not given, it is False for a module with convolutions on the CPU, where it is
                faster.

        Raises:
            ValueError: There are not as many parts as agents, or one does not fill a batch.
        """
        if len(parts) != self.size or len(inputs) != len(targets):
            raise ValueError(
                f"{len(parts)} parts for {self.size} agents, {len(inputs)} inputs with {len(targets)} targets: pass a "
                "part for each agent, and a target for each input"
            )
        decay = weight_decay if isinstance(weight_decay, int | float) else self._template.by_name(weight_decay)
        batches = Batches([len(part) for part in parts], batch, epochs)
        at_once = self._vectorize if vectorize is None else vectorize
        networks = Networks(self._template.call, self.statistics, self._reset_statistics)
        samples = Samples(inputs, targets, list(parts), batches, augment)
        return NetworkGradient(networks, samples, criterion, decay, at_once)

    def outputs(self, x: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """The outputs of every agent's network, without gradients; with running statistics those of ``eval()``.

        Args:
            x: Parameters, ``[n, d]``; or ``[1, d]``, the mean of all, which gets the mean of the running statistics.
            inputs: ``[n, batch, ...]``, a part for each agent; or ``[1, batch, ...]``.

        Returns:
            ``[n, batch, ...]``; or ``[1, batch, ...]``.

        Raises:
            ValueError: Running statistics are for another number of agents than ``x``.
        """
        if self.statistics and len(x) not in (1, self.size):
            raise ValueError(f"{len(x)} rows of parameters: there are statistics of {self.size} agents, and their mean")
        alone = self.statistics and len(x) != self.size
        means = {name: value.unsqueeze(0) for name, value in self._statistics_of(None).items()} if alone else {}
        with torch.no_grad():
            return each_row(self._evaluation.call, self._vectorize)(x, inputs, means or self.statistics)

    def module(self, x: torch.Tensor, rank: int | None = None) -> nn.Module:
        """A module of its own with the parameters ``[d]``: of one agent, or the mean of all.

        Args:
            x: The parameters.
            rank: The agent whose running statistics it gets; if not given, it gets their mean over the agents.
        """
        if x.shape != (self.dimension,):
            raise ValueError(f"parameters of shape {list(x.shape)}: one network has [{self.dimension}]")
        found = copy.deepcopy(self._template.module)
        with torch.no_grad():
            for name, value in self._template.unflatten(x).items():
                found.get_parameter(name).copy_(value)
            for name, value in self._statistics_of(rank).items():
                found.get_buffer(name).copy_(value)
        return found

    def _statistics_of(self, rank: int | None) -> Statistics:
        """An agent's, or the mean over agents; counters of batches are equal on all."""
        if rank is not None:
            return {name: value[rank] for name, value in self.statistics.items()}
        return {
            name: value.mean(0) if value.is_floating_point() else value[0] for name, value in self.statistics.items()
        }

    def _reset_statistics(self) -> None:
        for name, value in self._template.statistics.items():
            self.statistics[name].copy_(value.expand_as(self.statistics[name]))


def loss_of(module: nn.Module, criterion: Criterion) -> Loss:
    """The loss of one agent's network, for :func:`shoal.sim.per_agent` and :func:`shoal.algorithms.own`.

    Args:
        module: As for :class:`StackedModel`, in the mode (``train`` or ``eval``) of its use.
        criterion: Such as :func:`torch.nn.functional.cross_entropy`.

    Returns:
        ``loss(x, inputs, targets)``: ``x`` is ``[d]``, the others ``[samples, ...]``. The function is thread-safe.

    Raises:
        ValueError: As for :class:`StackedModel`, or a layer keeps running statistics.
    """
    template = _Template(module)

    def loss(x: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return criterion(template.call(x, inputs), targets)

    return loss


class _Template:
    """A module as a function of its flat parameters."""

    def __init__(self, module: nn.Module, statistics: bool = False) -> None:
        _check(module, statistics)
        self.module = copy.deepcopy(module)
        # A parameter leaves its .grad behind when it is copied, and a template has none to give away.
        self.module.zero_grad(set_to_none=True)
        trained = {name: param for name, param in self.module.named_parameters() if param.requires_grad}
        kinds = {(param.dtype, param.device) for param in trained.values()}
        if len(kinds) != 1:
            several = (
                " and ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds)) or "none that need a gradient"
            )
            raise ValueError(f"the module's parameters are {several}: a row of a fleet has one dtype and device")
        self._shapes = {name: param.shape for name, param in trained.items()}
        self._lengths = [shape.numel() for shape in self._shapes.values()]
        self.dimension = sum(self._lengths)
        self.statistics = {
            f"{prefix}.{name}" if prefix else name: buffer
            for prefix, layer in self.module.named_modules()
            if _keeps_statistics(layer)
            for name, buffer in layer.named_buffers(recurse=False)
        }
        self._own = threading.local()

    def by_name(self, value: Callable[[str], float]) -> torch.Tensor:
        """``[d]``, in which each parameter has the value of its name."""
        like = self.module.get_parameter
        return self.flatten({name: torch.full_like(like(name), value(name)) for name in self._shapes}).detach()

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

    def call(self, x: torch.Tensor, inputs: torch.Tensor, statistics: Statistics | None = None) -> torch.Tensor:
        """The module's output with the parameters ``[d]``, and with running statistics, which it may change."""
        # While it is called, a module holds the parameters that it is called with: threads must not share one.
        module: nn.Module | None = getattr(self._own, "module", None)
        if module is None:
            module = self._own.module = copy.deepcopy(self.module)
        before = {name: buffer._version for name, buffer in module.named_buffers()}
        found: torch.Tensor = functional_call(module, self.unflatten(x) | (statistics or {}), (inputs,))
        changed = [name for name, buffer in module.named_buffers() if buffer._version != before[name]]
        if changed:
            raise ValueError(f"the module changes its buffers {changed} when it is called; {_CONSTANT}")
        return found


_CONSTANT = (
    "in a fleet buffers are constants, the same for all agents, but for the running statistics of batch norm. Use a "
    "layer that keeps no account of its inputs."
)


def _keeps_statistics(layer: nn.Module) -> bool:
    return isinstance(layer, _NormBase) and layer.track_running_stats and layer.training


def _check(module: nn.Module, statistics: bool) -> None:
    """Refuse layers that a stacked fleet cannot have, among them those that keep statistics if they are not allowed."""
    for name, layer in module.named_modules():
        described = f"layer {name!r} ({type(layer).__name__})" if name else f"the module ({type(layer).__name__})"
        if _keeps_statistics(layer) and not statistics:
            raise ValueError(
                f"{described} keeps running statistics in buffers, and a function of parameters and data cannot. Take "
                "StackedModel.gradient, which keeps each agent's; or use torch.nn.GroupNorm, or "
                "track_running_stats=False; with statistics that stay as they are, call eval() on the layer."
            )
        if isinstance(layer, _DropoutNd) and layer.training and layer.p > 0:
            raise ValueError(
                f"{described} draws random numbers that a seed of the fleet does not repeat. Leave it out (p=0), or "
                "call eval() on it; weight decay and noise in the data regularise as well."
            )
        if any(is_lazy(param) for param in layer.parameters(recurse=False)):
            raise ValueError(f"{described} does not know its shape yet. Pass a batch through the module first.")


def _drawn(template: _Template, size: int, seed: int) -> torch.Tensor:
    """Parameters that each of n agents drew for itself, ``[n, d]``."""
    copies = [copy.deepcopy(template.module) for _ in range(size)]
    on_gpu = [param.device.index for param in template.module.parameters() if param.is_cuda]
    with torch.random.fork_rng(sorted(set(on_gpu))):
        for rank, module in enumerate(copies):
            torch.manual_seed(seed * 1_000_003 + rank)
            for name, layer in module.named_modules():
                _reset(name, layer)
    stacked, _ = stack_module_state(copies)
    return template.flatten(stacked).detach()


def _reset(name: str, layer: nn.Module) -> None:
    reset = getattr(layer, "reset_parameters", None)
    if callable(reset):
        reset()
    elif any(param.requires_grad for param in layer.parameters(recurse=False)):
        raise ValueError(
            f"layer {name!r} ({type(layer).__name__}) has parameters and no reset_parameters() to draw them anew. "
            "Give it one, or leave out seed, so that all agents begin with the module's own."
        )
