"""Attention, convolutions, norms, recurrent layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from .cases import a, b, c, function, module

# attention


def written_out_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return scores.masked_fill(mask, float("-inf")).softmax(-1) @ v


_qkv = (a(1, 2, 3, 2), b(1, 2, 3, 2), c(1, 2, 3, 2))
function("attention written out", written_out_attention, *_qkv)


class Math(nn.Module):
    """A module whose attention has a second derivative: the fused CPU kernel has none in eager."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return self.inner(*args, **kwargs)


class SelfAttention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x)


def sdpa(**options: Any) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, **options)

    return run


function("scaled_dot_product_attention", sdpa(), *_qkv)
function("causal scaled_dot_product_attention", sdpa(is_causal=True), *_qkv)
function("masked scaled_dot_product_attention", sdpa(attn_mask=torch.eye(3, dtype=torch.float64)), *_qkv)
module("multihead attention", SelfAttention, a(1, 3, 4))
module("multihead attention, bias_kv", lambda: SelfAttention(add_bias_kv=True, bias=False), a(1, 3, 4))
module(
    "transformer encoder layer",
    lambda: Math(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)),
    a(1, 3, 4),
)
module(
    "transformer decoder layer",
    lambda: Math(nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0, activation="gelu")),
    a(3, 1, 4),
    b(2, 1, 4),
)


# convolutions

module("conv1d", lambda: nn.Conv1d(2, 3, 2, padding=1), a(1, 2, 4))
module("conv2d", lambda: nn.Conv2d(2, 2, 2), a(1, 2, 3, 3))
module(
    "conv2d, strided, dilated, grouped",
    lambda: nn.Conv2d(2, 4, 2, stride=2, dilation=2, groups=2),
    a(1, 2, 5, 5),
)
module(
    "conv2d, depthwise, no bias",
    lambda: nn.Conv2d(2, 2, 3, padding="same", groups=2, bias=False),
    a(1, 2, 3, 3),
)
module(
    "conv2d, circular padding", lambda: nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), a(1, 1, 3, 3)
)
module("conv3d", lambda: nn.Conv3d(1, 2, 2), a(1, 1, 2, 3, 3))
module("transposed conv1d", lambda: nn.ConvTranspose1d(2, 2, 2, stride=2), a(1, 2, 3))
module("transposed conv2d", lambda: nn.ConvTranspose2d(2, 1, 2, stride=2, output_padding=1), a(1, 2, 2, 2))
module("transposed conv3d", lambda: nn.ConvTranspose3d(1, 1, 2), a(1, 1, 2, 2, 2))
module("linear", lambda: nn.Linear(3, 2), a(2, 3))
module("bilinear", lambda: nn.Bilinear(2, 3, 2), a(2, 2), b(2, 3))


# norms

module("layer norm", lambda: nn.LayerNorm(4), a(2, 4))
module(
    "layer norm over two dimensions, no weights",
    lambda: nn.LayerNorm((2, 3), elementwise_affine=False),
    a(2, 2, 3),
)
module("group norm", lambda: nn.GroupNorm(2, 4), a(2, 4, 3))
module("instance norm", lambda: nn.InstanceNorm1d(2, affine=True), a(2, 2, 4))
module("batch norm, train", lambda: nn.BatchNorm1d(3, track_running_stats=False), a(4, 3))
module("batch norm, running statistics, train", lambda: nn.BatchNorm1d(3), a(4, 3))
module("batch norm, eval", lambda: nn.BatchNorm1d(3), a(4, 3), train=False)
module("batch norm 2d, train", lambda: nn.BatchNorm2d(2), a(2, 2, 2, 2))
module("rms norm", lambda: nn.RMSNorm(4), a(2, 4))
module("local response norm", lambda: nn.LocalResponseNorm(2), a(1, 3, 4))
function(
    "weight norm",
    lambda x, v, g: F.linear(x, v * (g / v.norm(dim=1, keepdim=True))),
    a(2, 3),
    b(2, 3),
    c(2, 1),
)
function("normalize", lambda x: F.normalize(x, dim=-1), a(2, 3))


# recurrence


class Flat(nn.Module):
    """A module whose outputs, however nested, come as a tuple."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> tuple[Tensor, ...]:
        return tuple(tree_leaves(self.inner(*args)))


module("rnn cell", lambda: nn.RNNCell(2, 2), a(1, 2), b(1, 2))
module("gru cell", lambda: nn.GRUCell(2, 2), a(1, 2), b(1, 2))
module("rnn", lambda: Flat(nn.RNN(2, 2, batch_first=True)), a(1, 2, 2))
module("gru", lambda: Flat(nn.GRU(2, 2)), a(2, 1, 2))
module("lstm", lambda: Flat(nn.LSTM(2, 2)), a(2, 1, 2))
module(
    "lstm, two layers, both directions",
    lambda: Flat(nn.LSTM(2, 2, num_layers=2, bidirectional=True)),
    a(2, 1, 2),
)


class UnrolledLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(2, 2)

    def forward(self, x: Tensor) -> Any:
        h = memory = x.new_zeros(1, 2)
        for t in x:
            h, memory = self.cell(t, (h, memory))
        return h, memory


module("lstm cell, unrolled", UnrolledLSTM, a(3, 1, 2))
