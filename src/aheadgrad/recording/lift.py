"""The function mode above autograd: closed-over tensors, and calls that need help.

- A real tensor that the user's code reaches (a global, a module's attribute, an optimizer's state)
  becomes a hidden input: its value is read at each call and gradients reach it.
- An in-place op keeps the strides of what it writes to, as in eager (`ledger`).
- Asking for a tensor's value in Python cannot be recorded and raises an error that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aheadgrad.errors import AheadgradError, FallbackError
from aheadgrad.facts.facts import Reshape
from aheadgrad.recording.control_flow import controlled
from aheadgrad.recording.custom_ops import call_changing, changes_arguments
from aheadgrad.recording.geometry import flattest
from aheadgrad.recording.known_values import Unknown, ValueNeeded
from aheadgrad.recording.ledger import InPlace, Written
from aheadgrad.recording.overlaps import check_casts, check_memory, last_write
from aheadgrad.recording.recorder import LIFT_FRESH
from aheadgrad.recording.records import tensors_among
from aheadgrad.recording.refusals import (
    check_bounds,
    check_leaf_view,
    check_reach,
)
from aheadgrad.recording.reshaping import OUT_OF_PLACE, reshape
from aheadgrad.recording.substitutes import SUBSTITUTES, counted, set_item
from aheadgrad.recording.told_by_name import COPIES_MEMORY, NEEDS_VALUE, SAVE_FOR_SIZES, attends, writes
from aheadgrad.torchlayer import functional
from aheadgrad.torchlayer.autograd import is_view, set_grad_enabled, version
from aheadgrad.torchlayer.dispatch import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    TorchFunctionMode,
    as_called,
    in_transform,
    only_overload,
    transform_level,
)
from aheadgrad.torchlayer.fake import DATA_DEPENDENT_ERRORS
from aheadgrad.torchlayer.kernels import error_of_function
from aheadgrad.torchlayer.letting_go import let_go_of_locals
from aheadgrad.torchlayer.subclasses import is_foreign
from aheadgrad.torchlayer.transforms import set_aside

if TYPE_CHECKING:
    from aheadgrad.recording.session import Session

_GRAD_FIELD: Any = torch.Tensor.grad
_GET_GRAD = _GRAD_FIELD.__get__
_ITEM = torch.Tensor.item
_FIELDS: Any = torch.Tensor
_ASKS_AUTOGRAD = {f.__get__ for f in (_FIELDS.requires_grad, _FIELDS.is_leaf, _FIELDS.grad_fn)}
_USES_GRAD_FIELD = {
    torch.Tensor.backward: "backward() is called",
    torch.autograd.backward: "backward() is called",
    torch.Tensor.retain_grad: "retain_grad() is called",
    _GET_GRAD: "the .grad of an input is read",
    _GRAD_FIELD.__set__: "a .grad is set",
}
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_AS_STRIDED: set[Any] = {torch.Tensor.as_strided, torch.as_strided}
_ADDRESSES: set[Any] = {*_AS_STRIDED, torch.Tensor.as_strided_, torch.as_strided_}
_STORAGE_CHANGES: set[Any] = {_SET_DATA, torch.Tensor.resize_}  # (`set_` does not come by here)
_RESIZES_AS: set[Any] = {torch.Tensor.resize_as_, torch.resize_as_}
_RESIZES: set[Any] = {torch.Tensor.resize_, torch.Tensor.as_strided_, torch.as_strided_}
_DETACHES: set[Any] = {torch.Tensor.detach_, torch.detach_}
_SETS_GRAD: set[Any] = {torch.Tensor.requires_grad_, _FIELDS.requires_grad.__set__}


class Lift(TorchFunctionMode):
    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self.reading = False  # are values asked for the only calls of interest?

    @contextmanager
    def only_reads(self) -> Iterator[None]:
        """While a backward runs, where torch and the user's own code (hooks, custom functions) are called."""
        before, self.reading = self.reading, True
        try:
            yield
        finally:
            self.reading = before

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if type(func) is FunctionType:
            func = as_called(func)
        if self.reading:
            return self._read(func, args, kwargs) if func in NEEDS_VALUE else counted(func, args, kwargs)
        self.session.ambient.check()
        if self.session.ambient.inference and torch.is_grad_enabled() and func is not set_grad_enabled:
            with torch.no_grad():  # nothing has a history in inference mode, whatever grad mode says
                return self.__torch_function__(func, types, args, kwargs)
        if self.session.recorder.asking or func is LIFT_FRESH:
            return func(*args, **kwargs)  # a subclass' own code; a new tensor that a mode hands on
        if func in _USES_GRAD_FIELD and not self.session.whole:
            self._refuse_grad_field(func, args)
        if func in NEEDS_VALUE or (func is _ITEM and self.session.whole):
            return self._read(func, args, kwargs)
        if func in COPIES_MEMORY:
            raise FallbackError("a tensor is copied with its storage (copy, deepcopy, pickle, torch.save)")
        args = self._swap_all(args)
        if kwargs:
            kwargs = {k: self._swap(v) for k, v in kwargs.items()}
            if kwargs.get("generator") is not None:
                self.session.check_generator(kwargs["generator"])
        if transform_level() is not None:
            return self.session.following(partial(func, *args, **kwargs))  # on wrappers around our tensors
        if func in _RESIZES_AS and len(args) == 2:  # of which functionalization makes no new size
            func, args = torch.Tensor.resize_, (args[0], args[1].size())
        ledger = self.session.ledger
        given: Any = args[0] if args else None
        if func in _ADDRESSES and isinstance(given, Tensor):
            check_bounds(self.session, ledger.current(given), *args[1:], **kwargs)
        if ledger.has_reshapes and torch.is_grad_enabled():
            ledger.note_doubts(tensors_among((*args, *kwargs.values())))
        if func in OUT_OF_PLACE or func in _RESIZES:
            if self._reshapes(func, given, args, kwargs):
                return given
        elif (func in _DETACHES or func in _SETS_GRAD) and self._cuts_off(func, given, args, kwargs):
            return given
        if ledger.disguised:
            args, kwargs = ledger.all_current(args), ledger.all_current(kwargs)
        if ledger.has_stale:
            for t in tensors_among((*args, *kwargs.values())):
                ledger.check_use(t)
        ledger.settle((args, kwargs))
        before = len(self.session.trace.records)
        out = self._explained_call(func, args, kwargs)
        if self.session.trace.numbers:
            self.session.open_sizes.note_copy(func, given, out, self.session.trace.records[before:])
        if ledger.has_reshapes and torch.is_grad_enabled():
            ledger.note_writes(tensors_among((*args, *kwargs.values())))
        ledger.note(out, args)
        self.session.limits.views(out)
        if ledger.disguised:
            out = ledger.originals(out)
        self.session.handed.make(out)
        return given if given is not None and out is args[0] else out

    def _refuse_grad_field(self, func: Any, args: tuple[Any, ...]) -> None:
        """Before `backward()` and the like; the `.grad` of anything but a leaf from outside may be read."""
        if func is not _GET_GRAD or self.session.is_leaf_input(args[0]):
            raise FallbackError(
                f"{_USES_GRAD_FIELD[func]} inside the function; torch.autograd.grad is recorded"
            )

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A value leaves torch; known ones can."""
        given: Any = args[0] if args else None
        if self.reading and not (isinstance(given, Tensor) and functional.is_wrapped(given)):
            return func(*args, **kwargs)
        try:
            if func is torch.Tensor.data_ptr or (func is not torch.Tensor.tolist and given.requires_grad):
                raise Unknown
            value = self.session.values.of(self.session.ledger.current(given))
        except Unknown:
            if func is _ITEM:
                return self._explained_call(func, args, kwargs)
            raise ValueNeeded(
                f"{NEEDS_VALUE[func]} needs the value of a tensor, which is not known while the function is "
                "recorded"
            ) from None
        with functional.outside():
            return func(value.clone(), *args[1:], **kwargs)

    def _explained_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        records = len(self.session.trace.records)
        try:
            return self._call(func, args, kwargs)
        except DATA_DEPENDENT_ERRORS as error:
            if not self.session.follow(error):
                self.session.refused = error  # type: ignore[assignment]
                raise
            let_go_of_locals(error)
        except AheadgradError:
            raise
        except Exception as error:
            told = error_of_function(func, args, kwargs, error)
            if told is error:
                raise
            raise told from error
        self.session.trace.rewind(records)  # its results have sizes that values decide, from now on
        return self._explained_call(func, args, kwargs)

    def _reshapes(self, func: Any, given: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Before a change of shape in place. Is it done by now?"""
        session, ledger = self.session, self.session.ledger
        if isinstance(given, Tensor):
            session.limits.parted(given)
        if func in OUT_OF_PLACE and isinstance(given, Tensor):
            check_leaf_view(session, given)
            session.limits.new_shape(given)
            ledger.check_use(given)
        session.limits.new_size(given, args[1:] if func in _RESIZES else None)
        if func not in OUT_OF_PLACE:
            return False
        ledger.settle(ledger.current(given))  # the new shape is made from this one
        if is_foreign(given):
            if ledger.current(given) is not given:
                raise FallbackError("a tensor subclass is cut off from its history and changes its shape")
            call = Reshape(func, args[1:], kwargs, torch.is_grad_enabled())
            ledger.of(given).reshapes.append(InPlace(given, call, version(given) + 1))
            ledger.has_reshapes = True
            return False
        return reshape(ledger, func, given, args[1:], kwargs)

    def _cuts_off(self, func: Any, given: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Before a history ends (`detach_`) or a leaf begins (`requires_grad_`). Is that done by now?"""
        session, ledger = self.session, self.session.ledger
        if func in _DETACHES:
            session.must_be_no_view(given)
        else:
            session.limits.new_leaf(given, wanted=_wanted(args, kwargs) is not False)
        cuts = self._cuts(func, given, args, kwargs)
        seen = ledger.given(given) or ledger.has_views(given)
        if cuts or (func in _DETACHES and given.requires_grad and seen):
            session.limits.end_of_history(given, of_leaf=func in _SETS_GRAD)
        if cuts:
            current = ledger.current(given)
            if current.numel() != given.numel():
                raise FallbackError("a tensor that as_strided_ shrank or grew is cut off from its history")
            ledger.settle(current)
            ledger.disguise(
                given, current.detach(), tracked=False
            )  # gradients of what was done still reach it
        return cuts

    def _cuts(self, func: Any, given: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Is a tensor cut off from its history, although what was done with it before still counts?"""
        if func in _DETACHES:
            if self.session.ledger.current(given) is not given and not is_view(given):
                return True
        elif _wanted(args, kwargs) is not False:
            return False
        return self.session.entrance_of(given) is not None and given.is_leaf and given.requires_grad

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if type(func) in (OpOverload, OpOverloadPacket):
            op = only_overload(func)
            if changes_arguments(op):
                return call_changing(self.session, op, args, kwargs)
        if isinstance(func, HigherOrderOperator):
            out = controlled(self.session, func, args, kwargs)
            if out is not NotImplemented:
                return out
        if func is torch.Tensor.storage_offset and not self.session.is_new(args[0]):
            self.session.reads_offsets = True
        if func is torch.Tensor.register_hook:
            self.session.hooked = True
        if attends(func):
            self.session.attends = True
        if func in _ASKS_AUTOGRAD and (self.session.ambient.grad_was_on or not self.session.is_new(args[0])):
            self.session.asks_autograd = True  # of a new tensor made with grad mode off, all is known
        if func in _STORAGE_CHANGES and args and isinstance(args[0], Tensor):
            if func != torch.Tensor.resize_:
                raise FallbackError("the .data of a tensor is set (copy into it instead)")
            self.session.watch_storage(args[0])
        if func in _AS_STRIDED and isinstance(args[0], Tensor):
            flat, place = flattest(args[0]), _explicit_offset(*args, **kwargs)
            if flat is not args[0]:
                check_reach(args[0], *place)
            args, kwargs = (flat, *place), {}
        substitute: Callable[..., Any] | None = SUBSTITUTES.get(func)
        if substitute is not None:
            return substitute(*args, **kwargs)
        return (self._write if writes(func, kwargs) else counted)(func, args, kwargs)

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that changes an argument in place, or `out`."""
        ledger, sets_item = self.session.ledger, func is torch.Tensor.__setitem__
        written = [ledger.before_write(t) for t in _destinations(args, kwargs)]
        name = getattr(func, "__name__", "")
        if sets_item:
            name = _check_item(*args)
        for t, *_ in written:
            self.session.limits.write(t)
            check_leaf_view(self.session, t)
            if not sets_item:
                self.session.must_not_get_a_second_history(t)
        if not sets_item and len(written) == 1:
            others = args if kwargs.get("out") is not None else args[1:]
            check_memory(name, written[0][0], tensors_among(others))
        records = self.session.trace.records
        before = len(records)
        out = None
        if sets_item:
            set_item(*args)
        elif kwargs.get("out") is not None:
            out = self._call_out(func, args, kwargs, written)
        else:
            out = counted(func, args, kwargs)
        check_casts(name, records[before:])
        for t, geometry, siblings in written:
            ledger.written(t, geometry, siblings)
            if name in SAVE_FOR_SIZES:
                self.session.note_hidden(t, tensors_among(args[1:]))
        return out

    def _call_out(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Written]
    ) -> Any:
        """`out=` resizes what does not fit. Only a tensor that shares memory with nobody may be replaced."""
        records = self.session.trace.records
        before = len(records)
        try:
            return func(*args, **kwargs)
        finally:
            last = last_write(records[before:])
            made = [] if last is None else tensors_among((last.out,))
            for (t, geometry, siblings), new in zip(written, made, strict=False):
                alone = not (siblings or is_view(t) or functional.view_steps(t)) and self.session.is_new(t)
                if not alone and tuple(new.size()) != geometry.size:
                    raise FallbackError("out= resizes an input or a view")

    def _swap_all(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        for value in values:
            if not isinstance(value, int | float | str | torch.dtype) and (
                not isinstance(value, Tensor) or not functional.is_wrapped(value)
            ):
                return tuple(self._swap(v) for v in values)
        return values

    def _swap(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            ours = functional.is_wrapped(value) or in_transform(value)
            if ours:
                return value
            with set_aside():
                return self.session.lift(value)
        if type(value) in (list, tuple):
            return type(value)(self._swap(v) for v in value)
        if type(value) is dict:
            return {k: self._swap(v) for k, v in value.items()}
        return value


def _check_item(t: Tensor, index: Any, value: Any) -> str:
    """`t[index] = value` copies into a slice, if the index can be had as one; which op it amounts to."""
    if any(is_foreign(i) and i.dim() == 0 and i.dtype is torch.bool for i in tensors_among((index,))):
        raise FallbackError("a tensor subclass is indexed with a single truth value, which torch looks at")
    if not tensors_among((index,)):
        with torch.no_grad():
            part = t[index]
            if functional.storage_key(part) == functional.storage_key(t):
                check_memory("copy_", part, _copied(value, part))
                return "copy_"
    check_memory("index_put_", t, tensors_among((index, value)))
    return "index_put_"


def _copied(value: Any, part: Tensor) -> list[Tensor]:
    """What a slice is copied from: a tensor of the slice's size. Single numbers are safe anywhere."""
    if not isinstance(value, Tensor) or (value.dim() == 0 and part.dim() > 0):
        return []
    while value.dim() > part.dim() and value.size(0) == 1:
        value = value[0]
    try:
        return [value.expand(part.size())]
    except RuntimeError:  # does not fit, as the assignment itself will say
        return []


def _destinations(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an in-place or `out=` call may write to."""
    found: list[Tensor] = []
    for value in (kwargs["out"],) if kwargs.get("out") is not None else args[:1]:
        several = value if isinstance(value, list | tuple) else (value,)
        found += [t for t in several if isinstance(t, Tensor) and t.layout is torch.strided]
    return found


def _wanted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of `x.requires_grad_(...)`."""
    return args[1] if len(args) > 1 else kwargs.get("requires_grad")


def _explicit_offset(t: Tensor, size: Any, stride: Any, storage_offset: Any = None) -> tuple[Any, Any, Any]:
    return size, stride, t.storage_offset() if storage_offset is None else storage_offset
