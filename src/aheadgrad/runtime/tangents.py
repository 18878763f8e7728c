"""How the backward of a node takes its tangents, and hands them on, in generated code."""

from __future__ import annotations

from torch import Tensor

from aheadgrad.emit.script import Script
from aheadgrad.torchlayer.autograd import gives_tangents_away


def take_tangents(script: Script, tangents: list[str], conjugable: tuple[int, ...], *, links: bool) -> None:
    """Out of the list that autograd gives, if it does, so that each can be freed after its last use; `links`
    come behind them. Those that are `conjugable` are complex."""
    if gives_tangents_away:
        own = f"[:{len(tangents)}]" if links else ""
        script.line(f"{', '.join(tangents)}, = given{own}")
        if links:
            script.line(f"links = given[{len(tangents)}:]")
        script.line("given.clear()")
    for k in conjugable:
        script.line(f"{tangents[k]} = {script.names.name(unconjugated, 'unconjugated')}({tangents[k]})")


def give_tangents_away(script: Script, tangents: list[str]) -> None:
    """Into a list: whoever takes them out of it can free them."""
    script.line(f"given = [{', '.join(tangents)}]")
    script.line(f"del {', '.join(tangents)}")


def unconjugated(t: Tensor | None) -> Tensor | None:
    """A tangent whose elements are what they look like: programs were recorded for such."""
    return t if t is None or not t.is_conj() else t.resolve_conj()
