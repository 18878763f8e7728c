"""Under which autocast state a backward runs: as asked, whatever is on when it is called.

`telltale(x)` is an op that adds one under autocast, and nothing otherwise. The forward always runs it with
autocast switched off inside the function, so its result is `x`; the backward multiplies with it, so the
gradient at zero says whether autocast was on in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from .peer import PEER, compile_with_dynamo

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture
def telltale() -> Iterator[Callable[[Tensor], Tensor]]:
    with torch.library._scoped_library("aheadgrad_parity", "FRAGMENT") as library:
        library.define("telltale(Tensor x) -> Tensor")
        library.impl("telltale", torch.clone, "CompositeExplicitAutograd")
        for key in ("AutocastCPU", "AutocastCUDA"):
            library.impl("telltale", lambda x: x + 1, key)
        yield torch.ops.aheadgrad_parity.telltale.default


def run(
    telltale: Callable[[Tensor], Tensor], device: str, *, ambient: bool, setting: Any
) -> tuple[float, float]:
    """Output and gradient at zero, with autocast on or not around the forward (`ambient`)."""

    class Telltale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return telltale(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grad * telltale(x)

    def fn(x: Tensor) -> Any:
        with torch.amp.autocast(device, enabled=False):
            return Telltale.apply(x)

    around: AbstractContextManager[Any] = torch.amp.autocast(device) if ambient else nullcontext()
    x = torch.tensor(0.0, device=device, requires_grad=True)
    with _peer_setting(setting):
        with around:
            out = compile_with_dynamo(fn, backward_autocast=setting)(x)
        (grad,) = torch.autograd.grad(out, x)
    return out.item(), grad.item()


def _peer_setting(setting: Any) -> AbstractContextManager[Any]:
    if PEER != "torch":
        return nullcontext()
    import torch._functorch.config as config

    return config.patch(backward_pass_autocast=setting)


@pytest.mark.skipif(PEER == "eager", reason="eager knows no such setting")
@pytest.mark.parametrize("device", DEVICES)
class TestSetting:
    def test_same_as_forward(self, device: str, telltale: Callable[[Tensor], Tensor]) -> None:
        assert run(telltale, device, ambient=True, setting="same_as_forward") == (0.0, 1.0)
        assert run(telltale, device, ambient=False, setting="same_as_forward") == (0.0, 0.0)

    def test_off(self, device: str, telltale: Callable[[Tensor], Tensor]) -> None:
        assert run(telltale, device, ambient=True, setting="off") == (0.0, 0.0)

    def test_given(self, device: str, telltale: Callable[[Tensor], Tensor]) -> None:
        assert run(telltale, device, ambient=False, setting=[{"device_type": device}]) == (0.0, 1.0)
