"""Saved tensors, returned intermediates, roots and inputs of the first backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

import aheadgrad
from aheadgrad.errors import FallbackError

from .common import one, same, strict
from .plays import Packs, agree, assert_alike, double

pytestmark = [
    pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning"),
    pytest.mark.filterwarnings("ignore:Error detected:UserWarning"),
]


def layer(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).tanh() * x


def pair(*shape: int) -> tuple[Tensor, Tensor]:
    return double(*(shape or (3, 3)), seed=1), double(*(shape or (3, 3)), seed=2)


# saved tensors


@pytest.mark.parametrize("fn", [lambda x, w: x * w, lambda x, w: x @ w, lambda x, w: x.exp() + w])
def test_lossy_hooks_round_as_in_eager(fn: Callable[..., Tensor]) -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        with Packs(torch.float16).on():
            out = run(x, w)
        out.sum().backward()
        return x.grad, w.grad

    compiled = agree(fn, play)
    x, w = pair()
    compiled(x, w).sum().backward()
    rough, exact = play(compiled), (x.grad, w.grad)
    assert any(not torch.equal(a, b) for a, b in zip(rough, exact, strict=True))  # type: ignore[arg-type]


def test_what_is_unpacked_is_what_is_used() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        with saved_tensors_hooks(lambda t: t, lambda t: torch.zeros_like(t)):
            out = run(x, w)
        out.sum().backward()
        return x.grad, w.grad

    agree(lambda x, w: x * w, play)


@pytest.mark.parametrize("when", ["pack", "unpack"])
def test_hooks_that_raise(when: str) -> None:
    class Mine(ValueError):
        pass

    def fail(t: Any) -> Any:
        raise Mine(when)

    def play(run: Any) -> Any:
        x, w = pair()
        hooks = (fail, lambda t: t) if when == "pack" else (lambda t: t, fail)
        with saved_tensors_hooks(*hooks):
            out = run(x, w)
        out.sum().backward()

    compiled = agree(layer, refused=[play])
    x, w = pair()
    compiled(x, w).sum().backward()  # works again
    assert x.grad is not None


def test_hooks_inside_hooks() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        with saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
            with saved_tensors_hooks(lambda t: t * 4, lambda t: t):
                out = run(x, w)
        out.sum().backward()
        return x.grad, w.grad

    agree(lambda x, w: x * w, play)


def lossy_inside(x: Tensor, w: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda t: t.half(), lambda t: t.double()):
        h = x * w
    return h * x


def gradients(run: Any) -> Any:
    x, w = pair()
    run(x, w).sum().backward()
    return x.grad, w.grad


def test_hooks_set_inside_the_function() -> None:
    with pytest.raises(FallbackError, match="saved-tensor hooks are set inside"):
        gradients(strict(lossy_inside))
    run = aheadgrad.compile(lossy_inside, fallback="warn", frontend="trace")
    with pytest.warns(UserWarning, match="saved-tensor hooks are set inside"):
        found = gradients(run)
    assert_alike(gradients(lossy_inside), found)


def test_hooks_inside_and_around() -> None:
    with Packs().on(), pytest.raises(FallbackError, match="saved-tensor hooks are set inside"):
        gradients(strict(lossy_inside))


def test_hooks_of_torch_inside_the_function() -> None:
    """They bring back what they were given; checkpoint is built on them."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            h = x * w
        return torch.utils.checkpoint.checkpoint(layer, h, w, use_reentrant=False) * x  # type: ignore[no-any-return]

    agree(fn, gradients)


def test_hooks_inside_where_nothing_is_saved() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad(), saved_tensors_hooks(lambda t: t.half(), lambda t: t.double()):
            h = x * w
        return h * x * w

    agree(fn, gradients)


def test_changing_saved_tensors_allowed() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            out = run(x, w)
            with torch.no_grad():
                x.mul_(3)
                w.zero_()
            out.sum().backward()
        return x.grad, w.grad

    agree(layer, play)


def test_version_counters_moved_by_hand() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        out = run(x, w)
        torch.autograd.graph.increment_version(w)
        out.sum().backward()

    agree(layer, refused=[play])


@pytest.mark.parametrize("pick", [lambda w: w, lambda w: w[0], lambda w: w.t(), lambda w: w.view(-1)[1:3]])
def test_a_view_of_a_saved_tensor_changed(pick: Callable[[Tensor], Tensor]) -> None:
    def play(run: Any) -> Any:
        x, w = double(3, 3), double(3, 3, seed=1, grad=False)
        out = run(x, w)
        pick(w).zero_()
        out.sum().backward()

    agree(lambda x, w: x * w, refused=[play])
    agree(lambda x, w: x.t() * w.view(9).view(3, 3).t(), refused=[play])


def test_nothing_of_the_user_is_changed_by_a_backward() -> None:
    """Memory that a backward frees may be used again, but never what somebody else holds."""

    def fn(x: Tensor, w: Tensor) -> Any:
        h = (x @ w).tanh()
        return h, h.exp(), h.view(-1), (h * 2).sum()

    def play(run: Any) -> Any:
        x, w = pair()
        outs = run(x, w)
        tangent = torch.ones((), dtype=torch.float64)
        held = [t.detach() for t in (x, w, *outs)]
        before = [t.clone() for t in held]
        outs[3].backward(tangent)
        return [torch.equal(a, b) for a, b in zip(held, before, strict=True)], tangent

    agree(fn, play)


