"""The names that FX gives to nodes: `mul`, `mul_1`, `sum_1` (a builtin's name gets a number)."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx.graph import _Namespace


class Names:
    """Hands out unique node names in FX's own way; `taken` are in use already."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._space = _Namespace()
        self._taken = taken

    def fresh(self, wanted: str) -> str:
        for name in self._taken:
            self._space.create_name(name, None)
        self._taken = ()
        return str(self._space.create_name(wanted, None))
