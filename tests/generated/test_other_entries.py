"""Generated programs through the other ways in: the drop-in, dynamic shapes, partition functions, Dynamo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

import aheadgrad
from aheadgrad import compat
from aheadgrad.testing.fuzz import Settings
from aheadgrad.testing.programs import generate

COUNT = 40
Function = Callable[..., Any]


def own_partition(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
    return compat.default_partition(joint, inputs, **kwargs)


ENTRIES: dict[str, Callable[[Function], Function]] = {
    "drop-in": lambda fn: compat.aot_function(fn, compat.nop),
    "updates inside": lambda fn: compat.aot_function(fn, compat.nop, keep_inference_input_mutations=True),
    "partition function": lambda fn: compat.aot_function(fn, compat.nop, partition_fn=own_partition),
    "dynamic": lambda fn: aheadgrad.compile(fn, dynamic=True, frontend="trace"),
    "drop-in, dynamic": lambda fn: compat.aot_function(fn, compat.nop, dynamic=True),
    "dynamo": lambda fn: torch.compile(fn, backend="aheadgrad"),
}


@pytest.mark.filterwarnings("ignore::aheadgrad.errors.FallbackWarning")
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("entry", ENTRIES)
def test_same_as_eager(entry: str) -> None:
    settings = Settings()
    for seed in range(40_000, 40_000 + COUNT):
        torch._dynamo.reset()
        program = generate(seed, config=settings.config)
        found = settings.compare(program, ENTRIES[entry](program.fn), ())
        if found and entry == "dynamo":  # in what Dynamo's graph does wrong by itself, we follow it
            torch._dynamo.reset()
            known = settings.compare(program, torch.compile(program.fn, backend="eager"), ())
            found = [f for f in found if f not in known]
        assert not found, f"seed {seed}: {found[0]}"
