"""Programs that once disagreed with eager: views, history and what is saved for backward.

Each test says in its name what went wrong. The oracle compares everything that BEHAVIOURS calls
"same", including what happens when the caller writes into a result afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import aheadgrad
from aheadgrad.errors import FallbackError
from aheadgrad.testing import Inputs, assert_same, two

from .given import Given, check, matrix, plain, vector, with_history

# ---- views and history --------------------------------------------------------------------------


def test_stale_view_of_a_changed_base() -> None:
    def f(a: Tensor) -> Any:
        b = a * 2
        first, _ = b.unbind(0)
        b.mul_(3.0)
        return first, b

    check(f, matrix)


def test_view_made_under_no_grad() -> None:
    def f(a: Tensor) -> Any:
        b = a * 2
        with torch.no_grad():
            part = b[0]
        return b, part

    check(f, matrix)


def test_view_in_grad_mode_of_a_view_made_under_no_grad() -> None:
    def f(a: Tensor) -> Any:
        b = a * 2
        with torch.no_grad():
            part = b[0]
        return b, part.unsqueeze(0)

    check(f, matrix)


def test_detached_alias_shares_the_version_counter() -> None:
    def f(a: Tensor) -> Any:
        b = a * 2
        return b, b.detach()

    check(f, matrix)


def test_data_alias_has_a_version_counter_of_its_own() -> None:
    def f(a: Tensor) -> Any:
        b = a + 2
        return b, b.data

    check(f, matrix)


def test_detached_data_has_a_version_counter_of_its_own() -> None:
    check(lambda a: a.data.detach(), plain)


def test_view_made_under_no_grad_of_a_reshaped_input() -> None:
    def f(a: Tensor) -> Any:
        a.transpose_(0, 1)
        with torch.no_grad():
            same = a.expand_as(a)
        return same[:, ::2]

    check(f, with_history)


def test_view_of_an_empty_input_keeps_its_strides() -> None:
    check(lambda a: a.view(-1), lambda: ([], (torch.zeros(0, 3).select(-1, 2),)))


def test_version_counter_of_an_input_moves_as_often_as_in_eager() -> None:
    def f(a: Tensor) -> Any:
        a.mul_(2.0)
        a.add_(1.0)
        a[0].sub_(1.0)
        return a.sum()

    check(f, with_history)


def test_leaf_view_made_inside() -> None:
    def f(a: Tensor) -> Any:
        view = a.detach()[1:]
        view.requires_grad_()
        return view, view * 2

    check(f, plain)


def test_leaf_made_inside() -> None:
    def f(a: Tensor) -> Any:
        leaf = (a * 2).detach().requires_grad_()
        return leaf, leaf.sin()

    check(f, vector)


# ---- what eager saves for backward ----------------------------------------------------------------


def test_input_changed_through_data_and_saved_by_a_write_to_a_view() -> None:
    def f(b: Tensor) -> Any:
        v = b.lerp(b.detach(), 0.3)
        w = v.unsqueeze(0)
        b.data.mul_(-1.0)
        w *= b
        return v, b

    check(f, vector)


def test_input_saved_for_its_size_alone_is_watched() -> None:
    def f(a: Tensor) -> Any:
        return a.gather(0, torch.tensor([0, 0])), a

    check(f, vector)


def test_source_of_index_add_into_a_view_is_watched() -> None:
    def f(b: Tensor, d: Tensor) -> Any:
        d[None].index_add_(0, torch.tensor([0]), b.unsqueeze(0))
        return b

    def make() -> Given:
        b = torch.tensor(-1.0, requires_grad=True)
        return [b], (b, torch.tensor(0.5))

    check(f, make)


def test_product_changed_through_data_runs_uncompiled() -> None:
    def f(a: Tensor) -> Any:
        product = a.prod()
        product.data.add_(product)
        return product

    with pytest.raises(FallbackError, match="product"):
        aheadgrad.compile(f, fallback="error", frontend="trace")(vector()[1][0])

    def make_inputs() -> Inputs:
        leaves, args = vector()
        return Inputs(args=args, leaves=leaves)

    assert_same(f, aheadgrad.compile(f, frontend="trace"), make_inputs)


@pytest.mark.parametrize(
    "f",
    [lambda a: a.add(0.5), lambda a: a.cumsum(0), lambda a: a.sin(), lambda a: a * a.detach()],
    ids=["add", "cumsum", "sin", "mul"],
)
def test_second_backward_works_exactly_where_nothing_was_saved(f: Callable[[Tensor], Tensor]) -> None:
    check(f, vector, backward=("all", "twice"))


def _change(t: Tensor, _: Tensor) -> None:
    t.abs_()


def _change_twice(t: Tensor, _: Tensor) -> None:
    t.abs_().mul_(3)


def _change_and_reshape(t: Tensor, _: Tensor) -> None:
    t.abs_().t_()


def _change_by_the_base(_: Tensor, base: Tensor) -> None:
    base[1:].mul_(-2)


def _reshape_unseen(t: Tensor, _: Tensor) -> None:
    with torch.no_grad():
        t.t_()


def _nothing(*_: Tensor) -> None:
    pass


@pytest.mark.parametrize("frontend", ["trace", "dynamo"])
@pytest.mark.parametrize("later", [_change_by_the_base, _change_twice, _reshape_unseen, _nothing])
@pytest.mark.parametrize("first", [_change, _change_twice, _change_and_reshape])
def test_history_of_a_view_is_made_anew_after_a_later_write(first: Any, later: Any, frontend: str) -> None:
    """The version counter was put back after the update, so the next write looked as if it was known."""

    def outcome(run: Any) -> list[Any]:
        leaf = torch.arange(-4.0, 5.0).view(3, 3).requires_grad_()
        base = leaf.clone()
        view = base.t()
        run(view)
        later(view, base)
        view.backward(torch.arange(9.0).view(3, 3))
        return [leaf.grad.tolist(), view.tolist(), view._version]  # type: ignore[union-attr]

    def fn(t: Tensor) -> None:
        first(t, t)

    assert outcome(aheadgrad.compile(fn, fallback="error", frontend=frontend)) == outcome(fn)


def test_a_leaf_made_inside_changes_its_shape_out_of_sight() -> None:
    """Gradients of what was computed before came with the old shape, and were refused."""

    def f(a: Tensor) -> Any:
        a.requires_grad_()
        out = a * 2
        with torch.no_grad():
            a.unsqueeze_(0)
        return out

    check(f, plain)


def test_a_view_that_is_a_subclass_changes_its_shape_and_its_base_is_written() -> None:
    """Eager makes the history of the view again, for the wrong shape; compiled gave a gradient."""

    def make() -> Inputs:
        leaf = two.tensor([[0.5, -1.0], [1.5, 0.3], [0.9, -0.4]], requires_grad=True)
        base = leaf * 1
        return Inputs(args=(base.t()[:, ::2], base), leaves=[leaf])

    def f(view: Tensor, base: Tensor) -> Tensor:
        view.t_()
        base.add_(1.5)
        return base * 2

    with pytest.raises(FallbackError, match="changes its shape"):
        aheadgrad.compile(f, fallback="error", frontend="trace")(*make().args)


def test_a_backward_that_raises_where_only_numbers_are_symbols() -> None:
    """Seed 308040: it is recorded for the sizes at hand, of which there are none."""

    def fn(c: Tensor) -> Tensor:
        c.mul_(c)
        return c

    fast = aheadgrad.compile(fn)
    for f in (fn, fast):
        y = torch.tensor(-1.5, dtype=torch.float64, requires_grad=True).clone()[None][0]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            f(y).backward(create_graph=True)


def test_a_part_whose_memory_is_changed_out_of_sight_has_a_gradient() -> None:
    """Seed 923530: inputs that share memory enter as one; asked for the part alone, `grad` gave None."""

    def f(a: Tensor, b: Tensor) -> Tensor:
        squared = b**2
        a.data.mul_(2.0)
        return b * squared

    found = []
    for run in (f, aheadgrad.compile(f, fallback="error", frontend="trace")):
        x = torch.tensor([[1.5, 0.9], [1.0, 2.0]], requires_grad=True)
        part = x.chunk(2)[0]
        (g,) = torch.autograd.grad(run(x[:-1], part).sum(), part, create_graph=True)
        found.append([g, *torch.autograd.grad(g.sum(), [part, x])])
    for eager, ours in zip(*found, strict=True):
        assert torch.equal(eager, ours)


@pytest.mark.parametrize("partition", ["default", "min_cut"])
def test_a_result_that_was_written_through_a_view(partition: str) -> None:
    """Seed 922487: what the write saved is hidden from the graph; min-cut did not notice a change."""

    def f(a: Tensor) -> Tensor:
        out = torch.nn.functional.softplus(a)
        out.unsqueeze(0).exp_()
        return out

    for run in (f, aheadgrad.compile(f, fallback="error", frontend="trace", partition=partition)):
        out = run(torch.ones(3, requires_grad=True))
        out.detach().mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_a_dimension_added_out_of_sight_to_what_is_not_contiguous() -> None:
    """Seed 1220510: the gradient came back as if the result had been contiguous."""

    def f(a: Tensor) -> Tensor:
        out = a.clone()
        with torch.no_grad():
            out.unsqueeze_(0)
        return out

    def make() -> Given:
        leaf = torch.tensor([[0.5, -1.0], [1.5, 0.3]], requires_grad=True)
        return [leaf], ((leaf * 1).t(),)

    check(f, make)


def test_views_of_a_subclass_that_share_a_change_of_shape() -> None:
    """Seed 1230112: each output had changed the shape anew, and the version counter had moved twice."""

    def f(a: Tensor) -> Any:
        total = a.sum(-1)
        view = total.view_as(total)
        view.unsqueeze_(0)
        return view.mT, view

    def make() -> Given:
        leaf = two.tensor([[0.5, -1.0], [1.5, 0.3]], requires_grad=True)
        return [leaf], (leaf,)

    check(f, make)


def test_an_alias_by_data_whose_counter_was_saved() -> None:
    """Seed 1240023: a write to the returned alias, of which a detached one is saved, went unnoticed."""

    def saved(a: Tensor) -> Any:
        alias = (a * 2).data
        return alias, a * alias.detach()

    def not_saved(a: Tensor) -> Any:
        twice = a * 2
        return twice.data, a * twice.detach()

    with pytest.raises(FallbackError, match=r"made with \.data"):
        aheadgrad.compile(saved, fallback="error", frontend="trace")(*vector()[1])
    check(not_saved, vector)


def test_a_view_of_what_is_then_an_out_argument() -> None:
    """Seed 8507681: the output was taken for a view of the op's input, and its gradient was lost."""

    def f(a: Tensor, b: Tensor) -> Tensor:
        view = a.diagonal()
        with torch.no_grad():
            torch.sin(b, out=a)
        return view

    def make() -> Given:
        leaf = torch.tensor([[0.1, 0.2], [0.5, -1.0], [1.5, 0.3]], requires_grad=True)
        a = leaf[1:]
        return [leaf], (a, a.view_as(a))

    check(f, make)


