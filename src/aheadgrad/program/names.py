"""The names of values, the same in all programs of one recording."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from aheadgrad.torchlayer.fxnames import Names


class Naming:
    """Hands out names as FX would, in the order in which things are named.

    `sizes` has what sizes are called, by expression; `writes` what updates of inputs are. `taken` are names
    of other things.
    """

    def __init__(
        self,
        sizes: Mapping[Any, str] | None = None,
        writes: Mapping[Any, str] | None = None,
        taken: Iterable[str] = (),
    ) -> None:
        self._names = Names(taken)
        self.sizes = dict(sizes or {})
        self.writes = dict(writes or {})

    def fresh(self, wanted: str) -> str:
        return self._names.fresh(wanted)

    def of_size(self, expr: Any, op: Any) -> str:
        """What a size is called in all programs; `op` reads it off a tensor."""
        known = self.sizes.get(expr)
        if known is None:
            known = self.sizes[expr] = self.fresh(op.name().removeprefix("aten::"))
        return known

    def of_write(self, value: Any, target: Any) -> str:
        known = self.writes.get(value)
        if known is None:
            known = self.writes[value] = self.fresh(base_name(target))
        return known


def base_name(target: Any) -> str:
    """What FX calls the result of an op, but for a number."""
    packet = getattr(target, "overloadpacket", None)
    if packet is not None:
        return str(packet.__name__)
    return str(getattr(target, "__name__", target))
