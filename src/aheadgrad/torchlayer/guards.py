"""C++ checks: properties of tensors, and versions of dictionaries."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

dict_version: Callable[[dict[Any, Any]], int] = torch._C._dynamo.guards.dict_version


def tensor_check(tensors: list[Tensor], symbolic: Mapping[int, Tensor] | None = None) -> Callable[..., bool]:
    """A C++ function that tells whether tensors look like these (and are all different objects).

    It looks at type, dispatch keys, dtype, device, `requires_grad`, sizes and strides. `symbolic` gives,
    by id, the traced values of those with symbolic sizes, which may be any.
    """
    fakes = [(symbolic or {}).get(id(t), t) for t in tensors]
    guards = torch._C._dynamo.guards.TensorGuards(
        *tensors,
        dynamic_dims_sizes=[_fixed(f.size()) for f in fakes],
        dynamic_dims_strides=[_fixed(f.stride()) for f in fakes],
    )
    check: Callable[..., bool] = guards.check
    return check


def _fixed(numbers: Any) -> Any:
    return [None if isinstance(n, torch.SymInt) else int(n) for n in numbers]


def keys_of(t: Tensor) -> str:
    """The dispatch keys of a tensor, as text: which layers of torch it passes through."""
    return str(torch._C._dispatch_keys(t))


def shape_check(fakes: list[Any]) -> tuple[Callable[..., bool], str]:
    """A function that tells whether tensors' sizes meet all that a trace with symbolic sizes assumed.

    And what it tests, as text over the tensors `t0`, `t1`, ...
    """
    env = fakes[0].fake_mode.shape_env
    text = env.produce_guards_expression(fakes, ignore_static=False) or "True"
    text = re.sub(r"L\['(t\d+)'\]", r"\1", text)
    names = ", ".join(f"t{i}" for i in range(len(fakes)))
    check: Callable[..., bool] = eval(f"lambda {names}: {text}", dict(SYMPY_INTERP))
    return check, text


def unchanged_check(tables: tuple[dict[Any, Any], ...], tensors: tuple[Tensor, ...]) -> Callable[[Any], bool]:
    """A C++ function of `(*tables, *tensors)`: has nothing changed since now?

    Dictionaries have a version; of tensors it looks at what `tensor_check` looks at.
    """
    from torch._dynamo.guards import GuardManagerType

    root = torch._C._dynamo.guards.RootGuardManager()
    for i, table in enumerate(tables):
        one = root.tuple_getitem_manager(i, f"tables[{i}]", table, GuardManagerType.GUARD_MANAGER)
        one.add_dict_version_guard(table, ["unchanged"], None)
    for i, t in enumerate(tensors, len(tables)):
        one = root.tuple_getitem_manager(i, f"tensors[{i}]", t, GuardManagerType.GUARD_MANAGER)
        sizes, strides = _fixed(t.size()), _fixed(t.stride())
        keys = torch._C._dispatch_keys(t)
        one.add_tensor_match_guard(t, sizes, strides, f"tensors[{i}]", ["unchanged"], None, type(t), keys)
    check: Callable[[Any], bool] = root.check
    return check
