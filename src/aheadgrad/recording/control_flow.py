"""Control-flow operators: graphs in place of functions, and derivatives that are such operators again.

    cond(p, f, g, xs)       ->  cond(p, vjp f, vjp g, (xs, tangents))
    map(f, xs, others)      ->  map(vjp f, (xs, tangents), others), summed up for the others
    scan(f, c, xs, others)  ->  scan(vjp f, tangents of c, (xs, carries, tangents) from the last to the first)
    while_loop(p, f, c)     ->  while_loop over the carries, from the last to the first

So there are derivatives of any order. What the functions close over is one more operand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from aheadgrad.errors import FallbackError
from aheadgrad.torchlayer import functional
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.bodies import Closed, Function, GraphModule, outputs_of, traced, vjp
from aheadgrad.torchlayer.fake import FakeTensorMode
from aheadgrad.torchlayer.unbacked import DynamicOutputShapeException, follows_values

if TYPE_CHECKING:
    from aheadgrad.recording.session import Session

_ops = torch.ops.higher_order


class Place(NamedTuple):
    """Where an operator is called: its operands as values, and values as results.

    `lift` gives the operand for a tensor that a function closes over.
    """

    mode: FakeTensorMode
    lift: Callable[[Tensor], Tensor]
    value: Callable[[Tensor], Any]
    wrap: Callable[[Any], Tensor]


def controlled(session: Session, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results of an operator that the function calls; NotImplemented for one that is left to torch."""
    if op not in _RULES or session.veiled:
        return NotImplemented

    def lift(t: Tensor) -> Tensor:
        return t if functional.is_wrapped(t) else session.lift(t)

    return _RULES[op](Place(session.mode, lift, functional.latest, session.wrap), *args, **kwargs)


def _inside(mode: FakeTensorMode, op: Any, args: Any, kwargs: Any) -> Any:
    """The same for an operator inside a function that was given to another one."""
    if op not in _RULES:
        return op(*args, **kwargs)
    return _RULES[op](Place(mode, _itself, _itself, _itself), *args, **kwargs)


def _itself(t: Tensor) -> Tensor:
    return t


def _fakes(place: Place, tensors: Sequence[Tensor]) -> list[Any]:
    """Examples of operands, for graphs."""
    found = []
    for t in tensors:
        if not isinstance(t, Tensor):
            raise FallbackError("an operand of a control-flow operator is no tensor")
        value = place.value(t)
        with functional.outside():
            found.append(value.detach())
    return found


def _rows(place: Place, tensors: Sequence[Tensor]) -> list[Any]:
    with functional.outside():
        return [t[0].clone() for t in _fakes(place, tensors)]


def _cond(place: Place, pred: Any, true: Any, false: Any, operands: Any) -> Any:
    closed, examples = Closed(place.mode, place.lift), _fakes(place, operands)
    (one, spec), (other, _) = closed.graph(true, examples), closed.graph(false, examples)
    rule = Cond(closed.complete(one), closed.complete(other), (*examples, *closed.fakes))
    return pytree.tree_unflatten(list(rule.apply(place, pred, *operands, *closed.tensors)), spec)


def _map(place: Place, function: Any, xs: Any, others: Any) -> Any:
    closed, rows, rest = Closed(place.mode, place.lift), _rows(place, xs), _fakes(place, others)
    graph, spec = closed.graph(function, (*rows, *rest))
    rule = Map(closed.complete(graph), len(xs), (*rows, *rest, *closed.fakes))
    return pytree.tree_unflatten(list(rule.apply(place, *xs, *others, *closed.tensors)), spec)


def _scan(place: Place, function: Any, init: Any, xs: Any, additional_inputs: Any = ()) -> Any:
    closed = Closed(place.mode, place.lift)
    examples = *_fakes(place, init), *_rows(place, xs), *_fakes(place, additional_inputs)
    graph, spec = closed.graph(function, examples)
    rule = Scan(closed.complete(graph), len(init), len(xs), (*examples, *closed.fakes))
    out = rule.apply(place, *init, *xs, *additional_inputs, *closed.tensors)
    return pytree.tree_unflatten(list(out)[: spec.num_leaves], spec)


