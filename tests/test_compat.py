"""The drop-in for `functorch.compile`: names, signatures, calling conventions, compilers, modules."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import functorch.compile as theirs
import pytest
import torch
from torch import Tensor, fx, nn

from aheadgrad import compat
from aheadgrad.torchlayer.fake import FakeTensor, new_mode

close = torch.testing.assert_close


class Kept:
    """A compiler that keeps what it is handed."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.inputs: list[list[Any]] = []
        self.compiler: Any = compat.make_boxed_compiler(self._keep)

    def _keep(self, graph: fx.GraphModule, inputs: list[Any]) -> fx.GraphModule:
        self.graphs.append(graph)
        self.inputs.append(inputs)
        return graph

    def places(self, k: int = -1) -> list[str]:
        return [n.name for n in self.graphs[k].graph.nodes if n.op == "placeholder"]

    def targets(self, k: int = -1) -> list[str]:
        return [str(n.target) for n in self.graphs[k].graph.nodes if n.op == "call_function"]


# -- names and signatures ----------------------------------------------------------------------------

SAME_SIGNATURE = (
    "aot_function aot_module make_boxed_func make_boxed_compiler nop ts_compile print_compile "
    "default_partition memory_efficient_fusion get_aot_compilation_context get_aot_graph_name "
    "get_graph_being_compiled aot_module_simplified"
)


@pytest.mark.parametrize("name", SAME_SIGNATURE.split())
def test_signatures_are_those_of_functorch_compile(name: str) -> None:
    ours = inspect.signature(getattr(compat, name)).parameters.values()
    other = inspect.signature(getattr(theirs, name)).parameters.values()
    assert [(p.name, p.kind) for p in ours] == [(p.name, p.kind) for p in other]
    plain = (bool, int, str, type(None))
    assert [p.default for p in ours if isinstance(p.default, plain)] == [
        p.default for p in other if isinstance(p.default, plain)
    ]


def test_default_decompositions_are_for_the_same_ops() -> None:
    assert set(compat.default_decompositions) == set(theirs.default_decompositions)


