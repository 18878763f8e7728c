"""Programs of an export for a backend: ops taken apart as it wishes, tensors laid out as recorded."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

from torch import Tensor

from aheadgrad import pipeline
from aheadgrad.backends.contract import Executable, wants_of
from aheadgrad.backends.eager import compile_eager, laid_out
from aheadgrad.backends.registry import Compiler, settled
from aheadgrad.errors import AheadgradError
from aheadgrad.export.interpreter import Call, Interpreter
from aheadgrad.export.signature import Stage
from aheadgrad.frontends.function import flatten, make_call
from aheadgrad.options import Options
from aheadgrad.partition.saved import SavedSet
from aheadgrad.partition.split import forward_program
from aheadgrad.program.doors import example_inputs, module_of
from aheadgrad.program.program import Program
from aheadgrad.program.slots import UserOutput
from aheadgrad.program.values import Value
from aheadgrad.report.journal import Journal
from aheadgrad.torchlayer.dynamo import symbols_of
from aheadgrad.torchlayer.lock import RECORDING


def compiled(stage: Stage, backend: Any) -> list[Call]:
    """What runs the programs of a stage."""
    looks = [h.type for h in stage.signature.held] + [a.type for a in stage.signature.arguments]
    devices = {t.device.type for t in looks if t is not None}
    options = settled(Options(backend=backend), next(iter(devices - {"cpu"}), "cpu"))
    with RECORDING:
        return [_compiled(p, options) for p in stage.programs]


def _compiled(program: Program, options: Options) -> Call:
    if options.backend is compile_eager:
        return compile_eager(program).call
    lowered, mode = program, None
    if wants_of(options.backend).decompositions():
        with suppress(AheadgradError):  # the backend will say what it cannot do
            lowered, mode = _taken_apart(program, options)
    made = Compiler(options, mode, Journal()).compile(lowered)
    return _laid_out(program, made)


def _taken_apart(program: Program, options: Options) -> tuple[Program, Any]:
    """The same program, recorded again while it is interpreted; and the fake mode of that recording."""
    inputs = example_inputs(module_of(program))
    run = Interpreter(program)
    flat = flatten(tuple(inputs), {}, [])
    call = make_call(lambda *given: run(list(given)), flat, [], lambda see: nullcontext(), exact=False)
    call.symbols = symbols_of(inputs, None)
    call.whole = call.forward_only = True
    again = Options(partition="min_cut", pieces=0, dynamic=False, decompositions=options.decompositions)
    recording, joint = pipeline.record(call, again, Journal())
    made = forward_program(joint, SavedSet(), inference=True)
    ports = zip(made.inputs, program.inputs, strict=True)
    results = [value for slot, value in made.outputs if isinstance(slot, UserOutput)]
    slots = [slot for slot, _ in program.outputs]
    lowered = replace(
        made,
        role=program.role,
        inputs=tuple(replace(known, value=port.value) for port, known in ports),
        outputs=tuple(zip(slots, results, strict=True)),
    )
    mode = recording.session.mode
    recording.release()
    return lowered, mode


def _laid_out(program: Program, made: Executable) -> Call:
    """Tensors go in and come out with the strides of the recording: backends choose their own, and leave out
    results that are inputs."""
    inputs = [_strides(p.value) for p in program.inputs]
    outputs = [_strides(v) for v in program.results]
    places = {p.value: i for i, p in enumerate(program.inputs)}
    passed = [(k, places[v]) for k, v in enumerate(program.results) if type(v) is Value and v in places]

    def run(given: list[Any]) -> list[Any]:
        kept = [(k, given[i]) for k, i in passed]
        results = made.call(_arranged(given, inputs))
        for k, t in kept:
            results[k] = t
        return _arranged(results, outputs)

    return run


def _strides(value: Any) -> tuple[int, ...] | None:
    """None where they are not known before the call, or no tensor is."""
    if type(value) is not Value or not all(type(n) is int for n in value.type.stride):
        return None
    return value.type.stride


def _arranged(tensors: list[Any], strides: list[Any]) -> list[Any]:
    return [
        laid_out(t, s) if s is not None and isinstance(t, Tensor) and t.stride() != s else t
        for t, s in zip(tensors, strides, strict=True)
    ]
