"""The check of an entry: generated code that tells whether a call fits, and finds its inputs.

The check takes the call's arguments and returns the entry's flat inputs, or MISS when any
assumption does not hold. In order, the common case first:

    ambient state, arguments and their structure, what the function reaches, all tensors, memory

Its twin `why` tells what did not fit (`checks.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from aheadgrad.capture.shared import whole_storage
from aheadgrad.errors import FallbackError
from aheadgrad.frontends.checks import Checks
from aheadgrad.frontends.guarded_ambient import write_ambient
from aheadgrad.frontends.guarded_forms import write_form_check
from aheadgrad.frontends.guarded_memory import MemoryWriter
from aheadgrad.frontends.guarded_reach import FEW, ReachWriter
from aheadgrad.frontends.guarded_values import ValueWriter
from aheadgrad.frontends.looks import compare_looks, look_of
from aheadgrad.frontends.module import Holder
from aheadgrad.frontends.reach import HOOKS, Reach
from aheadgrad.frontends.surroundings import Surroundings, Tables
from aheadgrad.program.slots import ClosedOver
from aheadgrad.runtime.emit import Namespace, Script
from aheadgrad.runtime.stage import Entry
from aheadgrad.torchlayer.autograd import base_of, kind_of_view
from aheadgrad.torchlayer.dispatch import (
    dispatch_modes,
)
from aheadgrad.torchlayer.guards import shape_check, tensor_check
from aheadgrad.torchlayer.subclasses import form_of, is_foreign, parts_of

MISS = object()


def _always() -> bool:
    return True


@dataclass(frozen=True, eq=False)
class Guard:
    """`check` gives the inputs or MISS; `call` runs the entry or gives MISS; `why(args, kwargs, note)`."""

    check: Callable[..., Any]
    call: Callable[..., Any]
    why: Callable[..., None]
    source: str


class GuardWriter:
    """Writes the check of one entry.

    `values` has written the part about the arguments already; `leaves` tells whether the entry
    leaves tensors in the places that it reads from.
    """

    def __init__(
        self, values: ValueWriter, entry: Entry, places: list[Holder], reach: Reach, *, leaves: bool
    ) -> None:
        self.entry = entry.assembled
        captured = self.captured = entry.captured
        self.places = places
        self.reach = reach
        self.leaves = leaves
        self.names = self.entry.names if self.entry.inline else Namespace()
        self.call = Checks("call", self.names, "args, kwargs", self.names.name(MISS, "MISS"))
        self.find = Checks("find", self.names, "")
        self.values = values
        self.reached = ReachWriter(self.call, self.find, self.names, reach, values)
        self.where: dict[int, str] = {}  # by id of a tensor: how the check calls it
        self.state: list[Tensor] = []  # tensors found in dictionaries, in the order of `state`
        self.reals = [e.real for e in captured.session.entrances]
        self.reals += [m.real for m in captured.session.members]
        self.bystanders: list[str] = []  # places of tensors that are reached, but no inputs
        self.steady_bystanders: list[str] = []  # those in dictionaries that seldom change
        self.parts: dict[int, list[str]] = {}  # by id of a tensor subclass: where its parts are

    def write(self) -> Guard:
        write_ambient(self.call, self.names, self.captured, implied=bool(self.reals))
        self.where.update(self.values.write(self.call, self.names))
        self.given = dict(self.where)
        self.values.write_containers(self.reach.everything())
        self._reached()
        inputs = [self._find(real) for real in self.reals]
        self._aliases()
        self._tensors(inputs)
        self._autograd(inputs)
        MemoryWriter(self, inputs).write()
        check = Script("check", self.names)
        check.lines = [*self.call.fast.lines, f"    return ({self._spread(inputs, ', ')})"]
        self.call.fast.lines += self._run(self._spread(inputs))
        call, source = self.call.fast.function("args, kwargs")
        if self.state or self.find.fast.lines:
            source = self.find.fast.source("") + "\n" + source
        return Guard(check.function("args, kwargs")[0], call, self.call.explained(), source)

    def _run(self, inputs: str) -> list[str]:
        if self.entry.inline is not None:
            return self.entry.inline(inputs)
        return [f"    return {self.names.name(self.entry.run, 'entry')}({inputs})"]

    def _reached(self) -> None:
        """What the function reaches without being given it is as it was."""
        steady = {id(t): t for t in self.reach.tables.values()}
        steady.update({id(p.table): p.table for p in self.places})
        reads: dict[int, str] = {}
        for fact in self.reach.facts:
            if fact.steady and isinstance(fact.value, Tensor):
                reads.setdefault(id(fact.value), self.reached.text(fact))
        for place in self.places:
            table = self.names.name(place.table, "table")
            reads.setdefault(id(place.get()), f"{table}.get({place.name!r})")
        found = {id(r): r for r in self.reals if id(r) in reads and id(r) not in self.given}
        self.state = [r for r in found.values() if not is_foreign(r)]
        for k, real in enumerate(self.state):
            self.find.line(f"s{k} = {reads[id(real)]}")
            self.where[id(real)] = f"state[{k}]"
        self.reached.write()
        self.find_places(reads)
        if self.find.fast.lines:
            self._stamped(list(steady.values()))
        for real in found.values():
            if is_foreign(real):  # what is inside changes without the tensor
                name = self.where[id(real)] = f"x{len(self.where)}"
                self.call.line(f"{name} = {reads[id(real)]}")

    def find_places(self, reads: dict[int, str]) -> None:
        """Every place where a tensor was found has the same one again, whatever its name."""
        local = {id(real): f"s{k}" for k, real in enumerate(self.state)}
        spots = [(f"{self.names.name(p.table, 'table')}.get({p.name!r})", p.get(), p.slot.describe(), True)
                 for p in self.places]  # fmt: skip
        spots += [
            (self.reached.text(f), f.value, f.path, f.steady)
            for f in self.reach.facts
            if isinstance(f.value, Tensor) and id(f.holder) not in self.reach.skip
        ]
        for text, value, path, steady in spots:
            if steady and id(value) in local:
                if text != reads[id(value)]:
                    same = f"{text} is {local[id(value)]}"
                    self.find.unless(same, path, "the same tensor as elsewhere", "'another one'")
            elif steady and id(value) not in {id(r) for r in self.reals}:
                test = f"isinstance({text}, {self.names.name(Tensor, 'Tensor')})"
                self.find.unless(test, path, "a tensor", f"type({text}).__name__")
                self.steady_bystanders.append(text)
            else:
                self.values.later.append((text, value, path))

    def _stamped(self, tables: list[dict[Any, Any]]) -> None:
        """Looks into the dictionaries only if one of them has changed."""
        name = self.names.name
        memory = MemoryWriter(self, [])
        if memory.matters:
            memory.state_pattern(self.find)
        tensors = "".join(f"s{k}, " for k in range(len(self.state)))
        self.find.line(f"return ({tensors})")
        find, why = self.find.fast.function("")[0], self.find.explained()
        kept = memory.matters and bool(self.state)
        watched = self._watched(tables)
        match = tensor_check(self.state) if self.state else _always
        around = Surroundings(find, match, watched, keep_pointers=kept, stamps=not self.leaves)
        if self.steady_bystanders:
            others = Script("bystanders", self.names)
            others.line(f"return ({''.join(f'{text}, ' for text in self.steady_bystanders)})")
            around.bystanders = others.function("")[0]
        changed = "not held(things)"
        if watched.hooks:
            changed = f"hooks != {name(RemovableHandle, 'Handle')}.next_id or {changed}"
        where, only_fast = name(around, "surroundings"), self.call.only_fast
        stamp = "held, things, state, hooks, ids, pointers, storages"

        def renewed(head: str) -> None:
            with self.call.fast.block(head):
                only_fast(f"found = {where}.renew()")
                with self.call.fast.block("if found is None:"):
                    self.call.miss()
                only_fast(f"{stamp} = found")

        only_fast(f"{stamp} = {where}.stamp")
        renewed(f"if {changed}:")
        if self.state:
            with self.call.fast.block(f"elif not {name(match, 'state_matches')}(*state):"):
                self.call.miss()
        if kept:
            renewed(f"elif tuple(map({name(Tensor.data_ptr, 'data_ptr')}, state)) != pointers:")
        self.call.only_slow(f"state = {where}.find()")
        with self.call.slow.block("if state is None:"):
            far = "lambda what, assumed, came, last=False: note(what, assumed, came, last=True)"
            self.call.only_slow(f"return {name(why, 'why_surroundings')}({far})")
        self.call.only_slow(f"storages = {where}.storages_of(state)")

    def _watched(self, tables: list[dict[Any, Any]]) -> Tables:
        hooks = {id(f.value) for f in self.reach.facts if f.how[6:-2] in HOOKS and not f.value}
        return Tables(
            tuple(t for t in tables if t),
            tuple(t for t in tables if not t and id(t) not in hooks and id(t) not in self.reach.idle),
            tuple(t for t in tables if not t and id(t) in hooks),
        )

    def _find(self, real: Tensor) -> str:
        """How the check calls an input: an argument, one of the state, something closed over."""
        known = self.where.get(id(real))
        if known is not None:
            return known
        members = [m.real for m in self.captured.session.members]
        owner = next((m for m in members if base_of(m) is real), None)
        name = f"x{len(self.where)}"
        if id(real) in self.captured.session.made_owners:
            one = self._find(self.captured.session.made_owners[id(real)])
            self.call.line(f"{name} = {self.names.name(whole_storage, 'whole_storage')}({one})")
        elif owner is not None:
            self.call.line(f"{name} = {self._find(owner)}._base")
        else:
            found = self.reach.find(real)
            if found is None and is_foreign(real):
                raise FallbackError("a tensor subclass is made inside, of tensors from outside")
            text = self.names.name(real, "closed_over") if found is None else self.reached.text(found)
            self.call.line(f"{name} = {text}")
        self.where[id(real)] = name
        return name

    def _aliases(self) -> None:
        """Other places of the inputs hold the same tensors."""
        for text, value, path in self.values.later:
            known = self.where.get(id(value))
            if known is None:
                test = f"isinstance({text}, {self.names.name(Tensor, 'Tensor')})"
                self.call.unless(test, path, "a tensor", f"type({text}).__name__")
                self.bystanders.append(text)
            elif known != text:
                self.call.unless(f"{text} is {known}", path, "the same tensor as elsewhere", "'another one'")

    def _tensors(self, inputs: list[str]) -> None:
        reals, texts = list(self.reals), list(inputs)
        known = {id(r) for r in reals}
        for key, name in self.given.items():
            if key not in known:
                reals.append(self.values.tensors[key])
                texts.append(name)
        if not reals:
            return
        session = self.captured.session
        symbolic = self.captured.symbolic_inputs()
        count = len(self.reals)
        paths = [*map(self._path, range(count)), *(self.values.paths[id(r)] for r in reals[count:])]
        self._open(reals, texts, paths)
        wholes = {id(e.real): e.value for e in session.entrances if e.form is not None}
        mine = {id(t) for t in self.state}
        others = [(text, r) for text, r in zip(texts, reals, strict=True) if id(r) not in mine]
        if others:
            seen = {**wholes, **symbolic}
            check = self.names.name(tensor_check([r for _, r in others], seen), "tensors_match")
            with self.call.fast.block(f"if not {check}({', '.join(text for text, _ in others)}):"):
                self.call.miss()
        if others and self.bystanders:
            ids = [
                "".join(f"id({text}), " for text in some) for some in (self.bystanders, self.given.values())
            ]
            test = f"{{{ids[0]}}}.isdisjoint(({ids[1]}))"
            self.call.unless(test, "arguments", "none that the function also reaches", "'one of those'")
        if others and (mine or self.steady_bystanders):
            given = "".join(f"id({text}), " for text, _ in others)
            test = f"not ids.isdisjoint(({given}))" if len(others) > FEW else ""
            test = test or " or ".join(f"id({text}) in ids" for text, _ in others)
            with self.call.fast.block(f"if {test}:"):
                self.call.miss()
        looks = tuple(look_of(path, r, symbolic.get(id(r))) for path, r in zip(paths, reals, strict=True))
        compare = f"{self.names.name(compare_looks, 'compare_looks')}(note, {self.names.name(looks, 'looks')}"
        with self.call.slow.block(f"if {compare}, ({self._spread(texts, ', ')})):"):
            self.call.only_slow("return None")
        if symbolic:
            by_id = dict(zip(map(id, reals), texts, strict=True))
            sizes, text = shape_check(list(symbolic.values()))
            arguments = ", ".join(by_id[key] for key in symbolic)
            test = f"{self.names.name(sizes, 'sizes_fit')}({arguments})"
            shapes = f"[tuple(t.shape) for t in ({arguments}, )]"
            self.call.unless(test, "sizes", text, shapes)

    def _open(self, reals: list[Tensor], texts: list[str], paths: list[str]) -> None:
        """Tensor subclasses are of the same type and metadata; their parts are checked with the rest."""
        if self.captured.session.veiled:
            now = f"{self.names.name(dispatch_modes, 'dispatch_modes')}()"
            self.call.unless(f"not {now}", "dispatch modes", "none", now)
        for real, name, path in list(zip(reals, texts, paths, strict=True)):
            if not is_foreign(real):
                continue
            parts = write_form_check(self.call, self.names, form_of(real), name, path)
            self.parts[id(real)] = parts
            for k, (part, source) in enumerate(zip(parts_of(real), parts, strict=True)):
                known = next((n for r, n in zip(reals, texts, strict=True) if r is part), None)
                if known is not None:
                    self.call.unless(f"{source} is {known}", path, "made of the same tensors", "'others'")
                else:
                    reals.append(part)
                    texts.append(source)
                    paths.append(f"{path}, part {k}")

    def _autograd(self, inputs: list[str]) -> None:
        """`requires_grad` where grad mode is off, and leaves: only where it can make a difference."""
        session, facts = self.captured.session, self.captured.facts
        asks = session.asks_autograd
        ignored = not self.captured.forward.grad_mode_before  # then the check of tensors passes over it
        rewritten = {f.index for f in facts.inputs if not f.untouched}
        for i, (text, real) in enumerate(zip(inputs, self.reals, strict=True)):
            path = self._path(i)
            if ignored and (asks or session.ambient.grad_was_on):
                now, before = f"{text}.requires_grad", real.requires_grad
                self.call.unless(f"{now} is {before}", path, f"requires_grad={before}", now)
            if real.requires_grad and id(real) in self.given and (asks or i in rewritten):
                now, before = f"{text}.is_leaf", real.is_leaf
                self.call.unless(f"{now} is {before}", path, f"is_leaf={before}", now)
        for fact in facts.inputs:
            if fact.history_changed and 0 <= fact.index < len(self.reals):
                view = f"{self.names.name(kind_of_view, 'kind_of_view')}({inputs[fact.index]})"
                kind = self.names.name(kind_of_view(self.reals[fact.index]), "kind")
                test, path = f"{view} == {kind}", self._path(fact.index)
                self.call.unless(test, path, "as much of a view as before", "'another kind of view'")

    def _path(self, i: int) -> str:
        session = self.captured.session
        count = len(session.entrances)
        slot = session.entrances[i].slot if i < count else session.members[i - count].slot
        found = self.reach.find(self.reals[i]) if isinstance(slot, ClosedOver) else None
        return slot.describe() if found is None else found.path

    def _spread(self, texts: list[str], end: str = "") -> str:
        """Arguments for a call, the whole state at once where it comes in one piece."""
        whole = [f"state[{k}]" for k in range(len(self.state))]
        start = texts.index(whole[0]) if whole and whole[0] in texts else -1
        if start >= 0 and texts[start : start + len(whole)] == whole:
            before, after = texts[:start], texts[start + len(whole) :]
            pieces = [f"({', '.join(some)},)" if some else "" for some in (before, after)]
            return "*" + " + ".join(filter(None, (pieces[0], "state", pieces[1]))) + end
        return ", ".join(texts) + (end if texts else "")
