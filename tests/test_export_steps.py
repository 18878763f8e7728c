"""A whole training step (forward, loss, backward, optimizer) is one program, and does what eager does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aheadgrad.errors import CaptureError
from tests.export_cases import export

STEPS = 5
Make = Callable[[Any], torch.optim.Optimizer]


class Net(nn.Module):
    """With a head that gets no gradient, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 2))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


class Trainer:
    """As people write it: a model and an optimizer on an object."""

    def __init__(self, make: Make) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = make(self.model.parameters())

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def batches(count: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(6, 3), torch.randn(6, 2)) for _ in range(count)]


def check(step: Callable[..., Any], exported: Any, state: Callable[[], dict[str, Tensor]]) -> None:
    """Both do five steps on the same batches, from the same random state."""
    for seed, batch in enumerate(batches()):
        torch.manual_seed(seed)
        found = exported(*copy.deepcopy(batch))
        torch.manual_seed(seed)
        torch.testing.assert_close(found, step(*batch), rtol=0, atol=0)
    held = exported.state
    for name, wanted in state().items():
        torch.testing.assert_close(held[name].detach(), wanted.detach(), rtol=0, atol=0, msg=name)


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "tensor as lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
}


RUNS = [*((name, None) for name in OPTIMIZERS), ("momentum", "eager"), ("adam", "eager")]


@pytest.mark.parametrize(("name", "backend"), RUNS)
def test_five_steps(name: str, backend: str | None) -> None:
    theirs, ours = Trainer(OPTIMIZERS[name]), Trainer(OPTIMIZERS[name])
    before = copy.deepcopy(ours.optimizer.state_dict())
    exported = export(ours.step, batches(1)[0])
    assert len(exported.programs) == 1
    assert not exported.signature.backwards
    running = exported.compile(backend)

    def state() -> dict[str, Tensor]:
        found = {f"self.model.{n}": t for n, t in theirs.model.state_dict().items()}
        names = {id(p): n for n, p in theirs.model.named_parameters()}
        for p, values in theirs.optimizer.state.items():
            for key, t in values.items():
                if isinstance(t, Tensor) and not names[id(p)].startswith("unused"):
                    found[f"self.optimizer.{key}.self.model.{names[id(p)]}"] = t
        return found

    check(theirs.step, running, state)
    assert exported.state.keys() >= state().keys()
    torch.testing.assert_close(ours.optimizer.state_dict(), before, rtol=0, atol=0)  # as it was


def test_the_state_of_an_optimizer_that_has_stepped_already() -> None:
    theirs, ours = Trainer(OPTIMIZERS["adam"]), Trainer(OPTIMIZERS["adam"])
    for seed, batch in enumerate(batches(2)):
        for trainer in (theirs, ours):
            torch.manual_seed(seed)
            trainer.step(*batch)
    exported = export(ours.step, batches(1)[0])
    assert len(exported.stages) == 1
    check(
        theirs.step,
        exported.compile("eager"),
        lambda: {f"self.model.{n}": t for n, t in theirs.model.state_dict().items()},
    )


@pytest.mark.parametrize("cleared", ["first", "last", "never"])
def test_gradients_that_stay_or_go(cleared: str) -> None:
    """Cleared before or after the step they are nobody's business; never cleared they are state."""

    def make() -> tuple[Net, Callable[..., Tensor]]:
        torch.manual_seed(0)
        model = Net().eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)

        def step(x: Tensor, y: Tensor) -> Tensor:
            if cleared == "first":
                model.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            if cleared == "last":
                optimizer.zero_grad()
            return loss.detach()

        return model, step

    (theirs, eager), (_, ours) = make(), make()
    exported = export(ours, batches(1)[0])
    kinds = {h.kind for h in exported.signature.held}
    assert ("gradient" in kinds) == (cleared == "never")
    check(
        eager,
        exported.compile("eager"),
        lambda: {f"model.{n}": t for n, t in theirs.state_dict().items()},
    )


def test_a_step_with_a_penalty_and_clipping() -> None:
    """Gradients of gradients, and norms."""

    def make() -> tuple[nn.Module, Callable[..., Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        optimizer = torch.optim.Adam(model.parameters())

        def step(x: Tensor, y: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            out = model(x)
            (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = nn.functional.mse_loss(out, y) + g.square().mean()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach() + norm

        return model, step

    (theirs, eager), (_, ours) = make(), make()
    exported = export(ours, batches(1)[0])
    check(eager, exported.compile("eager"), lambda: {f"model.{n}": t for n, t in theirs.state_dict().items()})


def test_numbers_of_python_that_change_are_refused() -> None:
    class Counts(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.param_groups[0]["lr"] *= 0.5
            super().step(closure)

    trainer = Trainer(lambda p: Counts(p, lr=0.1))
    with pytest.raises(CaptureError, match="keeps 'lr' as a number of Python's"):
        export(trainer.step, batches(1)[0])
    assert trainer.optimizer.param_groups[0]["lr"] == 0.1
    assert all(type(p) is nn.Parameter for p in trainer.optimizer.param_groups[0]["params"])


def test_a_gradient_left_in_an_argument_is_refused() -> None:
    def fn(x: Tensor) -> Tensor:
        loss = x.square().sum()
        loss.backward()
        return loss.detach()

    with pytest.raises(CaptureError, match=r"leaves a gradient in x\.grad"):
        export(fn, (torch.randn(3, requires_grad=True),))


def test_decisions_on_numbers_that_are_read_are_refused() -> None:
    def fn(x: Tensor) -> Tensor:
        return x * 2 if x.sum().item() > 0 else x

    with pytest.raises(CaptureError, match="value of a tensor"):
        export(fn, (torch.randn(3),))
    exported = export(lambda x: x * x.sum().item(), (torch.randn(3),))
    x = torch.randn(3)
    torch.testing.assert_close(exported.run(x), x * x.sum().item(), rtol=0, atol=0)


def test_arithmetic_on_numbers_that_are_read_is_pythons() -> None:
    """Sympy would join `(n * 0.1) * 3`, which rounds another way."""

    def fn(x: Tensor) -> Tensor:
        n = x.sum().item()
        return x * (n * 0.1 * 3.0 - (n + 0.7) * 0.3)

    exported = export(fn, (torch.randn(3),))
    for _ in range(5):
        x = torch.randn(3, dtype=torch.float32)
        torch.testing.assert_close(exported.run(x), fn(x), rtol=0, atol=0)
