"""Generated programs: reproducible, valid, varied; shrinking and the fuzzing command."""

from __future__ import annotations

import linecache
import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aheadgrad.testing import Config, Program, compare, fuzz, generate, shrink
from aheadgrad.testing.programs import Step, render_body, render_result
from aheadgrad.testing.runs import Scenario, run
from aheadgrad.testing.steps import WEIGHTS, WRITERS

COUNT = 300


@pytest.fixture(scope="module")
def programs() -> list[Program]:
    return [generate(seed) for seed in range(COUNT)]


def test_same_seed_same_program(programs: list[Program]) -> None:
    assert [str(generate(seed)) for seed in range(COUNT)] == [str(program) for program in programs]
    assert len({str(program) for program in programs}) == COUNT


def test_generation_leaves_random_state_and_grad_mode_alone() -> None:
    torch.manual_seed(3)
    random.seed(3)
    before = torch.get_rng_state(), random.getstate()
    for seed in range(40):
        generate(seed)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert torch.is_grad_enabled()


def test_eager_agrees_with_eager(programs: list[Program]) -> None:
    for program in programs:
        found = compare(program.fn, program.fn, program.make_inputs, extra=3, seed=program.seed)
        assert not found, f"{program}\n{found[0]}"


def test_programs_do_what_they_are_meant_to(programs: list[Program]) -> None:
    seen: Counter[str] = Counter()
    for program in programs:
        record = run(program.fn, program.make_inputs, Scenario("all"))
        error = record.raised()
        assert error is None or error.type in (RuntimeError, IndexError), f"{program}\n{error}"
        memory = (
            value for name, value in record.facts.items() if name.startswith("output") and ".memory" in name
        )
        seen["raises"] += error is not None
        seen["writes into an input"] += bool(record.touched)
        seen["has a gradient"] += bool(record.terms)
        seen["has several results with gradient"] += len(record.terms) > 1
        seen["returns a view of an input"] += any(isinstance(m, tuple) and m[0][:4] == "args" for m in memory)
        seen["has a block"] += any(step.blocks for step in program.body)
        seen["gets a tensor twice"] += len(set(program.args)) < len(program.args)
    share = {what: count / COUNT for what, count in seen.items()}
    assert 0 < share["raises"] < 0.05
    assert share["writes into an input"] > 0.25
    assert share["has a gradient"] > 0.5
    assert share["has several results with gradient"] > 0.2
    assert share["returns a view of an input"] > 0.05
    assert share["has a block"] > 0.1
    assert 0 < share["gets a tensor twice"] < 0.15


def test_every_kind_of_line_appears() -> None:
    assert WRITERS.keys() == WEIGHTS.keys()
    for kind in WRITERS:
        config = Config(weights={kind: 1.0})
        assert any(generate(seed, config=config).body for seed in range(20)), kind


def test_knobs() -> None:
    config = Config(duplicates=1.0, siblings=0.0, max_inputs=2, max_steps=3)
    for seed in range(20):
        program = generate(seed, config=config)
        assert len(set(program.args)) < len(program.args) <= 4
        assert len(program.body) <= 3
    text = "".join(str(generate(seed, config=Config(siblings=1.0))) for seed in range(10))
    assert re.search(r"args=\(x\d+, x\d+", text)


def test_text_can_be_pasted_and_run(programs: list[Program]) -> None:
    program = next(p for p in programs if run(p.fn, p.make_inputs, Scenario("look")).raised() is None)
    namespace: dict[str, Any] = {}
    exec(str(program), namespace)
    inputs = namespace["make_inputs"]()
    namespace["f"](*inputs.args)
    assert program.source in str(program)
    file = program.fn.__code__.co_filename
    assert linecache.getlines(file)[program.fn.__code__.co_firstlineno - 1].startswith("def f(")


def test_rendering() -> None:
    body = (
        Step("a"),
        Step("b", ("no_grad",)),
        Step("c", ("no_grad", "enable_grad")),
        Step("d", ("enable_grad",)),
    )
    assert render_body(body) == [
        "a",
        "with torch.no_grad():",
        "    b",
        "    with torch.enable_grad():",
        "        c",
        "with torch.enable_grad():",
        "    d",
    ]
    assert render_result(("a", ["b"], {"c": ("d",)}, ())) == "(a, [b], {'c': (d,)}, ())"


def forgets_writes(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A bad compiler: inputs are copied first, so writes into them get lost."""

    def compiled(*args: Any) -> Any:
        return fn(*(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args))

    return compiled


def differs(program: Program) -> bool:
    found = compare(program.fn, forgets_writes(program.fn), program.make_inputs, extra=0)
    return any(difference.what == "args[0].values" for difference in found)


def test_shrinking_finds_a_small_program(programs: list[Program]) -> None:
    failing = [program for program in programs if differs(program)]
    assert len(failing) > 10
    for program in failing[:5]:
        small = shrink(program, differs)
        assert differs(small)
        assert len(small.body) <= 2, str(small)
        assert len(small.params) <= 2, str(small)
        assert len(str(small)) <= len(str(program))


def test_shrinking_survives_a_predicate_that_raises() -> None:
    program = generate(1)

    def fails(candidate: Program) -> bool:
        raise ZeroDivisionError

    assert shrink(program, fails) == program
    assert shrink(program, lambda candidate: True).body == ()
    assert shrink(program, lambda candidate: True, seconds=0) == program


def test_command_with_eager(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main(["--count", "30", "--compiler", "eager", "--backward", "all,each,sequence,twice"]) == 0
    assert "programs 30 | disagreements 0 | uncompiled 0 (0.00%)" in capsys.readouterr().out


def test_command_with_a_bad_compiler(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--compiler", f"{__name__}:forgets_writes", "--max-report", "1", "--shrink"]
    assert fuzz.main(["--count", "30", *options]) == 1
    out = capsys.readouterr().out
    assert "compiled differs from eager" in out
    assert "also: seeds" in out
    assert int(re.findall(r"disagreements (\d+)", out)[0]) > 5


class Refused(Exception):
    reason = "it has an odd seed"


def test_refusals_are_counted_and_their_fallback_is_checked() -> None:
    def refuse(fn: Callable[..., Any]) -> Callable[..., Any]:
        def compiled(*args: Any) -> Any:
            raise Refused

        return compiled

    settings = fuzz.Settings()
    program = generate(0)
    good = fuzz.check(program, settings, fuzz.Compiler(refuse, lambda fn: fn, (Refused,)))
    assert good == fuzz.Outcome(0, (), "it has an odd seed")
    bad = fuzz.check(program, settings, fuzz.Compiler(refuse, lambda fn: lambda *args: 7, (Refused,)))
    assert bad.disagreements
    assert fuzz.summary([good, fuzz.Outcome(1)], 2.0).splitlines() == [
        "programs 2 | disagreements 0 | uncompiled 1 (50.00%) | 2 s",
        "       1  it has an odd seed",
    ]


@pytest.mark.slow
def test_command_in_several_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main(["--count", "60", "--jobs", "2", "--compiler", "eager"]) == 0
    assert "programs 60 | disagreements 0" in capsys.readouterr().out
