"""What each output shares memory with, and how to make it again from there.

Outputs are grouped by storage. In each storage one root is chosen as the owner (an input, or an
intermediate that the program returns); the others are made from it at run time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from aheadgrad.errors import FallbackError
from aheadgrad.facts.facts import (
    AliasRoot,
    Constant,
    Fresh,
    FreshRoot,
    FunctionView,
    Geometry,
    InputRoot,
    IsRoot,
    OutputFacts,
    Recipe,
    Root,
    SameAs,
    Step,
    TheInput,
    ViewOf,
)
from aheadgrad.recording.forward import Forward
from aheadgrad.recording.geometry import contiguous_strides, unseen_look
from aheadgrad.recording.ledger import Line
from aheadgrad.recording.recipes import recipe
from aheadgrad.recording.walks import edge_of, walk
from aheadgrad.torchlayer import functional
from aheadgrad.torchlayer.autograd import (
    CreationMeta,
    base_of,
    creation_meta,
    is_leaf_view,
    is_view,
    same_version_counter,
)
from aheadgrad.torchlayer.subclasses import Bundle, parts_of
from aheadgrad.torchlayer.symbols import typical, typical_strides


@dataclass(eq=False)
class Aliases:
    """Output facts with the traced tensors behind them."""

    outputs: list[OutputFacts] = field(default_factory=list)
    roots: list[Root] = field(default_factory=list)
    root_tensors: list[Tensor] = field(default_factory=list)
    bases: list[Tensor] = field(default_factory=list)

    def add_root(self, root: Root, tensor: Tensor) -> int:
        self.roots.append(root)
        self.root_tensors.append(tensor)
        return len(self.roots) - 1

    def find_root(self, tensor: Tensor) -> int | None:
        return next((i for i, t in enumerate(self.root_tensors) if t is tensor), None)

    def add_base(self, tensor: Tensor) -> int:
        self.bases.append(tensor)
        return len(self.bases) - 1


def find_aliases(forward: Forward) -> Aliases:
    session = forward.session
    out = Aliases()
    inputs = {id(e.seen): i for i, e in enumerate(session.entrances)}
    inputs.update({id(m.seen): -1 - k for k, m in enumerate(session.members)})
    first: dict[int, int] = {}
    members: dict[Any, list[int]] = {}
    facts: dict[int, OutputFacts] = {}
    for j, value in enumerate(forward.outputs):
        if not isinstance(value, Tensor):
            facts[j] = Constant(value)
        elif id(value) in inputs:
            facts[j] = TheInput(inputs[id(value)])
        elif id(value) in first:
            facts[j] = SameAs(first[id(value)])
        else:
            first[id(value)] = j
            members.setdefault(functional.storage_key(value), []).append(j)
    owners: dict[Any, int] = {}
    for i, entrance in enumerate(session.entrances):
        owners.setdefault(functional.storage_key(entrance.seen), i)
    if session.veiled:
        check_parts(forward)
    for key, group in members.items():
        _Group(forward, out, group, owners.get(key)).fill(facts)
    out.outputs = [facts[j] for j in range(len(forward.outputs))]
    return out


def check_parts(forward: Forward) -> None:
    """Memory is grouped by whole tensors: a part of a subclass must not be seen in another way too,
    unless it is one of the caller's own parts, which are handed out as they are."""
    whole = [e.seen for e in forward.session.entrances]
    whole += [v for v in forward.outputs if isinstance(v, Tensor)]
    owners: dict[Any, tuple[Any, Tensor]] = {}
    given = forward.session.given_parts()
    for t in whole:
        key = functional.storage_key(t)
        for part in parts_of(t):
            owner, first = owners.setdefault(functional.storage_key(part), (key, part))
            if owner != key and not (first is part and id(part) in given):
                raise FallbackError("an output shares memory with a part of a tensor subclass")


