"""The part of a check about tensor subclasses: type, metadata, and the tensors inside."""

from __future__ import annotations

from aheadgrad.frontends.checks import Checks
from aheadgrad.runtime.emit import Namespace
from aheadgrad.torchlayer.subclasses import Fixed, Form, same_meta


def write_form_check(checks: Checks, names: Namespace, form: Form, name: str, path: str) -> list[str]:
    """Lines that check the type and metadata of a subclass, and open it; the names of its parts."""
    kind = names.name(form.kind, form.kind.__name__)
    came = f"type({name}).__name__"
    checks.unless(f"type({name}) is {kind}", path, f"a {form.kind.__name__}", came, last=True)
    checks.line(f"inside, meta = {name}.__tensor_flatten__()")
    same = names.name(same_meta, "same_meta")
    meta = "meta is None" if form.meta is None else f"{same}(meta, {names.name(form.meta, 'metadata')})"
    test = f"list(inside) == {list(form.names)} and {meta}"
    checks.unless(test, f"{path}, metadata", str(form.meta), "meta", last=True)
    parts: list[str] = []
    for k, (attribute, inner) in enumerate(zip(form.names, form.inner, strict=True)):
        part = f"{name}_{k}_"
        checks.line(f"{part} = {name}.{attribute}")
        if isinstance(inner, Fixed):
            fixed = names.name(inner.value, "fixed")
            checks.unless(f"{same}({part}, {fixed})", f"{path}.{attribute}", "as it was", "'another'")
        elif isinstance(inner, Form):
            parts += write_form_check(checks, names, inner, part, f"{path}.{attribute}")
        else:
            parts.append(part)
    return parts
