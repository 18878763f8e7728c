"""`docs/parity.md` names 93 tests of torch's, once each, and tests of ours that are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "parity.md"
ROW = re.compile(r"^\| `(?P<theirs>test_\w+)` \| (?P<ours>.*?) \|(?P<remark>.*)\|$", re.MULTILINE)
OURS = re.compile(r"`(tests/[\w/]+\.py)::([\w:]+)`")


def rows() -> list[re.Match[str]]:
    return list(ROW.finditer(PAGE.read_text()))


@cache
def names_in(path: str) -> set[str]:
    """Names of the tests in a file, those in a class as `Class::test`."""
    tree = ast.parse((ROOT / path).read_text())
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for group in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        found |= {f"{group.name}::{node.name}" for node in group.body if isinstance(node, ast.FunctionDef)}
    return {name for name in found if name.split("::")[-1].startswith("test_")}


def test_every_name_is_there_once() -> None:
    names = [row["theirs"] for row in rows()]
    assert len(names) == len(set(names)) == 93
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert len(lines) == 93, "a line of the table that this test cannot read"


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["theirs"])
def test_counterparts_exist(row: re.Match[str]) -> None:
    ours = OURS.findall(row["ours"])
    assert ours or re.search(r"\bissue \d+\b", row["ours"]), "neither a test of ours nor an issue"
    assert len(ours) == row["ours"].count("`") // 2
    assert [f"{path}::{name}" for path, name in ours if name not in names_in(path)] == []


def test_the_page_leaves_out_no_graph() -> None:
    page = PAGE.read_text()
    paths = ["tests/parity/test_graph_text.py", "tests/parity/test_graph_text_aliasing.py"]
    named = [f"`{path}::{name}`" for path in paths for name in names_in(path)]
    assert [name for name in named if name not in page] == []
