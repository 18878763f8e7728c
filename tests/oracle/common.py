"""What the tests of behaviours share."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import aheadgrad
from aheadgrad.testing import Inputs, assert_same


def strict(fn: Any, **options: Any) -> Any:
    """Compiled, and never uncompiled by the back door."""
    return aheadgrad.compile(fn, fallback="error", **options, frontend="trace")


def default(fn: Any, **options: Any) -> Any:
    """Compiled by the default front end; nothing that Dynamo finds runs uncompiled."""
    return aheadgrad.compile(fn, fallback="error", **options)


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad)


def leaves(*tensors: Tensor, **kwargs: Any) -> Inputs:
    return Inputs(tensors, kwargs, leaves=[t for t in tensors if t.requires_grad])


def same(fn: Callable[..., Any], make: Callable[[], Inputs], **options: Any) -> Any:
    """Compiles a function strictly and compares it with eager in every scenario."""
    compiled = strict(fn)
    assert_same(fn, compiled, make, **options)
    return compiled


def same_by_default(fn: Callable[..., Any], make: Callable[[], Inputs], **options: Any) -> Any:
    """As `same`, with the default front end."""
    compiled = default(fn)
    assert_same(fn, compiled, make, **options)
    return compiled


def uncompiled(fn: Callable[..., Any], make: Callable[[], Inputs], reason: str, **options: Any) -> None:
    """Runs uncompiled, for this reason, and so as in eager in every scenario."""
    compiled = aheadgrad.compile(fn, frontend="trace")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # ours, and torch's own about resized tensors
        assert_same(fn, compiled, make, **options)
    assert any(reason in told for told in compiled.fallbacks), compiled.fallbacks


def one(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Callable[[], Inputs]:
    return lambda: leaves(leaf(*shape, dtype=dtype, grad=grad))


def two(*shape: int) -> Callable[[], Inputs]:
    return lambda: leaves(leaf(*shape, seed=1), leaf(*shape, seed=2))


def equal(a: Any, b: Any) -> bool:
    """Bitwise, `None` included."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.is_sparse and b.is_sparse:
            a, b = a.to_dense(), b.to_dense()
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    return a is b or a == b


def assert_equal(a: Any, b: Any, what: str = "") -> None:
    left, right = tree_leaves(a), tree_leaves(b)
    assert len(left) == len(right), what
    for x, y in zip(left, right, strict=True):
        assert equal(x, y), (what, x, y)


def state_of(module: nn.Module) -> dict[str, Any]:
    """Parameters, buffers and gradients by name."""
    found: dict[str, Any] = {}
    for name, p in module.named_parameters():
        found[name] = p.detach().clone()
        found[f"{name}.grad"] = None if p.grad is None else p.grad.clone()
    for name, b in module.named_buffers():
        found[name] = b.detach().clone()
    return found


def assert_same_state(a: nn.Module, b: nn.Module) -> None:
    left, right = state_of(a), state_of(b)
    assert list(left) == list(right)
    for name in left:
        assert equal(left[name], right[name]), name


def step(run: Callable[..., Any], *args: Any, seed: int = 0, **kwargs: Any) -> Any:
    """One seeded forward and backward; what came out."""
    torch.manual_seed(seed)
    out = run(*args, **kwargs)
    parts = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
    if parts:
        total = sum((t.double() if not t.is_complex() else t.abs().double()).pow(2).sum() for t in parts)
        total.backward()
    return [t.detach().clone() if isinstance(t, Tensor) else t for t in tree_leaves(out)]


def same_module(
    make: Callable[[], nn.Module],
    calls: Sequence[tuple[Any, ...]],
    *,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    around: Callable[[], Any] = nullcontext,
    between: Callable[[Any, int], None] | None = None,
    compile: Callable[[Any], Any] = strict,
) -> tuple[nn.Module, nn.Module]:
    """Eager and compiled, step by step, from the same start: everything bitwise the same."""
    torch.manual_seed(0)
    eager = make()
    other = copy.deepcopy(eager)
    compiled = compile(other)
    optimizers = None if optimizer is None else [optimizer(eager.parameters()), optimizer(other.parameters())]
    for i, args in enumerate(calls):
        if between is not None:
            between(eager, i)
            between(other, i)
        with around():
            expected = step(eager, *args, seed=i)
            after = torch.get_rng_state()
            found = step(compiled, *args, seed=i)
        assert_equal(expected, found, f"outputs of call {i}")
        assert torch.equal(after, torch.get_rng_state()), f"random state after call {i}"
        assert_same_state(eager, other)
        for o in optimizers or ():
            o.step()
            o.zero_grad()
    return eager, compiled


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def plays(play: Callable[[Any], Any], *, uncompiled: bool = False, **options: Any) -> list[Any]:
    """What a play does with `compile` in its hands is what it does with nothing compiled.

    It yields (or returns) what is compared. With no options this is the default front end, and something has
    to be compiled of each function.
    """
    compiled = []

    def compile_it(fn: Any) -> Any:
        compiled.append(aheadgrad.compile(fn, **{"max_entries": 64, **options}))
        return compiled[-1]

    assert_equal(_seen(play(lambda fn: fn)), _seen(play(compile_it)))
    assert uncompiled or all(fast.entries for fast in compiled)
    return compiled


def _seen(results: Any) -> list[Any]:
    """Everything that a play gave, as it was at that time."""
    kept = [results] if not isinstance(results, Iterator) else results
    return [tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, v) for v in kept]


def agree(fn: Callable[..., Any], compiled: Any, *args: Any, **kwargs: Any) -> None:
    """Values and gradients of one more call."""
    given = [a for a in [*args, *kwargs.values()] if isinstance(a, Tensor) and a.requires_grad and a.is_leaf]
    found = []
    for run in (fn, compiled):
        for t in given:
            t.grad = None
        torch.manual_seed(0)
        out = run(*args, **kwargs)
        first = out[0] if isinstance(out, tuple) else out
        if isinstance(first, Tensor) and first.requires_grad:
            first.sum().backward()
        flags = (first.requires_grad, first.stride(), first.is_inference(), first.device)
        found.append((flags, out, [None if t.grad is None else t.grad.clone() for t in given]))
    assert found[0][0] == found[1][0]
    assert_equal(found[0][1:], found[1][1:])
