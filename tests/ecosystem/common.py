"""Training steps of somebody else's model, compiled and in eager, from the same start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import aheadgrad

STEPS = 3
Call = Callable[..., Any]
Loss = Callable[[Call], Tensor]


def steps(model: nn.Module, call: Call, loss_of: Loss) -> list[dict[str, Any]]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    seen = []
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = loss_of(call)
        loss.backward()
        found = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        found["the loss"] = loss.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        found |= {f"buffer {n}": b.detach().clone() for n, b in model.named_buffers()}
        found["random state"] = torch.get_rng_state()
        seen.append(found)
    return seen


def assert_near(found: Any, expected: Any, tolerance: float, what: str = "") -> None:
    """Bitwise, or within a part of the largest value."""
    assert (found is None) == (expected is None), what
    if expected is None:
        return
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), what
    if expected.numel() == 0 or torch.equal(found, expected):
        return
    assert expected.is_floating_point() or expected.is_complex(), what
    worst = float((found - expected).abs().max()) / max(float(expected.abs().max()), 1e-6)
    assert worst <= tolerance, (what, worst)


def same_training(
    make: Callable[[], nn.Module],
    loss_of: Loss,
    *,
    frontend: str = "dynamo",
    tolerance: float = 0.0,
    compiled_part: Callable[[nn.Module], Any] = lambda model: model,
) -> Any:
    """Three steps; `loss_of` is given what is called in place of the model. Nothing may run uncompiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = make()
    torch.manual_seed(0)
    other = make()
    expected = steps(eager, compiled_part(eager), loss_of)
    compiled = aheadgrad.compile(compiled_part(other), fallback="error", frontend=frontend)
    found = steps(other, compiled, loss_of)
    for number, (f, e) in enumerate(zip(found, expected, strict=True)):
        assert list(f) == list(e)
        for name, wanted in e.items():
            assert_near(f[name], wanted, tolerance, f"{name} in step {number}")
    assert compiled.entries
    assert not compiled.fallbacks
    return compiled


def with_forces(energy: Tensor, positions: Tensor) -> Tensor:
    """What potentials are trained on: the energy, and its derivative by the positions."""
    (forces,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
    return energy.pow(2).mean() + forces.pow(2).mean()
