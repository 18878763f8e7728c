"""What a recording tells by names of functions, of autograd's nodes, and by texts of errors.

Schemas, tags and types tell everything else. Each line here says what torch has none of those for.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from aheadgrad.torchlayer.dispatch import OpOverloadPacket

# ---- functions: what is called is known above the ops, where there are no schemas -----------------

NEEDS_VALUE = {  # elements leave torch
    torch.Tensor.numpy: "Tensor.numpy()",
    torch.Tensor.tolist: "Tensor.tolist()",
    torch.Tensor.__array__: "numpy conversion",
    torch.Tensor.data_ptr: "Tensor.data_ptr()",
    torch.Tensor.__dlpack__: "DLPack",
    torch.Tensor.__repr__: "printing a tensor",
    torch.Tensor.apply_: "Tensor.apply_()",
    torch.Tensor.map_: "Tensor.map_()",
    torch.Tensor.map2_: "Tensor.map2_()",
}
COPIES_MEMORY: set[Any] = {torch.Tensor.__deepcopy__, torch.Tensor.__reduce_ex__}  # a storage, not a tensor
COPIES_ALWAYS = {"clone", "__deepcopy__", "__copy__"}  # others copy (`contiguous`) only if a size asks for it

# Checks that a kernel makes by itself before it writes; fake tensors make none of them.
NO_OVERLAP_AT_ALL = set(
    "index_put_ index_add_ index_copy_ scatter_ scatter_add_ masked_scatter_ put_".split()
)
ALLOWED_ON_EXPANDED = set("zero_ fill_ index_fill_ masked_fill_ index_put_ masked_scatter_".split())
CASTS_FREELY = set("copy_ fill_ masked_fill_ __setitem__ zero_ random_ bernoulli_".split())

SAVE_FOR_SIZES = {"index_add_", "index_copy_"}  # autograd keeps an argument of which its formula reads a size
STORAGE_OPS = {"set_", "resize_", "resize_as_", "resize_storage_bytes_"}  # no tag tells them from `t_`


@functools.cache
def _reshapes(name: str) -> bool:
    """Is this an op that changes sizes, strides or memory in place?"""
    op = getattr(torch.ops.aten, name, None)  # (of a name like `__eq__`, something else of Python's)
    names = op.overloads() if isinstance(op, OpOverloadPacket) else ()
    return any(torch.Tag.inplace_view in getattr(op, o).tags for o in names)


def writes(func: Any, kwargs: dict[str, Any]) -> bool:
    """Does a call change one of its arguments in place, and leave its strides alone?"""
    name = getattr(func, "__name__", "")
    if name.endswith("_"):
        if name == "requires_grad_" or _reshapes(name):
            return False
        return not name.endswith("__") or name == "__setitem__" or name.startswith("__i")
    return kwargs.get("out") is not None or kwargs.get("inplace") is True


def writes_a_list(func: Any) -> bool:
    """Is this `_foreach_mul_` or the like? Functionalization writes all of a list at once."""
    name = getattr(func, "__name__", "").partition(".")[0]
    return bool(name.startswith("_foreach_") and name.endswith("_"))


def attends(func: Any) -> bool:
    """Is this attention, of which settings choose the kernel? There are several functions and ops of it."""
    return "attention" in getattr(func, "__name__", "")


# ---- nodes: autograd has classes for them, and Python sees their names --------------------------

# Their recorded formula does without the result, as it may not look for zeros in the input.
RESULT_NOT_USED = {"ProdBackward0", "ProdBackward1", "CumprodBackward0"}
HOLDS_UNSEEN = "CopySlices"  # a node inside it holds what it saved
HOOK_OF_MODULE = "BackwardHookFunctionBackward"  # is called whether or not there is a gradient
ENTERED = "EnterBackward"  # of `entrances.Enter`

# ---- views and errors of torch's that have no class of their own --------------------------------

UNFOLDED = "unfold_ViewMeta"  # a base that is written through it is put together anew

NOT_ALLOCATED = "its data is not allocated yet"  # memory is read, of which there is none
NOT_RECORDED = "FunctionalTensorWrapper"  # an op that nothing is known of is asked for its kernel
FOREIGN_TENSORS = ("Please convert all Tensors to FakeTensors first", "Mixing fake modes")
SAYS = (  # what torch says where a recording fails, and what it means
    (
        "are out of bounds for storage of size",
        "autograd addresses memory that the recorded tensors do not have",
    ),
    (
        "Found a custom (non-ATen) operator whose output has alias annotations",
        "a custom op that changes its arguments is called out of our sight",
    ),
    ("INTERNAL ASSERT FAILED", "autograd cannot replay the views of this function"),
    ("cannot mutate tensors with frozen storage", "memory that an input had before set_ is written to"),
    (
        "Attempted to resize a view tensor to a larger size",
        "an input or a view is resized to hold more elements",
    ),
    ("on an invalid python storage", "the memory of a tensor is read or written through its storage"),
    ("because it has weakref associated with it", "two tensors are swapped"),
    ("as_strided() is non-compositional", "a view made with as_strided from another view is written to"),
)
