"""The first step in a new process: compiled from nothing, and with a cache that another process has filled.

The clock starts when torch, aheadgrad and the model are there, and stops after the first forward and
backward. Each figure is the median over several processes. Eight processes at once then share an empty cache.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from .measure import COLD, OURS, WRITING, Bar, Difference, Row

LIMIT = 0.25
PROCESSES = 8
ROUNDS = 3

_PROGRAM = """
import json, sys, time, warnings
import torch, aheadgrad
from benchmarks import models

frontend, cache, first = sys.argv[1:]
warnings.simplefilter("error", aheadgrad.errors.CacheWarning)
case = models.gpt(24)
if first == "optimizer":
    torch.optim.AdamW(case.model.parameters())
start = time.perf_counter()
fast = aheadgrad.compile(case.model, backend="eager", frontend=frontend, cache=cache or False)
fast(*case.inputs).backward()
taken = time.perf_counter() - start
recorded = any("forward" in entry.entry.journal.times for entry in fast.entries)
print(json.dumps({"ms": taken * 1e3, "recorded": recorded}))
"""


def start(frontend: str, cache: str, first: str = "") -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", _PROGRAM, frontend, cache, first]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(process: "subprocess.Popen[str]") -> dict[str, float]:
    out, error = process.communicate()
    if process.returncode:
        raise RuntimeError(error)
    found: dict[str, float] = json.loads(out.splitlines()[-1])
    return found


def first_steps(frontend: str, first: str) -> dict[str, float]:
    seen: dict[str, list[float]] = {COLD: [], WRITING: [], OURS: []}
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as cache:
            seen[COLD].append(result(start(frontend, "", first))["ms"])
            seen[WRITING].append(result(start(frontend, cache, first))["ms"])
            warm = result(start(frontend, cache, first))
        assert not warm["recorded"], "the cache was not used"
        seen[OURS].append(warm["ms"])
    return {name: statistics.median(values) for name, values in seen.items()}


def together() -> Row:
    """How many entries many processes leave behind that start at once; an error in any of them is raised."""
    with tempfile.TemporaryDirectory() as cache:
        for process in [start("trace", cache) for _ in range(PROCESSES)]:
            result(process)
        count = sum(path.suffix == ".entry" for path in Path(cache).iterdir())
    return Row(f"entries of {PROCESSES} processes", "", {OURS: count}, (Difference(count, 1),))


def run() -> list[Row]:
    rows = [Row("first step, GPT of 24 layers, trace", "ms", first_steps("trace", ""), (Bar(COLD, LIMIT),))]
    rows.append(Row("the same, after an optimizer was made", "ms", first_steps("trace", "optimizer")))
    rows.append(Row("the same, dynamo", "ms", first_steps("dynamo", "optimizer")))
    return [*rows, together()]
