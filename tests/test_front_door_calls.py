"""How the default front end calls Dynamo: without Dynamo's own preparations, but with what those are for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aheadgrad
from aheadgrad.torchlayer.evalframe import is_hidden


def double(x: Tensor) -> Tensor:
    return x.sin() * 2


def test_a_stance_holds() -> None:
    fast = aheadgrad.compile(lambda x: x.sin() * 2)
    with torch.compiler.set_stance("force_eager"):
        fast(torch.ones(2))
        made_inside = aheadgrad.compile(lambda x: x.cos() * 2)
        made_inside(torch.ones(2))
    assert not fast.entries and not made_inside.entries
    fast(torch.ones(2)), made_inside(torch.ones(2))
    assert len(fast.entries) == len(made_inside.entries) == 1
    with torch.compiler.set_stance("force_eager"):
        fast(torch.ones(3, 3))
        made_inside(torch.ones(3, 3))
    assert len(fast.entries) == len(made_inside.entries) == 1


def test_a_recording_of_torchs_sees_the_ops() -> None:
    fast = aheadgrad.compile(double)
    fast(torch.ones(2))
    traced = torch.jit.trace(double, (torch.ones(2),))
    assert torch.equal(traced(torch.ones(3)), double(torch.ones(3)))
    with pytest.raises(RuntimeError, match="jit"):
        torch.jit.trace(fast, (torch.ones(2),))


@pytest.mark.filterwarnings("ignore::aheadgrad.errors.FallbackWarning")
def test_an_uncompiled_graph_that_raises_leaves_no_autocast_behind() -> None:
    def fn(x: Tensor, index: Tensor) -> Tensor:
        with torch.inference_mode():
            y = x + 1
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ x)[index] + y[0]

    fast = aheadgrad.compile(fn)
    assert torch.equal(fast(torch.eye(2), torch.tensor([1])), fn(torch.eye(2), torch.tensor([1])))
    assert fast.fallbacks
    with pytest.raises(IndexError):
        fast(torch.eye(2), torch.tensor([7]))
    assert not torch.is_autocast_enabled("cpu")


def test_an_error_leaves_dynamo_switched_off() -> None:
    def fn(x: Tensor, index: Tensor) -> Tensor:
        return x[index]

    fast = aheadgrad.compile(fn)
    fast(torch.ones(2), torch.tensor([1]))
    with pytest.raises(IndexError):
        fast(torch.ones(2), torch.tensor([7]))
    assert torch._C._dynamo.eval_frame.set_eval_frame(None) is None
    assert torch._C._dynamo.eval_frame.set_eval_frame_isolate_recompiles_id(-1) == -1


def test_hooks_on_saved_tensors_are_called_by_the_same_entry() -> None:
    x, packed = torch.ones(2, requires_grad=True), []
    times = [torch.fx.symbolic_trace(lambda t, k=k: t * k) for k in (2, 3)]  # such as compilers may inline

    def pack(t: Tensor) -> Tensor:
        packed.append(t)
        return t

    fast, first_inside = aheadgrad.compile(lambda x: x.exp()), aheadgrad.compile(lambda x: x.exp())
    fast(x)
    for compiled in (first_inside, fast, first_inside):
        with torch.autograd.graph.saved_tensors_hooks(*times):
            (grad,) = torch.autograd.grad(compiled(x).sum(), x)
        assert torch.equal(grad, 6 * x.exp())
        (grad,) = torch.autograd.grad(compiled(x).sum(), x)
        assert torch.equal(grad, x.exp())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        fast(x)
    assert len(packed) == len(fast.entries) == len(first_inside.entries) == 1


def test_a_graph_is_called_without_a_wrapper() -> None:
    scope: dict[str, Any] = {"torch": torch}
    exec("def fn(x): return torch.sin(x) * 2", scope)
    fast = aheadgrad.compile(scope["fn"])
    fast(torch.ones(2))
    graphs = [value for name, value in scope.items() if name.startswith("__compiled_fn")]
    assert len(graphs) == 1 and is_hidden(graphs[0])


@pytest.mark.parametrize("options", [{}, {"fullgraph": True}, {"dynamic": True}, {"dynamic": False}])
def test_any_options(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    fast = aheadgrad.compile(model, **options)
    for rows in (2, 3, 4):
        x = torch.ones(rows, 2)
        torch.testing.assert_close(fast(x), model(x))
    assert not fast.fallbacks
