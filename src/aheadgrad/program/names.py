"""The names of values, the same in all programs of one recording."""

from __future__ import annotations

from typing import Any

from aheadgrad.torchlayer.fxnames import Names


class Naming:
    """Hands out names as FX would, in the order in which things are named."""

    def __init__(self) -> None:
        self._names = Names()
        self._sizes: dict[Any, str] = {}
        self._writes: dict[Any, str] = {}

    def fresh(self, wanted: str) -> str:
        return self._names.fresh(wanted)

    def of_size(self, expr: Any, op: Any) -> str:
        """What a size is called in all programs; `op` reads it off a tensor."""
        known = self._sizes.get(expr)
        if known is None:
            known = self._sizes[expr] = self.fresh(op.name().removeprefix("aten::"))
        return known

    def of_write(self, value: Any, target: Any) -> str:
        known = self._writes.get(value)
        if known is None:
            known = self._writes[value] = self.fresh(base_name(target))
        return known


def base_name(target: Any) -> str:
    """What FX calls the result of an op, but for a number."""
    packet = getattr(target, "overloadpacket", None)
    if packet is not None:
        return str(packet.__name__)
    return str(getattr(target, "__name__", target))
