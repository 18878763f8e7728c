"""What is measured on a GPU: training steps of ordinary models, and steps that differentiate gradients."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Compile = Callable[[Callable[..., Tensor]], Callable[..., Tensor]]
Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Size:
    """Of GPT-2 (124M) or of a Llama with about a billion parameters."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    keys: int
    inner: int
    context: int = 1024


GPT2 = Size(50257, 768, 12, 12, 12, 3072)
LLAMA = Size(128256, 2048, 16, 32, 8, 8192)


class GPTBlock(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv, self.out = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.up, self.down = nn.Linear(size.width, size.inner), nn.Linear(size.inner, size.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, dim=-1)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in parts)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(GPTBlock(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        h = self.norm(self.blocks(self.tokens(tokens) + self.places(places)))
        return F.cross_entropy(self.head(h).flatten(0, 1), targets.flatten())


class LlamaLoss(nn.Module):
    """A Llama of transformers' with random weights; its loss only."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.width,
            intermediate_size=size.inner,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.keys,
            max_position_embeddings=size.context,
            tie_word_embeddings=True,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class LlamaBlock(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.keys, self.each = size.heads, size.keys, size.width // size.heads
        self.norm1, self.norm2 = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.q = nn.Linear(size.width, size.width, bias=False)
        self.kv = nn.Linear(size.width, 2 * size.keys * self.each, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.gate, self.up = (nn.Linear(size.width, size.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(size.inner, size.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.norm1(x)
        q = self.q(h).view(batch, length, self.heads, self.each).transpose(1, 2)
        k, v = self.kv(h).view(batch, length, 2, self.keys, self.each).permute(2, 0, 3, 1, 4)
        q, k = (t * cos + _turned(t) * sin for t in (q, k))
        k, v = (t.repeat_interleave(self.heads // self.keys, dim=1) for t in (k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(x.shape))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def _turned(t: Tensor) -> Tensor:
    a, b = t.chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)


class PlainLlama(nn.Module):
    """The same architecture in plain torch, where transformers is not installed."""

    angles: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(LlamaBlock(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        each = size.width // size.heads
        angles = torch.arange(size.context)[:, None] / 5e5 ** (torch.arange(0, each, 2) / each)
        self.register_buffer("angles", torch.cat([angles, angles], dim=-1), persistent=False)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        h = self.tokens(tokens)
        cos, sin = self.angles.cos().to(h.dtype), self.angles.sin().to(h.dtype)
        for block in self.blocks:
            h = block(h, cos, sin)
        logits = F.linear(self.norm(h), self.tokens.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.conv1, self.norm1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNet50(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, padding=1),
        )
        channels, blocks = 64, []
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for i in range(count):
                blocks.append(Bottleneck(channels, width, stride if i == 0 else 1))
                channels = 4 * width
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(channels, 1000)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(self.stem(images)).mean((2, 3))), labels)


def training(
    model: nn.Module, inputs: tuple[Tensor, ...], *, autocast: bool = True
) -> Callable[[Compile], Step]:
    """One step without the optimizer: a forward, a backward."""

    def make(compiled: Compile) -> Step:
        run = compiled(model)

        def step() -> Tensor:
            model.zero_grad(set_to_none=True)
            around: AbstractContextManager[object] = nullcontext()
            if autocast:
                around = torch.autocast("cuda", torch.bfloat16)
            with around:
                loss = run(*inputs)
            loss.backward()
            return loss.detach()

        return step

    return make


def gpt2(batch: int) -> Callable[[Compile], Step]:
    tokens = torch.randint(GPT2.vocabulary, (2, batch, GPT2.context), device="cuda")
    return training(GPT(GPT2).cuda(), (tokens[0], tokens[1]))


def llama(batch: int) -> Callable[[Compile], Step]:
    try:
        model: nn.Module = LlamaLoss(LLAMA)
    except ImportError:
        model = PlainLlama(LLAMA)
    tokens = torch.randint(LLAMA.vocabulary, (2, batch, LLAMA.context), device="cuda")
    return training(model.cuda().bfloat16(), (tokens[0], tokens[1]), autocast=False)


def resnet(batch: int) -> Callable[[Compile], Step]:
    images = torch.randn(batch, 3, 224, 224, device="cuda")
    return training(ResNet50().cuda(), (images, torch.randint(1000, (batch,), device="cuda")))


class PairPotential(nn.Module):
    """A sum over pairs of atoms of a learned function of their distance."""

    pairs: Tensor
    centers: Tensor

    def __init__(self, atoms: int, width: int, basis: int = 32) -> None:
        super().__init__()
        self.register_buffer("pairs", torch.triu_indices(atoms, atoms, offset=1))
        self.register_buffer("centers", torch.linspace(0.5, 4.0, basis))
        sizes = [basis, *[width] * 4]
        layers = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.SiLU())]
        self.net = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, positions: Tensor) -> Tensor:
        distance = (positions[:, self.pairs[0]] - positions[:, self.pairs[1]]).norm(dim=-1, keepdim=True)
        features = torch.exp(-4 * (distance - self.centers) ** 2)
        cutoff = 0.5 * (1 + torch.cos(torch.pi * distance.clamp(max=5.0) / 5.0))
        return (self.net(features) * cutoff).sum(dim=(-1, -2))


def twice(
    model: nn.Module, loss_of: Callable[..., Tensor], inputs: tuple[Tensor, ...]
) -> Callable[..., Step]:
    """A step that differentiates gradients. `loss_of` gets the model, and `inputs`; what is compiled is the
    model, or the loss with the derivative in it (`whole`)."""

    def make(compiled: Compile, *, whole: bool = False) -> Step:
        loss = compiled(partial(loss_of, model)) if whole else partial(loss_of, compiled(model))
        parameters = list(model.parameters())

        def step() -> Tensor:
            model.zero_grad(set_to_none=True)
            found = loss(*inputs)
            found.backward(inputs=parameters)
            return found.detach()

        return step

    return make


def forces(molecules: int, atoms: int, width: int) -> Callable[..., Step]:
    energies = torch.randn(molecules, device="cuda")
    given = torch.randn(molecules, atoms, 3, device="cuda")
    positions = (1.2 * torch.randn(molecules, atoms, 3, device="cuda")).requires_grad_()

    def loss_of(energy: Callable[[Tensor], Tensor], positions: Tensor) -> Tensor:
        found = energy(positions)
        (gradient,) = torch.autograd.grad(found.sum(), positions, create_graph=True)
        return 0.1 * F.mse_loss(found, energies) + F.mse_loss(-gradient, given)

    return twice(PairPotential(atoms, width).cuda(), loss_of, (positions,))


def penalty(batch: int, width: int) -> Callable[..., Step]:
    def loss_of(judge: Callable[[Tensor], Tensor], between: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(judge(between).sum(), between, create_graph=True)
        return (slope.norm(dim=-1) - 1).pow(2).mean()

    layers = [m for _ in range(4) for m in (nn.Linear(width, width), nn.LayerNorm(width), nn.SiLU())]
    critic = nn.Sequential(nn.Linear(64, width), *layers, nn.Linear(width, 1)).cuda()
    return twice(critic, loss_of, (torch.randn(batch, 64, device="cuda", requires_grad=True),))


class Network(nn.Module):
    """u(x, t)"""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [2, *[width] * 5]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.last = nn.Linear(width, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = torch.stack([x, t], dim=-1)
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return self.last(h).squeeze(-1)


def physics(points: int, width: int) -> Callable[..., Step]:
    def loss_of(network: Callable[[Tensor, Tensor], Tensor], x: Tensor, t: Tensor) -> Tensor:
        u = network(x, t)
        by_x, by_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
        (by_xx,) = torch.autograd.grad(by_x.sum(), x, create_graph=True)
        return (by_t + u * by_x - 0.05 * by_xx).pow(2).mean()

    x, t = (torch.rand(points, device="cuda", requires_grad=True) for _ in range(2))
    return twice(Network(width).cuda(), loss_of, (x, t))
