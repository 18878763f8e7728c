"""First derivatives: any subset, any tangent, any order of events."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from aheadgrad.testing import Inputs, assert_same

from .common import assert_equal, leaf, leaves, one, same, same_by_default, strict, two

ALL = ("all", "each", "sequence", "twice")


def both(fn: Callable[..., Any], play: Callable[[Callable[..., Any]], Any], **options: Any) -> None:
    """`play(run)` does something with a function; eager and compiled (twice) must give the same."""
    compiled = strict(fn, **options)
    expected = _ending(play, fn)
    for _ in range(2):
        found = _ending(play, compiled)
        assert type(expected) is type(found), (expected, found)
        if isinstance(expected, Exception):
            continue
        assert_equal(expected, found)


def _ending(play: Callable[..., Any], run: Callable[..., Any]) -> Any:
    try:
        return play(run)
    except RuntimeError as error:
        return RuntimeError(str(error).split("\n")[0])


# subsets


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True), (False, False)])
def test_any_subset_of_inputs(wanted: tuple[bool, bool]) -> None:
    def make() -> Inputs:
        return leaves(*(leaf(3, seed=i, grad=g) for i, g in enumerate(wanted)))

    same(lambda a, b: (a * b, a.sin(), b.cos()), make, backward=ALL)


def test_any_subset_of_outputs() -> None:
    def fn(a: Tensor, b: Tensor) -> Any:
        h = a * b
        return h.sin(), h.detach(), b.exp(), (a > 0), a * 3

    same(fn, two(3), backward=ALL)


def test_unused_outputs_leave_none() -> None:
    def play(run: Any) -> Any:
        a, b = leaf(3, seed=1), leaf(3, seed=2)
        run(a, b)[0].sum().backward()
        assert b.grad is None
        return a.grad, b.grad

    both(lambda a, b: (a * 2, a * b), play)


def test_weight_decay_leaves_unused_heads_alone() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Any:
            h = self.body(x).tanh()
            return self.first(h), self.second(h)

    model = Heads()
    compiled = strict(model)
    before = model.second.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    compiled(leaf(2, 3))[0].sum().backward()
    assert model.second.weight.grad is None
    optimizer.step()
    assert torch.equal(model.second.weight, before)


def test_a_dead_branch_with_an_infinite_derivative() -> None:
    def play(run: Any) -> Any:
        x = torch.zeros(3, requires_grad=True)
        run(x)[0].sum().backward()
        assert torch.isfinite(x.grad).all()  # type: ignore[arg-type]
        return x.grad

    both(lambda x: (x * 2, x.sqrt()), play)


def test_independent_outputs_one_by_one() -> None:
    def play(run: Any) -> Any:
        a, b = leaf(3, seed=1), leaf(3, seed=2)
        x, y = run(a, b)
        x.sum().backward()
        y.sum().backward()
        return a.grad, b.grad

    both(lambda a, b: (a.sin() * a, b.exp() * b), play)


def test_dependent_outputs_one_by_one_raise() -> None:
    def play(run: Any) -> Any:
        a = leaf(3)
        x, y = run(a)
        x.sum().backward()
        y.sum().backward()

    def fn(a: Tensor) -> Any:
        h = a.sin()
        return h * h, h.exp()

    both(fn, play)


def test_outputs_that_share_only_an_input_one_by_one() -> None:
    def play(run: Any) -> Any:
        a = leaf(3)
        x, y = run(a)
        x.sum().backward()
        y.sum().backward()
        return a.grad

    both(lambda a: (a.sin() * a, a.exp() * a), play)


def test_retain_graph_and_again() -> None:
    def play(run: Any) -> Any:
        a = leaf(3)
        out = run(a).sum()
        out.backward(retain_graph=True)
        out.backward(retain_graph=True)
        out.backward()
        return a.grad

    both(lambda a: a.sin() * a, play)


@pytest.mark.parametrize("fn", [lambda a: a.sin() * a, lambda a: a * 2, lambda a: a + 1, lambda a: a.exp()])
def test_backward_twice_without_retaining(fn: Callable[[Tensor], Tensor]) -> None:
    def play(run: Any) -> Any:
        a = leaf(3)
        out = run(a)
        out.backward(torch.ones(3))
        out.backward(torch.ones(3))
        return a.grad

    both(fn, play)


def test_gradients_accumulate() -> None:
    def play(run: Any) -> Any:
        a = leaf(3)
        for _ in range(3):
            run(a).sum().backward()
        return a.grad

    both(lambda a: a.sin() * a, play)


# tangents


@pytest.mark.parametrize(
    "tangent",
    [
        lambda: torch.arange(6.0).view(2, 3),
        lambda: torch.arange(6.0).view(3, 2).t(),
        lambda: torch.ones(1).expand(2, 3),
        lambda: torch.arange(24.0).view(4, 6)[::2, ::2],
        lambda: torch.ones(()).expand(2, 3),
        lambda: torch.zeros(2, 3),
        lambda: torch.arange(12.0).view(2, 6)[:, 3:],
    ],
)
def test_tangents_of_any_layout(tangent: Callable[[], Tensor]) -> None:
    def play(run: Any) -> Any:
        a, b = leaf(2, 3, seed=1), leaf(3, 3, seed=2)
        run(a, b).backward(tangent())
        assert a.grad is not None
        return a.grad, b.grad, a.grad.stride()

    both(lambda a, b: (a @ b).sin().view(2, 3), play)


def test_a_channels_last_tangent() -> None:
    def play(run: Any) -> Any:
        a = leaf(2, 3, 4, 4)
        run(a).backward(
            torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)).to(
                memory_format=torch.channels_last
            )
        )
        return a.grad, a.grad.stride()  # type: ignore[union-attr]

    both(lambda a: torch.nn.functional.avg_pool2d(a.sin(), 1), play)


def test_many_layouts_of_tangents() -> None:
    def play(run: Any) -> Any:
        found = []
        for n in range(12):
            a = leaf(2, 3)
            run(a).backward(torch.arange(6.0 * (n + 1)).view(2, 3 * (n + 1))[:, :: n + 1])
            found.append(a.grad)
        return found

    both(lambda a: a.sin(), play)


def test_a_tangent_of_the_wrong_shape_raises() -> None:
    def play(run: Any) -> Any:
        run(leaf(3)).backward(torch.ones(2))

    both(lambda a: a.sin(), play)


def test_complex_tangents() -> None:
    def play(run: Any) -> Any:
        a = leaf(3, dtype=torch.complex64)
        run(a).backward(torch.full((3,), 1 + 2j))
        return a.grad

    both(lambda a: a * a + a.conj(), play)


def test_the_tangent_is_not_changed() -> None:
    compiled = strict(lambda a: (a * 1).add_(1).mul_(2))
    t = torch.ones(3)
    compiled(leaf(3)).backward(t)
    assert torch.equal(t, torch.ones(3))


def test_the_gradient_is_not_the_tangent() -> None:
    def play(run: Any) -> Any:
        a = leaf(3)
        t = torch.ones(3)
        (g,) = torch.autograd.grad(run(a), a, t)
        t.zero_()
        return g.clone()

    both(lambda a: a + 1, play)
    both(lambda a: a.view(3) * 1.0, play)


# autograd.grad


def test_grad_of_a_subset() -> None:
    def play(run: Any) -> Any:
        a, b = leaf(3, seed=1), leaf(3, seed=2)
        out = run(a, b)
        result = torch.autograd.grad(out[0].sum(), [b])
        assert a.grad is None
        assert b.grad is None
        return result

    both(lambda a, b: (a * b, a.sin()), play)


def test_grad_of_unused() -> None:
    def play(run: Any) -> Any:
        a, b = leaf(3, seed=1), leaf(3, seed=2)
        return torch.autograd.grad(run(a, b)[1].sum(), [a, b], allow_unused=True)

    both(lambda a, b: (a * b, a.sin()), play)

    def refused(run: Any) -> Any:
        a, b = leaf(3, seed=1), leaf(3, seed=2)
        return torch.autograd.grad(run(a, b)[1].sum(), [a, b])

    both(lambda a, b: (a * b, a.sin()), refused)


def test_grad_with_several_outputs_and_tangents() -> None:
    def play(run: Any) -> Any:
        a, b = leaf(3, seed=1), leaf(3, seed=2)
        x, y = run(a, b)
        return torch.autograd.grad(
            [x, y], [b, a], [torch.ones(3), torch.full((3,), 2.0)], materialize_grads=True
        )

    both(lambda a, b: (a * b, a.sin()), play)


def test_is_grads_batched() -> None:
    def play(run: Any) -> Any:
        a = leaf(3)
        return torch.autograd.grad(run(a), a, torch.eye(3), is_grads_batched=True)

    both(lambda a: a.sin() * a, play)


def test_backward_with_inputs() -> None:
    def play(run: Any) -> Any:
        a, b = leaf(3, seed=1), leaf(3, seed=2)
        run(a, b).sum().backward(inputs=[a])
        return a.grad, b.grad

    both(lambda a, b: a * b, play)


def test_grad_with_respect_to_a_returned_intermediate() -> None:
    def fn(a: Tensor) -> Any:
        h = a.sin()
        return h, (h * h).sum()

    def play(run: Any) -> Any:
        h, loss = run(leaf(3))
        return torch.autograd.grad(loss, h)

    both(fn, play)


def test_grad_through_non_leaf_inputs() -> None:
    def play(run: Any) -> Any:
        a = leaf(3)
        b = a * 2
        b.retain_grad()
        run(b, b.detach()).sum().backward()
        return a.grad, b.grad

    both(lambda b, c: b * c, play)


# hooks


def test_hooks_on_inputs_outputs_and_parameters() -> None:
    def play(run: Any) -> Any:
        log: list[Tensor] = []
        a, b = leaf(3, seed=1), leaf(3, seed=2)
        a.register_hook(lambda g: g * 2)
        b.register_post_accumulate_grad_hook(lambda t: log.append(t.grad.clone()))
        h = a * 1
        h.register_hook(lambda g: log.append(g.clone()))
        out = run(h, b)
        out[0].register_hook(lambda g: g * 3)
        out[1].register_hook(lambda g: log.append(g.clone()))
        out[0].retain_grad()
        (out[0].sum() + out[1].sum()).backward()
        return log, a.grad, b.grad, out[0].grad

    both(lambda a, b: (a * b, a.sin() + b), play)


def test_hooks_added_after_the_first_call() -> None:
    compiled = strict(lambda a: a.sin())
    a = leaf(3)
    compiled(a).sum().backward()
    seen: list[Tensor] = []
    a.register_hook(lambda g: seen.append(g))
    compiled(a).sum().backward()
    assert len(seen) == 1


def test_a_hook_added_after_the_forward() -> None:
    def play(run: Any) -> Any:
        a = leaf(3)
        out = run(a)
        a.register_hook(lambda g: g * 5)
        out.sum().backward()
        return a.grad

    both(lambda a: a.sin(), play)


def test_node_hooks() -> None:
    def play(run: Any) -> Any:
        log: list[Any] = []
        a = leaf(3)
        out = run(a)
        out.grad_fn.register_prehook(lambda gs: (gs[0] * 2,))
        out.grad_fn.register_hook(lambda gi, go: log.append(go[0].clone()))
        out.sum().backward()
        return a.grad, log

    both(lambda a: a.sin(), play)


def test_multi_grad_hooks() -> None:
    def play(run: Any) -> Any:
        log: list[Any] = []
        a, b = leaf(3, seed=1), leaf(3, seed=2)
        x, y = run(a, b)
        torch.autograd.graph.register_multi_grad_hook(
            [x, y], lambda gs: log.append(len([g for g in gs if g is not None]))
        )
        torch.autograd.graph.register_multi_grad_hook([a, b], lambda gs: log.append([g is None for g in gs]))
        x.sum().backward()
        return log

    both(lambda a, b: (a.sin(), b.sin()), play)


def test_retain_grad_on_outputs() -> None:
    def play(run: Any) -> Any:
        out = run(leaf(3))
        out[0].retain_grad()
        out[1].retain_grad()
        (out[0] * out[1]).sum().backward()
        return out[0].grad, out[1].grad

    both(lambda a: (a.sin(), a.cos().view(3)), play)


def test_optimizer_step_in_the_hook() -> None:
    def play(run: Any) -> Any:
        w = leaf(3)
        optimizer = torch.optim.SGD([w], lr=0.1)

        def hook(t: Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()

        w.register_post_accumulate_grad_hook(hook)
        for _ in range(3):
            run(w).sum().backward()
        return w.detach().clone(), w.grad

    both(lambda w: w.sin() * w, play)


# saved tensors


def test_a_saved_input_changed_before_backward_raises() -> None:
    def play(run: Any) -> Any:
        a, b = leaf(3, seed=1), leaf(3, seed=2, grad=False)
        out = run(a, b).sum()
        b.add_(1)
        out.backward()
        return a.grad

    both(lambda a, b: a * b, play)
    both(lambda a, b: a * b.view(3, 1).squeeze(1), play)
    both(lambda a, b: a + b, play)


def test_a_saved_output_changed_before_backward_raises() -> None:
    def play(run: Any) -> Any:
        a = leaf(3)
        out = run(a)
        with torch.no_grad():
            out.add_(1)
        out.sum().backward()
        return a.grad

    both(lambda a: a.exp(), play)
    both(lambda a: a.sin(), play)
    both(lambda a: a.exp().view(3, 1), play)


def test_a_parameter_stepped_before_backward_raises() -> None:
    def play(run: Any) -> Any:
        a, w = leaf(2, 3), leaf(3, 3, seed=1)
        out = run(a, w).sum()
        with torch.no_grad():
            w.sub_(0.1)
        out.backward()

    both(lambda a, w: a @ w, play)


def test_saved_tensors_hooks_around_the_call() -> None:
    compiled = strict(lambda a, b: (a * b).exp() * a)
    packed: list[Tensor] = []
    unpacked: list[Tensor] = []

    def pack(t: Tensor) -> Any:
        packed.append(t)
        return t.double()

    def unpack(t: Tensor) -> Tensor:
        unpacked.append(t)
        return t.float()

    a, b = leaf(3, seed=1), leaf(3, seed=2)
    compiled(a, b)
    with saved_tensors_hooks(pack, unpack):
        out = compiled(a, b)
    assert packed
    out.sum().backward()
    assert len(unpacked) == len(packed)
    found = a.grad, b.grad
    a.grad = b.grad = None
    ((a * b).exp() * a).sum().backward()
    torch.testing.assert_close((a.grad, b.grad), found)


def test_hooks_are_on_while_it_is_compiled() -> None:
    compiled = strict(lambda a: a.exp())
    packed: list[Tensor] = []
    a = leaf(3)
    with saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        out = compiled(a)
    out.sum().backward()
    assert len(packed) == 1
    assert torch.equal(a.grad, a.exp())  # type: ignore[arg-type]


def test_save_on_cpu() -> None:
    compiled = strict(lambda a: a.exp() * a)

    def play(run: Any) -> Any:
        a = leaf(3)
        with torch.autograd.graph.save_on_cpu():
            out = run(a)
        out.sum().backward()
        return a.grad

    assert_equal(play(lambda a: a.exp() * a), play(compiled))


def test_saved_tensors_not_allowed() -> None:
    def play(run: Any) -> Any:
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            a = leaf(3)
            run(a).sum().backward()
            return a.grad

    both(lambda a: a.exp(), play)


# checkpoint


def test_checkpoint_around() -> None:
    def play(run: Any) -> Any:
        torch.manual_seed(0)
        a, b = leaf(3, seed=1), leaf(3, seed=2)
        checkpoint(run, a, b, use_reentrant=False).sum().backward()
        return a.grad, b.grad

    both(lambda a, b: (a * b).exp() * a, play)
    both(lambda a, b: torch.dropout((a * b).exp(), 0.5, True), play)


def test_reentrant_checkpoint_around() -> None:
    def play(run: Any) -> Any:
        a, b = leaf(3, seed=1), leaf(3, seed=2)
        checkpoint(run, a, b, use_reentrant=True).sum().backward()
        return a.grad, b.grad

    both(lambda a, b: (a * b).exp() * a, play)


def test_checkpoint_inside() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        return checkpoint(lambda x: (x * b).exp() * x, a, use_reentrant=False).sin()  # type: ignore[no-any-return]

    same(fn, two(3))


def test_checkpoint_inside_with_dropout() -> None:
    def fn(a: Tensor) -> Tensor:
        return checkpoint(lambda x: torch.dropout(x.exp(), 0.5, True), a, use_reentrant=False).sin()  # type: ignore[no-any-return]

    same(fn, one(10))


def test_checkpoint_sequential_in_a_module() -> None:
    from torch.utils.checkpoint import checkpoint_sequential

    layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    same(lambda x: checkpoint_sequential(layers, 2, x, use_reentrant=False), one(2, 3))


def test_reentrant_checkpoint_inside() -> None:
    def fn(a: Tensor) -> Tensor:
        return checkpoint(lambda x: x.exp() * x, a, use_reentrant=True).sin()  # type: ignore[no-any-return]

    same_by_default(fn, one(3))


# other surroundings


def test_backward_in_another_thread() -> None:
    def play(run: Any) -> Any:
        a = leaf(3)
        out = run(a).sum()
        thread = threading.Thread(target=out.backward)
        thread.start()
        thread.join()
        return a.grad

    both(lambda a: a.exp() * a, play)


def test_call_in_another_thread() -> None:
    def play(run: Any) -> Any:
        a = leaf(3)
        found: list[Tensor] = []
        thread = threading.Thread(target=lambda: found.append(run(a)))
        thread.start()
        thread.join()
        found[0].sum().backward()
        return a.grad

    both(lambda a: a.exp() * a, play)


def test_a_new_backward_pattern_in_another_thread() -> None:
    compiled = strict(lambda a, b: (a * b, a.exp() * b))
    a, b = leaf(3, seed=1), leaf(3, seed=2)
    outs = compiled(a, b)
    thread = threading.Thread(target=outs[1].sum().backward)
    thread.start()
    thread.join()
    torch.testing.assert_close(b.grad, a.exp())


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
def test_anomaly_mode() -> None:
    def play(run: Any) -> Any:
        with torch.autograd.detect_anomaly():
            a = leaf(3)
            run(a).sum().backward()
            return a.grad

    both(lambda a: a.exp() * a, play)


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.filterwarnings("ignore:Error detected:UserWarning")
def test_anomaly_mode_finds_nan() -> None:
    def play(run: Any) -> Any:
        with torch.autograd.detect_anomaly():
            a = torch.zeros(3, requires_grad=True)
            (run(a) * 0).sum().backward()
            return a.grad

    both(lambda a: a.sqrt(), play)


def test_backward_under_no_grad() -> None:
    def play(run: Any) -> Any:
        a = leaf(3)
        out = run(a).sum()
        with torch.no_grad():
            out.backward()
        return a.grad, a.grad.requires_grad  # type: ignore[union-attr]

    both(lambda a: a.exp() * a, play)


def test_two_calls_one_backward() -> None:
    def play(run: Any) -> Any:
        a = leaf(3)
        (run(run(a)) * run(a)).sum().backward()
        return a.grad

    both(lambda a: a.exp() * a, play)


def test_gradients_of_the_same_tensor_given_twice() -> None:
    def play(run: Any) -> Any:
        a = leaf(3)
        run(a, a).sum().backward()
        return a.grad

    both(lambda a, b: a * 2 + b.sin(), play)


def test_grad_is_a_sum_of_expanded_parts() -> None:
    same(lambda a: (a.expand(4, 3), a.sum().expand(2, 2), a.view(1, 3).repeat(2, 1)), one(3), backward=ALL)


def test_outputs_require_grad_only_through_a_closure() -> None:
    w = leaf(3)
    compiled = strict(lambda x: (x * 2, x * w))
    plain, graded = compiled(torch.ones(3))
    assert not plain.requires_grad
    assert graded.requires_grad
    graded.sum().backward()
    assert torch.equal(w.grad, torch.ones(3))  # type: ignore[arg-type]


def test_integer_outputs_between_float_ones() -> None:
    same(lambda a: (a.sort(), a.topk(2), a.max(0), a.argsort()), one(5), backward=ALL)


def test_writes_into_outputs_before_backward() -> None:
    def play(run: Any) -> Any:
        a = leaf(3)
        out = run(a)
        out.mul_(2)
        out[0] = 0
        out.sum().backward()
        return a.grad, out

    both(lambda a: a.sin(), play)


def test_requires_grad_set_inside() -> None:
    def fn(x: Tensor) -> Any:
        x.requires_grad_()
        return x * 2

    assert_same(fn, strict(fn), lambda: Inputs((x := leaf(3, grad=False),), leaves=[x]))


def test_leaf_made_inside_and_returned() -> None:
    def fn(x: Tensor) -> Any:
        w = torch.ones(3, requires_grad=True)
        return w, x * w

    def play(run: Any) -> Any:
        x = leaf(3)
        w, out = run(x)
        assert w.is_leaf
        out.sum().backward()
        return w.grad, x.grad

    both(fn, play)


@pytest.mark.parametrize("changed", [0, 1])
def test_a_saved_result_changed_that_only_another_output_needs(changed: int) -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        h = x * 2
        return h.tanh(), h.exp()

    def outcome(run: Any, k: int) -> Any:
        x = torch.ones(3, requires_grad=True)
        outs = run(x)
        with torch.no_grad():
            outs[changed].mul_(2)
        try:
            return torch.autograd.grad(outs[k].sum(), x)[0]
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            return None

    compiled = strict(fn)
    for k in (0, 1):
        expected, found = outcome(fn, k), outcome(compiled, k)
        assert (expected is None) == (found is None) == (k == changed)
        if expected is not None:
            torch.testing.assert_close(found, expected)
