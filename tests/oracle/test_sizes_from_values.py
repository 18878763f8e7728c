"""Sizes that values decide: masks, `nonzero`, `unique`, `repeat_interleave`, `bincount`.

One entry serves all masks of a shape: the empty one, one with a single element, one that is true everywhere.
What torch can only record by assuming something of such a size is left to eager.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aheadgrad
from aheadgrad.errors import AheadgradError, DataDependentError, FallbackError
from aheadgrad.testing import Inputs, assert_same

from .common import strict

MASKS = ([1, 0, 1, 1, 0], [0] * 5, [1] * 5, [0, 0, 1, 0, 0])


def make(mask: list[int], seed: int = 0) -> Callable[[], Inputs]:
    """x and v of 5 rows of 3, a mask of rows, numbers from 0 to 3."""

    def fresh() -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        x, v = (torch.randn(5, 3, generator=generator, dtype=torch.float64) for _ in range(2))
        k = torch.randint(0, 4, (5,), generator=generator)
        x, v = x.requires_grad_(), v.requires_grad_()
        return Inputs((x, v, torch.tensor(mask).bool(), k), {}, leaves=[x, v])

    return fresh


def agrees(fn: Callable[..., Any], *, order: int = 2, dynamic: bool | None = None) -> None:
    """One entry, for all masks, equal to eager in all scenarios."""
    compiled = strict(fn, dynamic=dynamic)
    for seed, mask in enumerate(MASKS):
        assert_same(fn, compiled, make(mask, seed), order=order)
    assert len(compiled.entries) == 1


def _column(x: Tensor, v: Tensor, m: Tensor, k: Tensor) -> Tensor:
    y = x[m]
    y[:, 0] = 0
    y[:, 1:] *= 2
    return y


def _rows(x: Tensor, v: Tensor, m: Tensor, k: Tensor) -> Tensor:
    y = x[m]
    y[1:] = 0
    return y


def _into_new(x: Tensor, v: Tensor, m: Tensor, k: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[m] = v[m] * 3
    return out**2


def _by_bytes(x: Tensor, v: Tensor, m: Tensor, k: Tensor) -> Tensor:
    out = x * 2
    out[m.byte()] *= v.sum()
    return out


def _one_value(x: Tensor, v: Tensor, m: Tensor, k: Tensor) -> Tensor:
    out = x * 2
    out[m] = v.sum()
    return out


def _constant(x: Tensor, v: Tensor, m: Tensor, k: Tensor) -> Tensor:
    out = x.clone()
    out[m] = 0
    return out * v


def _unique(x: Tensor, v: Tensor, m: Tensor, k: Tensor) -> Any:
    u, inverse, counts = torch.unique(k, return_inverse=True, return_counts=True)
    sums = torch.zeros(u.shape[0], 3, dtype=x.dtype).index_add(0, inverse, x)
    return u, sums.sin() / counts[:, None]


def _bincount(x: Tensor, v: Tensor, m: Tensor, k: Tensor) -> Tensor:
    counts = torch.bincount(k, minlength=2)
    sums = torch.zeros(counts.shape[0], 3, dtype=x.dtype).index_add(0, k, x)
    return sums / counts.clamp(min=1)[:, None]


def _where(x: Tensor, v: Tensor, m: Tensor, k: Tensor) -> Tensor:
    i, j = torch.where(x > 0)
    return x[i, j] * v[i, j].exp()


def _inner(x: Tensor, v: Tensor, m: Tensor, k: Tensor) -> Tensor:
    (g,) = torch.autograd.grad((x[m] ** 3).sum(), x, create_graph=True)
    return g * v


def _inner_put(x: Tensor, v: Tensor, m: Tensor, k: Tensor) -> Tensor:
    out = x * 1
    out[m] = v.sum()
    (g,) = torch.autograd.grad((out**3).sum(), v, create_graph=True)
    return g * x


def _nested(x: Tensor, v: Tensor, m: Tensor, k: Tensor) -> Tensor:
    y = x[m]
    return y[y[:, 0] > 0].sin()


def _mutates_input(x: Tensor, v: Tensor, m: Tensor, k: Tensor) -> Tensor:
    with torch.no_grad():
        x[m] = 7.0
    return x * v


def _without_grad(x: Tensor, v: Tensor, m: Tensor, k: Tensor) -> Any:
    with torch.no_grad():
        y = x[m]
    return y * 2, x[m].detach().sin() * v.sum()


def _aliases(x: Tensor, v: Tensor, m: Tensor, k: Tensor) -> Any:
    y = x[m] * 2
    return y, y.t(), y[:, 0], y.view(-1), y.detach()


def _numbers(x: Tensor, v: Tensor, m: Tensor, k: Tensor) -> Any:
    y = x[m]
    return y.shape[0], y.shape, {"n": y.numel() * 2}, y.sum() / (y.shape[0] + 1)


def _new_of_size(x: Tensor, v: Tensor, m: Tensor, k: Tensor) -> Any:
    n = x[m].shape[0]
    return torch.arange(n), v[0].expand(n, 3) * x[m], x.new_ones(n, 2)


def _scattered(x: Tensor, v: Tensor, m: Tensor, k: Tensor) -> Tensor:
    i = m.nonzero()[:, 0]
    return torch.zeros_like(x).index_add(0, i, v[i]) * x


AGREES: dict[str, Callable[..., Any]] = {
    "mask": lambda x, v, m, k: x[m],
    "sum": lambda x, v, m, k: (x[m] ** 2).sum(),
    "mean": lambda x, v, m, k: (x[m] ** 2).mean(),
    "mean of rows": lambda x, v, m, k: (x[m] ** 2).mean(0),
    "one mask twice": lambda x, v, m, k: ((x[m] - v[m]) ** 2).sum(),
    "equal masks": lambda x, v, m, k: x[x > 0] * v[x > 0],
    "two masks": lambda x, v, m, k: torch.cat([x[m], v[~m]]).sin(),
    "products": lambda x, v, m, k: ((x[m] @ v[:3]).tanh(), x[m].t() @ v[m]),
    "broadcast": lambda x, v, m, k: x[m][:, None] * v[None],
    "columns": lambda x, v, m, k: x.t()[:, m].sin(),
    "bytes": lambda x, v, m, k: x[m.byte()].sin() * v[0],
    "bytes in one dimension": lambda x, v, m, k: x[m.byte(), 1:].sin(),
    "put by bytes": _by_bytes,
    "elements": lambda x, v, m, k: x[x > 0].exp(),
    "masked_select": lambda x, v, m, k: x.masked_select(m[:, None].expand(5, 3)).sin(),
    "nonzero": lambda x, v, m, k: (m.nonzero(), x[m.nonzero()[:, 0]].sin()),
    "argwhere": lambda x, v, m, k: torch.argwhere(x > 0),
    "contiguous inside": lambda x, v, m, k: x[m.nonzero().t().contiguous()[0]],
    "where": _where,
    "unique": _unique,
    "unique_consecutive": lambda x, v, m, k: torch.unique_consecutive(k),
    "unique rows": lambda x, v, m, k: torch.unique((x > 0).long(), dim=0),
    "repeat_interleave": lambda x, v, m, k: x.repeat_interleave(k, 0) * v.repeat_interleave(k, 0),
    "bincount": _bincount,
    "multiple of 3": lambda x, v, m, k: x[m].view(-1).view(-1, 3) * 2,
    "first row": lambda x, v, m, k: x[m][0],
    "largest": lambda x, v, m, k: x[m].max(),
    "slices": lambda x, v, m, k: (x[m][:2].sin(), x[m][:-1].sin()),
    "softmax": lambda x, v, m, k: x[m].softmax(0),
    "sort": lambda x, v, m, k: x[m].sort(0),
    "cross entropy": lambda x, v, m, k: F.cross_entropy(x[m], k[m].clamp(max=2)),
    "mse": lambda x, v, m, k: F.mse_loss(x[m], v[m]),
    "layer norm": lambda x, v, m, k: F.layer_norm(x[m], (3,), v[0], v[1]),
    "dropout": lambda x, v, m, k: F.dropout(x[m], 0.5),
    "embedding": lambda x, v, m, k: F.embedding(k[m], v),
    "put one value": _one_value,
    "put values": _into_new,
    "put a constant": _constant,
    "put and add": lambda x, v, m, k: x.index_put((m,), v[m], accumulate=True).sin(),
    "masked_scatter": lambda x, v, m, k: x.masked_scatter(m[:, None], v.exp()),
    "write columns": _column,
    "write rows": _rows,
    "derivative inside": _inner,
    "derivative of a write inside": _inner_put,
    "mask of a mask": _nested,
    "mutated input": _mutates_input,
    "no_grad and detach": _without_grad,
    "views": _aliases,
    "numbers": _numbers,
    "new tensors of that size": _new_of_size,
    "added where it came from": _scattered,
    "unused": lambda x, v, m, k: (x[m], x * 2)[1],
    "combinations": lambda x, v, m, k: torch.combinations(x[:, 0], 2),
    "corrcoef": lambda x, v, m, k: torch.corrcoef(x),
    "lstsq": lambda x, v, m, k: torch.linalg.lstsq(x, v)[0],
    "sparse and back": lambda x, v, m, k: x.detach().to_sparse().to_dense(),
}


@pytest.mark.parametrize("name", AGREES)
def test_one_entry_for_all_masks(name: str) -> None:
    agrees(AGREES[name])


@pytest.mark.parametrize("name", ["mask", "put values", "unique", "numbers", "views", "repeat_interleave"])
def test_with_symbolic_sizes_as_well(name: str) -> None:
    agrees(AGREES[name], dynamic=True)


def test_masks_of_other_sizes_share_an_entry() -> None:
    compiled = strict(lambda x, m: (x[m] ** 2).sum())
    for n in (4, 6, 9, 11):
        x, m = torch.randn(n, requires_grad=True), torch.rand(n) > 0.5
        compiled(x, m).backward()
        assert torch.equal(x.grad, torch.where(m, 2 * x, 0).detach())  # type: ignore[arg-type]
    assert len(compiled.entries) == 2


REFUSED: dict[str, Callable[..., Any]] = {
    "decision": lambda x, v, m, k: x[m].sum() if x[m].shape[0] > 2 else x.sum(),
    "text": lambda x, v, m, k: x[m].sum() if str(x[m].shape[0]) == "3" else x.sum(),
    "loop": lambda x, v, m, k: sum(row.sum() for row in x[m]),
    "range": lambda x, v, m, k: sum(x[m][i].sum() for i in range(x[m].shape[0])),
    "float in several steps": lambda x, v, m, k: x * (x[m].shape[0] * 0.1 * 3),
    "squeeze": lambda x, v, m, k: x[m.nonzero().squeeze()].sin(),
    "squeeze rows": lambda x, v, m, k: x[m].squeeze(0),
    "may be broadcast": lambda x, v, m, k: x[m] * v[:3],
    "sizes that have to agree": lambda x, v, m, k: x[m] + v[k < 9][: x[m].shape[0]][m[m]],
    "memory that may be shared": lambda x, v, m, k: (lambda y: (y, y.reshape(-1)))(x[m].t()),
    "memory that may be written": lambda x, v, m, k: (lambda y: (y.contiguous().mul_(2), y.sin())[1])(
        x[m].t()
    ),
    "strides of a copy": lambda x, v, m, k: x[m].t().contiguous().t() * 1,
    "strides": lambda x, v, m, k: torch.unique((x > 0).long(), dim=1).reshape(-1),
    "no such view": lambda x, v, m, k: m.nonzero().expand(-1, 2).view(-1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_left_to_eager(name: str) -> None:
    """Where such a size decides: an error of ours that says so, before anything is compiled."""
    compiled = strict(REFUSED[name])
    for seed, mask in enumerate(MASKS):
        with pytest.raises((DataDependentError, FallbackError)):
            compiled(*make(mask, seed)().args)
    assert not compiled.entries


def test_reading_a_value_is_still_an_error() -> None:
    """Also after a mask."""
    for read in (lambda t: t.item(), int, bool, float):
        compiled = strict(lambda x, m, read=read: (x[m].sum(), read(x.sum()))[0])
        with pytest.raises(DataDependentError):
            compiled(torch.ones(3), torch.ones(3).bool())


def _caught(x: Tensor, m: Tensor, ask: Callable[[Any], Any]) -> Tensor:
    try:
        n = ask(x[m])
    except Exception:
        n = 7
    return x * n


ASKED: dict[str, Callable[[Any], Any]] = {
    "int": lambda y: int(y.shape[0]),
    "comparison": lambda y: 3 if y.shape[0] > 2 else 4,
    "len": len,
    "text": lambda y: len(f"{y.shape[0]}"),
    "rows": lambda y: sum(1 for _ in y),
    "index": lambda y: [1, 2, 3, 4][y.shape[0]],
    "value": lambda y: y.sum().item(),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_refusal_that_the_function_catches_still_counts(name: str) -> None:
    """Otherwise it would go on in the recording where in eager it has a number."""
    compiled = strict(lambda x, m: _caught(x, m, ASKED[name]))
    with pytest.raises((DataDependentError, FallbackError)):
        compiled(torch.ones(3), torch.ones(3).bool())
    assert not compiled.entries


def test_values_of_a_fixed_number_of_rows() -> None:
    """The mask must have as many, which the kernel checks; a single row is broadcast, and so not this."""
    x = torch.randn(5, 3, dtype=torch.float64)
    for rows in (3, 1):
        compiled = strict(lambda x, v, m: torch.index_put(x * 2, (m,), v).pow(2))
        for mask in MASKS:
            v, w = (torch.randn(rows, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
            w.data.copy_(v.data)
            m = torch.tensor(mask).bool()
            if rows == 3 and sum(mask) != 3:
                with pytest.raises(RuntimeError, match="shape mismatch"):
                    compiled(x, v, m)
                continue
            compiled(x, v, m).sum().backward()
            torch.index_put(x * 2, (m,), w).pow(2).sum().backward()
            assert torch.equal(v.grad, w.grad)  # type: ignore[arg-type]
        assert len(compiled.entries) == 1


def test_nothing_is_guarded_on_such_a_size() -> None:
    compiled = strict(lambda x, m: x[m].view(-1, 2).sum(0))
    x = torch.arange(8.0)
    for count in (2, 4, 0, 8):
        m = torch.arange(8) < count
        assert torch.equal(compiled(x, m), x[m].view(-1, 2).sum(0))
    with pytest.raises(RuntimeError, match="invalid for input of size 3"):
        compiled(x, torch.arange(8) < 3)
    assert len(compiled.entries) == 1


class Masked(nn.Module):
    """Weights for the rows that are told, with a counter of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, m: Tensor) -> Tensor:
        self.seen += m.sum()
        out = torch.zeros_like(x)
        out[m] = self.linear(x[m]).relu()
        return out


