"""What each process does in the tests of several processes: eager and compiled, the same steps, compared."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

import aheadgrad

Values = list[Tensor | None]
_meshes: list[DeviceMesh] = []


def mesh() -> DeviceMesh:
    if not _meshes:
        _meshes.append(init_device_mesh("cpu", (2,)))
    return _meshes[0]


def compiled(fn: Any, way: str) -> Any:
    if way == "backend":
        return torch.compile(fn, backend="aheadgrad")
    return aheadgrad.compile(fn, frontend=way)


def calls_made() -> int:
    """How many collectives this process has begun."""
    return int(mesh().get_group()._get_sequence_number_for_group())


def assert_equal(eager: Iterable[Any], ours: Iterable[Any], where: str) -> None:
    for i, (a, b) in enumerate(zip(eager, ours, strict=True)):
        assert (a is None) == (b is None), f"{where}, {i}: {a} and {b}"
        if a is None:
            continue
        assert type(a) is type(b), f"{where}, {i}: {type(a)} and {type(b)}"
        if isinstance(a, DTensor):
            assert a.placements == b.placements, f"{where}, {i}: {a.placements} and {b.placements}"
            assert a.shape == b.shape, f"{where}, {i}: {a.shape} and {b.shape}"
            a, b = a.to_local(), b.to_local()
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-6, msg=lambda m: f"{where}, {i}: {m}")


def copied(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach().clone()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 4)
        self.unused = nn.Linear(2, 2)
        self.other = nn.Linear(6, 8)

    def forward(self, x: Tensor, *, other: bool = False) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.norm(self.other(x) if other else self.first(x))))
        return out


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.blocks(x))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 16)
        self.down = nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


def steps(model: nn.Module, call: Callable[..., Tensor], rank: int, count: int = 3) -> list[Values]:
    """Training: losses, gradients, parameters and buffers after each step."""
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.5)
    numbers = torch.Generator().manual_seed(rank)
    found: list[Values] = []
    for _ in range(count):
        loss = call(torch.randn(5, 6, generator=numbers)).pow(2).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        now = [copied(loss), *(copied(p.grad) for p in parameters)]
        optimizer.step()
        optimizer.zero_grad()
        found.append([*now, *map(copied, parameters), *map(copied, model.buffers())])
    return found


def compare(eager: list[Values], ours: list[Values]) -> None:
    for i, (a, b) in enumerate(zip(eager, ours, strict=True)):
        assert_equal(a, b, f"step {i}")


# ---- DistributedDataParallel ----------------------------------------------------------------


def wrapped(model: nn.Module, way: str, place: str, **options: Any) -> Any:
    """DDP around a compiled model ("inside"), or compiled itself ("outside")."""
    if place == "inside":
        return DDP(compiled(model, way), **options)
    return compiled(DDP(model, **options), way)


def ddp(rank: int, way: str, place: str, options: dict[str, Any]) -> None:
    eager, model = twins(Net if options.get("find_unused_parameters") else Tower)
    compare(
        steps(eager, DDP(eager, **options), rank), steps(model, wrapped(model, way, place, **options), rank)
    )


def twins(kind: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    one = kind()
    return one, copy.deepcopy(one)


def ddp_branches(rank: int, way: str, place: str) -> None:
    """Each process takes another branch, and then the other way round."""
    eager, model = twins(Net)
    options = {"find_unused_parameters": True}

    def turns(call: Any) -> Callable[[Tensor], Tensor]:
        turn = iter(range(10))
        return lambda x: call(x, other=(next(turn) + rank) % 2 == 0)  # type: ignore[no-any-return]

    one = steps(eager, turns(DDP(eager, **options)), rank, count=4)
    compare(one, steps(model, turns(wrapped(model, way, place, **options)), rank, count=4))


def ddp_buckets(rank: int, way: str, place: str) -> None:
    """Small buckets: Dynamo splits the graph where one ends."""
    before = dist._DEFAULT_FIRST_BUCKET_BYTES
    dist._DEFAULT_FIRST_BUCKET_BYTES = 100
    try:
        ddp(rank, way, place, {"bucket_cap_mb": 0.0004})
    finally:
        dist._DEFAULT_FIRST_BUCKET_BYTES = before


def ddp_accumulates(rank: int, way: str, place: str) -> None:
    eager, model = twins(Tower)

    def run(model: nn.Module, call: Any) -> list[Values]:
        numbers = torch.Generator().manual_seed(rank)
        found: list[Values] = []
        for i in range(6):
            with call.no_sync() if i % 3 < 2 else nullcontext():
                loss = call(torch.randn(5, 6, generator=numbers)).pow(2).mean()
                loss.backward()
            found.append([copied(loss), *(copied(p.grad) for p in model.parameters())])
            if i % 3 == 2:
                model.zero_grad()
        return found

    compare(run(eager, DDP(eager)), run(model, wrapped(model, way, place)))


def ddp_forces(rank: int, way: str, place: str) -> None:
    """A loss on derivatives, through the synchronized parameters."""
    eager, model = twins(Tower)

    def run(model: nn.Module, call: Any) -> list[Values]:
        numbers = torch.Generator().manual_seed(rank)
        found: list[Values] = []
        for _ in range(3):
            positions = torch.randn(5, 6, generator=numbers, requires_grad=True)
            energy = call(positions).tanh().sum()
            (forces,) = torch.autograd.grad(energy, positions, create_graph=True)
            (forces.pow(2).mean() + energy).backward()
            found.append([copied(energy), copied(forces), *(copied(p.grad) for p in model.parameters())])
            model.zero_grad()
        return found

    compare(run(eager, DDP(eager)), run(model, wrapped(model, way, place)))


# ---- FSDP2 ----------------------------------------------------------------------------------


def sharded(model: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh=mesh())
    return fully_shard(model, mesh=mesh())


def fsdp(rank: int, way: str) -> None:
    one, two = map(sharded, twins(Tower))
    compare(steps(one, one, rank), steps(two, compiled(two, way), rank))


def fsdp_blocks(rank: int, way: str) -> None:
    """Blocks that are compiled first, and sharded then."""
    one, two = twins(Tower)
    two.blocks = nn.Sequential(*(compiled(block, way) for block in two.blocks))  # type: ignore[union-attr]
    sharded(one), sharded(two)
    compare(steps(one, one, rank), steps(two, two, rank))


def fsdp_accumulates(rank: int, way: str) -> None:
    one, two = map(sharded, twins(Tower))

    def run(model: Any, call: Any) -> list[Values]:
        numbers = torch.Generator().manual_seed(rank)
        found: list[Values] = []
        for i in range(6):
            model.set_requires_gradient_sync(i % 3 == 2)
            loss = call(torch.randn(5, 6, generator=numbers)).pow(2).mean()
            loss.backward()
            if i % 3 == 2:
                found.append([copied(loss), *(copied(p.grad) for p in model.parameters())])
                model.zero_grad()
        return found

    compare(run(one, one), run(two, compiled(two, way)))


def tensor_parallel(rank: int, way: str) -> None:
    """Parameters that are DTensors, and collectives in the hooks of modules."""
    one, two = twins(Block)
    for model in (one, two):
        parallelize_module(model, mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    compare(steps(one, one, 0), steps(two, compiled(two, way), 0))


# ---- functions of DTensors, and collectives -------------------------------------------------


def world() -> Any:
    return dist.group.WORLD


def local(x: DTensor, w: DTensor, b: DTensor, t: Tensor) -> Any:
    return x.sin() * 2, w.exp()


def matmul(x: DTensor, w: DTensor, b: DTensor, t: Tensor) -> Any:
    return torch.addmm(b, x, w).softmax(-1)


def partial(x: DTensor, w: DTensor, b: DTensor, t: Tensor) -> Any:
    return x.t() @ x, x.sum(0)


def redistribute(x: DTensor, w: DTensor, b: DTensor, t: Tensor) -> Any:
    return x.redistribute(mesh(), [Replicate()]).cos(), x.redistribute(mesh(), [Shard(1)]).sin()


def in_and_out(x: DTensor, w: DTensor, b: DTensor, t: Tensor) -> Any:
    y = DTensor.from_local(x.to_local() * t, mesh(), [Shard(0)])
    return (y.redistribute(mesh(), [Replicate()]) @ w).full_tensor()


def changed(x: DTensor, w: DTensor, b: DTensor, t: Tensor) -> Any:
    y = x * 2
    y.mul_(3).add_(x)
    with torch.no_grad():
        b.add_(1)
    return y, b * 2


def dropout(x: DTensor, w: DTensor, b: DTensor, t: Tensor) -> Any:
    return torch.nn.functional.dropout(x, 0.5) * 2


def noise(x: DTensor, w: DTensor, b: DTensor, t: Tensor) -> Any:
    return torch.nn.functional.dropout(x, 0.25) * 2


def all_reduce(x: DTensor, w: DTensor, b: DTensor, t: Tensor) -> Any:
    return collectives.all_reduce(t * 2, "sum", world()) * t


def all_gather(x: DTensor, w: DTensor, b: DTensor, t: Tensor) -> Any:
    return collectives.all_gather_tensor_autograd(t.sin(), 0, world()).cos()


def scattered(x: DTensor, w: DTensor, b: DTensor, t: Tensor) -> Any:
    y = collectives.reduce_scatter_tensor_autograd(t.sin(), "sum", 0, world())
    return y, collectives.all_to_all_single_autograd(t.cos(), [1, 1], [1, 1], world()).exp()


def unused(x: DTensor, w: DTensor, b: DTensor, t: Tensor) -> Any:
    """The other processes wait for these, whoever uses the result."""
    collectives.all_reduce(t.detach(), "sum", world())
    torch.ops._c10d_functional.all_reduce(t.detach() * 2, "sum", world().group_name)
    return t * 2


def twice(x: DTensor, w: DTensor, b: DTensor, t: Tensor) -> Any:
    one, two = (collectives.all_reduce(t.detach(), "sum", world()) for _ in range(2))
    return one * t + two


def in_place(x: DTensor, w: DTensor, b: DTensor, t: Tensor) -> Any:
    y, z = t.detach() * 2, t.new_empty(4, 6)
    dist.all_reduce(y)
    dist.all_gather_into_tensor(z, y)
    return (y * t).sum() + z.sum()


def function(rank: int, way: str, fn: Callable[..., Any]) -> None:
    """Values, gradients and the number of collectives, at the first call and at the next."""

    def run(fn: Callable[..., Any]) -> Any:
        given = inputs(rank)
        torch.manual_seed(2)
        before = calls_made()
        out = fn(*given)
        outs = list(out) if isinstance(out, tuple) else [out]
        seeds = [torch.ones_like(o) * (i + 1) for i, o in enumerate(outs)]
        grads = torch.autograd.grad(outs, given, seeds, allow_unused=True)
        made = calls_made() - before
        return made, [settled(o.detach()) for o in outs], grads, [g.detach() for g in given]

    calls, *eager = run(fn)
    fast = compiled(fn, way)
    for i in range(2):
        calls_now, *ours = run(fast)
        assert calls_now == calls, f"call {i}: {calls_now} collectives, {calls} in eager"
        for name, a, b in zip(("outputs", "gradients", "inputs"), eager, ours, strict=True):
            assert_equal(a, b, f"call {i}, {name}")


def settled(t: Tensor) -> Tensor:
    """Eager's collectives return tensors that wait when they are used; ours have waited."""
    if isinstance(t, collectives.AsyncCollectiveTensor):
        done: Tensor = t.trigger_wait()
        return done
    return t


