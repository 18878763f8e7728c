"""Values that the trace puts at an offset in memory, in a program that does not care where they are.

After `x.mul_(2)` the trace gives an input its offset back (see `layouts`): in a room of everything before it,

    as_strided(as_strided_scatter(empty(room), mul, size, stride, offset), size, stride, offset)

which is `mul`, unless somebody addresses that memory. A program would make the room at each call.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from aheadgrad.program.slots import Saved, Slot, UpdatedInput
from aheadgrad.torchlayer.dispatch import is_view_op
from aheadgrad.torchlayer.fake import FakeTensor

_aten = torch.ops.aten
_AS_STRIDED = _aten.as_strided.default
_SCATTER = _aten.as_strided_scatter.default
_ADDRESSES = (_AS_STRIDED, _SCATTER)


def is_seen(slot: Slot) -> bool:
    """Does the caller get to see the memory of what leaves in this place, and not only its elements?"""
    return not isinstance(slot, UpdatedInput | Saved)


def without_rooms(graph: fx.Graph, handed_out: Collection[fx.Node]) -> None:
    """Takes such rooms out of a graph; `handed_out` are nodes whose memory the caller gets to see."""
    for node in list(graph.nodes):
        if node.target is not _AS_STRIDED or node in handed_out:
            continue
        room = node.args[0]
        if room.target is not _SCATTER or room.args[2:] != node.args[1:] or len(room.users) > 1:
            continue
        value = room.args[1]
        if (
            len(value.users) == 1
            and _looks_like(value, node)
            and _is_new(room.args[0])
            and not _addressed(node)
        ):
            node.replace_all_uses_with(value)
            for dead in (node, room, *_chain(room.args[0])):
                graph.erase_node(dead)


def _looks_like(value: fx.Node, node: fx.Node) -> bool:
    a, b = value.meta.get("val"), node.meta.get("val")
    if not isinstance(a, FakeTensor) or not isinstance(b, FakeTensor) or value.op == "placeholder":
        return False
    return (a.size(), a.stride()) == (b.size(), b.stride()) and not is_view_op(value.target)


def _chain(node: fx.Node) -> list[fx.Node]:
    """From a node to the memory it stands for, through aliases of which nobody else knows."""
    found = [node]
    while found[-1].target is _aten.detach.default:
        found.append(found[-1].args[0])  # type: ignore[arg-type]
    return found


def _is_new(node: fx.Node) -> bool:
    chain = _chain(node)
    return chain[-1].target is _aten.empty.memory_format and all(len(n.users) == 1 for n in chain)


def _addressed(node: fx.Node) -> bool:
    """Is its memory addressed, through itself or a view of it?"""
    return any(u.target in _ADDRESSES or (is_view_op(u.target) and _addressed(u)) for u in node.users)
