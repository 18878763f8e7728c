"""What a function holds: the tensors that it reaches without being given them, each under a name.

Modules have parameters, buffers and plain attributes; optimizers have a state for each parameter; tensors may
have a `.grad`, hooks and attributes. While the function is recorded, traced tensors are in their places, with
the same hooks and attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from aheadgrad.errors import CaptureError, FallbackError
from aheadgrad.export.finding import Finding, attributes, called, reached
from aheadgrad.export.optimizers import HeldOptimizer
from aheadgrad.frontends import state
from aheadgrad.program.slots import Buffer, ClosedOver, Parameter, Slot
from aheadgrad.recording.compared_values import freeze
from aheadgrad.recording.containers import Changing, insides
from aheadgrad.torchlayer.hooks import hooks_on, share_hooks
from aheadgrad.torchlayer.subclasses import is_foreign

See = Callable[[Any], Any]


@dataclass(eq=False)
class HeldTensor:
    """A tensor with all its names; `kind` as in `signature.Held`."""

    tensor: Tensor
    slot: Slot
    kind: str
    names: list[str]

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(eq=False)
class Change:
    """Of what may be there or not: names of what was there, of what is now; what is new, and what is there in
    the place of another tensor."""

    found: frozenset[str]
    there: frozenset[str]
    made: dict[str, Tensor]
    renewed: dict[str, Tensor]


class Passed:
    """In the place of an iterator, of which each call of the function would take another part."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        raise CaptureError(
            f"The function takes the next part of {self._path}, which an export cannot repeat. Pass that "
            "part as an argument."
        )


