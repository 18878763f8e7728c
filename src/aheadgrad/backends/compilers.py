"""Compilers in torch's sense as a backend in ours.

A compiler takes `(graph_module, example_inputs)` and returns a callable. One that is marked with
`_boxed_call` takes its arguments in a list (which it may empty); any other takes them one by one.
There is one compiler for the forward, one for the backward and one for graphs without a backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import fx

from aheadgrad.backends.contract import Boxed, Executable, Request

Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


def make_boxed_func(f: Callable[..., Any]) -> Boxed:
    """The same function, taking its arguments in a list."""

    def boxed(args: list[Any]) -> Any:
        return f(*args)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


class _Progress(threading.local):
    """Which graph this thread is compiling."""

    def __init__(self) -> None:
        self.graphs: list[str] = []
        self.finished = 0
        self.model = "model"


_progress = _Progress()


def compilation_context() -> tuple[list[str], str, int]:
    """The graphs being compiled (outermost first), the model's name, how many graphs came before."""
    return list(_progress.graphs), _progress.model, _progress.finished


@contextmanager
def _compiling(name: str) -> Iterator[None]:
    before = _progress.graphs
    _progress.graphs = [*before, name]
    try:
        yield
    finally:
        _progress.graphs = before
        _progress.finished += 1


@dataclass(frozen=True)
class Compilers:
    """The compilers of one compiled function; `number` tells functions apart in names of graphs."""

    forward: Compiler
    backward: Compiler
    inference: Compiler
    number: int

    def __call__(self, request: Request) -> Executable:
        compiler = {"forward": self.forward, "backward": self.backward}.get(request.role, self.inference)
        with _compiling(f"{self.number}_{request.role}"):
            made = compiler(request.module, request.example_inputs())
        return Executable(made if getattr(made, "_boxed_call", False) else make_boxed_func(made))
