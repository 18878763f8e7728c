"""Random programs: small functions that mix arithmetic, views, writes and grad modes.

``generate(seed)`` always writes the same program for the same seed. A program is text that a person can
paste and run; it was run line by line in eager while it was written, so most of its lines are valid
(a few that raise are kept on purpose). ``print(generate(seed).source)`` shows something like

    def f(a, b):
        v1 = a.t()
        with torch.no_grad():
            v1.mul_(2.0)
        return (v1, b)
"""

from __future__ import annotations

import itertools
import linecache
import random
import warnings
from ast import literal_eval
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from aheadgrad.testing.arguments import ArgumentWriter
from aheadgrad.testing.observe import Inputs
from aheadgrad.testing.scene import Scene, names_in
from aheadgrad.testing.steps import WEIGHTS, WRITERS
from aheadgrad.testing.views import view_of

# an expression as text, or a container of such
Result = Any

_serial = itertools.count()


@dataclass(frozen=True)
class Config:
    """How programs are drawn. ``weights`` maps kinds of lines (see ``steps.WEIGHTS``) to their weight;
    ``relatives`` is the chance that siblings are not views of one base; with ``subclass`` every input
    is a tensor in two parts."""

    max_inputs: int = 4
    max_steps: int = 8
    duplicates: float = 0.04
    siblings: float = 0.06
    relatives: float = 0.0
    keep_errors: float = 0.03
    no_grad: float = 0.07
    enable_grad: float = 0.03
    subclass: bool = False
    weights: Mapping[str, float] = field(default_factory=lambda: dict(WEIGHTS))


@dataclass(frozen=True)
class Step:
    """One line of a program and the ``with torch.<block>():`` statements around it."""

    text: str
    blocks: tuple[str, ...] = ()


def render_result(result: Result) -> str:
    """Python text for a nested container of expressions."""
    if isinstance(result, tuple):
        return f"({', '.join(map(render_result, result))}{',' if len(result) == 1 else ''})"
    if isinstance(result, list):
        return f"[{', '.join(map(render_result, result))}]"
    if isinstance(result, dict):
        return f"{{{', '.join(f'{key!r}: {render_result(value)}' for key, value in result.items())}}}"
    return str(result)


def render_body(body: tuple[Step, ...]) -> list[str]:
    """Lines with the blocks around them; neighbours share the blocks that they have in common."""
    lines: list[str] = []
    open_blocks: tuple[str, ...] = ()
    for step in body:
        common = 0
        while common < min(len(open_blocks), len(step.blocks)) and open_blocks[common] == step.blocks[common]:
            common += 1
        for depth in range(common, len(step.blocks)):
            lines.append("    " * depth + f"with torch.{step.blocks[depth]}():")
        lines.append("    " * len(step.blocks) + step.text)
        open_blocks = step.blocks
    return lines


@dataclass(frozen=True)
class Program:
    """A function as text, and how its inputs are made: ``args`` are names or literals of the set-up."""

    seed: int
    setup: tuple[str, ...]
    leaves: tuple[str, ...]
    watched: tuple[str, ...]
    params: tuple[str, ...]
    args: tuple[str, ...]
    body: tuple[Step, ...]
    result: Result

    @property
    def source(self) -> str:
        lines = [*render_body(self.body), f"return {render_result(self.result)}"]
        return "\n".join([f"def f({', '.join(self.params)}):", *("    " + line for line in lines)]) + "\n"

    @property
    def inputs_source(self) -> str:
        parts = (f"args={render_result(self.args)}", f"leaves={render_result(list(self.leaves))}")
        text = f"return Inputs({', '.join(parts)}, watched={render_result(list(self.watched))})"
        return "\n".join(["def make_inputs():", *("    " + line for line in (*self.setup, text))]) + "\n"

    @cached_property
    def _namespace(self) -> dict[str, Any]:
        text = str(self)
        name = f"<program {self.seed}.{next(_serial)}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        namespace: dict[str, Any] = {}
        exec(compile(text, name, "exec"), namespace)
        return namespace

    @property
    def fn(self) -> Callable[..., Any]:
        function: Callable[..., Any] = self._namespace["f"]
        return function

    @property
    def make_inputs(self) -> Callable[[], Inputs]:
        function: Callable[[], Inputs] = self._namespace["make_inputs"]
        return function

    def __str__(self) -> str:
        header = "import torch\nfrom aheadgrad.testing import Inputs\n"
        if any("two." in line for line in self.setup):
            header += "from aheadgrad.testing import two\n"
        return f"{header}\n\n{self.inputs_source}\n\n{self.source}"


