"""Making one entry by tracing: the function is recorded, compiled, and given a check.

Around the run the state that the contract covers is compared: a function that changes it cannot be repeated
by a program of tensor operations, and is refused. What the run changed is put back: eager is about to run.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from aheadgrad import pipeline
from aheadgrad.errors import FallbackError
from aheadgrad.frontends.function import Flat, make_call
from aheadgrad.frontends.guards import ArgumentWriter, Guarded, GuardWriter
from aheadgrad.frontends.plain import Changing, Same, freeze, frozen, insides
from aheadgrad.frontends.results import check_result
from aheadgrad.frontends.state import State, changed, swapped
from aheadgrad.options import Options
from aheadgrad.runtime.structure import return_text
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.dynamo import Symbols


class Making:
    """One recording of a call."""

    def __init__(self, fn: Any, name: str, flat: Flat, options: Options) -> None:
        self.fn, self.name, self.flat, self.options = fn, name, flat, options
        others = [(p, v) for p, v in zip(flat.paths, flat.leaves, strict=True) if not isinstance(v, Tensor)]
        self.state = State(fn, others)
        self._refuse(others)
        self.look = self.state.look(in_words=True)
        self.has_run = False
        self._given = [(p, Changing(v)) for p, value in others for v in insides(value)]
        self._numbers = _random_states()
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

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], symbols: Symbols | None) -> Guarded:
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
        options = replace(self.options, dynamic=False)  # symbols are made here, or there are none
        entry = pipeline.run(call, options)
        arguments = ArgumentWriter(self.flat, numbers)
        made = GuardWriter(arguments, entry, self.state, self.look).write(self.name, args, kwargs)
        entry.captured.release()
        return made

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
            if value.has_changed():
                raise changed(path)
        if freeze(_random_states()) != freeze(self._numbers):
            raise FallbackError("the function draws random numbers of Python or numpy")
        known = [*self._objects(), *self.state.containers, *self.flat.leaves]
        check_result(result, (args, kwargs), known)
        self.state.put_back()  # what stands for the same tensors as before may have been bound anew
        return result


def _random_states() -> tuple[Any, Any]:
    """Of Python's random numbers, and of numpy's where those are in use."""
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    return random.getstate(), None if numpy is None else numpy.get_state()
