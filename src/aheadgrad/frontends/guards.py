"""The check of an entry: generated code that tells whether a call fits, and finds its inputs.

The check takes the call's arguments and returns the entry's flat inputs, or MISS when any
assumption does not hold. In order, the common case first:

    ambient state, arguments and their structure, module trees, cells and globals, all tensors, memory
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import CellType, ModuleType
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from aheadgrad.emit.script import Namespace, Script
from aheadgrad.errors import FallbackError
from aheadgrad.frontends.compiled import MISS
from aheadgrad.frontends.guarded_ambient import write_ambient
from aheadgrad.frontends.guarded_arguments import ArgumentWriter, same_value
from aheadgrad.frontends.guarded_memory import Memory, write_memory
from aheadgrad.frontends.misses import Reason, shown, tensor_reason
from aheadgrad.frontends.plain import describe, freeze, frozen, is_array, shares_memory
from aheadgrad.frontends.state import ABSENT, Look, Place, State, is_plain_list
from aheadgrad.frontends.surroundings import Surroundings, tables_of
from aheadgrad.recording.shared import whole_storage
from aheadgrad.runtime.entry import Entry
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.autograd import base_of, kind_of_view
from aheadgrad.torchlayer.dispatch import dispatch_modes
from aheadgrad.torchlayer.guards import shape_check, tensor_guards
from aheadgrad.torchlayer.subclasses import Fixed, Form, form_of, is_foreign, parts_of, same_meta

_FEW = 4


@dataclass(frozen=True, eq=False)
class Guard:
    """`check` gives the inputs or MISS, `call` runs the entry or gives MISS, `why` says the reason."""

    check: Callable[..., Any]
    call: Callable[..., Any]
    why: Callable[..., Any]
    source: str


class GuardWriter:
    """Writes the check of one entry; `look` is what the state was when it was recorded."""

    def __init__(self, arguments: ArgumentWriter, entry: Entry, state: State, look: Look) -> None:
        self.arguments = arguments
        self.entry = entry.assembled
        self.captured = entry.captured
        self.around, self.look = state, look
        self.names = self.entry.names if self.entry.inline else Namespace()
        self.script = Script("call", self.names)
        self.misses = self.names.name(MISS, "MISS")
        session = self.captured.session
        self.reals = [e.real for e in session.entrances] + [m.real for m in session.members]
        self.where: dict[int, str] = {}  # by id of a tensor: how the check calls it
        self.parts: dict[int, list[str]] = {}  # by id of a tensor subclass: where its parts are
        # by id of a tensor: where a module holds it
        self.in_trees = {i: p for i, p in look.places.items() if not any(p is q for q in state.names)}
        self.state: list[Tensor] = []  # those of `reals` that modules hold, in the order of `state`
        self.memory = Memory(self.captured, self.reals)
        self.sized: dict[str, Tensor] = {}  # by name: traced values of tensors with symbolic sizes
        self._whys: dict[int, str] = {}  # by line: what to say where the check says MISS

    def write(self) -> Guard:
        write_ambient(self, self.captured, implied=bool(self.reals))
        self.where.update(self.arguments.write(self))
        self.given = dict(self.where)
        self.state = [
            r for r in self.reals if id(r) in self.in_trees and id(r) not in self.given and not is_foreign(r)
        ]
        self._trees()
        self._names()
        self._containers()
        self._arrays()
        inputs = [self.find(real) for real in self.reals]
        self._tensors(inputs)
        self._sizes()
        self._autograd(inputs)
        write_memory(self, self.memory, inputs)
        count = len(self.captured.session.entrances)
        inputs = [*inputs[:count], *self.arguments.numbers, *inputs[count:]]
        check, why = Script("check", self.names), Script("why", self.names)
        check.lines = [*self.script.lines, f"    return ({self._spread(inputs, ', ')})"]
        why.lines = [self._whys.get(i, line) for i, line in enumerate(self.script.lines)]
        self.script.lines += self._run(self._spread(inputs))
        call, source = self.script.function("args, kwargs")
        del self.arguments  # each knows the other, and both know the caller's tensors
        return Guard(check.function("args, kwargs")[0], call, why.function("args, kwargs")[0], source)

    def unless(self, test: str, what: str, assumed: Any, now: str) -> None:
        """The call fits only if the test holds; if not, `now` says what came instead of what was assumed."""
        told = assumed if isinstance(assumed, str) else describe(assumed)
        reason, came = self.names.name(Reason, "Reason"), f"{self.names.name(describe, 'describe')}({now})"
        with self.script.block(f"if not ({test}):"):
            self._miss(f"{reason}({what!r}, {told!r}, {came})")

    def _miss(self, why: str) -> None:
        self._whys[len(self.script.lines)] = f"        return {why}"
        self.script.line(f"return {self.misses}")

    def _run(self, inputs: str) -> list[str]:
        if self.entry.inline is not None:
            return self.entry.inline(inputs)
        return [f"    return {self.names.name(self.entry.run, 'entry')}({inputs})"]

    def _trees(self) -> None:
        """Modules are looked into only if one of their dictionaries has changed."""
        if not self.around.trees:
            return
        name, line, state = self.names.name, self.script.line, self.around
        tokens, memory = self.look.tokens, self.memory
        numbers = [next(i for i, t in enumerate(self.look.tensors) if t is real) for real in self.state]
        pattern = memory.pattern(self.state)

        def find() -> tuple[tuple[Tensor, ...], list[Tensor]] | None:
            now = state.look()
            if now.tokens != tokens:
                return None
            found = tuple(now.tensors[i] for i in numbers)
            held = [t for t in now.tensors if not any(now.places[id(t)] is p for p in state.names)]
            return None if memory.pattern(found) != pattern else (found, held)

        guards = tensor_guards(self.state)
        match = guards.check if self.state else _always
        kept = memory.matters and bool(self.state)
        around = Surroundings(find, match, tables_of(state), keep_pointers=kept)
        where = name(around, "surroundings")

        def renewed(head: str) -> None:
            with self.script.block(head):
                line(f"found = {where}.renew()")
                with self.script.block("if found is None:"):
                    self._whys[len(self.script.lines)] = f"            return {changed}"
                    line(f"return {self.misses}")
                line(f"{stamp} = found")

        def differs() -> Reason:
            path, was, now = [
                *look.differences(state.look()),
                ("the module's tensors", "as they were", "others"),
            ][0]
            return Reason(path, shown(was), shown(now))

        look, changed = self.look, f"{name(differs, 'differs')}()"
        stamp = "held, things, state, hooks, ids, pointers, storages"
        line(f"{stamp} = {where}.stamp")
        renewed(f"if hooks != {name(RemovableHandle, 'Handle')}.next_id or not held(things):")
        if self.state:
            with self.script.block(f"elif not {name(match, 'state_matches')}(*state):"):
                self._miss(
                    self._tensor_reason(guards, [self.in_trees[id(r)].path for r in self.state], "*state")
                )
        if kept:
            renewed(f"elif tuple(map({name(Tensor.data_ptr, 'data_ptr')}, state)) != pointers:")
        self.where.update({id(real): f"state[{k}]" for k, real in enumerate(self.state)})

    def _names(self) -> None:
        """Cells and globals hold what they held; tensors in them are inputs."""
        inputs = {id(r) for r in self.reals}
        for place in self.around.names:
            value, text = place.get(), self._text(place)
            if isinstance(value, ModuleType):
                continue
            if value is ABSENT:
                empty = f"{self.names.name(place.get, 'contents')}() is {self.names.name(ABSENT, 'ABSENT')}"
                self.unless(empty, place.path, "nothing yet", "'something'")
            elif not isinstance(value, Tensor):
                self.unless(same_value(self.names, text, value, place.path), place.path, value, text)
            elif id(value) in self.where:
                self.unless(f"{text} is {self.where[id(value)]}", place.path, "the same tensor", text)
            else:
                if id(value) in inputs:
                    name = self.where[id(value)] = f"x{len(self.where)}"
                    self.script.line(f"{name} = {text}")
                else:
                    kind = self.names.name(Tensor, "Tensor")
                    self.unless(f"isinstance({text}, {kind})", place.path, "a tensor", text)
                if self.given:  # the function may ask whether it was given this very tensor
                    test = " and ".join(f"{text} is not {given}" for given in self.given.values())
                    self.unless(test, place.path, "none of the arguments", "'one of them'")

    def _text(self, place: Place) -> str:
        holder = self.names.name(place.holder, "holder")
        if isinstance(place.holder, CellType):
            return f"{holder}.cell_contents"
        return f"{holder}.get({place.key!r})"

    def _containers(self) -> None:
        """Lists and the like have the contents that they had; Python keeps no version of those."""
        named = {p.path for p in self.around.names}
        found = [(path, value) for path, value in self.look.containers if path not in named]
        plain = tuple(value for _, value in found if is_plain_list(value))
        if plain:
            copies = tuple(list(value) for value in plain)
            test = f"{self.names.name(plain, 'lists')} == {self.names.name(copies, 'as_they_were')}"
            self.unless(test, "lists of the module", "as they were", "'others'")
        for path, value in found:
            if not is_plain_list(value):
                now = f"{self.names.name(freeze, 'freeze')}({self.names.name(value, 'holder')})"
                known = self.names.name(frozen(value, path), "frozen")
                self.unless(f"{now} == {known}", path, "as it was", self.names.name(value, "holder"))

    def _arrays(self) -> None:
        """Arrays are compared by contents: one with the same contents may come, in other memory."""
        session = self.captured.session
        if not session.recorder.borrowed:
            return

        def is_lent(value: Any) -> bool:
            made = session.trace.constants.values()
            return is_array(value) and any(shares_memory(value, t) for t in made)

        named = [(place, place.get()) for place in self.around.names]
        known = {id(value) for _, value in named}
        others = [v for _, v in self.look.containers if id(v) not in known]
        if any(map(is_lent, pytree.tree_leaves([*self.arguments.flat.leaves, *others]))):
            raise FallbackError("a tensor is made in the memory of a numpy array; pass a tensor")
        for place, value in named:
            if is_lent(value):
                same = f"{self._text(place)} is {self.names.name(value, 'array')}"
                self.unless(same, place.path, "the same array", "'another'")

    def find(self, real: Tensor) -> str:
        """How the check calls an input: an argument, one of the state, something closed over."""
        known = self.where.get(id(real))
        if known is not None:
            return known
        session = self.captured.session
        owner = next((m.real for m in session.members if base_of(m.real) is real), None)
        if id(real) in session.made_owners:
            one = self.find(session.made_owners[id(real)])
            text = f"{self.names.name(whole_storage, 'whole_storage')}({one})"
        elif owner is not None:
            text = f"{self.find(owner)}._base"
        elif id(real) in self.in_trees:
            text = self._text(self.in_trees[id(real)])
        elif is_foreign(real):
            raise FallbackError("a tensor subclass is made inside, of tensors from outside")
        else:
            text = self.names.name(real, "closed_over")
        name = self.where[id(real)] = f"x{len(self.where)}"
        self.script.line(f"{name} = {text}")
        return name

    def _tensors(self, inputs: list[str]) -> None:
        reals, texts = list(self.reals), list(inputs)
        known = {id(r) for r in reals}
        for key, name in self.given.items():
            if key not in known:
                reals.append(self.arguments.tensors[key])
                texts.append(name)
        if not reals:
            return
        session = self.captured.session
        symbolic = self.captured.symbolic_inputs()
        self._open(reals, texts)
        wholes = {id(e.real): e.value for e in session.entrances if e.form is not None}
        mine = {id(t) for t in self.state}
        others = [(text, r) for text, r in zip(texts, reals, strict=True) if id(r) not in mine]
        if others:
            guards = tensor_guards([r for _, r in others], {**wholes, **symbolic})
            given = ", ".join(text for text, _ in others)
            with self.script.block(f"if not {self.names.name(guards.check, 'tensors_match')}({given}):"):
                self._miss(self._tensor_reason(guards, [self._path(r, text) for text, r in others], given))
        self._apart(others)
        by_id = dict(zip(map(id, reals), texts, strict=True))
        self.sized = {by_id[key]: value for key, value in symbolic.items()}

    def _sizes(self) -> None:
        """Sizes and numbers that became symbols meet what the recording assumed of them."""
        numbers = self.arguments.numbers
        symbolic = {**self.sized, **dict(zip(numbers, self.captured.numbers, strict=True))}
        if symbolic:
            check, text = shape_check(list(symbolic.values()))
            given = ", ".join(symbolic)
            now = f"[getattr(t, 'shape', t) for t in ({given}, )]"
            self.unless(f"{self.names.name(check, 'sizes_fit')}({given})", "sizes", text, now)

    def _apart(self, others: list[tuple[str, Tensor]]) -> None:
        """What was one tensor is one still: none that modules hold, unless it was before."""
        rest = []
        for text, real in others:
            place = self.in_trees.get(id(real))
            if place is None:
                rest.append(text)
            elif not is_foreign(real) or id(real) in self.given:
                self.unless(f"{self._text(place)} is {text}", place.path, "the same tensor", "'another'")
        if not rest or not self.in_trees:
            return
        if len(rest) > _FEW:
            test = f"ids.isdisjoint(({''.join(f'id({text}), ' for text in rest)}))"
        else:
            test = " and ".join(f"id({text}) not in ids" for text in rest)
        self.unless(test, "arguments", "no tensor of the module's", "'one'")

    def _open(self, reals: list[Tensor], texts: list[str]) -> None:
        """Tensor subclasses are of the same type and metadata; their parts are checked with the rest."""
        if self.captured.session.veiled:
            self.unless(
                f"not {self.names.name(dispatch_modes, 'dispatch_modes')}()", "dispatch modes", 0, "'some'"
            )
        for real, name in list(zip(reals, texts, strict=True)):
            if not is_foreign(real):
                continue
            parts = self.parts[id(real)] = self._form(form_of(real), name)
            for part, source in zip(parts_of(real), parts, strict=True):
                known = next((n for r, n in zip(reals, texts, strict=True) if r is part), None)
                if known is not None:
                    self.unless(
                        f"{source} is {known}", self._path(real, name), "made of the same tensors", "'others'"
                    )
                else:
                    reals.append(part)
                    texts.append(source)

    def _form(self, form: Form, name: str) -> list[str]:
        """Lines that check the type and metadata of a subclass, and open it; the names of its parts."""
        self.unless(
            f"type({name}) is {self.names.name(form.kind, form.kind.__name__)}",
            name,
            form.kind,
            f"type({name})",
        )
        self.script.line(f"inside, meta = {name}.__tensor_flatten__()")
        same = self.names.name(same_meta, "same_meta")
        meta = (
            "meta is None" if form.meta is None else f"{same}(meta, {self.names.name(form.meta, 'metadata')})"
        )
        self.unless(
            f"list(inside) == {list(form.names)} and {meta}", f"{name}, metadata", str(form.meta), "str(meta)"
        )
        parts: list[str] = []
        for k, (attribute, inner) in enumerate(zip(form.names, form.inner, strict=True)):
            part = f"{name}_{k}_" if "[" not in name else f"part_{k}_"
            self.script.line(f"{part} = {name}.{attribute}")
            if isinstance(inner, Fixed):
                test = f"{same}({part}, {self.names.name(inner.value, 'fixed')})"
                self.unless(test, f"{name}.{attribute}", "as it was", "'another'")
            elif isinstance(inner, Form):
                parts += self._form(inner, part)
            else:
                parts.append(part)
        return parts

    def _autograd(self, inputs: list[str]) -> None:
        """`requires_grad` where grad mode is off, and leaves: only where it can make a difference."""
        session, facts = self.captured.session, self.captured.facts
        asks = session.asks_autograd
        ignored = not self.captured.forward.grad_mode_before  # then the check of tensors passes over it
        rewritten = {f.index for f in facts.inputs if not f.untouched}
        for i, (text, real) in enumerate(zip(inputs, self.reals, strict=True)):
            if ignored and (asks or session.ambient.grad_was_on):
                now = f"{text}.requires_grad"
                self.unless(
                    f"{now} is {real.requires_grad}",
                    f"{self._path(real, text)}, requires_grad",
                    real.requires_grad,
                    now,
                )
            if real.requires_grad and id(real) in self.given and (asks or i in rewritten):
                now = f"{text}.is_leaf"
                self.unless(
                    f"{now} is {real.is_leaf}", f"{self._path(real, text)}, is_leaf", real.is_leaf, now
                )
        for fact in facts.inputs:
            if fact.history_changed and 0 <= fact.index < len(self.reals):
                view = f"{self.names.name(kind_of_view, 'kind_of_view')}({inputs[fact.index]})"
                kind = self.names.name(kind_of_view(self.reals[fact.index]), "kind")
                self.unless(f"{view} == {kind}", "views", "as much of a view as before", "'another kind'")

    def _path(self, real: Tensor, text: str) -> str:
        """What the user calls a tensor."""
        place = self.look.places.get(id(real))
        return self.arguments.paths.get(id(real)) or (text if place is None else place.path)

    def _tensor_reason(self, guards: Any, paths: list[str], given: str) -> str:
        """Torch's own words for how tensors differ."""
        return f"{self.names.name(partial(tensor_reason, guards, paths), 'tensor_reason')}({given})"

    def _spread(self, texts: list[str], end: str = "") -> str:
        """Arguments for a call, the whole state at once where it comes in one piece."""
        whole = [f"state[{k}]" for k in range(len(self.state))]
        start = texts.index(whole[0]) if whole and whole[0] in texts else -1
        if start >= 0 and texts[start : start + len(whole)] == whole:
            before, after = texts[:start], texts[start + len(whole) :]
            pieces = [f"({', '.join(some)},)" if some else "" for some in (before, after)]
            return "*" + " + ".join(filter(None, (pieces[0], "state", pieces[1]))) + end
        return ", ".join(texts) + (end if texts else "")


def _always() -> bool:
    return True
