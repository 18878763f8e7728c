"""Higher derivatives and what surrounds them: hooks, saved tensors, freed graphs, threads, modes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from .common import strict
from .plays import Packs, agree, double, ending, grad

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning"),
    pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning"),
    pytest.mark.filterwarnings("ignore:Error detected:UserWarning"),
]


def body(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).tanh() * x.exp()).sin().sum()


def layer(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).tanh() * x


def pair(*shape: int) -> tuple[Tensor, Tensor]:
    return double(*(shape or (3, 3)), seed=1), double(*(shape or (3, 3)), seed=2)


# the graph: kept, freed, used again


def test_retain_graph_at_second_order() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        (g,) = grad(run(x, w), x)
        g.sum().backward(retain_graph=True)
        g.sum().backward(retain_graph=True)
        g.sum().backward()
        return x.grad, w.grad

    agree(body, play)


def test_second_backward_twice_without_retaining() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        (g,) = grad(run(x, w), x)
        g.sum().backward()
        g.sum().backward()

    agree(body, refused=[play])


def test_first_again_after_the_second_freed_it() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        out = run(x, w)
        (g,) = grad(out, x)
        g.sum().backward()
        out.backward()

    agree(body, refused=[play])


def test_create_graph_after_the_graph_was_freed() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        out = run(x, w)
        out.backward()
        return grad(out, x)

    agree(body, refused=[play])


def test_plain_and_differentiable_gradients_of_one_call() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        out = run(x, w)
        plain = torch.autograd.grad(out, [x, w], retain_graph=True)
        (g,) = grad(out, x)
        again = torch.autograd.grad(out, [x, w], retain_graph=True)
        second = grad(g, [x, w])
        return plain, g, again, second, grad(second[0], [x, w], create_graph=False)

    agree(body, play)


def test_create_graph_without_retaining() -> None:
    """`create_graph=True, retain_graph=False` frees what the first order saved."""

    def once(run: Any) -> Any:
        x, w = pair()
        (g,) = grad(run(x, w), x, retain_graph=False)
        return g

    def twice(run: Any) -> Any:
        x, w = pair()
        (g,) = grad(run(x, w), x, retain_graph=False)
        return grad(g, [x, w])

    agree(body, once, refused=[twice])


def test_grad_mode_decides() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        out = run(x, w)
        with torch.no_grad():
            (a,) = torch.autograd.grad(out, x, create_graph=True)
            (b,) = torch.autograd.grad(out, x, retain_graph=True)
        return a, b, grad(a, x)

    agree(body, play)


# saved tensors


@pytest.mark.parametrize("which", [0, 1])
def test_a_saved_tensor_changed_between_first_and_second(which: int) -> None:
    def play(run: Any) -> Any:
        tensors = pair()
        (g,) = grad(run(*tensors), tensors[0])
        with torch.no_grad():
            tensors[which].add_(1)
        return torch.autograd.grad(g.sum(), tensors)

    agree(body, refused=[play])


def test_a_changed_tensor_that_only_the_first_order_needed() -> None:
    def play(run: Any) -> Any:
        x, w = pair(3)
        (g,) = grad(run(x, w), w)
        with torch.no_grad():
            w.add_(1)
        return g, grad(g, x)

    agree(lambda x, w: (x**2 * w).sum(), play)


def test_the_tangent_changed_between_first_and_second() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        t = double(3, 3, seed=5, grad=False)
        (g,) = torch.autograd.grad(run(x, w), x, t, create_graph=True)
        t.add_(1)
        return torch.autograd.grad(g.sum(), x)

    agree(layer, refused=[play])


def test_inputs_changed_after_the_call() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        out = run(x, w)
        with torch.no_grad():
            x.add_(1)
        return grad(out, w)

    agree(body, refused=[play])


def test_inputs_that_nothing_needs_changed_after_the_call() -> None:
    def play(run: Any) -> Any:
        x, w = pair(3)
        out = run(x, w)
        with torch.no_grad():
            w.zero_()
        (g,) = grad(out, x)
        return g, grad(g, x)

    agree(lambda x, w: (x**3).sum() + w.sum(), play)


@pytest.mark.parametrize("where", ["around the call", "around the gradient", "around both"])
def test_saved_tensor_hooks(where: str) -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        first, second = Packs(), Packs()
        if where != "around the gradient":
            with first.on():
                out = run(x, w)
        else:
            out = run(x, w)
        if where != "around the call":
            with second.on():
                (g,) = grad(out, x)
        else:
            (g,) = grad(out, x)
        result = g, grad(g, [x, w])
        return result, first.packed > 0, second.packed > 0, first.unpacked > 0

    agree(body, play)


def test_lossy_saved_tensor_hooks() -> None:
    """What is unpacked is what counts. Only inputs are saved here: eager's rounding is ours."""

    def play(run: Any) -> Any:
        x, w = pair(3)
        with Packs(torch.float16).on():
            out = run(x, w)
        (g,) = grad(out, x)
        return g

    agree(lambda x, w: x * w, play)


def test_hooks_not_allowed() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            (g,) = grad(run(x, w), x)
            return g, grad(g, [x, w])

    agree(body, play)


def test_save_on_cpu() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        with torch.autograd.graph.save_on_cpu():
            (g,) = grad(run(x, w), x)
        return g, grad(g, [x, w])

    agree(body, play)


