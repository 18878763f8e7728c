"""Generated programs against eager, many of them: ``python -m aheadgrad.testing.fuzz --count 5000``.

Each program is compiled with ``fallback="error"`` and compared with eager in a few scenarios drawn by its
seed. A program that cannot be compiled is counted under its reason, and its fallback is compared with
eager all the same. Prints one line to remember and exits with 1 when there is something to fix:

    programs 5000 | disagreements 0 | uncompiled 37 (0.74%) | 210 s

``--replay 2000`` calls the first 2000 of them again on one compiled callable with other shapes,
``requires_grad``, aliasing, dtypes and grad mode (``aheadgrad.testing.replay``).

``--compiler module:function`` runs anything else that maps a function to a function through the same
programs; ``--compiler eager`` must never disagree.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import time
import warnings
from ast import literal_eval
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch

from aheadgrad.runtime.differentiable import Higher
from aheadgrad.testing import two
from aheadgrad.testing.dense import generate_dense
from aheadgrad.testing.oracle import BACKWARD_KINDS, Disagreement, compare, report
from aheadgrad.testing.programs import Config, Program, generate
from aheadgrad.testing.replay import variants
from aheadgrad.testing.runs import Scenario, run
from aheadgrad.testing.shrink import shrink

Function = Callable[..., Any]
# A view made under no_grad of a tensor that requires grad, whose base then changes: whether eager's backward
# raises depends on the formula, and on how it is asked for (tests/differences).
DEFECTS = (
    "backward: eager returns, compiled raises RuntimeError: A view was created in no_grad mode",
    "backward: eager raises RuntimeError: A view was created in no_grad mode",
)


@dataclass(frozen=True)
class Settings:
    """What a worker needs to know."""

    compiler: str = "trace"
    options: tuple[tuple[str, Any], ...] = ()
    backward: tuple[str, ...] = ("all", "each")
    extra: int = 3
    order: int = 1
    config: Config = field(default_factory=Config)
    versions: bool = True
    unit_strides: bool = True
    error_types: bool = True
    replay: int = 0  # programs with a seed below this one are called again in other ways
    inference: bool = False
    dense: bool = False
    subsets: int = 0

    def program(self, seed: int) -> Program:
        return generate_dense(seed) if self.dense else generate(seed, config=self.config)

    def compare(
        self, program: Program, compiled: Function, through: tuple[type[BaseException], ...]
    ) -> list[Disagreement]:
        return compare(
            program.fn,
            compiled,
            program.make_inputs,
            backward=self.backward,
            order=self.order,
            extra=self.extra,
            subsets=self.subsets,
            seed=program.seed,
            versions=self.versions,
            unit_strides=self.unit_strides,
            error_types=self.error_types,
            through=through,
            around=torch.no_grad if self.inference else nullcontext,
        )

    def replayed(self, program: Program, compiled: Function) -> tuple[int, list[Disagreement]]:
        """The program in other ways on one compiled callable, one after the other."""
        found: list[Disagreement] = []
        ways = variants(program)
        for variant in ways:
            differences = compare(
                program.fn,
                compiled,
                variant.program.make_inputs,
                backward=("all",),
                extra=1,
                seed=program.seed,
                around=variant.around,
                versions=self.versions,
                unit_strides=self.unit_strides,
                error_types=self.error_types,
            )
            found += [replace(d, scenario=f"{variant.name}: {d.scenario}") for d in differences]
        return len(ways), found


@dataclass(frozen=True)
class Outcome:
    """What became of one program."""

    seed: int
    disagreements: tuple[Disagreement, ...] = ()
    reason: str | None = None
    derivatives: tuple[tuple[int, int], ...] = ()  # by order: backwards that ran compiled under create_graph
    replayed: int = 0  # further ways in which it was called
    peers: int = 0  # disagreements that the peer has, too
    defects: int = 0  # is eager wrong?


@dataclass(frozen=True)
class Compiler:
    """How to compile strictly and, where that fails with ``refusal``, with a fallback.

    What ``peer`` does differently from eager in the same way does not count against us.
    """

    strict: Callable[[Function], Function]
    lenient: Callable[[Function], Function]
    refusal: tuple[type[BaseException], ...] = ()
    peer: Callable[[Function], Function] | None = None


def load_compiler(name: str, options: Mapping[str, Any]) -> Compiler:
    """``trace`` and ``dynamo`` (our front ends, with options), ``eager``, or ``module:function``."""
    if name == "eager":
        return Compiler(lambda fn: fn, lambda fn: fn)
    if name in ("trace", "dynamo"):
        package = importlib.import_module("aheadgrad")
        errors = importlib.import_module("aheadgrad.errors")
        options = {"frontend": name, "backend": "eager", **options}  # compared to the last bit
        return Compiler(
            lambda fn: package.compile(fn, fallback="error", **options),
            lambda fn: package.compile(fn, fallback="warn", max_entries=64, **options),
            (errors.FallbackError,),
            (lambda fn: torch.compile(fn, backend="eager")) if name == "dynamo" else None,
        )
    module, _, function = name.partition(":")
    if not function:
        raise SystemExit(f"--compiler {name}: expected trace, dynamo, eager or module:function")
    compile_with: Callable[[Function], Function] = getattr(importlib.import_module(module), function)
    return Compiler(compile_with, compile_with)


def check(program: Program, settings: Settings, compiler: Compiler) -> Outcome:
    """As `check_alone`, less what the peer does differently from eager as well, and torch's own defects."""
    outcome = check_alone(program, settings, compiler)
    known = (*two.DEFECTS, *DEFECTS)
    defects = {d.scenario for d in outcome.disagreements if any(text in str(d) for text in known)}
    if defects:
        rest = tuple(d for d in outcome.disagreements if d.scenario not in defects)
        outcome = replace(outcome, disagreements=rest, defects=1)
    if not outcome.disagreements or compiler.peer is None:
        return outcome
    theirs = check_alone(program, settings, Compiler(compiler.peer, compiler.peer)).disagreements
    ours = tuple(d for d in outcome.disagreements if d.kind not in {t.kind for t in theirs})
    return replace(outcome, disagreements=ours, peers=len(outcome.disagreements) - len(ours))


