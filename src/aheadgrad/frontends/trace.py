"""The front end that records one run of the function; the contract is in docs/tracing.md.

Each entry states what it assumes; a call takes the first entry whose assumptions hold, or makes a new one.
What cannot be recorded runs uncompiled, with its reason.
"""

from __future__ import annotations

import copy
import random
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aheadgrad import errors, pipeline
from aheadgrad.cache.lookup import Lookup
from aheadgrad.cache.subjects import call_of_function
from aheadgrad.errors import MISTAKES, AheadgradError, FallbackError, reason_of, without_frames
from aheadgrad.frontends import misses
from aheadgrad.frontends.compiled import FULL, MISS, CompiledFunction, is_transformed, runs_the_original
from aheadgrad.frontends.function import Flat, check_result, flatten, make_call, parameter_names
from aheadgrad.frontends.guards import Guarded, GuardWriter
from aheadgrad.frontends.state import State, Surroundings, changed, swapped
from aheadgrad.frontends.symbolic_sizes import Shapes
from aheadgrad.options import Options
from aheadgrad.recording.compared_values import Same, freeze, frozen
from aheadgrad.recording.containers import Changing, insides
from aheadgrad.recording.forward import Call
from aheadgrad.runtime.structure import return_text
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.autocast import autocast_state
from aheadgrad.torchlayer.autograd import is_view
from aheadgrad.torchlayer.collection import no_collection
from aheadgrad.torchlayer.dispatch import default_devices
from aheadgrad.torchlayer.dynamo import Symbols
from aheadgrad.torchlayer.fake import FakeTensor
from aheadgrad.torchlayer.functional import is_wrapped
from aheadgrad.torchlayer.lock import RECORDING

_WATCHED = "a TorchFunctionMode around the call wants to see each function"
_TOO_DEEP = "the arguments are nested too deeply to be recorded"
_CHOOSE = (str, bool, type(None), torch.dtype, torch.device)  # values that code chooses its way by


class TracedFunction(CompiledFunction):
    """A function recorded by running it."""

    def __init__(self, fn: Callable[..., Any], options: Options) -> None:
        super().__init__(fn, options)
        self._shapes = Shapes(options.dynamic, fn)
        self._last_looks: list[Surroundings] = []
        self._full = False
        self._refused: dict[Any, Exception] = {}  # by what calls look like from afar
        self._changed_once: set[Any] = set()  # looks of calls that changed something, and may be done with it

    def miss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that no entry fits: compiled now, or run as it is."""
        try:
            leaves = pytree.tree_leaves((args, kwargs))
        except RecursionError:
            return self._uncompiled(FallbackError(_TOO_DEEP), args, kwargs)
        tensors = [v for v in leaves if isinstance(v, Tensor)]
        if runs_the_original() or any(isinstance(t, FakeTensor) or is_wrapped(t) for t in tensors):
            return self._fn(*args, **kwargs)
        if is_transformed():
            return self._transformed(args, kwargs)
        if default_devices() is None:
            return self._uncompiled(FallbackError(_WATCHED), args, kwargs)
        if self._full:
            if misses.someone_listens():
                misses.explain(self.name, self.entries, args, kwargs)
            return self._uncompiled(FallbackError(FULL), args, kwargs)
        look = _from_afar(args, kwargs, leaves, self._fn)
        refused = self._refused.get(look)
        if refused is None and len(self._refused) >= self.options.max_entries:
            refused = FallbackError("calls of other kinds were refused too often")
        if refused is None:
            with RECORDING:  # another recording may have the module's parameters replaced for the moment
                for call in self.calls:  # another thread may have compiled what this one needs
                    out = call(args, kwargs)
                    if out is not MISS:
                        return out
                with no_collection() if self.options.cache else nullcontext():
                    made = self._make(args, kwargs, look)
                if isinstance(made, Guarded):
                    return made.call(args, kwargs)
                refused = made
        return self._uncompiled(refused, args, kwargs)

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any], look: Any) -> Guarded | Exception:
        """A new entry, with fewer symbols if that fails; or why there is none."""
        found = misses.explain(self.name, self.entries, args, kwargs)
        if len(self.entries) >= self.options.max_entries:
            self._full = True
            self.misses += found
            return FallbackError(FULL)
        flat = flatten(args, kwargs, parameter_names(self._fn))
        for symbols in self._shapes.choices(flat):
            try:
                made = self._record(flat, args, kwargs, symbols)
                break
            except Exception as error:
                if symbols is None:
                    self._remember(error, look)
                    if isinstance(error, RecursionError):
                        return FallbackError(_TOO_DEEP)
                    if not self._raises(error):
                        return without_frames(error)
                    if isinstance(error, AheadgradError):
                        error.__traceback__ = None
                    raise
                misses.LOG.debug("%s is compiled with fewer symbols", self.name, exc_info=True)
        self._shapes.note(flat)
        self.entries.append(made)
        self.calls.append(made.call)
        self.misses += found
        return made

    def _record(self, flat: Flat, args: Any, kwargs: Any, symbols: Symbols | None) -> Guarded:
        making = Making(self._fn, self.name, flat, self.options, self._last_looks)
        try:
            made = making.run(args, kwargs, symbols)
            if made.not_kept:
                self.note_miss(misses.NotKept.because(self.name, made.not_kept))
            if made.check(args, kwargs) is MISS:
                raise FallbackError("a property of the arguments cannot be checked")
            making.settle()
            return made
        except Exception as error:
            making.put_back()
            if isinstance(error, AheadgradError):
                error.has_run = making.has_run
            raise

    def _remember(self, error: Exception, look: Any) -> None:
        """Nobody tries again at each call; but what changes something once may be done with that."""
        if isinstance(error, AheadgradError) and error.has_run:
            if error.once and look not in self._changed_once:
                self._changed_once.add(look)
            else:
                self._refused[look] = copy.copy(error)  # without the frames, which hold tensors

    def _raises(self, error: Exception) -> bool:
        return self.options.fallback == "error" or isinstance(error, MISTAKES)

    def _uncompiled(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs what is not compiled in eager, which shows whether the function itself is at fault."""
        if self._raises(error):
            raise copy.copy(error)  # this one is remembered, and held by frames
        ours = isinstance(error, AheadgradError)
        if ours:
            self.note_uncompiled(_why(error))
        out = self._fn(*args, **kwargs)
        if not ours:
            self.note_uncompiled(f"recording it raises {reason_of(error)}")
        return out


