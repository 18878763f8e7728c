"""Options as one frozen value: comparable, printable, passed whole."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from os import PathLike
from typing import Any, Literal

from aheadgrad.errors import InvalidOption

_OF_FUNCTIONS = ("frontend", "fullgraph", "dynamic", "max_entries")  # not of a graph that is given
_OF_BACKENDS = ("layouts", "replays", "fuses")


@dataclass(frozen=True)
class Policy:
    """A wish about what is saved for the backward: ops that are all of `op` (an overload, or all of a name:
    `torch.ops.aten.mm`), `name` (of the value, as programs print it) and `region` (the path of a module, the
    function or `file:line`), with `*` for anything. `must=False` leaves it to the partition in the end."""

    saves: bool
    op: Any = None
    name: str | None = None
    region: str | None = None
    must: bool = True


def save(*, op: Any = None, name: str | None = None, region: str | None = None, must: bool = True) -> Policy:
    """These values are saved if the backward needs them, and never computed again."""
    return Policy(True, op, name, region, must)


def recompute(
    *, op: Any = None, name: str | None = None, region: str | None = None, must: bool = True
) -> Policy:
    """These values are not saved but computed again when the backward needs them."""
    return Policy(False, op, name, region, must)


@dataclass(frozen=True)
class Options:
    """What `compile` was asked for.

    A partition function (`partition`) is given one joint graph, so it implies `one_node`: one node
    for all outputs, and graphs as every backend of PyTorch knows them (`conventions/in_graph.py`).
    `partition="default"` is the backend's: with Inductor it is `"min_cut"`, which saves less and computes
    cheap values again; `memory="less"` goes further, and `memory_budget` (from 0 to 1) tells how much of that
    may be saved at most: both imply it.
    Backward autocast: `"eager"` runs the backward under the autocast state that is active when
    backward is called, as eager does; `"same_as_forward"`, `"off"` or a list of
    `torch.autocast` keyword arguments fix it. `any_order=False` gives up derivatives beyond the first:
    a call whose inputs are neither leaves nor saved is then a little cheaper. `mode` is one of Inductor's.
    Results that others were computed from have backwards of their own, in at most so many `pieces` one upon
    the other. Backends say how many `layouts` of tangents a backward is compiled for, whether a random op
    `replays` what it drew, and whether they `fuse` ops (`backends.contract.Wants`). `cache` is True, or the
    directory that entries are kept in (docs/cache.md).
    """

    frontend: Literal["dynamo", "trace"] = "dynamo"
    fullgraph: bool = False
    backend: Any = "default"
    mode: str | None = None
    partition: Any = "default"
    memory: Literal["usual", "less"] = "usual"
    memory_budget: float | None = None
    policies: tuple[Policy, ...] = ()
    decompositions: Any = None
    dynamic: bool | None = None
    fallback: Literal["warn", "error"] = "warn"
    backward_autocast: Any = "eager"
    keep_inference_input_mutations: bool = False
    one_node: bool = False
    pieces: int = sys.maxsize
    any_order: bool = True
    max_entries: int = 8
    cache: Any = False
    layouts: int = 8
    replays: bool = True
    fuses: bool = False

    def __post_init__(self) -> None:
        if self.frontend not in ("dynamo", "trace"):
            raise InvalidOption(f'frontend={self.frontend!r}: choose "dynamo" or "trace".')
        for name in ("fullgraph", "any_order"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidOption(f"{name}={getattr(self, name)!r}: choose True or False.")
        if self.fallback not in ("warn", "error"):
            raise InvalidOption(f'fallback={self.fallback!r}: choose "warn" or "error".')
        if not isinstance(self.decompositions, Mapping | None):
            raise InvalidOption(
                f"decompositions={self.decompositions!r}: give a dictionary from ops to functions."
            )
        object.__setattr__(self, "decompositions", dict(self.decompositions or {}))
        self._check_partition()
        autocast = self.backward_autocast
        if isinstance(autocast, str) and autocast not in ("eager", "same_as_forward", "off"):
            raise InvalidOption(
                f'backward_autocast={autocast!r}: choose "eager", "same_as_forward", "off" or a list of '
                "torch.autocast keyword arguments."
            )
        if type(self.max_entries) is not int or self.max_entries < 1:
            raise InvalidOption(f"max_entries={self.max_entries!r}: choose a whole number from 1 on.")
        if not isinstance(self.cache, bool | str | PathLike):
            raise InvalidOption(f"cache={self.cache!r}: choose True, False or the path of a directory.")
        if not (self.dynamic is None or isinstance(self.dynamic, bool)):
            raise InvalidOption(f"dynamic={self.dynamic!r}: choose True, False or None.")

    def _check_partition(self) -> None:
        if self.memory not in ("usual", "less"):
            raise InvalidOption(f'memory={self.memory!r}: choose "usual" or "less".')
        budget = self.memory_budget
        if budget is not None and not (type(budget) in (int, float) and 0 <= budget <= 1):
            raise InvalidOption(f"memory_budget={budget!r}: choose a number from 0 to 1, or None.")
        object.__setattr__(self, "policies", tuple(self.policies))
        for policy in self.policies:
            if not isinstance(policy, Policy):
                raise InvalidOption(
                    f"policies={self.policies!r}: give what aheadgrad.save(...) and aheadgrad.recompute(...) "
                    f"return, not {policy!r}."
                )
        asks = self.memory != "usual" or budget is not None or bool(self.policies)
        if callable(self.partition):
            if asks:
                raise InvalidOption(
                    'memory= and memory_budget= are for partition="min_cut", not for a function.'
                )
            object.__setattr__(self, "one_node", True)
        elif self.partition not in ("default", "min_cut"):
            raise InvalidOption(
                f'partition={self.partition!r}: choose "default", "min_cut" or a partition function.'
            )
        elif asks:
            object.__setattr__(self, "partition", "min_cut")

    @classmethod
    def for_graphs(cls, given: dict[str, Any]) -> Options:
        """Of the backend of `torch.compile`, which leaves some of them to Dynamo."""
        known = [f.name for f in fields(cls) if f.name not in (*_OF_FUNCTIONS, *_OF_BACKENDS)]
        for name in given:
            if name not in known:
                raise InvalidOption(
                    f"options={{{name!r}: ...}} is not known; choose from {', '.join(known)}."
                )
        return cls(**given)
