"""Rules of the house that a machine can check: whose code we import, and where private torch is used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import aheadgrad

SOURCE = Path(aheadgrad.__file__).parent
COMPETITOR = (
    "functorch.compile",
    "torch._functorch.aot_autograd",
    "torch._functorch._aot_autograd",
    "torch._functorch.partitioners",
    "torch._functorch.compilers",
)


def imported_names(tree: ast.AST) -> list[tuple[int, str]]:
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append((node.lineno, node.module))
            names += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return names


def source_files() -> list[Path]:
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 50
    return files


def test_the_package_never_names_torchs_own_implementation() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line} {name}"
        for path in source_files()
        for line, name in imported_names(ast.parse(path.read_text()))
        if name.startswith(COMPETITOR)
    ]
    assert found == []


def test_private_modules_of_torch_are_imported_in_torchlayer_only() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line} {name}"
        for path in source_files()
        if path.parent.name != "torchlayer"
        for line, name in imported_names(ast.parse(path.read_text()))
        if name.startswith("torch.") and "._" in name
    ]
    assert found == []


def test_private_attributes_of_torch_are_used_in_torchlayer_only() -> None:
    found = []
    for path in source_files():
        if path.parent.name == "torchlayer":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_C"):
                value = node.value
                if isinstance(value, ast.Name) and value.id == "torch":
                    found.append(f"{path.relative_to(SOURCE)}:{node.lineno} torch.{node.attr}")
    assert found == []


@pytest.mark.parametrize("frontend", ["trace", "dynamo"])
def test_compiling_and_training_does_not_load_torchs_own_implementation_through_us(frontend: str) -> None:
    """What torch itself imports is its business: our package adds nothing to it."""
    script = f"""
import sys, torch
from torch._subclasses.fake_tensor import FakeTensorMode
x = torch.ones(3, requires_grad=True)
FakeTensorMode()  # torch pulls in Dynamo here
if {frontend!r} == "dynamo":
    torch.compile(lambda t: (t * t).sum(), backend="eager")(x).backward()
before = set(sys.modules)
import aheadgrad
aheadgrad.compile(lambda t: (t * t).sum(), frontend={frontend!r})(x).backward()
new = set(sys.modules) - before
bad = [m for m in new if m.startswith(('functorch.compile', 'torch._functorch.aot_autograd',
       'torch._functorch._aot_autograd', 'torch._functorch.partitioners', 'torch._functorch.compilers'))]
print(bad)
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip().splitlines()[-1] == "[]"
