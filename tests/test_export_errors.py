"""Mistakes, and what an export cannot do: each error names the argument, and the way out."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aheadgrad
from aheadgrad.errors import ArtifactError, CaptureError, InvalidOption, UnsupportedInput
from tests.export_cases import export

NAMED = {"x": {0: "batch"}, "y": {0: "batch"}}


def test_sizes_of_one_name_are_one_size() -> None:
    def joined(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y]) * x.shape[0]

    exported = export(joined, (torch.ones(3), torch.ones(3)), dynamic_shapes=NAMED)
    torch.testing.assert_close(exported.run(torch.ones(5), torch.ones(5)), torch.full((10,), 5.0))
    with pytest.raises(UnsupportedInput, match="batch is 3 in x and 4 in y"):
        exported.run(torch.ones(3), torch.ones(4))


def test_sizes_go_by_the_names_that_they_were_given() -> None:
    exported = export(lambda x, y: x + y, (torch.ones(3), torch.ones(3)), dynamic_shapes=NAMED)
    with pytest.raises(UnsupportedInput, match=r"y has size \(4,\); the export was made for \(batch\)"):
        exported.run(torch.ones(3), torch.ones(4))
    with pytest.raises(UnsupportedInput, match=r"x has size 1 in dimension 0 \(batch\); .* begin at 2"):
        exported.run(torch.ones(1), torch.ones(1))
    pairs = export(lambda x: x.view(-1, 2) + 1, (torch.ones(4),), dynamic_shapes={"x": {0: "batch"}})
    with pytest.raises(UnsupportedInput, match=r"batch is 5: the export holds where .*batch"):
        pairs.run(torch.ones(5))


def test_what_is_no_function() -> None:
    x = torch.ones(3)
    exported = export(torch.sin, (x,))
    for wrong, text in ((3, "not int"), (exported, "an export already")):
        with pytest.raises(InvalidOption, match=text):
            export(wrong, (x,))


def test_what_is_no_file(tmp_path: Path) -> None:
    exported = export(torch.sin, (torch.ones(3),))
    for path, text in ((tmp_path / "none", "none is not there"), (tmp_path, "is a directory")):
        with pytest.raises(ArtifactError, match=text):
            aheadgrad.load(path)
    for path, text in (
        (tmp_path / "none" / "x.ag", "directory that is not there"),
        (tmp_path, "is a directory"),
    ):
        with pytest.raises(ArtifactError, match=text):
            exported.save(path)
    for call in (exported.save, aheadgrad.load):
        with pytest.raises(InvalidOption, match="path is a BytesIO"):
            call(io.BytesIO())  # type: ignore[operator]
    assert list(tmp_path.iterdir()) == []


def test_arguments_that_are_not_dense_or_lie_otherwise() -> None:
    exported = export(lambda x: x.sin(), (torch.ones(2, 3),))
    with pytest.raises(UnsupportedInput, match="x is sparse_coo; the export takes a dense tensor"):
        exported.run(torch.ones(2, 3).to_sparse())
    total = torch.zeros(())

    def flat(x: Tensor) -> Tensor:
        total.add_(1)
        return x.view(-1)

    exported = export(flat, (torch.ones(2, 3),))
    with pytest.raises(UnsupportedInput, match="x lies in memory in another way"):
        exported.run(torch.ones(3, 2).t())
    assert exported.state["total"] == 0  # nothing has run

    def copies_if_it_must(x: Tensor) -> Tensor:
        return x.contiguous().add_(1)

    with pytest.raises(UnsupportedInput, match=r"x has strides \(1, 2\)"):
        export(copies_if_it_must, (torch.ones(2, 3),)).run(torch.ones(3, 2).t())


def test_attributes_of_arguments() -> None:
    x: Any = torch.ones(3)
    x.tag = 3
    with pytest.raises(UnsupportedInput, match=r"reads x\.tag, an attribute"):
        export(lambda x: x * x.tag, (x,))
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        export(lambda x: x * x.other, (x,))


def test_a_parameter_made_inside() -> None:
    class Reassigns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            self.w = nn.Parameter(self.w.detach() * 2)
            return self.w * x

    with pytest.raises(CaptureError, match=r"an nn\.Parameter is made inside"):
        export(Reassigns(), (torch.ones(3),))


OPTIMIZERS: list[tuple[Callable[..., torch.optim.Optimizer], str]] = [
    (lambda p: torch.optim.Adam(p, fused=True), r"optimizer \(Adam\) has fused=True"),
    (lambda p: torch.optim.RAdam(p), r"optimizer \(RAdam\) decides what to do by numbers"),
    (lambda p: torch.optim.LBFGS(p), r"optimizer \(LBFGS\) decides what to do by numbers"),
]


@pytest.mark.parametrize(("make", "text"), OPTIMIZERS, ids=["fused", "RAdam", "LBFGS"])
def test_optimizers_that_cannot_be_recorded(make: Any, text: str) -> None:
    model = nn.Linear(3, 1)
    optimizer = make(model.parameters())

    def step(x: Tensor) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).square().sum()
            loss.backward()
            return loss

        return closure().detach() + (optimizer.step(closure) is None)

    with pytest.raises(CaptureError, match=text):
        export(step, (torch.ones(2, 3),))


class Resets(torch.optim.SGD):
    """Puts new tensors in the place of its state."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p]["momentum_buffer"] = self.state[p]["momentum_buffer"] * 0.5


class Counts(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state.setdefault("count", 0)
            state.setdefault("seen", torch.zeros(()))
            state["count"] += 1
            state["seen"] += 1
            with torch.no_grad():
                p.sub_(p.grad * 0.1 * state["count"])


class Lists(Counts):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("history", []).append(p.grad.clone())


def train(make: Any) -> tuple[Callable[[Tensor], Tensor], nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = make(model.parameters())

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, model


def test_state_that_gets_another_tensor() -> None:
    (theirs, _), (ours, _) = (train(lambda p: Resets(p, lr=0.1, momentum=0.9)) for _ in range(2))
    exported = export(ours, (torch.ones(2, 3),))
    for _ in range(4):
        torch.testing.assert_close(exported.run(torch.ones(2, 3)), theirs(torch.ones(2, 3)), rtol=0, atol=0)


def test_state_that_is_no_tensor() -> None:
    with pytest.raises(CaptureError, match="keeps 'count' as a number of Python's"):
        export(train(Counts)[0], (torch.ones(2, 3),))
    with pytest.raises(CaptureError, match="keeps a list in its state"):
        export(train(Lists)[0], (torch.ones(2, 3),))


def test_graphs_of_all_stages_go_back() -> None:
    step, _ = train(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    exported = export(step, (torch.ones(2, 3),))
    assert len(exported.graph_modules) == len(exported.stages) == 2
    assert exported.graph_module is exported.graph_modules[1]
    with pytest.raises(InvalidOption, match="2 programs in 2 stages, and 1 graphs were given"):
        exported.from_graph_module(exported.graph_module)
    wanted = exported.from_graph_module(*exported.graph_modules)
    theirs, _ = train(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    for _ in range(3):
        torch.testing.assert_close(wanted.run(torch.ones(2, 3)), theirs(torch.ones(2, 3)), rtol=0, atol=0)
