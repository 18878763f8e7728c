"""`aheadgrad.capture`: one joint program, to read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import aheadgrad
from aheadgrad.errors import DataDependentError


def fn(x: Tensor, w: Tensor, *, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    return (x @ w).sin() * scale, w.sum()


def example() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)


def test_the_graph_is_the_joint_one() -> None:
    captured = aheadgrad.capture(fn, *example())
    assert isinstance(captured.graph, fx.Graph)
    captured.graph.lint()
    names = [n.name for n in captured.graph.nodes if n.op == "placeholder"]
    assert names == ["primals_1", "primals_2", "tangents_1", "tangents_2"]
    (output,) = (n for n in captured.graph.nodes if n.op == "output")
    assert len(output.args[0]) == len(captured.signature.outputs)
    targets = {str(n.target) for n in captured.graph.nodes if n.op == "call_function"}
    assert {"aten.mm.default", "aten.sin.default", "aten.cos.default"} <= targets
    assert all("val" in n.meta for n in captured.graph.nodes if n.op in ("placeholder", "call_function"))


def test_the_graph_computes_outputs_and_gradients() -> None:
    x, w = example()
    captured = aheadgrad.capture(fn, x, w)
    tangents = torch.randn(2, 3), torch.randn(())
    found = captured.program.module(x.detach(), w.detach(), *tangents)
    outs = fn(x, w)
    torch.testing.assert_close(list(found[:2]), [o.detach() for o in outs])
    total: dict[str, Tensor] = {}
    for slot, value in zip(captured.signature.outputs[2:], found[2:], strict=True):
        total[slot.describe()] = total.get(slot.describe(), torch.zeros(())) + value
    torch.testing.assert_close(list(total.values()), list(torch.autograd.grad(outs, (x, w), tangents)))


def test_the_signature_names_everything() -> None:
    signature = aheadgrad.capture(fn, *example()).signature
    assert len(signature.inputs) == 4
    assert len(signature.outputs) >= 4
    inputs = " ".join(slot.describe() for slot in signature.inputs)
    assert "x" in inputs
    assert "w" in inputs
    assert all(isinstance(slot.describe(), str) for slot in signature.outputs)


def test_facts_about_inputs_and_outputs() -> None:
    def changes(x: Tensor, y: Tensor) -> Any:
        x.add_(1)
        return x, y.view(-1), y * 2

    facts = aheadgrad.capture(changes, torch.ones(3), torch.ones(2, 2)).facts
    assert facts.inputs[0].data_changed
    assert not facts.inputs[1].data_changed
    assert facts.inputs[1].untouched
    assert len(facts.outputs) == 3


def test_text() -> None:
    captured = aheadgrad.capture(fn, *example())
    assert "sin" in str(captured)
    assert "primals_1" in str(captured)
    assert "tangents_1" in str(captured)
    text = captured.explain()
    assert "facts" in text
    assert "sin" in text


def test_no_gradients() -> None:
    captured = aheadgrad.capture(fn, torch.randn(2, 3), torch.randn(3, 3))
    names = [n.name for n in captured.graph.nodes if n.op == "placeholder"]
    assert len(names) == 2
    str(captured)
    captured.explain()
    with torch.no_grad():
        assert len(aheadgrad.capture(fn, *example()).signature.inputs) == 2


def test_keyword_arguments() -> None:
    x, w = example()
    captured = aheadgrad.capture(fn, x, w=w, scale=3.0)
    assert "3.0" in str(captured)


def test_a_module() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    captured = aheadgrad.capture(model, torch.randn(4, 3))
    inputs = " ".join(slot.describe() for slot in captured.signature.inputs)
    for name in ("0.weight", "0.bias", "1.running_mean"):
        assert name in inputs
    outputs = " ".join(slot.describe() for slot in captured.signature.outputs)
    assert "1.running_mean" in outputs
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_compiled_function_and_module() -> None:
    assert "sin" in str(aheadgrad.capture(aheadgrad.compile(fn, frontend="trace"), *example()))
    model = nn.Linear(3, 2)
    inputs = aheadgrad.capture(aheadgrad.compile(model, frontend="trace"), torch.randn(4, 3)).signature.inputs
    assert "weight" in " ".join(slot.describe() for slot in inputs)


def test_the_callers_tensors_are_left_alone() -> None:
    x = torch.zeros(3)
    aheadgrad.capture(lambda t: t.add_(1), x)
    assert torch.equal(x, torch.zeros(3))
    assert x._version == 0


def test_closed_over_tensors() -> None:
    w = torch.ones(3, requires_grad=True)
    signature = aheadgrad.capture(lambda x: x * w, torch.ones(3)).signature
    assert len(signature.inputs) == 3


def test_errors() -> None:
    with pytest.raises(DataDependentError, match=r"test_capture_api\.py"):
        aheadgrad.capture(lambda x: x if x.sum() > 0 else -x, torch.ones(3))
    with pytest.raises(TypeError):
        aheadgrad.capture(fn, torch.ones(3))


def test_source_and_explain_of_a_compiled_function() -> None:
    compiled = aheadgrad.compile(fn, frontend="trace")
    assert compiled.source == ""
    assert "call" in compiled.explain()
    compiled(*example())
    assert "def entry" in compiled.source
    assert "saved for backward" in compiled.explain()
    model = aheadgrad.compile(nn.Linear(3, 2), frontend="trace")
    model(torch.ones(1, 3))
    assert "def entry" in model.source
    assert "saved for backward" in model.explain()
