"""Ways to make tensors from Python's data, and ways to their memory: run by `test_memory_of_python`.

As a program it runs every case through one front end and prints a line for each, so that a crash of the
process shows which one it was.
"""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
import torch.utils.dlpack
from torch import Tensor

import aheadgrad

Case = Callable[[Tensor], Any]
ARRAY = np.arange(1, 4, dtype=np.float32)
ROOM = bytearray(ARRAY.tobytes())


def _checkpointed(x: Tensor) -> Any:
    inner = lambda a: a.sin() * torch.Tensor([2.0])  # noqa: E731
    return torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)


def _written_at(x: Tensor) -> Tensor:
    y = x * 1
    y[torch.LongTensor([0])] = torch.Tensor([7.0])
    return y


RECORDED: dict[str, Case] = {
    "one element": lambda x: x * torch.Tensor([0.5]),
    "floats": lambda x: x * torch.FloatTensor([0.5, 1, 2]),
    "doubles": lambda x: x * torch.DoubleTensor([0.5]),
    "halves": lambda x: x * torch.HalfTensor([0.5]),
    "integers": lambda x: x * torch.LongTensor([2]) + torch.IntTensor([1]) + torch.ShortTensor([1]),
    "bytes": lambda x: x * torch.ByteTensor([2]) + torch.CharTensor([1]),
    "truth values": lambda x: torch.where(torch.BoolTensor([True, False, True]), x, torch.Tensor([5.0])),
    "nested": lambda x: x * torch.Tensor([[1.0, 2.0, 3.0], [4, 5, 6]]),
    "tuple": lambda x: x * torch.Tensor((1.0, 2.0, 3.0)),
    "size": lambda x: x * torch.Tensor(2, 3).zero_(),
    "torch.Size": lambda x: x * torch.Tensor(torch.Size([3])).fill_(2),
    "floats by size": lambda x: x * torch.FloatTensor(3).fill_(2),
    "empty": lambda x: torch.cat([torch.Tensor(), x]),
    "of a tensor": lambda x: x * torch.Tensor(x.detach() * 2),
    "array": lambda x: x * torch.Tensor(ARRAY),
    "array of doubles": lambda x: x * torch.Tensor(ARRAY.astype("f8")),
    "new": lambda x: x * x.new([0.5]),
    "new by size": lambda x: x * x.new(3).fill_(2),
    "new array": lambda x: x * x.new(ARRAY),
    "new integers": lambda x: x * x.long().new([2]),
    "variable": lambda x: x * torch.autograd.Variable(torch.Tensor([1.0, 2.0, 3.0])),
    "type": lambda x: x * torch.Tensor([1.0, 2.0, 3.0]).type(torch.DoubleTensor),
    "in place": lambda x: torch.Tensor([1.0, 2.0, 3.0]).mul_(x),
    "out": lambda x: x * torch.add(x.detach(), 1, out=torch.Tensor(3)),
    "index": lambda x: x[torch.LongTensor([0, 2])].sum(),
    "assigned": _written_at,
    "vmap": lambda x: torch.vmap(lambda a: a * torch.Tensor([2.0]))(x),
    "inner gradient": lambda x: torch.func.grad(lambda a: (a.sin() * torch.Tensor([2.0])).sum())(x),
    "checkpoint": _checkpointed,
    "from_numpy": lambda x: x * torch.from_numpy(ARRAY),
    "as_tensor": lambda x: x * torch.as_tensor(ARRAY),
    "asarray": lambda x: x * torch.asarray(ARRAY),
    "frombuffer": lambda x: x * torch.frombuffer(ROOM, dtype=torch.float32),
    "from_numpy, copied": lambda x: x * torch.from_numpy(ARRAY).clone().add_(1),
}
"""What is recorded."""

