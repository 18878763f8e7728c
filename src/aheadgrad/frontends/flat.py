"""Entries for flat inputs, made now: for callers who check themselves that calls fit.

`compile_flat` takes what Dynamo hands to a backend: a module of flat inputs and example inputs, real or fake,
with symbolic sizes among them. The module's own parameters and buffers become inputs before those.

Dynamo's guards know nothing of memory: which inputs share it, and where in it they lie. Where an entry needs
that, it checks; a call that does not fit is traced. For callers without guards it also checks which inputs
are the same tensor, and which require grad.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn

from aheadgrad import pipeline
from aheadgrad.cache.lookup import Lookup
from aheadgrad.cache.subjects import call_of_graph
from aheadgrad.emit.script import Script
from aheadgrad.frontends.checks import Check
from aheadgrad.frontends.compiled import Described
from aheadgrad.frontends.function import flatten
from aheadgrad.frontends.state import Place, call_holding, held_by
from aheadgrad.frontends.trace import TracedFunction
from aheadgrad.options import Options
from aheadgrad.program.slots import Buffer, Parameter
from aheadgrad.recording.forward import Call
from aheadgrad.runtime.entry import Entry
from aheadgrad.torchlayer.attention import attention_kernels
from aheadgrad.torchlayer.dynamo import dynamos_mode, mark_dynamic, symbols_of
from aheadgrad.torchlayer.subclasses import form_of, is_foreign
from aheadgrad.torchlayer.symbols import free_dimensions, is_symbolic


def compile_flat(
    module: nn.Module, args: Sequence[Any], options: Options, invoke: Any = None, *, guarded: bool = True
) -> Described:
    """Compiles `module` for flat inputs like `args`; `invoke` runs it, if not by a plain call.

    `guarded`: the caller checks what inputs are; memory is checked here.
    """
    places = held_by(module)
    fn = invoke or module
    flat = flatten(tuple(args), {}, [])
    bare = replace(flat, leaves=[])

    def call_with(leaves: list[Any]) -> Call:
        return call_holding(fn, replace(bare, leaves=leaves), places, exact=False)

    call = call_with(flat.leaves)
    graph = module.graph if isinstance(module, fx.GraphModule) else None
    call.symbols = symbols_of(args, graph)
    if options.one_node and call.symbols.mode is None:  # compilers that know Dynamo look for its mode
        call.symbols = replace(call.symbols, mode=dynamos_mode())
    lookup = None
    if options.cache:
        lookup = Lookup(call_of_graph(module, flat, call, call_with, pipeline.record), options)
    entry = pipeline.run(call, options, lookup)
    try:
        otherwise = TracedFunction(fn, replace(options, cache=False))
        made = _FlatCheck(entry, places, args, otherwise).write(guarded=guarded)
        made.not_kept = "" if lookup is None else lookup.reason
        return made
    finally:
        entry.captured.release()


class _FlatCheck(Check):
    """Writes the code from the caller's inputs to the entry's."""

    def __init__(self, entry: Entry, places: list[Place], args: Sequence[Any], otherwise: Any) -> None:
        self.args, self.given = args, [f"a{i}" for i in range(len(args))]
        script = Script("flat")
        traced = script.names.name(otherwise, "otherwise")
        super().__init__(entry, script, f"list({traced}({', '.join(self.given)}))")
        self.entry = entry
        for value, name in zip(args, self.given, strict=True):
            if isinstance(value, Tensor):
                self.where[id(value)] = name
        for k, place in enumerate(places):
            script.line(f"h{k} = {self.text_of(place)}")
            self.where[id(place.get())] = f"h{k}"

    def write(self, *, guarded: bool) -> Described:
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
            return Described(self.entry, self.entry.run, "")  # nothing in between
        for line in [f"out = {call}", *marks, "return out"] if marks else [f"return {call}"]:
            script.line(line)
        made, source = script.function(", ".join(self.given))
        return Described(self.entry, made, source)

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
        held = (Parameter, Buffer, nn.Parameter, nn.Buffer)
        kept = [e for i, e in enumerate(self.captured.session.entrances) if i not in self.memory.changed]
        apart = {id(e.real) for e in kept if isinstance(e.slot, held) or isinstance(e.real, held)}
        self.write_memory(inputs, () if self.memory.offsets else apart)

    def _marks(self) -> list[str]:
        """Tell Dynamo which sizes of results may change, so that it makes symbols of them right away."""
        mark, found = self.names.name(mark_dynamic, "mark_dynamic"), []
        for i, t in enumerate(self.captured.forward.outputs):
            dims = free_dimensions(t) if isinstance(t, Tensor) else ()
            if dims:
                found.append(f"{mark}(out[{i}], {dims})")
        return found
