"""Run the named benchmarks, or all of them; exit with status 1 when a bar does not hold."""

import argparse
import sys

import torch

from . import any_order, capture, guards, saved, step, subclasses
from .measure import table

BENCHMARKS = {
    "capture": capture.run,
    "step": step.run,
    "saved": saved.run,
    "guards": guards.run,
    "any_order": any_order.run,
    "subclasses": subclasses.run,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(BENCHMARKS))
    names = parser.parse_args().names or list(BENCHMARKS)
    unknown = sorted(set(names) - BENCHMARKS.keys())
    if unknown:
        parser.error(f"no benchmark named {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")

    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), medians of turns in one process")
    missed = 0
    for name in names:
        rows = BENCHMARKS[name]()
        print(f"\n{name}\n{table(rows)}")
        for row in rows:
            for bar in row.bars:
                print(bar.describe(row), flush=True)
                missed += not bar.holds(row)
    print(f"\n{missed} bar(s) missed" if missed else "\nall bars hold")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
