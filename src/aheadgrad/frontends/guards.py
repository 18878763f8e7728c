"""The check of an entry: generated code that tells whether a call fits, and finds its inputs.

The check takes the call's arguments and returns the entry's flat inputs, or None when any
assumption does not hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from aheadgrad.capture.shared import whole_storage
from aheadgrad.capture.stage import Captured
from aheadgrad.errors import FallbackError
from aheadgrad.frontends.function import Flat
from aheadgrad.frontends.module import Holder
from aheadgrad.frontends.reach import HOOKS, TABLES, Fact, Reach
from aheadgrad.runtime.emit import Namespace, Script
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.autocast import any_autocast, autocast_state
from aheadgrad.torchlayer.autograd import base_of
from aheadgrad.torchlayer.dispatch import deterministic_mode, dispatch_modes, transform_level
from aheadgrad.torchlayer.functional import storage_key
from aheadgrad.torchlayer.guards import shape_check, tensor_check
from aheadgrad.torchlayer.subclasses import Fixed, Form, form_of, is_foreign, parts_of, same_meta

_SIMPLE = (int, float, bool, str, type(None), complex, torch.dtype, torch.device)


MISS = object()


def write_form_check(script: Script, names: Namespace, form: Form, name: str) -> list[str]:
    """Lines that check the type and metadata of a subclass, and open it; the names of its parts."""
    kind = names.name(form.kind, form.kind.__name__)
    script.line(f"if type({name}) is not {kind}: return None")
    script.line(f"inside, meta = {name}.__tensor_flatten__()")
    meta = "meta is None"
    if form.meta is not None:
        meta = f"{names.name(same_meta, 'same_meta')}(meta, {names.name(form.meta, 'metadata')})"
    script.line(f"if list(inside) != {list(form.names)} or not {meta}: return None")
    parts: list[str] = []
    for k, (attribute, inner) in enumerate(zip(form.names, form.inner, strict=True)):
        script.line(f"{name}_{k}_ = {name}.{attribute}")
        if isinstance(inner, Fixed):
            same = f"{names.name(same_meta, 'same_meta')}({name}_{k}_, {names.name(inner.value, 'fixed')})"
            script.line(f"if not {same}: return None")
        elif isinstance(inner, Form):
            parts += write_form_check(script, names, inner, f"{name}_{k}_")
        else:
            parts.append(f"{name}_{k}_")
    return parts


class GuardWriter:
    """Writes the check of one entry."""

    def __init__(
        self,
        flat: Flat,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        captured: Captured,
        places: list[Holder],
        reach: Reach,
        ordered: bool,
    ) -> None:
        self.flat = flat
        self.args = args
        self.kwargs = kwargs
        self.captured = captured
        self.places = places
        self.reach = reach
        self.ordered = ordered
        self.names = Namespace()
        self.script = Script("call", self.names)
        self.where: dict[int, str] = {}
        self.parts: dict[int, list[str]] = {}  # by id of a tensor subclass: where its parts are

    def write(self, run: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any], str]:
        """The check, the check with the run behind it (`MISS` when it does not fit), and the source."""
        inputs = self._conditions()
        check = Script("check", self.names)
        check.lines = [*self.script.lines, f"    return ({''.join(f'{name}, ' for name in inputs)})"]
        self.script.line(f"return {self.names.name(run, 'entry')}({', '.join(inputs)})")
        missing = self.names.name(MISS, "MISS")
        self.script.lines = [x.replace("return None", f"return {missing}") for x in self.script.lines]
        call, source = self.script.function("args, kwargs")
        return check.function("args, kwargs")[0], call, source

    def _conditions(self) -> list[str]:
        self._ambient()
        self._structure()
        for place in self.places:
            self._place(place)
        for fact in self.reach.facts:
            self._reached(fact)
        inputs = self._inputs()
        self._tensors(inputs)
        self._memory(inputs)
        return inputs

    def _unless(self, condition: str) -> None:
        with self.script.block(f"if not ({condition}):"):
            self.script.line("return None")

    def _ambient(self) -> None:
        name = self.names.name
        grad = self.captured.forward.grad_mode_before
        inference = torch.is_inference_mode_enabled()
        tests = [
            f"{name(torch.is_grad_enabled, 'is_grad_enabled')}() is {grad}",
            f"{name(transform_level, 'transform_level')}() is None",
            f"{name(forward_ad, 'forward_ad')}._current_level < 0",
            f"{name(torch.is_inference_mode_enabled, 'is_inference')}() is {inference}",
            f"{name(torch.get_default_dtype, 'default_dtype')}() is "
            f"{self.names.literal(torch.get_default_dtype())}",
        ]
        state = self.captured.autocast
        if state is None:
            tests.append(f"not {name(any_autocast, 'any_autocast')}()")
        else:
            tests.append(f"{name(autocast_state, 'autocast_state')}() == {name(state, 'autocast')}")
        deterministic = torch.are_deterministic_algorithms_enabled()
        check = name(deterministic_mode, "deterministic")
        tests.append(f"{check}() is {deterministic}")
        self._unless(" and ".join(tests))

    def _structure(self) -> None:
        if self._is_simple(self.args) and self._is_simple(self.kwargs):
            test = f"len(args) == {len(self.args)}"
            if self.kwargs:
                size = f" and len(kwargs) == {len(self.kwargs)}"
                order = f" and list(kwargs) == {self.names.literal(list(self.kwargs))}"
                test += order if self.ordered else size
            else:
                test += " and not kwargs"
            self._unless(test)
            if self.args:
                self.script.line(f"{''.join(f'a{i}, ' for i in range(len(self.args)))}= args")
            for i, value in enumerate(self.args):
                self._value(f"a{i}", f"a{i}", value)
            for i, (key, value) in enumerate(self.kwargs.items()):
                self._unless(f"{key!r} in kwargs")
                self._value(f"kwargs[{key!r}]", f"k{i}", value)
            return
        flatten = self.names.name(pytree.tree_flatten, "tree_flatten")
        self.script.line(f"leaves, spec = {flatten}((args, kwargs))")
        self._unless(f"spec == {self.names.name(self.flat.spec, 'expected_spec')}")
        for i, value in enumerate(self.flat.leaves):
            self._value(f"leaves[{i}]", f"a{i}", value)

    def _is_simple(self, value: Any) -> bool:
        if type(value) in (tuple, list):
            return all(self._is_simple(v) for v in value)
        if type(value) is dict:
            return all(type(k) is str for k in value) and all(self._is_simple(v) for v in value.values())
        return isinstance(value, Tensor) or type(value) in _SIMPLE

    def _value(self, source: str, name: str, value: Any) -> None:
        if source != name:
            self.script.line(f"{name} = {source}")
        if isinstance(value, Tensor):
            known = self.where.get(id(value))
            if known is None:
                self.where[id(value)] = name
            else:
                self._unless(f"{name} is {known}")
        elif type(value) in (tuple, list):
            kind = type(value).__name__
            self._unless(f"type({name}) is {kind} and len({name}) == {len(value)}")
            for i, part in enumerate(value):
                self._value(f"{name}[{i}]", f"{name}_{i}", part)
        elif type(value) is dict:
            keys = self.names.literal(list(value))
            self._unless(f"type({name}) is dict and list({name}) == {keys}")
            for i, (key, part) in enumerate(value.items()):
                self._value(f"{name}[{key!r}]", f"{name}_{i}", part)
        else:
            self._constant(name, value)

    def _constant(self, name: str, value: Any) -> None:
        if value is None or isinstance(value, bool):
            self._unless(f"{name} is {value}")
        elif type(value) in _SIMPLE:
            kind = self.names.name(type(value), type(value).__name__)
            same = f"{name} == {self.names.literal(value)}"
            if isinstance(value, float) and value != value:
                same = f"{name} != {name}"
            elif isinstance(value, float) and value == 0.0:
                same = f"repr({name}) == {repr(value)!r}"
            self._unless(f"type({name}) is {kind} and {same}")
        else:
            self._unless(f"{name} is {self.names.name(value, 'given')}")

    def _reached(self, fact: Fact) -> None:
        """What the function reaches without being given it is as it was."""
        value, table = fact.value, fact.how[6:-2]
        place = self.names.name(fact.holder, "holder") + fact.how
        if isinstance(value, Tensor):
            known = self.where.get(id(value))
            if id(fact.holder) in self.reach.skip:
                return
            if known is not None:
                self._unless(f"{place} is {known}")
            else:
                self._unless(f"isinstance({place}, {self.names.name(Tensor, 'Tensor')})")
        elif type(value) in _SIMPLE:
            if not (value is None or isinstance(value, bool)):
                self.script.line(f"v = {place}")
                place = "v"
            self._constant(place, value)
        elif isinstance(value, dict) and table in HOOKS:
            self._unless(f"list({place}) == {self.names.literal(list(value))}" if value else f"not {place}")
        elif isinstance(value, dict) and table in TABLES:
            if table == "_modules":
                self._unless(f"len({place}) == {len(value)}")
        else:
            given = self.names.name(value, "given")
            test = f"{place} is {given}"
            if isinstance(value, list | dict) and id(value) not in self.reach.loose:
                test += f" and len({given}) == {len(value)}"
            self._unless(test)

    def _place(self, place: Holder) -> None:
        value = place.get()
        name = f"s{len(self.where)}_"
        if id(value) in self.where:
            name = f"s{len(self.where)}_{len(self.script.lines)}"
        self.script.line(f"{name} = {self.names.name(place.table, 'table')}.get({place.name!r})")
        known = self.where.setdefault(id(value), name)
        if known != name:
            self._unless(f"{name} is {known}")

    def _inputs(self) -> list[str]:
        """The entry's inputs in order: arguments, lifted state, closed-over tensors."""
        names = []
        session = self.captured.session
        for entrance in session.entrances:
            names.append(self._find(entrance.real))
        return names + [self._find(member.real) for member in session.members]

    def _find(self, real: Tensor) -> str:
        known = self.where.get(id(real))
        if known is not None:
            return known
        members = [m.real for m in self.captured.session.members]
        owner = next((m for m in members if base_of(m) is real), None)
        name = f"x{len(self.where)}"
        if id(real) in self.captured.session.made_owners:
            one = self._find(self.captured.session.made_owners[id(real)])
            self.script.line(f"{name} = {self.names.name(whole_storage, 'whole_storage')}({one})")
        elif owner is not None:
            self.script.line(f"{name} = {self._find(owner)}._base")
        else:
            found = self.reach.find(real)
            if found is None and is_foreign(real):
                raise FallbackError("a tensor subclass is made inside, of tensors from outside")
            if found is None:
                self.script.line(f"{name} = {self.names.name(real, 'closed_over')}")
            else:
                holder, how = found
                self.script.line(f"{name} = {self.names.name(holder, 'holder')}{how}")
            for other in self.where.values():
                self._unless(f"{name} is not {other}")
        self.where[id(real)] = name
        return name

    def _tensors(self, inputs: list[str]) -> None:
        reals = [e.real for e in self.captured.session.entrances]
        reals += [m.real for m in self.captured.session.members]
        known = {id(r) for r in reals}
        for key, name in self.where.items():
            if key not in known:
                extra = self._by_id(key)
                if extra is not None:
                    reals.append(extra)
                    inputs = [*inputs, name]
        if not reals:
            return
        symbolic = self.captured.symbolic_inputs()
        inputs = self._opened(reals, inputs)
        wholes = {id(e.real): e.value for e in self.captured.session.entrances if e.form is not None}
        check = self.names.name(tensor_check(reals, {**wholes, **symbolic}), "tensors_match")
        self._unless(f"{check}({', '.join(inputs)})")
        if symbolic:
            sizes = self.names.name(shape_check(list(symbolic.values())), "sizes_fit")
            names = dict(zip(map(id, reals), inputs, strict=True))
            self._unless(f"{sizes}({', '.join(names[key] for key in symbolic)})")

    def _opened(self, reals: list[Tensor], inputs: list[str]) -> list[str]:
        """Tensor subclasses are of the same type and metadata; their parts are checked with the rest."""
        names = list(inputs)
        if self.captured.session.veiled:
            self._unless(f"not {self.names.name(dispatch_modes, 'dispatch_modes')}()")
        for real, name in list(zip(reals, inputs, strict=True)):
            if is_foreign(real):
                parts = write_form_check(self.script, self.names, form_of(real), name)
                self.parts[id(real)] = parts
                for part, source in zip(parts_of(real), parts, strict=True):
                    known = next((n for r, n in zip(reals, names, strict=True) if r is part), None)
                    if known is not None:
                        self._unless(f"{source} is {known}")
                    else:
                        reals.append(part)
                        names.append(source)
        return names

    def _by_id(self, key: int) -> Tensor | None:
        candidates = [*self.flat.leaves, *(p.get() for p in self.places)]
        return next((t for t in candidates if id(t) == key and isinstance(t, Tensor)), None)

    def _memory(self, inputs: list[str]) -> None:
        """What must hold of the inputs' memory: only entries that change or re-stride inputs care."""
        facts = self.captured.facts
        session = self.captured.session
        if depends_on_offsets(self.captured):
            for name, e in zip(inputs, session.entrances, strict=False):
                self._unless(f"{name}.storage_offset() == {e.real.storage_offset()}")
                for part, inner in zip(parts_of(e.real), self.parts.get(id(e.real), ()), strict=False):
                    self._unless(f"{inner}.storage_offset() == {part.storage_offset()}")
        for entrance in session.no_views:
            self._unless(f"not {self._find(entrance.real)}._is_view()")
        changed = any(f.data_changed or f.storage_changed for f in facts.inputs)
        for name, member in zip(inputs[len(session.entrances) :], session.members, strict=False):
            base = base_of(member.real) if not member.is_root else None
            self._unless(f"{name}._base is {self._find(base) if base is not None else None}")
            self._unless(f"{name}.storage_offset() == {member.offset}")
        reals = [*(e.real for e in session.entrances), *(m.real for m in session.members)]
        if changed:
            names = [n for r, name in zip(reals, inputs, strict=False) for n in self.parts.get(id(r), [name])]
            self._storages(names, [part for r in reals for part in parts_of(r)])

    def _storages(self, inputs: list[str], reals: list[Tensor]) -> None:
        """The same inputs share storage as when the entry was made, and no others."""
        if len(reals) < 2:
            return
        names = inputs[: len(reals)]
        keys = [storage_key(r) for r in reals]
        text = ", ".join(f"{name}.untyped_storage()._cdata" for name in names)
        if len(set(keys)) == len(keys):
            self._unless(f"len({{{text}}}) == {len(names)}")
            return
        self.script.line(f"keys = [{text}]")
        self._unless(f"[keys.index(k) for k in keys] == {[keys.index(k) for k in keys]}")
        for name, real, key in zip(names, reals, keys, strict=True):
            if keys.count(key) > 1:
                self._unless(f"{name}.storage_offset() == {real.storage_offset()}")


def depends_on_offsets(captured: Captured) -> bool:
    if captured.session.reads_offsets:
        return True
    if any(f.geometry for f in captured.facts.inputs) or captured.session.members:
        return True
    if any(getattr(getattr(f, "recipe", None), "geometry", None) for f in captured.facts.outputs):
        return True
    restride = torch.ops.aten.as_strided.default
    return any(r.target is restride for r in captured.session.trace.records)
