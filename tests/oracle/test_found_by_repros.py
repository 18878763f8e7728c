"""Failures found by using the package as a stranger would, each with its relatives."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from functorch.compile import min_cut_rematerialization_partition as min_cut
from torch import Tensor, fx, nn
from torch.testing._internal.two_tensor import TwoTensor

import aheadgrad
from aheadgrad.compat import aot_function, aot_module_simplified, default_partition, make_boxed_func, nop
from aheadgrad.errors import FallbackError
from tests.oracle.common import assert_equal, leaf, strict

Apply = Callable[..., Any]


# -- partition functions ----------------------------------------------------------------------------------


class _WritesInBoth(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, n: Tensor) -> Tensor:
        n.add_(1)
        ctx.save_for_backward(n.sin())
        ctx.n = n
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.n.add_(1)
        return grad * ctx.saved_tensors[0], None


def _change(x: Tensor, n: Tensor) -> Tensor:
    n.add_(1)
    return x * n.sin()


def _change_and_view(x: Tensor, n: Tensor) -> Tensor:
    n.add_(1)
    return x * n.view(-1).sin()


def _use_before(x: Tensor, n: Tensor) -> Tensor:
    y = x * n.detach().sin()
    n.mul_(2)
    return y * n.cos()


def _change_a_part(x: Tensor, n: Tensor) -> Tensor:
    n[:1].add_(1)
    return x * n.sin()


def _two(x: Tensor, n: Tensor) -> Any:
    return (x * n).sin().cos(), x + 1


_CHANGING = [_WritesInBoth.apply, _change, _change_and_view, _use_before, _change_a_part, _two]
_PLAIN_OR_NOT = {
    "plain": lambda t: t,
    "subclass": lambda t: TwoTensor(t, t * 3 + 1),
}


def _three_steps(fn: Apply, wrap: Callable[[Tensor], Tensor]) -> list[Any]:
    x, n = wrap(torch.ones(2)).requires_grad_(), wrap(torch.zeros(2))
    found: list[Any] = []
    for _ in range(3):
        out = fn(x, n)
        outs = out if isinstance(out, tuple) else (out,)
        sum(t.sum() for t in outs).backward()
        found += [str([*outs, n]).replace("grad_fn", ""), str(x.grad)]
    return [text.partition("=<")[0] for text in found]


@pytest.mark.parametrize("budget", [0.0, 1.0])
@pytest.mark.parametrize("wrap", _PLAIN_OR_NOT.values(), ids=_PLAIN_OR_NOT.keys())
@pytest.mark.parametrize("fn", _CHANGING, ids=lambda fn: getattr(fn, "__name__", "fn"))
def test_a_partition_function_may_keep_inputs_that_change(
    fn: Apply, wrap: Callable[[Tensor], Tensor], budget: float
) -> None:
    expected = _three_steps(fn, wrap)
    with functorch_config.patch(activation_memory_budget=budget):
        for partition, keep in itertools.product((min_cut, default_partition), (False, True)):
            theirs = aot_function(fn, nop, partition_fn=partition, keep_inference_input_mutations=keep)
            assert _three_steps(theirs, wrap) == expected, (partition, keep)
        assert _three_steps(strict(fn, partition=min_cut), wrap) == expected


# -- tangents of another kind than the output --------------------------------------------------------------

_WEIGHT = torch.arange(1.0, 7.0).view(2, 3)
_TANGENTS: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: _WEIGHT.clone(),
    "subclass": lambda: TwoTensor(_WEIGHT.clone(), _WEIGHT * 3),
    "plain, transposed": lambda: _WEIGHT.t().contiguous().t(),
    "subclass, transposed": lambda: TwoTensor(_WEIGHT.t().contiguous(), _WEIGHT.t().contiguous() * 3).t(),
    "expanded": lambda: torch.ones(()).expand(2, 3),
    "subclass, expanded": lambda: TwoTensor(torch.ones(()).expand(2, 3), torch.ones(()).expand(2, 3)),
}
_FUNCTIONS: dict[str, Apply] = {
    "mul": lambda t: t * 2,
    "sin": lambda t: t.sin() * t,
    "matrix": lambda t: t @ t.t() @ t,
    "two": lambda t: (t * 2, t.sin()),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("wrap", _PLAIN_OR_NOT.values(), ids=_PLAIN_OR_NOT.keys())
@pytest.mark.parametrize("fn", _FUNCTIONS.values(), ids=_FUNCTIONS.keys())
def test_tangents_of_any_kind(fn: Apply, wrap: Callable[[Tensor], Tensor], dynamic: bool) -> None:
    def gradient(run: Apply, tangent: Callable[[], Tensor]) -> str:
        x = wrap(torch.arange(6.0).view(2, 3)).requires_grad_()
        out = run(x)
        outs = out if isinstance(out, tuple) else (out,)
        torch.autograd.backward(outs, [tangent() for _ in outs])
        return repr(x.grad)

    for compiled in (strict(fn, dynamic=dynamic), aot_function(fn, nop, dynamic=dynamic)):
        for name, tangent in _TANGENTS.items():
            assert gradient(compiled, tangent) == gradient(fn, tangent), name


# -- what graphs look like ----------------------------------------------------------------------------------


def test_the_update_of_a_subclass_is_not_kept_in_the_graph() -> None:
    def fn(t: Tensor) -> Tensor:
        return t.mul_(2) + 1

    compiled = aot_function(fn, nop, keep_inference_input_mutations=True)
    for run in (fn, compiled, compiled):
        x = TwoTensor(torch.ones(2), torch.ones(2) * 3)
        out = run(x)
        assert str(out) == str(TwoTensor(torch.full((2,), 3.0), torch.full((2,), 7.0)))
        assert str(x) == str(TwoTensor(torch.full((2,), 2.0), torch.full((2,), 6.0)))


def test_an_output_with_parts_of_an_input_does_not_rest_on_a_tangent() -> None:
    jagged = torch.nested.nested_tensor(
        [torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged, requires_grad=True
    )
    lines = str(aheadgrad.capture(lambda t: t.clone(), jagged)).splitlines()
    outputs = [line for line in lines if line.endswith("of output 0") and line.strip().startswith("out")]
    assert outputs and not any("tangents" in line for line in outputs)


def test_writes_kept_in_the_graph_name_the_users_line() -> None:
    seen: dict[str, str] = {}

    def show(module: fx.GraphModule, _: Any) -> Any:
        seen.update({n.name: n.meta.get("stack_trace", "") for n in module.graph.nodes})
        return make_boxed_func(module)

    def fn(x: Tensor) -> Tensor:
        x.mul_(2)
        return x + 1

    aot_function(fn, show, keep_inference_input_mutations=True)(torch.ones(2))
    assert "x.mul_(2)" in seen["copy_"]


# -- an input that requires grad for a while ----------------------------------------------------------------


class _Forces(nn.Module):
    """Energies and forces; the positions are as they were when it is done."""

    def __init__(self, after: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(3, 1)
        self.after = after

    def forward(self, positions: Tensor) -> Any:
        positions.requires_grad_(True)
        first = positions[:2]
        energy = self.inner(torch.tanh(first - positions[2:])).sum()
        (gradient,) = torch.autograd.grad(energy, positions, create_graph=self.training)
        positions.requires_grad_(False)
        if self.after == "write":
            positions.mul_(2)
        extra = {"view": first, "use": first * positions[:2], "itself": positions, "new": positions[1:]}
        return energy, -gradient, extra.get(self.after)


def _energies(model: Any, parameters: list[Tensor], *, grad: bool) -> list[Any]:
    positions, found = leaf(4, 3, grad=grad), []
    for p in parameters:
        p.grad = None
    for _ in range(2):
        energy, forces, extra = model(positions)
        try:  # without a second order the inner gradient has freed the graph
            (energy + forces.pow(2).sum() + (0 if extra is None else extra.sum())).backward()
        except RuntimeError as error:
            found.append(type(error))
        outs = [energy, forces, extra]
        found += [t if t is None else (t.detach().clone(), t.requires_grad, t.is_leaf) for t in outs]
        found += [positions.requires_grad, positions.grad, positions.detach().clone()]
        found += [p.grad.clone() for p in parameters if p.grad is not None]
    return found


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("after", ["", "use", "itself", "new"])
def test_an_input_requires_grad_for_a_while(after: str, training: bool, grad: bool) -> None:
    model = _Forces(after).train(training)
    given = list(model.parameters())
    expected = _energies(model, given, grad=grad)
    assert_equal(expected, _energies(strict(model), given, grad=grad))


@pytest.mark.parametrize("after", ["view", "write"])
def test_what_is_left_to_eager_when_an_input_required_grad_for_a_while(after: str) -> None:
    model = _Forces(after)
    given = list(model.parameters())
    expected = _energies(model, given, grad=False)
    with pytest.raises(FallbackError, match="requiring grad"):
        strict(model)(leaf(4, 3, grad=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_equal(expected, _energies(aheadgrad.compile(model, frontend="trace"), given, grad=False))


# -- a simplified module, whose caller checks less than Dynamo ----------------------------------------------


class _Difference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((2,), 3.0))

    def forward(self, x: Tensor, y: Tensor, n: int) -> Any:
        return (x * self.w - y * 2 + n,)


_GIVEN: dict[str, Callable[[nn.Module, Tensor, Tensor], Any]] = {
    "two": lambda m, x, y: (x, y, 1),
    "one": lambda m, x, y: (x, x, 1),
    "one with grad": lambda m, x, y: (x, y.detach(), 1),
    "the parameter": lambda m, x, y: (x, m.w, 1),
    "only the parameter": lambda m, x, y: (m.w, m.w, 1),
    "no grad": lambda m, x, y: (x.detach(), y.detach(), 1),
}


@pytest.mark.parametrize("first", _GIVEN)
def test_a_simplified_module_checks_which_inputs_are_the_same_and_require_grad(first: str) -> None:
    module = _Difference()

    def gradients(run: Apply, given: str) -> list[Any]:
        x, y = torch.ones(2, requires_grad=True), torch.full((2,), 5.0, requires_grad=True)
        module.w.grad = None
        (out,) = run(*_GIVEN[given](module, x, y))
        if out.requires_grad:
            out.sum().backward()
        return [out.detach(), x.grad, y.grad, module.w.grad]

    start = _GIVEN[first](module, torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True))
    compiled = aot_module_simplified(module, start, nop)
    for given in [*_GIVEN, first]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert_equal(gradients(module, given), gradients(compiled, given), given)


# -- inputs that lie deep in their memory --------------------------------------------------------------------


def _change_then(rest: Callable[[Tensor], Any]) -> Apply:
    def fn(x: Tensor) -> Any:
        x.mul_(2)
        return rest(x)

    return fn


_AFTERWARDS: dict[str, Apply] = {
    "used": lambda x: x + 1,
    "returned": lambda x: x,
    "seen": lambda x: (x[1:], x.t(), x.view(-1)[:3]),
    "addressed": lambda x: x.as_strided((2,), (1,), x.storage_offset() + 1) + 1,
    "addressed by a view": lambda x: x[1:].as_strided((2,), (1,), x.storage_offset()) + 1,
    "offset": lambda x: x + x.storage_offset(),
    "changed again": lambda x: x[:1].add_(1).sum() + x,
    "written by address": lambda x: x.as_strided((2,), (1,), x.storage_offset()).mul_(3) * 2,
}


@pytest.mark.parametrize("rest", _AFTERWARDS.values(), ids=_AFTERWARDS.keys())
def test_an_input_that_lies_deep_in_its_memory(rest: Apply) -> None:
    def outcome(run: Apply) -> list[Any]:
        memory = torch.arange(32.0)
        given = memory[-6:].view(2, 3)
        out = run(given)
        outs = out if isinstance(out, tuple) else (out,)
        found = [(t.clone(), t.stride(), t.storage_offset()) for t in outs]
        for t in outs:
            t.add_(1)  # seen in the memory, where they share it
        return [*found, memory]

    fn = _change_then(rest)
    compiled = aheadgrad.compile(fn, frontend="trace")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            assert_equal(outcome(fn), outcome(compiled))


def test_no_room_is_made_for_what_lies_before_an_input() -> None:
    fn = strict(_change_then(lambda x: x + 1))
    given = torch.zeros(1000)[-4:]
    fn(given)
    assert "scatter" not in fn.source and "empty" not in fn.source
