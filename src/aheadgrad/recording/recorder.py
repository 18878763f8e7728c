"""The recording mode: sits under functionalization and writes down every functional op."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from aheadgrad.errors import DataDependentError, FallbackError
from aheadgrad.program.values import Origin, Region
from aheadgrad.recording import zeros
from aheadgrad.recording.environment import Ambient
from aheadgrad.recording.known_values import Unknown, Values
from aheadgrad.recording.ledger import Ledger
from aheadgrad.recording.records import Trace
from aheadgrad.recording.sameness import Sameness
from aheadgrad.report.origins import current_origin
from aheadgrad.torchlayer import functional
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.autograd import (
    AutogradNode,
    changes_what_is_saved,
    nodes_made,
    running_node,
    saved_tensor_hooks,
)
from aheadgrad.torchlayer.checkpoint import Regions, watching_regions
from aheadgrad.torchlayer.control_flow import with_graphs
from aheadgrad.torchlayer.decompositions import ALWAYS
from aheadgrad.torchlayer.dispatch import (
    HigherOrderOperator,
    OpOverload,
    TorchDispatchMode,
    is_mutable,
    no_function_modes,
    tells_time,
)
from aheadgrad.torchlayer.distributed import is_hidden_collective, waiting_for
from aheadgrad.torchlayer.evalframe import hide_from_dynamo
from aheadgrad.torchlayer.fake import DATA_DEPENDENT_ERRORS, FakeTensor, FakeTensorMode
from aheadgrad.torchlayer.fxmeta import current_node_meta
from aheadgrad.torchlayer.kernels import ask_kernel
from aheadgrad.torchlayer.memory import is_borrowed
from aheadgrad.torchlayer.opcache import OpCache
from aheadgrad.torchlayer.stand_ins import StandIns
from aheadgrad.torchlayer.strides import in_order_of, in_same_order
from aheadgrad.torchlayer.symbols import is_symbolic
from aheadgrad.torchlayer.unbacked import DynamicOutputShapeException, decides_sizes

_DEVICE_OF = torch.ops.prim.device.default
_CONVERSIONS = {torch.ops.aten._to_sparse.default, torch.ops.aten._to_dense.default}
_SCALAR_TENSOR = torch.ops.aten.scalar_tensor.default
LIFT_FRESH = torch.ops.aten.lift_fresh.default
_MOST_ELEMENTS = 1 << 22  # that a kernel is asked about
_LIFT_FRESH_COPY = torch.ops.aten.lift_fresh_copy.default


class Recorder(TorchDispatchMode):
    """Computes each op on fake tensors and appends it to the trace."""

    supports_higher_order_operators = True
    asking = 0  # inside the code of tensor subclasses (see `veils`)

    def __init__(
        self,
        trace: Trace,
        mode: FakeTensorMode,
        decompositions: Mapping[Any, Callable[..., Any]],
        adopt: Callable[[Tensor], Tensor],
        ambient: Ambient,
        values: Values,
        ledger: Ledger,
        asserted: Callable[[], None],
    ) -> None:
        super().__init__()
        self.ambient = ambient
        self.values = values
        self.ledger = ledger
        self.trace = trace
        self.mode = mode
        self.ops = OpCache(mode)
        self.decompositions = {**ALWAYS, **decompositions}
        self.adopt = adopt
        self.asserted = asserted  # called after an op without results, which may assert something
        self.zeros = zeros.Zeros()
        self.sameness = Sameness(trace)
        self.origins: dict[int, Origin | None] = {}  # by number, of autograd nodes
        self.regions = Regions()
        self.regions_of_nodes: dict[int, Region] = {}
        self.users_code = False  # does the user's function run?
        self.borrowed: set[Any] = set()  # storages of constants in memory of somebody else's
        self.plain = False  # inside a decomposition that is run without functionalization
        self.stand_ins: StandIns | None = None  # numbers that C++ was given for symbolic sizes
        self.asked_by_torch = False  # may it be given some now?

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE_OF:
            return args[0].fake_device
        func = waiting_for(func)
        if is_hidden_collective(func):
            raise FallbackError(
                f"{func} exchanges tensors with other processes in place, which a recording does not see; "
                'use functional collectives, or frontend="dynamo"'
            )
        if self.stand_ins is not None:
            numbers = self.stand_ins.answer(func, args) if self.asked_by_torch else None
            if numbers is not None:
                return numbers
            args = self.stand_ins.meaning(args)
            kwargs = {k: self.stand_ins.meaning(v) for k, v in kwargs.items()}
        if self.plain and is_mutable(func):
            raise _Writes
        if func in self.decompositions:
            out = self._decomposed(func, args, kwargs)
            if out is not NotImplemented:
                return out if self.plain else self._laid_out(func, args, kwargs, out)
        if self.plain and isinstance(func, OpOverload):
            with self:  # what functionalization would have taken apart before it came here
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        if isinstance(func, HigherOrderOperator):
            args, out = with_graphs(self.mode, func, args, kwargs)
        elif func is LIFT_FRESH and not isinstance(args[0], FakeTensor):
            return self._constant(args[0])
        elif func is zeros.MADE or self.zeros:
            func, args, kwargs, out = self._with_zeros(func, types, args, kwargs)
            if func is zeros.ZEROS and func in self.decompositions:
                out = self._decomposed(func, args, kwargs)
                self.zeros.add(out)
                return out
        else:
            args, kwargs = self._only_fakes(args, kwargs)
            with no_function_modes():  # autograd calls back with function modes on
                try:
                    out = self._compute(func, types, args, kwargs)
                except DATA_DEPENDENT_ERRORS as error:
                    out = self._by_value(func, args, kwargs, error)
        if func is _SCALAR_TENSOR and out.dtype is torch.int64 and type(args[0]) is int:
            out.constant = torch.tensor(args[0])  # so decisions on it are known, as in `cov`
        if (
            isinstance(out, Tensor | list | tuple)
            or is_symbolic(out)
            or (out is None and not tells_time(func))
        ):
            self._add(func, args, kwargs, out)
        if out is None:
            self.asserted()
        return out

    def _compute(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The op's result; under a default dtype of the function's own only if it does not depend on that.

        (`torch._numpy` computes under numpy's default dtype, mostly with dtypes that are given.)
        """
        if self.trace.sized and decides_sizes(func):  # the same values decide the same
            first = self.sameness.first_of
            args = pytree.tree_map(lambda v: first(v) if isinstance(v, FakeTensor) else v, args)
        if not self.ambient.other_dtype:
            return self.ops.compute(func, types, args, kwargs)
        out = self.mode.dispatch(func, types, args, kwargs)
        with self.ambient.usual_dtype():
            usual = self.mode.dispatch(func, types, args, kwargs)
        if _dtypes(out) != _dtypes(usual):
            self.ambient.refuse_dtype()
        return out

    def _by_value(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: BaseException
    ) -> Any:
        """The result of an op that depends on values, where those are known."""
        try:
            return self.values.result(func, args, kwargs)
        except Unknown:
            node = running_node()
            of_size = isinstance(error, DynamicOutputShapeException) and not self.trace.sized
            if self.trace.phase == "forward" or node is None or of_size:
                raise error from None  # to be recorded again, if values decide on sizes only
            raise self._undecided(func, node) from error

    def _with_zeros(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An op that makes, or may be given, zeros that autograd knows to be zero."""
        args, kwargs = self._only_fakes(args, kwargs)
        known = func is zeros.MADE
        with no_function_modes():
            if known:
                func = zeros.ZEROS
            out = self._compute(func, types, args, kwargs)
            if self.zeros.absorbs(func, args):
                known = True
                func, args, kwargs = self.zeros.like(out)
                out = self.ops.compute(func, types, args, kwargs)
        if known:
            self.zeros.add(out)
        self.zeros.follow(func, args, out)
        return func, args, kwargs, out

    def _add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        meta, region = current_node_meta(), None
        if self.trace.phase == "forward":
            node, origin = None, current_origin()
            _check_layouts(func, args, out)
            if self.users_code:
                self._check_hooks()
                now = self.regions.now(meta)
                if now is not None:
                    region = Region(*now)
                    self.regions_of_nodes.setdefault(nodes_made() - 1, region)
        else:
            node = running_node()
            number = -1 if node is None else node.number
            origin, region = self.origins.get(number), self.regions_of_nodes.get(number)
        self.origins.setdefault(nodes_made() - 1, origin)
        self.trace.add(func, args, kwargs, out, origin, meta, node, region)

    def _undecided(self, func: Any, node: AutogradNode) -> DataDependentError:
        """For a derivative that asks for values; it is torch's formula that asks, no line of the user's."""
        origin = self.origins.get(node.number)
        where = origin.place if origin else "a line that is not known"
        return DataDependentError(
            f"A derivative needs the value of a tensor to decide what to do: {node.name} calls {func}."
            f"\n  at {where}\n"
            "While a derivative is recorded its tensors have no values. Instead:\n"
            "  1. compute this derivative with the function itself, uncompiled;\n"
            "  2. write the line with operations whose derivatives take one way only;\n"
            "  3. in an autograd.Function of your own, choose with torch.where(condition, a, b)."
        )

    @contextmanager
    def running_users_code(self) -> Iterator[None]:
        """While the user's function runs: ops that save tensors through hooks of its own raise."""
        self.hooks = self.regions.outer = saved_tensor_hooks()
        self.users_code = True
        try:
            with watching_regions(lambda: len(self.trace.records), self.trace.save_from):
                yield
        finally:
            self.users_code = False

    def _check_hooks(self) -> None:
        hooks = saved_tensor_hooks()
        if hooks is None or not torch.is_grad_enabled():
            return
        if (self.hooks is None or hooks[0] is not self.hooks[0]) and changes_what_is_saved(hooks):
            raise FallbackError("saved-tensor hooks are set inside the function; set them around the call")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # saves the import of Dynamo

    def _constant(self, value: Tensor) -> Any:
        """`torch.tensor([1, 2])` inside the function: the value is part of the graph.

        Old constructors, `torch.Tensor([1, 2])`, come here with function modes on: these would take the
        real tensors that the fake mode works with for the user's.
        """
        if functional.is_wrapped(value):
            raise FallbackError("a tensor of the function comes back as a new constant")
        with no_function_modes():
            out: Any = self.mode.dispatch(LIFT_FRESH, (), (value,), {})
            if is_borrowed(value):
                self.borrowed.add(functional.storage_key(out))
        self.trace.constant(value)
        self._add(_LIFT_FRESH_COPY, (value,), {}, out)
        return out

    def _only_fakes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Real tensors that reach this level were closed over below Python: make them inputs."""
        for value in args:
            if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
                break
            if isinstance(value, list | tuple) and any(
                isinstance(v, Tensor) and not isinstance(v, FakeTensor) for v in value
            ):
                break
        else:
            if not any(isinstance(v, Tensor) and not isinstance(v, FakeTensor) for v in kwargs.values()):
                return args, kwargs

        def swap(value: Any) -> Any:
            if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
                return self.adopt(value)
            return value

        return pytree.tree_map(swap, (args, kwargs))

    def _decomposed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a decomposition under this recorder again; functionalized only if it writes."""
        lower = self.decompositions[func]
        length, before = len(self.trace.records), self.plain
        self.plain = True
        try:
            with self:
                return lower(*args, **kwargs)
        except _Writes:
            if before:
                raise
            self.trace.rewind(length)
        finally:
            self.plain = before
        return self._functionalized(lower, args, kwargs)

    def _laid_out(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        """What a decomposition made, with the strides that the op gives it, which the user may see. Where a
        look at the op says that these may be others, its kernel decides."""
        if self.trace.phase != "forward" or self.trace.sized:
            return out
        made, structure = pytree.tree_flatten(out)
        if all(not isinstance(t, Tensor) or t.dim() < 2 for t in made):
            return out
        try:
            usual = pytree.tree_leaves(self.ops.compute(func, (), args, kwargs))
            if all(map(in_same_order, made, usual)):
                return out
            usual = pytree.tree_leaves(ask_kernel(func, args, kwargs, most=_MOST_ELEMENTS))
        except Exception:  # it cannot be computed as it is, or its kernel cannot be asked
            return out
        with self:
            return pytree.tree_unflatten([*map(in_order_of, made, usual)], structure)

    def _functionalized(
        self, lower: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        def up(value: Any) -> Any:
            return functional.wrap(value) if isinstance(value, Tensor) else value

        def down(value: Any) -> Any:
            traced = isinstance(value, Tensor) and functional.is_wrapped(value)
            return functional.latest(value) if traced else value

        wrapped_args, wrapped_kwargs = pytree.tree_map(up, (args, kwargs))
        with self, functional.again():
            return pytree.tree_map(down, lower(*wrapped_args, **wrapped_kwargs))


hide_from_dynamo(Recorder.__torch_dispatch__)


def _dtypes(out: Any) -> list[torch.dtype]:
    return [t.dtype for t in (out if isinstance(out, list | tuple) else (out,)) if isinstance(t, Tensor)]


class _Writes(Exception):
    """A decomposition changes a tensor in place."""


def _check_layouts(func: Any, args: tuple[Any, ...], out: Any) -> None:
    """Before an op of the function is recorded: a tensor may become sparse and dense again, and no more.

    Functionalization loses the transposition of sparse tensors, and fake ones have no elements. (A gradient
    may be sparse: nothing follows upon it.)
    """
    for t in (*args, *(out if isinstance(out, list | tuple) else (out,))):
        if isinstance(t, Tensor) and t.layout is not torch.strided and func not in _CONVERSIONS:
            kind = str(t.layout).removeprefix("torch.")
            raise FallbackError(f"{func} on a {kind} tensor, which a recording cannot follow")
