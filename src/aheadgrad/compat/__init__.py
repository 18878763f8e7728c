"""A drop-in for `functorch.compile`: same names, signatures, calling and graph conventions.

    from aheadgrad.compat import aot_function, make_boxed_compiler

    @make_boxed_compiler
    def show(graph_module, example_inputs):
        graph_module.print_readable()
        return graph_module

    fast = aot_function(fn, fw_compiler=show)

Compilers get FX graphs with the placeholders `primals_N`, `tangents_N` (`argN_1` without a
backward); the forward returns updated inputs, outputs, view bases, saved tensors, saved sizes;
the backward returns one gradient per primal. What differs from torch's: a call that the first
graph does not fit is compiled anew instead of being given a wrong answer, gradients that eager
leaves `None` stay `None`, and what torch refuses is done as in eager.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import fx, nn

from aheadgrad.backends.compilers import Compiler, Compilers, compilation_context, make_boxed_func
from aheadgrad.compat.exports import (
    BackwardSignature,
    GraphSignature,
    JointWithDescriptors,
    aot_compile_joint_with_descriptors,
    aot_export_joint_simple,
    aot_export_joint_with_descriptors,
    aot_export_module,
)
from aheadgrad.frontends.compiled import Described
from aheadgrad.frontends.compiled_module import CompiledModule, original_of
from aheadgrad.frontends.flat import compile_flat
from aheadgrad.frontends.trace import TracedFunction
from aheadgrad.options import Options
from aheadgrad.partition.joint_graphs import default_partition, min_cut_rematerialization_partition
from aheadgrad.torchlayer.decompositions import decompositions_of
from aheadgrad.torchlayer.fake import FakeTensor
from aheadgrad.torchlayer.scripting import scripted
from aheadgrad.torchlayer.transforms import without_functionalize

__all__ = [
    "BackwardSignature",
    "GraphSignature",
    "JointWithDescriptors",
    "aot_compile_joint_with_descriptors",
    "aot_export_joint_simple",
    "aot_export_joint_with_descriptors",
    "aot_export_module",
    "aot_function",
    "aot_module",
    "aot_module_simplified",
    "compiled_function",
    "compiled_module",
    "default_decompositions",
    "default_partition",
    "get_aot_compilation_context",
    "get_aot_graph_name",
    "get_graph_being_compiled",
    "make_boxed_compiler",
    "make_boxed_func",
    "memory_efficient_fusion",
    "min_cut_rematerialization_partition",
    "nop",
    "print_compile",
    "ts_compile",
]

Decompositions = Mapping[Any, Callable[..., Any]]
_MANY_ENTRIES = 64
_count = itertools.count()


def aot_function(
    fn: Callable[..., Any],
    fw_compiler: Compiler,
    bw_compiler: Compiler | None = None,
    partition_fn: Callable[..., Any] = default_partition,
    decompositions: Decompositions | None = None,
    num_params_buffers: int = 0,
    keep_inference_input_mutations: bool = False,
    inference_compiler: Compiler | None = None,
    *,
    dynamic: bool = False,
    enable_log: bool = True,
    disable_functionalization: bool = False,
    _disable_torch_fn_metadata_mode: bool = False,
) -> Any:
    """Compiles a function; its graphs go through `fw_compiler` and `bw_compiler`.

    `num_params_buffers`, `enable_log`, `disable_functionalization` (the graphs are functional all the
    same) and `_disable_torch_fn_metadata_mode` are taken for the signature's sake.
    """
    return TracedFunction(
        without_functionalize(fn),
        _options(
            (fw_compiler, bw_compiler, inference_compiler),
            partition_fn,
            decompositions,
            keep_inference_input_mutations,
            dynamic=dynamic,
        ),
    )


def aot_module(mod: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """As `aot_function`, for a module: its parameters and buffers come first among the primals."""
    compiled: TracedFunction = aot_function(mod, *args, **kwargs)
    made: Any = AOTModule(mod, compiled)
    return made


class AOTModule(CompiledModule):
    """A compiled module; `orig_module` is the module it was made from."""

    __slots__ = ()

    @property
    def orig_module(self) -> nn.Module:
        return original_of(self)


def aot_module_simplified(
    mod: nn.Module,
    args: Sequence[Any],
    fw_compiler: Compiler,
    bw_compiler: Compiler | None = None,
    partition_fn: Callable[..., Any] = default_partition,
    decompositions: Decompositions | None = None,
    keep_inference_input_mutations: bool = False,
    inference_compiler: Compiler | None = None,
    compiler_config_extra: Any = None,
    ignore_shape_env: bool = False,
    disable_functionalization: bool = False,
    pre_grad_passes: Callable[..., Any] | None = None,
    compile_region_name: str | None = None,
) -> Any:
    """Compiles a module for flat inputs like `args`, now, and for callers who check them themselves.

    Takes what Dynamo hands to a backend: a graph module, fake tensors, symbolic sizes. The result
    takes the inputs one by one and returns the flat outputs.
    """
    if pre_grad_passes is not None and isinstance(mod, fx.GraphModule):
        mod = pre_grad_passes(mod, args)
    options = _options(
        (fw_compiler, bw_compiler, inference_compiler),
        partition_fn,
        decompositions,
        keep_inference_input_mutations,
    )
    by_dynamo = any(isinstance(a, FakeTensor) for a in args)  # whose guards check what inputs are
    return _unboxed(mod, compile_flat(mod, args, options, guarded=by_dynamo))


def _unboxed(mod: nn.Module, entry: Described) -> Any:
    # Dynamo wraps modules with nested inputs in a class of its own, and calls these boxed.
    nested = type(mod).__name__ == "GmWrapper"
    run: Any = make_boxed_func(entry.call) if nested else entry.call
    run.zero_grad = mod.zero_grad
    run.named_parameters = mod.named_parameters
    run.named_buffers = mod.named_buffers
    run.entry = entry.entry
    return run


def _options(
    compilers: tuple[Compiler, Compiler | None, Compiler | None],
    partition_fn: Callable[..., Any] | None,
    decompositions: Decompositions | None,
    keep: bool,
    *,
    dynamic: bool = False,
) -> Options:
    forward, backward, inference = compilers
    own = {None: "default", default_partition: "default", min_cut_rematerialization_partition: "min_cut"}
    return Options(
        backend=Compilers(forward, backward or forward, inference or forward, next(_count)),
        partition=own.get(partition_fn, partition_fn),
        decompositions=decompositions,
        dynamic=dynamic,
        backward_autocast="same_as_forward",
        keep_inference_input_mutations=keep,
        one_node=True,
        max_entries=_MANY_ENTRIES,
    )


compiled_function = aot_function
compiled_module = aot_module


def make_boxed_compiler(compiler: Compiler) -> Compiler:
    """The same compiler, whose results take their arguments in a list."""

    @wraps(compiler)
    def boxed(fx_g: fx.GraphModule, inps: list[Any]) -> Callable[..., Any]:
        return make_boxed_func(compiler(fx_g, inps))

    return boxed


@make_boxed_compiler
def nop(fx_g: fx.GraphModule, _: Any) -> fx.GraphModule:
    """Runs the graph as it is."""
    return fx_g


@make_boxed_compiler
def print_compile(fx_g: fx.GraphModule, _: Any) -> fx.GraphModule:
    """Prints the graph's code and runs the graph as it is."""
    print(fx_g.code)
    return fx_g


