"""Outputs that share memory: views and aliases are made again from their roots.

Each storage has one root that the program (or the caller) provides; detached aliases and views
grow from it with the recorded view ops, under the grad mode in which they were first made.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aheadgrad.conventions.assembly import Assembly, emit_bump, geometry_text, without_grad
from aheadgrad.conventions.updates import emit_ahead
from aheadgrad.emit.calls import callee
from aheadgrad.emit.script import Script
from aheadgrad.facts.facts import (
    AliasRoot,
    Constant,
    Fresh,
    FreshRoot,
    FunctionView,
    InputRoot,
    IsRoot,
    Recipe,
    Root,
    SameAs,
    TheInput,
    ViewOf,
)
from aheadgrad.joint.level import slot_of_root, slots_apart
from aheadgrad.program.slots import Slot, UserOutput
from aheadgrad.torchlayer.autograd import set_creation_meta, set_version

# A stale view was made at another version of its base than the present one. Made at a version far
# ahead, it stays stale however often the caller writes.
_LONG_AGO = 1_000_000


def expressions(a: Assembly) -> list[str]:
    """What is returned for each flat output."""
    return [_expression(a, j) for j in range(len(a.facts.outputs))]


def _expression(a: Assembly, j: int) -> str:
    fact = a.facts.outputs[j]
    if isinstance(fact, Constant):
        return a.names.literal(fact.value)
    if isinstance(fact, TheInput):
        return a.input_names[fact.index]
    if isinstance(fact, SameAs):
        return _expression(a, fact.output)
    if isinstance(fact, Fresh | ViewOf) and fact.leaf:
        return f"leaf_output_{j}"
    if isinstance(fact, Fresh | FunctionView):
        return f"r{_position(a, UserOutput(j))}"
    if isinstance(fact, IsRoot):
        return root_name(a, fact.root)
    return f"out{j}"


def _position(a: Assembly, slot: Slot | None) -> int:
    return next(i for i, e in enumerate(a.joint.leaving) if e.slot == slot)


def root_name(a: Assembly, r: int) -> str:
    root = a.facts.roots[r]
    if isinstance(root, InputRoot):
        return a.input_names[root.index]
    if isinstance(root, FreshRoot):
        if root.leaf:
            return f"leaf_root_{r}"
        return f"r{_position(a, slot_of_root(root))}"
    return f"leaf_root_{r}" if root.leaf else f"root{r}"


def emit_strides(script: Script, a: Assembly) -> None:
    """Strides of dimensions of size one, where the program's result has others than eager's."""
    for j, fact in enumerate(a.facts.outputs):
        if isinstance(fact, Fresh) and fact.geometry is not None:
            name = f"r{_position(a, UserOutput(j))}"
            script.line(f"{name} = {name}.as_strided({geometry_text(script, fact.geometry)}).detach()")


def emit_apart(script: Script, a: Assembly) -> None:
    """Version counters of their own."""
    for slot in slots_apart(a.facts):
        name = f"r{_position(a, slot)}"
        script.line(f"{name} = {name}.data")


def emit_unseen_looks(script: Script, a: Assembly) -> None:
    """Shapes that were changed out of autograd's sight are so again: it refuses gradients, as in eager."""
    looks = [(a.input_names[f.index], f.history_look) for f in a.facts.inputs if f.history_changed]
    fresh = ((j, f) for j, f in enumerate(a.facts.outputs) if isinstance(f, Fresh) and f.differentiable)
    looks += [(f"r{_position(a, UserOutput(j))}", f.history_look) for j, f in fresh]
    for name, seen in looks:
        if seen is not None:
            size, stride = script.names.literal(seen.size), script.names.literal(seen.stride)
            script.line(f"look = {name}.size(), {name}.stride()")
            script.line(f"{name}.as_strided_({size}, {stride})")
            with without_grad(script, when=True):
                script.line(f"{name}.as_strided_(*look)")
            emit_bump(script, name, -2)


def emit_inner_leaves(script: Script, a: Assembly) -> None:
    """Leaves made inside, before the nodes that have them as inputs."""
    for j, fact in enumerate(a.facts.outputs):
        if isinstance(fact, Fresh) and fact.leaf:
            script.line(f"leaf_output_{j} = r{_position(a, UserOutput(j))}.requires_grad_()")
    for r, root in enumerate(a.facts.roots):
        if isinstance(root, FreshRoot) and root.leaf:
            script.line(f"leaf_root_{r} = r{_position(a, slot_of_root(root))}.requires_grad_()")
        elif isinstance(root, AliasRoot) and root.leaf:
            source = _grow(script, root_name(a, root.of), root.recipe)
            script.line(f"leaf_root_{r} = {source}.requires_grad_()")
            _emit_ahead(script, a, root.of, root.recipe)
    for r in _under_leaf_views(a):
        _emit_alias_root(script, a, r, a.facts.roots[r])
    for j, fact in enumerate(a.facts.outputs):
        if isinstance(fact, ViewOf) and fact.leaf:
            _emit_view(script, a, j, fact)
            script.line(f"leaf_output_{j} = out{j}.requires_grad_()")


