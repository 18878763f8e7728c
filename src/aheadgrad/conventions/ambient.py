"""Ambient state: grad mode stays as the function left it."""

from __future__ import annotations

from aheadgrad.conventions.assembly import Assembly
from aheadgrad.emit.script import Script
from aheadgrad.torchlayer.autograd import set_grad_enabled


def emit(script: Script, a: Assembly) -> None:
    after = a.facts.ambient.grad_mode_after
    if after is not None:
        script.line(f"{script.names.name(set_grad_enabled, 'set_grad')}({after})")