class ProgramWriter:
    """Writes one program: arguments, lines, result."""

    def __init__(self, seed: int, config: Config) -> None:
        self.seed = seed
        self.config = config
        self.rng = random.Random(f"program {seed}")
        self.scene = Scene(self.rng)
        self.steps: list[Step] = []
        self.blocks: tuple[str, ...] = ()
        self.kinds = list(config.weights)
        self.shares = list(itertools.accumulate(config.weights.values()))

    def write(self) -> Program:
        scene, config = self.scene, self.config
        made = ArgumentWriter(scene).write(
            self.rng.randint(1, config.max_inputs), config.duplicates, config.siblings, config.relatives
        )
        leaves = tuple(n for n in scene.names if scene.tensor(n).is_leaf and scene.tensor(n).requires_grad)
        watched = tuple(n for n in scene.names if n not in leaves and n not in made.passed)
        params = tuple("abcdef"[: len(made.passed)])
        values = dict(zip(params, (scene.values[name] for name in made.passed), strict=True))
        scene.values = {"torch": torch, **values}
        if made.numbers:
            scene.values["s"] = literal_eval(made.numbers[0])
        scene.names = list(params)
        scene.start_body()
        self.write_body()
        program = Program(
            seed=self.seed,
            setup=tuple(made.setup),
            leaves=leaves,
            watched=watched,
            params=params + (("s",) if made.numbers else ()),
            args=tuple(made.passed + made.numbers),
            body=tuple(self.steps),
            result=self.write_result(),
        )
        return simplified(program)

    def write_body(self) -> None:
        wanted = max(self.rng.randint(1, self.config.max_steps), self.rng.randint(1, self.config.max_steps))
        for _ in range(3 * wanted):
            if len(self.steps) >= wanted:
                return
            self.move_blocks()
            kind = self.rng.choices(self.kinds, cum_weights=self.shares)[0]
            if kind == "grad_mode":
                self.blocks = ()
            text = WRITERS[kind](self.scene)
            if text is None:
                continue
            error = self.scene.execute(text, self.blocks[-1] == "enable_grad" if self.blocks else None)
            if error is None:
                self.steps.append(Step(text, self.blocks))
            elif isinstance(error, (RuntimeError, IndexError)) and self.scene.chance(self.config.keep_errors):
                self.steps.append(Step(text, self.blocks))
                return

    def move_blocks(self) -> None:
        """Leave or enter ``with torch.no_grad():`` and ``with torch.enable_grad():``."""
        if self.blocks and self.scene.chance(0.5):
            self.blocks = self.blocks[:-1]
        if not self.blocks and self.scene.chance(self.config.no_grad):
            self.blocks = ("no_grad",)
        elif len(self.blocks) < 2 and self.scene.chance(self.config.enable_grad * (4 if self.blocks else 1)):
            self.blocks += ("enable_grad",)

    def write_item(self, chosen: list[str]) -> str:
        scene = self.scene
        if chosen and scene.chance(0.06):
            return scene.choose(chosen)
        name = scene.choose(scene.names)
        if scene.chance(0.05):
            return scene.choose(("None", "3", "2.5", "'text'", f"{name}.dim()", f"{name}.shape"))
        unused = [n for n in scene.names if n not in scene.used and n not in chosen]
        name = scene.choose(unused) if unused and scene.chance(0.5) else name
        if scene.chance(0.08):
            text = view_of(scene, name)
            if text is not None and scene.execute(text) is None:
                return text
        return name

    def write_result(self) -> Result:
        chosen: list[str] = []
        for _ in range(self.scene.choose((1, 1, 2, 2, 3, 4))):
            chosen.append(self.write_item(chosen))
        style = self.rng.random()
        if style < 0.6:
            return chosen[0] if len(chosen) == 1 and self.scene.chance(0.8) else tuple(chosen)
        if style < 0.75:
            return list(chosen)
        if style < 0.87:
            return dict(zip("pqrs", chosen, strict=False))
        return (chosen[0], {"rest": list(chosen[1:])})


def generate(seed: int, *, config: Config | None = None) -> Program:
    """Write the program of a seed."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(0)
        config = config or Config()
        program = ProgramWriter(seed, config).write()
        return in_two_parts(program) if config.subclass else program


def in_two_parts(program: Program) -> Program:
    """The same program on inputs that are tensors in two parts."""
    setup = [line.replace("torch.tensor(", "two.tensor(") for line in program.setup]
    return replace(program, setup=tuple(line.replace("torch.zeros(", "two.zeros(") for line in setup))


def simplified(program: Program, **changes: Any) -> Program:
    """A changed copy whose set-up makes only what is still looked at."""
    program = replace(program, **changes)
    needed = set(program.args)
    lines: list[str] = []
    for line in reversed(program.setup):
        name, _, expression = line.partition(" = ")
        if name in needed:
            lines.append(line)
            needed |= {word for word in names_in(expression) if word.startswith("x")}
    return replace(
        program,
        setup=tuple(reversed(lines)),
        leaves=tuple(name for name in program.leaves if name in needed),
        watched=tuple(name for name in program.watched if name in needed),
    )
