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
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx, nn

from aheadgrad import pipeline
from aheadgrad.capture.entrances import Entrance
from aheadgrad.capture.forward import Call, Scalar
from aheadgrad.capture.origins import stacklevel_of_user
from aheadgrad.capture.shared import whole_storage
from aheadgrad.errors import FallbackWarning, UnsupportedInput, reason_of
from aheadgrad.frontends import module as modules
from aheadgrad.frontends.guarded_memory import depends_on_offsets
from aheadgrad.options import Options
from aheadgrad.program.slots import Buffer, Parameter, Slot, UserInput
from aheadgrad.runtime.emit import Script
from aheadgrad.runtime.stage import Entry
from aheadgrad.torchlayer.attention import attention_kernels
from aheadgrad.torchlayer.autograd import base_of, is_view
from aheadgrad.torchlayer.dynamo import dynamos_mode, mark_dynamic, symbols_of
from aheadgrad.torchlayer.fake import FakeTensor
from aheadgrad.torchlayer.functional import storage_key
from aheadgrad.torchlayer.subclasses import can_be_traced, is_foreign, is_plain, parts_of
from aheadgrad.torchlayer.symbols import free_dimensions, is_symbolic

_SPARE = 3


@dataclass(frozen=True, eq=False)
class BoxedEntry:
    """`run(list of inputs) -> list of outputs`; the list is emptied. `call` takes them one by one."""

    run: Callable[[list[Any]], list[Any]]
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
) -> BoxedEntry:
    """Compiles `module` for flat inputs like `args`; `invoke` runs it, if not by a plain call.

    `guarded`: the caller checks what inputs are; memory is checked here. `spare` tells how many further
    entries may be made for calls that do not fit.
    """
    places = modules.holders(module)
    fn = invoke or module
    call = _call(fn, module, places, args)
    if options.one_node and call.symbols.mode is None:  # compilers that know Dynamo look for its mode
        call.symbols = replace(call.symbols, mode=dynamos_mode())
    entry = pipeline.run(call, options)
    again: Callable[..., BoxedEntry] | None = None
    if spare and not entry.captured.has_symbols:

        def again(*new: Any) -> BoxedEntry:
            return compile_flat(module, new, options, invoke, guarded=guarded, spare=spare - 1)

    otherwise = _otherwise(fn, again, strict=options.fallback == "error")
    return _Runner(entry, places, args, otherwise, guarded=guarded).write()


def _otherwise(
    fn: Callable[..., Any], again: Callable[..., BoxedEntry] | None, *, strict: bool
) -> Callable[..., list[Any]]:
    """What happens to a call that does not fit: another entry, made once, or a run uncompiled."""
    made: BoxedEntry | None = None
    reason = "attention has kernels, or inputs are the same, require grad or share memory in too many ways"
    warned = False

    def run(*args: Any) -> list[Any]:
        nonlocal again, made, reason, warned
        if made is None and again is not None:
            try:
                made = again(*args)
            except Exception as error:
                if strict:
                    raise
                again, reason = None, reason_of(error)
        if made is not None:
            return made.run(list(args))
        if not warned:
            warned = True
            text = f"aheadgrad runs this call uncompiled: {reason}."
            warnings.warn(text, FallbackWarning, stacklevel=stacklevel_of_user())
        return list(fn(*args))

    return run


def _call(
    fn: Callable[..., Any], module: nn.Module, places: list[modules.Holder], args: Sequence[Any]
) -> Call:
    inputs: list[tuple[Slot, Tensor]] = [(p.slot, p.get()) for p in places]
    scalars = []
    for i, value in enumerate(args):
        slot = UserInput(f"args[{i}]")
        if not isinstance(value, Tensor):
            scalars.append(Scalar(slot, value, len(inputs)))
        elif is_plain(value) or can_be_traced(value):
            inputs.append((slot, value))
        else:
            kind = type(value).__name__
            raise UnsupportedInput(f"args[{i}] is a {kind}, a tensor subclass that cannot be taken apart.")

    def invoke(see: Callable[[Any], Any]) -> Any:
        with modules.swapped(places, see) if places else nullcontext():
            return fn(*(see(v) for v in args))

    graph = module.graph if isinstance(module, fx.GraphModule) else None
    return Call(inputs, invoke, scalars=tuple(scalars), symbols=symbols_of(args, graph))


