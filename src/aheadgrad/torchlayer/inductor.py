"""Inductor behind one door: what it can do here, its decompositions and passes, its inner compile.

Loading it takes seconds, so everything is imported when it is first needed.
"""

from __future__ import annotations

import functools
import inspect
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from aheadgrad.torchlayer.fake import FakeTensorMode, mode_of

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_EXACT_RANDOM = {"fallback_random": True}


@functools.cache
def missing(device: str) -> str | None:
    """What Inductor needs on a kind of device and does not find; None if it can run."""
    if device == "cpu":
        return _missing_compiler()
    if device == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "Triton"
    return None if device in ("xpu", "mps") else f"support for {device}"


def _missing_compiler() -> str | None:
    from torch._inductor import config, exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        found = get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return "a C++ compiler"
    known = shutil.which(found) is not None or config.is_fbcode()
    return None if known else "a C++ compiler"


@functools.cache
def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Those that Inductor wants made before a graph comes to it."""
    from torch._inductor.decomposition import select_decomp_table

    with configured("default"):
        return dict(select_decomp_table())


@functools.cache
def patches_of(mode: str) -> dict[str, Any]:
    """The settings that a mode means. Random numbers are drawn as eager draws them."""
    from torch._inductor import list_mode_options

    return {**list_mode_options(mode), **_EXACT_RANDOM}


@contextmanager
def configured(mode: str) -> Iterator[None]:
    from torch._inductor import config

    with config.patch(patches_of(mode)):
        yield


@dataclass(eq=False)
class Family:
    """The graphs of one call: its forward, and the backwards that follow. CUDA graphs want to know."""

    number: int | None = None
    boxes: dict[str, Any] = field(default_factory=dict)
    mode: FakeTensorMode | None = None

    def mode_like(self, mode: FakeTensorMode | None) -> FakeTensorMode:
        """One that knows of symbols, though there may be none: Inductor's cache asks for that."""
        if mode is not None and mode.shape_env is not None:
            return mode
        if self.mode is None:
            self.mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
        return self.mode

    def arguments(self) -> dict[str, Any]:
        from torch._inductor import config
        from torch._inductor.compile_fx import BoxedBool, BoxedDeviceIndex, _graph_counter

        if self.number is None:
            self.number = next(_graph_counter)
            self.boxes = {
                "cudagraphs": BoxedBool(config.triton.cudagraphs),
                "boxed_forward_device_index": BoxedDeviceIndex(None),
            }
        return {"graph_id": self.number, **self.boxes}


def compile_graph(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    family: Family,
    mode: str,
    *,
    role: str,
    static: Sequence[int],
    donated: Sequence[int],
    visible: Sequence[int],
) -> tuple[Callable[[list[Any]], Any], tuple[Any, ...] | None]:
    """A callable that takes its arguments in a list, and the strides of its results.

    `visible`: results whose strides have to be as the graph says. `donated`: inputs whose memory may be used
    for something else.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    output = module.graph.output_node()
    output.meta["user_visible_output_idxs"] = list(visible)
    context = TracingContext(mode_of(list(inputs)))
    context.output_strides = []
    context.fw_metadata = SimpleNamespace(bw_donated_idxs=list(donated))  # type: ignore[assignment]
    with configured(mode), _quietly(), tracing(context):
        made = compile_fx_inner(
            module,
            list(inputs),
            static_input_idxs=list(static),
            is_backward=role == "backward",
            is_inference=role == "inference",
            **family.arguments(),
        )
    strides = context.output_strides
    return made, tuple(strides) if strides else None


def rewrite(module: fx.GraphModule, mode: str) -> fx.GraphModule:
    """What Inductor simplifies in a graph before anything else."""
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes, lazy_init
    from torch._inductor.virtualized import V

    fakes = list(_fakes(module))
    device = fakes[0].device if fakes else torch.device("cpu")
    of_device: Any = (device,) if "input_device" in inspect.signature(joint_graph_passes).parameters else ()
    with _quietly(), V.set_fake_mode(mode_of(fakes)), tracing(TracingContext(mode_of(fakes))):
        lazy_init(*of_device)  # without settings of ours: patterns are stored, or they would be traced again
        with configured(mode):
            return joint_graph_passes(module, *of_device)


def _fakes(module: fx.GraphModule) -> Iterator[Tensor]:
    vals = (node.meta.get("val") for node in module.graph.nodes)
    return (v for v in vals if isinstance(v, Tensor))


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what surrounds the call: autocast, grad mode, inference mode."""
    autocast = torch._C._DisableAutocast()
    with torch.inference_mode(False), torch.no_grad(), autocast:
        yield
