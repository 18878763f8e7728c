"""A first call with Inductor: what is done at the same time, and what if it fails."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aheadgrad
from aheadgrad.backends.eager import op_by_op
from aheadgrad.backends.inductor import Inductor
from aheadgrad.errors import FallbackWarning
from aheadgrad.torchlayer import inductor

pytestmark = pytest.mark.skipif(inductor.missing("cpu") is not None, reason="there is no C++ compiler")


@pytest.fixture(autouse=True)
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    yield


def model(x: Tensor, w: Tensor) -> Tensor:
    return (torch.tanh(x @ w).softmax(-1) * x.exp()).sum()


def leaves() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(6, 5, requires_grad=True), torch.randn(5, 5, requires_grad=True)


def check(fast: object) -> None:
    x, w = leaves()
    fast(x, w).backward()  # type: ignore[operator]
    y, v = leaves()
    model(y, v).backward()
    torch.testing.assert_close((x.grad, w.grad), (y.grad, v.grad))


def test_the_backward_is_compiled_while_kernels_of_the_forward_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    wait, compiled = inductor.Kernels.wait, Inductor.compiled

    def waited(self: inductor.Kernels) -> None:
        seen.append("wait")
        wait(self)

    def made(self: Inductor, request: object, *args: object) -> object:
        seen.append(request.role)  # type: ignore[attr-defined]
        return compiled(self, request, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(inductor.Kernels, "wait", waited)
    monkeypatch.setattr(Inductor, "compiled", made)
    check(aheadgrad.compile(model, backend="inductor", frontend="trace"))
    assert seen == ["forward", "backward", "wait", "wait"]
    seen.clear()  # now all is found in Inductor's cache: a backward comes when it is called for
    x, w = leaves()
    fast = aheadgrad.compile(model, backend="inductor", frontend="trace")
    out = fast(x, w)
    assert seen == ["forward"]
    out.backward()
    assert seen == ["forward", "backward"]


@pytest.mark.parametrize("frontend", ["trace", "dynamo"])
def test_kernels_that_cannot_be_built(frontend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: inductor.Kernels) -> None:
        raise RuntimeError("no room on the disk")

    monkeypatch.setattr(inductor.Kernels, "wait", fails)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", FallbackWarning)
        check(aheadgrad.compile(model, backend="inductor", frontend=frontend))
    texts = [str(w.message) for w in told if w.category is FallbackWarning]
    assert len(texts) == 2
    assert all("no room on the disk" in text for text in texts)


def test_like_layers_save_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies between two kernels is written anyway: it is saved in each layer, not the parts of its sum in
    some of them. The last one, which is written for this alone, saves its readers a second value."""

    def layers(x: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            x = x + F.gelu(F.layer_norm(x, (32,)) @ w) @ w.T
        return x.square().mean()

    weights = [nn.Parameter(torch.randn(32, 32)) for _ in range(6)]
    fast = aheadgrad.compile(layers, backend="inductor", frontend="trace")
    with monkeypatch.context() as patched:
        patched.setattr(
            Inductor, "compiled", lambda self, request, *_: op_by_op(request)
        )  # it takes its time
        fast(torch.randn(16, 32), *weights)
    (report,) = fast.memory()
    sums = [s for s in report.saved if s.name.startswith("add")]
    assert len(sums) == len(weights)