def test_views_whose_base_comes_to_require_grad() -> None:
    """Seeds 8116296 and 8507047: to eager they are leaves as long as nobody uses them."""

    def reshaped(a: Tensor, b: Tensor) -> Tensor:
        a[:, 0] = b[:, 0]
        a.t_()
        return a

    def made_a_leaf(a: Tensor, b: Tensor) -> Tensor:
        view = a[:2]
        a += b
        view.requires_grad = True
        return a

    def make() -> tuple[Tensor, Tensor]:
        return torch.ones(4, 3)[1:], torch.ones(3, 3, requires_grad=True) * 2

    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        reshaped(*make())
    for f in (reshaped, made_a_leaf):
        with pytest.raises(FallbackError, match="after its base came to require grad"):
            aheadgrad.compile(f, fallback="error", frontend="trace")(*make())


def test_another_memory_for_a_tensor_that_changed_its_shape() -> None:
    """Seed 8504037: gradients were those of the shape before."""

    def f(a: Tensor, b: Tensor) -> Tensor:
        a.t_()
        with torch.no_grad():
            a.set_(b)
        return a

    leaf = torch.ones(3, 3, requires_grad=True)
    with pytest.raises(FallbackError, match="set_ is called on a tensor that changed its shape"):
        aheadgrad.compile(f, fallback="error", frontend="trace")(leaf * 1, torch.ones(3, 3))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("cut", [lambda t: t.data, Tensor.detach])
