"""Tensors made of Python's data, and Python's ways to the memory of tensors: recorded, or left to eager.

None of them may end the process, and none may quietly give another result.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import aheadgrad
from aheadgrad.errors import DataDependentError, FallbackError
from tests.oracle import memory_cases
from tests.oracle.common import assert_equal, strict
from tests.oracle.memory_cases import RECORDED, REFUSED, VALUES, Case, called_twice

_ROOT = Path(memory_cases.__file__).parents[2]
_DYNAMOS_OWN = {"list of tensors": "TorchRuntimeError"}  # the same with torch.compile(backend="eager")


@pytest.mark.parametrize("frontend", ["trace", "dynamo"])
def test_no_way_to_memory_ends_the_process(frontend: str) -> None:
    paths = os.pathsep.join([str(_ROOT), str(_ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.oracle.memory_cases", frontend]
    done = subprocess.run(
        command, cwd=_ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = dict(line.split(": ") for line in done.stdout.splitlines())
    assert list(told) == [*RECORDED, *REFUSED, *VALUES]
    for name, what in told.items():
        refused = {DataDependentError.__name__} if name in VALUES else set()
        known = _DYNAMOS_OWN.get(name) if frontend == "dynamo" else None
        assert what in {"same", known} | refused, f"{name}: {what}"


@pytest.mark.parametrize("fn", RECORDED.values(), ids=RECORDED.keys())
def test_recorded(fn: Case) -> None:
    assert_equal(called_twice(fn), called_twice(strict(fn)))


@pytest.mark.parametrize("fn", REFUSED.values(), ids=REFUSED.keys())
def test_left_to_eager(fn: Case) -> None:
    with pytest.raises(FallbackError):
        called_twice(strict(fn))


@pytest.mark.parametrize("fn", REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.filterwarnings("ignore")
def test_left_to_eager_gives_what_eager_gives(fn: Case) -> None:
    compiled = aheadgrad.compile(fn, frontend="trace")
    assert_equal(called_twice(fn), called_twice(compiled))
    assert compiled.fallbacks


def test_a_mode_in_the_function_may_hand_new_tensors_on() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Hands(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    def f(x: torch.Tensor) -> torch.Tensor:
        with Hands():
            return x * torch.tensor([2.0]) + torch.Tensor([0.5])

    assert_equal(called_twice(f), called_twice(aheadgrad.compile(f, frontend="trace")))
