"""What is saved and what is computed again: equal to eager at any budget, and never more than asked for."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from partition_cases import BUDGETS, Checkpointed, Dropout, Normed, trained
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import aheadgrad
from aheadgrad import compat
from aheadgrad.errors import InvalidOption
from examples.char_transformer import saved_bytes


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropout": Dropout,
    "norms": Normed,
    "checkpoint": Checkpointed,
    "reentrant": lambda: Checkpointed(use_reentrant=True),
    "plain": Plain,
}


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert torch.equal(a, b)


@pytest.mark.parametrize("frontend", ["trace", "dynamo"])
@pytest.mark.parametrize("name", MODELS)
def test_equal_at_every_budget(name: str, frontend: str) -> None:
    expected = trained(MODELS[name], 1)
    for budget in BUDGETS if frontend == "trace" else (0.25,):
        assert_equal(trained(MODELS[name], 1, memory_budget=budget, frontend=frontend), expected)
    for options in ({"partition": "min_cut"}, {"memory": "less"}):
        assert_equal(trained(MODELS[name], 1, frontend=frontend, **options), expected)


@pytest.mark.parametrize("name", ["dropout", "norms", "checkpoint", "plain"])
def test_second_derivatives_at_every_budget(name: str) -> None:
    expected = trained(MODELS[name], 2)
    for budget in BUDGETS:
        found = trained(MODELS[name], 2, memory_budget=budget, frontend="trace")
        torch.testing.assert_close(found, expected)  # two ways meet in a sum, in either order


def saved_by(model: nn.Module, run: Callable[..., Tensor], x: Tensor) -> int:
    run(x).sum().backward()  # compile first
    known = [*model.parameters(), *model.buffers(), x]
    return saved_bytes(lambda: run(x), known)


@pytest.mark.parametrize("make", [Dropout, Normed, Plain])
def test_a_smaller_budget_saves_less_and_does_more_again(make: Callable[[], nn.Module]) -> None:
    model, x = make(), torch.randn(256, 16)
    eager = saved_by(model, model, x)
    saved, again = [], []
    for budget in BUDGETS:
        compiled = aheadgrad.compile(model, frontend="trace", fallback="error", memory_budget=budget)
        saved.append(saved_by(model, compiled, x))
        (report,) = compiled.memory()
        again.append(sum(a.flops for a in report.again))
        assert saved[-1] <= report.bytes_saved  # which counts buffers that the call updates
    assert saved == sorted(saved)
    assert again == sorted(again, reverse=True)
    assert saved[0] < saved[-1] <= eager
    for budget, size in zip(BUDGETS, saved, strict=True):
        assert size <= max(saved[0], budget * saved[-1])


def test_the_default_saves_no_more_than_eager() -> None:
    for name, make in MODELS.items():
        if name in ("checkpoint", "reentrant"):
            continue  # eager keeps the state of the generator out of sight
        for autocast in (False, True):
            model, x = make(), torch.randn(64, 16)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                compiled = aheadgrad.compile(model, frontend="trace", fallback="error")
                assert saved_by(model, compiled, x) <= saved_by(model, model, x), (name, autocast)


def test_a_region_saves_its_inputs_and_nothing_inside() -> None:
    model, x = Checkpointed(), torch.randn(256, 16)
    compiled = aheadgrad.compile(model, frontend="trace", fallback="error")
    states = 2 * 5056
    assert saved_by(model, compiled, x) <= saved_by(model, model, x) + states
    (report,) = compiled.memory()
    assert {"aten.gelu.default", "aten.addmm.default"} <= {a.op for a in report.again}
    assert sum("state" in s.name for s in report.saved) == 2


def test_a_selective_policy_decides_in_its_region() -> None:
    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        products = torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if op is products else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    expected = trained(lambda: Checkpointed(context_fn=contexts), 1)
    assert_equal(trained(lambda: Checkpointed(context_fn=contexts), 1, frontend="trace"), expected)
    compiled = aheadgrad.compile(Checkpointed(context_fn=contexts), frontend="trace", fallback="error")
    compiled(torch.randn(64, 16)).sum().backward()
    (report,) = compiled.memory()
    assert "aten.addmm.default" not in {a.op for a in report.again}
    assert "aten.gelu.default" in {a.op for a in report.again}


def test_policies_of_the_user() -> None:
    model, x = Plain(), torch.randn(64, 16)
    aten = torch.ops.aten

    def report(*policies: aheadgrad.Policy) -> aheadgrad.MemoryReport:
        compiled = aheadgrad.compile(model, frontend="trace", fallback="error", policies=policies)
        compiled(x).sum().backward()
        return compiled.memory()[0]

    assert not report(aheadgrad.save(op=aten.tanh)).again
    assert {a.op for a in report(aheadgrad.recompute(op=aten.tanh.default)).again} == {"aten.tanh.default"}
    both = report(aheadgrad.recompute(region="forward"), aheadgrad.save(op=aten.addmm))
    assert "aten.addmm.default" not in {a.op for a in both.again}
    assert any("policy" in s.reason for s in both.saved)
    tanh = aheadgrad.save(op=aten.tanh, must=False)
    assert report(tanh) == report(aheadgrad.save(op=aten.tanh))
    named = report(aheadgrad.recompute(name="tanh_3"))
    assert [a.name for a in named.again] == ["tanh_3"]


def test_the_report_is_a_frozen_value_that_prints_itself() -> None:
    captured = aheadgrad.capture(Plain(), torch.randn(4, 16))
    report = captured.memory()
    assert report == captured.memory()
    assert all(s.reason for s in report.saved)
    assert any("test_partition.py" in s.line for s in report.saved)
    assert [c.budget for c in report.curve] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert "memory_budget" in str(report)
    assert str(report) in captured.explain()


def test_what_cannot_be_asked_for() -> None:
    def bad(**options: Any) -> str:
        with pytest.raises(InvalidOption) as caught:
            aheadgrad.compile(torch.sin, **options)
        return str(caught.value)

    assert "min_cut" in bad(partition="minimal")
    assert "less" in bad(memory="none")
    assert "from 0 to 1" in bad(memory_budget=2)
    assert "aheadgrad.save" in bad(policies=["save"])
    assert "function" in bad(partition=compat.default_partition, memory="less")


def test_the_drop_in_cuts_too() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ w).sin().cos().exp() * x).sum()

    kept: list[int] = []

    def forward(graph: Any, _: Any) -> Any:
        kept.append(len(graph.graph.output_node().args[0]))
        return graph

    for partition in (compat.default_partition, compat.min_cut_rematerialization_partition):
        x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
        run = compat.aot_function(f, fw_compiler=forward, bw_compiler=compat.nop, partition_fn=partition)
        run(x, w).backward()
        expected = torch.autograd.grad(f(x, w), (x, w))
        assert_equal([x.grad, w.grad], list(expected))
    assert kept[1] < kept[0]


def test_nothing_is_made_earlier_than_it_must_be() -> None:
    """The gradient of `b` rests on what others need as well: it is made just before that goes."""

    def f(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return (x.sin() * w + b).exp()

    x, w, b = (torch.randn(n, 8, requires_grad=True) for n in (32, 32, 1))
    compiled = aheadgrad.compile(f, frontend="trace", backend="eager", partition="min_cut")
    compiled(x, w, b).sum().backward()
    ops = compiled.entries[0].entry.split.backwards[0].ops
    made = next(op for op in ops if "sum" in op.name)
    (taken,) = made.uses
    users = [op for op in ops if taken in op.uses]
    assert len(users) == 3
    assert users[-2] is made
    assert ops.index(users[-1]) == ops.index(made) + 1


def test_what_is_computed_twice_is_kept_once_and_results_stay_apart() -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        masks = [(torch.arange(8)[:, None] < 5).float() @ torch.ones(1, 8) for _ in range(3)]
        for mask in masks:
            x = torch.sin(x * mask) @ w
        return x, w * 2, w * 2

    given = [torch.randn(8, 8, requires_grad=True) for _ in range(2)]
    fast = aheadgrad.compile(f, partition="min_cut", frontend="trace", backend="eager")
    found, expected = fast(*given), f(*given)
    assert torch.equal(found[0], expected[0])
    assert found[1].data_ptr() != found[2].data_ptr()
    ours, theirs = (torch.autograd.grad([o.sum() for o in out], given) for out in (found, expected))
    torch.testing.assert_close(ours, theirs)
    assert fast.source.count("f_lt(") == 1


class Headed(nn.Module):
    """Logits are cheap to compute again for their size, but they are read first in the backward."""

    def __init__(self, logarithms: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.logarithms = logarithms
        each = (
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32)) for _ in "123456"
        )
        self.layers = nn.ModuleList(each)
        self.head = nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 256, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return -self.logarithms(self.head(x))[:, 0].mean()


@pytest.mark.parametrize("loss", [lambda x: torch.log_softmax(x, -1), lambda x: x - x.logsumexp(-1, True)])
def test_what_is_there_at_the_peak_anyway_is_not_computed_again(loss: Callable[[Tensor], Tensor]) -> None:
    model, x = Headed(loss), torch.randn(256, 32)
    reports = []
    for budget in (0.6, 0.55, 0.5, 0.4, 0.3, 0.2):
        compiled = aheadgrad.compile(model, frontend="trace", fallback="error", memory_budget=budget)
        compiled(x).backward()
        reports += compiled.memory()
    first = reports[1]
    assert [a.name for a in first.again if a.flops] == ["addmm"]
    assert first.peak < reports[0].peak
    saved, again = [r.bytes_saved for r in reports], [sum(a.flops for a in r.again) for r in reports]
    assert saved == sorted(saved, reverse=True)
    assert again == sorted(again)
