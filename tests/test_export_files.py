"""Exports as files: the same bytes for the same export, another process' eyes, and forged ones."""

from __future__ import annotations

import gc
import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aheadgrad
from aheadgrad.__main__ import main
from aheadgrad.errors import ArtifactError
from aheadgrad.export.file import packed, write
from aheadgrad.testing.two import TwoTensor
from tests.test_artifact_attacks import forged


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("memory", torch.zeros(8))
        self.register_buffer("part", self.memory[2:6])

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        y.t_()
        x.add_(1)
        h = self.norm(self.linear(x)) + self.part + torch.tensor([1.0, 2.0, 3.0, 4.0])
        return {"loss": h.square().mean(), "row": h[0], "rest": x.view(-1)[1:], "all": h}


def example() -> tuple[Tensor, Tensor]:
    return torch.randn(5, 4), torch.randn(2, 3)


def exported() -> aheadgrad.Exported:
    torch.manual_seed(0)
    return aheadgrad.export(Model(), example(), loss="loss", dynamic_shapes={"x": {0: "rows"}})


def whole_step() -> aheadgrad.Exported:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = model(x, y)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return aheadgrad.export(step, example())


@pytest.mark.parametrize("make", [exported, whole_step])
def test_saved_and_loaded(make: Any, tmp_path: Path) -> None:
    first, path = make(), tmp_path / "it.ag"
    first.save(path)
    assert path.read_bytes() == packed(make().stages, make().state)  # nothing in it tells runs apart
    again = aheadgrad.load(path)
    assert str(again) == str(first)
    assert again.state.keys() == first.state.keys()
    for seed in range(3):
        torch.manual_seed(seed)
        found = again.call(example())
        torch.manual_seed(seed)
        wanted = first.call(example())
        torch.testing.assert_close(found.output, wanted.output, rtol=0, atol=0)
        torch.testing.assert_close(dict(found.gradients), dict(wanted.gradients), rtol=0, atol=0)
    torch.testing.assert_close(again.state, first.state, rtol=0, atol=0)


def test_parameters_are_parameters_and_memory_is_shared(tmp_path: Path) -> None:
    exported().save(tmp_path / "it.ag")
    again = aheadgrad.load(tmp_path / "it.ag")
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in again.parameters.values())
    again.state["memory"].fill_(3)
    assert again.state["part"].tolist() == [3.0] * 4


def test_a_held_subclass(tmp_path: Path) -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.two = nn.Parameter(TwoTensor(torch.ones(3), torch.zeros(3)))

        def forward(self, x: Tensor) -> Tensor:
            return self.two * x

    made = aheadgrad.export(Holds(), (torch.arange(3.0),))
    made.save(tmp_path / "it.ag")
    found = aheadgrad.load(tmp_path / "it.ag").run(torch.arange(3.0))
    assert type(found) is TwoTensor
    assert found.a.tolist() == [0.0, 1.0, 2.0]


def exports_and_what_they_were_made_from() -> tuple[list[Any], list[Any]]:
    model = Model()
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = model(x, y)["loss"]
        loss.backward()
        optimizer.step()
        return loss

    given = example()
    made = [aheadgrad.export(model, given, loss="loss"), aheadgrad.export(step, given)]
    return made, [weakref.ref(t) for t in (model, optimizer, *given, *model.parameters())]


def test_an_export_holds_nothing_of_what_it_was_made_from() -> None:
    made, refs = exports_and_what_they_were_made_from()
    gc.collect()
    assert [ref() for ref in refs if ref() is not None] == []
    assert len(made) == 2


def test_the_command_line_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exported().save(tmp_path / "it.ag")
    assert main(["show", str(tmp_path / "it.ag")]) == 0
    shown = capsys.readouterr().out
    for line in ("joint export", "parameter  linear.weight: f32[4, 4]", "gradient   of linear.weight"):
        assert line in shown
    assert "(rows): dimension 0 of x" in shown


def test_other_things_are_no_exports(tmp_path: Path) -> None:
    made = exported()
    (tmp_path / "text").write_text("no zip")
    write(tmp_path / "none", made.stages[0], made.state)
    write(tmp_path / "poor", made.stages, {})
    write(tmp_path / "other", made.stages, {**made.state, "linear.weight": torch.ones(3)})
    for name, why in (("text", "no file"), ("none", "no export"), ("poor", "lacks"), ("other", "holds")):
        with pytest.raises(ArtifactError, match=why):
            aheadgrad.load(tmp_path / name)


@pytest.mark.parametrize("make", [exported, pytest.param(whole_step, marks=pytest.mark.zoo)])
def test_forged_exports_are_refused_or_sound(make: Any, tmp_path: Path) -> None:
    """Fields are exchanged, with checksums that fit; what loads can be printed and run, or raises."""
    made = make()
    counts = {"refused": 0, "loaded": 0}
    for k, (_, bad) in enumerate(forged(packed(made.stages, made.state), random.Random(5))):
        (tmp_path / str(k)).write_bytes(bad)
        try:
            found = aheadgrad.load(tmp_path / str(k))
        except ArtifactError:
            counts["refused"] += 1
            continue
        counts["loaded"] += 1
        assert str(found)
    assert counts["refused"] > 100
