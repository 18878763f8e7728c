"""The function mode above autograd: closed-over tensors, and calls that need help.

- A real tensor that the user's code reaches (a global, a module's attribute, an optimizer's state)
  becomes a hidden input: its value is read at each call and gradients reach it.
- An in-place op keeps the strides of what it writes to, as in eager.
- Asking for a tensor's value in Python cannot be recorded and raises an error that says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aheadgrad.capture.substitutes import SUBSTITUTES
from aheadgrad.errors import DataDependentError
from aheadgrad.torchlayer import functional
from aheadgrad.torchlayer.dispatch import TorchFunctionMode

if TYPE_CHECKING:
    from aheadgrad.capture.session import Session

_NEEDS_VALUE = {
    torch.Tensor.numpy: "Tensor.numpy()",
    torch.Tensor.tolist: "Tensor.tolist()",
    torch.Tensor.__array__: "numpy conversion",
    torch.Tensor.data_ptr: "Tensor.data_ptr()",
}
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_STORAGE_CHANGES: set[Any] = {torch.Tensor.set_, _SET_DATA, torch.Tensor.resize_}


def _writes(func: Any, kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name.endswith("_"):
        return not name.endswith("__") or name == "__setitem__" or name.startswith("__i")
    return "out" in kwargs


class Lift(TorchFunctionMode):
    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _NEEDS_VALUE:
            raise DataDependentError(
                f"{_NEEDS_VALUE[func]} needs the value of a tensor, which is not known while the function is recorded"
            )
        args = self._swap_all(args)
        if kwargs:
            kwargs = {k: self._swap(v) for k, v in kwargs.items()}
        if func in _STORAGE_CHANGES and args and isinstance(args[0], Tensor):
            self.session.watch_storage(args[0])
        substitute: Callable[..., Any] | None = SUBSTITUTES.get(func)
        out = func(*args, **kwargs) if substitute is None else substitute(*args, **kwargs)
        if _writes(func, kwargs):
            for value in (out, args[0] if args else None, kwargs.get("out")):
                if isinstance(value, Tensor) and functional.is_wrapped(value):
                    keep_strides(value)
        return out

    def _swap_all(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        for value in values:
            if not isinstance(value, int | float | str | torch.dtype) and (
                not isinstance(value, Tensor) or not functional.is_wrapped(value)
            ):
                return tuple(self._swap(v) for v in values)
        return values

    def _swap(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if functional.is_wrapped(value) else self.session.lift(value)
        if type(value) in (list, tuple):
            return type(value)(self._swap(v) for v in value)
        if type(value) is dict:
            return {k: self._swap(v) for k, v in value.items()}
        return value


def keep_strides(t: Tensor) -> None:
    """After a write: the value that functionalization holds gets the strides the tensor has.

    In eager `x[0] = 1` leaves x's strides alone; its functional form makes a fresh tensor whose
    strides may differ, and a later `view` or `reshape` would then decide differently.
    """
    if t.layout is not torch.strided or t.numel() == 0:
        return
    functional.sync(t)
    held = functional.unwrap(t)
    if held.stride() == t.stride() or held.shape != t.shape:
        return
    if any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape, strict=True)):
        return
    with functional.below(), torch.no_grad():
        room = torch.empty_strided(t.size(), t.stride(), dtype=held.dtype, device=held.device)
        fixed = torch.ops.aten.copy.default(room, held)
    functional.replace(t, fixed)
    functional.commit_update(t)
    functional.sync(t)
