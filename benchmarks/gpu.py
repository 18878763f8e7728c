"""Inductor behind aheadgrad, behind torch.compile, and eager, on a GPU: step time, peak memory, cold compile.

    python -m benchmarks.gpu                                  # all rows
    python -m benchmarks.gpu gpt2-16 resnet50 --limit 540     # some, within so many seconds
    python -m benchmarks.gpu --contenders aheadgrad --out results
    python -m benchmarks.gpu resnet50 --contenders torch aheadgrad --together

Each contender of a row runs in a process of its own, with empty caches, so that what one leaves behind (in
memory, in caches) is none of the next one's business. In rows of second order the model is compiled, or
("whole") the loss with the derivative in it, by tracing. Cold compile is the time of the first step, after
everything is imported. Peaks do not count what CUDA graphs hold in pools of their own. Results are added to a
JSON file, and written as a table next to it.

Steps that wait for the CPU take up to twice as long in one process as in the next one, whoever compiled them.
`--together` measures the steps of a row again: all contenders in one process, in turns.
"""

import argparse
import datetime
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).parent / "results"
FIRST = ("eager", "torch", "aheadgrad")
SECOND = ("eager", "aheadgrad", "reduce-overhead", "whole", "whole, reduce-overhead")
BUDGET = ("torch-budget", "aheadgrad-budget")


@dataclass(frozen=True)
class Row:
    """`make` is a function of `gpu_models`, called with `args`."""

    make: str
    args: tuple[int, ...]
    contenders: tuple[str, ...] = FIRST


ROWS = {
    "gpt2-1": Row("gpt2", (1,)),
    "gpt2-16": Row("gpt2", (16,), (*FIRST, *BUDGET)),
    "resnet50": Row("resnet", (64,)),
    "llama-1b": Row("llama", (4,)),
    "forces-large": Row("forces", (256, 32, 256), SECOND),
    "penalty-large": Row("penalty", (16384, 1024), SECOND),
    "physics-large": Row("physics", (262144, 128), SECOND),
    "physics-wide": Row("physics", (65536, 512), SECOND),  # products take most of the time, in eager too
    "forces-small": Row("forces", (4, 8, 64), SECOND),
    "penalty-small": Row("penalty", (128, 64), SECOND),
    "physics-small": Row("physics", (256, 32), SECOND),
}


def _compiler(contender: str) -> Callable[[Any], Any]:
    import torch

    import aheadgrad

    if contender == "eager":
        return lambda fn: fn
    if contender.startswith("torch"):
        if contender.endswith("budget"):
            settings: Any = importlib.import_module("torch._functorch.config")
            settings.activation_memory_budget = 0.5
        return lambda fn: torch.compile(fn)
    options: dict[str, Any] = {"backend": "inductor"}
    if contender.endswith("reduce-overhead"):
        options["mode"] = "reduce-overhead"
    if contender.endswith("budget"):
        options["memory_budget"] = 0.5
    if contender.startswith(("tracing", "whole")):
        options["frontend"] = "trace"
    return lambda fn: aheadgrad.compile(fn, **options)


def _made(name: str, contender: str) -> Callable[[], Any]:
    """The step of a row."""
    import torch

    from . import gpu_models

    for module in ("torch._dynamo", "torch._inductor.compile_fx"):
        importlib.import_module(module)
    row = ROWS[name]
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    make = getattr(gpu_models, row.make)(*row.args)
    torch.manual_seed(1)
    whole = {"whole": True} if contender.startswith("whole") else {}
    step: Callable[[], Any] = make(_compiler(contender), **whole)
    torch.cuda.synchronize()
    return step


def together(name: str, contenders: Sequence[str], steps: int) -> dict[str, float]:
    """Milliseconds for a step of each, in this process, in turns, and in both orders."""
    import torch

    made = {contender: _made(name, contender) for contender in contenders}
    seen: dict[str, list[float]] = {contender: [] for contender in contenders}
    for step in made.values():
        for _ in range(5):
            step()
    for turn in range(steps):
        for contender in contenders if turn % 2 else reversed(contenders):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(5):
                made[contender]()
            torch.cuda.synchronize()
            seen[contender].append((time.perf_counter() - start) / 5 * 1e3)
    return {contender: median(times) for contender, times in seen.items()}


def measure(name: str, contender: str, steps: int) -> dict[str, Any]:
    """In this process."""
    import torch

    step = _made(name, contender)
    start = time.perf_counter()
    loss = float(step())
    torch.cuda.synchronize()
    cold = time.perf_counter() - start
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    seen: list[float] = []
    until = time.perf_counter() + 20
    while len(seen) < steps and time.perf_counter() < until:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        seen.append(begin.elapsed_time(end))
    peak = torch.cuda.max_memory_allocated() / 2**30
    return {"step_ms": median(seen), "peak_gib": peak, "cold_s": cold, "loss": loss}


