"""What all tests share: the list of known differences, and a look at what Dynamo had compiled.

Tests that state what eager does where we are known to differ are in tests/differences/known.txt.

Each line is `node id | why`. Such a test must fail; when it passes, the line (and the entry in
docs/differences.md) has to go.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest

from aheadgrad.frontends import dynamo as frontend
from aheadgrad.frontends import flat
from aheadgrad.frontends.compiled import Described

# Thousands of tests in one process make a million objects, and looking through all of them again and again
# takes a good part of the time. Tests that are about garbage collect it themselves.
gc.set_threshold(20_000, 20, 50)
# Tests compare with eager to the last bit: those of a backend name it. Processes started here inherit this.
os.environ.setdefault("AHEADGRAD_BACKEND", "eager")
# Inductor compiles in this process: its threads would change the list of warnings under others' hands.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

KNOWN = Path(__file__).parent / "differences" / "known.txt"


def known_differences() -> dict[str, str]:
    lines = [line for line in KNOWN.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split(" | ", 1) for line in lines)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    known = known_differences()
    for item in items:
        reason = known.get(item.nodeid)
        if reason is not None:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


@pytest.fixture
def compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> list[Described]:
    """What our backend of torch.compile compiled."""
    found: list[Described] = []

    def noting(*args: Any, **kwargs: Any) -> Described:
        found.append(flat.compile_flat(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(frontend, "compile_flat", noting)
    return found
