"""Tensor subclasses around programs of plain tensors.

Everything else in an entry function (updates, views, nodes) deals with whole tensors, as the caller
does. Only the program's call deals with parts:

    p0_0 = p0.a                          # taken apart
    p0_1 = p0.b
    mul = f_mul(p0_0, 2) ...             # the program's lines
    r0 = unflatten({"a": mul, "b": mul_1}, None, (3,), (1,))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from aheadgrad.backends.contract import Executable
from aheadgrad.conventions.assembly import Assembly, without_grad
from aheadgrad.emit.makers import maker
from aheadgrad.emit.script import Namespace, Script
from aheadgrad.facts.facts import InputFacts
from aheadgrad.joint.level import Gradients, Joint, is_handed_out
from aheadgrad.program.values import Value
from aheadgrad.torchlayer.autograd import set_version, version
from aheadgrad.torchlayer.subclasses import (
    Bundle,
    Fixed,
    Form,
    Plain,
    form_of,
    is_foreign,
    part_names,
    same_meta,
    silent_copy,
)
from aheadgrad.torchlayer.symbols import Number, is_ragged, is_symbolic

Inline = Callable[..., list[str]]


def open_up(script: Script, form: Form, name: str) -> list[str]:
    """Lines that take a subclass apart; the names of its parts."""
    found = []
    for k, path in enumerate(form.paths(name)):
        script.line(f"{name}_{k} = {path}")
        found.append(f"{name}_{k}")
    return found


def put_together(names: Namespace, form: Form, parts: Iterator[str]) -> str:
    """An expression for a subclass of this form around the given parts."""
    make = None if any(n < 2 for n in form.size if isinstance(n, int)) else maker(form)
    if make is not None:
        return (
            f"{names.name(make, f'make_{form.kind.__name__}')}({', '.join(next(parts) for _ in form.plain)})"
        )
    inner = []
    for name, f in zip(form.names, form.inner, strict=True):
        if isinstance(f, Fixed):
            text = names.name(f.value, "fixed")
        else:
            text = put_together(names, f, parts) if isinstance(f, Form) else next(parts)
        inner.append(f"{name!r}: {text}")
    unflatten = names.name(form.kind.__tensor_unflatten__, f"make_{form.kind.__name__}")
    size, stride = _look(names, form, inner)
    return f"{unflatten}({{{', '.join(inner)}}}, {_meta(names, form)}, {size}, {stride})"


def _meta(names: Namespace, form: Form) -> str:
    return "None" if form.meta is None else names.name(form.meta, "metadata")


def _look(names: Namespace, form: Form, inner: list[str]) -> tuple[str, str]:
    """The outer sizes and strides: those of a part, where kernels may choose them as they like."""
    if any(map(is_ragged, form.size)):
        return names.name(form.size, "size"), names.name(form.stride, "stride")
    if any(is_symbolic(n) or n < 2 for n in form.size):
        for text, part in zip(inner, form.inner, strict=True):
            if isinstance(part, Plain) and (part.size, part.stride) == (tuple(form.size), form.stride):
                name = text.partition(": ")[2]
                return f"{name}.size()", f"{name}.stride()"
    return names.literal(form.size), names.literal(form.stride)


def forward_of_wholes(joint: Joint, forward: Executable, results: int) -> Executable:
    """The forward, taking and returning whole tensors; `results` are those of the program itself."""
    tensors = len(joint.entrances)

    def inline(script: Script, given: list[str], *, keep_places: bool) -> list[str]:
        places: list[str] = []
        wholes_given, numbers = iter(given[:tensors]), iter(given[tensors:])
        for _, value in joint.wholes:
            if type(value) is Bundle:
                places += open_up(script, value.form, next(wholes_given))
            elif type(value) is Value:
                places.append(next(wholes_given))
            else:
                places.append(next(numbers) if type(value) is Number else script.names.literal(value))
        values = iter(_lines(forward, script, places, results, keep_places=keep_places))
        wholes: list[str] = []
        for i, e in enumerate(joint.leaving):
            if type(e.value) is not Bundle:
                wholes.append(next(values))
                continue
            parts = part_names(e.value, f"r{i}")
            for name, part, given_part in zip(parts, e.value.parts, e.given, strict=True):
                cut = ".detach()" if not given_part and _is_view(joint, part) else ""
                script.line(f"{name} = {next(values)}{cut}")
            wanted = e.differentiable or is_handed_out(
                joint.facts, e.slot
            )  # rather than its parts' values alone
            wholes.append(put_together(script.names, e.value.form, iter(parts)) if wanted else "None")
        return [*wholes, *values]

    return _boxed("forward_of_wholes", inline, tensors + len(joint.numbers), keep_places=True)


def backward_of_wholes(gradients: Gradients, run: Executable, saved: int, more: int = 0) -> Executable:
    """A backward that takes tangents and returns gradients as whole tensors, and more behind them."""
    tangents = [t for t in gradients.tangents if t is not None]
    if not any(type(v) is Bundle for v in (*tangents, *gradients.grads)):
        return run
    results = sum(len(g.parts) if type(g) is Bundle else 1 for g in gradients.grads) + more

    def inline(script: Script, given: list[str], *, keep_places: bool) -> list[str]:
        places = given[:saved]
        for value, name in zip(tangents, given[saved:], strict=True):
            places += open_up(script, value.form, name) if type(value) is Bundle else [name]
        values = iter(_lines(run, script, places, results, keep_places=keep_places))
        wholes = []
        for value in gradients.grads:
            if type(value) is Bundle:
                wholes.append(put_together(script.names, value.form, values))
            else:
                wholes.append(next(values))
        return [*wholes, *values]

    return _boxed("backward_of_wholes", inline, saved + len(tangents), keep_places=False)


def _lines(
    run: Executable, script: Script, places: list[str], results: int, *, keep_places: bool
) -> list[str]:
    """The program's own lines where it has them, a call otherwise."""
    if run.inline is not None:
        return run.inline(script, places, keep_places=keep_places)
    script.line(f"args = [{', '.join(places)}]")
    if places and not keep_places:
        script.line(f"del {', '.join(places)}")
    script.line(f"results = {script.names.name(run.call, 'program')}(args)")
    return [f"results[{k}]" for k in range(results)]


