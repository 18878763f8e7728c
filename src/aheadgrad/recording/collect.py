"""All facts of one recorded run."""

from __future__ import annotations

from aheadgrad.facts.facts import Ambient, Facts
from aheadgrad.recording import output_facts as alias_facts
from aheadgrad.recording.forward import Forward
from aheadgrad.recording.input_facts import input_facts, member_facts
from aheadgrad.recording.output_facts import Aliases


def collect(forward: Forward) -> tuple[Facts, Aliases]:
    """The facts (frozen) and the traced tensors behind the alias facts."""
    session = forward.session
    inputs = [input_facts(session, i, e.seen, e.value, e) for i, e in enumerate(session.entrances)]
    inputs += [member_facts(session, k, m) for k, m in enumerate(session.members)]
    aliases = alias_facts.collect(forward)
    changed = forward.grad_mode_after != forward.grad_mode_before
    ambient = Ambient(forward.grad_mode_after if changed else None)
    return Facts(tuple(inputs), tuple(aliases.outputs), tuple(aliases.roots), ambient), aliases
