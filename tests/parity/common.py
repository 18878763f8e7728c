"""The helper of the parity tests: run a function in eager and compiled, compare all that shows.

`verify` makes fresh inputs for every run and compares, between eager and each way of compiling:
outputs, how they relate to the inputs and to each other, gradients of every output and of every
input that has a history afterwards, the inputs afterwards, and what happens when the caller then
writes into an output and differentiates once more.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from .peer import OURS, PEER, api, compile_plainly


@dataclass
class Inputs:
    """What one call gets (`args`), and the tensors it was made from (`roots`)."""

    roots: Sequence[Any]
    args: Sequence[Any]


WRITTEN = "written to"
Make = Callable[[], "Inputs | Sequence[Any]"]


@dataclass
class Cell:
    """Keeps the graphs that a compiler was handed."""

    graphs: list[torch.fx.GraphModule] = field(default_factory=list)

    @property
    def last(self) -> torch.fx.GraphModule:
        if PEER == "eager":
            pytest.skip("eager has no graph")
        return self.graphs[-1]

    @property
    def text(self) -> str:
        return str(self.last.code).strip()


def extract_graph(cell: Cell) -> Any:
    """A boxed compiler that keeps the graph it gets in `cell` and runs it as it is."""

    def keep(graph: torch.fx.GraphModule, _example_inputs: Sequence[Any]) -> torch.fx.GraphModule:
        cell.graphs.append(graph)
        return graph

    return api.make_boxed_compiler(keep)


def compile_and_keep(fn: Any, cell: Cell, *, backward: Cell | None = None, **options: Any) -> Any:
    """`fn` through the drop-in entry; its forward graph ends up in `cell`, its backward's in `backward`."""
    entry = api.aot_module if isinstance(fn, torch.nn.Module) else api.aot_function
    bw_compiler = api.nop if backward is None else extract_graph(backward)
    return entry(fn, fw_compiler=extract_graph(cell), bw_compiler=bw_compiler, **options)


def fresh(make: Make, *, nonleaf: bool, seed: int) -> Inputs:
    """New inputs. With `nonleaf`, the call gets `x + 1` for each tensor `x`: autograd lets one change it."""
    torch.manual_seed(seed)
    made = make()
    if isinstance(made, Inputs):
        return made
    if not nonleaf:
        return Inputs(made, made)
    return Inputs(made, [x + 1 if isinstance(x, Tensor) else x for x in made])


def verify(
    fn: Any,
    make: Make,
    *,
    nonleaf: bool = False,
    keep: Sequence[bool] = (True, False),
    dynamic: bool = False,
    decompositions: dict[Any, Any] | None = None,
    skip: Sequence[str] = (),
) -> None:
    """Fail unless `fn` compiled does what `fn` does.

    `keep` are the values of `keep_inference_input_mutations` to go through; our own `compile`, with
    `fallback="error"`, is a further way. Each is called twice, so that the second call finds it compiled.
    `skip` names steps that another test looks at.
    """
    shared: dict[str, Any] = {"dynamic": dynamic, "decompositions": decompositions}
    for kept in keep:
        options = {"keep_inference_input_mutations": kept, **shared}
        _verify_one(fn, make, nonleaf, skip, lambda f: compile_and_keep(f, Cell(), **options))
    if OURS:
        _verify_one(fn, make, nonleaf, skip, lambda f: compile_plainly(f, **shared))


def _verify_one(
    fn: Any, make: Make, nonleaf: bool, skip: Sequence[str], compiler: Callable[[Any], Any]
) -> None:
    is_module = isinstance(fn, torch.nn.Module)
    eager, original = (copy.deepcopy(fn), copy.deepcopy(fn)) if is_module else (fn, fn)
    compiled = compiler(original)
    for seed in range(2):
        expected = observe(eager, fresh(make, nonleaf=nonleaf, seed=seed), eager)
        may_raise = expected == [("the call raised", True)]
        found = observe(compiled, fresh(make, nonleaf=nonleaf, seed=seed), original, may_raise=may_raise)
        assert_same(*([step for step in seen if step[0] not in skip] for seen in (found, expected)))


