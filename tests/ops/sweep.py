"""Every differentiable op of torch's own op database, compiled against eager, to a given order.

    python tests/ops/sweep.py --order 2 [--samples 3] [--only linalg]

Prints each op that does not agree, then how many samples ended how. Ends with 1 when a compiled op gives
something else than eager or fails for another reason than those listed in docs/differences.md: Python
decisions on values, and calls that run uncompiled.
"""

from __future__ import annotations

import argparse
import sys
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import aheadgrad
from aheadgrad.errors import DataDependentError, FallbackError

DTYPE = torch.float64
LISTED = (DataDependentError, FallbackError)


def database() -> list[Any]:
    """Torch's ops with samples of their inputs; it asks for a module that it needs elsewhere only."""
    if "expecttest" not in sys.modules:
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stub
    from torch.testing._internal import common_methods_invocations as invocations

    def unseeded(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)  # a seed set inside would run uncompiled; it is set around instead

    invocations.wrapper_set_seed.__code__ = unseeded.__code__
    return [op for op in invocations.op_db if op.supports_autograd and DTYPE in op.dtypes]


def samples_of(op: Any, count: int) -> Iterator[tuple[Callable[..., Any], list[Tensor]]]:
    """Functions of tensors alone, each with its inputs: the first samples and one from the middle."""
    try:
        found = list(op.sample_inputs("cpu", DTYPE, requires_grad=True))
    except RuntimeError:  # a build without a library that the samples need
        return
    chosen = found[: count - 1]
    middle = len(found) // 2
    chosen += found[middle : middle + 1] if middle >= len(chosen) else []
    for sample in chosen:
        yield _function(op, sample)


def _function(op: Any, sample: Any) -> tuple[Callable[..., Any], list[Tensor]]:
    flat, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, v in enumerate(flat) if isinstance(v, Tensor)]

    def run(*tensors: Tensor) -> Any:
        values = list(flat)
        for i, t in zip(places, tensors, strict=True):
            values[i] = t
        first, rest, named = tree_unflatten(values, spec)
        return sample.output_process_fn_grad(op.op(first, *rest, **named))

    return run, [flat[i].detach().clone().requires_grad_(flat[i].requires_grad) for i in places]


def derivatives(run: Callable[..., Any], inputs: list[Tensor], order: int) -> list[Any]:
    """The outputs and all gradients, order after order, of inputs and tangents."""
    torch.manual_seed(0)
    outs = [o for o in tree_leaves(run(*inputs)) if isinstance(o, Tensor)]
    found: list[Any] = list(outs)
    leaves = [t for t in inputs if t.requires_grad]
    for n in range(order):
        outs = [o for o in outs if o is not None and o.requires_grad]
        if not outs:
            break
        generator = torch.Generator().manual_seed(n)
        tangents = [torch.randn(o.shape, generator=generator, dtype=DTYPE).to(o.dtype) for o in outs]
        more = n + 1 < order
        tangents = [t.requires_grad_(more) for t in tangents]
        grads = torch.autograd.grad(outs, leaves, tangents, create_graph=more, allow_unused=True)
        found += grads
        outs, leaves = list(grads), leaves + tangents
    return found


def difference(eager: list[Any], compiled: list[Any]) -> str:
    if len(eager) != len(compiled):
        return f"{len(compiled)} results, not {len(eager)}"
    for i, (e, c) in enumerate(zip(eager, compiled, strict=True)):
        if (e is None) != (c is None):
            return f"result {i} is {'None' if c is None else 'not None'}"
        if e is None:
            continue
        if e.requires_grad != c.requires_grad or e.dtype != c.dtype or e.shape != c.shape:
            return f"result {i} is of another kind"
        if e.layout == torch.strided and not torch.allclose(e, c, rtol=1e-7, atol=1e-9, equal_nan=True):
            return f"result {i} differs by {(e - c).abs().max().item():.3g}"
    return ""


def outcome(run: Callable[..., Any], inputs: list[Tensor], order: int) -> tuple[str, str]:
    """How one sample ended, and details where it did not agree."""
    try:
        expected = derivatives(run, inputs, order)
    except (RuntimeError, NotImplementedError, ValueError):
        return "eager raises", ""
    try:
        fast = aheadgrad.compile(run, fallback="error", frontend="trace", backend="eager")
        found = derivatives(fast, inputs, order)
    except LISTED as error:
        reason = str(error).splitlines()[0]
        return ("decides on values" if isinstance(error, DataDependentError) else "uncompiled"), reason
    except Exception as error:
        return "FAILS", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    wrong = difference(expected, found)
    return ("DIFFERS", wrong) if wrong else ("agrees", "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--order", type=int, default=1)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--only", default="", help="ops whose names contain this")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    ops = [op for op in database() if options.only in op.name]
    ops = [op for op in ops if options.order == 1 or op.supports_gradgrad]
    ends: Counter[str] = Counter()
    for op in ops:
        told: set[tuple[str, str]] = set()
        name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
        for run, inputs in samples_of(op, options.samples):
            if not any(t.requires_grad for t in inputs):
                continue
            end = outcome(run, inputs, options.order)
            ends[end[0]] += 1
            if end[1] and end not in told:
                told.add(end)
                print(f"{name}: {end[0]}: {end[1]}", flush=True)
    print(f"order {options.order}, {len(ops)} ops:", ", ".join(f"{n} {end}" for end, n in ends.most_common()))
    return 1 if ends["DIFFERS"] or ends["FAILS"] or not ends["agrees"] else 0


if __name__ == "__main__":
    sys.exit(main())
