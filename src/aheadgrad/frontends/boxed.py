"""One entry for flat inputs, made now and without checks: for callers who know that calls fit.

`compile_flat` takes what Dynamo hands to a backend: a module of flat inputs and example inputs,
real or fake, with symbolic sizes among them. The module's own parameters and buffers become
inputs before those; their current values are read at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from aheadgrad import pipeline
from aheadgrad.capture.forward import Call, Scalar
from aheadgrad.capture.stage import Captured
from aheadgrad.errors import UnsupportedInput
from aheadgrad.frontends import module as modules
from aheadgrad.options import Options
from aheadgrad.program.slots import Slot, UserInput
from aheadgrad.runtime.emit import Script
from aheadgrad.runtime.stage import Entry
from aheadgrad.torchlayer.dynamo import symbols_of
from aheadgrad.torchlayer.fake import FakeTensor
from aheadgrad.torchlayer.subclasses import is_plain
from aheadgrad.torchlayer.symbols import is_symbolic


@dataclass(frozen=True, eq=False)
class BoxedEntry:
    """`run(list of inputs) -> list of outputs`; the list is emptied."""

    run: Callable[[list[Any]], list[Any]]
    entry: Entry


def compile_flat(
    module: nn.Module,
    args: Sequence[Any],
    options: Options,
    invoke: Callable[..., Any] | None = None,
) -> BoxedEntry:
    """Compiles `module` for flat inputs like `args`; `invoke` runs it, if not by a plain call."""
    places = modules.holders(module)
    call = _call(invoke or module, places, args)
    entry = pipeline.run(call, options)
    return BoxedEntry(_runner(entry, places, args), entry)


def _call(fn: Callable[..., Any], places: list[modules.Holder], args: Sequence[Any]) -> Call:
    inputs: list[tuple[Slot, Tensor]] = [(p.slot, p.get()) for p in places]
    scalars = []
    for i, value in enumerate(args):
        slot = UserInput(f"args[{i}]")
        if not isinstance(value, Tensor):
            scalars.append(Scalar(slot, value, len(inputs)))
        elif is_plain(value):
            inputs.append((slot, value))
        else:
            raise UnsupportedInput(f"args[{i}] is a {type(value).__name__}, a tensor subclass.")

    def invoke(see: Callable[[Any], Any]) -> Any:
        with modules.swapped(places, see) if places else nullcontext():
            return fn(*(see(v) for v in args))

    return Call(inputs, invoke, scalars=tuple(scalars), symbols=symbols_of(args))


def _runner(
    entry: Entry, places: list[modules.Holder], args: Sequence[Any]
) -> Callable[[list[Any]], list[Any]]:
    """Generated code from the caller's list to the entry's parameters."""
    script = Script("boxed")
    given = [f"a{i}" for i in range(len(args))]
    if given:
        script.line(f"{', '.join(given)}, = args")
        script.line("args.clear()")
    where = {id(v): name for v, name in zip(reversed(args), reversed(given), strict=True)}
    for place in places:
        table = script.names.name(place.table, "table")
        where[id(place.get())] = f"{table}[{place.name!r}]"
    parameters = [_found(script, where, t) for t in _tensors(entry.captured)[0]]
    parameters += [name for value, name in zip(args, given, strict=True) if is_symbolic(value)]
    parameters += [_found(script, where, t) for t in _tensors(entry.captured)[1]]
    run = script.names.name(entry.run, "run")
    script.line(f"return {run}({', '.join(parameters)})")
    return script.function("args")[0]


def _tensors(captured: Captured) -> tuple[list[Tensor], list[Tensor]]:
    session = captured.session
    return [e.real for e in session.entrances], [m.real for m in session.members]


def _found(script: Script, where: dict[int, str], real: Tensor) -> str:
    """The expression for an input: given, held by the module, the base of one given, or closed over."""
    known = where.get(id(real))
    if known is not None:
        return known
    if isinstance(real, FakeTensor):
        raise UnsupportedInput("The graph uses a fake tensor that is not among its inputs.")
    return script.names.name(real, "closed_over")
