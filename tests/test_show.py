"""`python -m aheadgrad show FILE`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import aheadgrad
from aheadgrad.__main__ import main


@pytest.fixture
def file(tmp_path: Path) -> Path:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    exported = aheadgrad.export(model, (torch.randn(2, 3),), tangents=True, partition="default")
    exported.save(tmp_path / "model.ag")
    return tmp_path / "model.ag"


def test_a_file_is_printed(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(file)]) == 0
    text = capsys.readouterr().out
    assert "2 tensors of 64 bytes" in text
    assert "parameter  0.weight: f32[4, 3]" in text
    assert "= aten.tanh.default(addmm)" in text
    assert "backward program" in text
    assert "tanh: f32[2, 4], 32 bytes, used by tanh_backward  # test_show.py:" in text
    assert "together 32 bytes, besides inputs" in text


def test_a_damaged_file_is_an_error(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_bytes(file.read_bytes()[:100])
    assert main(["show", str(file)]) == 1
    assert "or a part of one" in capsys.readouterr().err
    assert main(["show", str(file.with_name("nothing"))]) == 1
