"""What an entry function is made from; each convention adds its lines, given this."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from aheadgrad.backends.contract import Executable
from aheadgrad.emit.script import Namespace, Script
from aheadgrad.facts.facts import Facts, Geometry
from aheadgrad.joint.level import Joint, Target
from aheadgrad.torchlayer.autograd import set_grad_enabled, set_versions


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
    viewed: tuple[int, ...] = ()


@dataclass(eq=False)
class Assembly:
    """Everything that the entry function is made from."""

    joint: Joint
    inputs: int
    forward: Executable
    results: int
    nodes: list[NodeCall]
    view_results: frozenset[int]
    inference: bool
    members: tuple[str, ...] = ()
    returns: Callable[[list[str]], str] | None = None
    used_before: tuple[str, ...] = ()  # leaves that are used before they change their shape out of sight
    names: Namespace = field(default_factory=Namespace)
    grown: set[int] = field(default_factory=set)  # views that are made, some before the nodes that take them
    updated: set[int] = field(default_factory=set)  # inputs that have their new values by now
    parts: dict[Any, Any] = field(default_factory=dict)  # names of calls that make several views at once

    @property
    def facts(self) -> Facts:
        return self.joint.facts

    @cached_property
    def input_names(self) -> dict[int, str]:
        """Names by input index; members of a shared base count down from -1."""
        names = {i: f"p{i}" for i in range(self.inputs)}
        names.update({-1 - k: name for k, name in enumerate(self.members)})
        return names


@contextmanager
def without_grad(script: Script, *, when: bool) -> Iterator[None]:
    """The lines inside run with grad mode off, in the middle of lines that run with it on."""
    set_grad = script.names.name(set_grad_enabled, "set_grad") if when else ""
    if when:
        script.line(f"{set_grad}(False)")
    yield
    if when:
        script.line(f"{set_grad}(True)")


def geometry_text(script: Script, g: Geometry) -> str:
    """The arguments of `as_strided`."""
    return ", ".join(map(script.names.literal, (g.size, g.stride, g.offset)))


def emit_bump(script: Script, target: str, by: int) -> None:
    """Moves a version counter."""
    emit_bumps(script, [(target, by)])


def emit_bumps(script: Script, bumps: list[tuple[str, int]]) -> None:
    """Moves version counters."""
    moved = [(target, by) for target, by in bumps if by]
    if moved:
        name = script.names.name(set_versions, "set_versions")
        new = "".join(f"{target}._version {'+' if by > 0 else '-'} {abs(by)}, " for target, by in moved)
        script.line(f"{name}(({''.join(f'{target}, ' for target, _ in moved)}), ({new}))")