REFUSED: dict[str, Case] = {
    "storage": lambda x: x * torch.Tensor(torch.ones(3).untyped_storage()),
    "storage of an input": lambda x: x * torch.Tensor(x.detach().untyped_storage()),
    "new storage": lambda x: x * x.new(torch.ones(3).untyped_storage()),
    "set_ to a storage": lambda x: x * torch.empty(0).set_(x.detach().untyped_storage(), 0, (3,)),
    "element of a storage": lambda x: x * float((x * 2).untyped_storage()[3]),
    "storage written": lambda x: x * (x.detach().untyped_storage().fill_(0), 1)[1],
    "storage copied": lambda x: x * torch.Tensor(x.detach().untyped_storage().clone()),
    "storage resized": lambda x: x * ((x.detach() * 2).untyped_storage().resize_(0), 1)[1],
    "pointer of a storage": lambda x: x * (x.untyped_storage().data_ptr() * 0 + 1),
    "copy": lambda x: x * copy.copy(x * 2),
    "deepcopy": lambda x: x * copy.deepcopy(x.detach() * 2),
    "pickle": lambda x: x * pickle.loads(pickle.dumps(x.detach() * 2)),
    "save": lambda x: x * (torch.save(x.detach() * 2, io.BytesIO()), 1)[1],
    "dlpack": lambda x: x * torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x.detach() * 2)),
    "array written": lambda x: x * torch.from_numpy(ARRAY).add_(1),
    "part of an array written": lambda x: x * torch.as_tensor(ARRAY)[1:].mul_(2).sum(),
    "array as out": lambda x: x * torch.add(x.detach(), 1, out=torch.from_numpy(ARRAY)),
    "buffer written": lambda x: x * torch.frombuffer(ROOM, dtype=torch.float32).add_(1),
    "new buffer written": lambda x: x * torch.frombuffer(bytearray(ROOM), dtype=torch.float32).add_(1),
}
"""What runs uncompiled."""

VALUES: dict[str, Case] = {
    "list of tensors": lambda x: x * torch.Tensor([x.sum(), 1.0, 2.0]),
    "array of a tensor": lambda x: x * torch.from_numpy(np.asarray(x.detach() * 2)),
    "numpy": lambda x: x * float((x.detach() * 2).numpy().sum()),
    "tolist": lambda x: x * (x * 2).tolist()[1],
    "pointer": lambda x: x * ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_float))[0],
    "printed": lambda x: x * len(repr(x.detach() * 2)),
    "formatted": lambda x: x * float(f"{x.sum():.2f}"),
    "from_dlpack": lambda x: x * torch.from_dlpack(x.detach() * 2),
    "applied": lambda x: x * (x.detach() * 2).apply_(lambda v: v + 1),
    "mapped": lambda x: x * (x.detach() * 2).map_(x.detach(), lambda a, b: a + b),
}
"""What asks for a value."""


def called_twice(fn: Case) -> list[Any]:
    """What two calls give, and what they leave in memory that is not torch's; an error as its type."""
    array, room = ARRAY.copy(), bytes(ROOM)
    found: list[Any] = []
    for start in (1.0, 2.0):
        x = torch.full((3,), start, requires_grad=True)
        y = fn(x)
        y.sum().backward()
        found += [y.detach().clone(), x.grad, torch.tensor(ARRAY), bytes(ROOM)]
    ARRAY[:], ROOM[:] = array, room
    return found


def _compiled(fn: Case, frontend: str) -> Any:
    return (
        torch.compile(fn, backend="aheadgrad")
        if frontend == "dynamo"
        else aheadgrad.compile(fn, frontend="trace")
    )


def run_all(frontend: str) -> None:
    warnings.simplefilter("ignore")
    for name, fn in {**RECORDED, **REFUSED, **VALUES}.items():
        print(name, end=": ", flush=True)
        try:
            got = called_twice(_compiled(fn, frontend))
        except Exception as error:
            print(type(error).__name__, flush=True)
            continue
        pairs = zip(called_twice(fn), got, strict=True)
        print("same" if all(_equal(a, b) for a, b in pairs) else "different", flush=True)


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


if __name__ == "__main__":
    run_all(sys.argv[1])
