"""Before the user's Python runs a second time, what its first run changed is put back.

A recording that ends in a refusal has run the function once, and the call is about to run it again. What
can be seen of Python (globals, closures, attributes, lists and dictionaries within reach, the state of
Python's and numpy's random numbers) goes back to what it was. A print, a file, a library's own state do not.
"""

from __future__ import annotations

import random
import sys
from typing import Any

from aheadgrad.frontends.places import Contents, same
from aheadgrad.frontends.plain import freeze, is_array, is_too_large
from aheadgrad.frontends.reach import Reach

_CHANGEABLE = (set, bytearray)


class Undo:
    """What Python was before the function is recorded."""

    def __init__(self, reach: Reach, leaves: list[Any]) -> None:
        self.reach = reach
        self.slots = list(reach.slots)
        self.given = [(v, v.copy(), freeze(v)) for v in leaves if is_changeable(v)]
        self.random = random.getstate()
        self.numpy = _numpy_random()
        self.numpy_state = self.numpy.get_state() if self.numpy is not None else None

    def put_back(self) -> None:
        for slot in [*self.slots, *(s for n in self.reach.newcomers for s in n.slots())]:
            if not same(slot.now(), slot.value, inside=isinstance(slot, Contents)):
                slot.put(slot.value)
        for value, before, frozen in self.given:
            if freeze(value) != frozen:
                _refill(value, before)
        random.setstate(self.random)
        if self.numpy is not None:
            self.numpy.set_state(self.numpy_state)

    def changed_argument(self) -> str | None:
        """The kind of an argument that the run has changed inside, in a way that is not replayed."""
        kinds = (type(value).__name__ for value, _, frozen in self.given if freeze(value) != frozen)
        return next(kinds, None)


def is_changeable(value: Any) -> bool:
    """A leaf among the arguments that is compared by value, and that code can change."""
    return type(value) in _CHANGEABLE or (
        is_array(value) and not is_too_large(value) and hasattr(value, "__setitem__")
    )


def _numpy_random() -> Any:
    numpy = sys.modules.get("numpy")
    return getattr(numpy, "random", None)


def _refill(value: Any, before: Any) -> None:
    if isinstance(value, set):
        value.clear()
        value.update(before)
    elif isinstance(value, bytearray):
        value[:] = before
    else:
        value[...] = before
