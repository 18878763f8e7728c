"""Called again in another way: never a stale answer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aheadgrad
from aheadgrad.errors import FallbackError, RecompileWarning

from .common import assert_equal, default, default_dtype, leaf, strict


def again(
    fn: Callable[..., Any],
    *calls: tuple[Any, ...],
    entries: int | None = None,
    compile: Callable[..., Any] = strict,
) -> Any:
    """Every call, twice over, as in eager; gradients too."""
    compiled = compile(fn, max_entries=32)
    for args in calls * 2:
        tensors = [a for a in args if isinstance(a, Tensor) and a.requires_grad and a.is_leaf]
        results = []
        for run in (fn, compiled):
            for t in tensors:
                t.grad = None
            out = run(*args)
            if isinstance(out, Tensor) and out.requires_grad:
                out.sum().backward()
            results.append((out, [None if t.grad is None else t.grad.clone() for t in tensors]))
        assert_equal(results[0], results[1])
        expected, found = results[0][0], results[1][0]
        if isinstance(expected, Tensor):
            assert expected.stride() == found.stride()
            assert expected.requires_grad == found.requires_grad
            assert expected.is_inference() == found.is_inference()
    if entries is not None:
        assert len(compiled.entries) == entries
    return compiled


def test_other_shapes() -> None:
    shapes = ((2, 3), (4, 3), (2, 1), (0, 3), (1, 1))
    again(lambda x: x * x.shape[0] + x.mean(0), *((leaf(*s),) for s in shapes), entries=5)


def test_other_ranks() -> None:
    again(lambda x: x.sum(-1) * x.dim(), (leaf(2),), (leaf(2, 3),), (leaf(2, 3, 4),))


def test_other_dtypes() -> None:
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    again(lambda x: x * 2.5, *((leaf(3, dtype=d),) for d in dtypes), entries=4)


def test_other_strides() -> None:
    x = leaf(3, 3)
    again(lambda t: t * 2, (x,), (x.t(),), (x[:, :1].expand(3, 3),), (leaf(6, 6).detach()[::2, ::2],))


def test_other_memory_formats() -> None:
    x = leaf(2, 3, 4, 4, grad=False)
    again(lambda t: torch.relu(t) * 2, (x,), (x.to(memory_format=torch.channels_last),))


def test_other_offsets() -> None:
    base = leaf(10, grad=False)
    again(lambda t: t.as_strided((2,), (1,)), (base[:4],), (base[3:7],))
    again(lambda t: t.storage_offset() * t, (base[:4],), (base[3:7],))


def offset_of_a_view(t: Tensor) -> Tensor:
    return t.detach()[1:].storage_offset() * t


def offset_after_moving(t: Tensor) -> Tensor:
    view = t[1:]
    t.data = t * 2
    return view.storage_offset() * t + t.storage_offset()


def test_offsets_asked_of_what_shares_memory_with_an_input() -> None:
    base = leaf(10, grad=False)
    again(offset_of_a_view, (base[:4],), (base[3:7],))
    again(lambda t: t.contiguous().storage_offset() * t, (base[:4],), (base[3:7],))
    again(lambda t, u: (t * 2).storage_offset() + u.storage_offset() * t, (base[:4],) * 2, (base[3:7],) * 2)
    plain, compiled = base.clone(), aheadgrad.compile(offset_after_moving, frontend="trace")
    with pytest.warns(aheadgrad.errors.FallbackWarning, match="data of a tensor is set"):
        for start in (0, 3, 0):
            expected = offset_after_moving(plain[start : start + 4])
            assert torch.equal(compiled(base[start : start + 4]), expected)


def test_offsets_of_new_tensors_are_no_matter_of_the_inputs() -> None:
    base = leaf(10, grad=False)
    compiled = strict(lambda t: (t * 2)[1:].storage_offset() + t)
    for start in (0, 3):
        assert torch.equal(compiled(base[start : start + 4]), 1 + base[start : start + 4])
    assert len(compiled.entries) == 1


def asks(t: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
    return t + 1 if of(t).requires_grad else t - 1


def with_grad(t: Tensor) -> Tensor:
    with torch.enable_grad():
        return t * 2


@pytest.mark.parametrize(
    ("of", "guarded"),
    [(lambda t: t, True), (lambda t: t.detach().mul_(1), True), (with_grad, True), (lambda t: t * 2, False)],
    ids=["input", "shares memory", "made with grad mode on", "new"],
)
def test_requires_grad_asked_with_grad_mode_off(of: Callable[[Tensor], Tensor], guarded: bool) -> None:
    compiled = strict(lambda t: asks(t, of))
    with torch.no_grad():
        for grad in (False, True, False):
            x = leaf(3, grad=grad)
            assert torch.equal(compiled(x), asks(x, of))
    assert ("if not (requires_grad(" in compiled.source) == guarded


def test_other_requires_grad() -> None:
    x, y = leaf(3), leaf(3, grad=False)
    again(lambda a, b: a * b, (x, y), (y, x), (x, x), (y, y), (x, leaf(3, seed=1)))


def test_leaf_and_not() -> None:
    x = leaf(3)
    compiled = strict(lambda a: a * 2)
    for make in (lambda: x, lambda: x * 1, x.detach) * 2:
        out = compiled(make())
        assert torch.equal(out, x * 2)
        assert out.requires_grad == make().requires_grad


def test_aliasing() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return a * b

    compiled = strict(fn)
    for make in (
        lambda: [torch.ones(3), torch.ones(3)],
        lambda: [torch.ones(3)] * 2,
        lambda: (lambda t: [t[:3], t[1:4]])(torch.arange(5.0)),
        lambda: (lambda t: [t[:3], t[2:5]])(torch.arange(5.0)),
        lambda: (lambda t: [t[:2], t[2:4]])(torch.arange(5.0)),
        lambda: (lambda t: [t, t.view(3)])(torch.arange(3.0)),
    ):
        for _ in range(2):
            ours, theirs = make(), make()
            assert torch.equal(fn(*theirs), compiled(*ours))
            assert_equal(theirs, ours)


def test_identity_of_arguments() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        return a * 2 if a is b else a * 3

    x, y = leaf(3, seed=1), leaf(3, seed=2)
    again(fn, (x, y), (x, x), (y, y), (y, x))


def test_structure() -> None:
    def fn(xs: Any) -> Tensor:
        parts = list(xs.values()) if isinstance(xs, dict) else list(xs)
        return sum(p * i for i, p in enumerate(parts, 1)) * (2 if isinstance(xs, list) else 1)  # type: ignore[return-value]

    x, y = leaf(3, seed=1), leaf(3, seed=2)
    again(fn, ([x, y],), ((x, y),), ({"a": x, "b": y},), ({"b": x, "a": y},), ([x],), ([x, y, x],))


def test_depth_of_structure() -> None:
    def fn(xs: Any) -> Tensor:
        return xs[0] * 2 if isinstance(xs[0], Tensor) else xs[0][0] * 3

    x = leaf(3)
    again(fn, ([x],), ([[x]],), (((x,),),))


def test_numbers() -> None:
    def fn(x: Tensor, n: Any) -> Tensor:
        kind = {bool: 2, int: 3, float: 5, complex: 7}[type(n)]
        return x * kind + n

    x = leaf(3, grad=False)
    again(fn, (x, 1), (x, 1.0), (x, True), (x, 1 + 0j), (x, 2), (x, 0), (x, False))


def test_zero_and_negative_zero() -> None:
    def fn(x: Tensor, n: float) -> Tensor:
        return torch.atan2(torch.full((1,), n), x)

    compiled = strict(fn)
    x = torch.tensor([-1.0])
    for n in (0.0, -0.0, 0.0, -0.0):
        assert torch.equal(compiled(x, n), fn(x, n))


def test_nan_is_the_same_call() -> None:
    x = leaf(3, grad=False)
    again(lambda t, n: t * n, (x, float("nan")), (x, float("inf")), (x, -float("inf")), entries=3)


def test_many_words_run_uncompiled_with_one_warning() -> None:
    compiled = aheadgrad.compile(lambda x, word: x * len(word), max_entries=3, frontend="trace")
    x = leaf(3)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for n in range(10):
            assert torch.equal(compiled(x, "a" * n), x * n)
    kinds = [w.category for w in seen]
    assert kinds.count(RecompileWarning) == 1
    assert len(compiled.entries) == 3
    assert sum(compiled.fallbacks.values()) == 7
    warned = next(w for w in seen if w.category is RecompileWarning)
    assert warned.filename == __file__
    assert torch.equal(compiled(x, "a"), x * 1)
    assert sum(compiled.fallbacks.values()) == 7  # known calls still run compiled


def test_the_warning_says_what_keeps_changing() -> None:
    def scaled(x: Tensor, factor: str) -> Tensor:
        return x * len(factor)

    compiled = aheadgrad.compile(scaled, max_entries=2, frontend="trace")
    x = leaf(3)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for n in range(4):
            compiled(x, "a" * n)
    text = next(str(w.message) for w in seen if w.category is RecompileWarning)
    assert "scaled" in text
    assert "factor" in text


def test_too_many_entries_is_an_error_where_asked_for() -> None:
    compiled = aheadgrad.compile(
        lambda x, word: x * len(word), max_entries=2, fallback="error", frontend="trace"
    )
    x = leaf(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecompileWarning)
        compiled(x, "a")
        compiled(x, "b")
        with pytest.raises(FallbackError):
            compiled(x, "c")


# ambient state


@contextmanager
def deterministic(*, warn_only: bool = False) -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast half": lambda: torch.autocast("cpu", torch.float16),
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "autocast without cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "deterministic": deterministic,
    "double": lambda: default_dtype(torch.float64),
}


@pytest.mark.parametrize("second", STATES)
@pytest.mark.parametrize("first", STATES)
def test_states_one_after_the_other(first: str, second: str) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        extra = torch.ones(3) * (2 if torch.is_grad_enabled() else 3)
        return (x @ w) * extra

    compiled = strict(fn)
    for name in (first, second, first):
        results = []
        for run in (fn, compiled):
            x, w = leaf(2, 3), leaf(3, 3, seed=1)
            with STATES[name]():
                out = run(x, w)
            facts = out.dtype, out.requires_grad, out.is_inference()
            if out.requires_grad:
                out.sum().backward()
            results.append((facts, out, x.grad, w.grad))
        assert_equal(results[0], results[1], name)


def test_inference_tensors_as_arguments() -> None:
    with torch.inference_mode():
        inner = torch.ones(3)
    compiled = strict(lambda x: x * 2)
    for x in (torch.ones(3), inner, leaf(3), inner):
        out = compiled(x)
        assert torch.equal(out, x * 2)
        assert out.is_inference() == (x * 2).is_inference()
    with torch.inference_mode():
        assert compiled(inner).is_inference()


def test_deterministic_mode_is_checked_as_in_eager() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.empty(3).copy_(x) if torch.are_deterministic_algorithms_enabled() else x * 2

    compiled = strict(fn)
    x = leaf(3, grad=False)
    assert torch.equal(compiled(x), x * 2)
    with deterministic():
        assert torch.equal(compiled(x), x)
    assert torch.equal(compiled(x), x * 2)


# what the function closes over

GLOBAL = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
FACTOR = 2.0
TABLE: dict[str, Any] = {"w": torch.ones(3), "n": 1}
HELPERS: list[Callable[[Tensor], Tensor]] = [torch.sin]


def _uses_global(x: Tensor) -> Tensor:
    return x * GLOBAL


def _helper(x: Tensor) -> Tensor:
    return x * GLOBAL * FACTOR


def test_a_global_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = strict(_uses_global)
    x = leaf(3)
    GLOBAL.grad = None
    compiled(x).sum().backward()
    assert torch.equal(GLOBAL.grad, x)  # type: ignore[arg-type]
    with torch.no_grad():
        GLOBAL.mul_(2)
    assert torch.equal(compiled(x), x * GLOBAL)
    monkeypatch.setitem(globals(), "GLOBAL", torch.tensor([5.0, 6.0, 7.0]))
    assert torch.equal(compiled(x), x * GLOBAL)
    monkeypatch.setitem(globals(), "GLOBAL", torch.tensor([5.0], dtype=torch.float64))
    assert_equal(compiled(x), x * GLOBAL)


def test_a_global_number(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = strict(lambda x: x * FACTOR)
    x = leaf(3)
    assert torch.equal(compiled(x), x * 2)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert torch.equal(compiled(x), x * 3)


def test_what_a_helper_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = default(lambda x: _helper(x) + 1)
    x = leaf(3)
    assert torch.equal(compiled(x), _helper(x) + 1)
    monkeypatch.setitem(globals(), "GLOBAL", torch.tensor([5.0, 6.0, 7.0]))
    assert torch.equal(compiled(x), _helper(x) + 1)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert torch.equal(compiled(x), _helper(x) + 1)


def test_a_tensor_in_a_global_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: Tensor) -> Tensor:
        return x * TABLE["w"] * TABLE["n"]

    compiled = strict(fn)
    x = leaf(3)
    assert torch.equal(compiled(x), fn(x))
    monkeypatch.setitem(TABLE, "w", torch.full((3,), 5.0))
    assert torch.equal(compiled(x), fn(x))
    monkeypatch.setitem(TABLE, "n", 4)
    assert torch.equal(compiled(x), fn(x))


def test_a_function_in_a_global_list(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: Tensor) -> Tensor:
        return HELPERS[0](x)

    compiled = strict(fn)
    x = leaf(3)
    assert torch.equal(compiled(x), x.sin())
    monkeypatch.setitem(globals(), "HELPERS", [torch.cos])
    assert torch.equal(compiled(x), x.cos())


def test_a_helper_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: Tensor) -> Tensor:
        return _helper(x)

    compiled = strict(fn)
    x = leaf(3)
    compiled(x)
    monkeypatch.setitem(globals(), "_helper", lambda t: t + 100)
    assert torch.equal(compiled(x), x + 100)


def test_a_closure_is_rebound() -> None:
    w = leaf(3, seed=5)

    def fn(x: Tensor) -> Tensor:
        return x * w

    compiled = strict(fn)
    x = leaf(3)
    compiled(x).sum().backward()
    assert torch.equal(w.grad, x)  # type: ignore[arg-type]
    w = leaf(3, seed=6)
    assert torch.equal(compiled(x), x * w)
    compiled(x).sum().backward()
    assert torch.equal(w.grad, x)  # type: ignore[arg-type]
    w = leaf(1, seed=6, dtype=torch.float64)
    assert_equal(compiled(x), x * w)


def test_a_closed_over_number_is_rebound() -> None:
    n = 2
    compiled = strict(lambda x: x * n)
    x = leaf(3)
    assert torch.equal(compiled(x), x * 2)
    n = 3
    assert torch.equal(compiled(x), x * 3)


def test_closed_over_and_given() -> None:
    w = leaf(3)

    def fn(x: Tensor) -> Tensor:
        return x * w if x is not w else x * 100

    again(fn, (leaf(3, seed=1),), (w,), compile=default)


def test_a_closed_over_tensor_changes_its_kind() -> None:
    w = leaf(3, grad=False)
    compiled = strict(lambda x: x * w)
    x = leaf(3, seed=1)
    compiled(x)
    w.requires_grad_()
    compiled(x).sum().backward()
    assert torch.equal(w.grad, x)  # type: ignore[arg-type]
    w.data = torch.ones(2, 3)
    assert torch.equal(compiled(x), x * w)


def test_a_closed_over_tensor_is_changed_by_the_function() -> None:
    total = torch.zeros(3)

    def fn(x: Tensor) -> Tensor:
        total.add_(x.detach())
        return x * total

    compiled = strict(fn)
    x = leaf(3)
    for i in range(1, 4):
        out = compiled(x)
        torch.testing.assert_close(total, x.detach() * i)
        torch.testing.assert_close(out, x * total)


def test_a_closed_over_tensor_that_is_also_an_argument_and_is_changed() -> None:
    state = torch.zeros(3)

    def fn(x: Tensor) -> Tensor:
        state.add_(1)
        return x + 0

    compiled = default(fn)
    assert torch.equal(compiled(torch.ones(3)), torch.ones(3))
    assert torch.equal(compiled(state), torch.full((3,), 2.0))
    assert torch.equal(compiled(state[:2]), torch.full((2,), 3.0))


def test_a_closed_over_name_is_rebound_by_the_function() -> None:
    count = torch.zeros(())

    def fn(x: Tensor) -> Tensor:
        nonlocal count
        count = count + 1
        return x * count

    compiled = aheadgrad.compile(fn, frontend="trace")
    x = leaf(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", aheadgrad.errors.FallbackWarning)
        for i in range(1, 4):
            assert torch.equal(compiled(x), x * i)
    assert float(count) == 3


def test_closed_over_tensors_change_places() -> None:
    a, b = torch.zeros(3), torch.ones(3)

    def fn(x: Tensor) -> Tensor:
        nonlocal a, b
        a, b = b, a
        return x * a

    with pytest.raises(FallbackError, match="the function changes a"):
        strict(fn)(leaf(3))
    compiled = default(fn)
    for i in range(4):
        assert torch.equal(compiled(leaf(3)), leaf(3) * ((i + 1) % 2)), i


def test_an_attribute_of_a_closed_over_object() -> None:
    class Box:
        w = leaf(3, seed=3)
        n = 2.0

    box = Box()
    compiled = default(lambda x: x * box.w * box.n)
    x = leaf(3)
    assert torch.equal(compiled(x), x * box.w * 2.0)
    box.w = leaf(3, seed=4)
    assert torch.equal(compiled(x), x * box.w * 2.0)
    box.n = 3.0
    assert torch.equal(compiled(x), x * box.w * 3.0)


def test_a_parameter_of_a_closed_over_module_is_replaced() -> None:
    model = nn.Linear(3, 3)
    compiled = strict(lambda x: x @ model.weight)
    x = leaf(2, 3)
    assert torch.equal(compiled(x), x @ model.weight)
    model.weight = nn.Parameter(torch.eye(3))
    assert torch.equal(compiled(x), x @ model.weight)
    compiled(x).sum().backward()
    assert model.weight.grad is not None


def test_a_closed_over_list_grows() -> None:
    ws = [leaf(3, seed=1)]

    def fn(x: Tensor) -> Tensor:
        for w in ws:
            x = x * w
        return x

    compiled = strict(fn)
    x = leaf(3)
    assert torch.equal(compiled(x), fn(x))
    ws.append(leaf(3, seed=2))
    assert torch.equal(compiled(x), fn(x))
    ws[0] = leaf(3, seed=3)
    assert torch.equal(compiled(x), fn(x))


def test_an_object_given_as_argument_changes() -> None:
    class Config:
        scale = 2.0

    config = Config()
    compiled = default(lambda x, c: x * c.scale)
    x = leaf(3)
    assert torch.equal(compiled(x, config), x * 2)
    config.scale = 3.0
    assert torch.equal(compiled(x, config), x * 3)


def test_two_threads_at_once() -> None:
    import threading

    compiled = strict(lambda x: (x * 2).sin().sum())
    errors: list[BaseException] = []

    def work(n: int) -> None:
        try:
            for i in range(5):
                x = leaf(n + i)
                compiled(x).backward()
                torch.testing.assert_close(x.grad, (x * 2).cos() * 2)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in (2, 2, 3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == []


def test_another_offset_behind_an_alias() -> None:
    """The alias is made again by sizes and strides, so the place in memory counts."""

    def f(a: Tensor) -> Tensor:
        alias = a.detach()
        a.squeeze_()
        return alias

    again(f, *((torch.arange(12.0).view(4, 3)[k],) for k in (1, 3, 0)))


def test_a_view_that_only_some_sizes_allow() -> None:
    def f(a: Tensor) -> Tensor:
        return a.view(-1)

    for dynamic in (None, True):
        compiled = strict(f, dynamic=dynamic)
        for n in (1, 2, 3, 1):
            x = torch.ones(n, 1, 4).transpose(0, -1)
            if n == 1:
                assert torch.equal(compiled(x), f(x))
                continue
            with pytest.raises(RuntimeError, match="view size is not compatible"):
                f(x)
            with pytest.raises(RuntimeError, match="view size is not compatible"):
                compiled(x)


def test_sizes_for_which_a_condition_makes_no_sense() -> None:
    def f(b: Tensor) -> Any:
        return b[1:].chunk(3)

    for dynamic in (None, True):
        compiled = strict(f, dynamic=dynamic)
        for n in (4, 1, 5, 7, 1):
            assert_equal(f(torch.ones(n)), compiled(torch.ones(n)))
