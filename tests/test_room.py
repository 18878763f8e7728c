"""The frame of a long program leaves room for those that it calls, however deep it is called."""

import resource
import threading
from collections.abc import Callable
from typing import Any

from aheadgrad.backends.room import WithRoom

CALLS = 200


def _program(variables: int) -> Callable[[list[Any]], Any]:
    """Many local variables, then many calls of Python functions: as Inductor's code around its kernels."""
    lines = [
        "def program(args):",
        *(f"    v{i} = 1" for i in range(variables)),
        f"    for _ in range({CALLS}):",
    ]
    scope: dict[str, Any] = {"launch": lambda: (lambda: (lambda: None)())()}
    exec("\n".join([*lines, "        launch()"]), scope)
    program: Callable[[list[Any]], Any] = scope["program"]
    return program


def _faults(run: Callable[[list[Any]], Any], depth: int) -> int:
    """The pages that a call so deep asks the operating system for, after a few."""
    if depth:
        return _faults(run, depth - 1)
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        run([])
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def _most_faults(make: Callable[[], Callable[[list[Any]], Any]]) -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(_faults(make(), depth) for depth in range(150)))
    thread.start()
    thread.join()
    return max(found)


def test_calls_take_no_memory_of_their_own() -> None:
    program = _program(1500)
    assert _most_faults(lambda: program) >= CALLS  # at some depth, each call does
    assert _most_faults(lambda: WithRoom(program)) < CALLS // 4


def test_a_large_chunk_is_taken_only_where_it_helps() -> None:
    program = WithRoom(_program(10))
    for _ in range(10):
        program([])
    assert program.seen == 0
