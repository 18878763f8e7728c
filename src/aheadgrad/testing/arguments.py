"""The arguments of generated programs, as lines that make them.

Leaves with and without gradient, results of other ops, views of such results (the base stays visible to
the caller), detached and strided tensors, numbers; now and then the same tensor twice (``duplicates``)
or two views of one base (``siblings``).

    x1 = torch.tensor([[0.31, -1.2], [0.5, 1.9]], requires_grad=True)
    x2 = x1 * 1.5
    x3 = x2[0]                      # what is passed; x1 is the leaf, x2 is watched
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from aheadgrad.testing.scene import Scene, requires_grad
from aheadgrad.testing.views import view_of

SHAPES: tuple[tuple[int, ...], ...] = ((2, 3), (3, 3), (2, 3), (3, 3), (4,), (3,), (2, 1, 3), (2, 2, 3), ())
HISTORIES = ("{x} * 1.5", "{x}.clone()", "{x}.sin()", "{x} + 0", "{x} * 1", "{x}.t().contiguous().t()")


@dataclass
class Arguments:
    """The lines that make the arguments, and which names are passed and looked at."""

    setup: list[str] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    numbers: list[str] = field(default_factory=list)


def literal(scene: Scene, shape: tuple[int, ...], decimals: int = 2) -> str:
    if not shape:
        value = round(scene.rng.uniform(-2, 2), decimals)
        return repr(value or 0.5) if decimals else repr(int(value))
    return f"[{', '.join(literal(scene, shape[1:], decimals) for _ in range(shape[0]))}]"


def related(scene: Scene, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The theme of the program, or something that broadcasts with it, or anything."""
    if scene.chance(0.65):
        return shape
    if scene.chance(0.02):
        return (0, *shape[1:])
    if shape and scene.chance(0.6):
        return scene.choose((shape[1:], (1, *shape[1:]), shape[-1:], ()))
    return scene.choose(SHAPES)


class ArgumentWriter:
    """Writes the lines of ``make_inputs`` while running them on the scene."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.made = Arguments()
        self.theme = scene.choose(SHAPES)
        self.relatives = 0.0
        self.dtype = ", dtype=torch.float64" if scene.chance(0.05) else ""

    def line(self, expression: str) -> str | None:
        name = self.scene.fresh("x")
        text = f"{name} = {expression}"
        if self.scene.execute(text) is not None or not isinstance(self.scene.values[name], Tensor):
            return None
        self.made.setup.append(text)
        return name

    def data(self, shape: tuple[int, ...], grad: bool) -> str:
        scene = self.scene
        dtype = ", dtype=torch.float64" if scene.chance(0.03) else self.dtype
        if 0 in shape:
            text = f"torch.zeros({shape}{dtype}{', requires_grad=True' if grad else ''})"
        else:
            text = f"torch.tensor({literal(scene, shape)}{dtype}{', requires_grad=True' if grad else ''})"
        name = self.line(text)
        assert name is not None
        return name

    def base(self, shape: tuple[int, ...]) -> str:
        """Something to take views of: mostly the result of an op, so that it may be written to."""
        scene = self.scene
        leaf = self.data(shape, grad=not scene.chance(0.25))
        if not requires_grad(scene.tensor(leaf)) or scene.chance(0.1):
            return leaf
        return self.line(scene.choose(HISTORIES[:5]).format(x=leaf)) or leaf

    def view(self, base: str) -> str:
        """A view of a base that may be written to (no ``expand``); at most two views deep."""
        scene, name = self.scene, base
        for _ in range(2 if scene.chance(0.25) else 1):
            text = view_of(scene, name, rare=0.0)
            name = (text and "expand" not in text and self.line(text)) or name
        return name

    def strided_leaf(self, shape: tuple[int, ...], grad: bool) -> str:
        """A leaf that is not contiguous, or starts inside its storage."""
        scene = self.scene
        padded = literal(scene, (*shape[:-1], shape[-1] + 1) if shape else (2,))
        cut = (
            scene.choose((".t()", "[..., 1:]", ".transpose(0, -1)", "[..., :-1]", "[..., 1:].t()"))
            if shape
            else "[1]"
        )
        name = self.line(
            f"torch.tensor({padded}{self.dtype}){cut}.detach(){'.requires_grad_()' if grad else ''}"
        )
        return name or self.data(shape, grad)

    def one(self) -> str:
        """One argument that shares memory with no other."""
        scene, shape = self.scene, related(self.scene, self.theme)
        kind = scene.rng.random()
        if kind < 0.26:
            return self.data(shape, grad=True)
        if kind < 0.44:
            return self.data(shape, grad=False)
        if kind < 0.64:
            leaf = self.data(shape, grad=True)
            return self.line(scene.choose(HISTORIES).format(x=leaf)) or leaf
        if kind < 0.82:
            return self.view(self.base(shape))
        if kind < 0.92:
            return self.strided_leaf(shape, grad=scene.chance(0.6))
        if kind < 0.96:
            whole = self.line(f"torch.tensor({literal(scene, shape, 0)})")
            return whole or self.data(shape, grad=False)
        return self.line(f"{self.base(shape)}.detach()") or self.data(shape, grad=False)

    def siblings(self) -> list[str]:
        """Two tensors in one memory: views of one base, or the base and a view of it; now and then one
        of them detached, a leaf of its own, or of another dtype."""
        scene = self.scene
        base = self.base(self.theme or (3,))
        if scene.chance(0.25):
            return [base, self.line(f"{base}.detach()") or base]
        first, second = self.view(base), base if scene.chance(0.25) else self.view(base)
        if not self.relatives or not scene.chance(self.relatives):
            return [first, second]
        second = self.relative(base, second)
        return [first, second] if scene.chance(0.5) else [second, first]

    def relative(self, base: str, view: str) -> str:
        """A tensor in the memory of a base that autograd does not take for a view of it."""
        scene = self.scene
        dtype = scene.choose(("int32", "float32", "int16", "float16", "complex64", "uint8"))
        way = scene.choose(
            (
                "{view}.detach()",
                "{base}.detach()",
                "{view}.detach().requires_grad_()",
                f"{{view}}.detach().view(torch.{dtype})",
                f"{{base}}.detach().view(torch.{dtype})",
                f"{{base}}.view(torch.{dtype})",
            )
        )
        return self.line(way.format(base=base, view=view)) or view

    def write(self, count: int, duplicates: float, siblings: float, relatives: float = 0.0) -> Arguments:
        scene = self.scene
        self.relatives = relatives
        passed = self.siblings() if scene.chance(siblings) else []
        while len(passed) < count:
            passed.append(self.one())
        if scene.chance(duplicates):
            passed.append(scene.choose(passed))
        self.made.passed = passed
        if scene.chance(0.12):
            self.made.numbers = [scene.choose(("2.5", "3", "-0.5"))]
        return self.made
