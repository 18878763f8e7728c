"""Autograd internals: nodes without ceremony, view flags, version counters, saved-tensor hooks."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

CreationMeta = torch._C._autograd.CreationMeta
creation_meta = torch._C._autograd._get_creation_meta
set_creation_meta = torch._C._autograd._set_creation_meta
set_grad_enabled = torch._C._set_grad_enabled
NodeBase = torch.autograd.Function
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
running_backward: Callable[[], int] = torch._C._current_graph_task_id
"""A number that tells the running backward from others."""
nodes_made: Callable[[], int] = torch.autograd._get_sequence_nr
"""How many autograd nodes this thread made so far; the last one has the number before that."""


def is_view(t: Tensor) -> bool:
    return bool(t._is_view())


def kind_of_view(t: Tensor) -> Any:
    """What autograd lets in-place ops do to a tensor: anything, or as much as its being a view allows."""
    if not t._is_view():
        return None
    base = t._base
    return creation_meta(t), base is not None and base.is_leaf and base.requires_grad


def base_of(t: Tensor) -> Tensor | None:
    """What a tensor is a view of; None if it is none."""
    base: Tensor | None = t._base
    return base


def is_leaf_view(t: Tensor) -> bool:
    """A view that was made a leaf by `requires_grad_()` although its base requires no grad."""
    base = base_of(t)
    if base is None or base.requires_grad:
        return False  # (a view of what has changed since may refuse to tell whether it is a leaf)
    return t.requires_grad and t.is_leaf


def version(t: Tensor) -> int:
    return 0 if t.is_inference() else int(t._version)


def versions(saved: Iterable[Tensor]) -> int:
    """Of tensors that a node has saved, all together: it has changed if one of them has."""
    return sum([t._version for t in saved])


set_versions: Callable[[tuple[Tensor, ...], tuple[int, ...]], None]
set_versions = torch._C._autograd._unsafe_set_version_counter


def set_version(t: Tensor, value: int) -> None:
    set_versions((t,), (value,))


def same_version_counter(a: Tensor, b: Tensor) -> bool:
    """Do writes to one show in the other's version? (`detach()` shares the counter, `.data` does not.)"""
    if a is b:
        return True
    before = b._version
    own = a._version
    set_version(a, own + 1)
    shared = bool(b._version != before)
    set_version(a, own)
    return shared


gives_tangents_away = hasattr(NodeBase, "boxed_grads_call")
"""Can a backward be given its tangents in a list, of which it can take them? (From torch 2.12 or 2.13 on.)"""


def bare_apply(node: type, attributes: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """`Function.apply` of the C base class: skips the Python layer that handles functorch.

    The engine calls the node's backward as it is, without looking for it each time: with a list of tangents,
    where it can (`gives_tangents_away`). `attributes` are those that its `ctx` begins with.
    """
    backward: Any = node.backward  # type: ignore[attr-defined]
    made: Any = node._backward_cls  # type: ignore[attr-defined]
    if gives_tangents_away:
        node.boxed_grads_call = True  # type: ignore[attr-defined]
        made.apply_boxed = backward
        made.apply = lambda ctx, *tangents: backward(ctx, list(tangents))
        made._forward_cls = _WithSeparateTangents(node, made.apply)
    else:
        made.apply = backward
    for name, value in (attributes or {}).items():
        setattr(made, name, value)
    bound: Callable[..., Any] = super(torch.autograd.Function, node).apply  # type: ignore[misc]
    return bound


class _WithSeparateTangents:
    """A node's class for others than the engine (compiled autograd), who do not know of lists."""

    boxed_grads_call = False

    def __init__(self, node: type, backward: Callable[..., Any]) -> None:
        self._node = node
        self.backward = backward

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)


class AutogradNode(NamedTuple):
    """What tells an autograd node from others of its thread, and what it is called."""

    name: str
    number: int


class _Standing(threading.local):
    node: Any = None


_standing = _Standing()


