"""The laws of the architecture: acyclic packages, what is live behind one door, stages as values."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aheadgrad
from aheadgrad.backends.eager import compile_eager
from aheadgrad.codec.decoding import decode
from aheadgrad.codec.encoding import encode
from aheadgrad.errors import AheadgradError
from aheadgrad.partition.split import split
from aheadgrad.program.values import Value

SOURCE = Path(aheadgrad.__file__).parent
AFTER_LOWER = (
    "program",
    "joint",
    "facts",
    "partition",
    "codec",
    "backends",
    "emit",
    "conventions",
    "runtime",
    "report",
)


def imports() -> dict[str, set[str]]:
    """By package: the packages that it imports, at the top of a file or inside of functions."""
    found: dict[str, set[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).parts
        if parts == ("__init__.py",):
            continue
        own = parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "aheadgrad":
                names = (
                    [f"aheadgrad.{a.name}" for a in node.names]
                    if node.module == "aheadgrad"
                    else [node.module]
                )
                found.setdefault(own, set()).update(str(name).split(".")[1] for name in names)
    return {own: others - {own} for own, others in found.items()}


def test_no_two_files_have_one_name() -> None:
    """An idea is found by the name of its file; the door to torch has the names of what it is for."""
    files = [p for p in SOURCE.rglob("*.py") if p.name != "__init__.py"]
    names = [p.stem for p in files if p.parent.name not in ("torchlayer", "testing")]
    assert sorted(names) == sorted(set(names))


def test_packages_import_each_other_in_one_direction() -> None:
    left = imports()
    order: list[str] = []
    while left:
        free = sorted(own for own, others in left.items() if not others & left.keys())
        assert free, f"these packages import each other in a circle: {sorted(left)}"
        order += free
        left = {own: others for own, others in left.items() if own not in free}
    assert order.index("torchlayer") < order.index("program") < order.index("recording")
    assert order.index("runtime") < order.index("pipeline") < order.index("export") < order.index("api")


def test_nothing_after_lowering_imports_the_recording() -> None:
    found = imports()
    assert {own for own in AFTER_LOWER if "recording" in found[own]} == set()


def test_nothing_after_lowering_knows_the_walk() -> None:
    found = imports()
    above = {"pipeline", "frontends", "export", "api", "compat"}
    assert {own: found[own] & above for own in AFTER_LOWER if found[own] & above} == {}


def test_private_attributes_of_torch_are_used_in_torchlayer_only() -> None:
    """Names with an underscore behind `torch`, its functions or `Tensor`; ops are no part of that."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        if path.parent.name == "torchlayer" or "testing" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                not isinstance(node, ast.Attribute)
                or not node.attr.startswith("_")
                or node.attr.startswith("__")
            ):
                continue
            chain, value = [node.attr], node.value
            while isinstance(value, ast.Attribute):
                chain.append(value.attr)
                value = value.value
            if isinstance(value, ast.Name) and value.id in ("torch", "Tensor", "fx", "functional"):
                chain.append(value.id)
                if "ops" not in chain:
                    found.append(f"{path.relative_to(SOURCE)}:{node.lineno} {'.'.join(reversed(chain))}")
    assert found == []


def mix(x: Tensor, w: Tensor) -> Any:
    h = (x @ w).relu()
    return h, h.sum(0), x.t()


def update(x: Tensor, w: Tensor) -> Any:
    x = x * 2
    x.add_(w.sum())
    return x.view(-1), torch.topk(x, 2)


def grow(x: Tensor, w: Tensor) -> Any:
    w.mul_(2)
    return torch.cat([x, x]).reshape(x.shape[0] * 2, -1) @ w


PROGRAMS: dict[str, Callable[..., Any]] = {"mix": mix, "update": update, "grow": grow}


def example() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(3, 4, requires_grad=True), torch.randn(4, 4)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_joint_program_survives_a_round_trip(name: str) -> None:
    joint = aheadgrad.capture(PROGRAMS[name], *example()).joint
    again = decode(encode(joint))
    assert str(again) == str(joint)
    assert str(again.facts) == str(joint.facts)
    assert again.signature == joint.signature


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_loaded_joint_program_can_be_split_and_run(name: str) -> None:
    x, w = example()
    joint = aheadgrad.capture(PROGRAMS[name], x, w).joint
    again = decode(encode(joint))
    first, second = split(joint), decode(encode(split(again)))
    assert str(second.forward) == str(first.forward)
    assert list(map(str, second.backwards)) == list(map(str, first.backwards))
    given = [x.detach(), w.clone()]
    results = [compile_eager(one.forward).call([t.clone() for t in given]) for one in (first, second)]
    torch.testing.assert_close(results[1], results[0])


def test_symbolic_sizes_survive_a_round_trip() -> None:
    compiled = aheadgrad.compile(lambda x: (x * 2).reshape(x.shape[0] * 3), dynamic=True, frontend="trace")
    compiled(torch.ones(5, 3, requires_grad=True)).sum().backward()
    joint = compiled.entries[0].entry.joint
    again = decode(encode(joint))
    assert str(again) == str(joint)
    assert "s" in str(next(p.value.type.size for p in again.program.inputs if type(p.value) is Value))
    again.program.graph.lint()


def test_an_entry_whose_door_is_closed_runs_what_it_was_compiled_for() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    compiled = aheadgrad.compile(model, frontend="trace")
    x = torch.randn(5, 3, requires_grad=True)

    def gradient(call: Any, tangent: Tensor) -> Tensor:
        return torch.autograd.grad(call(x), x, tangent)[0]

    ones, columns = torch.ones(5, 2), torch.ones(2, 5).t()
    gradient(compiled, ones)
    (entry,) = compiled.entries
    entry.entry.close()
    torch.testing.assert_close(gradient(compiled, ones), gradient(model, ones))
    with pytest.raises(AheadgradError, match="closed"):
        gradient(compiled, columns)


def test_a_graph_that_goes_out_is_a_private_copy() -> None:
    captured = aheadgrad.capture(mix, *example())
    first, second = captured.joint.program.module, decode(encode(captured.joint)).program.module
    pairs = zip(first.graph.nodes, second.graph.nodes, strict=True)
    fakes = [(a.meta["val"], b.meta["val"]) for a, b in pairs if isinstance(a.meta.get("val"), Tensor)]
    assert fakes
    for a, b in fakes:
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
        assert a is not b


@pytest.mark.parametrize("frontend", ["trace", "dynamo"])
def test_a_backend_is_told_what_stays_and_what_is_donated(frontend: str) -> None:
    asked: list[Any] = []

    def backend(request: Any) -> Any:
        asked.append(request)
        return compile_eager(request)

    model = nn.Linear(3, 2)
    compiled = aheadgrad.compile(model, backend=backend, frontend=frontend, fallback="error")
    out = compiled(torch.randn(4, 3)).tanh()
    assert [request.role for request in asked] == ["forward"]
    (forward,) = asked
    assert len(forward.static) == 2
    assert all(tuple(forward.example_inputs()[i].shape) in ((2, 3), (2,)) for i in forward.static)
    out.sum().backward()
    assert [request.role for request in asked] == ["forward", "backward"]
    backward = asked[1]
    assert len(backward.tangent_strides) == 1
    assert set(backward.donated).isdisjoint(backward.static)
