"""Hooks on tensors, nodes and modules during the backward of a compiled call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from .common import strict
from .plays import agree, assert_alike, double, ending

pytestmark = [
    pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning"),
    pytest.mark.filterwarnings("ignore:Error detected:UserWarning"),
]


def layer(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).tanh() * x


def pair(*shape: int) -> tuple[Tensor, Tensor]:
    return double(*(shape or (3, 3)), seed=1), double(*(shape or (3, 3)), seed=2)


def test_hooks_come_and_go() -> None:
    """Added after the first call, removed again, added between forward and backward."""
    compiled = strict(layer)
    x, w = pair()
    for run in (layer, compiled):
        run(x, w).sum().backward()

    def play(run: Any) -> Any:
        found = []
        x.grad = w.grad = None
        handle = w.register_hook(lambda g: g * 2)
        out = run(x, w)
        late = x.register_hook(lambda g: g * 3)
        out.sum().backward()
        found += [x.grad, w.grad]
        handle.remove()
        late.remove()
        x.grad = w.grad = None
        run(x, w).sum().backward()
        found += [x.grad, w.grad]
        x.grad = w.grad = None
        return found

    expected = play(layer)
    for _ in range(2):
        assert_alike(expected, play(compiled))


def test_several_hooks_run_in_order() -> None:
    def play(run: Any) -> Any:
        log: list[str] = []
        x, w = pair()
        out = run(x, w)
        x.register_hook(lambda g: log.append("x, first"))
        x.register_hook(lambda g: log.append("x, second") or g * 2)
        x.register_post_accumulate_grad_hook(lambda t: log.append("x, accumulated"))
        out.register_hook(lambda g: log.append("out, first") or g + 1)
        out.register_hook(lambda g: log.append("out, second") or g * 3)
        out.sum().backward()
        return log, x.grad, w.grad

    agree(layer, play)


def test_a_hook_that_raises() -> None:
    class Mine(ValueError):
        pass

    def on(which: str) -> Callable[[Any], Any]:
        def play(run: Any) -> Any:
            def fail(g: Tensor) -> None:
                raise Mine(which)

            x, w = pair()
            out = run(x, w)
            {"x": x, "out": out}[which].register_hook(fail)
            out.sum().backward()

        return play

    agree(layer, refused=[on("x"), on("out")])


def test_post_accumulate_hooks_of_parameters() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    seen: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda t, name=name: seen.update({name: t.grad.clone()}))

    def play(run: Any) -> Any:
        seen.clear()
        model.zero_grad()
        run(double(4, 3)).sum().backward()
        return dict(sorted(seen.items())), [p.grad for p in model.parameters()]

    agree(model, play)


def test_hooks_of_the_node_that_accumulates() -> None:
    """The way data-parallel training listens: a hook on the node behind a parameter."""

    def play(run: Any) -> Any:
        log: list[str] = []
        x, w = pair()
        nodes = [t.view_as(t).grad_fn.next_functions[0][0] for t in (x, w)]  # type: ignore[union-attr]
        for node, name in zip(nodes, "xw", strict=True):
            node.register_hook(lambda *_, name=name: log.append(name))  # type: ignore[union-attr]
            node.register_prehook(lambda gs: (gs[0] * 2,))  # type: ignore[union-attr]
        run(x, w).sum().backward()
        return sorted(log), x.grad, w.grad

    agree(layer, play)


@pytest.mark.parametrize("mode", ["all", "any"])
def test_multi_grad_hooks(mode: Any) -> None:
    def play(run: Any) -> Any:
        log: list[Any] = []
        x, w = pair()
        a, b = run(x, w)
        if mode == "all":
            register_multi_grad_hook([x, w], lambda gs: log.append([g is None for g in gs]))
            register_multi_grad_hook([a, b], lambda gs: log.append([g is None for g in gs]))
        else:
            register_multi_grad_hook([a, b], lambda g: log.append(g.shape), mode="any")
        a.sum().backward(retain_graph=True)
        (a * b).sum().backward()
        return log

    agree(lambda x, w: ((x @ w).tanh(), x * w), play)


def test_prehooks_of_the_node() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        out = run(x, w)
        handle = out.grad_fn.register_prehook(lambda gs: (gs[0] * 5,))
        out.sum().backward(retain_graph=True)
        handle.remove()
        out.sum().backward()
        return x.grad, w.grad

    agree(layer, play)


def test_backward_in_a_hook() -> None:
    """A hook that runs another compiled forward and backward while the first backward is under way."""

    def play(run: Any) -> Any:
        x, w = pair()
        y = double(3, 3, seed=7)

        def hook(g: Tensor) -> None:
            with torch.enable_grad():
                run(y, g.detach()).sum().backward()

        out = run(x, w)
        out.register_hook(hook)
        out.sum().backward()
        return x.grad, w.grad, y.grad

    agree(layer, play)


def test_what_hooks_see_of_the_modes() -> None:
    def play(run: Any) -> Any:
        log: list[Any] = []
        x, w = (t.detach().float().requires_grad_() for t in pair())

        def look(g: Tensor) -> None:
            log.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), g.requires_grad))

        h = x * 1
        h.register_hook(look)
        with torch.autocast("cpu", torch.bfloat16):
            out = run(h, w).float()
        out.sum().backward(retain_graph=True)
        with torch.autocast("cpu", torch.bfloat16):
            out.sum().backward()
        return log, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    agree(layer, play)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x).tanh()
        return out


def scaled() -> Scaled:
    torch.manual_seed(0)
    return Scaled().double()


@pytest.mark.parametrize("where", ["on the compiled module", "on a module inside"])
@pytest.mark.parametrize("kind", ["full", "pre"])
def test_module_backward_hooks_that_change_gradients(where: str, kind: str) -> None:
    def play(module: Any, run: Any) -> Any:
        module.zero_grad()
        x = double(2, 3)
        run(x).sum().backward()
        return x.grad, [p.grad for p in module.parameters()]

    def hooked() -> Scaled:
        module = scaled()
        target = module.inner if where == "on a module inside" else module
        if kind == "full":
            target.register_full_backward_hook(lambda m, gi, go: tuple(g * 2 for g in gi))
        else:
            target.register_full_backward_pre_hook(lambda m, go: tuple(g * 3 for g in go))
        return module

    eager, other = hooked(), hooked()
    compiled = strict(other)
    for _ in range(2):
        assert_alike(play(eager, eager), ending(lambda run: play(other, run), compiled))


def test_module_backward_hooks_added_after_the_first_call() -> None:
    eager, other = scaled(), scaled()
    compiled = strict(other)

    def play(module: Any, run: Any) -> Any:
        module.zero_grad()
        x = double(2, 3)
        run(x).sum().backward()
        return x.grad, [p.grad for p in module.parameters()]

    assert_alike(play(eager, eager), play(other, compiled))
    handles = [
        m.inner.register_full_backward_hook(lambda m, gi, go: tuple(g * 2 for g in gi))
        for m in (eager, other)
    ]
    assert_alike(play(eager, eager), play(other, compiled))
    for handle in handles:
        handle.remove()
    assert_alike(play(eager, eager), play(other, compiled))


def test_module_backward_hooks_around_a_compiled_module() -> None:
    """Hooks on an uncompiled module that holds a compiled one."""

    def play(inner: nn.Module) -> Any:
        log: list[Any] = []
        outer = nn.Sequential(nn.Flatten(), inner)
        outer.register_full_backward_hook(lambda m, gi, go: log.append((gi[0].clone(), go[0].clone())))
        x = double(2, 3)
        outer(x).sum().backward()
        return log, x.grad

    assert_alike(play(scaled()), ending(play, strict(scaled())))
