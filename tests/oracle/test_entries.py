"""One compiled callable, called again and again: entries, refusals and what identifies a call."""

from __future__ import annotations

import collections
import copy
import datetime
import decimal
import fractions
import functools
import math
import pathlib
import pickle
import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import aheadgrad
from aheadgrad.errors import FallbackError, FallbackWarning

from .common import plays, strict


def traced(play: Callable[[Any], Any], **options: Any) -> None:
    """A play as in eager, whether it is compiled or not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        plays(play, uncompiled="fallback" not in options, **{"frontend": "trace", **options})


@pytest.mark.parametrize("text", ["return None", "    return None", "return MISS"])
def test_strings_that_look_like_generated_code(text: str) -> None:
    def play(compile: Any) -> Any:
        by_value = compile(lambda x, how: x * len(how))
        by_key = compile(lambda x, d: x * d[text])
        by_name = compile(lambda x, **kwargs: x * kwargs[text])
        x, out = torch.ones(1), []
        for n in (2, 2, 3):
            out += [by_value(x, text), by_key(x, {text: n}), by_name(x, **{text: n}), by_value(x, "other")]
        return out

    traced(play, fallback="error")


class Act(nn.Module):
    def __init__(self, act: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x * self.weight)


class Scaled:
    def __init__(self) -> None:
        self.factor = torch.ones(1) * 3

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor

    def half(self, x: Tensor) -> Tensor:
        return x * self.factor / 2


@aheadgrad.compile(frontend="trace")
def decorated(x: Tensor) -> Tensor:
    return x * 2


def plain(x: Tensor) -> Tensor:
    return x * 3


def test_a_compiled_function_is_copied_and_pickled_as_a_function_is() -> None:
    x = torch.ones(2)
    held = Act(strict(torch.tanh))
    expected = held(x)
    for other in (copy.deepcopy(held), pickle.loads(pickle.dumps(held))):
        assert torch.equal(other(x), expected)
        assert other.weight is not held.weight
    compiled = strict(plain)
    compiled(x)
    assert copy.deepcopy(compiled) is compiled
    assert torch.equal(pickle.loads(pickle.dumps(compiled))(x), plain(x))
    assert pickle.loads(pickle.dumps(decorated)) is decorated


def test_copies_of_compiled_objects_and_bound_methods_have_their_own() -> None:
    x, thing = torch.ones(2), Scaled()
    for compiled in (strict(thing), strict(thing.half)):
        before = compiled(x)
        for other in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
            assert torch.equal(other(x), before)
            thing.factor.mul_(2)
            assert torch.equal(other(x), before)
            thing.factor.div_(2)


def test_a_keyword_named_self() -> None:
    traced(lambda c: c(lambda x, self: x * self)(torch.ones(1), self=2.0), fallback="error")
    traced(lambda c: c(lambda x, args, kwargs: x * args - kwargs)(torch.ones(1), args=2.0, kwargs=1))


def refusing(x: Tensor) -> Tensor:
    """Reading `.grad` inside is refused, after the lines before it have run."""
    assert x.grad is None
    return x


def test_a_refused_call_leaves_what_is_checked_as_it_was() -> None:
    def play(compile: Any) -> Any:
        log: list[float] = []
        n, table = 0, {"n": 0}

        def f(x: Tensor) -> Tensor:
            nonlocal n
            n += 1
            table["n"] += 1
            log.append(random.random())
            return refusing(x) * n

        random.seed(0)
        run, x = compile(f), torch.ones(2)
        results = [run(x), run(x), run(torch.ones(3)), run(torch.ones(1, 1))]
        return results, n, table, log, random.random()

    traced(play)


class Counter:
    n = 0


def test_refusals_are_remembered_and_other_calls_tried() -> None:
    runs = Counter()  # an object's insides are no concern of a recording

    def f(x: Tensor, how: str) -> Tensor:
        runs.n += 1
        return x * 2 if how == "good" else refusing(x) * 3

    compiled = aheadgrad.compile(f, frontend="trace")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for n in range(1, 6):
            compiled(torch.ones(n), "bad")
    assert sum(compiled.fallbacks.values()) == 5
    assert runs.n == 1 + 5  # one recording
    for _ in range(3):
        compiled(torch.ones(1), "good")
    assert len(compiled.entries) == 1
    assert runs.n == 1 + 5 + 1
    assert sum(compiled.fallbacks.values()) == 5


def test_a_refusal_is_an_error_each_time_where_that_was_asked_for() -> None:
    compiled = strict(lambda x: refusing(x) * 2)
    for _ in range(3):
        with pytest.raises(FallbackError, match="grad of an input"):
            compiled(torch.ones(1))


def test_an_end_to_refusals() -> None:
    tried = Counter()

    def f(x: Tensor, how: str) -> Tensor:
        tried.n += 1
        return refusing(x) * len(how)

    compiled = aheadgrad.compile(f, max_entries=2, frontend="trace")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for n in range(6):
            assert compiled(torch.ones(1), "a" * n).item() == n
    assert len(compiled.fallbacks) == 2
    assert tried.n == 2 + 6  # two recordings


def test_a_set_or_array_argument_that_is_changed_inside() -> None:
    def play(compile: Any) -> Any:
        def f(x: Tensor, seen: set[int], table: Any) -> Tensor:
            seen.add(len(seen))
            table[0] += 1
            return x * len(seen) + float(table[0])

        run, x, seen, table, out = compile(f), torch.ones(1), {7}, numpy.zeros(2), []
        for _ in range(3):
            out.append(run(x, seen, table))
        return out, sorted(seen), table.tolist(), run(x, {7}, numpy.zeros(2))

    traced(play)


class Link:
    def __init__(self, rest: Any) -> None:
        self.rest = rest


def test_long_chains_and_lists_that_contain_themselves() -> None:
    def play(compile: Any) -> Any:
        chain: Any = None
        for _ in range(2000):
            chain = Link(chain)

        def walk(x: Tensor) -> Tensor:
            node, n = chain, 0
            while node is not None:
                node, n = node.rest, n + 1
            return x * n

        loop: list[Any] = [2.0]
        loop.append(loop)
        deep: list[Any] = []
        for _ in range(2000):
            deep = [deep]
        first = compile(lambda x, items: x * items[0])
        any_list = compile(lambda x, items: x * len(items))
        x = torch.ones(1)
        odd = collections.deque([x])
        results = [compile(walk)(x), first(x, [3.0]), first(x, loop), any_list(x, odd)]
        return [*results, any_list(x, deep), any_list(x, collections.deque([loop]))]

    traced(play)


def test_torchscript_is_left_alone() -> None:
    def play(compile: Any) -> Any:
        torch.manual_seed(0)
        scripted = torch.jit.script(nn.Linear(2, 2))
        part = compile(nn.Sequential(scripted, nn.ReLU()))
        called = compile(lambda x: scripted(x) * 2)
        function = compile(torch.jit.script(plain))
        x = torch.ones(1, 2)
        whole = [compile(scripted), compile(torch.jit.trace(nn.Linear(2, 2), x))]
        assert all(list(m.state_dict()) == ["weight", "bias"] for m in whole)
        return [run(x) for run in (part, called, function, *whole, whole[0].forward) for _ in range(2)]

    traced(play)


def test_an_argument_that_is_a_tensor_within_reach() -> None:
    def play(compile: Any) -> Any:
        held = torch.ones(1)
        by_closure = compile(lambda x: x * 2 if x is held else x * 3)
        x, out = torch.ones(1), []
        for t in (x, held, x, torch.zeros(1), held):
            out.append(by_closure(t))
        held = x
        return [*out, by_closure(x)]

    traced(play)


def test_keys_that_are_equal_and_not_the_same() -> None:
    def play(compile: Any) -> Any:
        def f(x: Tensor, d: Any) -> Tensor:
            (key,) = d
            return x * {bool: 2, int: 3, float: 5, str: 7, tuple: 11}[type(key)] * d[key]

        run, x, out = compile(f), torch.ones(1), []
        dicts: list[Any] = [{1: 4}, {True: 4}, {1.0: 4}, {"1": 4}, {(1,): 4}, {(True,): 4}]
        for d in dicts * 2:
            out += [run(x, d), run(x, collections.defaultdict(int, d)), run(x, collections.OrderedDict(d))]
        sign = compile(lambda x, d: x * math.copysign(1.0, next(iter(d))))
        return [*out, sign(x, {0.0: 1}), sign(x, {-0.0: 1})]

    traced(play)


def test_what_is_made_inside_is_new_at_each_call() -> None:
    def play(compile: Any) -> Any:
        def f(x: Tensor) -> Any:
            made = Counter()
            made.n = 1
            return x * 2, {1}, numpy.zeros(2), bytearray(b"ab"), made, [{"k": {2}}], lambda: made.n

        run, x, out = compile(f), torch.ones(1), []
        for _ in range(3):
            y, numbers, array, text, made, nested, later = run(x)
            out += [y, sorted(numbers), array.tolist(), bytes(text), made.n, sorted(nested[0]["k"]), later()]
            numbers.add(9)
            array[0] = 9
            text[0] = 0
            made.n = 9
            nested[0]["k"].clear()
        return out

    traced(play)


def test_what_belongs_to_the_caller_is_returned_itself() -> None:
    def play(compile: Any) -> Any:
        history: list[Any] = []
        thing, seen = Counter(), {3}

        def f(x: Tensor, d: Any, s: Any) -> Any:
            d["y"] = x * 2
            return d, (x, [d["inner"]], s), history, thing, seen

        run, x, out = compile(f), torch.ones(1), []
        for _ in range(3):
            d: dict[str, Any] = {"inner": [torch.zeros(1)]}
            s = {1}
            a, (b, (c,), e), h, t, own = run(x, d, s)
            out += [a is d, b is x, c is d["inner"], e is s, h is history, t is thing, own is seen, d["y"]]
        whole = compile(lambda d: d)
        return [*out, whole(d) is d, whole(h) is h, whole((1, 2))]

    traced(play)


def test_containers_that_are_changed_inside() -> None:
    class Pair(collections.namedtuple("Pair", "a b")):
        pass

    def play(compile: Any) -> Any:
        def f(x: Tensor, q: Any, d: Any, pair: Any) -> Tensor:
            q.append(x * 2)
            d["n"] = x * 3
            pair.a.append(x * 4)
            return x

        run, x = compile(f), torch.ones(1)
        q: Any = collections.deque(maxlen=2)
        d: Any = collections.defaultdict(list)
        pair = Pair([], 1)
        for _ in range(3):
            run(x, q, d, pair)
        run(x, [], collections.OrderedDict(), pair)
        return list(q), dict(d), len(pair.a), pair.a

    traced(play)


def _written_to(run: Callable[..., Any], x: Tensor) -> list[Any]:
    found: list[Any] = []
    try:
        found.append(run(x).detach())
    except RuntimeError as error:
        found.append(type(error).__name__)
    found.append(x._version)
    try:
        found.append((x + 1).detach())
    except RuntimeError as error:
        found.append(type(error).__name__)
    return found


def test_views_that_may_not_be_written_to() -> None:
    def play(compile: Any) -> Any:
        def f(x: Tensor) -> Tensor:
            x.mul_(2)
            return x * 1

        run, out = compile(f), []
        for _ in range(2):
            leaf = torch.ones(2, 1, requires_grad=True)
            with torch.no_grad():
                hidden = leaf[0]
            inner = leaf * 1
            out += [_written_to(run, t) for t in (leaf[0].clone(), inner.unbind(0)[0], leaf[0], inner[1])]
            out += [_written_to(run, t) for t in (hidden, torch.ones(1), leaf[0].clone())]
        return out

    traced(play)


@pytest.mark.parametrize(
    "options", [{}, {"frontend": "dynamo"}, {"frontend": "dynamo", "dynamic": True}], ids=str
)
def test_kernels_for_attention(options: Any) -> None:
    def play(compile: Any) -> Any:
        run = compile(lambda q: F.scaled_dot_product_attention(q, q, q))
        q = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        out: list[Any] = []
        for kernel in (None, SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION, None, SDPBackend.MATH):
            with nullcontext() if kernel is None else sdpa_kernel(kernel):
                try:
                    (grad,) = torch.autograd.grad(run(q).sum(), q)
                    out += [grad, grad.stride()]
                except RuntimeError as error:
                    out.append(str(error).splitlines()[0])
        return out

    traced(play, **options)


class Losses:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def of(self, x: Tensor) -> Tensor:
        return x * self.factor


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor


def test_equal_values_share_an_entry() -> None:
    losses = Losses(2.0)
    values: list[Callable[[], Any]] = [
        lambda: losses.of,
        lambda: functools.partial(_scaled, factor=3.0),
        lambda: fractions.Fraction(1, 3),
        lambda: decimal.Decimal("1.5"),
        lambda: pathlib.Path("/tmp/a"),
        lambda: datetime.date(2020, 1, 2),
        lambda: torch.finfo(torch.float32),
    ]
    x = torch.ones(1)
    for make in values:
        run = strict(lambda x, v: v(x) if callable(v) else x * len(str(v)))
        for _ in range(3):
            value = make()
            assert torch.equal(run(x, value), value(x) if callable(value) else x * len(str(value)))
        assert len(run.entries) == 1, make()


def test_other_methods_and_partials_are_told_apart() -> None:
    def play(compile: Any) -> Any:
        run, x, out = compile(lambda x, v: v(x)), torch.ones(1), []
        first, second = Losses(2.0), Losses(3.0)
        for v in (first.of, second.of, functools.partial(_scaled, factor=3.0), first.of):
            out.append(run(x, v))
        for factor in (3.0, 4.0, 3):
            out.append(run(x, functools.partial(_scaled, factor=factor)))
        shown = compile(lambda x, v: x * float(v))
        return [*out, *(shown(x, v) for v in (fractions.Fraction(1, 2), fractions.Fraction(1, 3)))]

    traced(play, fallback="error")


class Shy:
    k = 2.0

    def __repr__(self) -> str:
        raise ValueError("do not look")


def test_nothing_is_asked_for_its_text() -> None:
    shy = Shy()
    table = {"a": shy, "list": [shy], "tuple": (shy,)}
    held = [shy, {1: shy}]
    run = strict(lambda x, items: x * table["a"].k * held[0].k * len(items))
    x = torch.ones(1)
    with aheadgrad.explain_misses() as misses:
        for items in ([shy], (shy,), {"a": shy}, {shy: 1}, [shy, shy], slice(shy)):
            if not isinstance(items, slice):
                assert run(x, items).item() == 4.0 * len(items)
    assert len(misses) == 4


def test_a_miss_names_the_place_of_a_tensor() -> None:
    held: Any = torch.ones(2)

    def f(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2 if held is None else x * held

    run = strict(f)
    run(torch.ones(2))
    with aheadgrad.explain_misses() as misses:
        held = torch.ones(1)
        run(torch.ones(2))
        held = None
        run(torch.ones(2))
    for miss in misses:
        assert "held" in str(miss)
        assert "Error" not in str(miss)
