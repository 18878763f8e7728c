"""Under transforms of `torch.func` the recorded graph runs, compiled. Where it cannot, there is a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import aheadgrad

from .plays import Play, assert_alike, double, ending

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
X, W, V = (double(3, seed=s, grad=False) for s in (1, 2, 3))
XX = double(4, 3, seed=4, grad=False)
XXX = double(2, 4, 3, seed=5, grad=False)
LOG: list[Tensor] = []


def seeded(play: Play, fn: Any) -> Any:
    torch.manual_seed(1)
    return ending(play, fn)


def over(make: Callable[[], Any], play: Play, frontend: str = "dynamo") -> Any:
    """A play over the compiled function gives what it gives over the function, each time."""
    expected, fast = seeded(play, make()), aheadgrad.compile(make(), frontend=frontend)
    for call in range(3):
        assert_alike(expected, seeded(play, fast), f"call {call}")
    return fast


def no_grad_inside(x: Tensor) -> Tensor:
    with torch.no_grad():
        s = x.sum()
    return (x.sin() * s + x.detach() * x).sum()


COMPILED: dict[str, tuple[Callable[..., Any], Play, set[str]]] = {
    "grad": (no_grad_inside, lambda f: grad(f)(X), {"f"}),
    "grad of grad": (no_grad_inside, lambda f: grad(lambda x: grad(f)(x).sin().sum())(X), {"f", "vjp(f)"}),
    "vmap": (no_grad_inside, lambda f: vmap(f)(XX), {"vmap(f)"}),
    "vmap of vmap": (no_grad_inside, lambda f: vmap(vmap(f))(XXX), {"vmap(vmap(f))"}),
    "vmap of grad": (no_grad_inside, lambda f: vmap(grad(f))(XX), {"vmap(f)", "vmap(vjp(f))"}),
    "grad of vmap": (no_grad_inside, lambda f: grad(lambda x: vmap(f)(x).sum())(XX), {"vmap(f)"}),
    "jvp": (no_grad_inside, lambda f: jvp(f, (X,), (V,)), {"jvp(f)"}),
    "jacrev": (no_grad_inside, lambda f: jacrev(f)(X), {"f", "vmap(vjp(f))"}),
    "jacfwd": (no_grad_inside, lambda f: jacfwd(f)(X), {"vmap(jvp(f))"}),
    "hessian": (
        no_grad_inside,
        lambda f: hessian(f)(X),
        {"vmap(jvp(f))", "vmap(jvp(vmap(vjp(f))))"},
    ),
    "vjp": (lambda x: x.cumsum(0).sin(), lambda f: vjp(f, X)[1](V), {"f"}),
    "in no batch": (
        lambda z, w: (z * w, w.exp()),
        lambda f: vmap(f, in_dims=(0, None), out_dims=(0, None))(XX, X),
        {"vmap(f)"},
    ),
    "arguments that come back": (lambda x: (x, x.sin()), lambda f: vmap(f)(XX), {"vmap(f)"}),
    "results that are cut off": (
        lambda z: (z.sin(), z.detach() * 2),
        lambda f: jacfwd(f)(X),
        {"vmap(jvp(f))"},
    ),
    "results that are written to": (
        lambda z: z + 1.0,
        lambda f: (grad(lambda z: f(z).mul_(z).sum())(X), jvp(lambda z: f(z).mul_(z), (X,), (V,)), V),
        {"f", "jvp(f)"},
    ),
    "random numbers in a batch": (
        lambda x: F.dropout(x, 0.5) + torch.rand(3, dtype=torch.float64),
        lambda f: vmap(vmap(f, randomness="same"), randomness="different")(XXX),
        {"vmap(vmap(f))"},
    ),
    "complex": (
        lambda z: (z.conj() * z).real.sum(),
        lambda f: grad(f)(torch.complex(X, W)),
        {"f"},
    ),
    "integers": (
        lambda z, i: (z.index_select(0, i.view(1)), i + 1),
        lambda f: (
            vmap(f)(XX, torch.tensor([0, 1, 2, 0])),
            grad(lambda z: f(z, torch.tensor(1))[0].sum())(X),
        ),
        {"vmap(f)", "f"},
    ),
    "gradients within": (
        torch.sin,
        lambda f: grad(lambda z: torch.autograd.grad(f(z).sum(), z, create_graph=True)[0].pow(2).sum())(X),
        {"f", "vjp(vjp(f))"},
    ),
}


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("frontend", ["dynamo", "trace"])
def test_compiled(name: str, frontend: str) -> None:
    fn, play, programs = COMPILED[name]
    fast = over(lambda: fn, play, frontend)
    assert not fast.fallbacks
    found = {str(entry).partition(":")[0].replace(fast.name, "f") for entry in fast.transforms}
    assert programs <= found, found


def decides(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x.sin()


def adds(y: Tensor, x: Tensor) -> Tensor:
    return y.add_(x) * 2


class Cube(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 4 * ctx.saved_tensors[0] ** 2  # not the derivative


UNCOMPILED: dict[str, tuple[Callable[..., Any], Play, str]] = {
    "a changed argument": (
        adds,
        lambda f: (lambda y: (vmap(f)(y, XX), y))(XX * 0),
        "from outside is changed",
    ),
    "a view": (lambda x: x.view(-1)[1:], lambda f: (vmap(f)(XX), jacrev(f)(X)), "share memory"),
    "random numbers": (lambda x: F.dropout(x).sin().sum(), lambda f: grad(f)(X), "random numbers"),
    "random numbers, each": (
        lambda x: F.dropout(x).sin().sum(),
        lambda f: (vmap(f, randomness="different")(XX), vmap(grad(f), randomness="different")(XX)),
        "random numbers",
    ),
    "random numbers for all": (
        lambda x: torch.rand(3) + x,
        lambda f: vmap(lambda y: f(X) + y, randomness="different")(XX),
        "random numbers",
    ),
    "a decision": (decides, lambda f: jacrev(f)(X), "Data-dependent"),
    "a custom function": (lambda x: Cube.apply(x).sum(), lambda f: vmap(grad(f))(XX), "autograd_function"),
    "a custom function below": (
        lambda x: Cube.apply(x).sum(),
        lambda f: grad(lambda x: vmap(f)(x).sum())(XX),
        "custom autograd.Function",
    ),
    "transforms inside": (
        lambda x: grad(lambda y: (y**3).sum())(x),
        lambda f: jacrev(f)(X),
        "_grad_increment",
    ),
}


@pytest.mark.parametrize("name", UNCOMPILED)
@pytest.mark.parametrize("frontend", ["dynamo", "trace"])
def test_uncompiled(name: str, frontend: str) -> None:
    fn, play, reason = UNCOMPILED[name]
    fast = over(lambda: fn, play, frontend)
    assert any(reason in told for told in fast.fallbacks), fast.fallbacks


RAISE: dict[str, tuple[Callable[..., Any], Play]] = {
    "random numbers": (lambda x: torch.rand(3) + x, lambda f: vmap(f)(XX)),
    "random numbers for all": (lambda x: torch.rand(3) + x, lambda f: vmap(lambda y: f(X) + y)(XX)),
    "a decision": (decides, lambda f: vmap(f)(XX)),
    "shapes": (lambda x: x @ torch.ones(5), lambda f: vmap(f)(XX)),
}


@pytest.mark.parametrize("name", RAISE)
def test_eagers_errors(name: str) -> None:
    fn, play = RAISE[name]
    assert isinstance(seeded(play, fn), Exception)
    over(lambda: fn, play)


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.calls = nn.Linear(3, 3).double(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x
        LOG.append(x)
        out: Tensor = self.layer(x).tanh()
        LOG.append(out)
        return out


def test_what_python_does_besides() -> None:
    """What the function keeps is what it was given, not what stood for it."""

    def play(m: Any) -> Any:
        m.calls = 0
        LOG.clear()

        def loss(p: Any, x: Tensor) -> Tensor:
            return (functional_call(m, p, (x,)) * m.last + LOG[-1] + LOG[-2].exp()).sum()

        params = {k: v.detach() for k, v in m.named_parameters()}
        return vmap(grad(loss, argnums=(0, 1)), in_dims=(None, 0))(params, XX), m.calls

    fast = over(Remembers, play)
    assert len(fast.transforms) == 2 and not fast.fallbacks


def test_state_of_modules_that_changes() -> None:
    def play(m: Any) -> Any:
        params = {k: v.detach() for k, v in m.named_parameters()}
        return grad(lambda p: functional_call(m, p, (XX,)).pow(2).sum())(params)

    over(lambda: nn.BatchNorm1d(3).double(), play)  # eager raises
    assert over(lambda: nn.BatchNorm1d(3).double().eval(), play).transforms


def test_histories_outside() -> None:
    """Tensors that require grad outside of all transforms, with grad mode on and off."""

    def play(f: Any) -> Any:
        x = X.clone().requires_grad_()
        first = grad(lambda z: f(z).sum())(x)
        with torch.no_grad():
            none = grad(lambda z: f(z).sum())(x)
        return torch.autograd.grad(first.pow(2).sum(), x), none, none.requires_grad

    over(lambda: lambda x: x.sin() * x, play)
    over(lambda: lambda x: x.sin() * x, lambda f: grad(lambda z: (no_grads(f, z) * z).sum())(X))


def no_grads(f: Any, x: Tensor) -> Any:
    with torch.no_grad():
        return f(x)


def test_autocast_around() -> None:
    def play(f: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return grad(lambda w: f(w).float().sum())(torch.eye(3))

    assert (
        "under a torch.func transform: autocast is on around the call"
        in over(lambda: lambda w: w @ w, play).fallbacks
    )


def test_sizes_that_change() -> None:
    fast = over(
        lambda: lambda z: (z.sin() * z.shape[-1]).sum(),
        lambda f: [vmap(grad(f))(torch.ones(k + 2, k + 1)) for k in range(12)],
    )
    assert not fast.fallbacks


def test_closed_over_tensors_of_a_transform() -> None:
    def play(compile: Any) -> Any:
        return grad(lambda w: grad(compile(lambda z: (z * w).sin().sum()))(X).sum())(W)

    assert_alike(play(lambda f: f), play(aheadgrad.compile))