def _under_leaf_views(a: Assembly) -> list[int]:
    """Roots that have to be there before the nodes, as leaves are views of them."""
    wanted = {f.root for f in a.facts.outputs if isinstance(f, ViewOf) and f.leaf}
    roots = [(r, a.facts.roots[r]) for r in sorted(wanted)]
    return [r for r, root in roots if isinstance(root, AliasRoot) and not root.leaf]


def emit(script: Script, a: Assembly) -> None:
    made = _under_leaf_views(a)
    for r, root in enumerate(a.facts.roots):
        if isinstance(root, AliasRoot) and not root.leaf and r not in made:
            _emit_alias_root(script, a, r, root)
    for j, fact in enumerate(a.facts.outputs):
        if isinstance(fact, ViewOf) and not fact.leaf:
            emit_grown(script, a, j)


def emit_grown(script: Script, a: Assembly, j: int) -> None:
    """A view, once it is needed: as an output, or already by a node that has it as an input."""
    fact = a.facts.outputs[j]
    if isinstance(fact, ViewOf) and j not in a.grown:
        a.grown.add(j)
        if fact.through is not None:
            emit_grown(script, a, fact.through)
        root = a.facts.roots[fact.root]
        if isinstance(root, InputRoot):
            emit_ahead(script, a, root.index)
        _emit_view(script, a, j, fact)


def _emit_alias_root(script: Script, a: Assembly, r: int, root: Root) -> None:
    assert isinstance(root, AliasRoot)
    _emit_ahead(script, a, root.of, root.recipe)
    script.line(f"root{r} = {_grow(script, root_name(a, root.of), root.recipe)}")
    slot = slot_of_root(root)
    if slot is not None:
        # The same values are written again, for the history that comes with them.
        script.line(f"kept = root{r}._version")
        script.line(f"root{r}.copy_(r{_position(a, slot)})")
        script.line(f"{script.names.name(set_version, 'set_version')}(root{r}, kept)")


def _emit_ahead(script: Script, a: Assembly, r: int, recipe: Recipe) -> None:
    """Changes of shape in a recipe move the version counter, which has come to its final place before;
    that of a fresh tensor is nobody's business."""
    moved = sum(step.in_place for step in recipe.steps)
    root, base = a.facts.roots[r], root_name(a, r)
    while isinstance(root, AliasRoot):
        root = a.facts.roots[root.of]
    if not a.inference and isinstance(root, InputRoot):
        emit_bump(script, base, -moved)


def _emit_view(script: Script, a: Assembly, j: int, fact: ViewOf) -> None:
    base, through = root_name(a, fact.root), fact.through
    if through is not None:
        done = a.facts.outputs[through].recipe.steps  # type: ignore[union-attr]
        fact, base = replace(fact, recipe=Recipe(fact.recipe.steps[len(done) :])), f"out{through}"
    ago = _LONG_AGO if fact.stale and not a.inference else 0
    emit_bump(script, base, ago)
    with without_grad(script, when=fact.without_grad and not a.inference):
        _emit_ahead(script, a, fact.root, fact.recipe)
        script.line(f"out{j} = {_grow_shared(script, base, fact, a.parts)}")
    if fact.creation is not None:
        flag = script.names.name(fact.creation, "creation_flag")
        script.line(f"{script.names.name(set_creation_meta, 'set_creation_meta')}(out{j}, {flag})")
    emit_bump(script, base, -ago)


def _grow_shared(script: Script, base: str, fact: ViewOf, shared: dict[Any, Any]) -> str:
    """Parts of one `unbind` come from one call."""
    steps = fact.recipe.steps
    if any(step.without_grad for step in steps):
        return _grow_stepwise(script, base, fact.recipe)
    if not steps or steps[-1].part is None or fact.stale or fact.without_grad:
        return _grow(script, base, fact.recipe)
    last = steps[-1]
    key = repr((base, steps[:-1], last.target, last.args, last.kwargs))
    used = shared.setdefault((key, "parts"), set())
    if last.part in used:
        return _grow(script, base, fact.recipe)
    used.add(last.part)
    if key not in shared:
        shared[key] = name = f"parts{len(shared)}"
        whole = Recipe((*steps[:-1], type(last)(last.target, last.args, last.kwargs)))
        script.line(f"{name} = {_grow(script, base, whole)}")
    return f"{shared[key]}[{last.part}]"


def _grow_stepwise(script: Script, base: str, recipe: Recipe) -> str:
    """One line per view, each under the grad mode it was first made in."""
    for step in recipe.steps:
        with without_grad(script, when=step.without_grad):
            script.line(f"grown = {_grow(script, base, Recipe((step,)))}")
        base = "grown"
    return base


def _grow(script: Script, base: str, recipe: Recipe) -> str:
    text = base
    literal = script.names.literal
    for step in recipe.steps:
        function, hint = callee(step.target, (base, *step.args))
        args = [text, *(literal(x) for x in step.args), *(f"{k}={literal(v)}" for k, v in step.kwargs)]
        text = f"{script.names.name(function, f'f_{hint}')}({', '.join(args)})"
        if step.part is not None:
            text += f"[{step.part}]"
    if recipe.geometry is not None:
        text = f"{text}.as_strided({geometry_text(script, recipe.geometry)})"
    if recipe.cut == "detach":
        text += ".detach()"
    elif recipe.cut == "data":
        text += ".data"
    return text
