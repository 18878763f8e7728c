"""Inductor behind one door: what it can do here, its decompositions and passes, its inner compile.

Loading it takes seconds, so everything is imported when it is first needed.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock, get_ident, local
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from aheadgrad.torchlayer import inductor_exact, inductor_mended
from aheadgrad.torchlayer.dispatch import RELEASE, is_mutable
from aheadgrad.torchlayer.fake import FakeTensorMode, mode_of
from aheadgrad.torchlayer.inductor_launch import launched_directly
from aheadgrad.torchlayer.inductor_lookup import looked_up_quickly
from aheadgrad.torchlayer.inductor_mended import draws, mended
from aheadgrad.torchlayer.symbols import written_numbers

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_EXACT_RANDOM: dict[str, Any] = {"fallback_random": True}
_LOG = logging.getLogger("aheadgrad")


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
    with quietly():
        from torch._inductor import config, lowering  # some decompositions ask it, and do not load it
        from torch._inductor.decomposition import select_decomp_table

    with config.patch(_EXACT_RANDOM):
        table = dict(select_decomp_table())
    for op in inductor_exact.WRONG:
        if table.pop(op, None) is not None and op not in lowering.lowerings:
            lowering.make_fallback(op, warn=False, override_decomp=True)
    return table


@functools.cache
def _of_mode(mode: str) -> dict[str, Any]:
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


@contextmanager
def _configured(mode: str, graph: fx.Graph) -> Iterator[None]:
    """With the settings that a mode means. Random numbers are drawn as eager draws them."""
    from torch._inductor import config

    settings = {**_of_mode(mode), **_EXACT_RANDOM}
    if RELEASE < (2, 13) and any(draws(node.target) for node in graph.nodes):
        settings["reorder_for_locality"] = False  # which moves what draws numbers
    if config.post_grad_custom_pre_pass is None:
        settings["post_grad_custom_pre_pass"] = _simplify()
    with config.patch(settings), mended(), _headers_when_needed(), _instructions_known():
        yield


class _Headers(local):
    needed = False


_headers = _Headers()


@contextmanager
def _headers_when_needed() -> Iterator[None]:
    """Headers are compiled where kernels are, not where all of them are found in the cache."""
    from torch._inductor import codecache

    original = codecache._precompile_header

    def precompile(*args: Any, **kwargs: Any) -> str:
        return original(*args, **kwargs) if _headers.needed else ""

    _headers.needed = False
    with patch.object(codecache, "_precompile_header", precompile):
        yield


@contextmanager
def _instructions_known() -> Iterator[None]:
    """What instructions there are is found out by `begin`, which may still be at it."""
    from torch._inductor import config, cpu_vec_isa

    original = cpu_vec_isa.valid_vec_isa_list

    def known() -> Any:
        chosen = config.cpp.simdlen is not None or os.getenv("ATEN_CPU_CAPABILITY")
        return original() if chosen else _instructions().result()

    with patch.object(cpu_vec_isa, "valid_vec_isa_list", known):
        yield


@functools.cache
def _instructions() -> Future[Any]:
    beside = ThreadPoolExecutor(1, thread_name_prefix="aheadgrad")
    found = beside.submit(copy_context().run, _try_instructions)
    beside.shutdown(wait=False)
    return found


def _without_threads() -> None:
    """None live on in a forked process, as a worker of a DataLoader: Inductor would wait for its own."""
    _instructions.cache_clear()
    loaded: Any = sys.modules.get("torch._inductor.async_compile")
    if loaded is not None:
        loaded.AsyncCompile.pool.cache_clear()


os.register_at_fork(after_in_child=_without_threads)


def _try_instructions() -> Any:
    """Inductor tries each kind of vector instructions in a process of its own, and takes the best one that
    works: only that is tried. What is found is kept beside its compiled code."""
    from torch._inductor import cpu_vec_isa
    from torch._inductor.codecache import cache_dir, code_hash

    original = cpu_vec_isa.VecISA.check_build

    def works(self: Any, code: str) -> bool:
        flags = self.build_arch_flags()
        about = flags, cpu_vec_isa._get_isa_dry_compile_fingerprint(flags), cpu_vec_isa.x86_isa_checker()
        note = Path(cache_dir()) / f"aheadgrad-{code_hash(code, repr(about))}"
        with suppress(OSError):
            return note.read_text() == "works"
        found = original(self, code)
        with suppress(OSError):
            note.write_text("works" if found else "fails")
        return found

    with patch.object(cpu_vec_isa.VecISA, "check_build", works):
        able = cpu_vec_isa.x86_isa_checker()
        kinds = (k for k in cpu_vec_isa.supported_vec_isa_list if all(f in able for f in str(k).split()))
        best = next(filter(None, kinds), None)
        return cpu_vec_isa.valid_vec_isa_list() if best is None else [best]


@functools.cache
def begin(device: str) -> None:
    """What takes seconds and can be done beside the recording of a function: finding out what instructions a
    CPU has, starting the processes that compile for a GPU."""
    from torch._inductor import async_compile

    if device == "cpu":
        _instructions()
    elif device == "cuda":
        async_compile.maybe_warm_pool()


class Kernels:
    """Of one program: while C++ is compiled, something else can be done. (For a GPU there are more processes,
    which are done when the code around the kernels is.)"""

    def __init__(self) -> None:
        self._waits: list[Callable[[], None]] = []
        self._lock = Lock()

    def __bool__(self) -> bool:
        """Are there some to wait for?"""
        return bool(self._waits)

    @contextmanager
    def later(self) -> Iterator[None]:
        """Code is loaded before its kernels are compiled; those found in a cache are there at once."""
        from torch._inductor.async_compile import AsyncCompile

        original, waits, mine = AsyncCompile.wait, self._waits, get_ident()

        def wait(self: Any, scope: dict[str, Any]) -> None:
            if get_ident() == mine and _headers.needed:
                waits.append(lambda: original(self, scope))
            else:
                original(self, scope)

        with patch.object(AsyncCompile, "wait", wait):
            yield

    def wait(self) -> None:
        with self._lock:
            while self._waits:
                self._waits[-1]()
                self._waits.pop()


@functools.cache
def _simplify() -> Any:
    """Inductor's simplifications of a graph that is not split yet, as a step of its compile: it is not taken
    where a compiled graph is found in the cache."""
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes, lazy_init

    takes_device = "input_device" in inspect.signature(joint_graph_passes).parameters

    class Simplify(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            module: Any = graph.owning_module
            device = next((v.device for v in _fakes(module)), torch.device("cpu"))
            given: Any = (device,) if takes_device else ()
            with config.patch(fallback_random=False):  # patterns are stored so, or they would be traced again
                lazy_init(*given)
            inductor_exact.multiply_by_zero(module.graph)
            joint_graph_passes(module, *given)
            _headers.needed = True
            inductor_exact.leave_to_eager(module.graph)

        def uuid(self) -> bytes:
            return get_hash_for_files((__file__, inductor_exact.__file__, inductor_mended.__file__))

    return Simplify()


@dataclass(eq=False)
class Family:
    """The graphs of one call: its forward, and the backwards that follow. CUDA graphs want to know."""

    number: int | None = None
    boxes: dict[str, Any] = field(default_factory=dict)
    mode: FakeTensorMode | None = None

    def mode_like(self, mode: FakeTensorMode | None) -> FakeTensorMode:
        """One of Inductor's own, which makes others forget what they know of their tensors. It knows of
        symbols, though there may be none: Inductor's cache asks for that."""
        env = None if mode is None else mode.shape_env
        if self.mode is None or env not in (None, self.mode.shape_env):
            self.mode = FakeTensorMode(shape_env=env or ShapeEnv(), static_shapes=True)
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