def check_alone(program: Program, settings: Settings, compiler: Compiler) -> Outcome:
    """Compile one program and compare it with eager, if asked for in other ways besides."""
    if compiler.peer is not None:
        torch.compiler.reset()
    outcome = check_once(program, settings, compiler)
    if program.seed >= settings.replay:
        return outcome
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ways, found = settings.replayed(program, compiler.lenient(program.fn))
    return replace(outcome, disagreements=(*outcome.disagreements, *found), replayed=ways)


def check_once(program: Program, settings: Settings, compiler: Compiler) -> Outcome:
    try:
        return Outcome(program.seed, tuple(attempt(program, settings, compiler.strict, compiler.refusal)))
    except compiler.refusal as refusal:
        reason = str(getattr(refusal, "reason", refusal))
    if run(program.fn, program.make_inputs, Scenario("look")).raised():
        return Outcome(program.seed)  # eager raises and so do we
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Outcome(program.seed, tuple(attempt(program, settings, compiler.lenient, ())), reason)


def attempt(
    program: Program,
    settings: Settings,
    compile_with: Callable[[Function], Function],
    through: tuple[type[BaseException], ...],
) -> list[Disagreement]:
    try:
        compiled = compile_with(program.fn)
    except through:
        raise
    except Exception as error:
        return [Disagreement("compile", "compile", "returns", f"raises {type(error).__name__}: {error}")]
    return settings.compare(program, compiled, through)


def work(seeds: Sequence[int], settings: Settings) -> list[Outcome]:
    """Check the programs of some seeds; the unit of work of a process."""
    torch.set_num_threads(1)
    compiler = load_compiler(settings.compiler, dict(settings.options))
    done = []
    for seed in seeds:
        with _derivatives() as ran:
            outcome = check(settings.program(seed), settings, compiler)
        done.append(replace(outcome, derivatives=tuple(sorted(ran.items()))))
    return done


@contextmanager
def _derivatives() -> Iterator[Counter[int]]:
    """How many differentiable backwards ran compiled, by the order of the derivatives they gave."""
    ran: Counter[int] = Counter()
    run = Higher.run

    def counted(higher: Higher, *given: Any) -> list[Any]:
        grads = run(higher, *given)
        ran[higher.level.order + 1] += 1
        return grads

    with patch.object(Higher, "run", counted):
        yield ran


def outcomes(seeds: Sequence[int], settings: Settings, jobs: int) -> Iterator[Outcome]:
    """Check the programs of all seeds, in this process or in several."""
    chunks = [seeds[start : start + 25] for start in range(0, len(seeds), 25)]
    if jobs <= 1:
        for chunk in chunks:
            yield from work(chunk, settings)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(work, chunk, settings): chunk for chunk in chunks}
        for future in as_completed(futures):
            try:
                yield from future.result()
            except BrokenProcessPool:
                chunk = futures[future]
                raise SystemExit(f"a process died on one of the seeds {chunk[0]} to {chunk[-1]}") from None


def describe(outcome: Outcome, settings: Settings, smallest: bool) -> str:
    """A failing program, if asked for the smallest that fails in the same way, with what differs."""
    program = settings.program(outcome.seed)
    found: Sequence[Disagreement] = outcome.disagreements
    if smallest:
        compiler = load_compiler(settings.compiler, dict(settings.options))
        thorough = replace(settings, extra=40)
        wanted = found[0].kind

        def fails(candidate: Program) -> bool:
            return any(d.kind == wanted for d in check(candidate, thorough, compiler).disagreements)

        program = shrink(program, fails)
        found = check(program, thorough, compiler).disagreements or found
    return f"{'-' * 100}\nseed {outcome.seed}\n\n{program}\n{report(found, 8)}"


