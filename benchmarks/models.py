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


class Diffusion(nn.Module):
    """A U-Net that is told the time, in the manner of diffusion models, with attention in the middle."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width))
        widths = (width, 2 * width, 4 * width)
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(
            TimedBlock(a, b, 4 * width) for a, b in zip((width, *widths), widths, strict=False)
        )
        self.query, self.mixed = (
            nn.Conv2d(widths[-1], 3 * widths[-1], 1),
            nn.Conv2d(widths[-1], widths[-1], 1),
        )
        self.up = nn.ModuleList(
            TimedBlock(2 * a, b, 4 * width)
            for a, b in zip(reversed(widths), (*reversed(widths[:-1]), width), strict=True)
        )
        self.leave = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, noisy: Tensor, time: Tensor, noise: Tensor) -> Tensor:
        told = self.time(torch.cat([time.sin(), time.cos()], -1))
        x, skips = self.enter(noisy), []
        for block in self.down:
            x = block(x, told)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        q, k, v = self.query(x).flatten(2).chunk(3, 1)
        weights = (q.transpose(1, 2) @ k / q.shape[1] ** 0.5).softmax(-1)
        x = x + self.mixed((v @ weights.transpose(1, 2)).view(x.shape))
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, skips.pop()], 1), told)
        return F.mse_loss(self.leave(x), noise)


class TimedBlock(nn.Module):
    def __init__(self, channels: int, out: int, told: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, channels), nn.Conv2d(channels, out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, out), nn.Conv2d(out, out, 3, padding=1)
        self.shift, self.skip = nn.Linear(told, out), nn.Conv2d(channels, out, 1)

    def forward(self, x: Tensor, told: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.shift(told)[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class Experts(nn.Module):
    """Layers of experts: each token goes to all, weighted by a gate that keeps the best two."""

    def __init__(self, layers: int = 4, width: int = 32, experts: int = 4) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(width, experts) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.into = nn.ParameterList(torch.randn(experts, width, 2 * width) * 0.1 for _ in range(layers))
        self.out = nn.ParameterList(torch.randn(experts, 2 * width, width) * 0.1 for _ in range(layers))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = tokens
        for gate, norm, into, out in zip(self.gates, self.norms, self.into, self.out, strict=True):
            y = norm(x)
            chances = gate(y).softmax(-1)
            best = chances.topk(2, -1).values[..., -1:]
            weights = torch.where(chances >= best, chances, 0.0)
            weights = weights / weights.sum(-1, keepdim=True)
            inside = F.silu(torch.einsum("td,edh->eth", y, into))
            each = torch.einsum("eth,ehd->etd", inside, out)
            x = x + torch.einsum("te,etd->td", weights, each)
        return F.mse_loss(x, targets)


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


def diffusion() -> Case:
    torch.manual_seed(0)
    inputs = torch.randn(4, 3, 16, 16), torch.randn(4, 8), torch.randn(4, 3, 16, 16)
    return Case("diffusion U-Net", Diffusion(), inputs)


def experts() -> Case:
    torch.manual_seed(0)
    return Case("mixture of experts", Experts(), (torch.randn(64, 32), torch.randn(64, 32)))


def wide_gpt() -> Case:
    """Without dropout: under a budget torch computes it again with other numbers."""
    torch.manual_seed(0)
    model = CharTransformer(64, layers=24, width=32, heads=2, context=16, dropout=0.0)
    tokens = torch.randint(64, (2, 17))
    return Case(
        "GPT, 24 layers, no dropout", model, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    )


CASES: tuple[Callable[[], Case], ...] = (gpt, convolution_net, recurrent_net)
