"""What Dynamo itself gets wrong about modules: torch.compile(backend="eager") differs from eager as we do.

Each case does something with a way to compile, and tells what it saw. When Dynamo is corrected the test
fails, and the case (and its line in docs/differences.md) has to go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import aheadgrad

Compile = Callable[[Any], Any]


def a_hook_for_all_modules_added_after_the_first_call(compile: Compile) -> Any:
    """No guard of Dynamo's looks at those. (The wrapper that torch.compile makes has a call of its own.)"""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    fast = compile(model)
    fast(torch.ones(2, 3))
    seen: list[str] = []
    handle = register_module_forward_hook(lambda m, args, out: seen.append(type(m).__name__))
    try:
        fast(torch.ones(2, 3))
    finally:
        handle.remove()
    return [name for name in seen if name != "OptimizedModule"]


CASES = [a_hook_for_all_modules_added_after_the_first_call]


@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks:UserWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_dynamo_does_the_same(case: Callable[[Compile], Any]) -> None:
    torch.compiler.reset()
    eager = case(lambda module: module)
    dynamo = case(lambda module: torch.compile(module, backend="eager"))
    assert eager != dynamo
    torch.compiler.reset()
    assert case(aheadgrad.compile) == dynamo
