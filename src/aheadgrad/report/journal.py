"""The journal of one compilation: the time of each stage and notes on decisions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Journal:
    times: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.times[name] = self.times.get(name, 0.0) + time.perf_counter() - start

    def note(self, text: str) -> None:
        self.notes.append(text)

    def __str__(self) -> str:
        lines = [f"  {name:<10} {seconds * 1e3:8.2f} ms" for name, seconds in self.times.items()]
        return "\n".join(["stages:", *lines, *(f"  note: {n}" for n in self.notes)])