def _in_a_process(what: Sequence[str], steps: int, seconds: float, caches: str) -> dict[str, Any]:
    env = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=caches, TRITON_CACHE_DIR=f"{caches}/triton")
    command = [sys.executable, "-m", "benchmarks.gpu", *what, "--steps", str(steps)]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {seconds:.0f} s"}
    if done.returncode:
        print(done.stderr[-4000:], file=sys.stderr)
        return {"error": (done.stderr.strip().splitlines() or ["?"])[-1][:200]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def in_turns(
    name: str, row: dict[str, Any], contenders: Sequence[str], args: argparse.Namespace, until: float
) -> Iterator[None]:
    """One row, round by round: the first is cold, the others find their caches; the fastest step counts.

    With `--fresh` every round is cold, and the median counts.
    """
    cold: dict[str, list[float]] = {contender: [] for contender in contenders}
    with tempfile.TemporaryDirectory() as caches:
        for i, contender in ((i, c) for i in range(args.rounds) for c in contenders):
            left = until - time.monotonic()
            if left < 30:
                print(f"no time left for {name}, {contender}", flush=True)
                continue
            own = str(Path(caches, contender.replace(", ", "-"), str(i) if args.fresh else ""))
            found = _in_a_process(["--one", name, contender], args.steps, min(left, args.each), own)
            print(name, contender, found, flush=True)
            before = row.get(contender, {})
            cold[contender] += [found["cold_s"]] if "cold_s" in found else []
            if i and "step_ms" in before and "step_ms" in found:
                fastest = min(found["step_ms"], before["step_ms"])
                again = {"cold_s": median(cold[contender])} if args.fresh else {"warm_s": found["cold_s"]}
                found = {**before, "step_ms": fastest, **again}
            row[contender] = {**found, "date": args.date}
            yield


def all_together(
    name: str, row: dict[str, Any], contenders: Sequence[str], args: argparse.Namespace, until: float
) -> Iterator[None]:
    """One row: steps in turns, in one process; the rest as it was measured before."""
    with tempfile.TemporaryDirectory() as caches:
        what = ["--these", name, *contenders]
        found = _in_a_process(what, args.steps, min(until - time.monotonic(), args.each), caches)
    print(name, "together", found, flush=True)
    for contender in () if "error" in found else contenders:
        before = row.setdefault(contender, {"peak_gib": 0.0, "cold_s": 0.0, "loss": 0.0, "date": args.date})
        before.update({"step_ms": found[contender], "together": args.date})
    yield


def about() -> dict[str, str]:
    import torch

    return {
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def text(results: dict[str, Any]) -> str:
    """As a table in Markdown; ratios are to torch.compile, or to eager where that does not take part."""
    lines = [" · ".join(f"{k} {v}" for k, v in results["about"].items()), ""]
    lines += ["| row | contender | step ms | ratio | peak GiB | ratio | cold s | ratio | loss | measured |"]
    lines += ["|---|---|---|---|---|---|---|---|---|---|"]
    for name, row in results["rows"].items():
        base = next((row[k] for k in ("torch", "eager") if "step_ms" in row.get(k, {})), None)
        for contender, found in row.items():
            if "error" in found:
                lines.append(f"| {name} | {contender} | {found['error']} |" + " |" * 7)
                continue
            cells = []
            for key in ("step_ms", "peak_gib", "cold_s"):
                ratio = "" if base is None or not base[key] else f"{found[key] / base[key]:.2f}"
                cells += [f"{found[key]:.3f}", ratio]
            dates = found["date"] + (f"; step in turns {found['together']}" if "together" in found else "")
            told = [*cells, f"{found['loss']:.5f}", dates]
            lines.append(f"| {name} | {contender} | {' | '.join(told)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="row", help=", ".join(ROWS))
    parser.add_argument("--contenders", nargs="*", default=None)
    parser.add_argument("--limit", type=float, default=3600, help="seconds for all of it")
    parser.add_argument("--each", type=float, default=240, help="seconds for one contender of a row")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=1, help="processes per contender, in turns")
    parser.add_argument("--fresh", action="store_true", help="every round compiles anew")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name", default="gpu", help="of the files that are written")
    parser.add_argument("--together", action="store_true", help="steps only: in one process, in turns")
    parser.add_argument("--these", nargs="+", metavar=("ROW", "CONTENDER"), help="the same here, print JSON")
    parser.add_argument("--one", nargs=2, metavar=("ROW", "CONTENDER"), help="measure here, print JSON")
    args = parser.parse_args()
    if args.one:
        row, contender = args.one
        print(json.dumps(measure(row, contender, args.steps)))
        return 0
    if args.these:
        row, *contenders = args.these
        print(json.dumps(together(row, contenders, args.steps)))
        return 0
    until = time.monotonic() + args.limit
    args.out.mkdir(parents=True, exist_ok=True)
    stored = args.out / f"{args.name}.json"
    results: dict[str, Any] = json.loads(stored.read_text()) if stored.exists() else {"rows": {}}
    results["about"] = about()
    args.date = results["about"]["date"]
    for name in args.rows or ROWS:
        row = results["rows"].setdefault(name, {})
        way = all_together if args.together else in_turns
        for _ in way(name, row, args.contenders or ROWS[name].contenders, args, until):
            stored.write_text(json.dumps(results, indent=1) + "\n")
            stored.with_suffix(".md").write_text(text(results))
    print(text(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
