"""The autograd node of one component, as a class with generated methods.

The forward program has run before the node is applied: the node only adopts its results, keeps
what the backward needs, and hands tangents to the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from aheadgrad.backends.contract import Executable
from aheadgrad.conventions.interior import check_viewed
from aheadgrad.conventions.whole_subclasses import tangent_test
from aheadgrad.emit.script import Namespace, Script
from aheadgrad.runtime.anomaly import checked
from aheadgrad.runtime.backward import Backward, Failure, found, unchanged
from aheadgrad.runtime.freeing import free_below
from aheadgrad.runtime.links import Ways, link, link_to_edges
from aheadgrad.runtime.tangents import give_tangents_away, take_tangents
from aheadgrad.runtime.watch import check_watched
from aheadgrad.torchlayer.autocast import any_autocast
from aheadgrad.torchlayer.autograd import NodeBase, bare_apply, gives_tangents_away
from aheadgrad.torchlayer.hooks import quiet_hooks, quiet_leaves
from aheadgrad.torchlayer.wanted import accumulates, wanted_inputs

if TYPE_CHECKING:
    from aheadgrad.runtime.differentiable import Higher

_OF_NODES = {"lifetime": None, "below": None, "leaves": None, "inner": (), "viewed": ()}
"""What else nodes may have: lifetimes (`below`: of whose gradients they adopt), and leaves as inputs."""


def make_node(
    backward: Backward,
    outputs: int,
    saved: int,
    sizes: int,
    inputs: int,
    name: str,
    *,
    ways: Ways,
    higher: Higher,
    watched: bool = False,
    failure: Failure | None = None,
    direct: Direct | None = None,
    visits_below: bool = False,
    feeds: bool = False,
    selects: bool = True,
    little: bool = False,
    fresh: tuple[bool, ...] = (),
    holding: tuple[int, ...] = (),
    quiet: tuple[int, ...] = (),
    apart: bool = False,
    viewed: bool = False,
) -> tuple[Callable[..., Any], str]:
    """`apply(outs, saved, sizes, *inputs) -> outs` for one component, and its source.

    A direct node runs the forward program itself: `apply(*inputs) -> outs`. Either may return links
    behind its outputs (see `links`). `visits_below`: the node's backward is also one of the call
    whose gradients it adopts. `feeds`: other nodes have its outputs as inputs, and may have no
    gradient for them. `selects`: the node asks which gradients are wanted,
    unless there is `little` to save, and it matters to nobody. `holding`: the outputs whose backward uses up
    what was saved. `quiet`: those whose hooks are called with gradients only. `apart`: outputs lead to
    different leaves. `viewed`: there are inputs of which views are leaves inside.
    """
    names = Namespace()
    if direct is not None:
        forward, forward_source = direct.write(names, ways, higher)
    else:
        first = None if visits_below else higher
        forward, forward_source = _forward(names, outputs, saved, sizes, inputs, ways, first)
    arrange = Arrangement() if direct is None else Arrangement(direct.positions, len(direct.inputs))
    if inputs:
        asked = watched, visits_below, feeds, selects, little, fresh, holding, apart, viewed
        shape = _Shape(outputs, saved, sizes, inputs, *asked)
        run, backward_source = _backward(names, backward, shape, arrange, ways, higher)
    else:
        run, backward_source = _nowhere_backward(names, watched, viewed, failure)
    node = type(
        f"Compiled{name}",
        (NodeBase,),
        {"forward": staticmethod(forward), "backward": staticmethod(run), "__module__": __name__},
    )
    hooks = {"_register_hook_dict": quiet_hooks(frozenset(quiet))} if quiet else {}
    links = {"passes_on": staticmethod(ways.passed_on(outputs))} if ways.loose else {}
    return bare_apply(node, {**_OF_NODES, **hooks, **links}), forward_source + "\n" + backward_source


@dataclass(frozen=True)
class _Shape:
    """How many outputs, saved tensors, sizes and inputs a node has; what its backward has to look after."""

    outputs: int
    saved: int
    sizes: int
    inputs: int
    watched: bool
    visits_below: bool
    feeds: bool
    selects: bool
    little: bool
    fresh: tuple[bool, ...]
    holding: tuple[int, ...]
    apart: bool
    viewed: bool


@dataclass(frozen=True)
class Arrangement:
    """Where gradients stand among the values that a backward returns.

    Behind three values that are no tensors; or, for a direct node, at the places of its inputs.
    """

    positions: tuple[int, ...] | None = None
    inputs: int = 0

    def text(self, grads: list[str]) -> str:
        if self.positions is None:
            return f"(None, None, None, {''.join(f'{g}, ' for g in grads)})"
        places = ["None"] * self.inputs
        for position, grad in zip(self.positions, grads, strict=True):
            places[position] = grad
        return f"({''.join(f'{p}, ' for p in places)})"

    def spread(self, grads: str) -> str:
        """The same for a list of gradients."""
        if self.positions is None:
            return f"(None, None, None, *{grads})"
        return self.text([f"{grads}[{k}]" for k in range(len(self.positions))])


@dataclass(frozen=True, eq=False)
class Direct:
    """A node that runs the program itself: for calls that do nothing but compute.

    Inside a node's forward grad mode is off anyway, and nothing has to be carried over.
    """

    inline: Callable[..., list[str]]
    inputs: tuple[str, ...]
    positions: tuple[int, ...]
    results: int
    views: frozenset[int]
    saved: tuple[str, ...]
    outputs: int

    def write(self, names: Namespace, ways: Ways, higher: Higher) -> tuple[Any, str]:
        script = Script("node_forward", names)
        values = self.inline(script, list(self.inputs), keep_places=True)
        script.line(f"{''.join(f'r{i}, ' for i in range(self.results))}= {', '.join(values)},")
        for i in sorted(self.views):
            script.line(f"r{i} = r{i}.detach()")
        outs = [f"r{i}" for i in range(self.outputs)]
        _link(script, ways, _tuple(outs), _tuple(self.saved), self.inputs)
        if ways.carried:  # else it is for first order only
            _know_leaves(script, ways, higher, [self.inputs[p] for p in self.positions])
        if self.outputs > 1:
            script.line("ctx.set_materialize_grads(False)")
        if self.saved:
            script.line(f"ctx.save_for_backward({', '.join(self.saved)})")
        script.line(f"return {outs[0] if len(outs) == 1 else ', '.join(outs)}")
        return script.function(", ".join(["ctx", *self.inputs]))


def _tuple(texts: Iterable[str]) -> str:
    return f"({''.join(f'{t}, ' for t in texts)})"


def _link(script: Script, ways: Ways, outs: str, saved: str, inputs: Sequence[str]) -> None:
    """Inputs that are neither saved nor leaves get links."""
    loose = [inputs[ways.positions[k]] for k in ways.loose]
    if loose:
        with script.block(f"if not ({' and '.join(f'{x}.is_leaf' for x in loose)}):"):
            make = script.names.name(link_to_edges if ways.reshaped else link, "link")
            script.line(f"return {make}(ctx, {outs}, {saved}, {_tuple(loose)})")


def _know_leaves(script: Script, ways: Ways, higher: Higher, inputs: list[str]) -> None:
    """Where gradients are differentiated, a node will need its leaves: keeping is cheaper than looking."""
    met = f"{script.names.name(higher.handing, 'handing')}.is_met"
    carried = [x for x, j in zip(inputs, ways.carried, strict=True) if j is not None]  # others are, by now
    with script.block(f"if {' and '.join([met, *(f'{x}.is_leaf' for x in carried)])}:"):
        script.line(f"ctx.leaves = {_tuple(inputs)}")


def _forward(
    names: Namespace, outputs: int, saved: int, sizes: int, inputs: int, ways: Ways, higher: Higher | None
) -> tuple[Any, str]:
    script = Script("node_forward", names)
    if sizes:
        script.line("ctx.sizes = sizes")
    given = [f"inputs[{k}]" for k in range(inputs)]
    _link(script, ways, "outs", "saved", given)
    if higher is not None and ways.carried:
        _know_leaves(script, ways, higher, given)
    script.line("ctx.set_materialize_grads(False)")
    if saved:
        script.line("ctx.save_for_backward(*saved)")
    script.line("return outs" if outputs != 1 else "return outs[0]")
    return script.function("ctx, outs, saved, sizes, *inputs")


def _backward(
    names: Namespace, backward: Backward, shape: _Shape, arrange: Arrangement, ways: Ways, higher: Higher
) -> tuple[Any, str]:
    script = Script("node_backward", names)
    name = names.name
    tangents = [f"t{i}" for i in range(shape.outputs)]
    joined = _tuple(tangents)
    take_tangents(script, tangents, backward.conjugable, links=bool(ways.loose))

    def leave(grads: str) -> None:
        """Returns gradients, with what came through links."""
        script.line(f"grads = {grads}")
        if ways.loose:
            with script.block("for link in links:"), script.block("if link is not None:"):
                script.line(f"grads = {name(ways, 'ways')}.add(ctx, grads, links)")
                script.line("break")
        script.line(f"return {arrange.spread('grads')}")

    count, sizes = shape.saved, shape.sizes
    find = name(backward, "find_backward")
    _without_saved(script, shape, tangents, leave, find)
    _first(script, shape, tangents, leave, ways)
    saved = "ctx.saved_tensors" if count else "()"  # where nothing is saved, asking a second time would raise
    numbers = "*ctx.sizes, " if sizes else ""
    asked = wanted = "None"
    if shape.selects:
        places = arrange.positions or tuple(range(shape.inputs))
        asked = f"{name(wanted_inputs, 'wanted_inputs')}(ctx, {places})"
        if not shape.little:
            script.line(f"wanted = {asked}")
            asked = wanted = "wanted"
    with script.block(f"if {name(torch.is_anomaly_enabled, 'is_anomaly_enabled')}():"):
        check = f"{name(checked, 'checked')}(ctx, {find}, [{numbers}*{saved}][:{count + sizes}]"
        script.line(f"grads = {check}, {joined}, {asked})")
        with script.block("if grads is not None:"):
            leave("grads")
    with script.block(f"if {name(torch.is_grad_enabled, 'is_grad_enabled')}():"):
        leave(f"{name(higher, 'higher')}.run(ctx, {joined}, {asked})")
    if higher.handing.possible:
        handing = name(higher.handing, "handing")
        with script.block("if True:" if shape.visits_below else f"if {handing}.is_met:"):
            _hand(script, handing, tangents, wanted, leave)
    _take_saved(script, backward, shape, saved, f"{joined}, {wanted}")
    if ways.loose:
        with script.block("if links:"):
            if count:
                script.line(f"saved = saved[:{count}]")
            with script.block("for link in links:"), script.block("if link is not None:"):
                given = f"{find}, ctx, [{numbers}*saved], {joined}, {shape.inputs}, {wanted}"
                leave(f"{name(found, 'found')}({given})")
    _as_expected(script, backward, shape, tangents, arrange, asks=wanted != "None")
    script.line(f"saved = [{numbers}*saved]")  # used up: nothing else may hold what was saved
    give_tangents_away(script, tangents)
    script.line(f"grads = {find}.run(ctx, saved, given, {wanted})")
    script.line(f"return {arrange.spread('grads')}")
    separately = f"{', '.join(tangents)}{', *links' if ways.loose else ''}"
    return script.function(f"ctx, {'given' if gives_tangents_away else separately}")


def _hand(
    script: Script, handing: str, tangents: list[str], wanted: str, leave: Callable[[str], None]
) -> None:
    """The backward of those that take and hand over, if there is something to be taken or handed."""
    give_tangents_away(script, tangents)
    script.line(f"grads = {handing}.run(ctx, given, {wanted})")
    with script.block("if grads is not None:"):
        leave("grads")
    script.line(f"{', '.join(tangents)}, = given")
    script.line("del given")


def _without_saved(
    script: Script, shape: _Shape, tangents: list[str], leave: Callable[[str], None], find: str
) -> None:
    """Where nothing that was saved is used up, it is not looked at either."""
    name = script.names.name
    if shape.holding and len(shape.holding) < shape.outputs:
        nothing = " and ".join(f"{tangents[k]} is None" for k in shape.holding)
        watched = (torch.is_grad_enabled, "is_grad_enabled"), (torch.is_anomaly_enabled, "is_anomaly_enabled")
        with script.block(f"if {nothing} and not ({' or '.join(f'{name(*w)}()' for w in watched)}):"):
            given = f"{find}, None, [None] * {shape.saved}, {_tuple(tangents)}, {shape.inputs}, None"
            leave(f"{name(found, 'found')}({given})")


def _first(
    script: Script, shape: _Shape, tangents: list[str], leave: Callable[[str], None], ways: Ways
) -> None:
    """What comes before anything else: is there something to do, and may it be done?"""
    name = script.names.name
    if shape.feeds:
        nothing = " and ".join(f"{t} is None" for t in tangents)
        if ways.loose:
            nothing += " and all(t is None for t in links)"
        with script.block(f"if {nothing}:"):
            leave(f"[None] * {shape.inputs}")
    if shape.watched:
        present = ", ".join(f"{t} is not None" for t in tangents)
        script.line(f"{name(check_watched, 'check_watched')}(ctx, ({present},))")
    if shape.viewed:
        _check_viewed(script)
    if shape.apart:
        with script.block(f"if {' or '.join(f'{t} is None' for t in tangents)}:"):
            script.line(f"{name(quiet_leaves, 'quiet_leaves')}(ctx)")
    if shape.visits_below:
        script.line(f"{name(free_below, 'free_below')}(ctx)")


def _as_expected(
    script: Script,
    backward: Backward,
    shape: _Shape,
    tangents: list[str],
    arrange: Arrangement,
    *,
    asks: bool,
) -> None:
    """The usual backward, if the tangents are as expected and all gradients are wanted."""
    usual = backward.usual if type(backward) is Backward else None
    if usual is None:
        return
    names = script.names
    tests = [
        tangent_test(names, t, expected) for t, expected in zip(tangents, backward.expected, strict=True)
    ]
    if not backward.fixed_autocast:
        tests.append(f"not {names.name(any_autocast, 'any_autocast')}()")
    if asks:
        tests.append("wanted is None")
    with script.block(f"if {' and '.join(tests)}:"):
        _usual(script, usual, tangents, shape, arrange)


def _take_saved(script: Script, backward: Backward, shape: _Shape, saved: str, asked: str) -> None:
    """What was saved; where some of it was changed since, what the tangents at hand need of it."""
    if not (shape.fresh and shape.outputs > 1 and type(backward) is Backward):
        script.line(f"saved = {saved}")
        return
    with script.block("try:"):
        script.line(f"saved = {saved}")
    with script.block("except RuntimeError:"):
        check = script.names.name(unchanged, "unchanged")
        find = script.names.name(backward, "find_backward")
        script.line(f"saved = {check}(ctx, {find}, {asked}, {shape.fresh})")


def _usual(script: Script, run: Executable, tangents: list[str], shape: _Shape, arrange: Arrangement) -> None:
    """All tangents are there and laid out as expected: the program's own lines, where it has them.

    The node lets go of what it saved, unless the graph is kept, so that the program frees it as it goes.
    """
    places = [f"n{i}" for i in range(shape.sizes)] + [f"s{i}" for i in range(shape.saved)]
    if shape.sizes:
        script.line(f"{', '.join(places[: shape.sizes])}, = ctx.sizes")
    if shape.saved:
        script.line(f"{', '.join(places[shape.sizes :])}, = saved")
        script.line("del saved")
        script.line("ctx.maybe_clear_saved_tensors()")
    if run.inline is not None:
        results = run.inline(script, [*places, *tangents], keep_places=False)
        script.line(f"return {arrange.text(results)}")
        return
    script.line(f"args = [{', '.join([*places, *tangents])}]")
    script.line(f"del {', '.join([*places, *tangents])}")
    script.line(f"grads = {script.names.name(run.call, 'backward')}(args)")
    script.line(f"return {arrange.spread('grads')}")


def _nowhere_backward(
    names: Namespace, watched: bool, viewed: bool, failure: Failure | None
) -> tuple[Any, str]:
    """Outputs that require grad although no input is behind them."""
    script = Script("node_backward", names)
    if watched:
        present = "tuple([t is not None for t in tangents])"
        script.line(f"{names.name(check_watched, 'check_watched')}(ctx, {present})")
    if viewed:
        _check_viewed(script)
    if failure is not None:
        script.line(f"{names.name(failure, 'fails')}([])")
    script.line("return None, None, None, None")
    return script.function(f"ctx, {'' if gives_tangents_away else '*'}tangents")


def _check_viewed(script: Script) -> None:
    name = script.names.name
    script.line(f"if {name(accumulates, 'accumulates')}(): {name(check_viewed, 'check_viewed')}(ctx)")
