"""Entries kept on disk. A module that is loaded anew stands for another process: its code, globals and
classes are other objects; what the cache makes of them is the same as in a process of its own."""

from __future__ import annotations

import importlib.util
import linecache
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aheadgrad
from aheadgrad.cache.store import Store
from aheadgrad.errors import AheadgradError, CacheWarning, InvalidOption

NAME = "kept_by_a_test"


@pytest.fixture(autouse=True)
def _no_module_is_left() -> Any:
    yield
    for name in [n for n in sys.modules if n.startswith(NAME)]:
        del sys.modules[name]


class Process:
    """`start` loads the source as a process would, and compiles its `f` (or `model`)."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def load(self, source: str, name: str = NAME) -> ModuleType:
        path = self.place / f"{name}.py"
        path.write_text(textwrap.dedent(source))
        linecache.checkcache(str(path))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        exec(compile(path.read_text(), str(path), "exec"), vars(module))
        return module

    def compile(self, fn: Any, **options: Any) -> Any:
        given = {"frontend": "trace", "backend": "eager", "fallback": "error", **options}
        return aheadgrad.compile(fn, cache=self.place / "cache", **given)

    def start(self, source: str, **options: Any) -> Any:
        return self.compile(self.load(source).f, **options)

    @property
    def files(self) -> list[str]:
        found = os.listdir(self.place / "cache")
        return sorted(name.rpartition(".")[2] for name in found)


@pytest.fixture
def process(tmp_path: Path) -> Process:
    return Process(tmp_path)


def was_recorded(fast: Any) -> bool:
    return "forward" in fast.entries[-1].entry.journal.times


def reason(fast: Any) -> str:
    return str(fast.misses[-1])


PLAIN = """
import torch
from torch import nn

WIDTH = 2.0

def scale(x):
    return x * WIDTH

class Block(nn.Module):
    factor = 3.0

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.power = 2
        nn.init.constant_(self.inner.weight, 0.5)
        nn.init.constant_(self.inner.bias, 0.1)

    def forward(self, x):
        return self.inner(scale(x)) ** self.power * self.factor

block = Block()

def f(x, bias=1.0):
    return block(x) + sum([bias, 1.0])
# the end
"""


def step(fast: Any, *args: Any) -> list[Tensor]:
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    out = fast(x, *args)
    return [out.detach(), *torch.autograd.grad(out.sum(), x)]


def test_another_process_records_nothing(process: Process) -> None:
    first = process.start(PLAIN)
    want = step(first)
    assert was_recorded(first)
    assert "no call of this function is kept" in reason(first)
    again = process.start(PLAIN)
    assert all(map(torch.equal, step(again), want))
    assert not was_recorded(again)
    assert again.misses == []
    assert process.files == ["call", "entry"]


END = "# the end\n"
CHANGES: dict[str, tuple[str, str, str]] = {
    "a global of another function": ("WIDTH = 2.0", "WIDTH = 5.0", "WIDTH"),
    "code of another function": ("x * WIDTH", "x / WIDTH", "scale"),
    "an attribute of a class": ("factor = 3.0", "factor = 4.0", "Block"),
    "a method": ("** self.power", "- self.power", "Block"),
    "an attribute of a module": ("self.power = 2", "self.power = 3", "power"),
    "a default": ("bias=1.0", "bias=7.0", "the function"),
    "the function itself": ("+ sum", "- sum", "the function"),
    "a type": ("WIDTH = 2.0", "WIDTH = 2", "WIDTH"),
    "a function put in its place": (END, f"{END}def other(x):\n    return x + 9\nscale = other\n", "scale"),
    "a method put in its place": (END, f"{END}Block.forward = lambda self, x: x - 1\n", "Block"),
    "a method of one object": (END, f"{END}block.forward = lambda x: x - 1\n", "forward"),
    "a builtin": (END, f"{END}def sum(x):\n    return x[0] * 8\n", "sum"),
    "from the environment": ("WIDTH = 2.0", "import os; WIDTH = float(os.environ['THE_WIDTH'])", "WIDTH"),
    "a hook": (END, f"{END}block.register_forward_hook(lambda m, a, out: out * 2)\n", "hook"),
    "a function of torch's": (END, f"{END}nn.Linear.forward = lambda self, x: x * 4\n", "Linear"),
    "a subclass": (END, f"{END}class Other(Block):\n    pass\nblock.__class__ = Other\n", "block"),
    "training": ("block = Block()", "block = Block().eval()", "training"),
    "requires_grad": ("block = Block()", "block = Block().requires_grad_(False)", ""),
}


BY_NAME = """
import torch
import kept_by_a_test_too as settings