def test_a_result_beside_an_alias_with_a_history_of_its_own(cut: Any, backend: str) -> None:
    """Seed 8601569: both were one tensor when they got their histories, and the last one counted for both."""

    def f(a: Tensor) -> Any:
        result = a.sin()
        alias = cut(result)
        alias.sub_(a, alpha=2)
        return result, alias

    def g(a: Tensor) -> Any:
        return f(a)[::-1]

    def gradients(run: Any) -> list[Tensor]:
        found = []
        for which in (0, 1):
            a = torch.linspace(0.3, 0.9, 4, requires_grad=True)
            found += torch.autograd.grad(run(a)[which].sum(), a)
        return found

    for function in (f, g):
        compiled = aheadgrad.compile(function, fallback="error", frontend="trace", backend=backend)
        torch.testing.assert_close(gradients(compiled), gradients(function))
    check(f, vector)


def test_views_of_a_subclass_made_under_no_grad() -> None:
    """Seeds 188 and 432 of subclasses: the first got a gradient, the second lost its history."""

    def parts(a: Tensor) -> Any:
        with torch.no_grad():
            view = a.view_as(a)
        return view.unbind(0)[0], view

    def viewed_again(a: Tensor) -> Any:
        with torch.no_grad():
            view = a[:-1]
        return view.view_as(view)

    def make() -> Given:
        leaf = two.tensor([-0.15, -1.15, -0.6, -0.31], requires_grad=True)
        return [leaf], (leaf,)

    check(parts, make)
    check(viewed_again, make)
