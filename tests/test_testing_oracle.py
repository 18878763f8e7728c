"""The oracle notices every kind of deviation, and none where there is none."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from aheadgrad.testing import Inputs, assert_same, compare

Function = Callable[..., Any]


def leaf() -> Inputs:
    x = torch.tensor([[0.3, -1.2, 0.7], [1.1, 0.4, -0.6]], requires_grad=True)
    return Inputs((x,), leaves=[x])


def plain() -> Inputs:
    x = torch.tensor([[0.3, -1.2, 0.7], [1.1, 0.4, -0.6]])
    return Inputs((x,))


def nonleaf() -> Inputs:
    x = torch.tensor([[0.3, -1.2, 0.7], [1.1, 0.4, -0.6]], requires_grad=True)
    return Inputs((x * 1.0,), leaves=[x])


def view() -> Inputs:
    x = torch.tensor([[0.3, -1.2, 0.7], [1.1, 0.4, -0.6]], requires_grad=True)
    base = x * 1.0
    return Inputs((base[0],), leaves=[x], watched=[base])


def two_leaves() -> Inputs:
    x = torch.tensor([0.3, -1.2, 0.7], requires_grad=True)
    y = torch.tensor([1.3, 0.2, 0.9], requires_grad=True)
    return Inputs((x, y), leaves=[x, y])


def listed() -> Inputs:
    return Inputs(([torch.ones(2)],), {"scale": 2.0})


def hidden_copy(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return target.copy_(source)


def leave(state: Callable[[], Any], result: Any) -> Any:
    state()
    return result


grad_mode_off = partial(torch.set_grad_enabled, False)
double_by_default = partial(torch.set_default_dtype, torch.float64)
autocast_on = partial(torch.set_autocast_enabled, "cpu", True)


class ZeroForNone(torch.autograd.Function):
    """The first input, but the second gets a gradient of zeros instead of none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad * 2, torch.zeros_like(grad)


class Frozen(torch.autograd.Function):
    """The cube of an input, with a gradient that cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 3 * ctx.saved_tensors[0] ** 2


class Unchecked(torch.autograd.Function):
    """``sin`` that keeps its input behind autograd's back and so misses later writes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.input = x.detach()
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.input.cos()


class WritesTangent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.detach().mul_(2)


class DrawsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        return grad * 2


def written(sine: Function) -> Function:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = sine(x)
        x.mul_(2)
        return y

    return fn


