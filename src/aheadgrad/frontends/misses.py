"""Why a call did not fit: a miss names the argument, what was assumed of it, and what came.

    with aheadgrad.explain_misses() as misses:
        fast(torch.ones(8, 3)); fast(torch.ones(5, 3))
    print(misses[0])

    f: no entry fits this call. Closest is entry 0:
      tensor 'x' size mismatch at index 0. expected 8, actual 5

The logger `aheadgrad.misses` has the same text at level INFO; `fast.misses` keeps those that led to an entry.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

LOG = logging.getLogger("aheadgrad.misses")
_NUMBERED = re.compile(r"\d+/(\d+): ")  # how Dynamo counts: frame/entry
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
        head = f"{self.function}: no entry fits this call. Closest is entry {self.entry}:"
        return "\n  ".join([head, *map(str, self.reasons)])


class NotKept(Miss):
    """A call that was recorded although there is a cache."""

    @classmethod
    def because(cls, function: str, reason: str) -> NotKept:
        return cls(function, -1, (Reason(f"cache: {reason}"),))

    def __str__(self) -> str:
        return f"{self.function}: {self.reasons[0]}"


def tensor_reason(guards: Any, paths: list[str], *tensors: Any) -> Reason:
    """How tensors differ from those that torch's guards were made for."""
    told = guards.check_verbose(*tensors, tensor_check_names=paths)
    return Reason(
        told if isinstance(told, str) else "tensors: the same one, or the same memory, in two places"
    )


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
    number = _NUMBERED.match(texts[0])
    told = (_NUMBERED.sub("", text, count=1).partition("  #")[0].strip() for text in texts)
    return Miss(function, int(number[1]) if number else 0, tuple(map(Reason, dict.fromkeys(told))))


def someone_listens() -> bool:
    return bool(_listeners) or LOG.isEnabledFor(logging.INFO)


def tell(miss: Miss) -> None:
    for listener in list(_listeners):
        listener.append(miss)
    LOG.info("%s", miss)


def explain(function: str, entries: Sequence[Any], args: Any, kwargs: Any) -> list[Miss]:
    """Tells what each entry has against a call, if there are any; the latest is taken for the closest."""
    found: dict[Reason, int] = {}
    for i in reversed(range(len(entries))):
        try:
            reason = entries[i].why(args, kwargs)
        except Exception as error:  # what came may be anything
            reason = Reason(f"the check raises {type(error).__name__}: {error}")
        if isinstance(reason, Reason):
            found.setdefault(reason, i)
    if not found:
        return []
    miss = Miss(function, max(found.values()), tuple(found))
    tell(miss)
    return [miss]


def what_keeps_changing(misses: Sequence[Miss]) -> str:
    """The most frequent reasons, with what came."""
    reasons = [miss.reasons[0] for miss in misses if type(miss) is Miss]
    told = []
    for what, _ in Counter(reason.what for reason in reasons).most_common(3):
        same = [reason for reason in reasons if reason.what == what]
        seen = dict.fromkeys(filter(None, (same[0].assumed, *(reason.came for reason in same))))
        told.append(f"{what} ({', '.join([*seen][:4])}, ...)" if seen else what)
    return "; ".join(told) or "something that cannot be named"
