"""What a real kernel says, where fake tensors are not exact.

Fake tensors follow references written in Python. Those know sizes and dtypes, but for dimensions of one
element or none some give other strides than the kernel, and a few fail where the kernel does not, or with
another type of error. A kernel that runs on a few zeros settles it. It is asked only if that is cheap and
has no effect of its own: ops and functions of torch's, on small tensors.
"""

from __future__ import annotations

import math
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch

from aheadgrad.torchlayer import functional, random
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.dispatch import HigherOrderOperator, OpOverload, is_mutable
from aheadgrad.torchlayer.fake import FakeTensor
from aheadgrad.torchlayer.memory import reach
from aheadgrad.torchlayer.symbols import size_hint

_MOST_ELEMENTS = 1 << 12  # of all arguments together
_LARGEST_RESULT = 1 << 16
_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
_REFERENCES = ("/torch/_decomp/", "/torch/_refs/", "/torch/_prims", "/torch/_meta_registrations")
_REFUSED = "The kernel is not made for arguments like these."


class NotAsked(Exception):
    """The kernel cannot be asked about this call."""


def is_open_question(t: torch.Tensor) -> bool:
    """Has the tensor a dimension whose stride makes no difference to where its elements are, and is small?"""
    return has_unit_size(t) and math.prod(hints(t.size())) <= _LARGEST_RESULT


def has_unit_size(t: torch.Tensor) -> bool:
    """Has the tensor a dimension of one element, or none?"""
    return any(type(n) is int and n < 2 for n in t.size())


@contextmanager
def for_real() -> Iterator[None]:
    """For ops on real tensors in the midst of a recording: without modes, history or warnings."""
    with functional.outside(), no_dispatch(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def hints(numbers: Any) -> tuple[int, ...]:
    """Sizes or strides as plain numbers: symbolic ones as they are in this call."""
    if any(isinstance(n, torch.SymInt) and n.node.hint is None for n in numbers):
        raise NotAsked
    return tuple(map(size_hint, numbers))


def _is_torchs(func: Any) -> bool:
    """A function of torch's own that runs no code of the user's."""
    if isinstance(func, HigherOrderOperator | types.MethodType):  # the latter: `apply` of a custom function
        return False
    return str(getattr(func, "__module__", None) or "torch").startswith("torch")


def ask_kernel(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    number: Callable[[Any], int] = lambda n: hints((n,))[0],
    most: int = _MOST_ELEMENTS,
) -> Any:
    """The results of an op for tensors like these, full of zeros; raises what the kernel raises.

    `number` gives the numbers for symbolic sizes; `most`: how many elements all arguments may have together.
    """
    if not isinstance(func, OpOverload) or func.namespace != "aten" or is_mutable(func):
        raise NotAsked
    if any(tag in func.tags for tag in _TAGS):
        raise NotAsked
    draws = torch.Tag.nondeterministic_seeded in func.tags
    with for_real():
        args, kwargs = _zeros((args, kwargs), number, most)
        try:
            with random.preserved(draws):
                return func(*args, **kwargs)
        except NotImplementedError as error:
            error.add_note(_REFUSED)
            raise


def error_of_function(func: Any, args: Any, kwargs: Any, error: Exception) -> Exception:
    """What eager raises where a reference raised `error`; the same error if eager says nothing else."""
    frames = traceback.extract_tb(error.__traceback__)
    if not _is_torchs(func) or not any(p in frame.filename for frame in frames for p in _REFERENCES):
        return error
    with for_real(), random.preserved():
        try:
            args, kwargs = _zeros((args, kwargs), lambda n: hints((n,))[0], _MOST_ELEMENTS)
            func(*args, **kwargs)
        except NotAsked:
            return error
        except Exception as real:
            return real
    return error


def is_refusal(error: BaseException) -> bool:
    """Has a kernel said that it is not made for such arguments?"""
    return isinstance(error, NotImplementedError) and _REFUSED in getattr(error, "__notes__", ())


def _zeros(values: Any, number: Callable[[Any], int], most: int) -> Any:
    """Arguments with real zeros in place of recorded tensors."""
    total, count = 0, 0

    def real(value: Any) -> Any:
        nonlocal total, count
        if isinstance(value, torch.SymInt):
            return number(value)
        if isinstance(value, torch.SymFloat) and value.node.hint is not None:
            return float(value.node.hint)
        if isinstance(value, torch.SymFloat | torch.SymBool | torch.Generator):
            raise NotAsked
        if isinstance(value, types.FunctionType):
            raise NotAsked
        if not isinstance(value, torch.Tensor):
            return value
        fake = isinstance(value, FakeTensor)
        if not (fake or functional.is_wrapped(value)) or value.layout is not torch.strided:
            raise NotAsked
        size, stride = tuple(map(number, value.size())), tuple(map(number, value.stride()))
        total, count = total + max(reach(size, stride), math.prod(size)), count + 1  # it may be expanded
        if total > most or value.is_quantized:
            raise NotAsked
        device = value.fake_device if isinstance(value, FakeTensor) else value.device
        room = torch.empty_strided(size, stride, dtype=value.dtype, device=device).zero_()
        return room.conj() if value.is_conj() else room

    values = pytree.tree_map(real, values)
    if not count:
        raise NotAsked
    return values