def _while(place: Place, test: Any, function: Any, carried: Any, additional_inputs: Any) -> Any:
    if not all(isinstance(t, Tensor) for t in carried):
        return NotImplemented  # a number, whose value is not known afterwards
    closed, examples = Closed(place.mode, place.lift), _fakes(place, (*carried, *additional_inputs))
    (asks, _), (goes, spec) = closed.graph(test, examples), closed.graph(function, examples)
    functions = closed.complete(asks), closed.complete(goes)
    rule = While(*functions, len(carried), (*examples, *closed.fakes))
    out = rule.apply(place, *carried, *additional_inputs, *closed.tensors)
    return pytree.tree_unflatten(list(out)[: len(carried)], spec)


_RULES: dict[Any, Callable[..., Any]] = {
    _ops.cond: _cond,
    _ops.map_impl: _map,
    _ops.scan: _scan,
    _ops.while_loop: _while,
}


Tensors = list[Tensor]


class Rule:
    """An operator with its graphs. `own` are the results that it has in any case."""

    @property
    def own(self) -> int:
        raise NotImplementedError

    def operator(self, *, keeps: bool) -> Callable[[list[Any]], Any]:
        """A function of the operands. `keeps`: with what its derivative needs behind its results."""
        raise NotImplementedError

    def derive(self, place: Place, operands: Tensors, results: Tensors, tangents: Tensors) -> list[Any]:
        """Gradients of the operands. Of its own results only the looks are known."""
        raise NotImplementedError

    def apply(self, place: Place, *operands: Tensor) -> tuple[Tensor, ...]:
        out: tuple[Tensor, ...] = _Controlled.apply(place, self, *operands)
        return out