@contextmanager
def told_briefly() -> Iterator[None]:
    """Report an error by its text alone: pytest would print the arguments, and crash on emptied tensors."""
    try:
        yield
    except Exception:
        pytest.fail(traceback.format_exc(), pytrace=False)


def forward_text(fn: Any, make: Make, *, keep: bool = False, nonleaf: bool = True) -> str:
    """The forward graph that the compiler is handed, printed."""
    cell = Cell()
    compiled = compile_and_keep(copy.deepcopy(fn), cell, keep_inference_input_mutations=keep)
    with told_briefly():
        compiled(*fresh(make, nonleaf=nonleaf, seed=0).args)
    return cell.text


def assert_same(found: list[tuple[str, Any]], expected: list[tuple[str, Any]]) -> None:
    for (label, got), (other_label, wanted) in zip(found, expected, strict=False):
        assert label == other_label
        _assert_close(label, got, wanted)
    assert len(found) == len(expected)


def _assert_close(label: str, got: Any, wanted: Any) -> None:
    if label.startswith(WRITTEN) and got == "yes" and wanted == "secretly":
        return  # some ops write without counting; we may count
    if isinstance(wanted, Tensor):
        assert isinstance(got, Tensor), f"{label}: {got!r}, eager has {wanted!r}"
        torch.testing.assert_close(got, wanted, equal_nan=True, msg=lambda text: f"{label}: {text}")
    elif isinstance(wanted, list | dict) and type(got) is type(wanted):
        assert len(got) == len(wanted), f"{label}: {got!r}, eager has {wanted!r}"
        for key in wanted if isinstance(wanted, dict) else range(len(wanted)):
            _assert_close(f"{label}[{key!r}]", got[key], wanted[key])
    else:
        same = not isinstance(got, Tensor) and got == wanted
        assert same, f"{label}: {got!r}, eager has {wanted!r}"


def observe(
    fn: Callable[..., Any], inputs: Inputs, owner: Any = None, *, may_raise: bool = True
) -> list[tuple[str, Any]]:
    """Call `fn` and write down, step by step, all that its caller can see."""
    return list(_observe(fn, inputs, owner, may_raise))


def _observe(
    fn: Callable[..., Any], inputs: Inputs, owner: Any, may_raise: bool
) -> Iterator[tuple[str, Any]]:
    given = _distinct(_tensors([inputs.roots, inputs.args]))
    if isinstance(owner, torch.nn.Module):
        given += [*owner.parameters(), *owner.buffers()]
    before = [(_version(t), state(t)) for t in given]
    try:
        out = fn(*inputs.args)
    except Exception:  # whatever eager raises, the compiled function has to raise something
        if not may_raise:
            raise
        yield "the call raised", True
        return
    yield "the call raised", False
    leaves = pytree.tree_leaves(out)
    outs = _tensors(leaves)
    yield "structure of the output", _structure(out)
    yield "other outputs", [x for x in leaves if not isinstance(x, Tensor)]
    yield WRITTEN, [_written(t, *was) for t, was in zip(given, before, strict=True)]
    yield "inputs", [state(t) for t in given]
    yield "storage of the inputs", [t.untyped_storage().nbytes() for t in given]
    yield "outputs", [state(t) for t in outs]
    visible = given + outs
    yield "who is whom", relations(visible)
    wanted = [t for t in given if t.is_leaf and t.requires_grad]
    heads = _distinct(outs + [t for t in given if not t.is_leaf])
    for i, head in enumerate(heads):
        yield f"gradients of {i}", gradients([head], wanted)
    yield "gradients together", gradients(heads, wanted)
    yield from _write(outs, visible)
    yield "gradients after writing", gradients(heads, wanted)
    yield from _accumulate(heads, wanted)


