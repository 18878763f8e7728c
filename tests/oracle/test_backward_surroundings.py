"""The first backward in threads, anomaly mode, deterministic mode; when memory is freed."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd

from .common import assert_equal, leaf, strict
from .plays import Packs, agree, double, ending

pytestmark = [
    pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning"),
    pytest.mark.filterwarnings("ignore:Error detected:UserWarning"),
]


def layer(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).tanh() * x


def pair(*shape: int) -> tuple[Tensor, Tensor]:
    return double(*(shape or (3, 3)), seed=1), double(*(shape or (3, 3)), seed=2)


# threads and modes


@pytest.fixture
def impatient() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("impatient")
def test_new_backwards_of_one_call_in_several_threads() -> None:
    """All are recorded when they are first asked for, at the same time."""
    count = 4

    def fn(x: Tensor, w: Tensor) -> Any:
        outs = [x * (i + 1) for i in range(count)]
        for _ in range(15):
            outs = [(h @ w).tanh() for h in outs]
        return outs

    def play(run: Any) -> Any:
        x, w = pair()
        outs = run(x, w)
        grads: list[Any] = [None] * count
        start = threading.Barrier(count)

        def work(i: int) -> None:
            start.wait()
            tangent = torch.arange(9.0).double().view(3, 3).t()  # laid out as nobody expects
            grads[i] = ending(lambda _: torch.autograd.grad(outs[i], [x, w], tangent), run)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        for found in grads:
            if isinstance(found, Exception):
                raise found
        return grads

    for _ in range(5):  # two recordings have to meet in the wrong place
        agree(fn, play, calls=1)


def test_hooks_run_in_the_thread_of_the_backward() -> None:
    def play(run: Any) -> Any:
        log: list[bool] = []
        x, w = pair()
        out = run(x, w).sum()
        x.register_hook(lambda g: log.append(threading.current_thread() is thread))
        thread = threading.Thread(target=out.backward)
        thread.start()
        thread.join()
        return log, x.grad, w.grad

    agree(layer, play)


def test_one_thread_for_all_devices() -> None:
    def play(run: Any) -> Any:
        x, w = pair()
        with torch.autograd.set_multithreading_enabled(False):
            run(x, w).sum().backward()
        return x.grad, w.grad

    agree(layer, play)


def divides(x: Tensor) -> Tensor:
    h = x * 0
    return h.sqrt()  # the line that eager names


def anomaly_text(run: Callable[[Tensor], Tensor]) -> str:
    """What anomaly mode says about a backward that makes NaN."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.autograd.detect_anomaly():
            x = torch.zeros(3, requires_grad=True)
            out = run(x)
            with pytest.raises(RuntimeError, match="returned nan values"):
                (out * 0).sum().backward()
    return "\n".join(str(w.message) for w in caught)


@pytest.mark.parametrize("warm", [False, True])
def test_anomaly_mode_names_the_users_line(warm: bool) -> None:
    compiled = strict(divides)
    if warm:
        compiled(torch.ones(3, requires_grad=True)).sum().backward()
    for run in (divides, compiled):
        text = anomaly_text(run)
        assert "h.sqrt()" in text, run
        assert "in divides" in text, run
        assert "test_backward_surroundings.py" in text, run


def test_anomaly_mode_without_checking_nan() -> None:
    def play(run: Any) -> Any:
        with torch.autograd.detect_anomaly(check_nan=False):
            x = torch.zeros(3, requires_grad=True)
            (run(x) * 0).sum().backward()
            return x.grad

    agree(divides, play)


def unpooled(x: Tensor) -> Tensor:
    return torch.nn.functional.max_unpool2d(x, torch.arange(4).view(1, 1, 2, 2) * 2, 2)


class PutsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.clone().put_(torch.tensor([0]), torch.ones(1, dtype=g.dtype))


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation:UserWarning")
def test_deterministic_mode(where: str, warm: bool) -> None:
    """An operation without a deterministic form raises when it runs under the mode, and only then."""

    def fn(x: Tensor) -> Tensor:
        return unpooled(x) if where == "forward" else PutsInBackward.apply(x)

    def play(mode: bool, warn_only: bool = False) -> Callable[[Any], Any]:
        def run_it(run: Any) -> Any:
            x = double(1, 1, 2, 2)
            torch.use_deterministic_algorithms(mode, warn_only=warn_only)
            try:
                run(x).sum().backward()
            finally:
                torch.use_deterministic_algorithms(False)
            return x.grad

        return run_it

    plain = [play(False)] if warm else []
    agree(fn, *plain, refused=[play(True)])
    agree(fn, *plain, play(True, warn_only=True))


def test_deterministic_mode_switched_between_forward_and_backward() -> None:
    def play(forward: bool, backward: bool) -> Callable[[Any], Any]:
        def run_it(run: Any) -> Any:
            x = double(3)
            try:
                torch.use_deterministic_algorithms(forward)
                out = run(x)
                torch.use_deterministic_algorithms(backward)
                out.sum().backward()
            finally:
                torch.use_deterministic_algorithms(False)
            return x.grad

        return run_it

    def fn(x: Tensor) -> Tensor:
        return PutsInBackward.apply(x) * x

    agree(fn, play(False, False), play(True, False), refused=[play(False, True), play(True, True)])


# memory


def test_saved_tensors_are_free_when_gradients_arrive() -> None:
    def play(run: Any) -> Any:
        packs, alive = Packs(), []
        x, w = pair()
        x.register_post_accumulate_grad_hook(lambda _: alive.append(packs.alive))
        with packs.on():
            out = run(x, w)
        alive.append(packs.alive > 0)
        out.sum().backward()
        return alive

    agree(lambda x, w: (x @ w).tanh().exp(), play)


def test_compiled_autograd() -> None:
    """Whoever records a backward calls nodes with one tangent after the other."""

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x @ w)
        return h.sin(), h.exp()

    grads = []
    for run in (fn, strict(fn)):
        x, w = leaf(3, 3, seed=1), leaf(3, 3, seed=2)
        with compiled_autograd._enable(lambda module: module):
            a, b = run(x, w)
            (a.sum() + (2 * b).sum()).backward()
        grads.append((x.grad, w.grad))
    assert_equal(grads[1], grads[0])


def test_a_node_that_is_applied_by_hand() -> None:
    x = leaf(3)
    expected, out = x.sin(), strict(torch.sin)(x)
    assert out.grad_fn is not None
    assert expected.grad_fn is not None
    (grad,) = out.grad_fn.apply(torch.ones(3))  # type: ignore[attr-defined]
    assert_equal(grad, expected.grad_fn(torch.ones(3)))
