"""Inductor where others are at work, too: forked processes, transforms, ragged tensors, other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import aheadgrad
from aheadgrad.torchlayer.inductor import missing

pytestmark = pytest.mark.skipif(missing("cpu") is not None, reason="needs a C++ compiler")


def fast(fn: Any, **options: Any) -> Any:
    return aheadgrad.compile(fn, **{"fallback": "error", "backend": "inductor", **options})


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_derivatives_that_know_zeros_are_compiled() -> None:
    """Warnings are errors: nothing runs op by op."""

    def fn(x: Tensor) -> Tensor:
        return torch.func.hessian(lambda v: (v.sin() * v).sum())(x)

    x = torch.randn(4)
    same(fast(fn, frontend="trace")(x), fn(x))


def test_ragged_tensors_are_compiled() -> None:
    rows = [torch.randn(2, 3), torch.randn(4, 3)]
    ragged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    same(fast(lambda n: n.sin() * 2)(ragged).values(), ragged.values().sin() * 2)


FORKED = """
import os, torch, aheadgrad

def fast(number):
    return aheadgrad.compile(lambda x: x.sin() * number + x.sum(), backend="inductor", frontend="trace")

x = torch.ones(3)
fast(2.5)(x)
child = os.fork()
if child == 0:
    torch.testing.assert_close(fast(3.5)(x), x.sin() * 3.5 + 3)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.zoo
def test_a_forked_process_compiles_with_threads_of_its_own(tmp_path: Path) -> None:
    around = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    subprocess.run([sys.executable, "-c", FORKED], env={**os.environ, **around}, check=True, timeout=120)


DISTRIBUTED = """
import copy, sys
import torch
import torch.distributed as dist
from torch import nn
import aheadgrad

rank, where = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=2)
torch.manual_seed(0)
inside = nn.Sequential(nn.Linear(4, 600), nn.Tanh(), nn.Linear(600, 600), nn.GELU(), nn.Linear(600, 2))
whole, twin = copy.deepcopy(inside), copy.deepcopy(inside)
parallel = nn.parallel.DistributedDataParallel
options = {"backend": "inductor"}
runs = {
    inside: parallel(torch.compile(inside, backend="aheadgrad", options=options), bucket_cap_mb=1),
    whole: aheadgrad.compile(parallel(whole, bucket_cap_mb=1), fallback="error", **options),
    twin: parallel(twin),
}
x = torch.randn(5, 4, generator=torch.Generator().manual_seed(rank))
for run in runs.values():
    run(x).square().mean().backward()
for model in (inside, whole):
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
dist.destroy_process_group()
"""


@pytest.mark.zoo
def test_gradients_of_two_processes(tmp_path: Path) -> None:
    """Dynamo splits what is around a DistributedDataParallel at its buckets."""
    start = [sys.executable, "-c", DISTRIBUTED]
    both = [subprocess.Popen([*start, str(rank), str(tmp_path / "meet")]) for rank in range(2)]
    assert [p.wait(timeout=200) for p in both] == [0, 0]
