"""The Inductor backend: as near to eager as torch.compile, at any order; all that is around it is exact."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aheadgrad
from aheadgrad.backends.inductor import Inductor
from aheadgrad.errors import FallbackWarning, InvalidOption
from aheadgrad.torchlayer.inductor import missing

pytestmark = [
    pytest.mark.skipif(missing("cpu") is not None, reason="needs a C++ compiler"),
]


def fast(fn: Any, **options: Any) -> Any:
    options = {"frontend": "trace", "fallback": "error", "backend": "inductor", **options}
    return aheadgrad.compile(fn, **options)


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(F.gelu(self.norm(self.first(x))), 0.3, self.training)
        return self.last(h)


def gradients(model: Callable[..., Tensor], weights: list[Tensor], x: Tensor) -> list[Tensor]:
    torch.manual_seed(5)
    out = model(x)
    first = torch.autograd.grad(out.square().sum(), [x, *weights], create_graph=True)
    second = torch.autograd.grad(first[0].square().sum() + out.sum(), [x, *weights], allow_unused=True)
    return [out, *first, *(g for g in second if g is not None)]


@pytest.mark.parametrize("frontend", ["dynamo", "trace"])
def test_values_and_gradients_of_two_orders_with_the_random_numbers_of_eager(frontend: str) -> None:
    torch.manual_seed(0)
    net = Net()
    x = torch.randn(5, 6, requires_grad=True)
    compiled = fast(net, frontend=frontend)
    for _ in range(2):
        same(gradients(compiled, list(net.parameters()), x), gradients(net, list(net.parameters()), x))


@pytest.mark.zoo
def test_a_convolution_net_trains_as_in_eager() -> None:
    """The forward lays out what it keeps as it likes; BatchNorm's buffers are updated."""
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 8, 3, padding=1)
    net = nn.Sequential(
        conv, nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(144, 2)
    )
    other = copy.deepcopy(net)
    compiled = fast(net)
    for i in range(2):
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(i))
        for model, run in ((net, compiled), (other, other)):
            model.zero_grad()
            run(x).square().mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
    same(net.state_dict(), other.state_dict())


def test_updates_views_and_aliases_are_those_of_eager() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x.mul_(2).add_(y)
        z = (x @ y).relu()
        return z.t(), z[0], x

    def run(fn: Any) -> Any:
        x, y = torch.ones(3, 3), torch.arange(9.0).view(3, 3).requires_grad_()
        t, row, back = fn(x, y)
        assert back is x
        assert t._base is not None and t._base is row._base
        (t.sum() + row.prod()).backward()
        return t, row, back, y.grad

    same(run(fast(fn)), run(fn))


@pytest.mark.parametrize("frontend", ["dynamo", "trace"])
def test_statistics_are_updated_inside_and_versions_are_those_of_eager(frontend: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.BatchNorm1d(6))
    other = copy.deepcopy(net)
    compiled, x = fast(net, frontend=frontend), torch.randn(8, 4)
    for _ in range(2):
        same(compiled(x).sum().backward(), other(x).sum().backward())
        same(list(net.buffers()), list(other.buffers()))
    assert [b._version for b in net.buffers()] == [b._version for b in other.buffers()]


def test_tangents_of_any_layout_are_taken() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.sin(x) * x

    compiled = fast(fn)
    x = torch.randn(4, 6, requires_grad=True)
    tangents = [
        torch.randn(4, 6),
        torch.randn(6, 4).t(),
        torch.ones(1, 1).expand(4, 6),
        torch.randn(8, 6)[::2],
    ]
    for t in tangents:
        same(torch.autograd.grad(compiled(x), x, t), torch.autograd.grad(fn(x), x, t))


@pytest.mark.parametrize("frontend", ["dynamo", "trace"])
def test_sizes_that_change_are_symbols(frontend: str) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    compiled = fast(net, dynamic=True, frontend=frontend)
    for n in (3, 7, 12):
        x = torch.randn(n, 4, requires_grad=True)
        same(gradients(compiled, [], x), gradients(net, [], x))
    assert len(compiled.entries) == 1


def test_a_graph_that_is_kept_can_be_gone_through_again() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(x * y)
        return h * h.exp()

    x, y = (torch.randn(5, 5, requires_grad=True) for _ in range(2))
    out = fast(fn)(x, y).sum()
    expected = torch.autograd.grad(fn(x, y).sum(), (x, y))
    same(torch.autograd.grad(out, (x, y), retain_graph=True), expected)
    same(torch.autograd.grad(out, (x, y)), expected)
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


def test_batched_tangents() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.sin(x) * x.sum()

    x, eye = torch.randn(3, requires_grad=True), torch.eye(3)
    ours, theirs = (torch.autograd.grad(f(x), x, eye, is_grads_batched=True) for f in (fast(fn), fn))
    same(ours, theirs)


def test_inference_and_some_of_the_gradients() -> None:
    net = Net().eval()
    compiled = fast(net)
    x = torch.randn(5, 6)
    with torch.no_grad():
        same(compiled(x), net(x))
    weights = list(net.parameters())[:1]
    same(torch.autograd.grad(compiled(x).sum(), weights), torch.autograd.grad(net(x).sum(), weights))


