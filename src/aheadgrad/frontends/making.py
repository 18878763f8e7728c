"""Making one entry: the function is recorded, compiled, and given a check.

Around the run of the function, what it leaves behind is noted: buffers that it rebinds, attributes and
containers within its reach, lists and dictionaries among its arguments. Every call of the entry leaves the
same behind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from aheadgrad import pipeline
from aheadgrad.capture.rehearse import rehearse
from aheadgrad.errors import AheadgradError, FallbackError, NeedsNumbers
from aheadgrad.frontends import module as modules
from aheadgrad.frontends.changes import take_changes, take_traced
from aheadgrad.frontends.function import Flat, make_call, takes_any_keyword
from aheadgrad.frontends.given import refuse_shared
from aheadgrad.frontends.guarded_values import ValueWriter
from aheadgrad.frontends.guards import GuardWriter
from aheadgrad.frontends.leftovers import check_numbers, check_state
from aheadgrad.frontends.mentions import compares_types
from aheadgrad.frontends.places import Given, changed_containers, containers
from aheadgrad.frontends.reach import Reach
from aheadgrad.frontends.results import Kept, check_result, kept_parts
from aheadgrad.frontends.returns import leave, return_text
from aheadgrad.frontends.undo import Undo
from aheadgrad.options import Options
from aheadgrad.runtime.stage import Entry
from aheadgrad.torchlayer.dynamo import Symbols


@dataclass(eq=False)
class Guarded:
    """An entry with its check; `why` tells what the check has against a call."""

    check: Callable[..., Any]
    call: Callable[..., Any]
    why: Callable[..., None]
    run: Callable[..., Any]
    entry: Entry
    source: str


class Making:
    """One recording of a call; what is within the function's reach is looked at first."""

    def __init__(self, fn: Any, name: str, flat: Flat, options: Options) -> None:
        _refuse_scripts(fn.modules() if isinstance(fn, nn.Module) else [fn])
        _refuse_iterators(flat)
        self.fn, self.flat, self.options = fn, flat, options
        module = fn if isinstance(fn, nn.Module) else None
        self.target = fn.forward if module is not None else fn
        self.places = modules.holders(module) if module is not None else []
        leaves = zip(flat.paths, flat.leaves, strict=True)
        given = [(path, v) for path, v in leaves if not isinstance(v, Tensor)]
        roots = [("" if module is not None else name, fn), *given]
        self.reach = Reach(roots, skip=[p.table for p in self.places])
        _refuse_scripts(self.reach.everything())
        self.originals: dict[int, Tensor] = {}  # by the id of what the trace sees instead
        self.kept: list[Kept] = []
        self.has_run = False
        self.sized = False  # are sizes symbols?
        self.changed: list[Callable[[Any], None] | Given] = []

    def run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], symbols: Symbols | None, undo: Undo
    ) -> Guarded:
        self._refuse_reached()
        self._refuse_attributes()
        refuse_shared(args, kwargs, self.reach.everything())
        state = [(p.slot, p.get()) for p in self.places]
        call = make_call(self._observed, self.flat, state, self._around)
        call.returns = functools.partial(return_text, self.changed, self.kept)
        found = (*self.reach.everything(), *self.flat.leaves, torch.default_generator)
        call.generators = [v for v in found if isinstance(v, torch.Generator)]
        if symbols is not None:
            self._refuse_types()
            call.symbols = symbols
        self.sized = symbols is not None
        options = replace(self.options, dynamic=False)  # symbols are made here, or there are none
        call.watched = True
        try:
            entry = pipeline.run(call, options)
        except AheadgradError:
            take_changes(self.reach, self.originals)
            raise
        except Exception:
            take_traced(self.reach, self.originals)
            raise
        take_changes(self.reach, self.originals)  # what a backward has left while it was recorded
        rehearse(entry.captured)
        kind = undo.changed_argument()
        if kind is not None:
            raise FallbackError(f"the function changes a {kind} that it was given")
        return self._guarded(entry, args, kwargs)

    def _refuse_types(self) -> None:
        codes = (fact.value for fact in self.reach.facts if fact.how == ".__code__")
        if any(map(compares_types, codes)):
            raise NeedsNumbers("the type of a number is compared, which nobody could notice")

    def _refuse_reached(self) -> None:
        """The recording sees something else in an argument's place, and itself in all others.

        The state of a module that is given to it again (`functional_call`) takes its own place.
        """
        swapped = {id(p.get()) for p in self.places}
        tables = {id(table) for m in self.reach.modules for table in (m._parameters, m._buffers)}
        for path, leaf in zip(self.flat.paths, self.flat.leaves, strict=True):
            if not isinstance(leaf, Tensor) or id(leaf) in swapped:
                continue
            found = self.reach.find(leaf)
            if found is not None and id(found.holder) not in tables:
                raise FallbackError(f"{path} is also reached from outside the arguments")

    def _refuse_attributes(self) -> None:
        """While it is recorded a function sees other tensors than it was given, without their attributes."""
        given = [*zip(self.flat.paths, self.flat.leaves, strict=True)]
        given += [(p.slot.describe(), p.get()) for p in self.places]
        for path, value in given:
            if type(value) in (Tensor, nn.Parameter) and not self.reach.names.isdisjoint(vars(value)):
                name = min(self.reach.names.intersection(vars(value)))
                raise FallbackError(f"{path} has an attribute {name} of its own, which the function may read")

    def _guarded(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Guarded:
        values = ValueWriter(self.flat, args, kwargs, ordered=takes_any_keyword(self.target))
        guard = GuardWriter(values, entry, self.places, self.reach, leaves=bool(self.changed)).write()
        entry.captured.release()
        run = guard.call
        if self.kept or any(isinstance(put, Given) for put in self.changed):
            run = functools.partial(leave, run)
        return Guarded(guard.check, run, guard.why, entry.run, entry, guard.source + "\n\n" + entry.source)

    def _around(self, see: Callable[[Any], Any]) -> Any:
        for place in self.places:
            self.originals[id(see(place.get()))] = place.get()
        return modules.swapped(self.places, see) if self.places else nullcontext()

    def _observed(self, /, *args: Any, **kwargs: Any) -> Any:
        """The function, with what it has left behind as further results."""
        self.has_run = True
        before = containers((args, kwargs))
        result = self.fn(*args, **kwargs)
        reached = self.reach.everything()
        check_result(result, [*reached, *self.flat.leaves])
        self.kept[:] = kept_parts(result, (args, kwargs), reached)
        if self.sized:
            check_state(self.reach)
        new: list[tuple[Any, Any]]
        new = [(p.put, v) for p, v in modules.rebound(self.places) if id(v) not in self.originals]
        new += take_changes(self.reach, self.originals)
        new += changed_containers(before)
        self.changed[:] = [put for put, _ in new]  # arguments are left as they are until the end
        values = [v for _, v in new]
        if self.sized:
            check_numbers((result, values))
        return result, values


def _refuse_scripts(parts: Iterable[Any]) -> None:
    """TorchScript runs out of Python's sight."""
    if any(isinstance(part, torch.jit.ScriptModule | torch.jit.ScriptFunction) for part in parts):
        raise FallbackError("TorchScript cannot be recorded")


def _refuse_iterators(flat: Flat) -> None:
    """What an iterator gives next is nothing that a call could be checked for."""
    for path, value in zip(flat.paths, flat.leaves, strict=True):
        if hasattr(type(value), "__next__"):
            raise FallbackError(f"argument {path} is an iterator, which changes when it is used")
