"""Functions and modules whose first and second derivatives are checked numerically.

Each case has a function or module and its inputs, made anew at each use. Inputs are in float64, small,
and away from kinks and ties. `tests/test_gradgradcheck.py` checks the cases, each of them first in eager,
so that one that eager itself cannot differentiate twice does not stay in the list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Case:
    """`target(*args)`, differentiated with respect to the arguments and the parameters of a module."""

    target: Callable[..., Any]
    args: tuple[Tensor, ...]

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return tuple(self.target.parameters()) if isinstance(self.target, nn.Module) else ()

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (*self.args, *self.parameters)

    def over(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A function of all `inputs`; numerical checks change parameters where they are."""
        count = len(self.args)
        return lambda *inputs: run(*inputs[:count])


CASES: dict[str, Callable[[], Case]] = {}


def real(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def complex_(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.complex128).requires_grad_()


def spread(*shape: int, seed: int = 0) -> Tensor:
    """Values at least 0.4 apart from each other and 0.2 from zero, shuffled: no ties, no kinks at zero."""
    count = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(seed)
    values = (torch.arange(count, dtype=torch.float64) - count // 2 + 0.5) * 0.4
    return values[torch.randperm(count, generator=generator)].view(shape).requires_grad_()


def positive(*shape: int, seed: int = 0) -> Tensor:
    return (real(*shape, seed=seed).detach().abs() + 0.5).requires_grad_()


def definite(n: int, seed: int = 0) -> Tensor:
    a = real(n, n, seed=seed).detach()
    return (a @ a.t() + n * torch.eye(n, dtype=torch.float64)).requires_grad_()


def fixed(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def function(name: str, fn: Callable[..., Any], *make: Callable[[], Tensor]) -> None:
    assert name not in CASES, name
    CASES[name] = lambda: Case(fn, tuple(m() for m in make))


def module(
    name: str, build: Callable[[], nn.Module], *make: Callable[[], Tensor], train: bool = True
) -> None:
    assert name not in CASES, name

    def case() -> Case:
        torch.manual_seed(0)
        return Case(build().double().train(train), tuple(m() for m in make))

    CASES[name] = case


def a(*shape: int) -> Callable[[], Tensor]:
    return lambda: real(*shape, seed=1)


def b(*shape: int) -> Callable[[], Tensor]:
    return lambda: real(*shape, seed=2)


def c(*shape: int) -> Callable[[], Tensor]:
    return lambda: real(*shape, seed=3)


def sp(*shape: int) -> Callable[[], Tensor]:
    return lambda: spread(*shape)


def pos(*shape: int) -> Callable[[], Tensor]:
    return lambda: positive(*shape)


def z(*shape: int) -> Callable[[], Tensor]:
    return lambda: complex_(*shape)
