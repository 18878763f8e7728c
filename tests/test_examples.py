"""The second-order examples train compiled as they do in eager.

All of them run in float64. Losses must agree to 1e-12, relative, over 20 steps: compiled programs may add up
the parts of a gradient in another order than eager's engine does, and nothing else. Warnings are errors
in tests, so a call that ran uncompiled would fail too.
"""

from __future__ import annotations

import importlib
import math

import pytest

STEPS = 20
NAMES = ["force_matching", "gradient_penalty", "pinn", "maml"]


@pytest.mark.parametrize("inside", [False, True], ids=["grad outside", "grad inside"])
@pytest.mark.parametrize("name", NAMES)
def test_equal_losses(name: str, inside: bool) -> None:
    example = importlib.import_module(f"examples.{name}")
    expected, found = example.run(False, STEPS), example.run(True, STEPS, inside=inside)
    assert len(expected) == len(found) == STEPS
    assert len(set(expected)) == STEPS, "it does not train"
    assert expected == pytest.approx(found, rel=1e-12, abs=0)


def test_a_backend_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("examples.own_backend").main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("0.0e+00")
    assert [line.split(":")[0] for line in lines[1:]] == ["forward", "backward"]


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_repeatable(name: str) -> None:
    example = importlib.import_module(f"examples.{name}")
    losses = example.run(False, 3)
    assert losses == example.run(False, 3)
    assert all(math.isfinite(loss) for loss in losses)


@pytest.mark.parametrize("name", NAMES)
def test_the_script_prints_the_losses_side_by_side(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    example = importlib.import_module(f"examples.{name}")
    example.main(steps=2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    for line in lines[1:]:
        _, eager, outside, within = line.split()
        assert float(eager) == pytest.approx(float(outside)) == pytest.approx(float(within))


def test_the_demo_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = importlib.import_module("examples.demo")
    monkeypatch.setattr(demo.shutil, "which", lambda _: None)
    assert demo.first_order(seed=0, steps=2, every=1) == []
    assert demo.second_order(seed=0, steps=2, every=1) == []
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.split() == ["loss", "of", "step", "eager", "exact"] for line in lines) == 2
    _, before, after = next(line for line in lines if line.startswith("saved for backward")).rsplit(None, 2)
    assert float(after.replace(",", "")) <= float(before.replace(",", ""))


def test_a_training_step_that_runs_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("examples.train_elsewhere").main()
    first, *steps = capsys.readouterr().out.splitlines()
    assert first.startswith("step.ag")
    assert len(steps) == 5
    assert all(line.endswith("difference 0.0e+00") for line in steps)
