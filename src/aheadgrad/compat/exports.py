"""The exports of `torch._functorch.aot_autograd` by their names and calling conventions, for code that has
them; `aheadgrad.export` says more and refuses less.

Graphs take parameters, buffers and user inputs, and return updates, user outputs and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx, nn

from aheadgrad import pipeline
from aheadgrad.backends.compilers import Compiler, Compilers
from aheadgrad.errors import InvalidOption, UnsupportedInput
from aheadgrad.export.exported import Exported
from aheadgrad.export.graph_modules import described
from aheadgrad.export.making import export
from aheadgrad.export.signature import CallSignature
from aheadgrad.export.trees import build
from aheadgrad.frontends.function import flatten, parameter_names
from aheadgrad.frontends.state import call_holding, held_by
from aheadgrad.joint.level import Joint
from aheadgrad.options import Options
from aheadgrad.partition.custom import joint_of_two_lists
from aheadgrad.partition.joint_graphs import default_partition
from aheadgrad.program.doors import module_of
from aheadgrad.program.program import Program
from aheadgrad.program.slots import (
    Buffer,
    ClosedOver,
    Gradient,
    Parameter,
    Slot,
    UpdatedInput,
    UserInput,
    UserOutput,
    ViewBase,
)
from aheadgrad.program.values import Value
from aheadgrad.recording.recording import Recording
from aheadgrad.report.journal import Journal
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.lock import RECORDING

Decompositions = Mapping[Any, Callable[..., Any]]


@dataclass
class BackwardSignature:
    """Names of gradients among the graph's outputs, and what they are gradients of."""

    gradients_to_parameters: dict[str, str]
    gradients_to_user_inputs: dict[str, str]
    loss_output: str


@dataclass
class GraphSignature:
    """What the placeholders and outputs of an exported graph are, by the names of its nodes."""

    parameters: list[str]
    buffers: list[str]
    user_inputs: list[str]
    user_outputs: list[str]
    inputs_to_parameters: dict[str, str]
    inputs_to_buffers: dict[str, str]
    buffers_to_mutate: dict[str, str]
    parameters_to_mutate: dict[str, str]
    user_inputs_to_mutate: dict[str, str]
    in_spec: Any
    out_spec: Any
    backward_signature: BackwardSignature | None
    input_tokens: list[str] = field(default_factory=list)
    output_tokens: list[str] = field(default_factory=list)


def aot_export_module(
    mod: nn.Module,
    args: Iterable[Any],
    *,
    decompositions: Decompositions | None = None,
    trace_joint: bool,
    output_loss_index: int | None = None,
    pre_dispatch: bool = False,
    dynamic_shapes: Any = None,
    kwargs: dict[str, Any] | None = None,
) -> tuple[fx.GraphModule, GraphSignature]:
    """The forward of a module as one graph; with `trace_joint`, also the gradients of one output."""
    if pre_dispatch:
        raise InvalidOption(
            "pre_dispatch=True is not supported: the graph has ops as autograd has seen them."
        )
    if trace_joint and output_loss_index is None:
        raise InvalidOption("trace_joint=True needs output_loss_index: which output is the loss?")
    args = tuple(args)
    loss = output_loss_index if trace_joint else None
    exported = export(
        mod, args, kwargs, loss=loss, dynamic_shapes=dynamic_shapes or None, decompositions=decompositions
    )
    module, program = _graph(exported)
    held = (*mod.parameters(), *mod.buffers())
    in_spec = pytree.tree_structure(((*held, *args), dict(kwargs or {})))
    return module, _signature(exported.signature, module, program, in_spec)


def _graph(exported: Exported) -> tuple[fx.GraphModule, Program]:
    """The graph without view bases, with constants of its own, and placeholders `argN_1`."""
    program, (names, *_) = exported.program, exported.signature.constants
    constants = {
        p.value: exported.state[p.slot.what]
        for p in program.inputs
        if isinstance(p.slot, ClosedOver) and p.slot.what in names
    }

    def own(value: Any) -> Any:
        return constants.get(value, value) if type(value) is Value else value

    rest = [p for p in program.inputs if p.value not in constants]
    outputs = [(slot, own(value)) for slot, value in program.outputs if not isinstance(slot, ViewBase)]
    program = replace(
        program,
        inputs=tuple(replace(p, name=f"arg{i}_1") for i, p in enumerate(rest)),
        ops=tuple(op.mapped(own) if constants else op for op in program.ops),
        outputs=tuple(o for o in outputs if not isinstance(o[0], Gradient) or o[1] is not None),
    )
    return module_of(program), program


