"""The private torch behind symbolic sizes, Dynamo and graphs of the drop-in, symbol by symbol."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from aheadgrad.torchlayer import dispatch, functional, symbols, transforms
from aheadgrad.torchlayer.assumptions import as_numbers, assumptions, on_trial
from aheadgrad.torchlayer.dynamo import symbols_of
from aheadgrad.torchlayer.evalframe import hide_from_dynamo
from aheadgrad.torchlayer.fake import FakeTensor, new_mode, symbolic_like
from aheadgrad.torchlayer.fxcode import takes_two_lists
from aheadgrad.torchlayer.guards import shape_check, tensor_guards
from aheadgrad.torchlayer.lock import RECORDING


def symbolic(*shape: int, name: str = "x") -> FakeTensor:
    return symbolic_like(new_mode(dynamic=True), torch.randn(*shape), name)


def test_sizes_become_symbols_but_for_zero_and_one() -> None:
    fake = symbolic(4, 1, 0, 4)
    assert [symbols.is_symbolic(n) for n in fake.shape] == [True, False, False, True]
    assert symbols.expression(fake.shape[0]) == symbols.expression(fake.shape[3])
    assert [symbols.size_hint(n) for n in fake.shape] == [4, 1, 0, 4]


def test_free_symbols_of_tensors_numbers_and_nests() -> None:
    fake = symbolic(4, 5)
    both = symbols.free_symbols(fake)
    assert len(both) == 2
    assert symbols.free_symbols([fake.shape[0], {"a": fake.shape[1]}, 3, None]) == both
    assert symbols.free_symbols(torch.randn(3)) == set()


def test_a_decided_symbol_is_a_constant() -> None:
    fake = symbolic(4, 5)
    assert symbols.constant_of(fake.shape[0]) is None
    before = assumptions(fake.fake_mode)
    assert fake.shape[0] == 4
    assert symbols.constant_of(fake.shape[0]) == 4
    assert assumptions(fake.fake_mode) > before
    assert symbols.constant_of(fake.shape[1] > 100) is None


def test_expressions_become_nodes_that_compute_them() -> None:
    fake = symbolic(4, 5)
    graph = fx.Graph()
    nodes = symbols.SymbolNodes(graph, lambda base: f"{base}_{len(graph.nodes)}")
    for i, number in enumerate(fake.shape):
        place = nodes.known[symbols.expression(number)] = graph.placeholder(f"n{i}")
        place.meta["val"] = number
    rows, columns = fake.shape
    wanted = [rows, rows * columns + 1, rows // 2, rows % 3, 7 * columns - rows]
    graph.output(tuple(nodes.node(symbols.Number(symbols.expression(n))) for n in wanted))
    module = fx.GraphModule(torch.nn.Module(), graph)
    for r, c in ((4, 5), (7, 3)):
        assert module(r, c) == (r, r * c + 1, r // 2, r % 3, 7 * c - r)
    assert all("val" in n.meta for n in graph.nodes if n.op == "call_function")


def test_expressions_as_python_text() -> None:
    rows, columns = symbolic(4, 5).shape
    expr = symbols.expression(rows * columns // 3)
    scope = {str(s): n for s, n in zip(sorted(expr.free_symbols, key=str), (4, 5), strict=True)}
    assert eval(symbols.python_text(expr), scope) == 6


def test_unknown_symbols_are_an_error() -> None:
    nodes = symbols.SymbolNodes(fx.Graph(), lambda base: base)
    with pytest.raises(AssertionError, match="no input of this program provides"):
        nodes.node(symbols.Number(symbols.expression(symbolic(4).shape[0] + 1)))


def test_checks_leave_symbolic_sizes_open_and_ask_what_was_assumed() -> None:
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    mode = new_mode(dynamic=True)
    fakes = [symbolic_like(mode, t, name) for t, name in ((x, "x"), (y, "y"))]
    assert fakes[0].shape[1] == 3
    look = tensor_guards([x, y], {id(x): fakes[0], id(y): fakes[1]}).check
    sizes, text = shape_check(fakes)
    assert "t0" in text
    others = torch.randn(6, 3), torch.randn(6, 3)
    assert look(*others)
    assert sizes(*others)
    assert not look(torch.randn(6, 3, dtype=torch.float64), others[1])
    for a, b in (((6, 3), (5, 3)), ((6, 2), (6, 2)), ((1, 3), (1, 3))):
        assert not sizes(torch.randn(a), torch.randn(b))
    assert not sizes(torch.randn(3, 6).t(), others[1])


def test_no_symbols_without_dynamo() -> None:
    found = symbols_of([torch.randn(3), 2], None)
    assert found.mode is None
    assert not found.fakes and not found.items


def test_fake_inputs_bring_their_mode() -> None:
    fake = symbolic(4)
    assert symbols_of([fake], None).mode is fake.fake_mode


@pytest.mark.parametrize("hide", [False, True])
def test_hidden_functions_are_not_looked_at_by_dynamo(hide: bool) -> None:
    """A hook that runs in a backward, inside a function that Dynamo compiles."""
    seen: list[str] = []

    def backend(graph: fx.GraphModule, _inputs: Any) -> Any:
        seen.append(str(graph.code))
        return graph.forward

    def hook(grad: Tensor) -> Tensor:
        return grad.atanh()

    def step(x: Tensor) -> None:
        (x * 2).sum().backward()

    if hide:
        hide_from_dynamo(hook)
    torch._dynamo.reset()
    x = torch.randn(3, requires_grad=True)
    x.register_hook(hook)
    torch.compile(step, backend=backend)(x)
    assert any("atanh" in code for code in seen) != hide
    torch._dynamo.reset()


def test_graph_that_takes_two_lists() -> None:
    graph = fx.Graph()
    a, b, c = (graph.placeholder(n) for n in "abc")
    graph.output((graph.call_function(torch.add, (a, c)), b))
    module = fx.GraphModule(torch.nn.Module(), graph)
    takes_two_lists(module, [0, 0], [0], ([0], [0]))
    x, y, z = torch.randn(3, 2).unbind(0)
    (first,), (second,) = module([x, y], [z])
    torch.testing.assert_close(first, x + z)
    assert second is y


def test_functionalization_inside_a_mode_that_it_called() -> None:
    class Again(dispatch.TorchDispatchMode):
        wrapped: Any = None

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.sin.default:
                with functional.again():
                    inner = functional.wrap(out.clone())
                    inner.mul_(2)
                    functional.sync(inner)
                    self.wrapped = functional.unwrap(inner)
            return out

    mode = Again()
    x = torch.randn(3)
    with functional.enabled(), mode:
        torch.sin(functional.wrap(x))
    torch.testing.assert_close(mode.wrapped, x.sin() * 2)


def test_python_dispatcher_takes_composite_ops_apart() -> None:
    with dispatch.python_dispatcher(on=True):
        torch.testing.assert_close(torch.ones(2, 2).reshape(4), torch.ones(4))
    with dispatch.python_dispatcher(on=False):
        pass


def test_function_inside_functionalize() -> None:
    def fn(x: Tensor) -> Tensor:
        return x

    wrapped = torch.func.functionalize(torch.func.functionalize(fn))
    assert transforms.without_functionalize(wrapped) is fn
    assert transforms.without_functionalize(fn) is fn


def test_tensors_of_a_transform_are_known() -> None:
    seen: list[bool] = []

    def note(x: Tensor) -> Tensor:
        seen.append(dispatch.in_transform(x))
        return x.sum()

    torch.func.grad(note)(torch.randn(3))
    assert seen == [True]
    assert not dispatch.in_transform(torch.randn(3))


def test_what_is_assumed_on_trial_is_forgotten() -> None:
    fake = symbolic(5, 3)
    mode, size = fake.fake_mode, fake.size(0)
    with on_trial(mode) as assumes_more:
        assert not assumes_more()
        assert size == 5 and size % 5 == 0
        assert assumes_more()
    assert isinstance(size, torch.SymInt) and symbols.constant_of(size) is None
    before = assumptions(mode)
    assert size == 5  # not remembered as known
    assert assumptions(mode) > before


def test_symbols_stand_for_other_numbers_for_a_while() -> None:
    fake = symbolic(5, 3)
    mode, size = fake.fake_mode, fake.size(0)
    sizes = {symbols.expression(n): now for n, now in zip(fake.size(), (7, 3), strict=True)}
    before = assumptions(mode)
    with RECORDING, as_numbers(mode, sizes):
        assert size == 7 and int(size * 2) == 14 and symbols.size_hint(size) == 7
    assert assumptions(mode) == before and symbols.constant_of(size) is None
