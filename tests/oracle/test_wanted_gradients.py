"""Only what is asked for: a backward through a compiled call computes the gradients that somebody wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import aheadgrad
from aheadgrad.testing.two import TwoTensor

from .common import assert_equal, leaf, strict


class Counting(TorchDispatchMode):
    """The ops that run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def plain(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(x @ w + b)


def mutated(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    h = x @ w
    h.mul_(2)
    h[0] = b
    return h.sigmoid()


def mutated_input(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    x.mul_(w)
    return (x * b).sum(0)


def aliased(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    h = x * w
    return h.view(-1), (h + b).t()


def without_grad(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        scale = (x * w).sum()
    return x * scale + w * b.exp()


def through_layers(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    h = F.conv1d(x[None], w[:, :, None], b)
    return F.layer_norm(h, h.shape[-1:], h.new_ones(4), h.new_zeros(4)).exp()


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x**3 * y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, y = ctx.saved_tensors
        return 3 * x**2 * y * grads[0], x**3 * grads[0]


def custom(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return Cube.apply(x @ w, b.sin()) * w


FUNCTIONS = (plain, mutated, aliased, without_grad, through_layers, custom)
CHAINS = (([0], [1]), ([0], [0], [1, 2]), ([1, 2], [0]), ([0], [0, 1, 2], [0]))
SETS = ([0], [1], [2], [0, 1], [1, 2], [0, 1, 2])


def inputs() -> list[Tensor]:
    return [leaf(4, 4, seed=1), leaf(4, 4, seed=2), leaf(4, seed=3)]


def roots(out: Any) -> list[Tensor]:
    return list(out) if isinstance(out, tuple) else [out]


def chain(fn: Callable[..., Any], sets: Sequence[Sequence[int]], given: list[Tensor]) -> list[Any]:
    """Gradients of gradients, of these inputs at each order; the last has no history."""
    outs = roots(fn(*given))
    found: list[Any] = []
    for k, wanted in enumerate(sets, start=1):
        asked = [given[i] for i in wanted]
        grads = torch.autograd.grad(
            [o.sin().sum() for o in outs], asked, create_graph=k < len(sets), allow_unused=True
        )
        found += grads
        outs = [g for g in grads if g is not None and g.requires_grad]
        if not outs:
            break
    return found


@pytest.mark.parametrize("fn", FUNCTIONS)
@pytest.mark.parametrize("wanted", SETS, ids=str)
def test_gradients_of_some_inputs(fn: Callable[..., Any], wanted: list[int]) -> None:
    given, compiled = inputs(), strict(fn)
    assert_equal(chain(compiled, [wanted], given), chain(fn, [wanted], given))


@pytest.mark.parametrize("fn", FUNCTIONS)
@pytest.mark.parametrize("sets", CHAINS, ids=str)
def test_higher_orders_of_some_inputs(fn: Callable[..., Any], sets: Any) -> None:
    given, compiled = [t.double().detach().requires_grad_() for t in inputs()], strict(fn)
    for got, expected in zip(chain(compiled, sets, given), chain(fn, sets, given), strict=True):
        if got is None or expected is None:
            assert got is expected
        else:
            torch.testing.assert_close(got, expected)


def ops_of_backward(fn: Callable[..., Any], wanted: list[int], *, create_graph: bool) -> list[str]:
    given = inputs()
    with Counting() as counting:
        for _ in range(2):  # the first is recorded
            outs = roots(fn(*given))
            tangents = [torch.ones(o.shape) for o in outs]
            counting.ops.clear()
            torch.autograd.grad(
                outs, [given[i] for i in wanted], tangents, create_graph=create_graph, allow_unused=True
            )
    return [op for op in counting.ops if "detach" not in op]


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("wanted", SETS[:5], ids=str)
@pytest.mark.parametrize("fn", [plain, without_grad, through_layers])
def test_nothing_is_computed_that_nobody_wants(fn: Any, wanted: list[int], create_graph: bool) -> None:
    compiled = strict(fn)
    ours = ops_of_backward(compiled, wanted, create_graph=create_graph)
    theirs = ops_of_backward(fn, wanted, create_graph=create_graph)
    assert len(ours) <= len(theirs), (ours, theirs)
    assert ours.count("aten.mm.default") == theirs.count("aten.mm.default")


def _noted(sizes: list[int], t: Tensor) -> Tensor:
    sizes.append(t.numel())
    return t


def test_forces_keep_nothing_for_gradients_of_weights() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    x = leaf(5, 3)
    compiled = aheadgrad.compile(model, fallback="error", frontend="trace")
    held = []
    for fn in (model, compiled):
        for _ in range(2):
            sizes: list[int] = []
            out = fn(x).sum()
            packed = partial(_noted, sizes)
            with torch.autograd.graph.saved_tensors_hooks(packed, lambda t: t):
                torch.autograd.grad(out, x, create_graph=True)
        held.append(sum(sizes))
    assert held[1] <= held[0] + x.numel()


@pytest.mark.parametrize("fn", [plain, mutated, aliased, without_grad])
def test_backward_into_some_inputs(fn: Callable[..., Any]) -> None:
    compiled = strict(fn)
    for wanted in SETS:
        grads = []
        for run in (fn, compiled):
            given = inputs()
            sum(o.sum() for o in roots(run(*given))).backward(inputs=[given[i] for i in wanted])  # type: ignore[union-attr]
            grads.append([t.grad for t in given])
        assert_equal(*grads)


def test_inputs_with_a_history() -> None:
    def run(fn: Any) -> list[Any]:
        x, w, b = inputs()
        h, v = x * 2, w.exp()
        out = fn(h, v, b)
        found: list[Any] = [*torch.autograd.grad(out.sum(), (h, b), retain_graph=True)]
        found += torch.autograd.grad(out.sum(), (x,), retain_graph=True)
        found += torch.autograd.grad(out.sum(), (v, w), retain_graph=True)
        (first,) = torch.autograd.grad(out.sum(), (h,), create_graph=True)
        return (
            found
            + [*torch.autograd.grad(first.sum(), (w, h), retain_graph=True)]
            + [*torch.autograd.grad(first.sin().sum(), (x, b))]
        )

    compiled = strict(plain)
    for got, expected in zip(run(compiled), run(plain), strict=True):
        torch.testing.assert_close(got, expected)


def test_calls_in_a_chain() -> None:
    compiled = strict(plain)

    def run(fn: Any, wanted: list[int]) -> Any:
        given = [*inputs(), *inputs()]
        out = fn(fn(*given[:3]), *given[4:])
        grads = torch.autograd.grad(out.sum(), [given[i] for i in wanted], create_graph=True)
        loss = sum((g * g).sum() for g in grads)
        loss.backward()  # type: ignore[union-attr]
        return [*grads, *(t.grad for t in given)]

    for wanted in ([0], [1, 5], [5], [2, 4]):
        for got, expected in zip(run(compiled, wanted), run(plain, wanted), strict=True):
            torch.testing.assert_close(got, expected)


def test_hooks_and_retained_gradients() -> None:
    compiled = strict(plain)

    def run(fn: Any) -> list[Any]:
        seen: list[Any] = []
        x, w, b = inputs()
        h = x * 1
        h.retain_grad()
        for name, t in (("h", h), ("w", w), ("b", b)):
            t.register_hook(lambda g, name=name: seen.append((name, g.sum().item())))
        out = fn(h, w, b)
        torch.autograd.grad(out.sum(), x, retain_graph=True)
        seen.append(h.grad is None)
        torch.autograd.grad(out.sum(), w, retain_graph=True)
        out.sum().backward(inputs=[h, b])
        return [*seen, x.grad, w.grad, b.grad, h.grad]

    assert_equal(run(compiled), run(plain))


def test_the_same_callable_in_every_way_one_after_the_other() -> None:
    compiled, given = strict(plain), inputs()
    for wanted in (*SETS, *reversed(SETS)):
        assert_equal(chain(compiled, [wanted], given), chain(plain, [wanted], given))
        asked = [given[i] for i in wanted]
        sums = [torch.autograd.grad(fn(*given).sum(), asked, create_graph=True) for fn in (compiled, plain)]
        assert_equal(*sums)


def test_many_sets_of_inputs() -> None:
    """After some sets have been seen all gradients are computed, and handed out as asked for."""

    def fn(*xs: Tensor) -> Tensor:
        return torch.stack(xs).exp().sum(0).tanh().sum()

    compiled, xs = strict(fn), [leaf(2, seed=i) for i in range(6)]
    for number in range(1, 64):
        asked = [x for i, x in enumerate(xs) if number >> i & 1]
        assert_equal(torch.autograd.grad(compiled(*xs), asked), torch.autograd.grad(fn(*xs), asked))


def test_anomaly_mode_looks_at_wanted_gradients_only() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return x * 2 + w.sqrt() * 0

    compiled = strict(fn)
    for run in (fn, compiled):
        x, w = leaf(2), torch.zeros(2, requires_grad=True)
        with torch.autograd.set_detect_anomaly(True):
            torch.autograd.grad(run(x, w).sum(), x)
            with pytest.raises(RuntimeError, match="nan"):
                torch.autograd.grad(run(x, w).sum(), w)


def test_a_backward_that_fails_for_another_input() -> None:
    class OneWay(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise ValueError("no way back")

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return x.sin() + OneWay.apply(w)

    compiled = strict(fn)
    for run in (fn, compiled):
        x, w = leaf(2), leaf(2, seed=1)
        (grad,) = torch.autograd.grad(run(x, w).sum(), x)
        assert_equal(grad, x.detach().cos())
        with pytest.raises(ValueError, match="no way back"):
            torch.autograd.grad(run(x, w).sum(), w)


def test_sizes_that_change() -> None:
    compiled = strict(plain, dynamic=True)
    for n in (3, 4, 6):
        given = [leaf(n, 5, seed=n), leaf(5, 5, seed=1), leaf(5, seed=2)]
        for sets in ([[0]], [[1]], [[0], [1, 2]]):
            for got, expected in zip(chain(compiled, sets, given), chain(plain, sets, given), strict=True):
                torch.testing.assert_close(got, expected)


def test_tensor_subclasses() -> None:
    compiled = strict(plain)
    for wanted in SETS:
        results = []
        for fn in (plain, compiled):
            x, w, b = (t.detach() for t in inputs())
            given = [TwoTensor(t, t + 1).requires_grad_() for t in (x, w, b)]
            grads = torch.autograd.grad(fn(*given).sum(), [given[i] for i in wanted])
            results.append([(g.a, g.b) for g in grads])
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected)


def test_graphs_are_freed_and_kept_as_in_eager() -> None:
    compiled = strict(plain)
    for run in (plain, compiled):
        given = inputs()
        out = run(*given).sum()
        torch.autograd.grad(out, given[0], retain_graph=True)
        torch.autograd.grad(out, given[1])
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(out, given[0])


def test_a_closed_entry_still_gives_some_of_its_gradients() -> None:
    compiled, given = strict(plain), inputs()
    out = compiled(*given)
    for entry in compiled.entries:
        entry.entry.close()
    found, expected = (torch.autograd.grad(o, given[0], torch.ones(4, 4)) for o in (out, plain(*given)))
    assert_equal(found, expected)
