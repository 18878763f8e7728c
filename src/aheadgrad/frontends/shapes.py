"""Which sizes of the arguments become symbols when an entry is compiled.

    dynamic=True     all of them
    dynamic=None     those that have changed since an earlier entry of the same callable, and marked ones
    dynamic=False    marked ones only

Marked are dimensions given to `torch._dynamo.mark_dynamic` or `maybe_mark_dynamic`; those given to
`mark_static` stay numbers in any case. Sizes 0 and 1 are always numbers, as everywhere in PyTorch, and so
are all sizes of a tensor without elements: torch's formulas for symbols are not made for those.
"""

from __future__ import annotations

from torch import Tensor

from aheadgrad.frontends.function import Flat
from aheadgrad.torchlayer.dynamo import Symbols
from aheadgrad.torchlayer.fake import marked_sizes, new_mode, symbolic_like
from aheadgrad.torchlayer.symbols import is_symbolic


class Shapes:
    """What one compiled callable knows about the sizes that it was compiled for."""

    def __init__(self, dynamic: bool | None) -> None:
        self.dynamic = dynamic
        self._seen: dict[str, set[tuple[int, ...]]] = {}

    def symbols(self, flat: Flat) -> Symbols | None:
        """Symbolic stand-ins for the arguments that need some; None when no argument does."""
        chosen = {}
        for leaf, path in zip(flat.leaves, flat.paths, strict=True):
            if isinstance(leaf, Tensor) and id(leaf) not in chosen and _has_plain_sizes(leaf):
                free = self._free(leaf, path)
                if free:
                    chosen[id(leaf)] = leaf, path, free
        if not chosen:
            return None
        mode = new_mode(dynamic=True)
        fakes = {key: symbolic_like(mode, t, f"L_{path}_", free) for key, (t, path, free) in chosen.items()}
        return Symbols(mode, fakes, optional=True)

    def note(self, flat: Flat) -> None:
        """Remembers the sizes of a call that was compiled for."""
        for leaf, path in zip(flat.leaves, flat.paths, strict=True):
            if isinstance(leaf, Tensor) and _has_plain_sizes(leaf):
                self._seen.setdefault(path, set()).add(tuple(leaf.shape))

    def _free(self, t: Tensor, path: str) -> frozenset[int]:
        sizes = tuple(t.shape)
        if 0 in sizes:
            return frozenset()
        dynamic, static = marked_sizes(t)
        free = set(dynamic)
        if self.dynamic:
            free = set(range(t.dim()))
        elif self.dynamic is None:
            for known in self._seen.get(path, ()):
                if len(known) == len(sizes):
                    free |= {d for d, n in enumerate(known) if n != sizes[d]}
        return frozenset(d for d in free - static if d < len(sizes) and sizes[d] > 1)


def _has_plain_sizes(t: Tensor) -> bool:
    """Ragged sizes stand for tensors of offsets; there is nothing to put a symbol for."""
    return not any(map(is_symbolic, t.shape))
