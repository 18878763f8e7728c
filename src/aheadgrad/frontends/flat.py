"""Entries for flat inputs, made now: for callers who check themselves that calls fit.

`compile_flat` takes what Dynamo hands to a backend: a module of flat inputs and example inputs,
real or fake, with symbolic sizes among them. The module's own parameters and buffers become
inputs before those; their current values are read at each call.

Dynamo's guards know nothing of memory: which inputs share it, and where in it they lie. Where an
entry depends on that, it checks, and compiles another one for a call that does not fit. For callers without
guards it also checks which inputs are the same tensor, and which require grad.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, fx, nn

from aheadgrad import pipeline
from aheadgrad.emit.script import Script
from aheadgrad.errors import FallbackWarning, reason_of
from aheadgrad.frontends.checks import Check
from aheadgrad.frontends.function import flatten, make_call
from aheadgrad.frontends.state import Place, holders, swapped
from aheadgrad.options import Options
from aheadgrad.program.slots import Buffer, Parameter
from aheadgrad.report.origins import stacklevel_of_user
from aheadgrad.runtime.entry import Entry
from aheadgrad.torchlayer.attention import attention_kernels
from aheadgrad.torchlayer.dynamo import dynamos_mode, mark_dynamic, symbols_of
from aheadgrad.torchlayer.subclasses import form_of, is_foreign
from aheadgrad.torchlayer.symbols import free_dimensions, is_symbolic

_SPARE = 3
_TOO_MANY = "inputs are the same, require grad, share memory or meet other kernels in too many ways"


@dataclass(frozen=True, eq=False)
class FlatEntry:
    """`call` takes the inputs one by one, and gives a list of outputs."""

    call: Callable[..., list[Any]]
    entry: Entry
    source: str


def compile_flat(
    module: nn.Module,
    args: Sequence[Any],
    options: Options,
    invoke: Callable[..., Any] | None = None,
    *,
    guarded: bool = True,
    spare: int = _SPARE,
) -> FlatEntry:
    """Compiles `module` for flat inputs like `args`; `invoke` runs it, if not by a plain call.

    `guarded`: the caller checks what inputs are; memory is checked here. `spare` tells how many further
    entries may be made for calls that do not fit.
    """
    places = holders(list(module.named_modules()))
    fn = invoke or module
    flat = flatten(tuple(args), {}, [])
    call = make_call(fn, flat, [(p.slot, p.get()) for p in places], partial(swapped, places), exact=False)
    graph = module.graph if isinstance(module, fx.GraphModule) else None
    call.symbols = symbols_of(args, graph)
    if options.one_node and call.symbols.mode is None:  # compilers that know Dynamo look for its mode
        call.symbols = replace(call.symbols, mode=dynamos_mode())
    entry = pipeline.run(call, options)
    last = not spare or entry.captured.has_symbols
    made: FlatEntry | None = None
    reason, warned = _TOO_MANY if last else "", False

    def otherwise(*new: Any) -> list[Any]:
        """What happens to a call that does not fit: another entry, made once, or a run uncompiled."""
        nonlocal made, reason, warned
        if made is None and not reason:
            try:
                made = compile_flat(module, new, options, invoke, guarded=guarded, spare=spare - 1)
            except Exception as error:
                if options.fallback == "error":
                    raise
                reason = reason_of(error)
        if made is not None:
            return made.call(*new)
        if not warned:
            warned = True
            text = f"aheadgrad runs this call uncompiled: {reason}."
            warnings.warn(text, FallbackWarning, stacklevel=stacklevel_of_user())
        return list(fn(*new))

    checked = _FlatCheck(entry, places, args, otherwise).write(guarded=guarded)
    entry.captured.release()
    return checked


class _FlatCheck(Check):
    """Writes the code from the caller's inputs to the entry's."""

    def __init__(
        self, entry: Entry, places: list[Place], args: Sequence[Any], otherwise: Callable[..., list[Any]]
    ) -> None:
        self.args, self.given = args, [f"a{i}" for i in range(len(args))]
        script = Script("flat")
        super().__init__(
            entry, script, f"{script.names.name(otherwise, 'otherwise')}({', '.join(self.given)})"
        )
        self.entry = entry
        for value, name in zip(args, self.given, strict=True):
            if isinstance(value, Tensor):
                self.where[id(value)] = name
        for k, place in enumerate(places):
            script.line(f"h{k} = {self.text_of(place)}")
            self.where[id(place.get())] = f"h{k}"

    def write(self, *, guarded: bool) -> FlatEntry:
        script = self.script
        if self.captured.session.attends:  # which Dynamo does not check
            self.equal("kernels", f"{self.names.name(attention_kernels, 'kernels')}()", attention_kernels())
        if not guarded:
            self._kinds()
        self._memory()
        entrances = len(self.captured.session.entrances)
        inputs = [self.find(real) for real in self.reals]
        numbers = [n for value, n in zip(self.args, self.given, strict=True) if is_symbolic(value)]
        given = ", ".join([*inputs[:entrances], *numbers, *inputs[entrances:]])
        call = f"{script.names.name(self.entry.run, 'run')}({given})"
        marks = self._marks()
        if not script.lines and not marks and given == ", ".join(self.given):
            return FlatEntry(self.entry.run, self.entry, "")  # nothing in between
        for line in [f"out = {call}", *marks, "return out"] if marks else [f"return {call}"]:
            script.line(line)
        made, source = script.function(", ".join(self.given))
        return FlatEntry(made, self.entry, source)

    def _kinds(self) -> None:
        """What must hold of the inputs themselves: which are one tensor, and which require grad."""
        for value, name in zip(self.args, self.given, strict=True):
            if isinstance(value, Tensor):
                known = self.where[id(value)]
                grads = f"{name}.requires_grad is {value.requires_grad}"
                self.unless(grads if known == name else f"{name} is {known}", name)

    def _memory(self) -> None:
        """Places in memory; tensors of the module that are not changed share theirs with nobody."""
        inputs = [self.find(real) for real in self.reals]
        for name, real in zip(inputs, self.reals, strict=True):
            if is_foreign(real):
                self.parts[id(real)] = form_of(real).paths(name)
        entrances = enumerate(self.captured.session.entrances)
        unchanged = [e for i, e in entrances if i not in self.memory.changed]
        apart = {id(e.real) for e in unchanged if _is_state(e)}
        self.write_memory(inputs, () if self.memory.offsets else apart)

    def _marks(self) -> list[str]:
        """Tell Dynamo which sizes of results may change, so that it makes symbols of them right away."""
        mark, found = self.names.name(mark_dynamic, "mark_dynamic"), []
        for i, t in enumerate(self.captured.forward.outputs):
            dims = free_dimensions(t) if isinstance(t, Tensor) else ()
            if dims:
                found.append(f"{mark}(out[{i}], {dims})")
        return found


def _is_state(entrance: Any) -> bool:
    held = isinstance(entrance.slot, Parameter | Buffer)
    return held or isinstance(entrance.real, nn.Parameter | nn.Buffer)
