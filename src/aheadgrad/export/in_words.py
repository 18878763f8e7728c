"""An export in words: what it takes, gives and holds, and its programs."""

from __future__ import annotations

from typing import Any

from aheadgrad.export.signature import CallSignature, Held, Stage
from aheadgrad.facts.facts import (
    AliasRoot,
    Constant,
    FreshRoot,
    InputFacts,
    InputRoot,
    IsRoot,
    Recipe,
    SameAs,
    TheInput,
    ViewOf,
)
from aheadgrad.program.show import dtype_text
from aheadgrad.program.values import TensorType
from aheadgrad.torchlayer.dispatch import is_random
from aheadgrad.torchlayer.subclasses import Form

_KINDS = ("parameter", "buffer", "tensor", "state", "gradient", "constant")


def text(stages: tuple[Stage, ...]) -> str:
    lines: list[str] = []
    for k, stage in enumerate(stages):
        if len(stages) > 1:
            found = ", ".join(stage.signature.finds) or "none of that"
            lines += ["", "==== the first call" if k == 0 else f"==== calls that find {found}"]
        lines += signature_lines(stage.signature)
        for program in stage.programs:
            drawn = [op.name for op in program.ops if is_random(op.target)]
            lines += [f"  random     drawn by {', '.join(drawn)}"] if drawn else []
        for program in stage.programs:
            lines += ["", str(program)]
    return "\n".join(lines).strip()


def signature_lines(s: CallSignature) -> list[str]:
    lines = [f"{s.kind} export"]
    for kind in _KINDS:
        lines += [f"  {kind:<10} {_held(h)}" for h in s.held if h.kind == kind]
    for a in s.arguments:
        if a.is_tensor:
            same = f", the same tensor as {s.name_of(a.same_as)}" if a.same_as is not None else ""
            grad = ", requires grad" if a.requires_grad else ""
            lines.append(f"  argument   {a.path}: {look(a.type, a.form)}{grad}{same}")
        else:
            lines.append(f"  argument   {a.path} = {a.value!r}")
    for size in s.sizes:
        called = f" ({size.name})" if size.name else ""
        path = s.arguments[size.argument].path
        lines.append(f"  size       {size.symbol}{called}: dimension {size.dimension} of {path}")
    lines += [f"  assumes    {c.expr}" for c in s.conditions]
    for place in s.members:
        lines.append(f"  shares     {s.name_of(place)} lies in the memory of another input")
    for j, path in enumerate(s.outputs):
        loss = ", the loss" if j == s.loss else ""
        what = "a number" if j in s.numbers else _output(s, j)
        lines.append(f"  output     {path or 'the result'}: {what}{loss}")
    lines += [f"  update     {s.name_of(s.place(f.index))}: {_update(s, f)}" for f in _changed(s)]
    lines += [f"  update     {name}: another tensor" for name, _ in s.renewed]
    lines += [f"  makes      {name}" for name, _ in s.made]
    lines += [f"  drops      {name}" for name in s.gone]
    for backward in s.backwards:
        for t in backward.tangents:
            lines.append(f"  tangent    of {s.leaving[t.leaving].slot.describe()}: {look(t.type, t.form)}")
        for g in backward.gradients:
            lines.append(f"  gradient   of {g.name}" + (": none" if g.missing else ""))
    return lines


def look(t: TensorType | None, form: Form | None) -> str:
    """`f32[2, 3]`; a subclass by its name."""
    if form is not None:
        inside = ", ".join(f"{n}" for n in form.names)
        return f"{form.kind.__name__}{list(form.size)} of {inside}"
    if t is None:
        return "a value"
    return f"{dtype_text(t.dtype)}[{', '.join(map(str, t.size))}]"


def _held(h: Held) -> str:
    others = f" (also {', '.join(h.names[1:])})" if len(h.names) > 1 else ""
    fixed = "" if h.requires_grad or h.kind != "parameter" else ", without grad"
    return f"{h.name}: {look(h.type, h.form)}{fixed}{others}"


def _changed(s: CallSignature) -> list[InputFacts]:
    return [f for f in s.facts.inputs if f.is_updated or f.becomes_leaf is not None]


def _update(s: CallSignature, f: InputFacts) -> str:
    words = []
    if f.storage_changed:
        words.append("other memory" if f.adopts is None else f"the memory of {s.name_of(s.place(f.adopts))}")
    elif f.geometry is not None:
        words.append(f"size {list(f.geometry.size)}, strides {list(f.geometry.stride)}")
    if f.data_changed:
        words.append("new values")
    if f.becomes_leaf is not None:
        words.append("requires grad" if f.becomes_leaf else "no longer requires grad")
    return ", ".join(words)


def _output(s: CallSignature, j: int) -> str:
    fact: Any = s.facts.outputs[j]
    if isinstance(fact, Constant):
        return f"{fact.value!r}"
    if isinstance(fact, TheInput):
        return f"{s.name_of(s.place(fact.index))} itself"
    if isinstance(fact, SameAs):
        return f"the same tensor as {s.outputs[fact.output] or 'the result'}"
    if isinstance(fact, IsRoot):
        return _root(s, fact.root, own=j)
    if isinstance(fact, ViewOf):
        return f"{_recipe(fact.recipe)} of {_root(s, fact.root)}"
    return "a new tensor"


def _root(s: CallSignature, r: int, own: int | None = None) -> str:
    root = s.facts.roots[r]
    if isinstance(root, InputRoot):
        return s.name_of(s.place(root.index))
    if isinstance(root, AliasRoot):
        return f"{_recipe(root.recipe)} of {_root(s, root.of)}"
    assert isinstance(root, FreshRoot)
    if root.output is not None and root.output == own:
        return "a new tensor, which others are views of"
    if root.output is not None and root.output < len(s.outputs):
        return f"the output {s.outputs[root.output] or 'itself'}"
    return f"base {root.base}"


def _recipe(recipe: Recipe) -> str:
    steps = [f"{step.target}".removeprefix("aten.") for step in recipe.steps]
    if recipe.geometry is not None:
        steps.append(f"strides {list(recipe.geometry.stride)}")
    return f"a view ({', '.join(steps)})" if steps else "an alias"
