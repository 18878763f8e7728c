"""An export: programs, what they mean, and the tensors that they hold."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, fx, nn

from aheadgrad.errors import InvalidOption
from aheadgrad.export.checking import check_export
from aheadgrad.export.file import read, write
from aheadgrad.export.graph_modules import described_module, program_from
from aheadgrad.export.running import Running
from aheadgrad.export.signature import CallSignature, Stage
from aheadgrad.export.stage_runner import Step
from aheadgrad.program.program import Program
from aheadgrad.torchlayer.dispatch import is_random


@dataclass(frozen=True, eq=False)
class Exported:
    """What `aheadgrad.export` gives.

    There are several `stages` where calls find other state than the one before (an optimizer makes its own at
    its first step), and one otherwise; `program`, `signature` and the like are of the last. `state`
    are the tensors that it holds, by name: copies, which `run` updates.
    """

    stages: tuple[Stage, ...]
    state: dict[str, Tensor] = field(repr=False)

    @property
    def signature(self) -> CallSignature:
        return self.stages[-1].signature

    @property
    def programs(self) -> tuple[Program, ...]:
        return self.stages[-1].programs

    @property
    def program(self) -> Program:
        """The forward or joint program; the forward of a split one."""
        return self.programs[0]

    @property
    def parameters(self) -> dict[str, Tensor]:
        """What an optimizer would be given, by name."""
        return {name: self.state[name] for name in self.signature.parameters}

    @property
    def random_ops(self) -> tuple[str, ...]:
        """The ops that draw random numbers, from torch's own generators."""
        return tuple(op.name for program in self.programs for op in program.ops if is_random(op.target))

    # ---- running ------------------------------------------------------------------------------

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Calls it as the original is called, op by op: held tensors and arguments are updated as that would.

        Returns what the original returns; with gradients, a `Step` of that and the gradients by name.
        """
        return self._runs(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs it, and adds its gradients to the `.grad` of parameters and arguments, as `loss.backward()`
        does; returns what the original returns."""
        return self._runs.backward(*args, **kwargs)

    def call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        tangents: Sequence[Any] | None = None,
    ) -> Step:
        """As `run`, given tangents of the differentiable outputs (in the order of the signature)."""
        return self._runs.call(args, kwargs or {}, tangents)

    @cached_property
    def _runs(self) -> Running:
        return Running(self.stages, self.state)

    def compile(self, backend: Any = "default") -> Running:
        """The same, through a backend: called as the original, with `.backward` and `.call` as here.
        Without one (None) it runs op by op, as `run` does."""
        return Running(self.stages, self.state, backend)

    # ---- files --------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes all of it to one file (docs/format.md); the same export gives the same bytes."""
        write(path, self.stages, self.state)

    @staticmethod
    def load(path: str | os.PathLike[str], *, trust: Collection[str] = (), here: bool = True) -> Exported:
        """Reads what `save` wrote: `aheadgrad.load`."""
        stages, state = read(path, trust=trust, here=here)
        stages = check_export(stages, state)
        for held in (h for stage in stages for h in stage.signature.held if h.kind == "parameter"):
            state[held.name] = nn.Parameter(state[held.name].detach(), held.requires_grad)
        return Exported(stages, state)

    # ---- graphs -------------------------------------------------------------------------------

    @cached_property
    def graph_modules(self) -> tuple[fx.GraphModule, ...]:
        """The programs of all stages as FX modules, one stage after the other: placeholders and outputs are
        described in `node.meta["aheadgrad"]`."""
        return tuple(described_module(p) for stage in self.stages for p in stage.programs)

    @property
    def graph_module(self) -> fx.GraphModule:
        """Of `program`."""
        return self.graph_modules[-len(self.programs)]

    def from_graph_module(self, *modules: fx.GraphModule) -> Exported:
        """The same export with changed graphs, as many as there are in `graph_modules`; they are checked."""
        if len(modules) != len(self.graph_modules):
            raise InvalidOption(
                f"This export has {len(self.graph_modules)} programs in {len(self.stages)} stages, and "
                f"{len(modules)} graphs were given. Give all of them, in the order of exported.graph_modules."
            )
        rest = iter(modules)
        stages = [
            Stage(tuple(program_from(next(rest), p) for p in stage.programs), stage.signature)
            for stage in self.stages
        ]
        return Exported(tuple(stages), self.state)

    def __str__(self) -> str:
        from aheadgrad.export.in_words import text

        return text(self.stages)
