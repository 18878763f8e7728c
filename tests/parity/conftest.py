"""Markers and fixtures of the parity tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from .peer import ENTRIES, PEER


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "differs_from_peer(why, run=True): eager is the oracle, and torch's own AOTAutograd does otherwise; "
        "expected to fail with PARITY_PEER=torch, and only then; run=False where it would crash",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if PEER != "torch":
        return
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        for mark in item.iter_markers("differs_from_peer"):
            item.add_marker(pytest.mark.xfail(reason=mark.args[0], strict=True, **mark.kwargs))


@pytest.fixture(autouse=True)
def _same_start() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing that Dynamo compiled for another test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=sorted(ENTRIES))
def entry(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """The drop-in `aot_function` and our own `compile`, one after the other."""
    if request.param == "compile" and PEER == "torch":
        pytest.skip("torch's AOTAutograd has the drop-in entry only")
    return ENTRIES[request.param]