class _Runner:
    """Writes the code from the caller's list to the entry's parameters."""

    def __init__(
        self,
        entry: Entry,
        places: list[modules.Holder],
        args: Sequence[Any],
        otherwise: Callable[..., list[Any]],
        *,
        guarded: bool,
    ) -> None:
        self.guarded = guarded
        self.entry = entry
        self.args = args
        self.otherwise = otherwise
        self.session = entry.captured.session
        self.script = Script("boxed")
        self.names = [f"a{i}" for i in range(len(args))]
        self.where = {id(v): name for v, name in zip(args, self.names, strict=True) if isinstance(v, Tensor)}
        for k, place in enumerate(places):
            self.where[id(place.get())] = f"h{k}"
        self.held = places

    def write(self) -> BoxedEntry:
        script = self.script
        for k, place in enumerate(self.held):
            script.line(f"h{k} = {script.names.name(place.table, 'table')}[{place.name!r}]")
        self._bases()
        tensors = [self._find(e.real) for e in self.session.entrances]
        members = [self._find(m.real) for m in self.session.members]
        tests = [*([] if self.guarded else self._kinds()), *self._tests(tensors, members)]
        if tests:
            with script.block(f"if not ({' and '.join(tests)}):"):
                otherwise = script.names.name(self.otherwise, "otherwise")
                script.line(f"return {otherwise}({', '.join(self.names)})")
        numbers = [n for value, n in zip(self.args, self.names, strict=True) if is_symbolic(value)]
        run = script.names.name(self.entry.run, "run")
        call = f"{run}({', '.join([*tensors, *numbers, *members])})"
        marks = self._marks()
        script.line(f"out = {call}" if marks else f"return {call}")
        for line in [*marks, "return out"] if marks else []:
            script.line(line)
        body = script.lines
        one_by_one, source = script.function(", ".join(self.names))
        if self.names:
            script.lines = [f"    {', '.join(self.names)}, = args", "    args.clear()", *body]
        return BoxedEntry(script.function("args")[0], one_by_one, self.entry, source)

    def _kinds(self) -> list[str]:
        """What must hold of the inputs themselves: which are one tensor, and which require grad."""
        tests = []
        for value, name in zip(self.args, self.names, strict=True):
            if isinstance(value, Tensor):
                known = self.where[id(value)]
                grads = f"{name}.requires_grad is {value.requires_grad}"
                tests.append(grads if known == name else f"{name} is {known}")
        return tests

    def _marks(self) -> list[str]:
        """Tell Dynamo which sizes of results may change, so that it makes symbols of them right away."""
        mark, found = self.script.names.name(mark_dynamic, "mark_dynamic"), []
        for i, t in enumerate(self.entry.captured.forward.outputs):
            dims = free_dimensions(t) if isinstance(t, Tensor) else ()
            if dims:
                found.append(f"{mark}(out[{i}], {dims})")
        return found

    def _bases(self) -> None:
        """Tensors that inputs are views of, where the entry takes them instead."""
        for k, member in enumerate(self.session.members):
            base = base_of(member.real) if is_view(member.real) else None
            if base is not None and id(base) not in self.where:
                self.script.line(f"b{k} = {self._find(member.real)}._base")
                self.where[id(base)] = f"b{k}"

    def _find(self, real: Tensor) -> str:
        known = self.where.get(id(real))
        if known is not None:
            return known
        if id(real) in self.session.made_owners:
            one = self._find(self.session.made_owners[id(real)])
            name = f"w{len(self.where)}"
            self.script.line(f"{name} = {self.script.names.name(whole_storage, 'whole_storage')}({one})")
            self.where[id(real)] = name
            return name
        if isinstance(real, FakeTensor):
            raise UnsupportedInput("The graph uses a fake tensor that is not among its inputs.")
        return self.script.names.name(real, "closed_over")

    def _tests(self, tensors: list[str], members: list[str]) -> list[str]:
        """What Dynamo does not check: the inputs' places in memory, and the kernels allowed for attention."""
        tests = []
        if self.session.attends:
            now = self.script.names.name(attention_kernels, "attention_kernels")
            tests.append(f"{now}() == {attention_kernels()!r}")
        if depends_on_offsets(self.entry.captured):
            for name, e in zip(tensors, self.session.entrances, strict=True):
                tests.append(f"{name}.storage_offset() == {int(e.real.storage_offset())}")
        for name, member in zip(members, self.session.members, strict=True):
            base = None if member.is_root else base_of(member.real)
            tests.append(f"{name}._base is {None if base is None else self._find(base)}")
            tests.append(f"{name}.storage_offset() == {int(member.offset)}")
            if not is_foreign(member.real):
                tests.append(f"{_storage(name)} == {_storage(self._find(member.owner))}")
        return tests + self._apart(tensors)

    def _apart(self, tensors: list[str]) -> list[str]:
        """Nothing that is changed shares memory; tensors of the module that are not changed are left out."""
        facts = self.entry.captured.facts.inputs
        changed = {f.index for f in facts if f.data_changed or f.storage_changed or f.geometry is not None}
        if not changed:
            return []
        checked = [
            (name, e)
            for i, (name, e) in enumerate(zip(tensors, self.session.entrances, strict=True))
            if i in changed or not _is_state(e)
        ]
        if len(checked) < 2 or isinstance(checked[0][1].real, FakeTensor):
            return []
        kinds = len({storage_key(part) for _, e in checked for part in parts_of(e.real)})
        names = [path for name, e in checked for path in (e.form.paths(name) if e.form else [name])]
        return [f"len({{{', '.join(map(_storage, names))}}}) == {kinds}"]


def _storage(name: str) -> str:
    return f"{name}.untyped_storage()._cdata"


def _is_state(entrance: Entrance) -> bool:
    held = isinstance(entrance.slot, Parameter | Buffer)
    return held or isinstance(entrance.real, nn.Parameter | nn.Buffer)
