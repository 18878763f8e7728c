"""What is on tensors goes into a program: hooks, gradients that are there or not, attributes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aheadgrad
from aheadgrad.errors import CaptureError, UnsupportedInput
from tests.export_cases import export

Step = Callable[[Tensor], Any]


def weight(*, grad: float | None = None) -> nn.Parameter:
    w = nn.Parameter(torch.tensor([1.0, -2.0]))
    w.grad = None if grad is None else torch.full((2,), grad)
    return w


def adds(w: nn.Parameter) -> Step:
    def step(x: Tensor) -> Tensor:
        (w * x).sum().backward()
        assert w.grad is not None
        return w.grad.clone()

    return step


def zeroes_in_place(w: nn.Parameter) -> Step:
    optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        (w * w * x).sum().backward()
        optimizer.step()
        return w.detach().clone()

    return step


def returns_the_one_before(w: nn.Parameter) -> Step:
    def step(x: Tensor) -> Tensor:
        before = torch.zeros(2) if w.grad is None else w.grad.clone()
        w.grad = None
        (w * x).sum().backward()
        return before

    return step


def decides_by_whether_it_is_there(w: nn.Parameter) -> Step:
    def step(x: Tensor) -> Tensor:
        scale = 10.0 if w.grad is None else 1.0
        w.grad = None
        (w * x * scale).sum().backward()
        assert w.grad is not None
        return w.grad.clone()

    return step


def steps_every_second_time(w: nn.Parameter) -> Step:
    """What is there goes, and comes again."""
    optimizer = torch.optim.Adam([w], lr=0.1)

    def step(x: Tensor) -> Tensor:
        last = w.grad is not None
        (w * w * x).sum().backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return w.detach().clone()

    return step


def puts_another_there(w: nn.Parameter) -> Step:
    def step(x: Tensor) -> Tensor:
        (w * x).sum().backward()
        assert w.grad is not None
        w.grad = w.grad * 0.5
        return w.grad + 0

    return step


def hands_it_out(w: nn.Parameter) -> Step:
    def step(x: Tensor) -> Any:
        (w * x).sum().backward()
        return w.grad

    return step


def clips_in_a_hook(w: nn.Parameter) -> Step:
    w.register_hook(lambda g: g.clamp(-0.1, 0.1))
    return zeroes_in_place(w)


def scales_afterwards(w: nn.Parameter) -> Step:
    def scale(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)

    w.register_post_accumulate_grad_hook(scale)
    return adds(w)


def optimizes_in_the_backward(w: nn.Parameter) -> Step:
    optimizer = torch.optim.Adam([w], lr=0.1)

    def step_now(_: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    w.register_post_accumulate_grad_hook(step_now)

    def step(x: Tensor) -> Tensor:
        loss = (w * w * x).sum()
        loss.backward()
        return loss.detach()

    return step


def sums_up_in_a_hook(w: nn.Parameter) -> Step:
    total = torch.zeros(2)

    def note(g: Tensor) -> None:
        total.add_(g)

    w.register_hook(note)

    def step(x: Tensor) -> Tensor:
        w.grad = None
        (w * x).sum().backward()
        return total + 0

    return step


def keeps_averages_on_parameters(w: nn.Parameter) -> Step:
    w.average, w.last, w.rate = torch.zeros(2), torch.zeros(2), 0.5  # type: ignore[attr-defined]

    def step(x: Tensor) -> Any:
        held: Any = w
        before = held.last * 1
        held.average.lerp_(w.detach() * x, held.rate)
        held.last = held.average * 2
        return before, held.average + 0

    return step


STEPS = [
    adds,
    zeroes_in_place,
    returns_the_one_before,
    decides_by_whether_it_is_there,
    steps_every_second_time,
    puts_another_there,
    hands_it_out,
    clips_in_a_hook,
    scales_afterwards,
    optimizes_in_the_backward,
    sums_up_in_a_hook,
    keeps_averages_on_parameters,
]


@pytest.mark.parametrize("grad", [None, 7.0], ids=["none yet", "one is there"])
@pytest.mark.parametrize("make", STEPS, ids=lambda make: make.__name__)
def test_five_calls(make: Callable[[nn.Parameter], Step], grad: float | None, tmp_path: Path) -> None:
    """Results, those of former calls too; the state goes through a file between the second and third."""
    theirs = make(weight(grad=grad))
    ours = weight(grad=grad)
    exported = aheadgrad.export(make(ours), (torch.ones(2),))
    assert ours.grad is None if grad is None else torch.equal(ours.grad, torch.full((2,), grad))
    wanted, found = [], []
    for k in range(5):
        if k == 2:
            exported.save(tmp_path / "x.ag")
            exported = aheadgrad.load(tmp_path / "x.ag")
            wanted, found = [], []
        x = torch.tensor([0.5 * k + 1, 2.0 - k])
        wanted.append(theirs(x.clone()))
        found.append(exported.run(x))
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_gradients_are_named_in_the_signature() -> None:
    exported = export(adds(weight()), (torch.ones(2),))
    assert [s.signature.finds for s in exported.stages] == [(), ("w.grad",)]
    assert [name for name, _ in exported.stages[0].signature.made] == ["w.grad"]
    assert "update     w.grad" in str(exported)
    assert export(returns_the_one_before(weight(grad=1.0)), (torch.ones(2),)).signature.finds == ()


def test_a_state_that_no_call_begins_with() -> None:
    exported = export(steps_every_second_time(weight()), (torch.ones(2),))
    for _ in range(3):
        exported.run(torch.ones(2))
    del exported.state["optimizer.exp_avg.w"]
    with pytest.raises(aheadgrad.errors.InvalidOption, match="no call begins with that"):
        exported.run(torch.ones(2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layer(x).square().sum()
        return loss


@pytest.mark.parametrize("partition", [None, "default", "min_cut"])
def test_hooks_with_a_loss(partition: Any) -> None:
    model, x = Net(), torch.ones(3, 2)
    model.layer.weight.register_hook(lambda g: g.clamp(-0.1, 0.1))
    exported = export(model, (x,), loss=0, partition=partition)
    exported.backward(x)
    model(x).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(exported.parameters[name].grad, p.grad, rtol=0, atol=0)


def test_gradients_that_a_loss_depends_on_are_refused() -> None:
    w = weight(grad=1.0)

    def loss(x: Tensor) -> Tensor:
        assert w.grad is not None
        return (w * x * w.grad).sum()

    with pytest.raises(CaptureError, match=r"asks for w\.grad, which is no part"):
        export(loss, (torch.ones(2),), loss=0)


def test_hooks_on_what_an_export_holds() -> None:
    model, x = Net(), torch.ones(3, 2)
    exported = export(model, (x,), loss=0)
    seen: list[Tensor] = []
    exported.parameters["layer.weight"].register_hook(lambda g: g * 2)
    exported.parameters["layer.weight"].register_post_accumulate_grad_hook(seen.append)
    exported.backward(x)
    model(x).backward()
    assert model.layer.weight.grad is not None
    torch.testing.assert_close(seen[0].grad, model.layer.weight.grad * 2, rtol=0, atol=0)


def test_hooks_that_cannot_be_repeated_are_refused() -> None:
    kept: list[Any] = []
    model = Net()
    handle = model.layer.weight.register_hook(kept.append)
    with pytest.raises(CaptureError, match=r"hook of layer\.weight changes an object"):
        export(model, (torch.ones(3, 2),), loss=0)
    assert kept == []
    handle.remove()
    model.layer.bias.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(CaptureError, match=r"layer\.bias has a hook for when"):
        export(model, (torch.ones(3, 2),), loss=0)
    x = torch.ones(3, 2, requires_grad=True)
    x.register_hook(lambda g: g)
    with pytest.raises(UnsupportedInput, match="x has hooks"):
        export(model, (x,))


def test_hooks_and_attributes_that_stay_are_refused() -> None:
    w = weight()

    def hooked(x: Tensor) -> Tensor:
        w.register_hook(lambda g: g * 2)
        return w * x

    with pytest.raises(CaptureError, match="leaves a hook on w"):
        export(hooked, (torch.ones(2),))

    def marked(x: Tensor) -> Tensor:
        w.seen = True  # type: ignore[attr-defined]
        return w * x

    with pytest.raises(CaptureError, match="makes an attribute 'seen' of w"):
        export(marked, (torch.ones(2),))
    assert not vars(w)


def test_a_gradient_in_the_memory_of_another_tensor_is_refused() -> None:
    w, held = weight(), torch.zeros(2)

    def step(x: Tensor) -> Tensor:
        before = x if w.grad is None else w.grad + x
        w.grad = held
        return before

    with pytest.raises(CaptureError, match=r"leaves w\.grad in the memory of another tensor"):
        export(step, (torch.ones(2),))
