"""A few hundred of the dense programs, compiled against eager (`make fuzz FUZZ=--dense` has more)."""

from __future__ import annotations

import pytest
import torch

from aheadgrad.testing.dense import generate_dense
from aheadgrad.testing.fuzz import Settings, check, load_compiler

CHUNK = 50


@pytest.mark.parametrize("first", range(0, 400, CHUNK))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_dense_programs(first: int) -> None:
    settings = Settings(dense=True)
    compiler = load_compiler("trace", {})
    for seed in range(first, first + CHUNK):
        found = check(generate_dense(seed), settings, compiler).disagreements
        assert not found, f"seed {seed}: {found[0]}"


def test_the_same_seed_gives_the_same_program() -> None:
    torch.manual_seed(0)
    assert str(generate_dense(3)) == str(generate_dense(3)) != str(generate_dense(4))
