"""The Inductor backend: programs become fused C++ and Triton kernels.

    aheadgrad.compile(model, backend="inductor", mode="reduce-overhead")

A fusing backend rounds otherwise than eager does, as with `torch.compile`; random numbers are those of eager.
The forward may lay out what it keeps for the backward as it likes: the strides that it reports are what the
backward is compiled for. A program that Inductor cannot compile runs op by op, with a warning.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from aheadgrad.backends.contract import Boxed, Executable, Request, Wants
from aheadgrad.backends.eager import compile_eager, laid_out, op_by_op
from aheadgrad.backends.errors_of_eager import raise_as_eager
from aheadgrad.backends.for_sizes import ForSizes, Sizes
from aheadgrad.backends.results import Results
from aheadgrad.backends.room import LONG, WithRoom
from aheadgrad.errors import FallbackError, FallbackWarning, InvalidOption, reason_of
from aheadgrad.program.program import Program
from aheadgrad.program.slots import Saved, Tangent, UpdatedInput
from aheadgrad.program.values import Op, Value
from aheadgrad.report.origins import stacklevel_of_user
from aheadgrad.torchlayer import inductor
from aheadgrad.torchlayer.assumptions import of_its_own
from aheadgrad.torchlayer.autograd import keeps_graph
from aheadgrad.torchlayer.collection import no_collection
from aheadgrad.torchlayer.dispatch import is_random
from aheadgrad.torchlayer.lock import RECORDING
from aheadgrad.torchlayer.transforms import is_batched

_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
_SEEN_FIRST: Sizes = {}


@dataclass(frozen=True)
class Inductor:
    """`mode` as in `torch.compile`. `warns`: a program that cannot be compiled is news to whoever asked for
    Inductor by name; others find it in the report."""

    mode: str = "default"
    warns: bool = field(default=True, compare=False)

    wants = Wants(
        inductor.decompositions,
        layouts=1,
        partition="min_cut",
        replays=False,
        updates=True,
        fuses=True,
        begin=inductor.begin,
    )

    def __post_init__(self) -> None:
        if self.mode not in inductor.MODES:
            raise InvalidOption(f"mode={self.mode!r}: choose one of {', '.join(inductor.MODES)}.")

    def __call__(self, request: Request) -> Executable:
        program = request.program
        if not program.ops:
            return compile_eager(program)
        if program.role != "backward":
            made = self.compiled(request)
            if self.mode in _CUDA_GRAPHS and request.shared.get("frontend") == "trace":
                return Executable(_counted(made.call), made.strides)
            return made
        run = _Backward(self, request)
        if _keeps(program):
            return Executable(run, run.first().strides)
        if request.ahead:
            run.find(kept=not run.donated)
        return Executable(run)

    def compiled(self, request: Request, donated: tuple[int, ...] = ()) -> Executable:
        try:
            with inductor.quietly(), no_collection():
                lacking = next(filter(None, map(inductor.missing, _devices(request.program))), None)
                if lacking is not None:
                    raise FallbackError(f"{lacking} was not found")
                if _passes_on(request.program):
                    raise FallbackError("an input becomes what another was, which changes as well")
                return self._by_inductor(request, donated)
        except Exception as error:
            self.tell(request, reason_of(error))
            return op_by_op(request)

    def tell(self, request: Request, reason: str) -> None:
        text = f"Inductor cannot compile this {request.role} ({reason}); it runs op by op."
        request.note(text)
        if self.warns:
            warnings.warn(text, FallbackWarning, stacklevel=stacklevel_of_user())

    def _by_inductor(self, request: Request, donated: tuple[int, ...]) -> Executable:
        run, strides, assumed = self._made(request, donated)
        if not assumed:
            return Executable(run, strides)
        if _keeps(request.program):
            raise FallbackError("the layout of what it keeps would depend on sizes")

        def again(sizes: Sizes) -> tuple[Boxed, list[Any]]:
            try:
                with inductor.quietly(), no_collection():
                    run, _, assumed = self._made(request, donated, sizes)
                return run, assumed
            except Exception as error:
                self.tell(request, reason_of(error))
                return op_by_op(request).call, []

        sized = ForSizes(request.example_inputs(), again, lambda: op_by_op(request).call)
        sized.add(run, assumed)
        return Executable(sized)

    def _made(
        self, request: Request, donated: tuple[int, ...], sizes: Sizes = _SEEN_FIRST
    ) -> tuple[Boxed, Any, list[Any]]:
        """What runs, the strides of its results, and what a backward assumes of its sizes."""
        outputs = request.program.outputs
        family = request.shared.setdefault("family", inductor.Family())
        request = replace(request, mode=family.mode_like(request.mode), program=_named(request, donated))
        visible = [
            i for i, (slot, v) in enumerate(outputs) if not isinstance(slot, Saved) and type(v) is Value
        ]
        kernels = inductor.Kernels() if _devices(request.program) == ["cpu"] else None
        in_entry: Any = nullcontext([])
        with of_its_own(request.mode, sizes) if request.role == "backward" else in_entry as assumed:
            results = Results(request, visible)
            made, strides = inductor.compile_graph(
                request.module,
                request.example_inputs(),
                family,
                self.mode,
                role=request.role,
                static=_static(request),
                donated=donated,
                visible=visible,
                kernels=kernels,
            )
        strides = results.strides_after(strides)
        updated = request.shared.setdefault("updated", set())
        updated.update(value for slot, value in outputs if isinstance(slot, UpdatedInput))

        if kernels is None and len(request.program.ops) >= LONG and self.mode not in _CUDA_GRAPHS:
            made = WithRoom(made)  # kernels of a CPU are no functions of Python
        run = results.of(made)
        call: Boxed = run
        if request.role != "backward" and kernels is not None:
            call = _raising_as_eager(run, request)
        if kernels:
            request.shared["building"] = kernels
            call = _Building(self, request, Executable(call, strides), kernels)
        return call, strides, assumed


def _keeps(program: Program) -> bool:
    return any(isinstance(slot, Saved) for slot, _ in program.outputs)


class _Building:
    """A program whose kernels are still being compiled when it is first called."""

    def __init__(
        self, backend: Inductor, request: Request, made: Executable, kernels: inductor.Kernels
    ) -> None:
        self.backend, self.request, self.run, self.strides = backend, request, made.call, made.strides
        self.kernels: inductor.Kernels | None = kernels

    def __call__(self, args: list[Any]) -> list[Any]:
        if self.kernels is not None:
            self._wait(self.kernels)
        return self.run(args)

    def _wait(self, kernels: inductor.Kernels) -> None:
        try:
            with self.request.watch(), inductor.quietly():
                kernels.wait()
        except Exception as error:
            self.backend.tell(self.request, reason_of(error))
            self.run = self._laid_out(op_by_op(self.request).call)
        self.kernels = None

    def _laid_out(self, run: Boxed) -> Boxed:
        """What comes after was compiled for the strides that Inductor had promised."""
        promised = [(i, s) for i, s in enumerate(self.strides or ()) if s is not None]

        def call(args: list[Any]) -> list[Any]:
            results = run(args)
            for i, strides in promised:
                if results[i].stride() != strides:
                    results[i] = laid_out(results[i], strides)
            return results

        return call


def _raising_as_eager(run: Boxed, request: Request) -> Boxed:
    """Eager's ops say what is wrong."""
    if any(op.keep and not is_random(op.target) for op in request.program.ops):
        return run  # what has an effect must not run twice

    def call(args: list[Any]) -> list[Any]:
        given = list(args)
        try:
            return run(args)
        except RuntimeError:
            raise_as_eager(request.program, given)
            raise

    return call


