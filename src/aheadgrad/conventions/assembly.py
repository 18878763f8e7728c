"""What an entry function is made from; each convention adds its lines, given this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from aheadgrad.backends.contract import Executable
from aheadgrad.emit.script import Namespace
from aheadgrad.facts.facts import Facts
from aheadgrad.joint.level import Exit, Target
from aheadgrad.program.slots import OldMemory, UpdatedInput
from aheadgrad.torchlayer.autocast import AutocastState


@dataclass(eq=False)
class NodeCall:
    """How one component's node is applied."""

    apply: Callable[..., Any]
    exits: tuple[int, ...]
    saved: list[str]
    sizes: list[str]
    targets: tuple[Target, ...]
    direct: bool = False
    links: bool = False
    watches: list[Any] = field(default_factory=list)


@dataclass(eq=False)
class Assembly:
    """Everything that the entry function is made from."""

    facts: Facts
    exits: tuple[Exit, ...]
    inputs: int
    forward: Executable
    results: int
    nodes: list[NodeCall]
    view_results: frozenset[int]
    grad_before: bool
    inference: bool
    autocast: AutocastState | None
    in_graph_updates: frozenset[int] = frozenset()
    members: tuple[str, ...] = ()
    passages: tuple[Exit, ...] = ()
    held_as_they_are: frozenset[str] = frozenset()  # subclasses that the call does not change
    returns: Callable[[list[str]], str] | None = None
    used_before: tuple[str, ...] = ()  # leaves that are used before they change their shape out of sight
    names: Namespace = field(default_factory=Namespace)
    early: set[int] = field(default_factory=set)  # views that are made before the nodes that take them

    @cached_property
    def updated(self) -> dict[int, int]:
        """Input index -> position of its new value among the forward's results."""
        positions = [i for i, e in enumerate(self.exits) if isinstance(e.slot, UpdatedInput)]
        changed = [
            f.index for f in self.facts.inputs if f.index not in self.in_graph_updates and f.is_updated
        ]
        return dict(zip(changed, positions, strict=True))

    @cached_property
    def old_memory(self) -> dict[int, int]:
        """Input index -> position of what its former memory holds now."""
        positions = [i for i, e in enumerate(self.exits) if isinstance(e.slot, OldMemory)]
        changed = [f.index for f in self.facts.inputs if f.old_memory_changed]
        return dict(zip(changed, positions, strict=True))

    @cached_property
    def input_names(self) -> dict[int, str]:
        """Names by input index; members of a shared base count down from -1."""
        names = {i: f"p{i}" for i in range(self.inputs)}
        names.update({-1 - k: name for k, name in enumerate(self.members)})
        return names
