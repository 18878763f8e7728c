"""torch's exports by their own names: the same graphs and signatures where torch has them, and more."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import aot_autograd as peer

from aheadgrad import compat
from aheadgrad.errors import InvalidOption, UnsupportedInput
from aheadgrad.export.graph_modules import META

aten = torch.ops.aten


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 2), nn.BatchNorm1d(2)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.add_(1)
        out = self.norm(self.linear(x))
        return (out - y).pow(2).mean(), out.detach()


def example() -> list[Tensor]:
    return [torch.randn(4, 3), torch.randn(4, 2)]


def ops(module: Any) -> list[Any]:
    return [n.target for n in module.graph.nodes if n.op == "call_function"]


def names(signature: Any) -> dict[str, Any]:
    found = dict(vars(signature))
    del found["in_spec"], found["out_spec"], found["backward_signature"]
    return found


@pytest.mark.parametrize("joint", [False, True])
def test_graphs_and_signatures_are_torchs(joint: bool) -> None:
    torch.manual_seed(0)
    model, args = Model(), example()
    options: dict[str, Any] = {"trace_joint": joint, "output_loss_index": 0 if joint else None}
    with torch.set_grad_enabled(joint):
        theirs, told = peer.aot_export_module(model, args, **options)
    ours, signature = compat.aot_export_module(model, args, **options)
    assert names(signature) == names(told)
    assert signature.in_spec == told.in_spec
    assert signature.out_spec == told.out_spec
    assert sorted(map(str, ops(ours))) == sorted(map(str, ops(theirs)))
    inputs = [*model.parameters(), *model.buffers(), *args]
    with torch.no_grad():
        torch.testing.assert_close(list(ours(*inputs)), list(theirs(*inputs)), rtol=0, atol=0)
    if joint:
        assert signature.backward_signature is not None
        grads = signature.backward_signature.gradients_to_parameters
        assert grads == told.backward_signature.gradients_to_parameters
        assert signature.backward_signature.loss_output == "mean"


def test_what_torchs_refuses() -> None:
    class Hard(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.spare = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
            x.add_(1)
            h = x * self.weight
            return {"loss": h.sum(), "view": y[1:], "other": h.exp()}

    def make() -> list[Tensor]:
        memory = torch.ones(4)
        return [memory[:3], torch.ones(3)]

    with pytest.raises(Exception):  # noqa: B017
        peer.aot_export_module(Hard(), make(), trace_joint=True, output_loss_index=0)
    module, signature = compat.aot_export_module(Hard(), make(), trace_joint=True, output_loss_index=0)
    assert signature.parameters == ["weight", "spare"]
    assert list(signature.user_inputs_to_mutate.values()) == [signature.user_inputs[0]]
    assert signature.backward_signature is not None
    assert list(signature.backward_signature.gradients_to_parameters.values()) == ["weight"]
    results = module(torch.ones(3), torch.ones(1), *make())
    by_name = dict(zip((n.name for n in module.graph.output_node().args[0]), results, strict=True))
    (gradient,) = signature.backward_signature.gradients_to_parameters
    torch.testing.assert_close(by_name[gradient], torch.full((3,), 2.0))


def test_mistakes() -> None:
    with pytest.raises(InvalidOption, match="output_loss_index"):
        compat.aot_export_module(Model(), example(), trace_joint=True)
    with pytest.raises(InvalidOption, match="pre_dispatch"):
        compat.aot_export_module(Model(), example(), trace_joint=False, pre_dispatch=True)


def test_constants_are_the_graphs_own() -> None:
    class Adds(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (x + torch.tensor([1.0, 2.0]),)

    module, signature = compat.aot_export_module(Adds(), [torch.zeros(2)], trace_joint=False)
    assert signature.user_inputs == ["arg0_1"]
    torch.testing.assert_close(module(torch.zeros(2))[0], torch.tensor([1.0, 2.0]))


# ---- simple ------------------------------------------------------------------------------------


def mixed(p: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return (p * x).sum(), (p + x).sin()


def test_a_simple_joint_is_torchs() -> None:
    p, x = torch.randn(3, requires_grad=True), torch.randn(3)
    theirs = peer.aot_export_joint_simple(mixed, (p, x), trace_joint=True)
    ours = compat.aot_export_joint_simple(mixed, (p, x), trace_joint=True)
    tangents = [torch.randn(()), torch.randn(3)]
    found, wanted = ours([p, x], tangents), theirs([p, x], tangents)
    torch.testing.assert_close(found[0], wanted[0])
    torch.testing.assert_close(found[1][0], wanted[1][0])
    assert found[1][1] is wanted[1][1] is None
    assert sorted(map(str, ops(ours))) == sorted(map(str, ops(theirs)))
    flat = compat.aot_export_joint_simple(mixed, (p.detach(), x), trace_joint=False)
    torch.testing.assert_close(tuple(flat(p.detach(), x)), tuple(mixed(p.detach(), x)))


@pytest.mark.parametrize("fn", [lambda p, x: (x.add_(1),), lambda p, x: (p[1:],)])
def test_a_simple_joint_cannot_tell_of_updates_and_views(fn: Any) -> None:
    with pytest.raises(UnsupportedInput, match=r"aheadgrad\.export can"):
        compat.aot_export_joint_simple(
            fn, (torch.randn(3, requires_grad=True), torch.randn(3)), trace_joint=True
        )


# ---- joint first, compiled later ---------------------------------------------------------------


def test_a_joint_graph_is_changed_and_compiled() -> None:
    torch.manual_seed(0)
    model, args = Model(), example()
    twin = Model()
    twin.load_state_dict(model.state_dict())
    with ExitStack() as stack:
        joint = compat.aot_export_joint_with_descriptors(stack, model, tuple(args))
        told = [str(n.meta[META]) for n in joint.graph_module.graph.nodes if n.op == "placeholder"]
        assert told[0] == "parameter linear.weight"
        assert told[-1].startswith("tangent of output 0")
        graph = joint.graph_module.graph
        (power,) = [n for n in graph.nodes if n.target is aten.pow.Tensor_Scalar and n.args[1] == 2]
        with graph.inserting_after(power):
            twice = graph.call_function(aten.mul.Tensor, (power, 3))
        twice.meta.update(power.meta)
        power.replace_all_uses_with(twice, delete_user_cb=lambda n: n is not twice)
        joint.graph_module.recompile()
        compiled = compat.aot_compile_joint_with_descriptors(joint)
    loss, out = compiled(*model.parameters(), *model.buffers(), *args)
    expected, wanted = twin(*args)
    torch.testing.assert_close(loss, expected * 3)
    torch.testing.assert_close(out, wanted)
    loss.backward()
    expected.backward()  # the change was made to the forward alone: gradients are those of the original
    torch.testing.assert_close(model.linear.weight.grad, twin.linear.weight.grad)
    torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))