def _counted(run: Boxed) -> Boxed:
    def call(args: list[Any]) -> list[Any]:
        inductor.next_call()
        return run(args)

    return call


def _named(request: Request, donated: tuple[int, ...]) -> Program:
    """Names tell which inputs are given away: Inductor's cache knows graphs by their text alone."""
    inputs = list(request.program.inputs)
    for i in donated:
        inputs[i] = replace(inputs[i], name=f"donated_{inputs[i].name}")
    return replace(request.program, inputs=tuple(inputs)) if donated else request.program


class _Backward:
    """A backward as it is called.

    Tangents that come in another layout than the program is made for are copied; so are inputs of the call
    that it updated, and which now stand for their new values. Memory is given away if the graph is not kept.
    """

    def __init__(self, backend: Inductor, request: Request) -> None:
        self.backend, self.request = backend, request
        updated = request.shared.get("updated", ())
        inputs = [(i, p) for i, p in enumerate(request.program.inputs) if type(p.value) is Value]
        loose = [(i, p.value) for i, p in inputs if isinstance(p.slot, Tangent) or p.value in updated]
        fixed = ((i, v.type.stride) for i, v in loose)
        self.loose = [(i, s if all(type(n) is int for n in s) else None) for i, s in fixed]
        self.donated = request.donated
        self.made: dict[bool, Boxed] = {}
        self.plain: Boxed | None = None

    def __call__(self, args: list[Any]) -> list[Any]:
        for i, strides in self.loose:
            t = args[i]
            if is_batched(t):
                return self._op_by_op(args)
            if strides is not None and t.stride() != strides:
                args[i] = laid_out(t, strides)
        kept = not self.donated or keeps_graph()
        run = self.made.get(kept)
        return self.find(kept)(args) if run is None else run(args)

    def first(self) -> Executable:
        """Compiled now, for those who have to know how its results are laid out."""
        made = self.backend.compiled(self.request)
        self.donated, self.made[True] = (), made.call
        return made

    def find(self, kept: bool) -> Boxed:
        with RECORDING:
            if kept not in self.made:
                with self.request.watch():
                    made = self.backend.compiled(self.request, () if kept else self.donated)
                self.made[kept] = made.call
            return self.made[kept]

    def _op_by_op(self, args: list[Any]) -> list[Any]:
        """For `is_grads_batched=True`, where ops know what to do with batches."""
        if self.plain is None:
            self.plain = op_by_op(self.request).call
        return self.plain(args)


def _static(request: Request) -> list[int]:
    """Inputs that stay where they are: parameters, and for CUDA graphs what the forward kept."""
    if request.role != "backward":
        return list(request.static)
    return [i for i, p in enumerate(request.program.inputs) if isinstance(p.slot, Saved)]


def _passes_on(program: Program) -> bool:
    """Is an input given the value of another that is written to itself? Inductor takes the copy for needless
    and reads the other when that has changed."""
    writes = {op.args[0]: op.args[1] for op in program.ops if op.phase == "write"}
    source = {v: op.viewed or _copied(op) for op in program.ops for v in op.values}
    for place, new in writes.items():
        while source.get(new) is not None:
            new = source[new]
        if new is not place and new in writes:
            return True
    return False


def _copied(op: Op) -> Any:
    """What an op makes a plain copy of."""
    name = str(op.target)
    return op.args[1] if name == "aten.copy.default" else op.args[0] if name == "aten.clone.default" else None


def _devices(program: Program) -> list[str]:
    values = [p.value for p in program.inputs if type(p.value) is Value]
    values += [v for op in program.ops for v in op.values]
    return sorted({v.type.device.type for v in values})
