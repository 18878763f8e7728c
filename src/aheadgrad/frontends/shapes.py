"""Which sizes of the arguments become symbols when an entry is compiled.

    dynamic=True     all of them
    dynamic=None     those that have changed since an earlier entry of the same callable, and marked ones
    dynamic=False    marked ones only

Python numbers among the arguments (a temperature, a step) become symbols in the same way once they have
changed, unless dynamic=False: the entry takes them at each call.

Marked are dimensions given to `torch._dynamo.mark_dynamic` or `maybe_mark_dynamic`; those given to
`mark_static` stay numbers in any case. Sizes 0 and 1 are always numbers, as everywhere in PyTorch, and so
are all sizes of a tensor without elements: torch's formulas for symbols are not made for those.
"""

from __future__ import annotations

from types import CodeType
from typing import Any

from torch import Tensor, nn

from aheadgrad.frontends.function import Flat
from aheadgrad.torchlayer.dynamo import Symbols
from aheadgrad.torchlayer.fake import marked_sizes, new_mode, symbolic_like, symbolic_number
from aheadgrad.torchlayer.symbols import is_symbolic


class Shapes:
    """What one compiled callable knows about the sizes that it was compiled for."""

    def __init__(self, dynamic: bool | None, fn: Any = None) -> None:
        self.dynamic = dynamic
        self._fn = fn
        self._seen: dict[str, set[tuple[int, ...]]] = {}
        self._numbers: dict[str, list[int | float]] = {}
        self._fixed: set[str] = set()  # paths of numbers that did not do as symbols

    def symbols(self, flat: Flat, *, numbers: bool = False) -> Symbols | None:
        """Symbolic stand-ins for the arguments that need some; None when no argument does."""
        chosen = {}
        for leaf, path in zip(flat.leaves, flat.paths, strict=True):
            if isinstance(leaf, Tensor) and id(leaf) not in chosen and _has_plain_sizes(leaf):
                free = self._free(leaf, path)
                if free:
                    chosen[id(leaf)] = leaf, path, free
        changed = self._changed_numbers(flat) if numbers else []
        if not chosen and not changed:
            return None
        mode = new_mode(dynamic=True)
        fakes = {key: symbolic_like(mode, t, f"L_{path}_", free) for key, (t, path, free) in chosen.items()}
        named = {i: symbolic_number(mode, flat.leaves[i], f"N_{flat.paths[i]}_") for i in changed}
        return Symbols(mode, fakes, optional=True, numbers=named)

    def choices(self, flat: Flat) -> list[Symbols | None]:
        """What to record an entry with: symbols for numbers and sizes, for sizes only, or none at all."""
        found = [self.symbols(flat, numbers=True)]
        if found[0] is not None and found[0].numbers:
            found.append(self.symbols(flat))
        return found if found[-1] is None else [*found, None]

    def give_up_numbers(self, flat: Flat, symbols: Symbols) -> None:
        """A recording with symbols for these numbers failed: it is not tried again."""
        self._fixed.update(flat.paths[i] for i in symbols.numbers)

    def _changed_numbers(self, flat: Flat) -> list[int]:
        """Positions of Python numbers that have changed since an earlier entry."""
        if self.dynamic is False or _asks_for_types(self._fn):
            return []
        found = []
        for i, (leaf, path) in enumerate(zip(flat.leaves, flat.paths, strict=True)):
            if path in self._fixed or not _is_number(leaf):
                continue
            if any(type(n) is type(leaf) and n != leaf for n in self._numbers.get(path, ())):
                found.append(i)
        return found

    def note(self, flat: Flat) -> None:
        """Remembers the sizes of a call that was compiled for."""
        for leaf, path in zip(flat.leaves, flat.paths, strict=True):
            if isinstance(leaf, Tensor) and _has_plain_sizes(leaf):
                self._seen.setdefault(path, set()).add(tuple(leaf.shape))
            elif _is_number(leaf):
                self._numbers.setdefault(path, []).append(leaf)

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


def _asks_for_types(fn: Any) -> bool:
    """Does the code of a function, or of a module's methods, mention `type`? It would tell symbols apart."""
    functions = [fn]
    for module in fn.modules() if isinstance(fn, nn.Module) else ():
        functions += [
            f for kind in type(module).__mro__ if kind is not nn.Module for f in vars(kind).values()
        ]
    codes = [f.__code__ for f in functions if hasattr(f, "__code__")]
    while codes:
        code = codes.pop()
        if "type" in code.co_names:
            return True
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
    return False


def _is_number(value: Any) -> bool:
    """A number that can become a symbol; infinities and NaN cannot, nor what is larger than C++ counts."""
    return type(value) in (int, float) and abs(value) < 1 << 62 and (value != 0.0 or type(value) is int)


def _has_plain_sizes(t: Tensor) -> bool:
    """Ragged sizes stand for tensors of offsets; there is nothing to put a symbol for."""
    return not any(map(is_symbolic, t.shape))
