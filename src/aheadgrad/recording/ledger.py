"""The ledger of a recording: a line for each traced tensor that something happened to, and for each memory.

A trace has the elements of tensors and a history for each of them. Eager has more, and what is not in the
trace stands here: where a view was taken from, what a tensor looks like, what it stands for by now, and what
was done to it that decides on what may be done next.

    x.t_()          the tensor stays as it is; a proper view of it is meant by `x` from now on (`current`)
    x[0] = 1        a recorded write makes a fresh tensor; `geometry` is what x looks like all the same
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aheadgrad.errors import FallbackError
from aheadgrad.facts.facts import Geometry, Reshape, Step
from aheadgrad.recording.entrances import Entrance, Member
from aheadgrad.recording.geometry import geometry_of, restore
from aheadgrad.recording.records import tensors_among
from aheadgrad.torchlayer import functional
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.autograd import base_of, is_view, version


class ViewCall(NamedTuple):
    """How a view of a tensor subclass was made."""

    source: Tensor
    step: Step
    source_geometry: Geometry


@dataclass(frozen=True, eq=False)
class InPlace:
    """A change of shape in place of a tensor subclass, which is made again as it is."""

    of: Tensor
    call: Reshape
    version: int  # of the tensor afterwards

    @property
    def tracked(self) -> bool:
        return self.call.with_grad and self.of.requires_grad and not self.of.is_leaf  # (made one since)


@dataclass(eq=False, slots=True)
class Line:
    """What is known of one traced tensor."""

    tensor: Tensor
    current: Tensor  # what is meant by it: itself or, once it changed its shape in place, a view
    given: Entrance | Member | None = None  # the input that it is
    source: Tensor | None = None  # what it is a view of
    alias_of: Tensor | None = None  # what it was taken from, if it is no view (`x.data`)
    with_grad: bool = True  # was that view taken in grad mode?
    base_required_grad: bool = True  # did its base require grad then?
    viewed: bool = False  # are there views of it?
    geometry: Geometry | None = None  # what it looks like in eager, where that differs
    result_geometry: Geometry | None = None  # ... when it was handed out
    tracked: bool = False  # did autograd see how it changed its shape?
    stale: bool = False  # a view of a base that changed its shape under no_grad
    cut: bool = False  # an input that was cut off from its history
    made_leaf: bool = False  # requires_grad_ was called on it
    moved: bool = False  # set_ was called on it
    resized: bool = False  # resize_ or as_strided_ changed the number of its elements
    reshaped_in: bool | None = None  # the grad mode in which it changed its shape
    tainted: bool = False  # a base whose history is in doubt
    view: ViewCall | None = None  # of a tensor subclass
    reshapes: list[InPlace] = field(default_factory=list)  # of a tensor subclass


@dataclass(eq=False, slots=True)
class Memory:
    """What is known of one storage."""

    tensors: list[Tensor] = field(default_factory=list)  # those that may have to get their look back
    writes: int = 0
    latest: Tensor | None = None  # written to in sight of autograd, the last time
    beyond: bool = False  # more of an input's memory is seen than the input
    parted: bool = False  # of a leaf that stopped requiring grad, and has views
    leaf_views: bool = False  # of a view that requires_grad_ was called on
    left: bool = False  # by an input that has other memory now (set_), and has views here


Written = tuple[Tensor, Geometry, list[tuple[Tensor, Geometry]]]


class Ledger:
    def __init__(self) -> None:
        self._lines: dict[int, Line] = {}
        self._memory: dict[Any, Memory] = {}
        self.disguised: list[Line] = []  # tensors that others stand for
        self.unsettled = False  # has any tensor lost its look?
        self.has_stale = False
        self.has_reshapes = False  # did a tensor subclass change its shape in place?
        self.doubted = False  # was one of them used when its history was in doubt?

    def of(self, t: Tensor) -> Line:
        found = self._lines.get(id(t))
        if found is None:
            found = self._lines[id(t)] = Line(t, t)
        return found

    def find(self, t: Any) -> Line | None:
        return self._lines.get(id(t))

    def memory(self, t: Tensor) -> Memory:
        return self.memory_known_by(functional.storage_key(t))

    def memory_known_by(self, key: Any) -> Memory:
        return self._memory.setdefault(key, Memory())

    # -- inputs

    def given(self, t: Any) -> Entrance | Member | None:
        """The input that a traced tensor is."""
        found = self._lines.get(id(t))
        return None if found is None else found.given

    def admit(self, given: Entrance | Member) -> None:
        self.of(given.seen).given = given

    def _all_given(self) -> Iterator[Entrance | Member]:
        return (line.given for line in self._lines.values() if line.given is not None)

    # -- what is meant by a tensor

    def current(self, t: Any) -> Any:
        """What is meant by a tensor now."""
        found = self._lines.get(id(t)) if self.disguised else None
        return t if found is None else found.current

    def all_current(self, values: Any) -> Any:
        return pytree.tree_map(self.current, values, is_leaf=pytree.is_size)

    def originals(self, out: Any) -> Any:
        """What the user's code knows results as: a function that returns an argument returns the original."""
        known = {id(line.current): line.tensor for line in self.disguised}
        return pytree.tree_map(lambda t: known.get(id(t), t), out, is_leaf=pytree.is_size)

    def disguise(self, t: Tensor, as_this: Tensor, *, tracked: bool) -> None:
        line = self.of(t)
        if line.current is t:
            self.disguised.append(line)
        line.current, line.tracked = as_this, line.tracked or tracked
        self.know(as_this)

    @contextmanager
    def undisguised(self) -> Iterator[None]:
        """Tensors mean themselves: for our own calls on them."""
        worn = [(line, line.current) for line in self.disguised]
        self._take_off()
        try:
            yield
        finally:
            self._take_off()
            for line, current in worn:
                line.current = current
                self.disguised.append(line)

    def _take_off(self) -> None:
        for line in self.disguised:
            line.current = line.tensor
        self.disguised = []

    # -- views

    def note(self, out: Any, args: tuple[Any, ...]) -> None:
        """Remembers which tensors have views, and where views come from; and other aliases (`x.data`)."""
        given = args[0] if args else None
        for t in tensors_among((out,)):
            if is_view(t):
                self._note_view(t, given)
            elif t is not given and isinstance(given, Tensor) and _in_one_memory(t, given):
                if self.find(t) is None:
                    self.know(given)
                    self.of(t).alias_of = given
                self.know(t)

    def _note_view(self, view: Tensor, source: Any) -> None:
        line, base = self.of(view), base_of(view)
        if base is not None and not self.of(base).viewed:
            self.of(base).viewed = True
            self.know(base)
        self.know(view)
        made_here = line.source is None and line.given is None  # else it was there before (`out=`)
        if made_here and isinstance(source, Tensor) and source is not view:
            line.source, line.with_grad = source, torch.is_grad_enabled()
            line.base_required_grad = base is not None and base.requires_grad

    def views(self) -> Iterator[Line]:
        return (line for line in self._lines.values() if line.source is not None)

    def has_views(self, t: Tensor) -> bool:
        now, given = self.current(t), self.given(t)
        return any(line.source is t or line.source is now for line in self.views()) or (
            given is not None and any(base_of(g.real) is given.real for g in self._all_given())
        )

    def check_use(self, t: Tensor) -> None:
        """Eager makes the history of a stale view again, from the new shape; the trace has the old one."""
        line = self.find(t) if self.has_stale and torch.is_grad_enabled() else None
        while line is not None and line.tensor.requires_grad:
            if line.stale:
                raise FallbackError(
                    "a tensor with a history changes its shape under no_grad, and a view from before is used"
                )
            line = self.find(line.source)

    # -- what tensors look like

    def know(self, t: Tensor) -> None:
        """A tensor that may have to get its look back when another one in its storage is written."""
        self.of(t)
        known = self.memory(t).tensors
        if not any(t is other for other in known):
            known.append(t)

    def before_write(self, t: Tensor) -> Written:
        """A tensor and the others in its storage, as they look now."""
        others = [(o, self.geometry_in_eager(o)) for o in self.memory(t).tensors if o is not t]
        return t, geometry_of(t), others

    def written(self, t: Tensor, before: Geometry, siblings: list[tuple[Tensor, Geometry]]) -> None:
        memory = self.memory(t)
        memory.writes += 1
        memory.latest = t if t.requires_grad and torch.is_grad_enabled() else None
        self.unsettled = True
        for other, look in siblings:
            line = self.of(other)
            line.geometry = line.geometry or look
        functional.sync(t)
        now = geometry_of(t).typical
        if now != before.typical and now.size == before.typical.size:
            self.of(t).geometry = before

    def geometry_in_eager(self, t: Tensor) -> Geometry:
        """What a tensor looks like in eager, whatever the recorded ops made of it."""
        found = self._lines.get(id(t))
        return geometry_of(t) if found is None or found.geometry is None else found.geometry

    def final_geometry(self, t: Tensor) -> Geometry:
        """As above; of a result, when it was handed out."""
        found = self._lines.get(id(t))
        handed_out = None if found is None else found.result_geometry
        return self.geometry_in_eager(t) if handed_out is None else handed_out

    def settle(self, values: Any) -> None:
        """Gives back their look to those tensors that have lost it and are about to be used."""
        for value in tensors_among((values,)) if self.unsettled else ():
            base = base_of(value)
            for t in (base, value):  # the base first, as the view is taken from it
                line = self.find(t)
                if line is not None and line.geometry is not None:
                    restore(line.tensor, line.geometry)
                    if geometry_of(line.tensor).typical == line.geometry.typical:
                        line.geometry = None

    # -- tensor subclasses that change their shapes

    def reshapes(self, t: Tensor) -> list[InPlace]:
        found = self._lines.get(id(t))
        return [] if found is None else found.reshapes

    def in_doubt(self, t: Tensor) -> bool:
        """Is this a subclass that changed its shape, or a view of one, whose history eager makes anew?"""
        base = self.find(base_of(t) if is_view(t) else t)
        if base is not None and base.tainted:
            return True
        line = self.find(t)
        while line is not None:
            if line.reshapes and _written_since(line):
                return True
            line = None if line.view is None else self.find(line.view.source)
        return False

    def note_doubts(self, tensors: list[Tensor]) -> None:
        """Before a call with grad mode on."""
        self.doubted = self.doubted or any(map(self.in_doubt, tensors))

    def note_writes(self, tensors: list[Tensor]) -> None:
        """A write just now put some in doubt: whoever shares their history is so from now on."""
        for t in filter(self.in_doubt, tensors):
            base = base_of(t)
            if base is None or self.given(t) is not None or self.given(base) is not None:
                self.doubted = True
            else:
                self.of(base).tainted = True


def _written_since(line: Line) -> bool:
    """Is this a view that changed its shape in sight of autograd, and was written to since? Eager makes its
    history again then, from views that know nothing of the new shape."""
    if not (is_view(line.tensor) or (line.given is not None and is_view(line.given.real))):
        return False
    ends = [*(done.version - 1 for done in line.reshapes[1:]), version(line.tensor)]
    return any(done.tracked and done.version != end for done, end in zip(line.reshapes, ends, strict=True))


def _in_one_memory(a: Tensor, b: Tensor) -> bool:
    wrapped = functional.is_wrapped(a) and functional.is_wrapped(b)
    return wrapped and functional.storage_key(a) == functional.storage_key(b)
