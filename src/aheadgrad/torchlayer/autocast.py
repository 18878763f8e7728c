"""Autocast as a value: read it, set it, switch it off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

any_autocast = torch._C._is_any_autocast_enabled
_DEVICES = tuple(torch._C._autocast_supported_devices())


@dataclass(frozen=True)
class AutocastState:
    """For each device type with autocast on: its dtype. And whether weight casts are cached."""

    enabled: tuple[tuple[str, torch.dtype], ...]
    cache: bool

    @contextmanager
    def active(self) -> Iterator[None]:
        """Autocast exactly as in this state."""
        chosen = dict(self.enabled)
        with ExitStack() as stack:
            for device in _DEVICES:
                if device in chosen:
                    stack.enter_context(torch.autocast(device, dtype=chosen[device]))
                elif torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            yield

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Autocast off: for running programs whose casts are already in the graph."""
        devices = [d for d, _ in self.enabled]
        for device in devices:
            torch.set_autocast_enabled(device, False)
        try:
            yield
        finally:
            for device in devices:
                torch.set_autocast_enabled(device, True)


OFF = AutocastState((), True)


def autocast_state() -> AutocastState | None:
    """The state now; None when autocast is off everywhere."""
    if not any_autocast():
        return None
    enabled = tuple((d, torch.get_autocast_dtype(d)) for d in _DEVICES if torch.is_autocast_enabled(d))
    return AutocastState(enabled, torch.is_autocast_cache_enabled()) if enabled else None


@contextmanager
def autocast_as(state: AutocastState | None) -> Iterator[None]:
    with (state or OFF).active():
        yield


def from_options(choice: Any, forward: AutocastState | None) -> tuple[bool, AutocastState | None]:
    """`(fixed, state)` for the backward, from the option `backward_autocast`."""
    if choice == "eager":
        return False, None
    if choice == "same_as_forward":
        return True, forward
    if choice == "off":
        return True, None
    enabled = tuple(
        (kw["device_type"], kw.get("dtype") or torch.get_autocast_dtype(kw["device_type"]))
        for kw in choice
        if kw.get("enabled", True)
    )
    return True, AutocastState(enabled, True)