def _why(error: Exception) -> str:
    """Why a call runs uncompiled, with the line of the user's if one is known."""
    reason = reason_of(error)
    if isinstance(error, errors.DataDependentError):
        reason = 'a tensor\'s value decides what to do; frontend="dynamo" compiles around such a line'
    line = re.search(r"^  at (.*)$", str(error), re.MULTILINE)
    return reason if line is None else f"{reason} ({line[1]})"


def _from_afar(args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any], fn: Any) -> Any:
    """What a call looks like from afar: sizes and numbers, which change from call to call, do not count."""

    def look(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return type(value), value if type(value) in _CHOOSE else None
        history = value.requires_grad, value.is_leaf, is_view(value)
        return type(value), value.dtype, value.device, value.dim(), history

    outside = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), repr(autocast_state())
    kinds = tuple(map(type, args)), tuple((key, type(v)) for key, v in kwargs.items())
    return outside, getattr(fn, "training", None), kinds, tuple(map(look, leaves))


class Making:
    """One recording of a call, which is compiled and given a check.

    The state that the contract covers is compared before and after: a function that changes it cannot be
    repeated by a program of tensor operations, and is refused. What the run changed is put back for eager.
    """

    def __init__(self, fn: Any, name: str, flat: Flat, options: Options, last_looks: list[Any]) -> None:
        self.fn, self.name, self.flat, self.options = fn, name, flat, options
        others = [(p, v) for p, v in zip(flat.paths, flat.leaves, strict=True) if not isinstance(v, Tensor)]
        self.state = State(fn, others, last_looks)
        self._refuse(others)
        self.look = self.state.look(in_words=True)
        self.has_run = False
        self._given = [(p, Changing(v)) for p, value in others for v in insides(value)]
        self._numbers = random_states()
        self.originals: dict[int, Tensor] = {}  # by id: what traced tensors stand for

    def _refuse(self, others: list[tuple[str, Any]]) -> None:
        """What can be seen before the function runs."""
        given = {id(v): p for p, v in zip(self.flat.paths, self.flat.leaves, strict=True)}
        named = [(p.path, p.get()) for p in self.state.names]
        for path, value in (*((f"argument {p}", v) for p, v in others), *named):
            if hasattr(type(value), "__next__"):
                raise FallbackError(f"{path} is an iterator, which changes when it is used")
        for path, value in others:
            frozen(value, path)
        for path, value in named:
            if isinstance(value, Tensor) and id(value) in given:
                raise FallbackError(f"argument {given[id(value)]} is the tensor {path}, which is closed over")

    def call(self, symbols: Symbols | None = None) -> Call:
        """What is to be recorded."""
        inputs = [(h.slot, h.get()) for h in self.state.holders]
        numbers = {} if symbols is None else symbols.numbers
        leaves = [numbers.get(i, leaf) for i, leaf in enumerate(self.flat.leaves)]
        call = make_call(self._observed, replace(self.flat, leaves=leaves), inputs, self._around)
        call.returns = return_text
        found = (*self._objects(), *self.flat.leaves, torch.default_generator)
        call.generators = [v for v in found if isinstance(v, torch.Generator)]
        call.watched = True
        if symbols is not None:
            call.symbols = symbols
        return call

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], symbols: Symbols | None) -> Guarded:
        call, lookup = self.call(symbols), None
        options = replace(self.options, dynamic=False)  # symbols are made here, or there are none
        if options.cache:
            again = partial(_making, self.fn, self.name, replace(self.flat, leaves=[]), self.options)
            lookup = Lookup(call_of_function(self, call, again, pipeline.record), options)
        entry = pipeline.run(call, options, lookup)
        try:
            numbers = {} if symbols is None else symbols.numbers
            writer = GuardWriter(self.flat, numbers, entry, self.state, self.look)
            made = writer.write(self.name, args, kwargs)
            made.not_kept = "" if lookup is None else lookup.reason
            return made
        finally:
            entry.captured.release()

    def settle(self) -> None:
        """The entry is made: what was found on the way may go."""
        self.state.settle()
        self.look.settle()

    def put_back(self) -> None:
        """What can be seen of Python is as it was before the function was recorded."""
        self.state.put_back()
        for _, value in self._given:
            value.put_back()
        random.setstate(self._numbers[0])
        if self._numbers[1] is not None:
            sys.modules["numpy"].random.set_state(self._numbers[1])

    def _objects(self) -> list[Any]:
        """The objects that the state consists of, tensors and plain values apart."""
        return [token.value for _, token in self.look.found if type(token) is Same]

    def _around(self, see: Callable[[Any], Any]) -> Any:
        self.originals = {id(see(h.get())): h.get() for h in self.state.holders}
        return swapped(self.state.holders, see)

    def _observed(self, /, *args: Any, **kwargs: Any) -> Any:
        """The function; afterwards, what it changed in the state and in its arguments."""
        self.has_run = True
        before = pytree.tree_flatten((args, kwargs))
        result = self.fn(*args, **kwargs)
        now = self.state.look(self.originals)
        if now.found != self.look.found:
            raise changed(self.look.differences(now)[0][0])
        for one, other in zip(self.look.tensors, now.tensors, strict=True):
            if one is not other:
                raise changed(self.look.places[id(one)].path)
        self.state.put_back()  # traced tensors in the place of what they stand for: a table of parameters
        after = pytree.tree_flatten((args, kwargs))
        if before[1] != after[1] or any(a is not b for a, b in zip(before[0], after[0], strict=True)):
            raise changed("a list or dictionary that it was given")
        for path, value in self._given:
            if not value.is_same():
                raise changed(path)
        if freeze(random_states()) != freeze(self._numbers):
            raise FallbackError("the function draws random numbers of Python or numpy")
        known = [*self._objects(), *self.state.containers, *self.flat.leaves]
        check_result(result, (args, kwargs), known)
        self.state.put_back()  # what stands for the same tensors as before may have been bound anew
        return result


def _making(fn: Any, name: str, flat: Flat, options: Options, leaves: list[Any]) -> Making:
    return Making(fn, name, replace(flat, leaves=leaves), options, [])


def random_states() -> tuple[Any, Any]:
    """Of Python's random numbers, and of numpy's where those are in use."""
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    return random.getstate(), None if numpy is None else numpy.get_state()
