"""What a tensor looks like to an entry, in words, for telling why one does not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aheadgrad.torchlayer.guards import keys_of
from aheadgrad.torchlayer.symbols import is_symbolic


@dataclass(frozen=True)
class Look:
    """One tensor as an entry assumes it; a size that may be any is None."""

    path: str
    aspects: tuple[tuple[str, Any], ...]

    def differences(self, t: Any) -> list[tuple[str, Any, Any]]:
        """`(aspect, assumed, came)` for what is different."""
        if not isinstance(t, Tensor):
            return [("type", dict(self.aspects)["type"], type(t).__name__)]
        found = []
        for (aspect, assumed), (_, came) in zip(self.aspects, _aspects(t, None), strict=True):
            if isinstance(assumed, tuple) and isinstance(came, tuple) and len(assumed) == len(came):
                if all(a in (None, c) for a, c in zip(assumed, came, strict=True)):
                    continue
            elif assumed == came:
                continue
            found.append((aspect, assumed, came))
        # the keys follow from the rest, mostly
        return [f for f in found if f[0] != "dispatch keys"] or found


def look_of(path: str, t: Tensor, symbolic: Tensor | None) -> Look:
    return Look(path, _aspects(t, symbolic))


def _aspects(t: Tensor, symbolic: Tensor | None) -> tuple[tuple[str, Any], ...]:
    shown = t if symbolic is None else symbolic
    strided = t.layout is torch.strided
    return (
        ("type", type(t).__name__),
        ("dtype", str(t.dtype)),
        ("device", str(t.device)),
        ("layout", str(t.layout)),
        ("shape", _numbers(shown.size())),
        ("strides", _numbers(shown.stride()) if strided else ()),
        ("requires_grad", t.requires_grad),
        ("dispatch keys", keys_of(t)),
    )


def _numbers(values: Sequence[Any]) -> tuple[int | None, ...]:
    return tuple(None if is_symbolic(v) else int(v) for v in values)


def compare_looks(note: Callable[..., None], looks: Sequence[Look], tensors: Sequence[Any]) -> bool:
    """Notes every difference; True when there was any."""
    found = False
    seen: dict[int, str] = {}
    for look, t in zip(looks, tensors, strict=True):
        other = seen.setdefault(id(t), look.path)
        if other != look.path:
            found = True
            note(f"{look.path} and {other}", "different tensors", lambda: "the same tensor")
        differences = look.differences(t)
        shape = any(aspect == "shape" for aspect, _, _ in differences)
        for aspect, assumed, came in differences:
            found = True
            if aspect != "strides" or not shape:
                note(f"{look.path}, {aspect}", _shown(assumed), lambda came=came: came)
    return found


def _shown(assumed: Any) -> str:
    if isinstance(assumed, tuple):
        parts = ", ".join("any" if n is None else str(n) for n in assumed)
        return f"({parts}{',' if len(assumed) == 1 else ''})"
    return str(assumed)
