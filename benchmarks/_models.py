"""The models that are trained, and what they are trained on: images and labels that are drawn, and handwritten digits.

Sizes are what matters for speed, so most of the data is noise; only the digits are there to be learnt.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
"""What goes into a model, float32 [batch, ...], and the labels, int64 [batch]."""

MLP_LAYERS, MLP_WIDTH = 12, 2048
VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
"""Channels of its convolutions; 0 halves the image."""


@dataclass(frozen=True)
class Work:
    """What an agent trains.

    Attributes:
        name: of the model.
        make: the model, with the same first weights on every agent.
        shape: of one input.
        labels: how many there are.
    """

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    labels: int

    def batch(self, size: int, rank: int) -> Batch:
        """Noise, another one for each agent."""
        generator = torch.Generator().manual_seed(rank)
        inputs = torch.randn(size, *self.shape, generator=generator)
        return inputs, torch.randint(self.labels, (size,), generator=generator)


def mlp(layers: int = MLP_LAYERS, width: int = MLP_WIDTH) -> Work:
    """Linear layers of equal width with ReLU between them; 50 million parameters if nothing else is said."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        modules: list[nn.Module] = []
        for _ in range(layers):
            modules += [nn.Linear(width, width), nn.ReLU()]
        return nn.Sequential(*modules[:-1])

    return Work("MLP", make, (width,), width)


def mlp_of(nbytes: int) -> Work:
    """An MLP of twelve layers whose float32 parameters have about this many bytes."""
    return mlp(MLP_LAYERS, round(math.sqrt(nbytes / 4 / MLP_LAYERS)))


def resnet20() -> Work:
    """He et al. 2016 (arXiv:1512.03385), section 4.2: 0.27 million parameters, shortcuts without any."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        blocks, before = [], 16
        for channels in (16, 32, 64):
            for _ in range(3):
                blocks.append(_Block(before, channels))
                before = channels
        return nn.Sequential(
            *(_convolution(3, 16), nn.BatchNorm2d(16), nn.ReLU()),
            *blocks,
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
        )

    return Work("ResNet-20", make, (3, 32, 32), 10)


class _Block(nn.Module):
    """Two convolutions and a shortcut, which where the image is halved leaves out pixels and adds empty channels."""

    def __init__(self, before: int, channels: int) -> None:
        super().__init__()
        self._stride, self._more = channels // before, channels - before
        self._residual = nn.Sequential(
            *(_convolution(before, channels, self._stride), nn.BatchNorm2d(channels), nn.ReLU()),
            *(_convolution(channels, channels), nn.BatchNorm2d(channels)),
        )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x[:, :, :: self._stride, :: self._stride]
        padded = nn.functional.pad(shortcut, (0, 0, 0, 0, 0, self._more)) if self._more else shortcut
        residual: Tensor = self._residual(x)
        return nn.functional.relu(padded + residual)


def vgg16(narrow: int = 1) -> Work:
    """VGG-16 for CIFAR with batch norm and one linear layer: 15 million parameters, or fewer if its layers are narrow.

    Args:
        narrow: what to divide all numbers of channels by.
    """

    def make() -> nn.Module:
        torch.manual_seed(0)
        modules: list[nn.Module] = []
        before = 3
        for channels in VGG16:
            if not channels:
                modules.append(nn.MaxPool2d(2))
                continue
            modules += [_convolution(before, channels // narrow), nn.BatchNorm2d(channels // narrow), nn.ReLU()]
            before = channels // narrow
        return nn.Sequential(*modules, nn.Flatten(), nn.Linear(before, 10))

    return Work("VGG-16", make, (3, 32, 32), 10)


def digits_net(width: int, seed: int = 0) -> nn.Module:
    """For images of 8 x 8: two convolutions and two linear layers, the first of which has most of the parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(32 * 4 * 4, width), nn.ReLU(), nn.Linear(width, 10)),
    )


def nbytes_of(model: nn.Module) -> int:
    """Bytes of its parameters."""
    return sum(param.numel() * param.element_size() for param in model.parameters())


def _convolution(before: int, after: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
