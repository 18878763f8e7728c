"""Why a call did not fit: a miss names the argument, what was assumed of it, and what came.

    with aheadgrad.explain_misses() as misses:
        fast(torch.ones(8, 3)); fast(torch.ones(5, 3))
    print(misses[0])

    f: no entry fits this call. Closest is entry 0:
      x, shape: (8, 3) was assumed, (5, 3) came

The same text goes to the logger `aheadgrad.misses` at level INFO, and `fast.misses` keeps those that
led to a compilation.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

LOG = logging.getLogger("aheadgrad.misses")
_listeners: list[list[Miss]] = []


@dataclass(frozen=True)
class Reason:
    """One assumption that does not hold."""

    what: str
    assumed: str
    came: str
    last: bool = False  # nothing further could be compared

    def __str__(self) -> str:
        return f"{self.what}: {self.assumed} was assumed, {self.came} came"


@dataclass(frozen=True)
class Miss:
    """A call that no entry fits, compared with the entry that it is closest to."""

    function: str
    entry: int
    reasons: tuple[Reason, ...]

    def __str__(self) -> str:
        lines = [f"{self.function}: no entry fits this call. Closest is entry {self.entry}:"]
        return "\n  ".join(lines + [str(r) for r in self.reasons])


@contextmanager
def explain_misses() -> Iterator[list[Miss]]:
    """Collects, from all threads, the reasons why calls of compiled functions fit no entry."""
    found: list[Miss] = []
    _listeners.append(found)
    try:
        yield found
    finally:
        _listeners[:] = [x for x in _listeners if x is not found]


def someone_listens() -> bool:
    return bool(_listeners) or LOG.isEnabledFor(logging.INFO)


def tell(miss: Miss) -> None:
    for listener in list(_listeners):
        listener.append(miss)
    LOG.info("%s", miss)


def reasons_of(why: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Reason, ...]:
    """What an entry's check has against a call."""
    found: list[Reason] = []

    def note(what: str, assumed: str, came: Callable[[], Any], last: bool = False) -> None:
        try:
            text = str(came())
        except Exception as error:  # what came may be anything
            text = f"something that raises {type(error).__name__}"
        found.append(Reason(what, assumed, text if len(text) <= 100 else text[:97] + "...", last))

    try:
        why(args, kwargs, note)
    except Exception as error:
        found.append(Reason("the check", "that it runs", f"{type(error).__name__}: {error}"))
    return tuple(found)


def closest(
    function: str, whys: Sequence[Callable[..., None]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Miss | None:
    """The entry that could be compared furthest, with the fewest reasons, the latest of equals."""
    if not whys:
        return None
    found = [(reasons_of(why, args, kwargs), i) for i, why in enumerate(whys)]
    reasons, entry = min(found, key=lambda pair: (any(r.last for r in pair[0]), len(pair[0]), -pair[1]))
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
