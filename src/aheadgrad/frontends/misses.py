"""Why a call did not fit: a miss names the argument, what was assumed of it, and what came.

    with aheadgrad.explain_misses() as misses:
        fast(torch.ones(8, 3)); fast(torch.ones(5, 3))
    print(misses[0])

    f: no entry fits this call. Closest is entry 0:
      x, shape: (8, 3) was assumed, (5, 3) came

The same text goes to the logger `aheadgrad.misses` at level INFO, and `fast.misses` keeps those that
led to a compilation. An entry keeps a description of the call that it was made for; a call that fits none is
described, too, and compared with those. Dynamo has reasons of its own (`from_dynamo`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aheadgrad.capture.stage import Captured
from aheadgrad.frontends.function import Flat
from aheadgrad.frontends.guarded_ambient import surroundings_of_call
from aheadgrad.frontends.plain import Same, describe, freeze
from aheadgrad.frontends.state import Look
from aheadgrad.torchlayer.functional import storage_key
from aheadgrad.torchlayer.guards import keys_of
from aheadgrad.torchlayer.subclasses import is_plain, parts_of
from aheadgrad.torchlayer.symbols import is_symbolic

LOG = logging.getLogger("aheadgrad.misses")
_SELDOM = (
    "is_leaf",
    "dispatch keys",
    "memory",
    "offset",
    "kernels for attention",
)  # looked at where it matters
_listeners: list[list[Miss]] = []


@dataclass(frozen=True)
class Reason:
    """One assumption that does not hold."""

    what: str
    assumed: str = ""
    came: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {self.assumed} was assumed, {self.came} came" if self.assumed else self.what


@dataclass(frozen=True)
class Miss:
    """A call that no entry fits, compared with the entry that it is closest to."""

    function: str
    entry: int
    reasons: tuple[Reason, ...]

    def __str__(self) -> str:
        lines = [f"{self.function}: no entry fits this call. Closest is entry {self.entry}:"]
        return "\n  ".join(lines + [str(r) for r in self.reasons])


@dataclass(eq=False)
class Description:
    """A call in words: by subject, what is compared and how it is shown. Sizes that may be any are None."""

    facts: dict[str, tuple[Any, str]] = field(default_factory=dict)
    sizes: str = ""

    def note(self, what: str, value: Any, shown: str | None = None) -> None:
        self.facts[what] = (freeze(value), describe(value) if shown is None else shown)

    def loosen(self, captured: Captured, flat: Flat, sizes: str) -> None:
        """Sizes and strides that are symbols may be any."""
        self.sizes = sizes
        symbolic = captured.symbolic_inputs()
        for path, leaf in zip(flat.paths, flat.leaves, strict=True):
            value = symbolic.get(id(leaf)) if isinstance(leaf, Tensor) else None
            if value is not None:
                for what, numbers in (("shape", value.size()), ("strides", value.stride())):
                    loose = tuple(None if is_symbolic(n) else int(n) for n in numbers)
                    shown = ", ".join("any" if n is None else str(n) for n in loose)
                    self.facts[f"{path}, {what}"] = (loose, f"({shown}{',' if len(loose) == 1 else ''})")

    def against(self, call: Description) -> tuple[Reason, ...]:
        """What this description, of an entry, has against a call."""
        nothing = (None, "absent")
        found = []
        for what in dict.fromkeys((*self.facts, *call.facts)):
            (mine, shown), (theirs, came) = self.facts.get(what, nothing), call.facts.get(what, nothing)
            if mine != theirs and not _fits(mine, theirs):
                found.append(Reason(what, shown, came))
        shapes = {r.what.removesuffix("shape") for r in found if r.what.endswith(", shape")}
        found = [r for r in found if r.what.removesuffix("strides") not in shapes]
        found = [r for r in found if not r.what.endswith(_SELDOM)] or found
        if not found and self.sizes:
            found = [Reason("sizes", self.sizes, "others")]
        return tuple(found or [Reason("something that is compared, but not described here")])


def _fits(loose: Any, sizes: Any) -> bool:
    """Are these sizes that may be any?"""
    if not isinstance(loose, tuple) or None not in loose or not isinstance(sizes, tuple):
        return False
    numbers = [n for _, n in sizes[1]] if len(sizes) == 2 and isinstance(sizes[1], tuple) else []
    return len(numbers) == len(loose) and all(a in (None, b) for a, b in zip(loose, numbers, strict=True))


def describe_call(flat: Flat, state: Look | None) -> Description:
    """A call as it is now."""
    out = Description()
    for what, value in surroundings_of_call().items():
        out.note(what, value, str(value))
    out.note("the structure of the arguments", str(flat.spec), str(flat.spec)[:80])
    names: dict[int, str] = {}
    storages: dict[int, str] = {}
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if not isinstance(leaf, Tensor):
            out.note(path, leaf)
            continue
        out.note(f"{path}, same tensor as", names.setdefault(id(leaf), path))
        for what, value in _aspects(leaf):
            out.note(f"{path}, {what}", value, str(value))
        if leaf.layout is torch.strided and is_plain(leaf):
            shared = storages.setdefault(storage_key(leaf), path)
            out.note(f"{path}, memory", shared, "its own" if shared == path else f"shared with {shared}")
            out.note(f"{path}, offset", int(leaf.storage_offset()))
    if state is not None:
        for path, token in zip(state.paths, state.tokens, strict=True):
            out.facts[path] = (token, "a tensor" if type(token) is int else describe(_value(token)))
        for place, t in ((state.places[id(t)].path, t) for t in state.tensors):
            for what, value in _aspects(t):
                out.note(f"{place}, {what}", value, str(value))
    return out


def _value(token: Any) -> Any:
    """What a frozen value stands for, as far as it can be shown."""
    if type(token) is Same:
        return token.value
    return (
        token[1]
        if isinstance(token, tuple) and len(token) == 2 and not isinstance(token[1], tuple)
        else token
    )


def _aspects(t: Tensor) -> list[tuple[str, Any]]:
    strided = t.layout is torch.strided
    return [
        ("type", type(t).__name__),
        ("dtype", t.dtype),
        ("device", t.device),
        ("layout", t.layout),
        ("shape", tuple(t.size()) if not any(map(is_symbolic, t.size())) else ()),
        ("strides", tuple(t.stride()) if strided and not any(map(is_symbolic, t.stride())) else ()),
        ("requires_grad", t.requires_grad),
        ("is_leaf", t.is_leaf),
        ("parts", len(parts_of(t)) if strided else 0),
        ("dispatch keys", keys_of(t)),
    ]


@contextmanager
def explain_misses() -> Iterator[list[Miss]]:
    """Collects, from all threads, the reasons why calls of compiled functions fit no entry."""
    found: list[Miss] = []
    _listeners.append(found)
    try:
        yield found
    finally:
        _listeners[:] = [x for x in _listeners if x is not found]


def from_dynamo(function: str, text: str) -> Miss:
    """One of Dynamo's reasons, `0/2: tensor 'x' size mismatch ...`: which compilation, and what failed."""
    which, _, reason = text.partition(": ")
    number = which.rpartition("/")[2]
    return Miss(function, int(number) if number.isdigit() else 0, (Reason(reason or text),))


