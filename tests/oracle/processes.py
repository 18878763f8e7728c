"""A few processes that work together, kept for many tests: starting them costs more than most cases.

    pool = Pool(2)
    pool.run(case, "dynamo")      # each process calls case(rank, "dynamo"); what rank 0 told comes back

A case that fails, or does not come to its end in time, takes its processes with it.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from aheadgrad import pipeline
from aheadgrad.errors import FallbackWarning

_LIMIT = 90.0  # seconds for one case, on a machine that has other things to do


@dataclass
class Told:
    """What a process says of a case: how many graphs were compiled, and why calls ran uncompiled."""

    graphs: int = 0
    uncompiled: list[str] = field(default_factory=list)
    error: str = ""


class Pool:
    def __init__(self, world: int) -> None:
        self.world = world
        self._members: list[tuple[Any, Connection]] = []

    def run(self, case: Callable[..., None], *args: Any) -> Told:
        """Runs a case in all processes at once."""
        if not self._members:
            self._start()
        for _, connection in self._members:
            connection.send((case, args))
        deadline = time.monotonic() + _LIMIT
        answers: list[Told] = []
        for rank, (_, connection) in enumerate(self._members):
            try:
                told = connection.recv() if connection.poll(max(0.0, deadline - time.monotonic())) else None
            except EOFError:
                told = Told(error="the process ended")
            if told is None or told.error:
                self.stop()
                raise AssertionError(f"rank {rank}: {told.error if told else 'not done in time'}")
            answers.append(told)
        return answers[0]

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        store = Path(tempfile.mkdtemp()) / "store"
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world, str(store), theirs), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))

    def stop(self) -> None:
        for process, connection in self._members:
            connection.close()
            process.kill()
            process.join()
        self._members = []


def _serve(rank: int, world: int, store: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=_LIMIT)
    )
    made = _count_graphs()
    while True:
        try:
            case, args = connection.recv()
        except (EOFError, ConnectionError):
            return
        connection.send(_told(case, rank, args, made))


def _told(case: Callable[..., None], rank: int, args: tuple[Any, ...], made: list[Any]) -> Told:
    made.clear()
    torch.compiler.reset()
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            case(rank, *args)
    except BaseException:
        return Told(error=traceback.format_exc())
    ours = [str(w.message) for w in caught if issubclass(w.category, FallbackWarning)]
    return Told(len(made), ours)


def _count_graphs() -> list[Any]:
    """A list with one element per graph compiled from now on."""
    made: list[Any] = []
    run = pipeline.run

    def counting(*args: Any, **kwargs: Any) -> Any:
        made.append(run(*args, **kwargs))
        return made[-1]

    pipeline.run = counting
    return made