@contextmanager
def in_place_of(node: Any) -> Iterator[None]:
    """Inside, what runs counts as the backward of this node."""
    before, _standing.node = _standing.node, node
    try:
        yield
    finally:
        _standing.node = before


def running_node() -> AutogradNode | None:
    """The node whose backward runs."""
    node = _standing.node or torch._C._current_autograd_node()
    if node is None:
        return None
    kind: Any = type(node)  # a custom function may keep anything under these names on its ctx
    return AutogradNode(kind.name(node), kind._sequence_nr(node))


def number_of(node: Any) -> int:
    return int(node._sequence_nr())


def run_before(node: Any, number: int) -> None:
    """A backward that gets to this node and to the one with that number, which does not depend on it, runs
    this one first. That would be so anyway, but threads number nodes by themselves, and for a GPU the engine
    has its own."""
    if node._sequence_nr() <= number:
        node._set_sequence_nr(number + 1)


def size_in_history(t: Tensor) -> Any:
    """The size that gradients of a tensor have to have: what it was when it got its history."""
    return t.grad_fn._input_metadata[t.output_nr].shape  # type: ignore[union-attr]


def history_now(t: Tensor) -> Any:
    """A node that leads to a tensor as it is now: a leaf's gradients have the size of its first use."""
    with torch.enable_grad():
        return t.view_as(t).grad_fn


def clear_saved(node: Any) -> None:
    """Frees what a Python node saved, if autograd still knows the node."""
    try:
        node.next_functions  # noqa: B018  (torch 2.11 does not check below)
    except RuntimeError:
        return
    node.maybe_clear_saved_tensors()


def edge_metadata(node: Any, number: int) -> tuple[tuple[Any, ...], Any, Any]:
    """Size, dtype and device that gradients have where they arrive at a node."""
    data = node._input_metadata[number]
    return tuple(data.shape), data.dtype, data.device


def runs_python(node: Any) -> bool:
    """Is this the node of a custom function?"""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


@contextmanager
def nodes_without_backward(nodes: list[Any]) -> Iterator[None]:
    """Inside, these custom functions have no gradients, nor do they run to find that out."""
    for node in nodes:
        node.apply = functools.partial(_no_gradients, len(node.needs_input_grad))
    try:
        yield
    finally:
        for node in nodes:
            del node.apply


def _no_gradients(count: int, *_: Any) -> tuple[None, ...]:
    return (None,) * count


def run_backward(outputs: list[Any], leaves: list[Any], tangents: list[Any], *, create_graph: bool) -> Any:
    """`torch.autograd.grad` (of no leaves: a backward that leads nowhere), graph kept, without the
    function modes' knowing: they stay on while the backward runs."""
    return _engine_run_backward(
        tuple(outputs),
        tuple(tangents),
        True,
        create_graph,
        tuple(leaves),
        True,
        accumulate_grad=not leaves,
    )


def unpacked(node: Any, k: int) -> Any:
    """One of the tensors that a Python node saved, checked by itself."""
    return node._raw_saved_tensors[k].data


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Calls back when the backward that is running has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


@contextmanager
def plain_engine() -> Iterator[None]:
    """Backwards run, also where compiled autograd would record them."""
    set_compiler = torch._C._dynamo.compiled_autograd.set_autograd_compiler
    before = set_compiler(None, False)
    try:
        yield
    finally:
        set_compiler(*before)


@contextmanager
def saved_tensor_hooks_off() -> Iterator[None]:
    """Shields a capture from saved-tensor hooks (a user's, or those of a surrounding checkpoint)."""
    before = torch._C._autograd._saved_tensors_hooks_set_tracing(True)
    try:
        yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(before)


def saved_tensor_hooks() -> Any:
    """The innermost pair of saved-tensor hooks that is set, shielded from or not; None without any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def changes_what_is_saved(hooks: Any) -> bool:
    """May these hooks give other values back than they got? Those of torch (checkpoint) do not."""
    return not str(getattr(hooks[0], "__module__", "")).startswith("torch.")
