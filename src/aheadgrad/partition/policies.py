"""Which ops a policy of the user's means."""

from __future__ import annotations

from fnmatch import fnmatchcase

from aheadgrad.options import Policy
from aheadgrad.program.values import Op
from aheadgrad.torchlayer.fxmeta import module_paths


def wish_for(op: Op, policies: tuple[Policy, ...]) -> Policy | None:
    """The last policy that means an op of the forward."""
    if op.phase != "forward":
        return None
    return next((p for p in reversed(policies) if _means(p, op)), None)


def _means(policy: Policy, op: Op) -> bool:
    if policy.op is not None and policy.op not in (op.target, getattr(op.target, "overloadpacket", None)):
        return False
    if policy.name is not None and not any(fnmatchcase(n, policy.name) for n in _names(op)):
        return False
    return policy.region is None or any(fnmatchcase(place, policy.region) for place in _places(op))


def _names(op: Op) -> list[str]:
    return [op.name, *(v.name for v in op.values)]


def _places(op: Op) -> list[str]:
    """Where an op is in the user's code: function, line, paths of modules."""
    found = module_paths(op.meta)
    if op.origin is not None:
        found += [op.origin.function, f"{op.origin.file}:{op.origin.line}", str(op.origin).partition(" ")[0]]
    return found
