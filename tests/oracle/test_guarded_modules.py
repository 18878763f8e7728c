"""Modules that change between calls, in every way there is."""

from __future__ import annotations

import collections
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .common import assert_equal, leaf, plays, strict


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.rest = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3), nn.Linear(3, 3))
        self.more = nn.ModuleList()
        self.register_buffer("scale", torch.ones(3))
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.rest(self.first(x)) * self.scale * self.factor
        for module in self.more:
            x = module(x)
        return x + self.extra if hasattr(self, "extra") else x  # type: ignore[operator]


def other_parameter(net: Net) -> None:
    net.first.weight = nn.Parameter(torch.full((3, 3), 0.5))


def hooked(net: Net) -> None:
    net.first.register_forward_hook(lambda module, args, out: out * 2)


def new_forward(net: Net) -> None:
    net.first.forward = lambda x: x * 5  # type: ignore[method-assign]


def new_buffer(net: Net) -> None:
    net.register_buffer("extra", torch.ones(3))


def tied(net: Net) -> None:
    net.rest[2].weight = net.first.weight


def swapped_data(net: Net) -> None:
    net.first.weight.data = torch.ones(3, 3).t() * torch.arange(3.0)


def same_memory(t: Tensor, view: Callable[[Tensor], Tensor]) -> None:
    before = t.data_ptr()
    t.data = view(t.data)
    assert t.data_ptr() == before


def switch(name: str, value: Any) -> Callable[[Net], None]:
    def change(net: Net) -> None:
        *path, last = name.split(".")
        setattr(functools.reduce(getattr, path, net), last, value)

    return change


CHANGES: dict[str, Callable[[Net], Any]] = {
    "parameter replaced": other_parameter,
    "parameter frozen": lambda net: net.first.weight.requires_grad_(False),
    "all frozen": lambda net: net.requires_grad_(False),
    "data swapped": swapped_data,
    "data of one row": lambda net: setattr(net.first.bias, "data", torch.ones(1)),
    "data seen in another order": lambda net: same_memory(net.first.weight, Tensor.t),
    "data seen in part": lambda net: same_memory(net.first.bias, lambda t: t[:1]),
    "data seen with more dimensions": lambda net: same_memory(net.scale, lambda t: t[None]),
    "data seen with another step": lambda net: same_memory(net.scale, lambda t: t[:1].expand(3)),
    "data seen as integers": lambda net: same_memory(net.scale, lambda t: t.view(torch.int32)),
    "double": lambda net: net.double(),
    "eval": lambda net: net.eval(),
    "eval of the dropout": lambda net: net.rest[0].eval(),
    "eval of the norm": lambda net: net.rest[1].eval(),
    "submodule replaced": switch("first", nn.Linear(3, 3, bias=False)),
    "submodule in a sequence": lambda net: net.rest.__setitem__(2, nn.Identity()),
    "submodule appended": lambda net: net.rest.append(nn.ReLU()),
    "submodule in an empty list": lambda net: net.more.append(nn.Linear(3, 3)),
    "submodule deleted": lambda net: net.rest.__delitem__(2),
    "bias removed": switch("first.bias", None),
    "parameter put into its table": lambda net: net.first._parameters.update(
        weight=nn.Parameter(torch.full((3, 3), 0.5))
    ),
    "submodule put into an empty table": lambda net: net.more._modules.update({"0": nn.ReLU()}),
    "attribute put into its table": lambda net: vars(net).update(factor=3.0),
    "forward hook": hooked,
    "pre hook": lambda net: net.rest.register_forward_pre_hook(lambda module, args: (args[0] * 3,)),
    "hook of the root": lambda net: net.register_forward_hook(lambda module, args, out: out * 2),
    "buffer reassigned": switch("scale", torch.full((3,), 2.0)),
    "buffer of another shape": switch("scale", torch.full((1,), 2.0)),
    "buffer changed in place": lambda net: net.scale.mul_(3),
    "buffer registered": new_buffer,
    "attribute": switch("factor", 3.0),
    "attribute of a library's module": switch("rest.0.p", 0.25),
    "forward replaced": new_forward,
    "weights tied": tied,
    "parametrized": lambda net: parametrize.register_parametrization(net.first, "weight", nn.Tanh()),
    "weight norm": lambda net: nn.utils.parametrizations.weight_norm(net.first),
    "loaded": lambda net: net.load_state_dict({k: v * 2 for k, v in net.state_dict().items()}),
    "loaded by assignment": lambda net: net.load_state_dict(
        {k: v * 2 for k, v in net.state_dict().items()}, assign=True
    ),
    "a step": lambda net: torch.optim.SGD(net.parameters(), 0.1).step(),
}