class Holding:
    """What one function holds.

    Some of it may be there or not: the state of optimizers, and what is in `.grad`, which is in `grads` by
    the id of its owner.
    """

    def __init__(self, fn: Any) -> None:
        finding = Finding(fn)
        self.state = state.State(called(fn), finding.modules, [])
        self.places = [*self.state.holders, *attributes(self.state.modules), *finding.tensors]
        self.optimizers = [HeldOptimizer(path, optimizer) for path, optimizer in finding.optimizers]
        self.grads: dict[int, Tensor] = {}
        self.owners = self.tensors  # what may have a gradient, hooks and attributes
        self.start()
        self._plain = finding.plain
        self._iterators = [(place, Passed(place.path)) for place in finding.iterators]
        self.stand_ins = {id(p): place.get() for place, p in self._iterators}  # what they stand for, by id
        self._keyed, self._tables = finding.keyed, finding.tables
        self._first = [(place, place.get()) for place in self._plain]
        self._given: list[tuple[state.Place, Any]] = []  # tensors, as the function finds them
        self._read: list[tuple[state.Place, Any]] = []  # plain values, in the same way
        self._before: dict[str, Tensor] = {}  # what may be there or not, as the function finds it
        self._new: dict[tuple[int, Any], tuple[Any, Any]] = {}  # attributes that the first call makes
        self._own: dict[int, frozenset[str]] = {}  # the attributes of traced tensors that are not the user's
        self.replaced: dict[int, str] = {}  # by id of a tensor: the place that it lost to another for good

    def start(self) -> None:
        """What may be there is there as it was found."""
        grads = {id(h.tensor): grad_of(h.tensor) for h in self.owners}
        self.grads = {key: grad for key, grad in grads.items() if grad is not None}
        for one in self.optimizers:
            one.start()

    @property
    def tensors(self) -> list[HeldTensor]:
        """All of them, each once."""
        found: dict[int, HeldTensor] = {}

        def note(t: Tensor, slot: Slot, kind: str, name: str) -> None:
            found.setdefault(id(t), HeldTensor(t, slot, kind, [])).names.append(name)

        for place in self.places:
            kind = {Parameter: "parameter", Buffer: "buffer"}.get(type(place.slot), "tensor")
            kind = "parameter" if isinstance(place.get(), nn.Parameter) else kind
            note(place.get(), place.slot, kind, place.path)
        for one in self.optimizers:
            for k, p in enumerate(one.parameters):
                if id(p) not in found:
                    name = f"{one.path}.params[{k}]"
                    note(p, ClosedOver(name), "tensor", name)
            for name, t in list(one.tensors({i: h.name for i, h in found.items()})):
                note(t, ClosedOver(name), "state", name)
        for key, t in self.grads.items():
            name = f"{found[key].name}.grad"
            note(t, ClosedOver(name), "gradient", name)
        return list(found.values())

    @contextmanager
    def swapped(self, see: See) -> Iterator[None]:
        """The function's own objects, with their tensors replaced by what the trace sees."""
        with state.swapped(self.places, see), ExitStack() as stack:
            self._given = [(place, place.get()) for place in self.places]
            self._read = [(place, place.get()) for place in self._plain]
            for place, passed in self._iterators:
                stack.callback(place.put, place.get())
                place.put(passed)
            for one in self.optimizers:
                stack.enter_context(one.swapped(see))
            for h in self.owners:
                seen = see(h.tensor)
                share_hooks(h.tensor, seen)
                self._own[id(h.tensor)] = frozenset(vars(seen))
                stack.enter_context(_attributes(h.tensor, seen))
                if id(h.tensor) in self.grads:
                    seen.grad = see(self.grads[id(h.tensor)])
            self._before = self._there(see)
            originals = {id(see(h.tensor)): h.tensor for h in self.owners}
            self._unkey = lambda: _rekey(self._keyed, lambda t: originals.get(id(t), t))
            _rekey(self._keyed, see)
            stack.callback(self._unkey)
            yield

    def settle(self, see: See, *, strict: bool) -> list[tuple[Tensor, Tensor]]:
        """After a run: tensors as the trace sees them, with those that were put in their place
        (`self.b = self.b + 1`). If it is `strict`, nothing else is changed."""
        given, self._given = self._given, []  # what a function leaves behind is looked for, also here
        self._unkey()
        for h in self.owners:
            _take_back(h, see(h.tensor), self._own[id(h.tensor)])
        for place, value in self._read if strict else ():
            now = place.get()
            if isinstance(now, Tensor):
                self.put_back()
                raise leaves_tensor(place.path)
            if now is not value and (type(now) is not type(value) or now != value):
                raise state.changed(place.path)
        self._check_attributes(strict=strict)
        found = [(place, t, place.get()) for place, t in given if place.get() is not t]
        _check_names(given, found)
        self.replaced = {id(t): place.path for place, t, now in found if not _is_update(place, t, now)}
        found = [one for one in found if id(one[1]) not in self.replaced]
        for place, t, _ in found:
            place.put(t)
        return [(t, now) for _, t, now in found]

    def _check_attributes(self, *, strict: bool) -> None:
        """New ones are no tensors; those that the first call makes (`cached_property`) stay as they are."""
        for path, table, known in self._tables:
            for key in [key for key in table if key not in known]:
                if isinstance(table[key], Tensor):
                    table.pop(key)
                    raise leaves_tensor(f"{path}.{key}")
                made = table, freeze(table[key])
                known_as = self._new.get((id(table), key), (None, None))
                self._new[id(table), key] = made
                if strict and known_as[1] != made[1]:
                    raise state.changed(f"{path}.{key}")

    @contextmanager
    def watching_hooks(self) -> Iterator[None]:
        """Inside, hooks of tensors may run, but change nothing besides tensors."""
        hooks = [(h.name, hook) for h in self.owners for hook in hooks_on(h.tensor)]
        before = [freeze(reached(hook)) for _, hook in hooks]
        containers = [Changing(c) for c in insides([reached(hook) for _, hook in hooks])]
        try:
            yield
        except FallbackError as error:
            if not hooks or error.once:
                raise
            raise CaptureError(
                f"This call cannot be exported with the hooks of {', '.join(name for name, _ in hooks)}: "
                f"{error.reason}. A hook that writes to tensors needs a function that calls backward()."
            ) from error
        for (name, hook), was in zip(hooks, before, strict=True):
            if freeze(reached(hook)) != was:
                for container in containers:
                    container.put_back()
                raise CaptureError(
                    f"A hook of {name} changes an object, which an export cannot repeat. Let it return the "
                    "new gradient, or write to a tensor in a function that calls backward()."
                )

    # ---- what may be there or not --------------------------------------------------------------

    def _there(self, see: See) -> dict[str, Tensor]:
        """Inside `swapped`: what is there now, as the trace sees it, by name."""
        names = {id(h.tensor): h.name for h in self.owners}
        found = {f"{h.name}.grad": grad_of(see(h.tensor)) for h in self.owners}
        for one in self.optimizers:
            found.update(one.left(see, names))
        return {name: t for name, t in found.items() if t is not None}

    def change(self, see: See, kept: Collection[str]) -> Change:
        """Inside `swapped`, after a run; of gradients, those that are `kept`."""
        before, self._before = self._before, {}
        there = self._there(see)
        for one in self.optimizers:
            one.check()
        for h in self.tensors:  # known by another name, it is there in any case
            for name in h.names[1:]:
                if name in before and there.pop(name, None) is not before.pop(name):
                    raise _puts(name, h.name)
        grads = {f"{h.name}.grad" for h in self.owners}
        matters = {name: t for name, t in there.items() if name in kept or name not in grads}
        matters = {name: t.detach() if t.requires_grad else t for name, t in matters.items()}
        made = {name: t for name, t in matters.items() if name not in before}
        renewed = {n: t for n, t in matters.items() if n in before and there[n] is not before[n]}
        for name, t in renewed.items():
            if not _is_like(before[name], t):
                raise _puts(name, name)
        return Change(frozenset(before), frozenset(there), made, renewed)

    def stand_in(self, there: Mapping[str, Tensor]) -> None:
        """From now on this is there."""
        names = {id(h.tensor): h.name for h in self.owners}
        self.grads = {key: there[f"{name}.grad"] for key, name in names.items() if f"{name}.grad" in there}
        for one in self.optimizers:
            one.stand_in(names, there)

    def put_back(self) -> None:
        """Plain values as they were before anything was recorded."""
        for place, value in self._first:
            place.put(value)
        for (_, key), (table, _) in self._new.items():
            if isinstance(table, dict):
                table.pop(key, None)
        self._new.clear()