# gradients with respect to returned intermediates


def chain(x: Tensor, w: Tensor) -> Any:
    h = x * w
    k = h.sin()
    return h, k, (k * w).sum()


INTERMEDIATE: dict[str, Callable[[Any], Any]] = {}


def intermediate(play: Callable[[Any], Any]) -> Callable[[Any], Any]:
    INTERMEDIATE[play.__name__] = play
    return play


@intermediate
def of_the_last(run: Any) -> Any:
    x, w = pair()
    h, k, out = run(x, w)
    return torch.autograd.grad(out, [h, k])


@intermediate
def of_one_by_the_other(run: Any) -> Any:
    x, w = pair()
    h, k, _ = run(x, w)
    return torch.autograd.grad(k.sum(), h)


@intermediate
def with_inputs_too(run: Any) -> Any:
    x, w = pair()
    h, k, out = run(x, w)
    return torch.autograd.grad(out + h.sum(), [x, h, k])


@intermediate
def retained(run: Any) -> Any:
    x, w = pair()
    h, k, out = run(x, w)
    h.retain_grad()
    k.retain_grad()
    out.backward()
    return h.grad, k.grad, x.grad, w.grad


@intermediate
def hooked(run: Any) -> Any:
    x, w = pair()
    h, _, out = run(x, w)
    h.register_hook(lambda g: g * 2)
    out.backward()
    return x.grad, w.grad


@intermediate
def backward_with_inputs(run: Any) -> Any:
    x, w = pair()
    h, _, out = run(x, w)
    h.retain_grad()
    out.backward(inputs=[h])
    return h.grad, x.grad, w.grad


@intermediate
def by_edge(run: Any) -> Any:
    x, w = pair()
    h, _, out = run(x, w)
    return torch.autograd.grad(out, [get_gradient_edge(h)])


@pytest.mark.parametrize("name", INTERMEDIATE)
def test_returned_intermediates(name: str) -> None:
    agree(chain, INTERMEDIATE[name])


# roots and inputs


def test_several_roots() -> None:
    def fn(x: Tensor, w: Tensor) -> Any:
        h = x * w
        return h.sum(), h.sin(), w.exp()

    def play(run: Any) -> Any:
        x, w = pair()
        a, b, c = run(x, w)
        torch.autograd.backward([a, b], [None, torch.ones(3, 3).double()], retain_graph=True)
        torch.autograd.backward([c, a], [c.detach(), None])
        return x.grad, w.grad

    agree(fn, play)


def test_the_same_root_twice() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        out = run(x, w)
        ones = torch.ones(3, 3).double()
        return torch.autograd.grad([out, out], [x, w, x], [ones, ones * 2])

    agree(layer, play)


def test_roots_and_inputs_as_edges() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        out = run(x, w)
        edge = get_gradient_edge(out)
        del out
        ones = torch.ones(3, 3).double()
        return torch.autograd.grad(edge, [get_gradient_edge(x), w], ones)

    agree(layer, play)


def test_a_root_that_is_no_scalar() -> None:
    agree(layer, refused=[lambda run: run(*pair()).backward()])


def test_three_independent_heads_one_by_one() -> None:
    def fn(x: Tensor, v: Tensor, w: Tensor) -> Any:
        h = x * v
        return h.sin() * h, h.detach() * w, (w * 2).exp()

    def order(*which: int) -> Callable[[Any], Any]:
        def play(run: Any) -> Any:
            x, v, w = (double(3, seed=s) for s in range(3))
            outs = run(x, v, w)
            found = []
            for i in which:
                outs[i].sum().backward()
                found.append([None if t.grad is None else t.grad.clone() for t in (x, v, w)])
            return found

        return play

    agree(fn, order(0, 1, 2), order(2, 1, 0), order(1), order(2, 0), refused=[order(0, 0)])


def test_gradients_do_not_share_memory() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        t = torch.ones(3, 3).double()
        run(x, w).backward(t)
        x.grad.mul_(5)  # type: ignore[union-attr]
        t.zero_()
        return x.grad, w.grad

    agree(lambda x, w: x + w, play)
    agree(lambda x, w: (x + w).view(9).view(3, 3), play)
    agree(lambda x, w: torch.stack([x, w]).sum(0), play)


def test_layout_of_accumulated_gradients() -> None:
    def play(run: Any) -> Any:
        x = double(2, 3, 4, 4).detach().to(memory_format=torch.channels_last).requires_grad_()
        w = double(3, 3).detach().t().requires_grad_()
        run(x, w).sum().backward()
        assert x.grad is not None and w.grad is not None
        return x.grad, w.grad, x.grad.stride(), w.grad.stride()

    agree(lambda x, w: torch.einsum("bchw,cd->bdhw", x.sin(), w), play)


def test_gradients_go_into_what_is_there() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        x.grad = torch.ones(3, 3).double()
        held = x.grad
        run(x, w).sum().backward()
        return x.grad is held, held, w.grad

    agree(layer, play)


@pytest.mark.parametrize("used_first", [True, False])
def test_a_leaf_that_changes_its_shape_out_of_sight(used_first: bool) -> None:
    """Its gradient has the size of its first use."""

    def f(x: Tensor) -> Tensor:
        out = x * 2 if used_first else None
        with torch.no_grad():
            x.unsqueeze_(1)
        return x * 3 if out is None else out

    same(f, one(3))
