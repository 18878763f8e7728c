"""The names that FX gives to nodes: `mul`, `mul_1`, `sum_1` (a builtin's name gets a number)."""

from __future__ import annotations

from torch.fx.graph import _Namespace


class Names:
    """Hands out unique node names in FX's own way."""

    def __init__(self) -> None:
        self._space = _Namespace()

    def fresh(self, wanted: str) -> str:
        return str(self._space.create_name(wanted, None))
