"""Which sizes of the arguments become symbols when an entry is compiled.

    dynamic=True     all of them
    dynamic=None     those that have changed since an earlier entry of the same callable, and marked ones
    dynamic=False    marked ones only

Python numbers among the arguments (a temperature, a step) become symbols once they have changed, unless
dynamic=False. Marked are dimensions given to `torch._dynamo.mark_dynamic` or `maybe_mark_dynamic`; those
given to `mark_static` stay numbers. So do sizes 0 and 1, and all sizes of a tensor without elements: torch's
formulas for symbols are not made for those.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from aheadgrad.frontends.function import Flat, names_in
from aheadgrad.torchlayer.dynamo import Symbols
from aheadgrad.torchlayer.fake import marked_sizes, new_mode, symbolic_like, symbolic_number
from aheadgrad.torchlayer.symbols import is_symbolic


class Shapes:
    """What one compiled callable knows about the sizes and numbers that it was compiled for."""

    def __init__(self, dynamic: bool | None, fn: Any) -> None:
        self.dynamic = dynamic
        self._fn = fn
        self._seen: dict[str, list[Any]] = {}  # by path: sizes of tensors, and numbers
        self._fixed: set[str] = set()  # paths of numbers that did not do as symbols

    def choices(self, flat: Flat) -> Iterator[Symbols | None]:
        """What to record an entry with: symbols for numbers and sizes, for sizes only, or none at all.

        The next is asked for when one did not do; symbols for numbers are not tried again then.
        """
        sizes: dict[int, tuple[Tensor, str, frozenset[int]]] = {}
        numbers = []
        for i, (leaf, path) in enumerate(zip(flat.leaves, flat.paths, strict=True)):
            now = _told(leaf)
            others = [v for v in self._seen.get(path, ()) if type(v) is type(now) and v != now]
            if isinstance(now, tuple):
                free = self._free(leaf, now, others)
                if free:
                    sizes.setdefault(id(leaf), (leaf, path, free))
            elif others and self.dynamic is not False and path not in self._fixed:
                numbers.append(i)
        for some in (numbers, []) if numbers and not _asks_for_types(self._fn) else ([],):
            if sizes or some:
                mode = new_mode(dynamic=True)
                fakes = {key: symbolic_like(mode, t, f"L_{p}_", free) for key, (t, p, free) in sizes.items()}
                named = {i: symbolic_number(mode, flat.leaves[i], f"N_{flat.paths[i]}_") for i in some}
                yield Symbols(mode, fakes, optional=True, numbers=named)
                self._fixed.update(flat.paths[i] for i in some)
        yield None

    def note(self, flat: Flat) -> None:
        """Remembers the sizes and numbers of a call that was compiled for."""
        for leaf, path in zip(flat.leaves, flat.paths, strict=True):
            self._seen.setdefault(path, []).append(_told(leaf))

    def _free(self, t: Tensor, sizes: tuple[int, ...], others: list[tuple[int, ...]]) -> frozenset[int]:
        """The dimensions of a tensor that become symbols; `others` are sizes that came before."""
        if 0 in sizes:
            return frozenset()
        free, static = marked_sizes(t)
        if self.dynamic:
            free = set(range(len(sizes)))
        elif self.dynamic is None:
            alike = [known for known in others if len(known) == len(sizes)]
            free |= {d for known in alike for d, n in enumerate(known) if n != sizes[d]}
        return frozenset(d for d in free - static if d < len(sizes) and sizes[d] > 1)


def _told(leaf: Any) -> Any:
    """The sizes of a tensor, or a number that can become a symbol; None for what else there is.

    Ragged sizes stand for tensors of offsets: there is nothing to put a symbol for. Infinities and NaN
    cannot become symbols, nor what is larger than C++ counts, nor a zero with a sign.
    """
    if isinstance(leaf, Tensor):
        return None if any(map(is_symbolic, leaf.shape)) else tuple(leaf.shape)
    is_number = type(leaf) in (int, float) and abs(leaf) < 1 << 62 and (leaf != 0.0 or type(leaf) is int)
    return leaf if is_number else None


def _asks_for_types(fn: Any) -> bool:
    """Does the code of a function, or of a module's methods, name `type`? It would tell symbols apart."""
    functions = [fn]
    for module in fn.modules() if isinstance(fn, nn.Module) else ():
        functions += [
            f for kind in type(module).__mro__ if kind is not nn.Module for f in vars(kind).values()
        ]
    return any("type" in names_in(f.__code__) for f in functions if hasattr(f, "__code__"))