@make_boxed_compiler
def ts_compile(fx_g: fx.GraphModule, inps: Sequence[Any]) -> Any:
    """Compiles the graph with TorchScript."""
    return scripted(fx_g)


_aten = torch.ops.aten
default_decompositions: dict[Any, Callable[..., Any]] = decompositions_of(
    [
        _aten.detach,
        _aten.gelu_backward,
        _aten.leaky_relu_backward,
        _aten.sigmoid_backward,
        _aten.threshold_backward,
        _aten.hardtanh_backward,
        _aten.hardsigmoid_backward,
        _aten.hardswish_backward,
        _aten.tanh_backward,
        _aten.silu_backward,
        _aten.elu_backward,
        _aten.cudnn_batch_norm,
        _aten.cudnn_batch_norm_backward,
        _aten.masked_fill.Scalar,
        _aten.masked_fill.Tensor,
        _aten.elu,
        _aten.leaky_relu,
        _aten.hardtanh,
        _aten.hardswish,
        _aten.hardsigmoid,
        _aten.conj_physical,
        _aten.is_same_size,
    ]
)


def memory_efficient_fusion(fn: Callable[..., Any] | nn.Module, **kwargs: Any) -> Any:
    """Compiles a function or module with TorchScript and the decompositions that fuse well."""
    config: dict[str, Any] = {
        "fw_compiler": ts_compile,
        "bw_compiler": ts_compile,
        "partition_fn": default_partition,
        "decompositions": default_decompositions,
        **kwargs,
    }
    return aot_module(fn, **config) if isinstance(fn, nn.Module) else aot_function(fn, **config)


def get_aot_compilation_context() -> tuple[list[str], str, int]:
    """The graphs being compiled in this thread, the model's name, how many graphs came before."""
    return compilation_context()


def get_aot_graph_name() -> str:
    """The name of the graph being compiled, such as `model__0_forward_3`."""
    graphs, model, finished = compilation_context()
    return f"{model}__{'_'.join(graphs)}_{finished}"


get_graph_being_compiled = get_aot_graph_name
