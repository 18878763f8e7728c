"""The stage on which a program is written: the values that its names have so far, in eager.

The writer of programs runs each line as soon as it has written it, so that the next line can be chosen
to fit the shapes at hand. A scene holds the random numbers, the names and the grad mode.

    >>> scene = Scene(random.Random(0))
    >>> scene.execute("x = torch.ones(2, 3)"), scene.tensor("x").shape
    (None, torch.Size([2, 3]))
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Choice = TypeVar("Choice")

LARGEST = 96  # elements; a line that makes a larger tensor is not worth its time


def requires_grad(tensor: Tensor) -> bool:
    """True also where asking raises, as it does for some views that were written to."""
    try:
        return tensor.requires_grad
    except RuntimeError:
        return True


def is_guarded_leaf(tensor: Tensor) -> bool:
    """Whether eager refuses to write into the tensor while grad mode is on."""
    try:
        return tensor.requires_grad and tensor.is_leaf
    except RuntimeError:
        return False


def names_in(text: str) -> set[str]:
    """The identifiers in a piece of Python."""
    return set(re.findall(r"\b[A-Za-z_]\w*", text))


class TooLarge(Exception):
    """A line made a tensor that would slow the programs down."""


class Scene:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.values: dict[str, Any] = {"torch": torch}
        self.names: list[str] = []
        self.used: set[str] = set()
        self.grad_mode = True
        self._count = 0

    def fresh(self, prefix: str = "v") -> str:
        """A new name."""
        self._count += 1
        return f"{prefix}{self._count}"

    def start_body(self) -> None:
        self._count = 0
        self.used.clear()

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def choose(self, options: Sequence[Choice]) -> Choice:
        return options[int(self.rng.random() * len(options))]

    def tensor(self, name: str) -> Tensor:
        value = self.values[name]
        assert isinstance(value, Tensor)
        return value

    def pick(self, fits: Callable[[Tensor], bool] | None = None, beside: str = "") -> str | None:
        """The name of a tensor that fits, more likely one that is recent, unused and not ``beside``."""
        names = self.names if fits is None else [n for n in self.names if fits(self.values[n])]
        if beside in names and len(names) > 1 and self.chance(0.85):
            names = [n for n in names if n != beside]
        if not names:
            return None
        unused = [n for n in names if n not in self.used]
        if unused and self.chance(0.35):
            return self.choose(unused)
        recent = len(names) - 1 - int(self.rng.random() ** 2 * len(names))
        return names[recent] if self.chance(0.6) else self.choose(names)

    def execute(self, text: str, grad_mode: bool | None = None) -> Exception | None:
        """Run one line in the given grad mode, else in the scene's own, which it may change."""
        outside = torch.is_grad_enabled()
        before = set(self.values)
        torch.set_grad_enabled(self.grad_mode if grad_mode is None else grad_mode)
        try:
            exec(compile(text, "<line of a program>", "exec"), self.values)
            if grad_mode is None:
                self.grad_mode = torch.is_grad_enabled()
            new = [name for name in self.values if name not in before and name != "__builtins__"]
            found = [name for name in new if isinstance(self.values[name], Tensor)]
            if any(self.values[name].numel() > LARGEST for name in found):
                return TooLarge(text)
            self.names += found
            self.used |= names_in(text.partition(" = ")[2] or text)
        except Exception as error:
            return error
        finally:
            torch.set_grad_enabled(outside)
        return None
