"""What the benchmarks share: rows with bars, and the taking of turns."""

import gc
import random
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

EAGER = "eager"
TORCH = "torch aot"
COMPILED = "torch.compile"
DYNAMO = "aot_eager"
DYNAMO_ONLY = "compile eager"
TRACING = "tracing"
OURS = "aheadgrad"
FIRST_ONLY = "first order only"
GUARDED = "with check"
UNGUARDED = "without"
PLAIN = "plain call"
COLD = "without a cache"
WRITING = "writing one"
KEPT_TRACING = "tracing, cache"
KEPT = "ours, cache"
CONTENDERS = (
    EAGER,
    COLD,
    WRITING,
    DYNAMO_ONLY,
    DYNAMO,
    TORCH,
    COMPILED,
    TRACING,
    FIRST_ONLY,
    PLAIN,
    OURS,
    KEPT_TRACING,
    KEPT,
    GUARDED,
    UNGUARDED,
)


@dataclass(frozen=True)
class Bar:
    """Ours divided by another contender's figure must not exceed `limit`."""

    other: str
    limit: float

    def describe(self, row: "Row") -> str:
        verdict = "PASS" if self.holds(row) else "FAIL"
        measured = f"{row.subject}, {OURS} / {self.other}: {row.ratio(self.other):.3f}"
        return f"{verdict}  {measured}  (bar: ratio <= {self.limit:.2f})"

    def holds(self, row: "Row") -> bool:
        return row.ratio(self.other) <= self.limit


@dataclass(frozen=True)
class Difference:
    """A cost that must not exceed `limit`, measured by itself."""

    measured: float
    limit: float

    def describe(self, row: "Row") -> str:
        verdict = "PASS" if self.holds(row) else "FAIL"
        return (
            f"{verdict}  {row.subject}: {self.measured:.2f} {row.unit}  (bar: <= {self.limit:.2f} {row.unit})"
        )

    def holds(self, row: "Row") -> bool:
        return self.measured <= self.limit


@dataclass(frozen=True)
class Row:
    """One measured thing: a figure for each contender that takes part, and the bars it has to meet."""

    subject: str
    unit: str
    figures: Mapping[str, float]
    bars: tuple[Bar | Difference, ...] = ()

    def ratio(self, other: str) -> float:
        return self.figures[OURS] / self.figures[other]


def in_turns(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Let every contender measure itself once a round, the order shuffled each time; the medians."""
    names = list(contenders)
    shuffle = random.Random(0).shuffle
    seen: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.freeze()  # what is there already is not walked again, so that collecting before a turn is cheap
    for _ in range(rounds):
        shuffle(names)
        for name in names:
            gc.collect()
            seen[name].append(contenders[name]())
    gc.unfreeze()
    return {name: statistics.median(values) for name, values in seen.items()}


def table(rows: Iterable[Row]) -> str:
    """The rows as plain text; contenders that take no part in any row get no column."""
    rows = list(rows)
    present = [name for name in CONTENDERS if any(name in row.figures for row in rows)]
    others = [name for name in present if name != OURS and OURS in present]
    lines = [["", "unit", *present, *(f"/ {other}" for other in others)]]
    for row in rows:
        figures = [f"{row.figures[name]:,.1f}" if name in row.figures else "-" for name in present]
        ratios = [f"{row.ratio(other):.3f}" if other in row.figures else "-" for other in others]
        lines.append([row.subject, row.unit, *figures, *ratios])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
