"""Run the named benchmarks, or all of them; exit with status 1 when a bar does not hold.

Several run one after the other, each in a process of its own: what one leaves behind in memory is none of the
next one's business. What is compared within a benchmark takes turns in one process.
"""

import argparse
import os
import subprocess
import sys

import torch

from . import (
    any_order,
    cache,
    capture,
    front_door,
    guards,
    inductor,
    partition,
    peak,
    saved,
    second_order,
    step,
    subclasses,
)
from .measure import table

BENCHMARKS = {
    "capture": capture.run,
    "cache": cache.run,
    "step": step.run,
    "front_door": front_door.run,
    "saved": saved.run,
    "partition": partition.run,
    "peak": peak.run,
    "guards": guards.run,
    "any_order": any_order.run,
    "second_order": second_order.run,
    "subclasses": subclasses.run,
    "inductor": inductor.run,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(BENCHMARKS))
    os.environ.setdefault("AHEADGRAD_BACKEND", "eager")  # where a benchmark names none: overhead is measured
    names = parser.parse_args().names or list(BENCHMARKS)
    unknown = sorted(set(names) - BENCHMARKS.keys())
    if unknown:
        parser.error(f"no benchmark named {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")

    if len(names) > 1:
        command = [sys.executable, "-m", "benchmarks"]
        codes = [subprocess.run([*command, name], check=False).returncode for name in names]
        print("\nbars were missed" if any(codes) else "\nall bars hold")
        return max(codes)
    (name,) = names
    print(
        f"{name} (torch {torch.__version__}, {torch.get_num_threads()} threads, medians of turns)", flush=True
    )
    rows = BENCHMARKS[name]()
    print(table(rows))
    bars = [(row, bar) for row in rows for bar in row.bars]
    for row, bar in bars:
        print(bar.describe(row))
    print(flush=True)
    return 0 if all(bar.holds(row) for row, bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