def test_what_inductor_cannot_compile_runs_op_by_op() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.to_sparse().to_dense() * x

    x = torch.randn(3, 3, requires_grad=True)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        out = fast(fn, fallback="warn", frontend="trace")(x)
    same(out, fn(x))
    assert seen


def test_modes_are_checked() -> None:
    with pytest.raises(InvalidOption, match="reduce-overhead"):
        aheadgrad.compile(torch.sin, backend="inductor", mode="fastest")
    with pytest.raises(InvalidOption, match="inductor"):
        aheadgrad.compile(torch.sin, backend="eager", mode="reduce-overhead")


def test_behind_torch_compile_with_graph_breaks_and_modes() -> None:
    def fn(x: Tensor) -> Tensor:
        y = torch.sin(x) * 2
        print(end="")
        return y.cos() + x

    options = {"backend": "inductor"}
    compiled = torch.compile(fn, backend="aheadgrad", options=options)
    x = torch.randn(6, requires_grad=True)
    same(compiled(x), fn(x))
    same(torch.autograd.grad(compiled(x).sum(), x), torch.autograd.grad(fn(x).sum(), x))


@pytest.mark.zoo
def test_one_graph_of_changing_sizes_inside_code_that_torch_compiles() -> None:
    """`fullgraph=True`, sizes that become symbols by themselves, and a compiled function inside."""
    inner = aheadgrad.compile(lambda x: torch.sin(x) * x.sum(-1, keepdim=True), backend="inductor")

    def fn(x: Tensor) -> Tensor:
        return inner(x) + x.square()

    options = {"backend": "inductor"}
    compiled = torch.compile(fn, backend="aheadgrad", options=options, fullgraph=True)
    for n in (4, 5, 9):
        x = torch.randn(n, 3, requires_grad=True)
        same(gradients(compiled, [], x), gradients(fn, [], x))


def test_the_journal_has_the_time_of_both_compiles() -> None:
    compiled = fast(lambda x: (x.sin() * x).sum())
    compiled(torch.randn(4, requires_grad=True)).backward()
    assert {"compile forward", "compile backward"} <= compiled.entries[0].entry.journal.times.keys()


@pytest.fixture
def unnamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests name eager as the default (conftest); here nobody does."""
    monkeypatch.delenv("AHEADGRAD_BACKEND")


@pytest.mark.usefixtures("unnamed")
def test_the_default_fuses_and_torch_compile_gets_it_too() -> None:
    def fn(x: Tensor) -> Tensor:
        return (torch.sin(x) * x.sum(-1, keepdim=True)).relu()

    x = torch.randn(4, 3, requires_grad=True)
    compiled = aheadgrad.compile(fn)
    for run in (compiled, torch.compile(fn, backend="aheadgrad")):
        same(gradients(run, [], x), gradients(fn, [], x))
    assert "compile backward" in compiled.entries[0].entry.journal.times


@pytest.mark.usefixtures("unnamed")
def test_whoever_did_not_ask_for_inductor_is_not_warned_about_it() -> None:
    """Warnings are errors here. What could not be fused stands in the report."""

    def sparse(x: Tensor) -> Tensor:
        return x.to_sparse().to_dense() * x

    def waves(x: Tensor) -> Tensor:
        return torch.fft.fft(x).abs().sum()

    x = torch.randn(3, 3)
    for fn in (sparse, waves):
        compiled = aheadgrad.compile(fn, frontend="trace", fallback="error")
        same(compiled(x), fn(x))
        assert ("op by op" in compiled.explain()) is (fn is sparse)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, i: x[i].sin(),
        lambda x, i: F.embedding(i, x) * 2,
        lambda x, i: x.index_select(0, i) + 1,
        lambda x, i: x.gather(0, i[:, None]).exp(),
        lambda x, i: (i // (i - 9)) * x[0, 0],
        lambda x, i: F.cross_entropy(x[:3] * 2, i),
    ],
)
def test_what_is_wrong_with_an_index_is_errors_of_eager(fn: Any) -> None:
    x, i = torch.randn(4, 5, requires_grad=True), torch.tensor([0, 9, 1])
    with pytest.raises((IndexError, RuntimeError)) as expected:
        fn(x, i)
    with pytest.raises(expected.type, match=r"^(index|ZeroDivision|Target 9 is)"):
        fast(fn)(x, i)


def test_results_that_are_no_tensors() -> None:
    def fn(x: Tensor) -> tuple[Any, ...]:
        return x.sin(), None, 3, "a", 2.5, x.shape[0], x

    x = torch.randn(5)
    out = fast(fn)(x)
    same(out[0], x.sin())
    assert out[1:-1] == (None, 3, "a", 2.5, 5)
    assert out[-1] is x


def test_quotients_and_remainders_of_what_is_not_finite_or_too_large() -> None:
    def fn(x: Tensor, y: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        return x // y, x % y, x % 3.0, i // -i.clamp(1, 1), i % 3

    inf, nan = float("inf"), float("nan")
    x = torch.tensor([1.0, -1.0, inf, -inf, nan, 1e30, -0.5, 7.0])
    y = torch.tensor([inf, inf, 2.0, inf, 1.0, 3.0, -inf, 0.0])
    i = torch.tensor([-(2**31), 2**31 - 1, 5, 0], dtype=torch.int32)
    torch.testing.assert_close(fast(fn)(x, y, i), fn(x, y, i), rtol=0, atol=0, equal_nan=True)


class Counting(nn.Module):
    def __init__(self, *, exchange: bool) -> None:
        super().__init__()
        self.exchange = exchange
        self.register_buffer("seen", torch.ones(3))
        self.register_buffer("last", torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        old = self.seen.clone()
        self.seen.copy_(self.last if self.exchange else self.last + x.detach())
        self.last.copy_(old if self.exchange else x.detach() * 2)
        return x.sin() * self.seen


@pytest.mark.parametrize("exchange", [True, False])
def test_buffers_updated_by_kernels_are_seen_by_autograd_and_do_not_disturb_each_other(
    exchange: bool,
) -> None:
    model = Counting(exchange=exchange)
    other, version = copy.deepcopy(model), model.seen._version
    x = torch.randn(3, requires_grad=True)
    kept = x * model.last
    compiled = fast(model, backend=Inductor(warns=False))
    same(torch.autograd.grad(compiled(x).sum(), x), torch.autograd.grad(other(x).sum(), x))
    same(model.state_dict(), other.state_dict())
    assert model.seen._version == version + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


@pytest.mark.parametrize("fn", [lambda x: x.exp(), lambda x: x.exp().view(3, 1), lambda x: x.exp()[:2]])
def test_a_result_that_shares_memory_with_what_is_kept_is_watched(fn: Any) -> None:
    x = torch.randn(3, requires_grad=True)
    for run in (fn, fast(fn)):
        out = run(x)
        with torch.no_grad():
            out.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_what_reads_a_buffer_runs_after_the_change() -> None:
    """A defect of Inductor's, which we mend while we use it."""

    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        changed = (a[None] - a[:, None]).diagonal_scatter(torch.ones(3))
        twisted = b - b.t()
        return twisted, twisted / changed, changed

    a, b = torch.randn(3), torch.randn(3, 3)
    same(fast(fn)(a, b), fn(a, b))