class Holder:
    a_factor = 2.0

holder = Holder()

def f(x):
    for name in ("a", "b"):
        x = x * getattr(holder, f"{name}_factor", 1.0) + getattr(settings, f"{name}_shift", 0.0)
    return x * getattr(settings, "POWER")
"""
SETTINGS = "POWER = 2.0\na_shift = 1.0\n"


@pytest.mark.parametrize(
    "old, new",
    [
        ("a_shift = 1.0", "a_shift = 3.0"),
        ("POWER = 2.0", "POWER = 4.0"),
        ("a_factor = 2.0", "b_factor = 5.0"),
    ],
)
def test_attributes_that_are_asked_for_by_name(old: str, new: str, process: Process) -> None:
    for recorded in (True, False):
        process.load(SETTINGS, f"{NAME}_too")
        step(first := process.start(BY_NAME))
        assert was_recorded(first) is recorded
    process.load(SETTINGS.replace(old, new), f"{NAME}_too")
    changed = process.start(BY_NAME.replace(old, new))
    assert all(map(torch.equal, step(changed), step(sys.modules[NAME].f)))
    assert was_recorded(changed)


@pytest.mark.parametrize("what", CHANGES)
def test_what_has_changed_is_recorded_anew(
    what: str, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_WIDTH", "6.0")
    monkeypatch.setattr(nn.Linear, "forward", nn.Linear.forward)
    step(process.start(PLAIN))
    old, new, named = CHANGES[what]
    assert old in PLAIN
    changed = process.start(PLAIN.replace(old, new))
    got = step(changed)
    assert was_recorded(changed)
    assert "cache:" in reason(changed)
    assert named in reason(changed)
    assert all(map(torch.equal, got, step(sys.modules[NAME].f)))
    monkeypatch.undo()
    step(back := process.start(PLAIN))  # what was kept first is still there
    assert not was_recorded(back)


def test_what_surrounds_a_call_is_part_of_its_key(process: Process) -> None:
    step(process.start(PLAIN))
    f = process.load(PLAIN).f

    def recorded(*args: Any, **options: Any) -> str:
        fast = process.compile(f, **options)
        want, got = step(f, *args), step(fast, *args)
        assert all(map(torch.equal, got, want))
        return reason(fast) if was_recorded(fast) else ""

    assert recorded() == ""
    assert "bias" in recorded(2.0)
    assert "bias" in recorded(2)
    assert "bias: int 2 was kept, tensor 3 came" in recorded(torch.tensor(1.0))
    assert "any_order: bool True was kept, bool False came" in recorded(any_order=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in recorded()
    threads = torch.get_num_threads()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(threads + 1)
    try:
        assert recorded() != ""  # two things have changed
        torch.use_deterministic_algorithms(False)
        assert "deterministic" in recorded()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    with torch.no_grad():
        fast = process.compile(f)
        assert torch.equal(fast(torch.ones(2, 3)), f(torch.ones(2, 3)))
        assert was_recorded(fast)
    for other in (torch.ones(2, 3), torch.ones(3, 2).t(), torch.ones(4, 3)[::2], torch.ones(5, 3)):
        fast = process.compile(f)
        assert torch.equal(fast(other), f(other))
        assert was_recorded(fast)
    assert "input x: float32 [2, 3] was kept, float32 [5, 3] came" in reason(fast)


UNPROVEN: dict[str, str] = {
    "the environment": """
        import os
        def f(x):
            return x * float(os.environ.get("A_FACTOR", 2))
    """,
    "a file": """
        def f(x):
            with open(__file__) as file:
                return x * len(file.read())
    """,
    "the clock": """
        import time
        def f(x):
            return x * (time.time() > 0)
    """,
    "a cache of Python's": """
        from functools import lru_cache
        @lru_cache
        def g():
            return 2.0
        def f(x):
            return x * g()
    """,
    "an iterator": """
        names = iter([2.0, 3.0])
        def g():
            return next(names)
        def f(x):
            return x * g()
    """,
    "an identity": """
        THING = object()
        def f(x):
            return x * (id(THING) % 7)
    """,
    "a hash": """
        def f(x):
            for name in {"ab", "cd", "ef"}:
                x = x * len(name) + hash(name) % 5
            return x
    """,
    "all names": """
        WIDTH = 2.0
        def f(x):
            return x * globals()["WI" + "DTH"]
    """,
    "code without a module": """
        space = {}
        exec("def g(x):\\n    return x * 2", space)
        def f(x):
            return space["g"](x)
    """,
    "an object of C": """
        import threading
        class Guard:
            lock = threading.Lock()
        def f(x):
            with Guard.lock:
                return x * 2
    """,
}


@pytest.mark.parametrize("what", UNPROVEN)
def test_what_cannot_be_proven_is_recorded_in_each_process(what: str, process: Process) -> None:
    x = torch.ones(3)
    for _ in range(3):
        fast = process.start(UNPROVEN[what], fallback="warn")
        fast(x)
        assert was_recorded(fast)
        assert "recorded in each process" in reason(fast)
    assert "entry" in process.files


def test_a_recorded_program_that_is_known_is_not_partitioned_again(process: Process) -> None:
    source = UNPROVEN["the clock"]
    process.start(source)(torch.ones(3))
    again = process.start(source)
    x = torch.arange(3.0, requires_grad=True)
    torch.testing.assert_close(again(x), x * 1)
    process.start(source)(x)
    third = process.start(source)
    out = third(x)
    assert "split" not in third.entries[0].entry.journal.times
    (grad,) = torch.autograd.grad((out**3).sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(grad.sum(), x)[0], 6 * x.detach())


def cube(x: Tensor, w: Tensor) -> Any:
    return (x @ w).sin() * w.sum(), {"t": x.t()}


def update(x: Tensor, w: Tensor) -> Any:
    x = x * 2
    x.add_(w.sum())
    return x.view(-1), [torch.topk(x, 2).values]


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2


def custom(x: Tensor, w: Tensor) -> Any:
    return Cubed.apply(x) @ w


HELD = torch.linspace(0, 1, 16).view(4, 4)
LAYERS = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 2))


def closed_over(x: Tensor, w: Tensor) -> Any:
    return (x @ HELD).tanh() * w.sum()


def layers(x: Tensor, w: Tensor) -> Any:
    return LAYERS(x) * w.mean()


def orders(fn: Callable[..., Any]) -> list[Tensor]:
    """Results, gradients of three orders, and one of tangents in another layout, to some inputs only."""
    torch.manual_seed(0)
    x, w = (torch.rand(*size, dtype=torch.float32).requires_grad_() for size in ((3, 4), (4, 4)))
    outs = [t for t in torch.utils._pytree.tree_leaves(fn(x, w)) if t.requires_grad]
    found = list(outs)
    grads: Any = outs
    for _ in range(3):
        loss = sum((g**2).sum() for g in grads if g is not None)
        grads = torch.autograd.grad(loss, (x, w), create_graph=True, allow_unused=True)
        found += [g for g in grads if g is not None]
    first = next(t for t in torch.utils._pytree.tree_leaves(fn(x, w)) if t.requires_grad)
    tangent = torch.ones(first.shape[::-1]).permute(*reversed(range(first.dim())))
    found += torch.autograd.grad(first, [x], tangent)
    return [t.detach() for t in found]


@pytest.mark.parametrize("frontend", ["trace", "dynamo"])
@pytest.mark.parametrize("fn", [cube, update, custom, closed_over, layers])
def test_a_loaded_entry_does_what_a_recorded_one_does(fn: Any, frontend: str, process: Process) -> None:
    want = orders(fn)
    for recorded in (True, False):
        fast = process.compile(fn, frontend=frontend)
        torch.testing.assert_close(orders(fast), want, rtol=1e-4, atol=1e-3)
        assert was_recorded(fast) is recorded


def test_graphs_of_dynamo_that_differ_are_told_apart(process: Process) -> None:
    def run(fn: Any) -> bool:
        fast = process.compile(fn, frontend="dynamo")
        x = torch.ones(3, requires_grad=True)
        torch.testing.assert_close(fast(x), fn(x))
        torch._dynamo.reset()
        return was_recorded(fast)

    functions = [lambda x: x * 2, lambda x: x * 3, lambda x: x * 2.0, lambda x: (x * 2).detach()]
    assert [run(f) for f in functions] == [True] * 4
    assert [run(f) for f in functions] == [False] * 4
    with torch.autocast("cpu", torch.bfloat16):
        assert run(functions[0])


def test_the_module_has_changed_before_more_is_asked_for(process: Process) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    x = torch.ones(2, 3, requires_grad=True)
    process.compile(model)(x)
    fast = process.compile(model)
    out = fast(x)
    assert not was_recorded(fast)
    model.eval()
    with pytest.raises(AheadgradError, match="training was True at the call and is False now"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_a_damaged_entry_is_dropped(process: Process) -> None:
    want = step(process.start(PLAIN))
    for kind in ("entry", "call"):
        (path,) = (process.place / "cache").glob(f"*.{kind}")
        data = path.read_bytes()
        for damaged in (data[:-1], data[: len(data) // 2], b"", bytes([data[-1] ^ 1]).join([data[:-1], b""])):
            path.write_bytes(damaged)
            fast = process.start(PLAIN)
            with pytest.warns(CacheWarning, match="is dropped"):
                assert all(map(torch.equal, step(fast), want))
            assert was_recorded(fast)
    step(fast := process.start(PLAIN))
    assert not was_recorded(fast)


def test_an_entry_that_was_removed(process: Process) -> None:
    want = step(process.start(PLAIN))
    (path,) = (process.place / "cache").glob("*.entry")
    path.unlink()
    fast = process.start(PLAIN)
    assert all(map(torch.equal, step(fast), want))
    assert "entry was removed" in reason(fast)
    step(fast := process.start(PLAIN))
    assert not was_recorded(fast)


def test_a_store_is_bounded_and_drops_what_was_used_longest_ago(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache", limit=4000)
    assert store.usable() == ""
    for i in range(3):
        store.write(f"{i}.entry", bytes(1000))
        os.utime(store.place / f"{i}.entry", (i, i))
    assert store.read("0.entry") == bytes(1000)
    store.write("3.entry", bytes(1500))
    assert sorted(store.names("")) == ["0.entry", "2.entry", "3.entry"]
    assert (store.place.stat().st_mode & 0o777) == 0o700


def test_a_directory_of_others_is_not_used(process: Process) -> None:
    place = process.place / "cache"
    place.mkdir()
    place.chmod(0o777)
    fast = process.start(PLAIN)
    with pytest.warns(CacheWarning, match="chmod go-w"):
        step(fast)
    assert list(place.iterdir()) == []


def test_a_directory_that_cannot_be_made(process: Process) -> None:
    (process.place / "cache").write_text("no directory")
    fast = process.start(PLAIN)
    with pytest.warns(CacheWarning, match="cannot be made"):
        step(fast)


def test_the_place_and_the_limit_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AHEADGRAD_CACHE_DIR", str(tmp_path / "there"))
    aheadgrad.compile(cube, frontend="trace", backend="eager", cache=True)(torch.ones(2, 4), torch.ones(4, 4))
    assert len(list((tmp_path / "there").iterdir())) == 2
    monkeypatch.setenv("AHEADGRAD_CACHE_SIZE", "1K")
    aheadgrad.compile(cube, frontend="trace", backend="eager", cache=True)(torch.ones(3, 4), torch.ones(4, 4))
    assert sum(path.stat().st_size for path in (tmp_path / "there").iterdir()) <= 1024
    monkeypatch.setenv("AHEADGRAD_CACHE_SIZE", "much")
    with pytest.raises(InvalidOption, match="AHEADGRAD_CACHE_SIZE='much'"):
        aheadgrad.compile(cube, frontend="trace", fallback="error", cache=True)(
            torch.ones(4, 4), torch.ones(4, 4)
        )
    with pytest.raises(InvalidOption, match="cache=3"):
        aheadgrad.compile(cube, cache=3)


def test_what_is_not_kept_says_so(process: Process) -> None:
    def partition(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError

    x = torch.ones(2, 3)
    fast = process.compile(cube, partition=partition)
    with torch.no_grad():
        fast(torch.ones(2, 4), torch.ones(4, 4))
    assert "partition= is a function" in reason(fast)
    dynamic = process.compile(lambda x: x * 2, dynamic=True)
    dynamic(x)
    assert "symbol" in reason(dynamic)
    again = process.compile(lambda x: x * 2, dynamic=True)
    again(torch.ones(2, 3))
    assert was_recorded(again)


def test_many_processes_make_one_entry(process: Process) -> None:
    process.load(PLAIN)
    program = f"""
import sys, torch, aheadgrad, warnings
warnings.simplefilter("error")
place = {str(process.place)!r}
sys.path.insert(0, place)
import {NAME} as m
fast = aheadgrad.compile(m.f, frontend="trace", backend="eager", fallback="error", cache=place + "/cache")
out = fast(torch.arange(6.0).view(2, 3).requires_grad_())
out.backward(torch.ones_like(out))
recorded = "forward" in fast.entries[0].entry.journal.times
print("recorded" if recorded else "found", "torch._dynamo" in sys.modules)
"""
    run = [sys.executable, "-c", program]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(run, **pipes) for _ in range(2)]
    told = [one.communicate() for one in both]
    assert [error for _, error in told if error] == []
    assert process.files == ["call", "entry"]
    last = subprocess.run(run, capture_output=True, text=True, check=True)
    assert last.stdout == "found False\n"
