"""Generated programs (views, writes, changes of shape and memory, shared inputs) are exported and run.

Results, arguments afterwards, who shares memory with whom, and gradients are eager's.

`make test` runs some, `make test-more` many of them.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from aheadgrad.errors import AheadgradError
from aheadgrad.testing.programs import Program, generate
from tests.export_cases import export

FEW, MANY = 40, 400
FEWEST = 0.8  # of the programs, how many have to agree: others raise in eager, or are refused


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Generated code does what torch warns of, and may leave grad mode changed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_grad_enabled(True)


def observed(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    try:
        out = fn(*args)
    finally:
        torch.set_grad_enabled(True)
    flat = [t for t in tree_leaves((out, args)) if isinstance(t, Tensor)]
    storages = [t.untyped_storage() for t in flat]
    keys = [s.data_ptr() if s.nbytes() else -i for i, s in enumerate(storages)]
    looks = [(tuple(t.shape), t.stride(), t.storage_offset(), t.dtype) for t in flat]
    objects = [next(i for i, u in enumerate(flat) if u is t) for t in flat]
    return [t.detach().clone() for t in flat], ([keys.index(k) for k in keys], looks, objects)


def check_results(program: Program) -> str:
    try:
        values, rest = observed(program.fn, program.make_inputs().args)
    except Exception:
        return "raises in eager"
    try:
        exported = export(program.fn, program.make_inputs().args)
    except AheadgradError:
        return "refused"
    finally:
        torch.set_grad_enabled(True)
    found, others = observed(exported.run, program.make_inputs().args)
    torch.testing.assert_close(found, values, rtol=0, atol=0, equal_nan=True, msg=str(program))
    assert others == rest, program
    return "same"


def differentiable(t: Any) -> bool:
    try:
        return isinstance(t, Tensor) and t.requires_grad and t.is_floating_point()
    except RuntimeError:
        return False


def check_gradients(program: Program) -> str:
    def fn(*args: Any) -> Any:
        out = program.fn(*args)
        torch.set_grad_enabled(True)
        return sum(
            ((t * t).sum() + t.sin().sum() for t in tree_leaves(out) if differentiable(t)), torch.zeros(())
        )

    def leaves(args: tuple[Any, ...]) -> dict[str, Tensor]:
        found = {f"args[{k}]": t for k, t in enumerate(args) if isinstance(t, Tensor) and t.requires_grad}
        return {path: t for path, t in found.items() if t.is_leaf and sum(t is u for u in args) == 1}

    args = program.make_inputs().args
    wanted = leaves(args)
    try:
        torch.manual_seed(0)
        loss = fn(*args)
        if not wanted or not loss.requires_grad:
            return "nothing to differentiate"
        loss.backward(retain_graph=True)  # of all inputs, which may raise where some of them do not
        grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    except Exception:
        return "raises in eager"
    try:
        partition = (None, "default", "min_cut")[program.seed % 3]
        exported = export(fn, program.make_inputs().args, loss=0, partition=partition)
    except AheadgradError:
        return "refused"
    finally:
        torch.set_grad_enabled(True)
    torch.manual_seed(0)
    step = exported.run(*program.make_inputs().args)
    torch.testing.assert_close(step.output, loss.detach(), equal_nan=True, msg=str(program))
    for path, grad in zip(wanted, grads, strict=True):
        found = step.gradients.get(path)
        assert (found is None) == (grad is None), program
        torch.testing.assert_close(found, grad, equal_nan=True, msg=str(program))
    return "same"


RANGES = [
    pytest.param(range(FEW), id="some"),
    pytest.param(range(FEW, MANY), id="many", marks=pytest.mark.zoo),
]


@pytest.mark.parametrize("seeds", RANGES)
@pytest.mark.parametrize("check", [check_results, check_gradients], ids=["results", "gradients"])
def test_generated_programs(check: Callable[[Program], str], seeds: range) -> None:
    counts = Counter(check(generate(seed)) for seed in seeds)
    apart = counts["raises in eager"] + counts["nothing to differentiate"]
    assert counts["same"] >= FEWEST * (len(seeds) - apart), counts