def both(net: Net, compiled: Any, x: Tensor, calls: int) -> None:
    """Eager on a copy and compiled, with all state and gradients."""
    for _ in range(calls):
        other = copy.deepcopy(net)
        results = []
        for run, module in ((other, other), (compiled, net)):
            torch.manual_seed(0)
            try:
                out = run(x.to(next(module.parameters()).dtype))
                if out.requires_grad:
                    out.sum().backward()
            except RuntimeError as error:
                results.append(type(error))
                continue
            grads = [p.grad for p in module.parameters()]
            results.append((out, grads, list(module.buffers()), list(module.parameters())))
        assert_equal(results[0], results[1])
        net.zero_grad()


@pytest.mark.parametrize("calls", [1, 12])
@pytest.mark.parametrize("name", CHANGES)
def test_a_module_is_changed(name: str, calls: int) -> None:
    torch.manual_seed(0)
    net = Net()
    compiled = strict(net, max_entries=32)
    x = leaf(4, 3, grad=False)
    both(net, compiled, x, calls)
    CHANGES[name](net)
    both(net, compiled, x, calls)
    net.train()
    both(net, compiled, x, calls)


def test_hooks_come_and_go() -> None:
    torch.manual_seed(0)
    net = Net()
    compiled = strict(net, max_entries=32)
    x = leaf(4, 3, grad=False)
    for _ in range(3):
        both(net, compiled, x, 10)
        handle = net.rest.register_forward_hook(lambda module, args, out: out * 2)
        both(net, compiled, x, 10)
        handle.remove()
    assert len(compiled.entries) == 4


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.ParameterList([torch.ones(1)])
        self.mixed = nn.ParameterList([torch.ones(1), 2.0])
        self.register_buffer("b", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        for p in self.p:
            x = x * p + 1
        x = x * sum(b.sum() for b in self.buffers())
        return x * self.mixed[1] * sum(p.sum() for p in self.parameters())


def test_parameters_and_buffers_added_later() -> None:
    def play(compile: Any) -> Iterator[Any]:
        module = Chain()
        fast = compile(module)
        yield fast(torch.ones(1))
        module.p.append(nn.Parameter(torch.full((1,), 3.0)))
        yield fast(torch.ones(1))
        module.w = nn.Parameter(torch.ones(1))
        yield fast(torch.ones(1))
        module.register_buffer("b2", torch.ones(1))
        yield fast(torch.ones(1))
        module.mixed[1] = 5.0
        yield fast(torch.ones(1))
        del module.b
        yield fast(torch.ones(1))

    plays(play, frontend="trace", fallback="error")


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.d = nn.ModuleDict({"a": nn.Hardtanh(), "b": nn.Softplus()})

    def forward(self, x: Tensor) -> Tensor:
        for module in self.d.values():
            x = module(x)
        return x


def test_the_order_of_keys() -> None:
    def play(compile: Any) -> Iterator[Any]:
        module = Branches()
        plain, ordered = {"a": 1.0, "b": 2.0}, collections.OrderedDict(a=1.0, b=2.0)
        fasts = [
            compile(module),
            compile(lambda x: x * next(iter(plain.values()))),
            compile(lambda x: x * next(iter(ordered.values()))),
        ]
        x = torch.full((1,), 3.0)
        yield from (fast(x) for fast in fasts)
        module.d["a"] = module.d.pop("a")
        plain["a"] = plain.pop("a")
        ordered.move_to_end("a")
        yield from (fast(x) for fast in fasts)

    plays(play, frontend="trace", fallback="error")


def test_hooks_for_all_modules() -> None:
    def play(compile: Any) -> Iterator[Any]:
        fast = compile(nn.Identity())
        yield fast(torch.ones(1))
        handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 5)
        try:
            yield fast(torch.ones(1))
        finally:
            handle.remove()
        yield fast(torch.ones(1))

    plays(play, frontend="trace", fallback="error")


def test_an_attribute_in_front_of_a_parameter() -> None:
    def play(compile: Any) -> Iterator[Any]:
        torch.manual_seed(0)
        module = nn.Linear(1, 1, bias=False)
        fast = compile(module)
        x = torch.ones(1, 1)
        yield fast(x)
        object.__setattr__(module, "weight", torch.full((1, 1), 5.0))
        yield fast(x)
        object.__delattr__(module, "weight")
        yield fast(x)

    plays(play, frontend="trace", fallback="error")


def test_a_graph_module_is_recompiled() -> None:
    def play(compile: Any) -> Iterator[Any]:
        module = torch.fx.symbolic_trace(nn.Sequential(nn.Identity(), nn.ReLU()))
        fast = compile(module)
        x = torch.full((1,), -2.0)
        yield fast(x)
        node = next(n for n in module.graph.nodes if n.target == "1")
        node.op, node.target = "call_function", torch.square
        module.recompile()
        yield fast(x)

    plays(play, frontend="trace", fallback="error")