def test_module() -> None:
    torch.manual_seed(0)
    eager, other = Masked(), Masked()
    other.load_state_dict(eager.state_dict())
    compiled = strict(other)
    for mask in MASKS:
        x, m = torch.randn(5, 3), torch.tensor(mask).bool()
        for model in (eager, compiled):
            model.zero_grad()
            model(x, m).pow(2).sum().backward()
        assert torch.equal(eager.seen, other.seen)
        for a, b in zip(eager.parameters(), other.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
    assert len(compiled.entries) == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference(mode: Any) -> None:
    compiled = strict(AGREES["put values"])
    for mask in MASKS:
        args = make(mask)().args
        with mode():
            assert torch.equal(compiled(*args), AGREES["put values"](*args))
    assert len(compiled.entries) == 1


def test_capture_shows_the_size() -> None:
    x, m = torch.ones(4, requires_grad=True), torch.tensor([True, False, True, True])
    text = str(aheadgrad.capture(lambda x, m: x[m] * x[m].shape[0], x, m))
    assert "sym_size" in text


# -- Dynamo, where it is set to capture such ops

DYNAMO = [
    "mask", "mean", "one mask twice", "two masks", "products", "nonzero", "where", "unique",
    "repeat_interleave", "bincount", "put one value", "put values", "write columns", "views",
    "numbers", "mask of a mask",
]  # fmt: skip


@pytest.mark.parametrize("name", DYNAMO)
def test_through_dynamo(name: str) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch._dynamo.reset()
        fn = AGREES[name]
        compiled = torch.compile(fn, backend="aheadgrad", fullgraph=True, options={"fallback": "error"})
        for seed, mask in enumerate(MASKS):
            assert_same(fn, compiled, make(mask, seed), order=2)


def test_dynamos_assertions_are_kept() -> None:
    """Dynamo takes two sizes for equal and has that asserted; so it is, compiled or not."""

    def fn(x: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return x[m] + v[v > 0]

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for backend in ("eager", "aheadgrad"):
            torch._dynamo.reset()
            compiled = torch.compile(fn, backend=backend, fullgraph=True)
            x, v = torch.ones(3), torch.tensor([1.0, 2.0, -1.0])
            assert compiled(x, v, torch.tensor([True, True, False])).shape == (2,)
            with pytest.raises(RuntimeError, match="Runtime assertion failed"):
                compiled(x, v, torch.tensor([True, True, True]))


# -- programs made at random

STEPS: list[str] = [
    "y = y[y[:, 0] > {a}]",
    "y = torch.cat([y, v[m]])",
    "y = y * 2 + v[0]",
    "y = y.sin()",
    "y[:, {i}] = {a}",
    "y = y + y.mean(0)",
    "y = y @ v[:3]",
    "y = y[y.nonzero()[:, 0]]",
    "y = y.repeat_interleave(k[:1] + 1, 0).repeat_interleave(2, 0)",
    "z = z.index_add(0, m.nonzero()[:, 0], x[m])",
    "z[m] = x[m].exp()",
    "z[m] = y.sum()",
    "z = z + y.sum(0)",
    "y = y.mul_(x[m].shape[0])",
    "y = torch.stack([y, y.cos()]).sum(0)",
    "z = z * (y * 1).t().contiguous().sum()",
    "y = y.index_select(0, torch.arange(y.shape[0]).flip(0))",
    "y = F.softmax(y, -1)",
    "y = torch.where(y > 0, y, -y)",
    "y = y.masked_fill(y > 1, 0.5)",
    "y = y.expand(2, -1, -1).sum(0)",
]


def program(seed: int) -> tuple[str, Callable[..., Any]]:
    choose = random.Random(seed)
    lines = ["y, z = x[m] * 1, x * v"]
    for _ in range(choose.randint(2, 6)):
        step = choose.choice(STEPS)
        lines.append(step.format(a=choose.choice(("0.1", "-0.3")), i=choose.randint(0, 2)))
    lines.append(
        f"return {choose.choice(('y, z', 'y.sum(), z', 'z', '(y ** 2).sum() * z', 'y, y.shape[0]'))}"
    )
    text = "def fn(x, v, m, k):\n    " + "\n    ".join(lines)
    scope: dict[str, Any] = {"torch": torch, "F": F}
    exec(text, scope)
    return text, scope["fn"]


MANY = [pytest.param(seed, marks=[pytest.mark.zoo] * (seed >= 12)) for seed in range(40)]


@pytest.mark.parametrize("seed", MANY)
def test_random_programs(seed: int) -> None:
    text, fn = program(seed)
    compiled = strict(fn)
    for i, mask in enumerate(MASKS):
        try:
            assert_same(fn, compiled, make(mask, seed + i), order=2)
        except AheadgradError as refused:
            pytest.fail(f"{text}\n{refused}")
        except AssertionError as error:
            raise AssertionError(f"{text}\n{error}") from error
    assert len(compiled.entries) == 1
