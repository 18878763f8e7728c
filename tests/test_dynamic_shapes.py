"""Symbolic sizes: one entry for many sizes, forward and backward, as in eager."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

import aheadgrad
from aheadgrad import compat

close = functools.partial(torch.testing.assert_close, equal_nan=True)
Make = Callable[[int], list[Any]]


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def transpose_in_place(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x.mul_(2)
    x.t_()
    return x + 1, y.view(-1)


def views_of_one(x: Tensor) -> tuple[Tensor, ...]:
    x.mul_(2)
    y = x * 3
    return y.view(-1), y.t(), y[1:]


PROGRAMS: dict[str, tuple[Callable[..., Any], Make]] = {
    "matmul": (lambda x, w: (x @ w).relu(), lambda n: [leaf(n, 4), leaf(4, 5)]),
    "sizes returned": (lambda x: (x.t() * 2, x.shape[0], x.numel()), lambda n: [leaf(n, 4)]),
    "input changed": (transpose_in_place, lambda n: [leaf(n, 4) * 1, leaf(n, 7)]),
    "views": (views_of_one, lambda n: [leaf(n, 4) * 1]),
    "view of an input": (lambda x: x[1:, ::2].t(), lambda n: [leaf(n, 4)]),
    "norm": (
        lambda x, w, b: F.layer_norm(x, (4,), w, b).softmax(-1).sum(0),
        lambda n: [leaf(n, 6, 4), leaf(4), leaf(4)],
    ),
    "attention": (
        lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True),
        lambda n: [leaf(2, 3, n, 4)],
    ),
    "convolution": (
        lambda x, w: F.conv2d(x, w, padding=1).flatten(1),
        lambda n: [leaf(2, 3, n, n), leaf(4, 3, 3, 3)],
    ),
    "parts": (lambda x: torch.cat([x, x[:, :2]], 1).split(4, 1), lambda n: [leaf(n, 6)]),
    "expand": (lambda x: x.unsqueeze(1).expand(-1, 3, -1) * x.shape[0], lambda n: [leaf(n, 4)]),
    "other order in memory": (
        lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0) * 2,
        lambda n: [leaf(n, 4, n + 1)],
    ),
    "mean": (lambda x: x[::2].sum() / x.shape[0] + x.numel(), lambda n: [leaf(n, 4)]),
    "reshape": (
        lambda x: (x.sum(0).expand(x.shape[0], 3) * x).reshape(x.shape[0] * 3),
        lambda n: [leaf(n, 3)],
    ),
    "no grad": (lambda x: x.sin().reshape(-1), lambda n: [torch.randn(n, 3)]),
}


def write_and_view(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    x.mul_(2)
    x[:1].add_(1)
    y.add_(x.sum())
    return x.view(-1), x.t(), y, (x * 3)[:, 1:]


def mask_and_reduce(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    mask = torch.ones(x.shape[0], x.shape[0]).tril()
    return (mask @ x).softmax(-1), x.mean(0), torch.arange(x.shape[0]) * 2, y.expand_as(y)


BATCHES: dict[str, tuple[Callable[..., Any], Make]] = {
    **PROGRAMS,
    "writes and views": (write_and_view, lambda n: [leaf(n, 4) * 1, leaf(n) * 1]),
    "masks": (mask_and_reduce, lambda n: [leaf(n, 4), leaf(n)]),
    "an input again": (
        lambda x, y: (x, x.unsqueeze(0), y[None].expand(2, *y.shape)),
        lambda n: [leaf(n, 4)] * 2,
    ),
    "a row of another": (lambda x: (x[: x.shape[0] // 2] * 2, x.numel() / 2), lambda n: [leaf(n, 4)]),
    "norm of batches": (
        lambda x, m, v: F.batch_norm(x, m, v, training=True),
        lambda n: [leaf(n, 4), torch.zeros(4), torch.ones(4)],
    ),
}
COMPILERS: dict[str, Callable[..., Any]] = {
    "compile": lambda fn: aheadgrad.compile(fn, dynamic=True, fallback="error", frontend="trace"),
    "drop-in": lambda fn: compat.aot_function(fn, compat.nop, dynamic=True),
    "drop-in, updates inside": lambda fn: compat.aot_function(
        fn, compat.nop, dynamic=True, keep_inference_input_mutations=True
    ),
}


def observe(fn: Callable[..., Any], make: Make, n: int) -> Iterator[tuple[str, Any]]:
    """What the caller sees; gradients of each output alone, for tangents of two layouts."""
    torch.manual_seed(n)
    args = make(n)
    roots = [t.grad_fn.next_functions[0][0].variable if t.grad_fn else t for t in args]
    roots = [t for t in roots if t.requires_grad]
    outs = pytree.tree_leaves(fn(*args))
    yield "outputs", outs
    yield "strides", [t.stride() for t in outs if isinstance(t, Tensor)]
    yield "inputs", [(t.detach().clone(), t.stride()) for t in args]
    for out in outs:
        if isinstance(out, Tensor) and out.requires_grad:
            weights = torch.linspace(1, 2, out.numel()).reshape(out.shape)
            for tangent in (weights, torch.ones(()).expand_as(out)):
                found = torch.autograd.grad(out, roots, tangent, retain_graph=True, allow_unused=True)
                yield "gradients", [g is None for g in found]
                yield "gradients", [g for g in found if g is not None]


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_entry_for_many_sizes(name: str, compiler: str) -> None:
    fn, make = PROGRAMS[name]
    compiled = COMPILERS[compiler](fn)
    for n in (9, 8, 11, 9):
        for (step, found), (_, expected) in zip(
            observe(compiled, make, n), observe(fn, make, n), strict=True
        ):
            close(found, expected, msg=lambda text: f"{step}, size {n}: {text}")
    assert len(compiled.entries) == 1


@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("name", BATCHES)
def test_batches_of_any_size(name: str, dynamic: bool | None) -> None:
    """8, 5, 1, 0, 7: what eager gives, and its errors where it raises."""
    fn, make = BATCHES[name]
    compiled = aheadgrad.compile(fn, dynamic=dynamic, fallback="error", max_entries=16, frontend="trace")
    for n in (8, 5, 1, 0, 7, 8, 3):
        try:
            expected = list(observe(fn, make, n))
        except (RuntimeError, ValueError, IndexError) as error:
            with pytest.raises(type(error)):
                list(observe(compiled, make, n))
            continue
        for (step, found), (_, wanted) in zip(observe(compiled, make, n), expected, strict=True):
            close(found, wanted, msg=lambda text: f"{step}, size {n}: {text}")
    if dynamic is None:  # 8, then any, 1 and 0; some decide on sizes
        assert len(compiled.entries) <= 6


def test_a_size_that_changed_becomes_a_symbol() -> None:
    compiled = aheadgrad.compile(lambda x, y: x.sum(0) * 2 + y, fallback="error", frontend="trace")
    for n in (8, 5, 7, 9, 4):
        compiled(torch.randn(n, 3), torch.randn(3))
    assert len(compiled.entries) == 2
    values = [e.value for e in compiled.entries[1].entry.captured.session.entrances]
    assert [type(n) is int for v in values for n in v.shape] == [False, True, True]
    compiled(torch.randn(8, 4), torch.randn(4))
    compiled(torch.randn(9, 5), torch.randn(5))
    assert len(compiled.entries) == 3


def test_dynamic_false_keeps_numbers() -> None:
    compiled = aheadgrad.compile(lambda x: x * 2, dynamic=False, fallback="error", frontend="trace")
    for n in (8, 5, 7):
        compiled(torch.randn(n, 3))
    assert len(compiled.entries) == 3


@pytest.mark.parametrize("dynamic", [None, False])
@pytest.mark.parametrize("mark", ["mark_dynamic", "maybe_mark_dynamic"])
def test_marked_sizes(mark: str, dynamic: bool | None) -> None:
    import torch._dynamo

    compiled = aheadgrad.compile(
        lambda x: x.sum(0) * x.shape[0], dynamic=dynamic, fallback="error", frontend="trace"
    )
    for n in (8, 5, 7):
        x = torch.randn(n, 3, requires_grad=True)
        getattr(torch._dynamo, mark)(x, 0)
        out = compiled(x)
        close(out, x.sum(0) * n)
        out.sum().backward()
        close(x.grad, torch.full((n, 3), float(n)))
    assert len(compiled.entries) == 1
    compiled(torch.randn(6, 3, requires_grad=True))  # needs no mark itself
    assert len(compiled.entries) == 1


def test_sizes_marked_static() -> None:
    import torch._dynamo

    compiled = aheadgrad.compile(lambda x: x * 2, dynamic=True, fallback="error", frontend="trace")
    for n in (8, 5, 7):
        x = torch.randn(n, 3)
        torch._dynamo.mark_static(x, 0)
        compiled(x)
    assert len(compiled.entries) == 3


def test_marks_are_read_without_dynamo() -> None:
    code = "import aheadgrad, sys; assert not any(m.startswith('torch._dynamo') for m in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_cannot_be_recorded_with_symbols_is_recorded_with_numbers() -> None:
    def fn(x: Tensor) -> Tensor:
        weights = torch.tensor([float(i) for i in range(x.shape[0])])
        return x * weights

    compiled = aheadgrad.compile(fn, fallback="error", frontend="trace")
    for n in (8, 5, 7, 8):
        x = torch.randn(n)
        close(compiled(x), fn(x))


@pytest.mark.filterwarnings("ignore::aheadgrad.errors.FallbackWarning")
def test_sizes_kept_by_the_function_are_numbers() -> None:
    class Net(torch.nn.Module):
        rows = 0

        def forward(self, x: Tensor) -> Tensor:
            self.rows = x.shape[0]
            self.shape = tuple(x.shape)
            return x * 2

    net = Net()
    compiled = aheadgrad.compile(net, frontend="trace")
    for n in (8, 5, 7):
        close(compiled(torch.ones(n, 3)), torch.full((n, 3), 2.0))
        assert type(net.rows) is int
        assert all(type(n) is int for n in net.shape)


def test_arguments_are_not_kept() -> None:
    compiled = aheadgrad.compile(lambda x: x.sin() * x.shape[0], fallback="error", frontend="trace")
    for n in (8, 5, 7):
        x = torch.randn(n, 3, requires_grad=True)
        gone = weakref.ref(x)
        compiled(x).sum().backward()
        del x
        assert gone() is None, n


def test_modules_with_batches_of_any_size() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
    other = copy.deepcopy(net)
    compiled = aheadgrad.compile(other, fallback="error", frontend="trace")
    for n in (8, 5, 7, 3, 8):
        results = []
        for run, module in ((net, net), (compiled, other)):
            torch.manual_seed(n)
            out = run(torch.randn(n, 4))
            out.sum().backward()
            results.append((out, [p.grad for p in module.parameters()], list(module.buffers())))
        close(results[0], results[1])
    assert len(compiled.entries) == 2


def test_sizes_zero_and_one_and_equal_sizes_have_entries_of_their_own() -> None:
    compiled = aheadgrad.compile(
        lambda x, y: x.sum(0) + y.sum(0), dynamic=True, fallback="error", frontend="trace"
    )
    for a, b in ((3, 3), (7, 7), (3, 4), (5, 6), (4, 4), (1, 4), (0, 4)):
        x, y = torch.randn(a, 2), torch.randn(b, 2)
        close(compiled(x, y), x.sum(0) + y.sum(0))
    assert len(compiled.entries) == 4


def test_a_decision_on_sizes_makes_another_entry() -> None:
    def fn(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 5 else x * 3

    compiled = aheadgrad.compile(fn, dynamic=True, fallback="error", frontend="trace")
    for n in (3, 4, 8, 9, 5):
        x = torch.randn(n, 2)
        close(compiled(x), fn(x))
    assert len(compiled.entries) == 2


def test_other_strides_make_another_entry() -> None:
    compiled = aheadgrad.compile(lambda x: x * 2, dynamic=True, fallback="error", frontend="trace")
    for x in (torch.randn(3, 4), torch.randn(5, 6), torch.randn(4, 3).t(), torch.randn(6, 5).t()):
        out = compiled(x)
        close(out, x * 2)
        assert out.stride() == (x * 2).stride()
    assert len(compiled.entries) == 2


def test_parameters_have_fixed_sizes() -> None:
    net = torch.nn.Linear(4, 3)
    compiled = aheadgrad.compile(net, dynamic=True, fallback="error", frontend="trace")
    for n in (2, 3, 5):
        x = torch.randn(n, 4)
        close(compiled(x), net(x))
    fakes = [e.value for e in compiled.entries[0].entry.captured.session.entrances]
    assert [all(type(n) is int for n in f.shape) for f in fakes] == [True, True, False]


def test_backward_gets_sizes_as_numbers_before_tensors() -> None:
    backward: list[Any] = []

    @compat.make_boxed_compiler
    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> torch.fx.GraphModule:
        backward.append((graph, inputs))
        return graph

    compiled = compat.aot_function(
        lambda x: x.sum(0).expand(x.shape[0], 3) * x, compat.nop, keep, dynamic=True
    )
    x = torch.randn(4, 3, requires_grad=True)
    compiled(x).sum().backward()
    graph, inputs = backward[0]
    assert next(n.name for n in graph.graph.nodes if n.op == "placeholder") == "sym_size_int"
    assert isinstance(inputs[0], torch.SymInt)
    assert all(isinstance(t, Tensor) for t in inputs[1:])


def test_results_of_changing_sizes_are_symbols_in_the_next_function() -> None:
    torch._dynamo.reset()
    count = CompileCounterWithBackend("aheadgrad")
    first = torch.compile(lambda x: (x @ x, x.sum()), backend="aheadgrad", dynamic=True)
    second = torch.compile(lambda z: z * 2, backend=count)
    for n in (10, 20, 30):
        x = torch.ones(n, n)
        close(second(first(x)[0]), (x @ x) * 2)
    assert count.frame_count == 1


@pytest.mark.parametrize("grad", [False, True])
def test_subclasses_of_changing_sizes_through_dynamo(grad: bool) -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x * y.shape[0]).sin().view(-1) * x.shape[1], x.sum(0)

    torch._dynamo.reset()
    count = CompileCounterWithBackend("aheadgrad")
    compiled = torch.compile(fn, backend=count)
    for n in (4, 5, 6, 7, 2):
        parts = torch.randn(n, 3), torch.randn(n, 3)
        given = [TwoTensor(*(p.clone() for p in parts)).requires_grad_(grad) for _ in range(2)]
        results = [run(t, torch.ones(n + 1)) for run, t in zip((fn, compiled), given, strict=True)]
        for a, b in zip(*results, strict=True):
            assert type(a) is type(b)
            assert (a.shape, a.stride()) == (b.shape, b.stride())
            close((a.a, a.b), (b.a, b.b))
        if grad:
            for one, two in results:
                (one.sum() + two.sum()).backward()
            close([t.grad.a for t in given[:1]], [t.grad.a for t in given[1:]])
            close([t.grad.b for t in given[:1]], [t.grad.b for t in given[1:]])
    assert count.frame_count == 2


def test_jagged_tensors_of_changing_sizes_through_dynamo() -> None:
    def fn(t: Tensor, w: Tensor) -> Tensor:
        return (t * 2).sin() * w

    torch._dynamo.reset()
    count = {name: CompileCounterWithBackend(name) for name in ("aot_eager", "aheadgrad")}
    w = torch.randn((), requires_grad=True)
    for backend, counter in count.items():
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend=counter)
        for lengths in ([2, 3], [4, 5], [1, 7], [2, 2, 6], [9, 1, 1, 2]):
            rows = [torch.randn(n, 3) for n in lengths]
            t = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
            found = []
            for run in (fn, compiled):
                out = run(t, w)
                g, h = torch.autograd.grad(out.values().pow(2).sum(), [t, w])
                found.append((out.values(), g.values(), h, [tuple(out.offsets())]))
            close(found[1], found[0], msg=backend)
    assert count["aheadgrad"].frame_count <= count["aot_eager"].frame_count
