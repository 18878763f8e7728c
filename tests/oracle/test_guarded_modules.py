"""Modules that change between calls, in every way there is."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .common import assert_equal, leaf, strict


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


class Other(Net):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


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
    "class changed": lambda net: setattr(net, "__class__", Other),
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


def test_a_module_that_counts_its_calls_is_compiled_once() -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * 2

    net = Counting(3, 3)
    compiled = strict(net)
    for _ in range(12):
        compiled(leaf(2, 3))
        net.steps = 1  # type: ignore[assignment]
    assert len(compiled.entries) == 1


def test_a_method_is_replaced_on_its_class() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.scale(x)

        def scale(self, x: Tensor) -> Tensor:
            return x * 2

    net = Scaled()
    compiled = strict(net)
    assert_equal(compiled(leaf(3)), leaf(3) * 2)
    Scaled.scale = lambda self, x: x * 3  # type: ignore[method-assign]
    assert_equal(compiled(leaf(3)), leaf(3) * 3)