def grad_of(t: Tensor) -> Tensor | None:
    try:
        return t.grad if t.requires_grad and t.is_leaf else None
    except RuntimeError:  # a view with a history that autograd refuses to look at by now
        return None


def _rekey(tables: list[dict[Any, Any]], see: See) -> None:
    """Dictionaries by tensor: what `see` gives for a key is the key."""
    for table in tables:
        items = [(see(key), value) for key, value in table.items()]
        table.clear()
        table.update(items)


@contextmanager
def _attributes(t: Tensor, seen: Tensor) -> Iterator[None]:
    """Inside, a traced tensor has the attributes of the one that it stands for."""
    own = dict(vars(seen))
    if not is_foreign(t):
        vars(seen).update(vars(t))
    try:
        yield
    finally:
        vars(seen).clear()
        vars(seen).update(own)


def _take_back(held: HeldTensor, seen: Tensor, own: frozenset[str]) -> None:
    """After a run: attributes are where they are looked for; hooks have to be as they were."""
    if len(hooks_on(seen)) != len(hooks_on(held.tensor)):
        raise CaptureError(
            f"The function leaves a hook on {held.name}, which is there at the next call, too. Register it "
            "before you export, or remove it (handle.remove())."
        )
    attributes = vars(held.tensor)
    for key, value in vars(seen).items():
        if key in attributes and not is_foreign(held.tensor):
            attributes[key] = value
        elif key not in own:
            raise CaptureError(
                f"The function makes an attribute {key!r} of {held.name}, and may find it at the next call. "
                "Set it before you export."
            )


def _check_names(given: list[tuple[state.Place, Any]], found: list[tuple[state.Place, Any, Any]]) -> None:
    """A tensor that is in two places has another in both, or in none."""
    now = {id(place): value for place, _, value in found}
    for place, t, value in found:
        for other, same in given:
            if same is t and now.get(id(other)) is not value:
                raise _puts(place.path, other.path)


def leaves_tensor(path: str) -> CaptureError:
    return CaptureError(
        f"The function leaves a tensor in {path}, where there was none, and may find it at the next call. "
        "Return it, or put one of that shape there before you export."
    )


def _puts(name: str, other: str) -> CaptureError:
    what = "a tensor of another shape or type" if name == other else f"something else than {other}"
    return CaptureError(
        f"The function puts {what} in the place of {name}, which an export cannot repeat. Write to the "
        "tensor that is there (copy_)."
    )


def _is_update(place: state.Place, t: Tensor, now: Any) -> bool:
    """Is it a tensor that can stand in the other's memory? One with a history leads on to other calls."""
    return _is_like(t, now) and not now.requires_grad and not isinstance(place.slot, Parameter)


def _is_like(t: Tensor, now: Any) -> bool:
    return isinstance(now, Tensor) and (now.shape, now.dtype, now.device) == (t.shape, t.dtype, t.device)