def _boxed(title: str, inline: Inline, count: int, *, keep_places: bool) -> Executable:
    script = Script(title)
    given = [f"p{i}" for i in range(count)]
    if given:
        script.line(f"{', '.join(given)}, = args")
        script.line("args.clear()")
    script.line(f"return [{', '.join(inline(script, given, keep_places=keep_places))}]")
    return Executable(script.function("args")[0], inline=inline)


def _is_view(joint: Joint, value: Value) -> bool:
    return value.op is None or joint.tape.is_view(value)


# ---- updates --------------------------------------------------------------------------------


def emit_parts(script: Script, a: Assembly) -> None:
    """New values for the parts of changed inputs; grad mode is off here."""
    for fact in a.facts.inputs:
        if fact.parts is None:
            continue
        if not fact.parts.reshapes:
            _emit_writes(script, a, fact)
        elif not fact.history_changed:
            emit_reshapes(script, fact, a.input_names[fact.index])
            _emit_writes(script, a, fact)


def _emit_writes(script: Script, a: Assembly, fact: InputFacts) -> None:
    assert fact.parts is not None
    if not fact.parts.changed and not fact.parts.exchanged:
        return
    position = a.joint.updated[fact.index]
    for k, path in enumerate(a.joint.leaving[position].value.form.paths(a.input_names[fact.index])):
        if k in fact.parts.changed:
            script.line(f"{script.names.name(write_part, 'write_part')}({path}, r{position}_{k})")
        elif k in fact.parts.exchanged:
            script.line(f"{path} = r{position}_{k}")


def emit_reshapes(script: Script, fact: InputFacts, name: str) -> None:
    """Changes of shape in place, as the caller's subclass makes them."""
    assert fact.parts is not None
    literal = script.names.literal
    for call in fact.parts.reshapes:
        args = [name, *map(literal, call.args), *(f"{k}={literal(v)}" for k, v in call.kwargs.items())]
        function = script.names.name(call.function, call.function.__name__)
        with without_grad(script, when=not call.with_grad and fact.history_changed):
            script.line(f"{function}({', '.join(args)})")


def own_bumps(fact: InputFacts) -> int:
    """How often our own update moves the version counter."""
    assert fact.parts is not None
    return len(fact.parts.reshapes) + (fact.history_changed and fact.data_changed)


def emit_history(script: Script, a: Assembly, fact: InputFacts) -> None:
    """What autograd must see of a change."""
    assert fact.parts is not None
    name = a.input_names[fact.index]
    if not fact.history_changed:
        return
    if fact.parts.reshapes:
        emit_reshapes(script, fact, name)
        _emit_writes(script, a, fact)
    if fact.data_changed:
        copy = script.names.name(silent_copy, "silent_copy")
        script.line(f"{copy}({name}, r{a.joint.updated[fact.index]})")


def write_part(part: Tensor, new: Tensor) -> None:
    """A part's new value. Its version counter stays: in eager, nobody is told of the write."""
    before = version(part)
    with torch.no_grad():
        part.copy_(new)
    if not part.is_inference():
        set_version(part, before)


# ---- tangents -------------------------------------------------------------------------------


def tangent_pattern(t: Tensor) -> Any:
    """What a backward is compiled for: the strides of a plain tangent, the form of a subclass."""
    return form_of(t) if is_foreign(t) else t.stride()


def form_test(form: Form) -> Callable[[Any], bool]:
    """A function that tells whether a tensor is of a form."""
    if any(not isinstance(f, Plain) for f in form.inner) or any(map(is_ragged, form.size)):
        return lambda t: bool(type(t) is form.kind and form_of(t) == form)
    script = Script("is_as_expected")
    name, literal = script.names.name, script.names.literal
    meta = (
        "meta is None"
        if form.meta is None
        else f"{name(same_meta, 'same_meta')}(meta, {_meta(script.names, form)})"
    )
    with script.block(f"if type(t) is not {name(form.kind, form.kind.__name__)}:"):
        script.line("return False")
    script.line("inside, meta = t.__tensor_flatten__()")
    tests = [f"list(inside) == {list(form.names)!r}", meta]
    tests += [f"t.stride() == {literal(form.stride)}", f"t.shape == {literal(tuple(form.size))}"]
    for path, plain in zip(form.paths("t"), form.plain, strict=True):
        tests += [
            f"type({path}) is {name(Tensor, 'Tensor')}",
            f"{path}.stride() == {literal(plain.stride)}",
            f"{path}.shape == {literal(plain.size)}",
            f"{path}.dtype is {literal(plain.dtype)}",
        ]
    script.line(f"return {' and '.join(tests)}")
    return script.function("t")[0]


def tangent_test(names: Namespace, t: str, expected: Any) -> str:
    """A condition on a tangent that is there."""
    if isinstance(expected, Form):
        return f"{t} is not None and {names.name(form_test(expected), 'is_as_expected')}({t})"
    plain = names.name(Tensor, "Tensor")
    return f"{t} is not None and type({t}) is {plain} and {t}.stride() == {names.literal(tuple(expected))}"