def test_inductor_as_the_default_or_eager_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from aheadgrad.backends import registry
    from aheadgrad.backends.eager import compile_eager
    from aheadgrad.options import Options

    monkeypatch.delenv("AHEADGRAD_BACKEND")
    registry.default_backend.cache_clear()
    assert registry.settled(Options(), "cpu").backend == registry.Inductor()
    assert registry.settled(Options(mode="max-autotune"), "cpu").backend == registry.Inductor("max-autotune")
    monkeypatch.setattr(registry.inductor, "missing", lambda device: "a C++ compiler")
    registry.default_backend.cache_clear()
    with pytest.warns(FallbackWarning, match="C\\+\\+ compiler"):
        assert registry.settled(Options(), "cpu").backend is compile_eager
    assert registry.settled(Options(), "cpu").backend is compile_eager  # and says nothing
    monkeypatch.setenv("AHEADGRAD_BACKEND", "eager")
    assert registry.settled(Options(), "cpu").backend is compile_eager
    registry.default_backend.cache_clear()


@pytest.mark.parametrize("part", [lambda t: t[0], lambda t: t[0:1], lambda t: t.unsqueeze(1)[1:, :, 1]])
def test_a_part_of_what_was_computed_has_the_strides_of_a_part(part: Any) -> None:
    def fn(x: Tensor) -> Tensor:
        return part((x + x).t() * 3.0)

    x = torch.randn(4, 3)
    found = aheadgrad.compile(fn, backend="inductor", frontend="trace")(x)
    assert (found.size(), found.stride()) == (fn(x).size(), fn(x).stride())
    assert torch.equal(found, fn(x))


def test_a_saved_view_of_an_input_that_is_changed_before_backward() -> None:
    def fn(x: Tensor) -> Tensor:
        x.unsqueeze_(-1)
        return torch.maximum(x, x)

    for run in (fn, aheadgrad.compile(fn, backend="inductor", frontend="trace")):
        x = torch.randn(3, requires_grad=True) * 1
        out = run(x)
        x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_a_part_of_what_was_computed_is_no_view() -> None:
    """Of something that nobody has: it may be written to, and has its history."""

    def fn(x: Tensor) -> Tensor:
        return torch.nn.functional.silu(x)[1:].t() * -1.0

    found = []
    for run in (fn, aheadgrad.compile(fn, backend="inductor", frontend="trace")):
        x = torch.arange(6.0).reshape(3, 2).requires_grad_()
        out = run(x)
        with torch.no_grad():
            out.mul_(2)
        out[:, 1].sum().backward()
        found.append((out.detach(), out.stride(), out._is_view(), x.grad))
    assert found[0][1:3] == found[1][1:3]
    torch.testing.assert_close(found[0], found[1])
