"""The journal of one compilation: the time of each stage and notes on decisions.

With `AHEADGRAD_LOG=info` each stage is logged as it ends; `debug` tells more.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

LOG = logging.getLogger("aheadgrad")


def log_as_asked() -> None:
    """Follows the environment variable AHEADGRAD_LOG: the name of a level."""
    asked = os.environ.get("AHEADGRAD_LOG", "").strip().upper()
    if not asked:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    LOG.addHandler(handler)
    level = logging.getLevelName(asked)
    LOG.setLevel(level if isinstance(level, int) else logging.INFO)


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
            taken = time.perf_counter() - start
            self.times[name] = self.times.get(name, 0.0) + taken
            LOG.info("%s took %.1f ms", name, taken * 1e3)

    def note(self, text: str) -> None:
        self.notes.append(text)
        LOG.info(text)

    def __str__(self) -> str:
        lines = [f"  {name:<16} {seconds * 1e3:8.2f} ms" for name, seconds in self.times.items()]
        return "\n".join(["stages:", *lines, *(f"  note: {n}" for n in self.notes)])