def stay(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * 2


# what it is about, eager, the deviating function, the inputs, a piece of what must be reported
DEVIATIONS: list[tuple[str, Function, Function, Callable[[], Inputs], str]] = [
    ("values", lambda x: x * 2, lambda x: x * 2.1, plain, "output.values"),
    ("small values", lambda x: x * 2, lambda x: x * 2 + 1e-4, plain, "output.values"),
    ("nan", lambda x: x.sqrt(), lambda x: x.abs().sqrt(), plain, "output.values"),
    ("dtype", lambda x: x * 2, lambda x: (x * 2).double(), plain, "output.dtype"),
    ("shape", lambda x: x * 2, lambda x: (x * 2).flatten(), plain, "output.shape"),
    ("stride", lambda x: x * 2, lambda x: (x * 2).t().contiguous().t(), plain, "output.stride"),
    ("tree", lambda x: (x * 2, 1), lambda x: [x * 2, 1], plain, "output tree"),
    ("number", lambda x: (x * 2, 1), lambda x: (x * 2, 1.0), plain, "output tree"),
    ("none", lambda x: None, lambda x: x * 1, plain, "output tree"),
    ("requires grad", lambda x: x * 2, lambda x: (x * 2).detach(), leaf, "output.requires_grad"),
    ("leafness", lambda x: x * 2, lambda x: (x * 2).detach().requires_grad_(), leaf, "output.is_leaf"),
    ("subclass", lambda x: x * 2, lambda x: torch.nn.Parameter(x * 2, False), plain, "output.type"),
    ("identity with input", lambda x: x, lambda x: x.view_as(x), plain, "output tree"),
    ("identity of outputs", lambda x: [x * 2] * 2, lambda x: [x * 2, x * 2], plain, "output tree"),
    ("alias of input", lambda x: x.view(-1), lambda x: x.flatten().clone(), leaf, "output.memory"),
    ("no alias of input", lambda x: x.clone(), lambda x: x.view_as(x), plain, "output.memory"),
    ("alias elsewhere", lambda x: x[0], lambda x: x[1], plain, "output.memory"),
    ("alias of output", lambda x: (y := -x, y[0]), lambda x: (y := -x, y[0].clone()), plain, "[1].memory"),
    ("missing mutation", lambda x: x.mul_(2).sum(), lambda x: (x * 2).sum(), plain, "args[0].values"),
    (
        "other storage",
        lambda x: x.add_(1).sum(),
        lambda x: x.set_(x + 1).sum(),
        plain,
        "args[0].kept storage",
    ),
    ("needless mutation", lambda x: x * 2, lambda x: x.add_(0) * 2, plain, "args[0]._version change"),
    ("metadata", lambda x: x.t_().sum(), lambda x: x.t().sum(), plain, "args[0].shape"),
    ("history", lambda x: x.mul_(2).sum(), lambda x: hidden_copy(x, x * 2).sum(), view, "leaves[0].grad"),
    ("flag of input", lambda x: x.requires_grad_() * 2, lambda x: x * 2, plain, "args[0].requires_grad"),
    ("grad mode", lambda x: leave(grad_mode_off, x), lambda x: x, plain, "grad_mode"),
    ("grad mode lost", lambda x: x, lambda x: leave(grad_mode_off, x), plain, "grad_mode"),
    ("default dtype", lambda x: x, lambda x: leave(double_by_default, x), plain, "default_dtype"),
    ("autocast", lambda x: x, lambda x: leave(autocast_on, x), plain, "autocast"),
    ("random state", lambda x: x * 1, lambda x: leave(lambda: torch.rand(1), x * 1), plain, "random state"),
    ("other random numbers", torch.rand_like, lambda x: leave(lambda: torch.rand(6), x - x), plain, "values"),
    ("random state in backward", lambda x: x * 2, DrawsInBackward.apply, leaf, "random state after backward"),
    ("gradient", lambda x: x.sin(), lambda x: x.sin().detach() + x - x.detach(), leaf, "args[0].grad"),
    ("missing gradient", lambda x, y: x * y, lambda x, y: x * y.detach(), two_leaves, "args[1].grad"),
    ("zero for none", stay, ZeroForNone.apply, two_leaves, "args[1].grad"),
    ("tangent clobbered", lambda x: x * 2, WritesTangent.apply, leaf, "tangents unchanged"),
    ("eager raises", lambda x: x.view(7), lambda x: x * 2, plain, "call"),
    ("compiled raises", lambda x: x * 2, lambda x: x.view(7), plain, "call"),
    ("other error", lambda x: x.view(7), lambda x: x.nothing, plain, "call"),
    ("backward must raise", written(torch.sin), written(Unchecked.apply), nonleaf, "backward"),
    ("backward must not raise", written(Unchecked.apply), written(torch.sin), nonleaf, "backward"),
]


@pytest.mark.parametrize(
    ("fn", "other", "make_inputs", "expected"),
    [pytest.param(*case[1:], id=case[0]) for case in DEVIATIONS],
)
def test_deviation_is_found(
    fn: Function, other: Function, make_inputs: Callable[[], Inputs], expected: str
) -> None:
    found = compare(fn, other, make_inputs)
    assert any(expected in difference.what for difference in found), "\n".join(map(str, found))
    assert compare(fn, fn, make_inputs) == []
    assert compare(other, other, make_inputs) == []


def test_argument_tree_afterwards() -> None:
    def fn(items: list[Any], scale: float) -> None:
        items.append(scale)

    found = compare(fn, lambda items, scale: None, listed)
    assert found[0].what == "args afterwards"


def test_version_counter() -> None:
    def visible(x: torch.Tensor) -> None:
        x.mul_(2)

    def unseen(x: torch.Tensor) -> None:
        x.data.mul_(2)

    def often(x: torch.Tensor) -> None:
        x.mul_(4).div_(2)

    assert [str(d) for d in compare(visible, unseen, plain, write_after=False)] == [
        "[all] args[0]._version change: eager 1, compiled 0"
    ]
    assert compare(visible, often, plain, write_after=False)
    assert compare(visible, often, plain, versions=False) == []


def test_report_is_readable() -> None:
    with pytest.raises(AssertionError, match=r"output\.requires_grad: eager True, compiled False"):
        assert_same(lambda x: x * 2, lambda x: (x * 2).detach(), leaf)
    assert_same(lambda x: x * 2, lambda x: x + x, leaf)


def test_unused_output_must_not_give_zeros() -> None:
    """Only seen when a single output is back-propagated."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, y * 3

    class Joint(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * 2, y * 3

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return grads[0] * 2, grads[1] * 3

    assert compare(fn, Joint.apply, two_leaves, backward=["all"], write_after=False) == []
    found = compare(fn, Joint.apply, two_leaves, write_after=False)
    assert any(
        d.scenario == "each output[0]" and d.what == "args[1].grad" and d.eager == "None" for d in found
    )


def test_write_after_tells_views_from_functions_outputs() -> None:
    """The same memory, values and flags; but an output of a custom function may not be written to."""

    class AsView(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view(-1)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad.view(2, 3)

    assert compare(lambda x: x.view(-1), AsView.apply, nonleaf, write_after=False) == []
    found = compare(lambda x: x.view(-1), AsView.apply, nonleaf)
    assert any(d.scenario.startswith("write") and d.what == "write" for d in found)


def test_saved_tensor_changed_by_the_caller() -> None:
    assert compare(torch.sin, Unchecked.apply, nonleaf) == []

    def with_input(sine: Function) -> Function:
        return lambda x: (sine(x), x)

    found = compare(with_input(torch.sin), with_input(Unchecked.apply), nonleaf)
    assert any(d.what == "backward" and d.scenario.startswith("write") for d in found)


def test_an_error_of_backward_may_come_early() -> None:
    def late(x: torch.Tensor) -> torch.Tensor:
        return written(torch.sin)(x)

    def early(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the sine was not kept")

    assert compare(late, early, nonleaf) == []


def test_one_after_the_other_and_twice() -> None:
    def apart(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin(), y.sin()

    def together(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.stack([x, y]).sin().unbind())

    sequence = compare(apart, together, two_leaves, backward=["all", "sequence"], write_after=False)
    assert any(d.what == "backward of output[1]" for d in sequence)
    twice = compare(torch.sin, Unchecked.apply, leaf, backward=["all", "twice"], write_after=False)
    assert [d.what for d in twice] == ["second backward"]
    with pytest.raises(ValueError, match="unknown kinds"):
        compare(apart, together, two_leaves, backward=["some"])


def test_higher_order() -> None:
    def cube(x: torch.Tensor) -> torch.Tensor:
        return x**3

    assert compare(cube, Frozen.apply, leaf) == []
    assert compare(cube, lambda x: x * x * x, leaf, order=4) == []
    found = compare(cube, Frozen.apply, leaf, order=2)
    assert found[0].what == "derivative 2 of args[0]"


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_context_around_the_call(around: Any) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.sin() if torch.is_grad_enabled() else x.cos()

    assert compare(fn, torch.cos, leaf, around=around) == []
    assert compare(fn, torch.sin, leaf, around=around)


class Pair(NamedTuple):
    first: torch.Tensor
    second: int


@dataclass
class Box:
    inside: torch.Tensor


def test_unusual_results_compare_equal_to_themselves() -> None:
    def fn(x: torch.Tensor) -> Any:
        return {
            "pair": Pair(x * 2, 3),
            "box": Box(x[0]),
            "kinds": [
                x > 0,
                x.argmax(),
                torch.complex(x, x),
                x.half(),
                math.inf,
                math.nan,
                x.shape,
                torch.float32,
            ],
            "empty": x[:0],
            "expanded": x[0].expand(4, 3),
            "parts": x.unbind(0),
            "nothing": None,
        }

    for make_inputs in (leaf, plain, nonleaf):
        assert compare(fn, fn, make_inputs, order=2, backward=["all", "each", "sequence", "twice"]) == []


def test_views_that_raise_when_looked_at() -> None:
    def fn(x: torch.Tensor) -> Any:
        with torch.no_grad():
            part = x[0]
        x.mul_(2)
        return part

    def detached(x: torch.Tensor) -> Any:
        x.mul_(2)
        return x[0].detach()

    assert compare(fn, fn, nonleaf) == []
    assert any("grad_fn" in d.what and d.eager.startswith("raises") for d in compare(fn, detached, nonleaf))


def test_exceptions_can_be_let_through() -> None:
    class Stop(Exception):
        pass

    def refuse(x: torch.Tensor) -> torch.Tensor:
        raise Stop

    assert compare(torch.sin, refuse, plain)[0].what == "call"
    with pytest.raises(Stop):
        compare(torch.sin, refuse, plain, through=(Stop,))


def test_state_is_restored() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        grad_mode_off(), double_by_default(), autocast_on()
        return x

    assert compare(fn, fn, plain) == []
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() is torch.float32
    assert not torch.is_autocast_enabled("cpu")