def summary(done: Sequence[Outcome], seconds: float) -> str:
    """The line to remember and the table of reasons."""
    reasons = Counter(outcome.reason for outcome in done if outcome.reason is not None)
    wrong = sum(bool(outcome.disagreements) for outcome in done)
    uncompiled = sum(reasons.values())
    lines = [
        f"programs {len(done)} | disagreements {wrong} | "
        f"uncompiled {uncompiled} ({percent(uncompiled, done):.2f}%) | {seconds:.0f} s"
    ]
    derivatives: Counter[int] = Counter()
    for outcome in done:
        derivatives.update(dict(outcome.derivatives))
    lines += [
        f"  derivatives of order {order}: {count} differentiable backwards ran compiled"
        for order, count in sorted(derivatives.items())
    ]
    again = [outcome.replayed for outcome in done if outcome.replayed]
    if again:
        lines.append(
            f"  {len(again)} of them called again on one compiled callable, {sum(again)} times in all"
        )
    if any(outcome.defects for outcome in done):
        lines.append(
            f"  {sum(outcome.defects for outcome in done)} of them meet defects of torch (differences.md)"
        )
    peers = sum(bool(outcome.peers) for outcome in done)
    if peers:
        lines.append(
            f"  {peers} of them differ from eager in ways that torch.compile(backend='eager') does, too"
        )
    lines += [f"  {count:6}  {reason}" for reason, count in reasons.most_common()]
    return "\n".join(lines)


def percent(count: int, done: Sequence[Outcome]) -> float:
    return 100.0 * count / max(1, len(done))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m aheadgrad.testing.fuzz", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--count", type=int, default=1000, help="number of programs")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first program")
    parser.add_argument("--only", type=int, help="only the program of this seed")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    parser.add_argument("--shrink", action="store_true", help="reduce failing programs before showing them")
    parser.add_argument("--max-report", type=int, default=5, help="how many failing programs to show")
    parser.add_argument("--max-uncompiled", type=float, default=1.0, help="percentage that may fall back")
    parser.add_argument("--compiler", default="trace", help="trace, dynamo, eager or module:function")
    parser.add_argument("--option", action="append", default=[], help='for compile: memory="less"')
    parser.add_argument("--backward", default="all,each", help=f"ways, of {','.join(BACKWARD_KINDS)}")
    parser.add_argument("--extra", type=int, default=3, help="scenarios per program beside the first")
    parser.add_argument("--replay", type=int, default=0, help="how many to call again in other ways too")
    parser.add_argument("--order", type=int, default=1, help="highest derivative to compare")
    parser.add_argument(
        "--subsets", type=int, default=0, help="random sets of inputs to ask gradients of, for each order"
    )
    parser.add_argument(
        "--duplicates", type=float, default=Config.duplicates, help="chance of a tensor passed twice"
    )
    parser.add_argument(
        "--siblings", type=float, default=Config.siblings, help="chance of two views of one base"
    )
    parser.add_argument(
        "--relatives",
        type=float,
        default=Config.relatives,
        help="chance that siblings are detached, leaves of their own, or of another dtype",
    )
    parser.add_argument("--dense", action="store_true", help="short programs of what is hard (dense.py)")
    parser.add_argument("--inference", action="store_true", help="calls are made under no_grad")
    parser.add_argument("--subclass", action="store_true", help="every input is a tensor in two parts")
    parser.add_argument("--loose-versions", action="store_true", help="version counters need only move")
    parser.add_argument("--loose-strides", action="store_true", help="ignore strides of unit dimensions")
    parser.add_argument("--any-error", action="store_true", help="types of errors need not match")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the programs, show what failed, return the exit code."""
    options = parse(arguments)
    settings = Settings(
        compiler=options.compiler,
        options=tuple((k, literal_eval(v)) for k, _, v in (o.partition("=") for o in options.option)),
        backward=tuple(options.backward.split(",")),
        extra=options.extra,
        order=options.order,
        config=Config(
            duplicates=options.duplicates,
            siblings=options.siblings,
            relatives=options.relatives,
            subclass=options.subclass,
        ),
        versions=not options.loose_versions,
        unit_strides=not options.loose_strides,
        error_types=not options.any_error,
        replay=(options.seed if options.only is None else options.only) + options.replay,
        inference=options.inference,
        dense=options.dense,
        subsets=options.subsets,
    )
    seeds = range(options.seed, options.seed + options.count) if options.only is None else [options.only]
    start = time.monotonic()
    done = sorted(outcomes(seeds, settings, options.jobs), key=lambda outcome: outcome.seed)
    wrong = [outcome for outcome in done if outcome.disagreements]
    seconds = time.monotonic() - start
    for outcome in wrong[: options.max_report]:
        print(describe(outcome, settings, options.shrink))
    if len(wrong) > options.max_report:
        others = ", ".join(str(outcome.seed) for outcome in wrong[options.max_report :][:60])
        print(f"{'-' * 100}\nalso: seeds {others}")
    print(summary(done, seconds))
    uncompiled = percent(sum(outcome.reason is not None for outcome in done), done)
    return 1 if wrong or uncompiled > options.max_uncompiled else 0


if __name__ == "__main__":
    raise SystemExit(main())