def test_without_functionalization_results_are_those_of_eager() -> None:
    def change(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        n.add_(1)
        return x * n.sin()

    forward = Kept()
    compiled = compat.aot_function(change, forward.compiler, disable_functionalization=True)
    for run in (change, compiled, compiled):
        x, n = torch.ones(2, requires_grad=True), torch.ones(2)
        run(x, n).sum().backward()
        assert torch.equal(x.grad, torch.full((2,), 2.0).sin()) and torch.equal(n, torch.full((2,), 2.0))
    assert forward.graphs  # and they are functional all the same


def test_a_simplified_module_without_functionalization() -> None:
    module = nn.Linear(3, 2)
    x = torch.randn(4, 3, requires_grad=True)
    compiled = compat.aot_module_simplified(_Listed(module), (x,), compat.nop, disable_functionalization=True)
    assert torch.equal(compiled(x)[0], module(x))


class _Listed(nn.Module):
    """A module that returns a list, as graphs do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: torch.Tensor) -> list[torch.Tensor]:
        return [self.inner(*args)]


# -- compilers -----------------------------------------------------------------------------------------


def test_backward_is_compiled_when_first_run() -> None:
    forward, backward = Kept(), Kept()
    compiled = compat.aot_function(torch.sin, forward.compiler, backward.compiler)
    x = torch.randn(3, requires_grad=True)
    out = compiled(x)
    assert (len(forward.graphs), len(backward.graphs)) == (1, 0)
    out.sum().backward()
    assert (len(forward.graphs), len(backward.graphs)) == (1, 1)
    close(x.grad, x.detach().cos())


def test_one_backward_serves_tangents_of_every_layout() -> None:
    backward = Kept()
    compiled = compat.aot_function(torch.sin, compat.nop, backward.compiler)
    x = torch.randn(3, 4, requires_grad=True)
    for tangent in (
        torch.randn(3, 4),
        torch.randn(4, 3).t(),
        torch.ones(()).expand(3, 4),
        torch.randn(3, 8)[:, ::2],
    ):
        (found,) = torch.autograd.grad(compiled(x), x, tangent)
        close(found, tangent * x.detach().cos())
    assert len(backward.graphs) == 1


def test_compilers_get_fake_inputs_and_constants_in_their_places() -> None:
    kept = Kept()

    def fn(factor: int, nothing: None, x: Tensor, name: str) -> Tensor:
        return factor * x

    x = torch.randn(3, 2, requires_grad=True)
    compiled = compat.aot_function(fn, kept.compiler)
    close(compiled(2, None, x, "name"), 2 * x)
    assert kept.places() == ["primals_1", "primals_2", "primals_3", "primals_4"]
    factor, nothing, fake, name = kept.inputs[0]
    assert (factor, nothing, name) == (2, None, "name")
    assert isinstance(fake, FakeTensor)
    assert fake.shape == x.shape


def test_backward_returns_one_gradient_per_primal() -> None:
    backward = Kept()

    def fn(n: int, x: Tensor, frozen: Tensor, w: Tensor) -> Tensor:
        return n * x * frozen * w

    compiled = compat.aot_function(fn, compat.nop, backward.compiler)
    x, frozen, w = torch.randn(3, requires_grad=True), torch.randn(3), torch.randn(3, requires_grad=True)
    compiled(2, x, frozen, w).sum().backward()
    results = backward.graphs[0].graph.output_node().args[0]
    assert [r is None for r in results] == [True, False, True, False]  # type: ignore[union-attr]
    close(x.grad, 2 * frozen * w.detach())
    close(w.grad, 2 * frozen * x.detach())


def test_compiled_functions_without_boxed_call_take_their_arguments_one_by_one() -> None:
    seen: list[int] = []

    def plain(graph: fx.GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            seen.append(len(args))
            return graph(*args)

        return run

    x = torch.randn(3, requires_grad=True)
    compiled = compat.aot_function(lambda x: x.sin(), plain)
    (found,) = torch.autograd.grad(compiled(x), x, torch.ones(3))
    close(found, x.detach().cos())
    assert seen == [1, 2]


def test_a_compiler_may_change_the_graph_it_is_given() -> None:
    @compat.make_boxed_compiler
    def cosine_instead(graph: fx.GraphModule, _inputs: list[Any]) -> fx.GraphModule:
        for node in graph.graph.nodes:
            if node.target is torch.ops.aten.sin.default:
                node.target = torch.ops.aten.cos.default
        graph.recompile()
        return graph

    x = torch.randn(3)
    close(compat.aot_function(torch.sin, cosine_instead)(x), x.cos())


def test_names_of_graphs_count_functions_and_graphs() -> None:
    names: list[str] = []

    def note(graph: fx.GraphModule, _inputs: list[Any]) -> Any:
        names.append(compat.get_aot_graph_name())
        return graph

    first, second = compat.aot_function(torch.sin, note), compat.aot_function(torch.cos, note)
    first(torch.randn(2, requires_grad=True)).sum().backward()
    second(torch.randn(2))
    prefixes = [name.rsplit("_", 1)[0] for name in names]
    number = int(prefixes[0].split("__")[1].split("_")[0])
    assert prefixes == [
        f"model__{number}_forward",
        f"model__{number}_backward",
        f"model__{number + 1}_inference",
    ]
    assert compat.get_aot_compilation_context()[0] == []


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_memory_efficient_fusion_goes_through_torchscript() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 2))
    twin = copy.deepcopy(net)
    fused = compat.memory_efficient_fusion(net)
    x = torch.randn(3, 4)
    close(fused(x), twin(x))
    fused(x).pow(2).sum().backward()
    twin(x).pow(2).sum().backward()
    close([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])
    close(compat.memory_efficient_fusion(nn.functional.gelu)(x), nn.functional.gelu(x))


# -- never a stale answer --------------------------------------------------------------------------------


def test_other_kinds_of_calls_are_compiled_anew() -> None:
    kept = Kept()
    compiled = compat.aot_function(lambda x, n: (x * n).sum(-1), kept.compiler)
    calls = [
        (torch.randn(3), 2),
        (torch.randn(4), 2),
        (torch.randn(4, dtype=torch.float64), 2),
        (torch.randn(4, requires_grad=True), 2),
        (torch.randn(4), 3),
        (torch.randn(2, 4), 3),
    ]
    for x, n in calls * 2:
        out = compiled(x, n)
        close(out, (x * n).sum(-1))
        assert out.requires_grad == x.requires_grad
    assert len(kept.graphs) == len(calls)


def test_gradients_that_eager_leaves_none_stay_none() -> None:
    compiled = compat.aot_function(lambda x, y: (x.sin(), y.cos()), compat.nop)
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    compiled(x, y)[0].sum().backward()
    close(x.grad, x.detach().cos())
    assert y.grad is None


# -- modules -----------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(self.norm(x))
        return result


def test_module_lifts_parameters_then_buffers() -> None:
    kept = Kept()
    net = Net()
    compiled = compat.aot_module(net, kept.compiler)
    compiled(torch.randn(4, 3))
    lifted = [*net.parameters(), *net.buffers()]
    assert [tuple(t.shape) for t in kept.inputs[0]] == [*(tuple(t.shape) for t in lifted), (4, 3)]
    assert compiled.orig_module is net


@pytest.mark.parametrize("keep", [False, True])
def test_module_trains_as_in_eager(keep: bool) -> None:
    net = Net()
    twin = copy.deepcopy(net)
    compiled = compat.aot_module(net, compat.nop, keep_inference_input_mutations=keep)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (net, twin)]
    for step in range(4):
        for module in (compiled, twin):
            module.train(step != 2)
        x = torch.randn(5, 3)
        for call, optimizer in zip((compiled, twin), optimizers, strict=True):
            optimizer.zero_grad()
            call(x).pow(2).sum().backward()
            optimizer.step()
        close(net.state_dict(), twin.state_dict())
    assert compiled.state_dict().keys() == twin.state_dict().keys()


def test_simplified_module_takes_flat_inputs_and_reads_parameters_at_each_call() -> None:
    net = Net().eval()
    x = torch.randn(4, 3)
    compiled = compat.aot_module_simplified(net, [x], compat.nop)
    close(compiled(x), [net(x)])
    with torch.no_grad():
        net.linear.weight.mul_(2)
    net.linear.bias = nn.Parameter(torch.ones(2))
    close(compiled(x), [net(x)])
    assert dict(compiled.named_parameters()).keys() == dict(net.named_parameters()).keys()
    compiled(x)[0].sum().backward()
    close(net.linear.bias.grad, torch.full((2,), 4.0))
    compiled.zero_grad()
    assert net.linear.bias.grad is None


def test_simplified_module_made_for_fake_inputs_takes_real_ones() -> None:
    net = Net()
    twin = copy.deepcopy(net)
    with new_mode(dynamic=False):
        fake = torch.empty(4, 3)
    compiled = compat.aot_module_simplified(net, [fake], compat.nop, keep_inference_input_mutations=True)
    x = torch.randn(4, 3)
    (found,), expected = compiled(x), twin(x)
    close(found, expected)
    found.sum().backward()
    expected.sum().backward()
    close([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])
    close(dict(net.named_buffers()), dict(twin.named_buffers()))


def test_simplified_module_runs_the_given_pass_first() -> None:
    class Sine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(x)

    def to_cosine(graph: fx.GraphModule, _args: Any) -> fx.GraphModule:
        for node in graph.graph.nodes:
            if node.target is torch.sin:
                node.target = torch.cos
        graph.recompile()
        return graph

    x = torch.randn(3)
    graph = fx.symbolic_trace(Sine())
    compiled = compat.aot_module_simplified(graph, [x], compat.nop, pre_grad_passes=to_cosine)
    close(compiled(x), [x.cos()])


# -- updates kept inside -------------------------------------------------------------------------------------


def double(x: Tensor, w: Tensor) -> Tensor:
    x.mul_(2)
    x.add_(1)
    return x * w


@pytest.mark.parametrize("grad", [True, False])
def test_update_that_autograd_need_not_see_stays_inside_if_asked(grad: bool) -> None:
    for keep in (True, False):
        kept = Kept()
        compiled = compat.aot_function(double, kept.compiler, keep_inference_input_mutations=keep)
        x, w = torch.randn(3), torch.randn(3, requires_grad=grad)
        twin = x.clone()
        close(compiled(x, w), double(twin, w))
        close(x, twin)
        assert x._version == twin._version
        assert ("aten.copy_.default" in kept.targets()) == keep


def test_update_that_autograd_sees_is_made_outside() -> None:
    kept = Kept()
    compiled = compat.aot_function(double, kept.compiler, keep_inference_input_mutations=True)
    root, w = torch.randn(3, requires_grad=True), torch.randn(3)
    x = root.clone()
    out = compiled(x, w)
    assert "aten.copy_.default" not in kept.targets()
    (found,) = torch.autograd.grad(out.sum() + x.sum(), root)
    close(found, 2 * w + 2)


# -- autocast ------------------------------------------------------------------------------------------


def test_backward_runs_under_the_autocast_state_of_its_forward() -> None:
    kept = Kept()
    compiled = compat.aot_function(lambda x, w: (x @ w).float(), compat.nop, kept.compiler)
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = compiled(x, w)
        expected = (x @ w).float()
    close(out, expected)
    tangent = torch.randn(3, 5)
    found = torch.autograd.grad(out, [x, w], tangent)
    close(found, torch.autograd.grad(expected, [x, w], tangent))
    products = [n for n in kept.graphs[0].graph.nodes if n.target is torch.ops.aten.mm.default]
    assert [n.meta["val"].dtype for n in products] == [torch.bfloat16, torch.bfloat16]
