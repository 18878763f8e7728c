"""What the cache compares, beyond a function and its arguments: a change of it alone is noticed in another
process, which records anew; and what cannot be compared is recorded in each process."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests import test_cache
from tests.test_cache import NAME, Process, reason, was_recorded

process, _no_module_is_left = test_cache.process, test_cache._no_module_is_left

START = """
import abc, collections, functools, logging, sys, types
import torch
from torch import nn

V = 2.0
"""
TOO = f"{NAME}_too"
LIBRARY = torch.library.Library(TOO, "DEF")
LIBRARY.define("half(Tensor x) -> Tensor")
LIBRARY.impl("half", lambda x: x / 2, "CompositeImplicitAutograd")
# By what is changed: a program with a `V`.
SEEN: dict[str, str] = {
    "a global of a backward": """
        class F(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2
            @staticmethod
            def backward(ctx, g):
                return g * V
        f = F.apply
    """,
    "a helper of a backward": """
        def helper(g):
            return g * V
        class F(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2
            @staticmethod
            def backward(ctx, g):
                return helper(g)
        def f(x):
            return F.apply(x).sin()
    """,
    "what setup_context keeps": """
        class F(torch.autograd.Function):
            @staticmethod
            def forward(x):
                return x * 2
            @staticmethod
            def setup_context(ctx, inputs, output):
                ctx.factor = V
            @staticmethod
            def backward(ctx, g):
                return g * ctx.factor
        def f(x):
            return F.apply(x)
    """,
    "a hook on a tensor": """
        def f(x):
            y = x * 2
            y.register_hook(lambda g: g * V)
            return y.sin()
    """,
    "a hook on a module's backward": """
        layer = nn.Identity()
        layer.register_full_backward_hook(lambda m, before, after: (before[0] * V,))
        def f(x):
            return layer(x * 2)
    """,
    "a module that is imported inside": f"""
        import {TOO}
        {TOO}.V = V
        def f(x):
            import {TOO} as other
            return x * other.V
    """,
    "a name that is imported inside": f"""
        import {TOO}
        {TOO}.V = V
        def f(x):
            from {TOO} import V as factor
            return x * factor
    """,
    "a module that has no file": """
        made = types.ModuleType("kept_by_a_test_made")
        made.factor = V
        def f(x):
            return x * made.factor
    """,
    "an attribute of a metaclass": """
        class Meta(type):
            factor = V
        class Kind(metaclass=Meta):
            pass
        def f(x):
            return x * Kind.factor
    """,
    "a class that is registered": """
        class Shape(abc.ABC):
            pass
        class Box:
            pass
        if V > 2:
            Shape.register(Box)
        box = Box()
        def f(x):
            return x * (3 if isinstance(box, Shape) else 5)
    """,
    "a class that is registered with Python's own": """
        class Box:
            pass
        if V > 2:
            collections.abc.Sequence.register(Box)
        box = Box()
        def f(x):
            return x * (3 if isinstance(box, collections.abc.Sequence) else 5)
    """,
    "a name that was not there": """
        if V > 2:
            LATER = V
        def f(x):
            try:
                return x * LATER
            except NameError:
                return x
    """,
    "an attribute that torch is given": """
        torch.kept_by_a_test = {"factor": V}
        def f(x):
            return x * torch.kept_by_a_test["factor"]
    """,
    "an attribute of all tensors": """
        torch.Tensor.kept_by_a_test = V
        def f(x):
            return x * x.kept_by_a_test
    """,
    "a function of torch's that is another": """
        if V > 2:
            nn.functional.silu = nn.functional.relu
        f = nn.SiLU()
    """,
    "what a module of torch's calls": """
        def twice(*args):
            return nn.functional.layer_norm(*args) * 2
        nn.modules.normalization.F = types.SimpleNamespace(layer_norm=twice) if V > 2 else nn.functional
        f = nn.LayerNorm(3)
    """,
    "a setting of torch's that its code reads": """
        torch.set_printoptions(precision=int(V))
        def f(x):
            return x * torch._tensor_str.PRINT_OPTS.precision
    """,
    "the level of a logger": """
        logger = logging.getLogger("kept_by_a_test")
        logger.setLevel(int(V) * 10)
        def f(x):
            return x * logger.level
    """,
    "a name of a function": """
        def named():
            pass
        named.__name__ = "n" * int(V)
        def f(x):
            return x * len(named.__name__)
    """,
    "a derivative of a custom op": """
        torch.library.register_autograd("kept_by_a_test::twice", lambda ctx, g: g * V)
        def f(x):
            return torch.ops.kept_by_a_test.twice(x)
    """,
}


SIZE = [3]


@torch.library.custom_op("kept_by_a_test::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@torch.library.custom_op("kept_by_a_test::by_dynamo", mutates_args=())
def by_dynamo(x: Tensor) -> Tensor:
    return x.new_full((SIZE[0],), 2.0)


twice.register_fake(torch.empty_like)


@pytest.fixture
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the programs change in torch and in Python's library is put back."""
    monkeypatch.setattr(nn.functional, "silu", nn.functional.silu)
    monkeypatch.setattr(nn.modules.normalization, "F", nn.functional)
    for where in (torch, Tensor):
        monkeypatch.setattr(where, "kept_by_a_test", None, raising=False)
    yield
    torch.set_printoptions(profile="default")
    logging.getLogger("kept_by_a_test").setLevel(logging.NOTSET)


def outcome(fn: Any) -> list[Tensor]:
    x = torch.arange(-2.0, 1.0).requires_grad_()
    out = fn(x)
    return [out.detach(), *torch.autograd.grad(out.sum(), x)]


@pytest.mark.usefixtures("_as_it_was")
@pytest.mark.parametrize("what", SEEN)
def test_a_change_is_noticed(what: str, process: Process) -> None:
    silu = nn.functional.silu
    source = START + SEEN[what].replace("\n        ", "\n")
    for now, recorded in (
        (source, True),
        (source, False),
        (changed := source.replace("V = 2.0", "V = 3.0"), True),
    ):
        nn.functional.silu = silu
        process.load("", TOO)
        fast = process.start(now)
        got = outcome(fast)
        assert all(map(torch.equal, got, outcome(sys.modules[NAME].f)))
        assert was_recorded(fast) is recorded, reason(fast)
    process.load("", TOO)
    outcome(again := process.start(changed))  # it was kept as well
    assert not was_recorded(again), reason(again)
    if "Python's own" in what:
        return  # a class stays registered
    nn.functional.silu = silu
    process.load("", TOO)
    outcome(back := process.start(source))
    assert not was_recorded(back), reason(back)


# What is not compared, with a part of the reason.
UNPROVEN: dict[str, tuple[str, str]] = {
    "makes a set": (
        """
        def f(x):
            for name in {"ab", "cde", "f"}:
                x = x * len(name) + ord(name[0])
            return x
        """,
        "makes a set",
    ),
    "keys of dictionaries as sets": (
        """
        table, other = {"ab": 1, "cde": 2}, {"f": 3}
        def f(x):
            for name in table.keys() | other.keys():
                x = x * len(name)
            return x
        """,
        "makes a set",
    ),
    "numpy's random state": ("def f(x):\n    return x * float(np.random.get_state()[1][0])", "numpy.random"),
    "numpy's printing": ("def f(x):\n    return x * len(str(np.ones(1) / 3))", "ContextVar"),
    "a file that C reads": (
        "import os\nplace = os.__file__\ndef f(x):\n    return x * int(np.fromfile(place, np.uint8)[0])",
        "fromfile",
    ),
    "a file through numpy": (
        "def f(x):\n    return x * float(np.loadtxt(['3.0']))",
        "may tell another process something else",
    ),
    "decimals": (
        "from decimal import Decimal\ndef f(x):\n    return x * float(Decimal(1) / Decimal(3))",
        "decimal.Decimal",
    ),
    "sys.modules": (
        "import sys\ndef f(x):\n    return x * len(sys.modules['torch'].__name__)",
        "sys.modules",
    ),
    "whether a logger is on": (
        "import logging\nlogger = logging.getLogger('a')\ndef f(x):\n    return x * logger.isEnabledFor(10)",
        "isEnabledFor",
    ),
    "a random state of torch's": ("def f(x):\n    return x * (torch.initial_seed() % 7)", "initial_seed"),
    "a variable of a context": (
        "import contextvars\nkind = contextvars.ContextVar('kind')\nkind.set(2)\n"
        "def f(x):\n    return x * kind.get()",
        "ContextVar",
    ),
    "classes that were made": (
        "class A:\n    pass\ndef f(x):\n    return x * (1 + len(A.__subclasses__()))",
        "__subclasses__",
    ),
    "a kernel that only torch has": (
        "def f(x):\n    return torch.ops.kept_by_a_test_too.half(x)",
        "a kernel that was registered in Python (kept_by_a_test_too/half/CompositeImplicitAutograd)",
    ),
    "what it changes itself": (
        """
        class Counter:
            n = 0
        def with_counter(runs):
            def f(x):
                runs.n += 1
                return x * 2
            return f
        f = with_counter(Counter())
        """,
        "it changes what it depends on",
    ),
}


@pytest.mark.parametrize("what", UNPROVEN)
def test_what_is_not_compared_is_recorded_in_each_process(what: str, process: Process) -> None:
    source, part = UNPROVEN[what]
    source = "import numpy as np\nimport torch\n" + source.replace("\n        ", "\n")
    for _ in range(2):
        fast = process.start(source)
        fast(torch.ones(3))
        assert was_recorded(fast)
        assert "recorded in each process" in reason(fast)
        assert part in reason(fast)


def test_a_file_that_was_edited_is_proven_again(process: Process) -> None:
    clock = "import time\ndef f(x):\n    return x * (time.time() > 0)\n"
    for source, recorded in ((clock, True), (clock, True), (f"{clock}\n\n", True)):
        fast = process.start(source)
        fast(torch.ones(3))
        assert was_recorded(fast) is recorded
    calm = "import time\n\ndef helper(x):\n    return x * {}\n\ndef f(x):\n    return helper(x)\n"
    process.start(calm.format("time.time()"))(torch.ones(3))
    process.start(calm.format("2.0"))(torch.ones(3))
    fast = process.start(calm.format("2.0"))
    fast(torch.ones(3))
    assert not was_recorded(fast)


@pytest.mark.parametrize("kind", ["derivative", "fake"])
def test_custom_ops_in_graphs_of_dynamo(kind: str, process: Process) -> None:
    def started(factor: float) -> tuple[Any, Any]:
        SIZE[0] = int(factor) if kind == "fake" else 3
        source = f"""
            import torch

            FACTOR = {factor}
            torch.library.register_fake("kept_by_a_test::by_dynamo", lambda x: x.new_empty({SIZE[0]}))
            torch.library.register_autograd(
                "kept_by_a_test::by_dynamo", lambda ctx, g: g.sum() * FACTOR * torch.ones(3)
            )

            def f(x):
                return torch.ops.kept_by_a_test.by_dynamo(x) * 1.0
        """
        torch._dynamo.reset()
        module = process.load(source)
        return process.compile(module.f, frontend="dynamo"), module.f

    for factor, recorded in ((2.0, True), (2.0, False), (4.0, True)):
        fast, f = started(factor)
        assert all(map(torch.equal, outcome(fast), outcome(f)))
        assert was_recorded(fast) is recorded, reason(fast)


def test_numpy_that_is_only_computed_with_is_found(process: Process) -> None:
    source = """
        import math
        import numpy as np

        table = np.linspace(0, 1, 4)

        def f(x):
            return x * float(np.sqrt(table[2])) + math.sqrt(float(np.arange(5).sum()))
    """
    for recorded in (True, False):
        fast = process.start(source)
        torch.testing.assert_close(
            fast(torch.ones(3)), torch.full((3,), np.sqrt(2 / 3) + np.sqrt(10)).float()
        )
        assert was_recorded(fast) is recorded, reason(fast)


def test_an_import_that_another_process_has_not_made_yet(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(process.place)
    source = f"""
        def f(x):
            from {TOO} import factor
            return x * factor
    """
    for value, recorded in ((2.0, True), (2.0, False), (3.0, True)):
        (process.place / f"{TOO}.py").write_text(f"factor = {value}  # {'-' * int(value)}\n")
        sys.modules.pop(TOO, None)
        fast = process.start(source)
        assert fast(torch.ones(1)).item() == value
        assert was_recorded(fast) is recorded, reason(fast)
