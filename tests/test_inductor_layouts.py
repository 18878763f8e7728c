"""Inductor lays out what it computes as it likes, and reads conjugated views of it as such: nobody else may
take strides, sizes or values for what was recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

import aheadgrad
from aheadgrad.torchlayer.inductor import missing

BACKENDS = [
    "eager",
    pytest.param("inductor", marks=pytest.mark.skipif(missing("cpu") is not None, reason="no C++ compiler")),
]


def total(out: Any) -> Tensor:
    outs = out if isinstance(out, tuple) else (out,)
    plain = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t.resolve_neg() for t in outs]
    weighted = [(t**3 * torch.linspace(0.5, 1.0, t.numel()).view(t.shape)).sum() for t in plain]
    return torch.stack(weighted).sum()


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


# -- conjugated, negated, and read through another dtype


def conjugated_and_kept(x: Tensor) -> Any:
    y = x.exp()
    return y * y.conj(), y.conj()


def parts(x: Tensor) -> Any:
    y = x.exp()
    return y.conj().imag, y.imag, y.mH, y.conj()[:, 0]


def real_numbers(x: Tensor) -> Any:
    y = x.exp()
    return torch.view_as_real(y)[..., 0], y * y.mH.T, y.mH[1:], torch.view_as_real(y)[1]


@pytest.mark.parametrize("frontend", ["trace", "dynamo"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fn", [conjugated_and_kept, parts, real_numbers])
def test_complex_results(fn: Callable[[Tensor], Any], backend: str, frontend: str) -> None:
    x = torch.randn(3, 4, dtype=torch.complex64, requires_grad=True)
    compiled = aheadgrad.compile(fn, backend=backend, frontend=frontend)
    out, expected = compiled(x), fn(x)
    for a, b in zip(out, expected, strict=True):
        close(a, b)
        assert (a.stride(), a.is_conj(), a.is_neg()) == (b.stride(), b.is_conj(), b.is_neg())
    close(torch.autograd.grad(total(out), x), torch.autograd.grad(total(expected), x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_write_to_a_conjugated_result_is_noticed(backend: str) -> None:
    x = torch.randn(3, dtype=torch.complex64, requires_grad=True)
    _, y = aheadgrad.compile(conjugated_and_kept, backend=backend)(x)
    out = y.abs().sum()
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


# -- sizes that change behind a convolution, which Inductor lays out in its own way


class Excited(nn.Module):
    """The gradient is divided by a number of pixels, which is also a stride of what the convolution gives."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).relu()
        return y * self.b(y.mean((2, 3), keepdim=True)).sigmoid()


class Flat(nn.Module):
    """Its second derivatives know sizes from what is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).sin().view(-1)[::2].sigmoid()


class Padded(nn.Module):
    """Torch says that the gradient is laid out as usual; the kernel has another opinion."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 3, padding=1)
        self.b = nn.Conv2d(4, 4, 3, padding=1, padding_mode="replicate")

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


class Viewed(nn.Module):
    """Viewed in the backward as it is laid out in eager."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).sin()
        return y.view(-1).tanh().view_as(y) * y


class Resized(nn.Module):
    """By factors that sizes alone do not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        return tuple(F.interpolate(y, scale_factor=f, mode="nearest") for f in (1.7, 0.6, 2, 3, 0.5))


class Moved(nn.Module):
    """Torch cannot differentiate `affine_grid` with symbols for sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        corners = y.mean((2, 3))[:, :3, None].expand(-1, 3, 2).transpose(1, 2)
        return F.grid_sample(y, F.affine_grid(corners, list(y.shape), align_corners=True), align_corners=True)


MODELS = [Excited, Flat, Padded, Viewed, Resized, Moved]
TWICE = not torch.__version__.startswith("2.11.")  # its second derivatives of convolutions take no symbols
SIZES = [(2, 3, 8, 8), (3, 3, 16, 8)]


@pytest.mark.filterwarnings("ignore:Inductor cannot compile this backward")  # of the second order
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", MODELS)
def test_sizes_that_change(kind: type[nn.Module], backend: str) -> None:
    torch.manual_seed(0)
    model = kind().double()
    compiled = aheadgrad.compile(model, backend=backend, dynamic=True)
    for size in SIZES:
        x = torch.randn(size, dtype=torch.float64, requires_grad=True)
        found = []
        for run in (compiled, model):
            grads = torch.autograd.grad(total(run(x)), [x, *model.parameters()], create_graph=True)
            twice = torch.autograd.grad(grads[0].square().sum(), x) if TWICE else ()
            found.append((*grads, *twice))
        close(*found)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [Excited, Flat, Viewed])
def test_anomaly_mode_and_batches_of_tangents(kind: type[nn.Module], backend: str) -> None:
    model = kind()
    compiled = aheadgrad.compile(model, backend=backend)
    x = torch.randn(SIZES[0], requires_grad=True)
    found = []
    for run in (compiled, model):
        torch.manual_seed(0)
        with torch.autograd.set_detect_anomaly(True):
            grad = torch.autograd.grad(total(run(x)), x)
        out = run(x)
        many = torch.randn(3, *out.shape)
        found.append((grad, torch.autograd.grad(out, x, many, is_grads_batched=True)))
    close(*found)


# -- what else was silently another


@pytest.mark.parametrize("frontend", ["trace", "dynamo"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_tangents_of_forward_mode(frontend: str, backend: str, requires_grad: bool) -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sin() * 2

    compiled = aheadgrad.compile(fn, backend=backend, frontend=frontend)
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.ones(3, requires_grad=requires_grad), torch.full((3,), 3.0))
        out, expected = forward_ad.unpack_dual(compiled(x)), forward_ad.unpack_dual(fn(x))
    close(out.primal, expected.primal)
    close(out.tangent, expected.tangent)


@pytest.mark.parametrize("frontend", ["trace", "dynamo"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loss_that_torch_takes_apart_in_another_way(backend: str, frontend: str) -> None:
    compiled = aheadgrad.compile(F.multilabel_margin_loss, backend=backend, frontend=frontend)
    for n in (4, 5, 6):
        x, target = torch.randn(n, 5, requires_grad=True), torch.tensor([[3, 0, -1, 1, 2]] * n)
        out, expected = compiled(x, target), F.multilabel_margin_loss(x, target)
        close(out, expected)
        close(torch.autograd.grad(out, x), torch.autograd.grad(expected, x))
