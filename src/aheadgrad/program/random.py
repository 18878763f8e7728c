"""Random ops that run twice: the forward keeps the state of the generator, the backward starts from it."""

from __future__ import annotations

from dataclasses import replace

import torch

from aheadgrad.program.values import Op, TensorType, Value
from aheadgrad.torchlayer.replay import Drawn, Replayed, state_bytes


def state_before(op: Op, number: int) -> Value:
    """The state of the generator before an op; it is said to be made by it."""
    size = state_bytes(_device(op))
    looks = TensorType(torch.uint8, (size,), (1,), 0, torch.device("cpu"))
    return Value(number, looks, f"{op.name}_state", next(op.values).op)


def drawn_with(op: Op, state: Value) -> Op:
    """The op, and the state before it."""
    return replace(op, target=Drawn(op.target, _device(op)), out=(state, *op.outs), keep=True)


def replayed(op: Op, state: Value) -> Op:
    """The op once more, from a state."""
    target = Replayed(op.target, _device(op))
    return replace(op, target=target, args=(state, *op.args), uses=(state, *op.uses), keep=False)


def _device(op: Op) -> torch.device:
    return next(op.values).type.device
