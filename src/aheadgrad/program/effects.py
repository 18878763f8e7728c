"""Which ops must run even when nobody uses their results."""

from __future__ import annotations

from typing import Any

from aheadgrad.torchlayer.control_flow import is_effectful
from aheadgrad.torchlayer.dispatch import OpOverload, is_mutable, is_random, schema_of
from aheadgrad.torchlayer.distributed import is_collective


def has_effect(target: Any) -> bool:
    """Must the op run even when nobody uses its result? Draws random numbers, writes, asserts, talks."""
    if is_random(target) or is_mutable(target) or is_effectful(target) or is_collective(target):
        return True
    return isinstance(target, OpOverload) and not schema_of(target).returns