class _Controlled(torch.autograd.Function):
    """One operator, as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, place: Place, rule: Rule, *operands: Tensor) -> Any:
        values = list(map(place.value, operands))
        operator = rule.operator(keeps=any(ctx.needs_input_grad))
        with functional.below(), functional.below_autograd():
            results = operator(values)
        out = tuple(map(place.wrap, results))
        ctx.place, ctx.rule, ctx.count = place, rule, len(operands)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands, *out[rule.own :])
        ctx.own = results[: rule.own]
        ctx.mark_non_differentiable(*(t for t in out if not _differentiable(t)))
        return out

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Any:
        operands, kept = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        return None, None, *ctx.rule.derive(ctx.place, operands, [*ctx.own, *kept], tangents)


def _filled(tangents: Sequence[Tensor | None], like: Sequence[Tensor], which: Sequence[bool]) -> Tensors:
    """The tangents of these, zeros where there are none."""
    found = compress(zip(tangents, like, strict=False), which)
    return [_zeros(t) if g is None else g.contiguous() for g, t in found]


def _zeros(t: Tensor) -> Tensor:
    """Zeros that do not rest on the tensor itself, which would have to be kept."""
    return torch.zeros(t.size(), dtype=t.dtype, device=t.device)


def _differentiable(t: Any) -> bool:
    return isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex())


def _which(tensors: Sequence[Any]) -> list[bool]:
    return [_differentiable(t) for t in tensors]


def _spread(wanted: Sequence[bool], grads: Sequence[Tensor]) -> list[Any]:
    rest = iter(grads)
    return [next(rest) if w else None for w in wanted]


def _cut(values: Sequence[Any], *lengths: int) -> list[Any]:
    """Values in groups of these lengths, and one of the rest."""
    rest = iter(values)
    return [*(tuple(islice(rest, n)) for n in lengths), tuple(rest)]


@dataclass(frozen=True, eq=False)
class Cond(Rule):
    """Operands: the predicate, then those of both graphs."""

    true: Function
    false: Function
    examples: tuple[Any, ...]

    @cached_property
    def graphs(self) -> list[GraphModule]:
        return [traced(function, self.examples) for function in (self.true, self.false)]

    @property
    def own(self) -> int:
        return len(outputs_of(self.graphs[0]))

    def operator(self, *, keeps: bool) -> Callable[[list[Any]], Any]:
        true, false = self.graphs
        return lambda operands: _ops.cond(operands[0], true, false, tuple(operands[1:]))

    def derive(self, place: Place, operands: Tensors, results: Tensors, tangents: Tensors) -> list[Any]:
        outs = outputs_of(self.graphs[0])
        wanted, given = _which(self.examples), _which(outs)
        examples = (*self.examples, *compress(outs, given))
        true, false = (vjp(function, wanted, given, _inside) for function in (self.true, self.false))
        grads = Cond(true, false, examples).apply(place, *operands, *_filled(tangents, results, given))
        return [None, *_spread(wanted, grads)]


class RowByRow(Rule):
    """An operator with one function, which it calls for each row."""

    function: Function
    examples: tuple[Any, ...]

    @cached_property
    def graph(self) -> GraphModule:
        return traced(self.function, self.examples)

    @property
    def own(self) -> int:
        return len(outputs_of(self.graph))


@dataclass(frozen=True, eq=False)
class Map(RowByRow):
    """Operands: what is taken row by row, then the rest. The examples are rows."""

    function: Function
    rows: int
    examples: tuple[Any, ...]

    def operator(self, *, keeps: bool) -> Callable[[list[Any]], Any]:
        graph, n = self.graph, self.rows
        return lambda operands: _ops.map_impl(graph, operands[:n], operands[n:])

    def derive(self, place: Place, operands: Tensors, results: Tensors, tangents: Tensors) -> list[Any]:
        outs, n = outputs_of(self.graph), self.rows
        wanted, given = _which(self.examples), _which(outs)
        back, more = vjp(self.function, wanted, given, _inside), sum(given)

        def step(*args: Tensor) -> Tensors:
            xs, gs, rest = _cut(args, n, more)
            return back(*xs, *rest, *gs)

        examples = (*self.examples[:n], *compress(outs, given), *self.examples[n:])
        rule = Map(step, n + more, examples)
        grads = rule.apply(place, *operands[:n], *_filled(tangents, results, given), *operands[n:])
        spread = _spread(wanted, grads)
        return spread[:n] + [None if g is None else g.sum(0) for g in spread[n:]]


@dataclass(frozen=True, eq=False)
class Scan(RowByRow):
    """Operands: what is carried, what is taken row by row, then the rest.

    Kept: what was carried into each step.
    """

    function: Function
    carried: int
    rows: int
    examples: tuple[Any, ...]

    def operator(self, *, keeps: bool) -> Callable[[list[Any]], Any]:
        graph, groups = self.graph, (self.carried, self.rows)
        if keeps:
            graph = traced(lambda *args: [*self.graph(*args), *args[: self.carried]], self.examples)
        return lambda operands: _ops.scan(graph, *map(list, _cut(operands, *groups)))

    def derive(self, place: Place, operands: Tensors, results: Tensors, tangents: Tensors) -> list[Any]:
        outs, n, m = outputs_of(self.graph), self.carried, self.rows
        wanted, given = _which(self.examples), _which(outs)
        of_carried, of_xs, of_rest = _cut(wanted, n, m)
        carried, rest, ys = sum(of_carried), sum(of_rest), sum(given[n:])
        more = carried if any(t is not None for t in tangents[len(outs) :]) else 0
        back = vjp(self.function, wanted, given, _inside)

        def step(*args: Tensor) -> Tensors:
            gc, added, c, x, gy, kept, others = _cut(args, carried, rest, n, m, ys, more)
            gc, gx, go = _cut(back(*c, *x, *others, *gc, *gy), carried, sum(of_xs))
            gc = map(torch.add, gc, kept) if more else gc
            return [*gc, *map(torch.add, added, go), *gx]

        c, x, others = _cut(self.examples, n, m)
        gc, gy = list(compress(c, of_carried)), list(compress(outs[n:], given[n:]))
        examples = (*gc, *compress(others, of_rest), *c, *x, *gy, *gc[:more], *others)
        rule = Scan(step, carried + rest, n + m + ys + more, examples)
        _, xs, others = _cut(operands, n, m)
        first = _filled(tangents, results, of_carried)
        first += [_zeros(t) for t in compress(others, of_rest)]
        rows = [*results[len(outs) :], *xs, *_filled(tangents[n:], results[n:], given[n:])]
        rows += _filled(tangents[len(outs) :], results[len(outs) :], of_carried) if more else []
        grads = rule.apply(place, *first, *(t.flip(0) for t in rows), *others)
        gc, go, gx, _ = _cut(grads, carried, rest, sum(of_xs))
        return [*_spread(of_carried, gc), *_spread(of_xs, [g.flip(0) for g in gx]), *_spread(of_rest, go)]


@dataclass(frozen=True, eq=False)
class While(Rule):
    """Operands: what is carried, then the rest. Kept: the number of steps, and what was carried into each."""

    test: Function
    function: Function
    carried: int
    examples: tuple[Any, ...]

    @property
    def own(self) -> int:
        return self.carried

    def operator(self, *, keeps: bool) -> Callable[[list[Any]], Any]:
        n, test, function = self.carried, self.test, self.function
        if not keeps:
            asks = traced(lambda *args: test(*args)[0], self.examples)
            goes = traced(lambda *args: tuple(function(*args)), self.examples)
            return lambda operands: _ops.while_loop(asks, goes, *_cut(operands, n))
        mode = self.examples[0].fake_mode
        if not follows_values(mode):  # how many steps there are is the size of what is kept
            raise DynamicOutputShapeException(_ops.while_loop)  # type: ignore[arg-type]
        with functional.outside(), mode:
            examples = torch.zeros((), dtype=torch.int64), *self.examples[:n], *self.examples
        asks = traced(lambda *args: test(*args[1 + n :])[0], examples)
        goes = traced(lambda k, *a: (k + 1, *map(torch.clone, a[n : 2 * n]), *function(*a[n:])), examples)

        def run(operands: list[Any]) -> Any:
            start = torch.zeros((), dtype=torch.int64)
            given = _cut([start, *operands[:n], *operands], 1 + 2 * n)
            stacks = _ops.while_loop_stack_output(asks, goes, *given)
            last, each, gave = _cut(stacks, 1, n)
            return [*(t[-1] for t in (*gave, *last)), *each]

        return run

    def derive(self, place: Place, operands: Tensors, results: Tensors, tangents: Tensors) -> list[Any]:
        n = self.carried
        wanted = _which(self.examples)
        of_carried, of_rest = _cut(wanted, n)
        carried, rest = sum(of_carried), sum(of_rest)
        more = carried if any(t is not None for t in tangents[n + 1 :]) else 0
        back = vjp(self.function, wanted, of_carried, _inside)

        def step(k: Tensor, *args: Tensor) -> Tensors:
            gc, added, each, kept, others = _cut(args, carried, rest, n, more)
            inputs, kept = (
                [t.index_select(0, (k - 1).reshape(1)).squeeze(0) for t in ts] for ts in (each, kept)
            )
            gc, go = _cut(back(*inputs, *others, *gc), carried)
            gc = map(torch.add, gc, kept) if more else gc
            return [k - 1, *gc, *map(torch.add, added, go)]

        _, others = _cut(operands, n)
        given = [results[n], *_filled(tangents, results, of_carried)]
        given += [_zeros(t) for t in compress(others, of_rest)]
        first = len(given)
        given += results[n + 1 :]
        given += _filled(tangents[n + 1 :], results[n + 1 :], of_carried) if more else []
        given += others
        rule = While(lambda k, *_: [k > 0], step, first, tuple(_fakes(place, given)))
        _, gc, go, _ = _cut(rule.apply(place, *given), 1, carried, rest)
        return [*_spread(of_carried, gc), *_spread(of_rest, go)]