class _Group:
    """The outputs of one storage."""

    def __init__(self, forward: Forward, out: Aliases, members: list[int], owner_input: int | None) -> None:
        self.forward = forward
        self.out = out
        self.members = members
        self.tensors: list[Tensor] = [forward.outputs[j] for j in members]
        self.owner_input = owner_input

    def fill(self, facts: dict[int, OutputFacts]) -> None:
        if self.owner_input is None and len(self.members) == 1:
            only = self._alone(self.tensors[0])
            if only is not None:
                facts[self.members[0]] = only
                return
        owner = self._owner()
        for j, t in zip(self.members, self.tensors, strict=True):
            facts[j] = self._member(j, t, owner)

    def _alone(self, t: Tensor) -> OutputFacts | None:
        """The only output in its storage: a plain output, unless eager would treat it as a view."""
        if not is_view(t):
            leaf = t.requires_grad and t.grad_fn is None
            tracked = t.requires_grad and not leaf
            look, apart = self._look(t), self._is_apart(t)
            return Fresh(tracked, leaf, geometry=look, history_look=unseen_look(t), apart=apart)
        base = base_of(t)
        if _is_function_view(t):
            return FunctionView(t.requires_grad)
        if creation_meta(t) != CreationMeta.DEFAULT and base is not None:
            return None
        if is_leaf_view(t) or (base is not None and base.requires_grad and base.is_leaf):
            return None
        return Fresh(t.requires_grad, is_view=True, geometry=self._look(t), apart=self._is_apart(t))

    def _is_apart(self, t: Tensor) -> bool:
        """Has it another version counter than what its memory was made for?"""
        first, ledger = t, self.forward.session.ledger
        while (line := ledger.find(_root(first))) is not None and line.alias_of is not None:
            first = line.alias_of
        return first is not t and not same_version_counter(first, t)

    def _look(self, t: Tensor) -> Geometry | None:
        ledger = self.forward.session.ledger
        look = ledger.of(t).result_geometry
        held = functional.unwrap(t)
        if look is None or type(held) is Bundle or typical(held.numel()) == 0:
            return None
        size, stride, held_stride = look.typical.size, look.typical.stride, typical_strides(held)
        unusual = 1 in size and stride != contiguous_strides(size)
        if held_stride == stride and not (unusual and ledger.memory(t).writes):
            return None  # kernels choose the strides of dimensions of size one as they like
        only_units = all(n == 1 or a == b for n, a, b in zip(size, held_stride, stride, strict=True))
        return Geometry(look.size, look.stride, held.storage_offset()) if only_units else None

    def _owner(self) -> int:
        """The root from which everything in this storage is made."""
        if self.owner_input is not None:
            return self._input_root(self.owner_input)
        roots = [_root(t) for t in self.tensors]
        chosen = next((r for r in roots if r.requires_grad and r.grad_fn is not None), roots[0])
        if functional.storage_key(chosen) != functional.storage_key(self.tensors[0]):
            raise FallbackError("a view is returned of a tensor that set_ has given other memory since")
        position = next((j for j, t in zip(self.members, self.tensors, strict=True) if t is chosen), None)
        base = None if position is not None else self.out.add_base(chosen)
        tracked = chosen.requires_grad and chosen.grad_fn is not None
        leaf = chosen.requires_grad and not tracked
        root = FreshRoot(position, base, tracked, leaf, self._is_apart(chosen))
        return self.out.add_root(root, chosen)

    def _input_root(self, index: int) -> int:
        seen = self.forward.session.input(index).seen
        known = self.out.find_root(seen)
        return known if known is not None else self.out.add_root(InputRoot(index), seen)

    def _member(self, j: int, t: Tensor, owner: int) -> OutputFacts:
        if is_view(t) and _is_function_view(t):
            return FunctionView(t.requires_grad)
        root = self._root_for(j, t, owner)
        root_tensor = self.out.root_tensors[root]
        if t is root_tensor:
            return IsRoot(root)
        session = self.forward.session
        given = session.entrance_of(root_tensor)
        cut = given is not None and given.required_grad
        if cut and t.requires_grad and not self._as_it_will_be(root_tensor).requires_grad:
            raise FallbackError("a view is returned of an input that is cut off from its history after that")
        session.ledger.check_use(t)
        if _is_view_of_leaf_view(t):
            raise FallbackError("a view is returned of a view that was made a leaf inside")
        made = self._view_recipe(root_tensor, t)
        if made == Recipe():  # looks just like its root, but is another tensor
            made = Recipe((Step(torch.ops.aten.alias.default, ()),))
        meta = creation_meta(t)
        implied = any(step.part is not None or step.without_grad for step in made.steps)
        implied |= meta == CreationMeta.NO_GRAD_MODE
        return ViewOf(
            root,
            made,
            without_grad=meta == CreationMeta.NO_GRAD_MODE and not _mixed(made),
            stale=_is_stale(t),
            creation=None if implied or meta == CreationMeta.DEFAULT else meta,
            leaf=is_leaf_view(t),
        )

    def _view_recipe(self, root: Tensor, t: Tensor) -> Recipe:
        """From the root as it is now; step by step where some views were made under no_grad."""
        session, ledger = self.forward.session, self.forward.session.ledger
        hops: list[Line] = []
        current = t
        ends = (root, self._as_it_will_be(root))
        seen = [s for m in session.members for s in (m.seen, ledger.current(m.seen))]
        given = {id(s) for s in seen if base_of(s) is root}
        while all(current is not end for end in ends):
            hop = ledger.of(current)
            if hop.source is None and id(current) not in given:
                break
            if hop.source is None:
                graded = creation_meta(current) != CreationMeta.NO_GRAD_MODE
                hop = Line(current, current, source=root, with_grad=graded)
            hops.append(hop)
            current = hops[-1].source  # type: ignore[assignment]
        modes = {hop.with_grad for hop in hops}
        partly = len(modes) > 1 and t.requires_grad
        if partly and all(current is not end for end in ends):
            raise FallbackError("a view made partly under no_grad, of a tensor that changed its shape")
        if partly:
            steps: list[Step] = []
            for hop in reversed(hops):
                part = recipe(session, self._as_it_will_be(hop.source), hop.tensor)
                if part.geometry is not None:
                    reason = "a view made partly under no_grad, of a tensor that changed its shape"
                    raise FallbackError(reason)
                some = part.steps or (Step(torch.ops.aten.alias.default, ()),)
                steps += [replace(step, without_grad=not hop.with_grad) for step in some]
            return Recipe(tuple(steps))
        return recipe(session, self._as_it_will_be(root), t)

    def _view_behind(self, t: Tensor) -> int | None:
        """The nearest input that this is a view of and that is itself a view of another: `autograd.grad` has
        to find the way there."""
        session, ledger = self.forward.session, self.forward.session.ledger
        given = ((-1 - k, m.seen) for k, m in enumerate(session.members) if is_view(m.seen))
        views = {id(v): k for k, v in given if creation_meta(v) == CreationMeta.DEFAULT}
        if not (views and t.requires_grad and is_view(t)):
            return None
        if creation_meta(t) == CreationMeta.NO_GRAD_MODE or _is_stale(t):
            return None
        current: Tensor | None = t
        while current is not None and id(current) not in views:
            current = ledger.of(current).source
        if current is None or ledger.current(current) is not current or current.grad_fn is None:
            return None
        return views[id(current)] if edge_of(current) in walk(edge_of(t)).edges else None

    def _as_it_will_be(self, t: Any) -> Any:
        """An input has its new shape by the time that views are made from it."""
        ledger = self.forward.session.ledger
        return t if ledger.given(t) is None else ledger.current(t)

    def _root_for(self, j: int, t: Tensor, owner: int) -> int:
        """The root that `t` is, or is a view of; made an alias of the owner when it is new."""
        session = self.forward.session
        behind = self._view_behind(t)
        if behind is not None:
            return self._input_root(behind)
        root = _root(t)
        known = self.out.find_root(root)
        if known is not None:
            return known
        entrance = session.entrance_of(root)
        if entrance is not None:
            return self._input_root(session.entrances.index(entrance))
        for k, member in enumerate(session.members):
            if member.seen is root or session.ledger.current(member.seen) is root:
                return self._input_root(-1 - k)
        for i, given in enumerate(session.entrances):
            if _root(session.ledger.current(given.seen)) is root:  # also cut off, and then reshaped
                return self._input_root(i)
        tracked = root.requires_grad and root.grad_fn is not None
        made = recipe(session, self._as_it_will_be(self.out.root_tensors[owner]), root)
        how = _how_cut(self.out.root_tensors[owner], root)
        if how == "data" or not _cuts(made):  # `x.data.detach()`: a detach alone would share the counter
            made = Recipe(made.steps, made.geometry, how)
        base = self.out.add_base(root) if tracked and root is not t else None
        output = j if tracked and root is t else None
        leaf = root.requires_grad and not tracked
        return self.out.add_root(AliasRoot(owner, made, base, output, leaf), root)


def _mixed(made: Recipe) -> bool:
    return any(step.without_grad for step in made.steps)


def _root(t: Tensor) -> Tensor:
    base = base_of(t)
    if base is None:
        return t
    functional.sync(base)
    return base


def _is_function_view(t: Tensor) -> bool:
    return bool(creation_meta(t) == CreationMeta.IN_CUSTOM_FUNCTION)


def _is_stale(t: Tensor) -> bool:
    """Was the base changed after this view was made, in a way that eager refuses to look through?"""
    try:
        _ = t.grad_fn
    except RuntimeError:
        return True
    return False


def _is_view_of_leaf_view(t: Tensor) -> bool:
    base = base_of(t)
    return t.requires_grad and base is not None and not base.requires_grad and not t.is_leaf


def _cuts(made: Recipe) -> bool:
    return any(step.target is torch.ops.aten.detach.default for step in made.steps)


def _how_cut(owner: Tensor, root: Tensor) -> str:
    """`x.detach()` shares x's version counter, `x.data` does not."""
    return "detach" if same_version_counter(owner, root) else "data"
