"""A compiled module is the original in everything but the call."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import aheadgrad


class Own(nn.Module):
    """Overrides what a module can override."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.extra: Any = "start"
        self.cleared = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * 2

    def train(self, mode: bool = True) -> Own:
        super().train(mode)
        self.norm.eval()
        return self

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.cleared += 1
        super().zero_grad(set_to_none)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter([self.norm.weight])

    def __len__(self) -> int:
        return 3

    def __getitem__(self, key: int) -> int:
        return key + 1

    def __iter__(self) -> Iterator[int]:
        return iter((1, 2))

    def __contains__(self, value: object) -> bool:
        return value == 7


def _compiled(module: nn.Module) -> Any:
    return aheadgrad.compile(module, fallback="error", frontend="trace")


def test_methods_that_the_class_overrides() -> None:
    x = torch.randn(4, 2)
    seen = []
    for make in (lambda m: m, _compiled):
        torch.manual_seed(0)
        original = Own()
        m = make(original)
        results: list[Any] = [m.train() is m, original.norm.training, original.training]
        m(x)
        results += [m.norm.running_mean.tolist(), list(m.state_dict()), len(m), m[4], list(m), 7 in m, 8 in m]
        m.load_state_dict({**m.state_dict(), "_extra_state": "loaded"})
        m.zero_grad()
        results += [original.extra, original.cleared, len(list(m.parameters())), m.eval() is m, repr(m)]
        results += [isinstance(m, Own), m.__class__ is Own, bool(m), sorted(dir(m)) == sorted(dir(original))]
        seen.append(results)
    assert seen[0] == seen[1]


def test_methods_set_on_the_instance() -> None:
    original = nn.Linear(2, 2)
    m = _compiled(original)
    original.extra_repr = lambda: "mine"  # type: ignore[method-assign]
    original.state_dict = lambda *args, **kwargs: {"only": 1}  # type: ignore[method-assign]
    assert "mine" in repr(m)
    assert m.state_dict() == {"only": 1}


def test_apply_gives_the_original() -> None:
    original = nn.Linear(2, 2)
    m = _compiled(original)
    found: list[nn.Module] = []
    assert m.apply(found.append) is m
    assert len(found) == 1 and isinstance(found[0], nn.Linear)


def test_casts_return_the_compiled_module() -> None:
    m = _compiled(nn.Linear(2, 2))
    x = torch.ones(1, 2)
    m(x)
    assert m.to(torch.float64) is m
    assert m.double().requires_grad_(False).cpu() is m
    assert m(x.double()).dtype is torch.float64
    assert len(m.entries) == 2


def test_containers() -> None:
    first, second = nn.Linear(2, 2), nn.ReLU()
    m = _compiled(nn.Sequential(first, second))
    assert len(m) == 2
    assert m[0] is first
    assert list(m) == [first, second]
    assert type(m[:1]) is nn.Sequential
    x = torch.randn(1, 2)
    m(x)
    m.append(nn.Tanh())
    assert len(m) == 3
    assert torch.equal(m(x), second(first(x)).tanh())


def test_forward_is_without_hooks_as_in_eager() -> None:
    original = nn.Linear(2, 2)
    m = _compiled(original)
    x = torch.ones(1, 2)
    expected = original(x)
    m.register_forward_hook(lambda mod, args, out: out * 5)
    assert torch.equal(m(x), expected * 5)
    assert torch.equal(m.forward(x), expected)


def test_inside_another_module() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + 1

    torch.manual_seed(0)
    inner = Own()
    plain, outer = Outer(inner), Outer(_compiled(inner))
    assert list(plain.state_dict()) == list(outer.state_dict())
    assert [n for n, _ in plain.named_parameters()] == [n for n, _ in outer.named_parameters()]
    assert list(plain.modules())[2:] == list(outer.modules())[2:]
    outer.train()
    assert not inner.norm.training
    x = torch.randn(4, 2)
    for run in (outer, _compiled(outer)):
        assert torch.equal(run(x), plain(x))
    outer.load_state_dict(plain.state_dict())
    optimizer = torch.optim.SGD(outer.parameters(), lr=0.1)
    before = inner.norm.bias.detach().clone()
    outer(x).sum().backward()
    optimizer.step()
    assert not torch.equal(inner.norm.bias, before)
    assert outer.double() is outer
    assert inner.norm.weight.dtype is torch.float64


def test_parametrized_through_the_compiled_module() -> None:
    class Twice(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w * 2

    original = nn.Linear(2, 2, bias=False)
    m = _compiled(original)
    x = torch.ones(1, 2)
    before = m(x)
    parametrize.register_parametrization(m, "weight", Twice())
    assert parametrize.is_parametrized(original)
    assert torch.equal(m(x), before * 2)


def test_names_of_the_user_come_first() -> None:
    class Names(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.entries = [1]
            self.source = nn.Parameter(torch.ones(1))

        def explain(self) -> str:
            return "mine"

        def forward(self, x: Tensor) -> Tensor:
            return x * self.source * self.entries[0]

    original = Names()
    m = _compiled(original)
    assert m(torch.ones(1)).item() == 1.0
    assert m.entries == [1]
    assert m.source is original.source
    assert m.explain() == "mine"
    m.entries = [4]
    assert m(torch.ones(1)).item() == 4.0


def test_copies() -> None:
    original = nn.Linear(2, 2)
    m = _compiled(original)
    x = torch.ones(1, 2)
    expected = m(x)
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert type(other).__name__ == type(m).__name__
        assert torch.equal(other(x), expected)
        assert len(other.entries) == 1
        other.weight.data.zero_()
        assert torch.equal(m(x), expected)
    shallow = copy.copy(m)
    assert shallow.weight is m.weight
    assert torch.equal(shallow(x), expected)
    assert torch.equal(torch.func.functional_call(m, {"weight": torch.zeros(2, 2)}, (x,))[0], original.bias)


def test_torch_compile_around_a_compiled_module() -> None:
    original = nn.Linear(2, 2)
    outer = torch.compile(_compiled(original), backend="eager")
    x = torch.ones(1, 2)
    for _ in range(2):
        assert torch.equal(outer(x), original(x))


def test_methods_are_bound_and_have_signatures() -> None:
    original = Own()
    m = _compiled(original)
    assert m.train.__self__ is m
    assert inspect.signature(m.train) == inspect.signature(original.train)
