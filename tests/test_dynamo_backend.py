"""`torch.compile(fn, backend="aheadgrad")`: the same walk with Dynamo's guards, as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import aheadgrad
from aheadgrad import compat
from aheadgrad.errors import FallbackWarning, RecompileWarning
from aheadgrad.frontends import dynamo as frontend
from aheadgrad.frontends.compiled import Described

close = torch.testing.assert_close
Make = Callable[[int], tuple[list[Tensor], list[Any]]]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def only(t: Tensor) -> tuple[list[Tensor], list[Any]]:
    return [t], [t]


def observe(fn: Callable[..., Any], make: Make, call: int) -> list[Any]:
    """Outputs, inputs afterwards, gradients, the states of the random generator and of grad mode."""
    torch.manual_seed(call)
    roots, args = make(call)
    torch.manual_seed(100)
    try:
        out = fn(*args)
        mode = torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)
    leaves = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
    heads = [t for t in leaves if t.requires_grad]
    wanted = [r for r in roots if r.requires_grad]
    grads: list[Any] = []
    if heads and wanted:
        weights = [torch.linspace(1, 2, t.numel()).reshape(t.shape) for t in heads]
        grads = list(torch.autograd.grad(heads, wanted, weights, allow_unused=True, retain_graph=True))
    tensors = [t for t in pytree.tree_leaves(args) if isinstance(t, Tensor)]
    return [
        out,
        [(t.detach().clone(), t.shape, t.stride(), t._version) for t in tensors],
        [g is None for g in grads],
        [g for g in grads if g is not None],
        [(t.stride(), t.requires_grad, t.is_leaf) for t in leaves],
        [torch.get_rng_state(), mode],
    ]


def assert_same(fn: Callable[..., Any], make: Make, *, calls: int = 2, **options: Any) -> None:
    compiled = torch.compile(fn, backend="aheadgrad", **options)
    for call in range(calls):
        expected, found = observe(fn, make, call), observe(compiled, make, call)
        for part, wanted in zip(found, expected, strict=True):
            close(part, wanted)


# -- programs ------------------------------------------------------------------------------------------

WEIGHT = torch.linspace(-1, 1, 16).reshape(4, 4).requires_grad_()


class TripleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * x.cos() * 3


def block(x: Tensor) -> Tensor:
    return F.dropout(torch.relu(x @ WEIGHT), 0.5).sin()


def leaves_grad_mode_off(x: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    return x * 2


def changes_both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x.mul_(2)
    x.t_()
    return x + 1, y.view(-1)[2:]


def differentiates_inside(x: Tensor) -> Tensor:
    y = (x @ WEIGHT).sin()
    (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    return grad * 2 + y


def breaks_in_between(x: Tensor) -> Tensor:
    y = x.sin()
    torch._dynamo.graph_break()
    return y.cos() * WEIGHT.sum()


def under_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x @ WEIGHT).float()


PROGRAMS: dict[str, tuple[Callable[..., Any], Make]] = {
    "plain": (lambda x: (x @ WEIGHT).relu().sum(), lambda _: only(leaf(3, 4))),
    "checkpoint": (lambda x: checkpoint(block, x, use_reentrant=False).sum(), lambda _: only(leaf(3, 4))),
    "random": (lambda x: F.dropout(x, 0.3) * torch.rand_like(x) + torch.randn(4), lambda _: only(leaf(3, 4))),
    "custom function": (lambda x: TripleGradient.apply(x) + 1, lambda _: only(leaf(3, 4))),
    "grad mode left off": (leaves_grad_mode_off, lambda _: only(leaf(3, 4))),
    "no_grad inside": (lambda x: x * torch.no_grad()(lambda: x * 3)(), lambda _: only(leaf(3, 4))),
    "no grad": (lambda x: x.sin().t(), lambda _: only(torch.randn(3, 4))),
    "autocast inside": (under_autocast, lambda _: only(leaf(3, 4))),
    "gradients inside": (differentiates_inside, lambda _: only(leaf(3, 4))),
    "graph break": (breaks_in_between, lambda _: only(leaf(3, 4))),
    "vmap inside": (lambda x: torch.vmap(lambda r: r.sin().sum())(x), lambda _: only(leaf(3, 4))),
    "func.grad inside": (
        lambda x: torch.func.grad(lambda y: y.sin().sum())(x),
        lambda _: only(leaf(3, 4)),
    ),
    "cond": (
        lambda x: torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)),
        lambda _: only(leaf(3, 4)),
    ),
    "rows": (lambda x: x.unbind(0), lambda _: only(leaf(3, 4))),
    "parts": (lambda x: (x * 2).split(2, 0), lambda _: only(leaf(4, 4))),
    "views": (lambda x: ((x * 2).view(-1), x.t(), x), lambda _: only(leaf(3, 4))),
    "list": (lambda xs: [x * 2 for x in xs], lambda _: (lambda x, y: ([x, y], [[x, y]]))(leaf(3), leaf(2))),
    "inputs changed": (
        changes_both,
        lambda _: (lambda x, y: ([x, y], [x.clone(), y]))(leaf(3, 4), leaf(5, 7)),
    ),
    "plain inputs changed": (
        changes_both,
        lambda _: (lambda x, y: ([x, y], [x.clone(), y]))(torch.randn(3, 4), torch.randn(5, 7)),
    ),
    "data-dependent size": (lambda x: x[x > 0].sum(), lambda _: only(leaf(3, 4))),
    "constant": (lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]), lambda _: only(leaf(3, 4))),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_same_as_eager(name: str, compiled_graphs: list[Described]) -> None:
    assert_same(*PROGRAMS[name])
    assert compiled_graphs


# -- sizes and numbers that change ---------------------------------------------------------------------

CHANGING: dict[str, tuple[Callable[..., Any], Make]] = {
    "rows": (
        lambda x: ((x @ WEIGHT).relu().reshape(-1), x.t() * 2, x.shape[0] * 2),
        lambda i: only(leaf(7 + i, 4)),
    ),
    "both": (lambda x: x.sin().sum(0).expand(x.shape[0], -1), lambda i: only(leaf(7 + i, 5 + 2 * i))),
    "embedding": (lambda i: WEIGHT[i].sum(), lambda i: only(torch.randint(0, 4, (7 + i,)))),
    "int": (lambda x, n: x * n + n, lambda i: (lambda x: ([x], [x, 3 + i]))(leaf(3, 4))),
    "float": (lambda x, n: x * n + n, lambda i: (lambda x: ([x], [x, 3.5 + i]))(leaf(3, 4))),
    "item": (lambda x: x * x.detach().sum().item(), lambda i: only(leaf(3, 4))),
    "no grad": (lambda x: x.sin().reshape(-1), lambda i: only(torch.randn(7 + i, 4))),
}


@pytest.mark.parametrize("name", CHANGING)
def test_second_kind_of_call_compiles_for_all_others(name: str, compiled_graphs: list[Described]) -> None:
    fn, make = CHANGING[name]
    assert_same(fn, make, calls=6)
    assert len(compiled_graphs) <= 3  # `item` is a graph of its own


@pytest.mark.parametrize("name", ["rows", "both", "no grad"])
def test_dynamic_from_the_start(name: str, compiled_graphs: list[Described]) -> None:
    assert_same(*CHANGING[name], calls=4, dynamic=True)
    assert len(compiled_graphs) == 1


def test_changed_inputs_of_changing_size(compiled_graphs: list[Described]) -> None:
    def make(i: int) -> tuple[list[Tensor], list[Any]]:
        x, y = leaf(8 + i, 5), leaf(20 + i, 7)
        return [x, y], [x.clone(), y]

    assert_same(changes_both, make, calls=5)
    assert len(compiled_graphs) == 4  # before and after `t_`, where Dynamo breaks the graph


def test_part_of_the_outputs_differentiated_with_changing_sizes() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.sin(), (x * y).sum(0), y.reshape(-1)

    compiled = torch.compile(fn, backend="aheadgrad", dynamic=True)
    for n in (5, 6, 8):
        x, y = leaf(n, 3), leaf(n, 3)
        for k in range(3):
            found = torch.autograd.grad(compiled(x, y)[k].sum(), [x, y], allow_unused=True)
            expected = torch.autograd.grad(fn(x, y)[k].sum(), [x, y], allow_unused=True)
            assert [g is None for g in found] == [g is None for g in expected]
            close([g for g in found if g is not None], [g for g in expected if g is not None])


# -- memory that inputs share --------------------------------------------------------------------------


def add_after_doubling(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2)
    return x + y


@pytest.mark.parametrize("grad", [True, False])
def test_overlapping_inputs_one_of_them_changed(grad: bool) -> None:
    def make(_call: int) -> tuple[list[Tensor], list[Any]]:
        root = torch.randn(6, requires_grad=grad)
        base = root.clone()
        return [root], [base[:4], base[2:]]

    assert_same(add_after_doubling, make)


def test_other_uses_of_memory_on_later_calls(compiled_graphs: list[Described]) -> None:
    def make(call: int) -> tuple[list[Tensor], list[Any]]:
        base, other = torch.randn(8), torch.randn(8)
        pairs = [
            (base[:4], other[:4]),
            (base[:4], base[2:6]),
            (base[:4], base[3:7]),
            (base[:4], base[4:]),
            (base[:4], base[2:6]),
        ]
        return [base, other], list(pairs[call])

    assert_same(add_after_doubling, make, calls=5)
    assert len(compiled_graphs) == 1  # Dynamo asks once; the rest are entries of the first


def test_too_many_uses_of_memory_run_uncompiled() -> None:
    compiled = torch.compile(add_after_doubling, backend="aheadgrad")
    with pytest.warns(RecompileWarning, match="places in memory"):
        for offset in range(12):
            base = torch.randn(18)
            twin = base.clone()
            found = compiled(base[:6], base[offset : offset + 6])
            close(found, add_after_doubling(twin[:6], twin[offset : offset + 6]))
            close(base, twin)


# -- modules -------------------------------------------------------------------------------------------


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = F.dropout(F.relu(self.norm(self.conv(x)), inplace=True), 0.2, self.training)
        result: Tensor = self.head(x.mean((2, 3)))
        return result


def test_training_with_buffers_and_other_batch_sizes(compiled_graphs: list[Described]) -> None:
    net = ConvNet()
    twin = copy.deepcopy(net)
    compiled = torch.compile(net, backend="aheadgrad")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (net, twin)]
    for step, size in enumerate((3, 3, 4, 5, 6)):
        for module in (compiled, twin):
            module.train(step != 3)
        x = torch.randn(size, 2, 5, 5)
        losses = []
        for call, optimizer in zip((compiled, twin), optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(step)
            loss = call(x).pow(2).sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        close(*losses)
        close(net.state_dict(), twin.state_dict())
    assert len(compiled_graphs) == 3  # training, training with any batch size, evaluation


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad(mode: Any) -> None:
    net = ConvNet().eval()
    compiled = torch.compile(net, backend="aheadgrad")
    x = torch.randn(3, 2, 5, 5)
    with mode():
        found, expected = compiled(x), net(x)
    close(found, expected)
    assert (found.requires_grad, found.is_inference()) == (False, expected.is_inference())
    out = compiled(x)
    out.sum().backward()
    assert net.head.weight.grad is not None


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # Dynamo looks for CUDA graphs
def test_whole_training_step_compiled() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    twin = copy.deepcopy(net)

    def step(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = module(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = torch.compile(step, backend="aheadgrad")
    pairs = [(compiled, net), (step, twin)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for _, m in pairs]
    for _ in range(3):
        x = torch.randn(5, 4)
        close(*(call(m, o, x) for (call, m), o in zip(pairs, optimizers, strict=True)))
        close(net.state_dict(), twin.state_dict())


# -- autocast ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["eager", "same_as_forward"])
def test_autocast_around(setting: str) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    twin = copy.deepcopy(net)
    compiled = torch.compile(net, backend="aheadgrad", options={"backward_autocast": setting})
    x = torch.randn(3, 4)
    for call in (compiled, twin):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = call(x).float().pow(2).sum()
        loss.backward()
    close([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])
    close(compiled(x), twin(x))


# -- the backend itself --------------------------------------------------------------------------------


def test_known_under_its_name() -> None:
    assert "aheadgrad" in torch._dynamo.list_backends(exclude_tags=())


def test_compiled_once_per_graph(compiled_graphs: list[Described]) -> None:
    compiled = torch.compile(lambda x: x.sin() * 2, backend="aheadgrad", fullgraph=True)
    for _ in range(3):
        compiled(torch.randn(3, requires_grad=True)).sum().backward()
    assert len(compiled_graphs) == 1


def test_stack_traces_and_module_paths_travel(compiled_graphs: list[Described]) -> None:
    net = ConvNet()
    torch.compile(net, backend="aheadgrad")(torch.randn(2, 2, 5, 5))
    nodes = compiled_graphs[0].entry.split.forward.graph.nodes
    convolution = next(n for n in nodes if n.target is torch.ops.aten.convolution.default)
    assert "self.conv(x)" in convolution.meta["stack_trace"]
    assert any("conv" in path for path, _ in convolution.meta["nn_module_stack"].values())


def test_own_backend_and_partition_function() -> None:
    seen: list[str] = []

    def backend(program: Any) -> Any:
        seen.append(program.role)
        return lambda args: list(program.module(*args))

    def partition(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        seen.append("partition")
        return compat.default_partition(joint, inputs, **kwargs)

    options = {"backend": backend, "partition": partition}
    compiled = torch.compile(lambda x: x.sin().sum(), backend="aheadgrad", options=options)
    x = leaf(3)
    compiled(x).backward()
    close(x.grad, x.detach().cos())
    assert seen == ["partition", "forward", "backward"]


@pytest.mark.parametrize("name", ["rows", "both", "int", "float", "no grad"])
@pytest.mark.parametrize("keep", [False, True])
def test_drop_in_inside_a_backend_of_the_callers_own(name: str, keep: bool) -> None:
    placeholders: list[list[Any]] = []

    @compat.make_boxed_compiler
    def note(graph: fx.GraphModule, inputs: list[Any]) -> fx.GraphModule:
        placeholders.append(inputs)
        return graph

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        compiled = compat.aot_module_simplified(
            gm, inputs, fw_compiler=note, bw_compiler=compat.nop, keep_inference_input_mutations=keep
        )
        return compiled

    fn, make = CHANGING[name]
    compiled = torch.compile(fn, backend=backend)
    for call in range(4):
        for part, wanted in zip(observe(compiled, make, call), observe(fn, make, call), strict=True):
            close(part, wanted)
    assert len(placeholders) == 2
    if name != "float":
        assert any(isinstance(value, torch.SymInt) for value in placeholders[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bckend": "eager"}, "'bckend'"),
        ({"backend": "nope"}, "backend='nope'"),
        ({"fallback": "x"}, "fallback='x'"),
    ],
)
def test_unknown_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        torch.compile(lambda x: x + 1, backend="aheadgrad", options=options)(torch.randn(2))


def test_graphs_that_cannot_be_compiled_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise aheadgrad.errors.FallbackError("a test")

    monkeypatch.setattr(frontend, "compile_flat", refuse)
    x = torch.randn(3)
    with pytest.warns(FallbackWarning, match="a test"):
        close(torch.compile(torch.sin, backend="aheadgrad")(x), x.sin())
    torch._dynamo.reset()
    strict = torch.compile(torch.sin, backend="aheadgrad", options={"fallback": "error"})
    with pytest.raises(Exception, match="a test"):
        strict(x)
