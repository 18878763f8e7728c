"""The check of an entry made by tracing: generated code that tells whether a call fits, and finds its inputs.

The check takes the call's arguments and returns the entry's flat inputs, or MISS when an assumption does not
hold: ambient state, arguments and their structure, modules and names, all tensors, memory, in this order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from aheadgrad.emit.script import Namespace, Script
from aheadgrad.errors import FallbackError
from aheadgrad.frontends.checks import Check
from aheadgrad.frontends.compiled import MISS, Described
from aheadgrad.frontends.function import Flat
from aheadgrad.frontends.state import ABSENT, STAMP, Look, State, Surroundings
from aheadgrad.recording.compared_values import Same, freeze, frozen
from aheadgrad.recording.containers import is_array, shares_memory
from aheadgrad.recording.entry_assumptions import assumed_around, assumed_of_inputs
from aheadgrad.runtime.entry import Entry
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.dispatch import dispatch_modes
from aheadgrad.torchlayer.functional import storage_key
from aheadgrad.torchlayer.guards import shape_check, tensor_guards
from aheadgrad.torchlayer.subclasses import form_of, is_foreign, parts_of, same_meta

_FEW = 4


class Guarded(Described):
    """`check` gives the entry's inputs or MISS, `call` runs it or gives MISS, `why` tells the reason."""

    check: Callable[..., Any]
    why: Callable[..., Any]