def test_changing_saved_tensors_allowed() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            out = run(x, w)
            with torch.no_grad():
                w.add_(1)
            (g,) = grad(out, x)
            return g, grad(g, [x, w])

    agree(body, play)


# hooks


def test_tensor_hooks_during_the_second_backward() -> None:
    def play(run: Any) -> Any:
        log: list[Any] = []
        x, w = pair()
        x.register_hook(lambda g: log.append(("x", g.detach().clone(), g.requires_grad)))
        w.register_hook(lambda g: g * 2)
        w.register_post_accumulate_grad_hook(lambda t: log.append(("w", t.grad.detach().clone())))
        h = x * 1
        h.register_hook(lambda g: log.append(("h", g.detach().clone(), g.requires_grad)))
        out = run(h, w)
        out.register_hook(lambda g: log.append(("out", g.detach().clone(), g.requires_grad)))
        (g,) = grad(out, x)
        g.register_hook(lambda t: t * 3)
        g.sum().backward()
        log.sort(key=lambda entry: entry[0])  # between independent tensors the order is the engine's
        return log, x.grad, w.grad

    agree(body, play)


def test_a_hook_that_changes_the_gradient_with_a_graph() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        h = x * 1
        h.register_hook(lambda g: g * w)
        (g,) = grad(run(h, w), x)
        return g, grad(g, [x, w])

    agree(body, play)


def test_node_hooks() -> None:
    def play(run: Any) -> Any:
        log: list[Any] = []
        x, w = pair()
        out = run(x, w)
        out.grad_fn.register_hook(lambda gi, go: log.append([g is not None for g in go]))
        out.grad_fn.register_prehook(lambda go: tuple(None if g is None else g * 2 for g in go))
        (g,) = grad(out, x)
        g.sum().backward()
        return log[0], x.grad, w.grad

    agree(body, play)


def test_retain_grad_of_outputs_and_gradients() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        out = run(x, w)
        out.retain_grad()
        out.sum().backward(create_graph=True)
        g, x.grad, w.grad = x.grad, None, None
        g.retain_grad()
        (g * g).sum().backward()
        return out.grad, g.grad, x.grad, w.grad

    agree(layer, play)


# modes and threads


def test_anomaly_mode() -> None:
    def play(run: Any) -> Any:
        with torch.autograd.detect_anomaly():
            x, w = pair()
            (g,) = grad(run(x, w), x)
            return g, grad(g, [x, w])

    agree(body, play)


def test_anomaly_mode_finds_nan_at_second_order() -> None:
    def play(run: Any) -> Any:
        with torch.autograd.detect_anomaly():
            x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
            (g,) = grad(run(x), x)
            assert not g.isnan().any()
            ((g * 0).sum()).backward()

    def plain(run: Any) -> Any:
        x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        (g,) = grad(run(x), x)
        return g, grad(g * 0, x)

    def fn(x: Tensor) -> Tensor:
        return (x.abs() + 0).pow(1.5).sum()

    agree(fn, plain)
    error = ending(play, strict(fn))
    assert isinstance(error, RuntimeError) and "returned nan values" in str(error), error


def test_orders_in_other_threads() -> None:
    def elsewhere(work: Callable[[], Any]) -> Any:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(ending(lambda _: work(), work)))
        thread.start()
        thread.join()
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    def play(run: Any) -> Any:
        x, w = pair()
        out = run(x, w)
        (g,) = elsewhere(lambda: grad(out, x))
        return g, elsewhere(lambda: grad(g, [x, w], create_graph=False))

    agree(body, play)


def test_many_threads_ask_for_a_new_order_at_once() -> None:
    compiled = strict(body)
    found: list[Any] = [None] * 4

    def work(i: int) -> None:
        def second(_: Any) -> Any:
            x, w = pair()
            (g,) = grad(compiled(x, w), x)
            return grad(g, [x, w], create_graph=False)

        found[i] = ending(second, compiled)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    x, w = pair()
    (g,) = grad(body(x, w), x)
    expected = grad(g, [x, w], create_graph=False)
    for each in found:
        if isinstance(each, Exception):
            raise each
        torch.testing.assert_close(each, expected)


@pytest.mark.parametrize("where", ["forward", "gradient", "second"])
def test_autocast(where: str) -> None:
    def play(run: Any) -> Any:
        x, w = (t.detach().float().requires_grad_() for t in pair())
        with torch.autocast("cpu", torch.bfloat16, enabled=where == "forward"):
            out = run(x, w)
        with torch.autocast("cpu", torch.bfloat16, enabled=where == "gradient"):
            (g,) = grad(out, x)
        with torch.autocast("cpu", torch.bfloat16, enabled=where == "second"):
            return g, grad(g, [x, w])

    agree(lambda x, w: (x @ w).tanh() @ x, play)


def test_deterministic_algorithms() -> None:
    def play(run: Any) -> Any:
        torch.use_deterministic_algorithms(True)
        try:
            x, w = pair()
            (g,) = grad(run(x, w), x)
            return g, grad(g, [x, w])
        finally:
            torch.use_deterministic_algorithms(False)

    agree(lambda x, w: x[torch.tensor([0, 0, 1])] ** 3 * w, play)
