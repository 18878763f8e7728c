"""One run of a function under one scenario, as a table of facts.

A scenario says what the caller does after the call: take the gradient of everything (``all``), of one
result alone (``each``), of one result after the other (``sequence``), of everything two times
(``twice``), gradients of gradients (``higher``), or write into a tensor and then take the gradient of
everything (``write``). Each run has inputs of its own and seeds the generators, so a run of eager and a
run of the compiled function differ only where the functions do.

    >>> def make_inputs():
    ...     x = torch.tensor([1.0, 0.0], requires_grad=True)
    ...     return Inputs((x,), leaves=[x])
    >>> record = run(torch.sin, make_inputs, Scenario("each", "output"))
    >>> record.facts["backward"], record.facts["args[0].grad"]
    ('returns', tensor([0.3782, 0.7000]))
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aheadgrad.testing.observe import (
    Ambient,
    Facts,
    Inputs,
    Memory,
    Raised,
    Register,
    inner_tensors,
    look,
    random_facts,
    seed_generators,
    snapshot,
    tensor_facts,
    tree,
    true_strides,
    value_facts,
)

# makes the context of the call itself, such as torch.no_grad
Around = Callable[[], AbstractContextManager[Any]]

RETURNS = "returns"
LAYOUTS = ("expanded", "strided", "contiguous")


@dataclass(frozen=True)
class Scenario:
    """What the caller does after the call; ``target`` names a tensor, ``how`` a way to write into it.

    ``draw``: only some gradients are asked for, which ones is drawn with this seed.
    """

    kind: str
    target: str = ""
    how: str = ""
    order: int = 1
    draw: int | None = None

    def __str__(self) -> str:
        drawn = "" if self.draw is None else f"some (draw {self.draw}, order {self.order})"
        return " ".join(part for part in (self.kind, self.how, self.target, drawn) if part)


@dataclass
class Record:
    """What was seen in a run: the facts, which results have a gradient, what was written to.

    ``refused`` are results that say they require grad but that autograd does not go back from: views
    made under ``no_grad`` of a leaf.
    """

    facts: Facts = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    terms: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    touched: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)

    def endings(self) -> dict[str, bool]:
        """The steps that were taken and whether they raised."""
        return {step: self.raised(step) is not None for step in self.steps}

    def raised(self, step: str = "call") -> Raised | None:
        found = self.facts.get(step)
        return found if isinstance(found, Raised) else None


class Run:
    """The state of one run between its steps."""

    def __init__(self, inputs: Inputs, through: tuple[type[BaseException], ...]) -> None:
        self.inputs = inputs
        self.through = through
        self.record = Record()
        self.register = Register()
        self.has_grad: dict[str, bool] = {}
        tree(inputs.args, "args", self.register)
        tree(inputs.kwargs, "kwargs", self.register)
        for name, tensor in list(self.register.tensors.items()):
            if tensor._base is not None:
                self.register.add(f"{name}._base", tensor._base)
        tree(inputs.leaves, "leaves", self.register)
        tree(inputs.watched, "watched", self.register)
        self.before = {name: history(tensor) for name, tensor in self.register.tensors.items()}
        self.places = {name: place(tensor) for name, tensor in self.register.tensors.items()}

    def attempt(self, step: str, action: Callable[[], Any]) -> Any:
        """Do a step and note whether it returned or raised."""
        self.record.steps.append(step)
        try:
            result = action()
        except self.through:
            raise
        except Exception as error:
            self.record.facts[step] = Raised.of(error)
            return None
        self.record.facts[step] = RETURNS
        return result

    def call(self, fn: Callable[..., Any], around: Around) -> None:
        """Call the function and note the ambient state and the tree that it leaves behind."""
        record, inputs = self.record, self.inputs
        seed_generators(0)
        with around():
            ambient = Ambient.now()
            try:
                output = self.attempt("call", lambda: fn(*inputs.args, **inputs.kwargs))
                after = Ambient.now()
            finally:
                ambient.restore()
        if record.raised():
            record.facts["ambient state lost"] = after != ambient
            return
        after.facts("", record.facts)
        random_facts("", record.facts)
        record.facts["args afterwards"] = tree((inputs.args, inputs.kwargs), "afterwards", self.register)
        start = len(self.register.visits)
        record.facts["output tree"] = tree(output, "output", self.register)
        record.outputs = list(dict.fromkeys(self.register.visits[start:]))
        self.find_terms()

    def find_terms(self) -> None:
        """Results that a loss can be made of: outputs, and inputs that got a history."""
        record = self.record
        record.touched = []
        for name, tensor in self.register.tensors.items():
            self.has_grad[name] = autograd_flags(tensor)[0]
            if name in self.before and changed(self.before[name], history(tensor)):
                record.touched.append(name)
        tensors = self.register.tensors
        candidates = [name for name in record.outputs if self.has_grad[name]]
        record.refused = [name for name in candidates if borrows_flag(tensors[name])]
        record.terms = [name for name in candidates if name not in record.refused]
        for name in record.touched:
            if self.has_grad[name] and name not in candidates and not autograd_flags(tensors[name])[1]:
                record.terms.append(name)

    def untouched(self, name: str) -> bool:
        """Is this something that was given, and that has the history it had?"""
        return name in self.before and not changed(self.before[name], history(self.register.tensors[name]))

    def observe(self) -> None:
        """Look at every tensor met so far."""
        memory = Memory(fresh_from="output")
        for name, tensor in self.register.tensors.items():
            tensor_facts(name, tensor, memory, self.record.facts)
            if name in self.before:
                self.record.facts[name + ".kept storage"] = self.places[name] == place(tensor)
                versions = self.before[name][0], history(tensor)[0]
                known = isinstance(versions[0], int) and isinstance(versions[1], int)
                self.record.facts[name + "._version change"] = (
                    versions[1] - versions[0] if known else versions[1]
                )

    def write(self, target: str, how: str) -> None:
        tensor = self.register.tensors[target]
        if how == "join":
            extra = torch.full((), 0.5, dtype=tensor.dtype, device=tensor.device, requires_grad=True)
            self.register.add("written", extra)
            self.attempt("write", lambda: tensor.add_(extra))
            return
        with torch.set_grad_enabled(how != "hidden"):
            self.attempt(
                "write", tensor.logical_not_ if tensor.dtype == torch.bool else lambda: tensor.mul_(2)
            )

    def backward(self, terms: Sequence[str], step: str = "backward", layout: str = "contiguous") -> None:
        """Back-propagate from the named results together, with fixed tangents; note all gradients."""
        roots = [self.register.tensors[name] for name in terms]
        tangents = [make_tangent(i, root, layout) for i, root in enumerate(roots)]
        kept = [tangent.clone() for tangent in tangents]
        self.attempt(step, lambda: torch.autograd.backward(roots, tangents))
        facts = self.record.facts
        if self.record.raised(step):
            return
        suffix = "" if step == "backward" else f" after {step}"
        facts["tangents unchanged" + suffix] = all(map(same_values, tangents, kept))
        for name, tensor in self.register.tensors.items():
            if autograd_flags(tensor)[1]:
                grad = tensor.grad
                facts[f"{name}.grad{suffix}"] = None if grad is None else snapshot(grad)
                facts[f"{name}.grad layout{suffix}"] = None if grad is None else true_strides(grad)

    def higher(
        self, order: int, terms: Sequence[str], *, plain: bool = False, draw: int | None = None
    ) -> None:
        """Gradients of gradients: level by level, each contracted with tangents that are leaves too.

        With ``plain`` the tangents do not require grad. From the second level on ``None`` counts as
        zero: whether a derivative that is zero has a path in the graph is an accident of how the
        derivative below was written down (in-place ops on views of other views, for instance).
        With ``draw`` some gradients are asked for at each level, and the last has no history;
        what was differentiated before may be so again, together with its gradients.
        """
        tensors, facts = self.register.tensors, self.record.facts
        roots = [tensors[name] for name in terms]

        def tangents(of: Sequence[Tensor]) -> list[Tensor]:
            made = [make_tangent(i, t, "contiguous") for i, t in enumerate(of)]
            return [t.requires_grad_(not plain and (t.is_floating_point() or t.is_complex())) for t in made]

        weights = tangents(roots)
        targets = {name: t for name, t in tensors.items() if self.has_grad[name] and t.is_leaf}
        drawn = random.Random(draw)
        if draw is not None:
            targets.update((n, t) for n, t in tensors.items() if self.has_grad[n] and self.untouched(n))
        for level in range(1, order + 1):
            names = list(targets)
            if draw is not None and names:
                names = sorted(drawn.sample(names, drawn.randint(1, len(names))), key=names.index)
            leaves, step = [targets[name] for name in names], f"derivative {level}"
            again = draw is None or level < order
            grads: tuple[Tensor | None, ...] | None = (None,) * len(leaves)
            if roots and leaves:
                grads = self.attempt(step, lambda: gradients(roots, leaves, weights, again=again))  # noqa: B023
            facts.setdefault(step, RETURNS)
            if grads is None:
                return
            for name, leaf, grad in zip(names, leaves, grads, strict=True):
                missing = None if level == 1 else snapshot(torch.zeros_like(leaf))
                facts[f"{step} of {name}"] = missing if grad is None else snapshot(grad)
            if not plain:
                targets.update((f"{step} tangent {i}", weight) for i, weight in enumerate(weights))
            fresh = tangents(leaves)
            pairs = [(g, w) for g, w in zip(grads, fresh, strict=True) if g is not None and g.requires_grad]
            earlier = zip(roots, weights, strict=True) if draw is not None and drawn.random() < 0.6 else ()
            pairs += [(root, weight.detach()) for root, weight in earlier]
            roots, weights = [g for g, _ in pairs], [w for _, w in pairs]


def gradients(
    roots: Sequence[Tensor], leaves: Sequence[Tensor], tangents: Sequence[Tensor], *, again: bool
) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(
        roots, leaves, tangents, retain_graph=True, create_graph=again, allow_unused=True
    )


def history(tensor: Tensor) -> tuple[Any, Any, Any]:
    """What changes when a tensor is written to or gets a history."""
    return (
        look(lambda: tensor._version),
        look(lambda: tensor.requires_grad),
        look(lambda: tensor.grad_fn),
    )


def place(tensor: Tensor) -> object:
    """Which storage a tensor stands for; a wrapper subclass has none of its own."""
    return None if inner_tensors(tensor) else look(lambda: tensor.untyped_storage().data_ptr())


def autograd_flags(tensor: Tensor) -> tuple[bool, bool]:
    """Whether a tensor requires grad and is a leaf; neither where asking raises."""
    try:
        return tensor.requires_grad, tensor.is_leaf
    except (RuntimeError, IndexError):
        return False, False


def borrows_flag(tensor: Tensor) -> bool:
    """Whether ``requires_grad`` is that of the base: a view without history of a base that requires grad."""
    base = tensor._base
    return base is not None and tensor.is_leaf and base.requires_grad


def changed(before: tuple[Any, Any, Any], after: tuple[Any, Any, Any]) -> bool:
    return before[:2] != after[:2] or before[2] is not after[2]


def comparable(t: Tensor) -> Tensor:
    """In a dtype that can be compared."""
    return t.to(torch.complex64) if t.dtype is torch.complex32 else t


def same_values(left: Tensor, right: Tensor) -> bool:
    left, right = comparable(left), comparable(right)
    return bool(torch.equal(left.nan_to_num(), right.nan_to_num())) if left.numel() else True


def make_tangent(index: int, like: Tensor, layout: str) -> Tensor:
    """Fixed numbers in the shape of a tensor: weights of a loss that is a weighted sum."""
    if inner_tensors(like):
        return torch.full_like(like.detach(), 0.7 + index)
    if layout == "expanded":
        return torch.full((), 0.7 + index, dtype=like.dtype, device=like.device).expand(like.shape)
    steps = torch.linspace(0.7 + index, 5.0 + 3 * index, like.numel(), dtype=torch.float64).cos()
    tangent = steps.reshape(like.shape).to(like.device, like.dtype)
    if like.is_complex():
        tangent = tangent * (1 + 0.5j)
    if layout == "strided":
        tangent = torch.stack([tangent, tangent], dim=-1).select(-1, 0)
    return tangent


def run(
    fn: Callable[..., Any],
    make_inputs: Callable[[], Inputs],
    scenario: Scenario,
    through: tuple[type[BaseException], ...] = (),
    around: Around = nullcontext,
) -> Record:
    """Call the function, do what the scenario says, and report what was seen.

    Exceptions of the types in ``through`` are not observations: they end the run.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        this = Run(make_inputs(), through)
        this.call(fn, around)
        if not this.record.raised():
            follow(this, scenario)
    return this.record


def follow(this: Run, scenario: Scenario) -> None:
    """The part of a run after the call."""
    record = this.record
    if scenario.kind == "write":
        if scenario.target not in this.register.tensors:
            return
        this.write(scenario.target, scenario.how)
        this.find_terms()
    if scenario.kind in ("all", "look", "write"):
        this.observe()
    if scenario.kind in ("all", "write", "twice") and record.terms:
        this.backward(record.terms)
    if scenario.kind == "all":
        value_facts(this.register, " after backward", record.facts)
        random_facts(" after backward", record.facts)
    elif scenario.kind == "twice" and record.terms and not record.raised("backward"):
        this.backward(record.terms, "second backward")
    elif scenario.kind == "each" and scenario.target in record.terms + record.refused:
        layout = LAYOUTS[(record.terms + record.refused).index(scenario.target) % len(LAYOUTS)]
        this.backward([scenario.target], layout=layout)
    elif scenario.kind == "sequence":
        for name in record.terms:
            this.backward([name], f"backward of {name}")
    elif scenario.kind == "higher":
        terms = [t for t in record.terms if scenario.target in ("", t)]
        this.higher(scenario.order, terms, plain=scenario.how == "plain", draw=scenario.draw)
