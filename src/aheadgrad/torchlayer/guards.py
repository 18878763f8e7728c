"""C++ checks: properties of tensors, and versions of dictionaries."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

from aheadgrad.torchlayer.symbols import is_symbolic


def tensor_guards(tensors: list[Tensor], symbolic: Mapping[int, Tensor] | None = None) -> Any:
    """Its `check`, in C++, tells whether tensors look like these (and are all different objects).

    `check_verbose` says how they do not. Both look at type, dispatch keys, dtype, device, `requires_grad`,
    sizes and strides. `symbolic` gives, by id, the traced values of those whose sizes may be any.
    """
    fakes = [(symbolic or {}).get(id(t), t) for t in tensors]
    return torch._C._dynamo.guards.TensorGuards(
        *tensors,
        dynamic_dims_sizes=[_fixed(f.size()) for f in fakes],
        dynamic_dims_strides=[_fixed(f.stride()) for f in fakes],
    )


def _fixed(numbers: Any) -> Any:
    return [None if isinstance(n, torch.SymInt) else int(n) for n in numbers]


def shape_check(fakes: list[Any]) -> tuple[Callable[..., bool], str]:
    """A function that tells whether sizes and numbers meet all that a trace with symbols assumed.

    And what it tests, as text over the tensors and symbolic numbers `t0`, `t1`, ...
    """
    from torch._dynamo.source import LocalSource

    first: Any = fakes[0]
    env = first.node.shape_env if is_symbolic(first) else first.fake_mode.shape_env
    names = [f"t{i}" for i in range(len(fakes))]
    parts = env.produce_guards(fakes, [LocalSource(name) for name in names], ignore_static=False)
    text = " and ".join(f"({part})" for part in parts) or "True"  # a part may be an `or`
    text = re.sub(r"L\['(t\d+)'\]", r"\1", text)
    holds = eval(f"lambda {', '.join(names)}: {text}", dict(SYMPY_INTERP))

    def check(*tensors: Tensor) -> bool:
        try:
            return bool(holds(*tensors))
        except ZeroDivisionError:  # a part of the condition makes no sense for these sizes
            return False

    return check, text


_DYNAMO = "torch._dynamo.guards"
_TOLD_OF_CHANGES = sys.version_info[:3] != (3, 13, 0)
"""Python 3.13.0 does not tell those who watch a dictionary that an attribute has been set."""
_OFTEN = 10_000


def _by_versions(tables: tuple[dict[Any, Any], ...]) -> tuple[Callable[[Any], bool], Any]:
    """As `unchanged_check`, without Dynamo, which takes longer to load than many calls of this take.

    Says no once Dynamo is there, so that the faster check is made; after many calls it is loaded for that.
    """
    version = torch._C._dynamo.guards.dict_version
    empty = tuple(t for t in tables if not t)
    known: list[Any] = []
    count = itertools.count()

    def check(tables: Any) -> bool:
        now = tuple(map(version, tables)), any(empty)
        if not known:
            known.append(now)
        if next(count) == _OFTEN:
            importlib.import_module(_DYNAMO)
        return now == known[0] and _DYNAMO not in sys.modules

    return check, tables


class _Watched:
    """Holds dictionaries for a check. The check refers weakly to it."""

    def __init__(self, tables: tuple[dict[Any, Any], ...]) -> None:
        self.tables = tables


def unchanged_check(tables: tuple[dict[Any, Any], ...]) -> tuple[Callable[[Any], bool], Any]:
    """A C++ function, and what to give it: are all dictionaries unchanged?

    Python keeps a version of each dictionary. Those below a "tag safe" root are compared in one loop over
    an array, once the first check has noted them. That is for dictionaries proper only; others are
    looked at one by one, as are empty ones from Python 3.12 on: there torch counts the changes itself, as
    Python tells it, and does not listen when an empty dictionary is filled by `update`. After a change the
    check says no for good.
    """
    if not _TOLD_OF_CHANGES:
        return lambda _: False, tables  # so all is looked at again
    if _DYNAMO not in sys.modules:
        return _by_versions(tables)
    from torch._dynamo.guards import GuardManagerType

    kind = GuardManagerType.GUARD_MANAGER
    fast = [type(t) is dict and bool(t or sys.version_info < (3, 12)) for t in tables]
    plain = tuple(itertools.compress(tables, fast))
    special = tuple(t for t, there in zip(tables, fast, strict=True) if not there)
    watched = _Watched(plain)
    root = torch._C._dynamo.guards.RootGuardManager()
    together = root.tuple_getitem_manager(0, "watched", watched, kind)
    inner = together.getattr_manager("tables", "watched.tables", plain, kind)
    for manager, group, first in ((inner, plain, 0), (root, special, 1)):
        for i, table in enumerate(group, first):
            one = manager.tuple_getitem_manager(i, f"tables[{i}]", table, kind)
            one.add_dict_version_guard(table, ["unchanged"], None)
            if not table:
                one.add_dict_length_check_guard(0, ["empty"], None)
            if manager is inner:
                one.mark_tag_safe()
    if plain:
        inner.mark_tag_safe()
        together.mark_tag_safe()
        together.mark_tag_safe_root()
    check: Callable[[Any], bool] = root.check
    return check, (watched, *special)