def inputs(rank: int) -> tuple[Tensor, ...]:
    numbers = torch.Generator().manual_seed(3)
    whole = [torch.randn(*size, generator=numbers) for size in ((4, 6), (6, 8), (8,))]
    placed = [
        distribute_tensor(t, mesh(), [p])
        for t, p in zip(whole, (Shard(0), Shard(1), Replicate()), strict=True)
    ]
    mine = torch.randn(2, 6, generator=torch.Generator().manual_seed(rank))
    return tuple(t.requires_grad_() for t in (*placed, mine))


def one_compiles(rank: int, way: str) -> None:
    """Compiling makes no calls that the other processes do not know of."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).relu().sum() + collectives.all_reduce(x.to_local().detach(), "sum", world()).sum()  # type: ignore[attr-defined,no-any-return]

    eager, ours = inputs(rank)[:2], inputs(rank)[:2]
    out = fn(*eager)
    now = (compiled(fn, way) if rank == 0 else fn)(*ours)
    assert_equal([out.detach()], [now.detach()], "output")
    assert_equal(torch.autograd.grad(out, eager), torch.autograd.grad(now, ours), "gradients")


_LARGE = 1 << 18


def on_its_way(rank: int, *, late: bool) -> Tensor:
    """The sum over ranks, 3, which takes a while to come if the other process is late."""
    mine = torch.full((_LARGE,), rank + 1.0)
    dist.barrier()
    if rank == 1 and late:
        time.sleep(0.3)
    return collectives.all_reduce(mine, "sum", world())


def waits_for_inputs(rank: int, way: str) -> None:
    fast = compiled(lambda x, y: (x * y).sum(), way)
    for i in range(3):
        y = torch.ones(_LARGE, requires_grad=True)
        out = fast(on_its_way(rank, late=i == 2), y)
        assert out.item() == 3 * _LARGE
        out.backward()
        assert torch.equal(y.grad, torch.full((_LARGE,), 3.0))  # type: ignore[arg-type]


def waits_for_parts(rank: int, way: str) -> None:
    fast = compiled(lambda x: x * 2, way)
    for i in range(3):
        parts = DTensor.from_local(torch.full((_LARGE,), rank + 1.0), mesh(), [Partial()])
        dist.barrier()
        if rank == 1 and i == 2:
            time.sleep(0.3)
        whole = parts.redistribute(mesh(), [Replicate()], async_op=True)
        assert torch.equal(fast(whole).to_local(), torch.full((_LARGE,), 6.0))


def waits_for_tangents(rank: int, way: str) -> None:
    fast = compiled(lambda x: x.sin(), way)
    for i in range(3):
        x = torch.zeros(_LARGE, requires_grad=True)
        (grad,) = torch.autograd.grad(fast(x), x, on_its_way(rank, late=i == 2))
        assert torch.equal(settled(grad), torch.full((_LARGE,), 3.0))
