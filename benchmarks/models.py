"""The models: a GPT, a convolution net with BatchNorm, an unrolled recurrent net.

They are deep and narrow, so that what is measured is the work per operation and not the arithmetic.
Each of them returns its loss.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.char_transformer import CharTransformer


class Residual(nn.Module):
    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ConvolutionNet(nn.Module):
    """A residual net in the manner of ResNet-18, narrow, in training mode."""

    def __init__(self, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)
        )
        stages = [(width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)]
        self.stages = nn.Sequential(
            *(
                nn.Sequential(Residual(channels, out, stride), Residual(out, out, 1))
                for channels, out, stride in stages
            )
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        features = self.stages(self.stem(images)).mean((2, 3))
        return F.cross_entropy(self.head(features), labels)


class RecurrentNet(nn.Module):
    """An LSTM cell unrolled over the sequence, with a loss at every step."""

    def __init__(self, features: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(features, hidden)
        self.head = nn.Linear(hidden, features)

    def forward(self, sequence: Tensor, targets: Tensor) -> Tensor:
        batch = sequence.shape[1]
        hidden = cell = sequence.new_zeros(batch, self.cell.hidden_size)
        loss = sequence.new_zeros(())
        for value, target in zip(sequence.unbind(0), targets.unbind(0), strict=True):
            hidden, cell = self.cell(value, (hidden, cell))
            loss = loss + F.mse_loss(self.head(hidden), target)
        return loss


@dataclass(frozen=True)
class Case:
    """A model with inputs for it."""

    name: str
    model: nn.Module
    inputs: tuple[Tensor, ...]

    def fresh(self) -> nn.Module:
        """A model that no compiler has seen yet."""
        return copy.deepcopy(self.model)

    def known(self, model: nn.Module) -> list[Tensor]:
        """What is there before the forward: nobody pays for saving it."""
        return [*model.parameters(), *model.buffers(), *self.inputs]


def gpt(layers: int = 24) -> Case:
    torch.manual_seed(0)
    model = CharTransformer(64, layers=layers, width=32, heads=2, context=16)
    tokens = torch.randint(64, (2, 17))
    return Case(f"GPT, {layers} layers", model, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))


def convolution_net() -> Case:
    torch.manual_seed(0)
    inputs = (torch.randn(4, 3, 16, 16), torch.randint(10, (4,)))
    return Case("convolution net", ConvolutionNet(), inputs)


def recurrent_net(steps: int = 20) -> Case:
    torch.manual_seed(0)
    inputs = (torch.randn(steps, 4, 8), torch.randn(steps, 4, 8))
    return Case(f"recurrent net, {steps} steps", RecurrentNet(), inputs)


CASES: tuple[Callable[[], Case], ...] = (gpt, convolution_net, recurrent_net)