def _write(outs: list[Tensor], visible: list[Tensor]) -> Iterator[tuple[str, Any]]:
    for i, out in enumerate(outs):
        for step in (out.add_, out.sub_):
            try:
                step(2)
                refused = False
            except RuntimeError:
                refused = True
            yield f"writing into output {i} refused", refused
            yield f"everything after writing into output {i}", [state(t) for t in visible]


def _accumulate(heads: list[Tensor], wanted: list[Tensor]) -> Iterator[tuple[str, Any]]:
    try:
        sum(_losses(heads), torch.zeros(())).backward()
        raised = False
    except RuntimeError:
        raised = True
    yield "backward raised", raised
    yield "accumulated", [_gradient(t.grad, t) for t in wanted]


def gradients(heads: list[Tensor], wanted: list[Tensor]) -> list[Any] | str:
    """Gradients of a weighted sum of `heads` with respect to `wanted`, or that there are none."""
    try:
        losses = _losses(heads)
        if not losses or not wanted:
            return "nothing to differentiate"
        found = torch.autograd.grad(losses, wanted, retain_graph=True, allow_unused=True)
    except RuntimeError:
        return "raised"
    return [_gradient(g, t) for g, t in zip(found, wanted, strict=True)]


def _gradient(grad: Tensor | None, of: Tensor) -> Any:
    if grad is None:
        # torch's AOTAutograd makes zeros where eager says None: no news, and a test elsewhere.
        return torch.zeros_like(of) if PEER == "torch" else None
    return {"sparse": grad.to_dense()} if grad.is_sparse else grad


def _losses(heads: list[Tensor]) -> list[Tensor]:
    """A scalar of each head that autograd knows, every element with a weight of its own."""
    losses = []
    for head in heads:
        if head.requires_grad and not _is_hollow(head):
            real = torch.view_as_real(head) if head.is_complex() else head
            weight = torch.linspace(0.5, 2.0, real.numel(), dtype=real.dtype).reshape(real.shape)
            losses.append((real * weight).sum())
    return losses


def state(t: Tensor) -> dict[str, Any]:
    """What one tensor shows of itself."""
    return {
        "value": None if _is_hollow(t) else t.detach().clone(),
        "shape": tuple(t.shape),
        "stride": tuple(t.stride()),
        "dtype": str(t.dtype),
        "history": _history(t),
    }


def _history(t: Tensor) -> str:
    try:
        return f"requires_grad={t.requires_grad} is_leaf={t.is_leaf} grad_fn={t.grad_fn is not None}"
    except RuntimeError:  # one of several views made by one call, when its base was changed since
        return "refused"


def relations(tensors: list[Tensor]) -> list[tuple[int, int, str]]:
    """Which of them are the same object, have the same base for autograd, have the same memory."""
    found = []
    for j, b in enumerate(tensors):
        for i, a in enumerate(tensors[:j]):
            if a is b:
                found.append((i, j, "the same tensor"))
            elif _base(a) is _base(b):
                found.append((i, j, "views of one base"))
            elif a.untyped_storage()._cdata == b.untyped_storage()._cdata:
                found.append((i, j, "in one storage"))
    return found


def _structure(out: Any) -> str:
    spec = str(pytree.tree_structure(out))
    # torch's `aot_function` gives a list where the function returned a tuple.
    return spec.replace("(tuple,", "(list,") if PEER == "torch" else spec


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def _distinct(tensors: list[Tensor]) -> list[Tensor]:
    return list({id(t): t for t in tensors}.values())


def _base(t: Tensor) -> Tensor:
    return t._base if t._is_view() and t._base is not None else t


def _written(t: Tensor, version: int, was: dict[str, Any]) -> str:
    """Whether its version counter says that it was written to, and if not, whether it was all the same."""
    if _version(t) != version:
        return "yes"
    before, now = was["value"], state(t)["value"]
    same = (before is None) == (now is None) and (before is None or torch.equal(before, now))
    return "no" if same else "secretly"


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


def _is_hollow(t: Tensor) -> bool:
    """Whether its storage was resized away under it."""
    return t.numel() > 0 and t.untyped_storage().nbytes() == 0
