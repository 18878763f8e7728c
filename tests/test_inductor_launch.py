"""How Inductor's kernels are launched once they have been launched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aheadgrad.torchlayer.inductor_launch import _Kernel


class Kernel:
    """As Inductor's: `run` may compile, tune and dump, a launcher only launches."""

    dump_launch_params = dump_launch_tensors = triton_interpret = False

    def __init__(self, count: int = 1, **launcher: Any) -> None:
        self.ran: list[str] = []
        self.launchers: list[Any] = []
        self.count, self.launcher = count, {"store_cubin": False, **launcher}
        self.name = "kernel"

    def run(self, *args: Any, stream: int, **options: Any) -> tuple[Any, ...]:
        self.launchers = [_Launcher(self.ran, **self.launcher) for _ in range(self.count)]
        self.ran.append("run")
        return (*args, stream)


class _Launcher(SimpleNamespace):
    def __init__(self, ran: list[str], **facts: Any) -> None:
        super().__init__(ran=ran, **facts)

    def __call__(self, *args: Any, stream: int) -> tuple[Any, ...]:
        self.ran.append("launcher")
        return (*args, stream)


def test_only_the_first_launch_may_have_to_compile() -> None:
    kernel = Kernel()
    launched = _Kernel(kernel)
    assert [launched.run(1, 2, stream=3) for _ in range(3)] == [(1, 2, 3)] * 3
    assert kernel.ran == ["run", "launcher", "launcher"]
    assert launched.name == "kernel"


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_a_profiler_and_options_of_a_launch_are_heeded() -> None:
    kernel = Kernel()
    launched = _Kernel(kernel)
    launched.run(stream=0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        launched.run(stream=0)
    launched.run(stream=0, benchmark_run=True)
    launched.run(stream=0)
    assert kernel.ran == ["run", "run", "run", "launcher"]


@pytest.mark.parametrize(
    "kernel",
    [Kernel(count=2), Kernel(store_cubin=True), Kernel(global_scratch=8)],
    ids=["two", "kept", "scratch"],
)
def test_a_kernel_that_needs_more_than_a_launch_runs_as_ever(kernel: Kernel) -> None:
    launched = _Kernel(kernel)
    for _ in range(3):
        launched.run(stream=0)
    assert kernel.ran == ["run"] * 3