def someone_listens() -> bool:
    return bool(_listeners) or LOG.isEnabledFor(logging.INFO)


def tell(miss: Miss) -> None:
    for listener in list(_listeners):
        listener.append(miss)
    LOG.info("%s", miss)


def closest(function: str, entries: Sequence[Description], call: Description) -> Miss | None:
    """The entry with the fewest reasons against a call, the latest of equals."""
    if not entries:
        return None
    found = [(entry.against(call), i) for i, entry in enumerate(entries)]
    reasons, entry = min(found, key=lambda pair: (len(pair[0]), -pair[1]))
    return Miss(function, entry, reasons)


def what_keeps_changing(misses: Sequence[Miss]) -> str:
    """`factor (0, 1, 2); x, shape ((8, 3), (5, 3))`: the most frequent reasons, with what came."""
    counts: Counter[str] = Counter()
    values: dict[str, list[str]] = {}
    for miss in misses:
        for reason in miss.reasons:
            counts[reason.what] += 1
            seen = values.setdefault(reason.what, [reason.assumed])
            if reason.came not in seen:
                seen.append(reason.came)
    shown = [f"{what} ({', '.join(values[what][:4])}, ...)" for what, _ in counts.most_common(3)]
    return "; ".join(shown) or "something that cannot be named"
