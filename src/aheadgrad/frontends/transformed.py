"""Calls of a compiled function under transforms of `torch.func`: its graph runs under them, compiled.

    torch.func.vmap(torch.func.grad(fast))(x)

Dynamo compiles nothing while a transform is active. So it is asked with the transforms set aside, and with
stand-ins: plain tensors of the sizes that the function sees. The graph that it finds (always a whole one) is
then called with what they stand for, under the transforms (`transform_levels`). What Python does besides,
Dynamo does. Where it finds no such graph the function itself runs; where that cannot be compiled, the graph.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import local
from typing import Any

import torch
from torch import Tensor, fx

from aheadgrad.errors import FallbackError, reason_of, without_frames
from aheadgrad.frontends.compiled import CompiledFunction
from aheadgrad.frontends.derived import Allowed, Derived
from aheadgrad.frontends.state import held_by, swapped
from aheadgrad.frontends.transform_levels import run_at_levels
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.autocast import any_autocast
from aheadgrad.torchlayer.dispatch import (
    HigherOrderOperator,
    dispatch_restored,
    dual_level,
    duals_hidden,
    in_transform,
)
from aheadgrad.torchlayer.dynamo_ops import say_plainly
from aheadgrad.torchlayer.evalframe import hide_from_dynamo
from aheadgrad.torchlayer.functorch_levels import back_in, depth, kinds, set_aside, takes_part
from aheadgrad.torchlayer.fxmeta import Interpreter, preserved_node_meta


class _Call(local):
    """The call that is under way in this thread: what stand-ins stand for, and the transforms around it."""

    originals: dict[int, Tensor]
    levels: Any = None
    duals = False
    ran = False


class Transformed:
    """Runs calls of one compiled function that come with transforms."""

    def __init__(self, owner: CompiledFunction) -> None:
        from aheadgrad.torchlayer.whole_graphs import whole_graph  # loads Dynamo, which takes its time

        self._owner = weakref.ref(owner)
        self._fn, self._options = owner._fn, owner.options
        self._run = whole_graph(owner._fn, self._graph, owner.options.dynamic, owner.options.max_entries)
        self._call = _Call()
        self._refused = ""  # why nothing is tried any more
        self._graphs: list[Derived] = []

    @property
    def entries(self) -> list[Any]:
        return [entry for graph in self._graphs for entry in graph.entries]

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._refused:
            return self._original(self._refused, args, kwargs)
        if any_autocast():
            return self._original("autocast is on around the call", args, kwargs)
        try:
            out = self._under_way(args, kwargs)
            if not self._call.ran:
                raise FallbackError("Dynamo finds no graph in it")
            return out
        except Exception as error:
            if self._call.ran:
                raise
            reason = reason_of(without_frames(getattr(error, "inner_exception", error)))
        out = self._original(reason, args, kwargs)  # which may raise as well, and try again next time
        self._refused = reason
        return out

    def _original(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = self._fn(*args, **kwargs)
        self._note(reason)
        return out

    def _note(self, reason: str) -> None:
        owner = self._owner()
        if owner is not None:
            owner.fallbacks[f"under a torch.func transform: {reason}"] += 1

    def _under_way(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given, spec = pytree.tree_flatten((args, kwargs))
        places = [p for p in held_by(self._fn) if _takes_part(p.get())]
        wrapped = {id(t): t for t in (*given, *(p.get() for p in places)) if _takes_part(t)}
        looks = {
            key: (t.size(), t.stride(), t.dtype, t.device, t.requires_grad) for key, t in wrapped.items()
        }
        duals = dual_level() >= 0
        with set_aside() as levels, duals_hidden():
            stand_ins = {key: _stand_in(*look) for key, look in looks.items()}
            meant = {id(stand_ins[key]): t for key, t in wrapped.items()}
            with self._known(meant, levels, duals) as originals:
                out = self._seeing(stand_ins, given, spec, places)
                out = pytree.tree_map(lambda v: originals.get(id(v), v), out)
        alive = {id(t): weakref.ref(t) for t in stand_ins.values()}
        stand_ins.clear()
        for key, found in alive.items():
            if found() is not None:
                put_in_place(found(), originals[key])
        return out

    def _seeing(self, stand_ins: dict[int, Tensor], given: list[Any], spec: Any, places: list[Any]) -> Any:
        """The call, with stand-ins in the place of what they stand for."""

        def see(value: Any) -> Any:
            return stand_ins.get(id(value), value)

        args, kwargs = pytree.tree_unflatten(list(map(see, given)), spec)
        with swapped(places, see):
            return self._run(*args, **kwargs)

    @contextmanager
    def _known(self, originals: dict[int, Tensor], levels: Any, duals: bool) -> Iterator[dict[int, Tensor]]:
        now, before = self._call, dict(vars(self._call))
        now.originals, now.levels, now.duals, now.ran = originals, levels, duals, False
        try:
            yield originals
        finally:
            ran = now.ran
            vars(now).clear()
            vars(now).update(before)
            now.ran = ran

    # the graph that Dynamo finds

    def _graph(self, gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        from aheadgrad.torchlayer.whole_graphs import uses_custom_functions

        if any(isinstance(t, Tensor) and in_transform(t) for t in examples):
            raise FallbackError("a tensor of a transform is reached in another way than as an argument")
        for node in gm.graph.nodes:
            name = getattr(node.target, "__module__", None) or ""
            if "functorch" in name or isinstance(node.target, HigherOrderOperator):
                raise FallbackError(f"it calls {getattr(node.target, '__name__', node.target)}")
        if uses_custom_functions():
            raise FallbackError("it uses a custom autograd.Function")
        say_plainly(gm)
        owner = self._owner()
        name = self._fn.__class__.__name__ if owner is None else owner.name
        calm, random = (
            Derived(partial(_interpret, gm), self._options, name, Allowed(random=r)) for r in (False, True)
        )
        self._graphs += [calm, random]

        def run(*inputs: Any) -> Any:
            originals, levels = self._call.originals, self._call.levels
            operands = [originals.get(id(t), t) for t in inputs]
            with back_in(levels), dispatch_restored(), duals_hidden(not self._call.duals):
                self._call.ran = True
                try:
                    return list(run_at_levels(random if _only_batches(operands) else calm, operands))
                except Exception as error:
                    reason = reason_of(without_frames(error))
                out = _interpret(gm, *operands)  # which may raise as well
                self._note(reason)
                return out

        hide_from_dynamo(run)
        return run


def put_in_place(stand_in: Any, original: Tensor) -> None:
    """The function has kept an argument: where it did, the argument belongs."""
    for holder in gc.get_referrers(stand_in):
        if isinstance(holder, dict):
            holder.update((key, original) for key, value in list(holder.items()) if value is stand_in)
        elif isinstance(holder, list):
            holder[:] = [original if value is stand_in else value for value in holder]


def _takes_part(value: Any) -> bool:
    return isinstance(value, Tensor) and (in_transform(value) or dual_level() >= 0)


def _only_batches(operands: Sequence[Any]) -> bool:
    """Are all transforms `vmap`, with something to go over in each? Then nothing runs again."""
    if dual_level() >= 0 or set(kinds()) != {"vmap"}:
        return False
    return len({level for t in operands if isinstance(t, Tensor) for level in takes_part(t)}) == depth()


def _stand_in(size: Any, stride: Any, dtype: torch.dtype, device: Any, requires_grad: bool) -> Tensor:
    """A plain tensor that looks like another one; what is in it does not matter."""
    return torch.empty_strided(size, stride, dtype=dtype, device=device, requires_grad=requires_grad)


def _interpret(gm: fx.GraphModule, *operands: Any) -> Any:
    with preserved_node_meta(), dispatch_restored():
        run = Interpreter(gm)
        run.extra_traceback = False  # errors are those of eager, to the letter
        return run.run(*operands)
