"""Why a call did not fit: a miss names the argument, what was assumed of it, and what came.

    with aheadgrad.explain_misses() as misses:
        fast(torch.ones(8, 3)); fast(torch.ones(5, 3))
    print(misses[0])

    f: no entry fits this call. Closest is entry 0:
      tensor 'x' size mismatch at index 0. expected 8, actual 5

The same text goes to the logger `aheadgrad.misses` at level INFO, and `fast.misses` keeps those that
led to a compilation. Tensors are compared by torch, which has its own words for that, as has Dynamo
(`from_dynamo`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aheadgrad.frontends.plain import BY_TEXT, Same, describe

LOG = logging.getLogger("aheadgrad.misses")
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


def tensor_reason(guards: Any, paths: list[str], *tensors: Any) -> Reason:
    """How tensors differ from those that torch's guards were made for."""
    told = guards.check_verbose(*tensors, tensor_check_names=paths)
    return Reason(told if isinstance(told, str) else "tensors: the same one in two places")


def shown(token: Any, most: int = 60) -> str:
    """A frozen value (`plain.freeze`) in words, as far as it can be told."""
    if isinstance(token, str):
        return token
    if type(token) is Same:
        return describe(token.value)
    if type(token) is int:
        return "a tensor"
    kind, value = token if isinstance(token, tuple) and len(token) == 2 else (None, None)
    if kind in BY_TEXT:
        return str(value)
    if kind is not None and isinstance(value, tuple):
        parts = [shown(v) for v in value] if not issubclass(kind, dict) else []
        text = f"{kind.__name__}({', '.join(parts)})"
        return text if parts and len(text) <= most else f"a {kind.__name__} of {len(value)}"
    return describe(value) if kind is not None else "something else"


@contextmanager
def explain_misses() -> Iterator[list[Miss]]:
    """Collects, from all threads, the reasons why calls of compiled functions fit no entry."""
    found: list[Miss] = []
    _listeners.append(found)
    try:
        yield found
    finally:
        _listeners[:] = [x for x in _listeners if x is not found]


def from_dynamo(function: str, texts: Sequence[str]) -> Miss:
    """Dynamo's reasons, the latest entry first: `0/2: n == 1    # y = x * n  # model.py:19 in forward`."""
    found = []
    for text in texts:
        which, _, reason = text.partition(": ")
        number = which.rpartition("/")[2]
        told = (reason or text).partition("  #")[0].strip()
        found.append((int(number) if number.isdigit() else 0, Reason(told)))
    return Miss(function, found[0][0], tuple(dict.fromkeys(reason for _, reason in found)))


def someone_listens() -> bool:
    return bool(_listeners) or LOG.isEnabledFor(logging.INFO)


def tell(miss: Miss) -> None:
    for listener in list(_listeners):
        listener.append(miss)
    LOG.info("%s", miss)


def explain(
    function: str, whys: Sequence[Callable[..., Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Miss | None:
    """What each entry has against a call; the latest is taken for the closest."""
    found = []
    for i, why in enumerate(whys):
        try:
            reason = why(args, kwargs)
        except Exception as error:  # what came may be anything
            reason = Reason(f"the check raises {type(error).__name__}: {error}")
        if isinstance(reason, Reason):
            found.append((i, reason))
    if not found:
        return None
    latest = found[-1][0]
    return Miss(function, latest, tuple(dict.fromkeys(reason for _, reason in reversed(found))))


def what_keeps_changing(misses: Sequence[Miss]) -> str:
    """The most frequent reasons, with what came."""
    counts: Counter[str] = Counter()
    values: dict[str, list[str]] = {}
    for reason in (miss.reasons[0] for miss in misses if miss.reasons):
        counts[reason.what] += 1
        seen = values.setdefault(reason.what, [reason.assumed] if reason.assumed else [])
        if reason.came and reason.came not in seen:
            seen.append(reason.came)
    came = {what: f" ({', '.join(seen[:4])}, ...)" if seen else "" for what, seen in values.items()}
    told = (what + came[what] for what, _ in counts.most_common(3))
    return "; ".join(told) or "something that cannot be named"