def _signature(told: CallSignature, module: fx.GraphModule, program: Program, in_spec: Any) -> GraphSignature:
    nodes = [n for n in module.graph.nodes if n.op == "placeholder"]
    inputs = {p.slot: n.name for p, n in zip(program.inputs, nodes, strict=True)}
    results: Any = module.graph.output_node().args[0]
    names = [r.name if isinstance(r, fx.Node) else r for r in results]
    outputs = list(zip((slot for slot, _ in program.outputs), names, strict=True))
    user = {slot.index: name for slot, name in outputs if isinstance(slot, UserOutput)}
    count = len(told.outputs)

    def told_of(kind: type[Slot], of: type[Slot]) -> dict[str, Any]:
        found = [(slot, name) for slot, name in outputs if isinstance(slot, kind)]
        return {name: _called(slot.of, inputs) for slot, name in found if isinstance(slot.of, of)}  # type: ignore[attr-defined]

    backward = None
    if told.loss is not None:
        grads = told_of(Gradient, Parameter), told_of(Gradient, UserInput)
        backward = BackwardSignature(*grads, user[told.loss])
    return GraphSignature(
        parameters=[s.name for s in inputs if isinstance(s, Parameter)],
        buffers=[s.name for s in inputs if isinstance(s, Buffer)],
        user_inputs=[name for s, name in inputs.items() if not isinstance(s, Parameter | Buffer)],
        user_outputs=[user[j] for j in range(count)],
        inputs_to_parameters={name: s.name for s, name in inputs.items() if isinstance(s, Parameter)},
        inputs_to_buffers={name: s.name for s, name in inputs.items() if isinstance(s, Buffer)},
        buffers_to_mutate=told_of(UpdatedInput, Buffer),
        parameters_to_mutate=told_of(UpdatedInput, Parameter),
        user_inputs_to_mutate=told_of(UpdatedInput, UserInput),
        in_spec=in_spec,
        out_spec=pytree.tree_structure(build(told.returns, iter(range(count)))),
        backward_signature=backward,
    )


def _called(slot: Slot, inputs: dict[Slot, str]) -> str:
    """A parameter's or buffer's own name; a user input by its placeholder."""
    return slot.name if isinstance(slot, Parameter | Buffer) else inputs[slot]


def aot_export_joint_simple(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    trace_joint: bool,
    num_params_buffers: int = 0,
    decompositions: Decompositions | None = None,
) -> fx.GraphModule:
    """The graph of a function that changes nothing and returns new tensors: `(primals, tangents) -> (outputs,
    gradients)`, or without `trace_joint` the forward alone, of flat inputs."""
    options = Options(one_node=True, dynamic=False, decompositions=decompositions)
    _, joint, _ = _recorded(func, args, {}, options, forward_only=not trace_joint)
    facts = joint.facts
    if any(not f.untouched for f in facts.inputs) or facts.roots:
        raise UnsupportedInput(
            "aot_export_joint_simple is for functions that change none of their inputs, and return no views "
            "of them: its graph could not tell. aheadgrad.export can."
        )
    if not trace_joint:
        program = joint.program
        ports = tuple(replace(p, name=f"arg{i}_1") for i, p in enumerate(program.inputs))
        return module_of(replace(program, inputs=ports))
    module, _ = joint_of_two_lists(joint)
    return module


def _recorded(
    fn: Any, args: Any, kwargs: Any, options: Options, *, forward_only: bool = False
) -> tuple[Recording, Joint, Any]:
    flat = flatten(tuple(args), dict(kwargs), parameter_names(fn))
    call = call_holding(fn, flat, held_by(fn))
    call.forward_only = forward_only
    recording, joint = pipeline.record(call, options, Journal())
    return recording, joint, flat


# ---- the joint graph first, compiled later ---------------------------------------------------


@dataclass(eq=False)
class JointWithDescriptors:
    """A joint graph that may be changed before it is compiled; placeholders and outputs are described in
    `node.meta["aheadgrad"]`. `params_spec` and `buffers_spec` are names in the order of its primals."""

    graph_module: fx.GraphModule
    params_spec: list[str]
    buffers_spec: list[str]
    in_spec: Any
    out_spec: Any
    _recording: Recording = field(repr=False)
    _joint: Joint = field(repr=False)


def aot_export_joint_with_descriptors(
    stack: ExitStack,
    mod: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    decompositions: Decompositions | None = None,
    keep_inference_input_mutations: bool = False,
) -> JointWithDescriptors:
    """Captures the joint graph of a module, to be changed and then compiled. Nothing is put on `stack`."""
    options = Options(
        one_node=True,
        dynamic=False,
        decompositions=decompositions,
        backward_autocast="same_as_forward",
        keep_inference_input_mutations=keep_inference_input_mutations,
        partition=default_partition,
    )
    recording, joint, flat = _recorded(mod, args, kwargs or {}, options)
    if not joint.gradients or joint.gradients[0] is None:
        raise UnsupportedInput("Nothing of this call can be differentiated: there is no joint graph.")
    module, _ = joint_of_two_lists(joint)
    named = [slot for slot, _ in joint.wholes]
    return JointWithDescriptors(
        described(module, joint.program),
        [s.name for s in named if isinstance(s, Parameter)],
        [s.name for s in named if isinstance(s, Buffer)],
        flat.spec,
        recording.forward.out_spec,
        recording,
        joint,
    )


def _as_it_is(module: fx.GraphModule, _: Any) -> fx.GraphModule:
    return module


def aot_compile_joint_with_descriptors(
    jd: JointWithDescriptors,
    *,
    partition_fn: Callable[..., Any] = default_partition,
    fw_compiler: Compiler = _as_it_is,
    bw_compiler: Compiler | None = None,
) -> Callable[..., Any]:
    """Compiles the graph as it is by now: a function of parameters, buffers and flat inputs, one by one."""
    joint, module = jd._joint, jd.graph_module

    def partition(_: fx.GraphModule, inputs: Any, **told: Any) -> Any:
        return partition_fn(module, inputs, **told)

    compilers = Compilers(fw_compiler, bw_compiler or fw_compiler, fw_compiler, 0)
    options = replace(joint.options, backend=compilers, partition=partition)
    with RECORDING:
        entry = pipeline.compiled(jd._recording, replace(joint, options=options), options, Journal())
    jd._recording.release()
    spec = jd.out_spec

    def run(*inputs: Tensor) -> Any:
        return pytree.tree_unflatten(list(entry.run(*inputs)), spec)

    return run
