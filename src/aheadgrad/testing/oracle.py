"""Eager is the oracle: is a compiled function the same as the function it was made from?

``compare`` calls both on inputs of their own and compares everything that BEHAVIOURS calls "same":
exceptions, trees, values, layouts, autograd flags, identities, shared memory, the inputs afterwards,
ambient and random state; then gradients, ``None`` included; then what happens when the caller writes
into a result. The answer is a list, empty when there is nothing to tell.

    >>> def make_inputs():
    ...     x = torch.ones(2, requires_grad=True)
    ...     return Inputs((x,), leaves=[x])
    >>> for found in compare(lambda x: x, lambda x: x.clone(), make_inputs):
    ...     print(found)
    [all] output tree: eager args[0], compiled output
    ...

Gradients of higher order are asked for with ``order=2`` and so on: what is compared at order n are the
gradients of the gradients of order n - 1.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aheadgrad.testing.observe import Inputs, Raised
from aheadgrad.testing.runs import Around, Record, Scenario, comparable, run
from aheadgrad.torchlayer.subclasses import is_foreign, parts_of
from aheadgrad.torchlayer.trees import tree_leaves

__all__ = ["Disagreement", "Inputs", "Tolerance", "assert_same", "compare"]

BACKWARD_KINDS = ("all", "each", "sequence", "twice")


@dataclass(frozen=True)
class Disagreement:
    """One thing that eager and the compiled function do differently."""

    scenario: str
    what: str
    eager: str
    compiled: str

    @property
    def kind(self) -> tuple[str, ...]:
        """What sort of disagreement this is, whatever the names and numbers."""
        subject = re.sub(r"\[.*\]", "", self.what)
        endings = ("raises" if text.startswith("raises") else "" for text in (self.eager, self.compiled))
        return (self.scenario.split()[0], subject, *endings)

    def __str__(self) -> str:
        return f"[{self.scenario}] {self.what}: eager {self.eager}, compiled {self.compiled}"


# relative and absolute, wide enough for sums taken in another order
DTYPE_TOLERANCE: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-9, 1e-10),
    torch.complex128: (1e-9, 1e-10),
    torch.float32: (1e-5, 1e-5),
    torch.complex64: (1e-5, 1e-5),
    torch.float16: (2e-3, 1e-4),
    torch.complex32: (2e-3, 1e-4),
    torch.bfloat16: (2e-2, 1e-3),
}


@dataclass(frozen=True)
class Tolerance:
    """How close values have to be (by dtype where not given), and which details may differ.

    ``versions``: version counters move by the same amount, not just both or neither.
    ``unit_strides``: strides are equal also where they mean nothing, in dimensions of one element.
    ``error_types``: the compiled call raises eager's type of error or one of aheadgrad's own.
    ``mixed``: single precision is in play, so double precision results are only as good as that.
    """

    rtol: float | None = None
    atol: float | None = None
    versions: bool = True
    unit_strides: bool = True
    error_types: bool = True
    mixed: bool = False

    def close(self, left: Tensor, right: Tensor) -> bool:
        if left.dtype != right.dtype or left.shape != right.shape or left.device != right.device:
            return False
        dtype, left, right = left.dtype, comparable(left), comparable(right)
        if torch.equal(left, right):
            return True
        if not (left.is_floating_point() or left.is_complex()):
            return False
        wide = self.mixed and dtype in (torch.float64, torch.complex128)
        rtol, atol = DTYPE_TOLERANCE.get(torch.float32 if wide else dtype, (0.0, 0.0))
        rtol = rtol if self.rtol is None else self.rtol
        atol = atol if self.atol is None else self.atol
        return torch.allclose(left, right, rtol=rtol, atol=atol, equal_nan=True)

    def same_error(self, eager: Raised, compiled: Raised) -> bool:
        if not self.error_types or issubclass(compiled.type, eager.type):
            return True
        return compiled.type.__module__.partition(".")[0] == "aheadgrad"

    def same(self, what: str, eager: object, compiled: object) -> bool:
        if isinstance(eager, Tensor) and isinstance(compiled, Tensor):
            return self.close(eager, compiled)
        if _are_parts(eager) and _are_parts(compiled):
            return all(self.same(what, a, b) for a, b in zip(eager, compiled, strict=True))  # type: ignore[call-overload]
        if isinstance(eager, Raised) and isinstance(compiled, Raised):
            return self.same_error(eager, compiled)
        if type(eager) is not type(compiled):
            return False
        if what.endswith("._version change") and not self.versions:
            return bool(eager) == bool(compiled)
        if what.endswith(".true stride" if self.unit_strides else ".stride"):
            return True
        return eager == compiled


def _are_parts(value: object) -> bool:
    """Snapshots of the parts of a wrapper subclass."""
    return isinstance(value, tuple) and any(isinstance(v, Tensor | tuple) for v in value)


def show(value: object) -> str:
    if not isinstance(value, Tensor):
        return str(value)
    if value.dtype == torch.uint8 and value.numel() > 64:
        return f"<{value.numel()} bytes>"
    if is_foreign(value):
        return f"{type(value).__name__} of {', '.join(map(show, parts_of(value)))}"
    digits = ", ".join(f"{number:.7g}" for number in value.flatten()[:6].tolist())
    more = ", ..." if value.numel() > 6 else ""
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} {{{digits}{more}}}"


def differences(
    scenario: Scenario, eager: Record, compiled: Record, tolerance: Tolerance
) -> Iterator[Disagreement]:
    """Compare two tables of facts, in the order in which the facts were seen."""

    def differ(what: str, left: object, right: object) -> Disagreement:
        return Disagreement(str(scenario), what, show(left), show(right))

    raised = eager.raised(), compiled.raised()
    if raised != (None, None):
        late = eager.raised("backward")
        if raised[0] is None and raised[1] is not None and late and tolerance.same_error(late, raised[1]):
            return  # an error that eager would only raise at backward may come early
        if not tolerance.same("call", eager.facts["call"], compiled.facts["call"]):
            yield differ("call", eager.facts["call"], compiled.facts["call"])
        elif compiled.facts["ambient state lost"] and not eager.facts["ambient state lost"]:
            yield differ("ambient state after the error", "unchanged", "changed")
        return
    # where the trees or the course of events differ, facts without a counterpart say nothing new
    alike = eager.facts["output tree"] == compiled.facts["output tree"]
    alike = alike and eager.endings() == compiled.endings()
    for what in dict.fromkeys([*eager.facts, *compiled.facts]):
        if what not in eager.facts or what not in compiled.facts:
            if alike or what in eager.steps + compiled.steps:
                yield differ(what, eager.facts.get(what, "absent"), compiled.facts.get(what, "absent"))
        elif not tolerance.same(what, eager.facts[what], compiled.facts[what]):
            yield differ(what, eager.facts[what], compiled.facts[what])


def further_scenarios(eager: Record, backward: Sequence[str], write_after: bool) -> list[Scenario]:
    """What else to try, knowing what eager returned and which inputs it changed."""
    found: list[Scenario] = []
    if "each" in backward:
        found += [Scenario("each", name) for name in eager.terms + eager.refused]
    found += [Scenario(kind) for kind in ("sequence", "twice") if kind in backward and eager.terms]
    if write_after:
        for name in dict.fromkeys(eager.outputs + eager.touched):
            dtype = eager.facts[name + ".dtype"]
            found += [Scenario("write", name, "scale"), Scenario("write", name, "hidden")]
            if isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex):
                found.append(Scenario("write", name, "join"))
    return found


def higher_scenarios(eager: Record, order: int) -> list[Scenario]:
    """Derivatives of higher order: of all results together, of each alone, with plain tangents."""
    if order < 2 or not eager.terms:
        return []
    each = [Scenario("higher", name, order=order) for name in eager.terms] if len(eager.terms) > 1 else []
    return [Scenario("higher", order=order), Scenario("higher", how="plain", order=order), *each]


def some_scenarios(eager: Record, order: int, count: int, seed: int) -> list[Scenario]:
    """Derivatives of each order up to this one, of random sets of inputs."""
    if not eager.terms:
        return []
    draws = random.Random(seed)
    return [
        Scenario("higher", how=draws.choice(("", "plain")), order=k, draw=draws.randrange(1000))
        for k in range(1, order + 1)
        for _ in range(count)
    ]


def compare(
    fn: Callable[..., Any],
    compiled: Callable[..., Any],
    make_inputs: Callable[[], Inputs],
    *,
    backward: Sequence[str] = ("all", "each"),
    write_after: bool = True,
    order: int = 1,
    rtol: float | None = None,
    atol: float | None = None,
    versions: bool = True,
    unit_strides: bool = True,
    error_types: bool = True,
    around: Around = nullcontext,
    extra: int | None = None,
    subsets: int = 0,
    seed: int = 0,
    through: tuple[type[BaseException], ...] = (),
) -> list[Disagreement]:
    """What ``compiled`` does differently from ``fn``; empty when nothing.

    ``make_inputs`` builds the same inputs anew at each call. ``backward`` names the ways of taking
    gradients: ``all`` results together, ``each`` alone, one after the other in ``sequence``, ``twice``.
    ``extra`` limits how many scenarios beside the first are tried, drawn by ``seed``; all by default.
    ``subsets``: how many sets of inputs to draw for each order, gradients of which alone are asked for.
    ``around`` makes a context for the call itself, such as ``torch.no_grad``. Exceptions of the types in
    ``through`` are passed on instead of being compared. ``versions``, ``unit_strides`` and ``error_types``
    can be set to False to forgive details, see ``Tolerance``.
    """
    unknown = set(backward) - set(BACKWARD_KINDS)
    if unknown:
        raise ValueError(
            f"backward: unknown kinds {sorted(unknown)}; choose from {', '.join(BACKWARD_KINDS)}"
        )
    given = tree_leaves((made := make_inputs()).args) + tree_leaves(made.kwargs)
    mixed = any(isinstance(t, Tensor) and t.dtype is torch.float32 for t in given)
    tolerance = Tolerance(rtol, atol, versions, unit_strides, error_types, mixed)
    found: dict[tuple[str, ...], Disagreement] = {}

    def both(scenario: Scenario) -> tuple[Record, Record]:
        records = (
            run(fn, make_inputs, scenario, around=around),
            run(compiled, make_inputs, scenario, through, around),
        )
        for difference in differences(scenario, *records, tolerance):
            found.setdefault((difference.what, difference.eager, difference.compiled), difference)
        return records

    eager, other = both(Scenario("all" if "all" in backward else "look"))
    if eager.raised() or other.raised():
        return list(found.values())
    scenarios = further_scenarios(eager, backward, write_after)
    if extra is not None and len(scenarios) > extra:
        scenarios = random.Random(seed).sample(scenarios, extra)
    higher = higher_scenarios(eager, order)
    if extra is not None and len(higher) > 2:
        higher = [higher[0], random.Random(seed).choice(higher[1:])]
    for scenario in scenarios + higher + some_scenarios(eager, order, subsets, seed):
        both(scenario)
    return list(found.values())


def report(found: Sequence[Disagreement], limit: int = 20) -> str:
    lines = [f"compiled differs from eager in {len(found)} respects:"]
    lines += [f"  {difference}" for difference in found[:limit]]
    if len(found) > limit:
        lines.append(f"  ... and {len(found) - limit} more")
    return "\n".join(lines)


def assert_same(
    fn: Callable[..., Any],
    compiled: Callable[..., Any],
    make_inputs: Callable[[], Inputs],
    **options: Any,
) -> None:
    """Raise ``AssertionError`` with a readable list when ``compare`` (same options) finds anything."""
    found = compare(fn, compiled, make_inputs, **options)
    if found:
        raise AssertionError(report(found))
