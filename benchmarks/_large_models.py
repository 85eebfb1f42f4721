"""ResNet-50 and a GPT of 350 million parameters, with random weights, and batches of random numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Loss = Callable[[], Tensor]


class Bottleneck(nn.Module):
    """Of He et al. 2016: 1x1, 3x3 and 1x1 convolutions, added to what came in."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        layers: list[nn.Module] = []
        for before, after, size, step in ((inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)):
            layers += [nn.Conv2d(before, after, size, step, size // 2, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])
        shortcut = (nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Identity() if inputs == outputs and stride == 1 else nn.Sequential(*shortcut)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layers(x) + self.shortcut(x))


def resnet50(device: str, quick: bool) -> tuple[nn.Module, Loss]:
    """25.6 million parameters; images of 224 x 224 (quick: 32 x 32), 64 of them (quick: 2)."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers += [nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for number, (width, depth) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for place in range(depth):
            layers.append(Bottleneck(inputs, width, 2 if number and not place else 1))
            inputs = 4 * width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000)).to(device)
    batch, side = (2, 32) if quick else (64, 224)
    x, y = torch.randn(batch, 3, side, side, device=device), torch.randint(1000, (batch,), device=device)
    return model, lambda: cross_entropy(model(x), y)


def gpt(device: str, quick: bool) -> tuple[nn.Module, Loss]:
    """353 million parameters: 24 layers of 1024, 50,304 tokens; 4 texts of 512 (quick: 2 layers of 64, 2 of 16)."""
    layers, width, tokens, batch, length = (2, 64, 256, 2, 16) if quick else (24, 1024, 50_304, 4, 512)
    block = nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
    body = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
    table = nn.Embedding(tokens, width)
    head = nn.Linear(width, tokens, bias=False)
    head.weight = table.weight
    model = nn.ModuleDict({"table": table, "body": body, "head": head}).to(device)
    x, y = torch.randint(tokens, (2, batch, length), device=device)
    unseen = nn.Transformer.generate_square_subsequent_mask(length, device=torch.device(device))

    def loss() -> Tensor:
        found = model["head"](model["body"](model["table"](x), mask=unseen, is_causal=True))
        return cross_entropy(found.view(-1, tokens), y.view(-1))

    return model, loss


MODELS = {"resnet50": resnet50, "gpt": gpt}
