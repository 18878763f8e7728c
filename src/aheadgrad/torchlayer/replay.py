"""Random ops that run again and give the same numbers: the generator's state goes with them.

state, out = Drawn(op, device)(*args)          the state before, and what the op gives
out = Replayed(op, device)(state, *args)       the same; the generator stays where it is
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Drawn:
    op: Any
    device: torch.device

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        state = _state(self.device)
        out = self.op(*args, **kwargs)
        return (state, *out) if isinstance(out, list | tuple) else (state, out)

    def __str__(self) -> str:
        return f"drawn.{self.op}"


@dataclass(frozen=True)
class Replayed:
    op: Any
    device: torch.device

    def __call__(self, state: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        now = _state(self.device)
        _set_state(self.device, state)
        try:
            return self.op(*args, **kwargs)
        finally:
            _set_state(self.device, now)

    def __str__(self) -> str:
        return f"replayed.{self.op}"


def state_bytes(device: torch.device) -> int:
    """The size of a generator's state."""
    return 5056 if device.type == "cpu" else 16


def _state(device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def _set_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def as_operator(target: Drawn | Replayed) -> Any:
    """The operator of torch's that does the same in a graph: `(op, *args) -> (state, out)`, or
    `(state, op, *args) -> out`."""
    from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

    return run_and_save_rng_state if isinstance(target, Drawn) else run_with_rng_state