class GuardWriter(Check):
    """Writes the check of one entry; `look` is what the state was when it was recorded.

    `symbolic` has the symbols for Python numbers, by position among the leaves; `numbers` tells what those
    are called in the check, in this order.
    """

    def __init__(self, flat: Flat, symbolic: dict[int, Any], entry: Entry, around: State, look: Look) -> None:
        self.entry, self.assembled = entry, entry.assembled
        names = self.assembled.names if self.assembled.inline else Namespace()
        super().__init__(entry, Script("call", names), names.name(MISS, "MISS"))
        self.flat, self.symbolic, self.around, self.look = flat, symbolic, around, look
        self.paths = {id(v): path for v, path in reversed(list(zip(flat.leaves, flat.paths, strict=True)))}
        self.numbers: list[str] = []
        self.given: dict[int, str] = {}  # by id: tensors among the arguments
        self.state: list[Tensor] = []  # inputs that are held by modules, in cells or globals
        self._leaves = 0  # how many were looked at

    def write(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Guarded:
        for what, tell, value in assumed_around(self.captured, implied=bool(self.reals)):
            self.equal(what, f"{self.names.name(tell, tell.__name__)}()", value)
        self._arguments(args, kwargs)
        self.given = dict(self.where)
        inside = (r for r in self.reals if id(r) in self.look.places and id(r) not in self.given)
        self.state = [r for r in inside if not is_foreign(r)]
        if self.look.found:
            self._surroundings()
        self._containers()
        inputs = [self.find(real) for real in self.reals]
        self._tensors(inputs)
        for i, what, ask, value in assumed_of_inputs(self.captured, self.reals, self.given):
            path = self._path(self.reals[i], inputs[i])
            self.equal(f"{path}, {what}", f"{self.names.name(ask, what)}({inputs[i]})", value)
        mine = {id(r) for r in self.state}
        others = self.write_memory(inputs, mine)
        if others and mine:
            key = self.names.name(storage_key, "storage_key")
            self.unless(f"storages.isdisjoint(map({key}, ({others})))", "places in memory")
        count = len(self.captured.session.entrances)
        inputs = [*inputs[:count], *self.numbers, *inputs[count:]]
        check, why = Script("check", self.names), self.why()
        check.lines = [*self.script.lines, f"    return ({self._spread(inputs, ', ')})"]
        run = self.assembled.inline or (lambda given: [f"    return {entry}({given})"])
        entry = "" if self.assembled.inline else self.names.name(self.assembled.run, "entry")
        self.script.lines += run(self._spread(inputs))
        call, source = self.script.function("args, kwargs")
        made = Guarded(self.entry, call, source, name)
        made.check, made.why = (script.function("args, kwargs")[0] for script in (check, why))
        return made

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Structures are taken apart by what pytree knows of them.

        Plain values are compared by type and value, other objects by identity.
        """
        keys = list(kwargs)
        self.equal("positional arguments", "len(args)", len(args))
        test = f"list(kwargs) == {keys!r}" if keys else "not kwargs"
        self.unless(test, "keyword arguments", keys, "list(kwargs)")
        if args:
            self.script.line(f"{''.join(f'a{i}, ' for i in range(len(args)))}= args")
        for i, value in enumerate(args):
            self._value(f"a{i}", value, self.flat.top_paths[i])
        for i, (key, value) in enumerate(kwargs.items()):
            self.script.line(f"k{i} = kwargs[{key!r}]")
            self._value(f"k{i}", value, key)

    def _value(self, name: str, value: Any, path: str) -> None:
        if isinstance(value, Tensor):
            known = self.where.setdefault(id(value), name)
            if known != name:
                both = f"{path} and {self.paths[id(value)]}"
                self.unless(f"{name} is {known}", both, "one tensor", "'two'")
        elif not pytree.is_leaf(value) and not pytree.is_size(value):
            self._container(name, value, path)
            return
        elif self._leaves in self.symbolic:
            self.equal(path, f"type({name})", type(value))
            self.numbers.append(name)
        else:
            self.same(path, name, value)
        self._leaves += 1

    def _container(self, name: str, value: Any, path: str) -> None:
        opened = pytree.opener(value)
        parts, context = opened(value)
        self.equal(path, f"type({name})", type(value))
        self.script.line(f"{name}_, context = {self.names.name(opened, 'opened')}({name})")
        self.equal(f"the length of {path}", f"len({name}_)", len(parts))
        if isinstance(value, dict):  # keys, of which 1 and True are equal but not the same
            self.same(f"the keys of {path}", "context", context)
        elif context is not None:
            same = (
                f"{self.names.name(same_meta, 'same_meta')}(context, {self.names.name(context, 'context')})"
            )
            self.unless(same, path, "the same structure", "'another'")
        for i, part in enumerate(parts):
            self.script.line(f"{name}_{i} = {name}_[{i}]")
            self._value(f"{name}_{i}", part, f"{path}[{i}]")

    def _surroundings(self) -> None:
        """The state is looked into only if a dictionary has changed, or a name holds something else."""
        name, script = self.names.name, self.script
        around = Surroundings(self.around, self.look, self.state, self.memory)
        where = name(around, "surroundings")
        tests = [f"hooks != {name(RemovableHandle, 'Handle')}.next_id"] if self.around.trees else []
        tests.append("not held(things)")
        for i, place in enumerate(self.around.names):
            text = f"{name(place.get, 'contents')}()" if place.get() is ABSENT else self.text_of(place)
            tests.append(f"{text} is not named[{i}]")

        def renewed(head: str) -> None:
            with script.block(head):
                script.line(f"found = {where}.renew()")
                with script.block("if found is None:"):
                    self.fail(f"{where}.differs()")
                script.line(f"{STAMP} = found")

        script.line(f"{STAMP} = {where}.stamp")
        renewed(f"if {' or '.join(tests)}:")
        if around.guards is not None:
            self.tensors(around.guards, around.paths, "*state")
        if around.keeps_pointers:
            renewed(f"if tuple(map({name(Tensor.data_ptr, 'data_ptr')}, state)) != pointers:")
        self.where.update({id(real): f"state[{k}]" for k, real in enumerate(self.state)})

    def _containers(self) -> None:
        """Lists and the like have the contents that they had; Python keeps no version of those."""
        plain, copies = "", []
        for i, (path, value) in enumerate(self.look.containers):
            known = frozen(value, path)
            if type(value) is list and all(type(v) in (int, str, bool, type(None)) for v in value):
                plain += f"containers[{i}], "  # `==` compares such well enough
                copies.append(list(value))
            else:
                now = f"{self.names.name(freeze, 'freeze')}(containers[{i}])"
                test = f"{now} == {self.names.name(known, 'frozen')}"
                self.unless(test, path, "as it was", f"containers[{i}]")
        if plain:
            as_they_were = self.names.name(tuple(copies), "as_they_were")
            self.unless(f"({plain}) == {as_they_were}", "lists of the module", "as they were", "'others'")
        if self.captured.session.recorder.borrowed:
            self._arrays()

    def _arrays(self) -> None:
        """Arrays are compared by contents; where a tensor borrows the memory of one, it is the same one."""
        made = self.captured.session.trace.constants.values()
        named = {id(place.get()): place for place in self.around.names}
        for value in pytree.tree_leaves((self.flat.leaves, [v for _, v in self.look.containers])):
            if is_array(value) and any(shares_memory(value, t) for t in made):
                if id(value) not in named:
                    raise FallbackError("a tensor is made in the memory of a numpy array; pass a tensor")
                text, known = self.text_of(named[id(value)]), self.names.name(value, "array")
                self.unless(f"{text} is {known}", named[id(value)].path, "the same array", "'another'")

    def outside(self, real: Tensor) -> str:
        if id(real) in self.look.places:
            return self.text_of(self.look.places[id(real)])
        if is_foreign(real):
            raise FallbackError("a tensor subclass is made inside, of tensors from outside")
        if any(_holds(token, real) for _, token in self.look.found):
            return f"{self.names.name(weakref.ref(real), 'in_a_list')}()"  # as long as it is in there
        return super().outside(real)

    def _tensors(self, inputs: list[str]) -> None:
        """All tensors, and parts of tensors, look as they did; their sizes fit, where they may be any."""
        known = {id(r) for r in self.reals}
        tensors = {id(v): v for v in self.flat.leaves}
        unused = [(name, tensors[key]) for key, name in self.given.items() if key not in known]
        found = [*zip(inputs, self.reals, strict=True), *unused]
        self._open(found)
        symbolic = self.captured.symbolic_inputs()
        wholes = {id(e.real): e.value for e in self.captured.session.entrances if e.form is not None}
        mine = {id(t) for t in self.state}
        others = [(text, r) for text, r in found if id(r) not in mine]
        if others:
            guards = tensor_guards([r for _, r in others], {**wholes, **symbolic})
            self.tensors(guards, [self._path(r, text) for text, r in others], ", ".join(t for t, _ in others))
        self._apart(others)
        by_id = {id(r): text for text, r in found}
        sized = {by_id[key]: value for key, value in symbolic.items()}
        sized.update(zip(self.numbers, self.captured.numbers, strict=True))
        if sized:
            fits, text = shape_check(list(sized.values()))
            given = ", ".join(sized)
            now = f"[getattr(t, 'shape', t) for t in ({given}, )]"
            self.unless(f"{self.names.name(fits, 'sizes_fit')}({given})", "sizes", text, now)

    def _open(self, found: list[tuple[str, Tensor]]) -> None:
        """Tensor subclasses are put together as they were; their parts are checked with the rest."""
        if self.captured.session.veiled:
            self.equal("dispatch modes", f"{self.names.name(dispatch_modes, 'dispatch_modes')}()", 0)
        for name, real in [pair for pair in found if is_foreign(pair[1])]:
            form, path = form_of(real), self._path(real, name)
            self.script.line(f"parts = {self.names.name(form.parts, 'parts_of')}({name})")
            self.unless("parts is not None", path, f"a {form.kind.__name__} like before", f"type({name})")
            parts = self.parts[id(real)] = [f"{name}_{k}_" for k in range(len(form.plain))]
            self.script.line(f"{', '.join(parts)}, = parts")
            for part, text in zip(parts_of(real), parts, strict=True):
                known = next((t for t, r in found if r is part), None)
                if known is None:
                    found.append((text, part))
                else:
                    self.unless(f"{text} is {known}", path, "made of the same tensors", "'others'")

    def _apart(self, others: list[tuple[str, Tensor]]) -> None:
        """What was one tensor is one still: none that modules hold, unless it was before."""
        rest = []
        for text, real in others:
            place = self.look.places.get(id(real))
            if place is None:
                rest.append(text)
            elif not is_foreign(real) or id(real) in self.given:
                self.unless(f"{self.text_of(place)} is {text}", place.path, "the same tensor", "'another'")
        if not rest or not self.look.places:
            return
        if len(rest) > _FEW:
            test = f"ids.isdisjoint(({''.join(f'id({text}), ' for text in rest)}))"
        else:
            test = " and ".join(f"id({text}) not in ids" for text in rest)
        self.unless(test, "arguments", "no tensor of the module's, or closed over", "'one'")

    def _path(self, real: Tensor, text: str) -> str:
        """What the user calls a tensor."""
        place = self.look.places.get(id(real))
        return self.paths.get(id(real)) or (text if place is None else place.path)

    def _spread(self, texts: list[str], end: str = "") -> str:
        """Arguments for a call, the whole state at once where it comes in one piece."""
        whole = [f"state[{k}]" for k in range(len(self.state))]
        start = texts.index(whole[0]) if whole and whole[0] in texts else -1
        if start >= 0 and texts[start : start + len(whole)] == whole:
            before, after = texts[:start], texts[start + len(whole) :]
            pieces = [f"({', '.join(some)},)" if some else "" for some in (before, after)]
            return "*" + " + ".join(filter(None, (pieces[0], "state", pieces[1]))) + end
        return ", ".join(texts) + (end if texts else "")


def _holds(token: Any, real: Tensor) -> bool:
    """Is a tensor part of what a token stands for?"""
    if isinstance(token, tuple):
        return any(_holds(part, real) for part in token)
    return type(token) is Same and token.value is real