def next_call() -> None:
    """A new call begins: CUDA graphs may reuse the memory of the results of the one before. (Dynamo counts
    calls itself.)"""
    from torch._dynamo.mutation_guard import GenerationTracker

    GenerationTracker.generation += 1


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
    kernels: Kernels | None = None,
) -> tuple[Callable[[list[Any]], Any], tuple[Any, ...] | None]:
    """A callable that takes its arguments in a list, and the strides of its results; if there are `kernels`
    to wait for, it is not to be called before.

    `visible`: results whose strides have to be as the graph says. `donated`: inputs whose memory may be used
    for something else.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    output = module.graph.output_node()
    output.meta["user_visible_output_idxs"] = list(visible)
    written = [i for i, node in enumerate(module.graph.find_nodes(op="placeholder")) if _is_written(node)]
    for node in module.graph.nodes:
        node.meta.setdefault("original_aten", node.target)  # kernels are called after these
    context = TracingContext(mode_of(list(inputs)))
    context.fw_metadata = SimpleNamespace(bw_donated_idxs=list(donated))  # type: ignore[assignment]
    later = launched_directly() if kernels is None else kernels.later()
    with _configured(mode, module.graph), looked_up_quickly(), tracing(context), later:
        made = compile_fx_inner(
            module,
            list(inputs),
            static_input_idxs=list(static),
            is_backward=role == "backward",
            is_inference=role == "inference",
            **family.arguments(),
        )
    texts = getattr(made, "output_strides", None) or ()  # torch would put the sizes of this call in
    env = None if family.mode is None else family.mode.shape_env
    strides = tuple(t and written_numbers(env, t) for t in texts) or None
    return _moving_versions(made, written) if written else made, strides


def _is_written(node: fx.Node) -> bool:
    return any(is_mutable(user.target) and user.args[0] is node for user in node.users)


def _moving_versions(run: Callable[[list[Any]], Any], written: Sequence[int]) -> Callable[[list[Any]], Any]:
    """Version counters of inputs that a program writes to move by one, as with an op; kernels move none."""

    def call(args: list[Any]) -> Any:
        changed = [t for t in map(args.__getitem__, written) if not t.is_inference()]
        versions = [t._version + 1 for t in changed]
        results = run(args)
        torch._C._autograd._unsafe_set_version_counter(tuple(changed), tuple(versions))
        return results

    return call


def _fakes(module: fx.GraphModule) -> Iterator[Tensor]:
    vals = (node.meta.get("val") for node in module.graph.nodes)
    return (v for v in vals if isinstance(v, Tensor))


@contextmanager
def quietly() -> Iterator[None]:
    """Without what surrounds the call: autocast, grad mode, inference mode. And without Inductor's warnings,
    which nobody asked for who did not ask for Inductor: they are logged."""
    with torch.inference_mode(False), torch.no_grad(), torch._C._DisableAutocast():
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            yield
    for warning in seen:
        if not issubclass(warning.category, DeprecationWarning | FutureWarning | ResourceWarning):
            _LOG.info("Inductor: %s", warning.message)
