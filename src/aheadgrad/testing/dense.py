"""Short programs, dense with what is hard: views, writes, changes of shape, of history and of memory.

The programs of `programs.py` are varied, and most of their lines are harmless. Here each of the few lines
does something to one of two tensors, often to the same: what comes out is seldom sensible and often an
error, in eager too, and that is the point.
"""

from __future__ import annotations

import random
from typing import Any

from aheadgrad.testing.programs import Program, Step

_DATA = "torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.3, -0.7], [0.9, -0.4, 1.1]])"
_TALL = "torch.tensor([[0.1, 0.2, 0.3], [0.5, -1.0, 2.0], [1.5, 0.3, -0.7], [0.9, -0.4, 1.1]])"
_GRAD = ".requires_grad_()"

FIRST = {
    "plain": (f"x1 = {_DATA}",),
    "leaf": (f"x1 = {_DATA}{_GRAD}",),
    "with a history": (f"x0 = {_DATA}{_GRAD}", "x1 = x0 * 1"),
    "view of a plain one": (f"xb = {_TALL}", "x1 = xb[1:]"),
    "view of a leaf": (f"x0 = {_TALL}{_GRAD}", "x1 = x0[1:]"),
    "view with a history": (f"x0 = {_TALL}{_GRAD}", "xb = x0 * 1", "x1 = xb[1:]"),
    "transposed": (f"x0 = {_DATA}{_GRAD}", "xb = x0 * 1", "x1 = xb.t()"),
    "detached": (f"x0 = {_DATA}{_GRAD}", "xb = x0 * 1", "x1 = xb.detach()"),
    "view made under no_grad": (f"x0 = {_DATA}{_GRAD}", "xb = x0 * 1", "with torch.no_grad(): x1 = xb[:]"),
    "leaf with an offset": (f"xb = {_TALL}", f"x1 = xb[1:].detach(){_GRAD}"),
}
SECOND = {
    "plain": f"x2 = {_DATA} + 1",
    "leaf": f"x2 = {_DATA}{_GRAD}",
    "with a history": f"x2 = {_DATA}{_GRAD} * 2",
    "the first": "x2 = x1",
    "view of the first": "x2 = x1.view_as(x1)",
    "the first transposed": "x2 = x1.t()",
}
VIEWS = (
    *("a[0]", "a.t()", "a.detach()", "a[:, 1:]", "v.view_as(v)", "a.expand(2, -1, -1)", "a.unbind(0)[0]"),
    *("a.as_strided((2, 2), (1, 1), 0)", "a.data", "v.t()", "a.view(-1)", "a.diagonal()", "a.clone()"),
    *("a * 2", "a.reshape(-1)", "a.split(1)[0]", "a.mT.contiguous()", "a[None]", "a.flatten()", "b.t()"),
    *("v.unsqueeze(0)", "torch.view_as_real(torch.complex(a, b))[..., 0]"),
)
WRITES = (
    *("a.mul_(2)", "v.mul_(3)", "v.add_(1)", "a[0] = 1.5", "a.copy_(b)", "v.zero_()", "a.data.mul_(2)"),
    *("v.data.add_(1)", "a[0].sin_()", "v.exp_()", "a.sigmoid_()", "a += b", "v[0] = 2.0", "b.mul_(2)"),
    *("v.copy_(v.clone())", "b.copy_(a)", "v.detach().mul_(2)", "a[:, 0] = b[:, 0]", "a.t().mul_(2)"),
    *("v.clamp_(-1, 1)", "a.fill_(v.sum())"),
    *("torch.sin(b, out=a)", "torch.sin(b, out=v)", "torch.add(a, b, out=v)"),
)
SHAPES = (
    *("a.t_()", "a.unsqueeze_(0)", "v.unsqueeze_(0)", "v.t_()", "a.squeeze_()", "a.transpose_(0, 1)"),
    *("a.as_strided_((2, 2), (1, 2))", "a.resize_(2, 2)", "a.resize_(9)"),
)
HISTORIES = (
    *("a.requires_grad_()", "v.requires_grad_()", "a.detach_()", "v.detach_()", "a.requires_grad_(False)"),
    *("v.requires_grad = True", "b.requires_grad_()"),
)
MEMORY = (
    *("a.set_(b)", "a.data = b", "a.data = b.detach() * 2", "v.set_(b)", "v.data = b"),
    *("a.data = a.data.t()", "v.data = v.data[0:1]"),
)
USES = ("a * v.sum()", "c + v.sum()", "v * 2", "c + a.sum()", "a.sin()", "c * b.sum()")
RESULTS = (
    *("v", ("a", "v"), ("a * 2", "v"), "c", ("a", "c"), "v * 2", ("v", "c", "a"), "a.sum() + v.sum()"),
    *(("v[0:1]", "v"), ("a.detach()", "c"), ("b", "v")),
)
KINDS = (
    (5, [f"v = {view}" for view in VIEWS]),
    (6, list(WRITES)),
    (3, list(SHAPES)),
    (2, list(HISTORIES)),
    (1, list(MEMORY)),
    (2, [f"c = {use}" for use in USES]),
)


def generate_dense(seed: int) -> Program:
    """The program of a seed."""
    rng = random.Random(f"dense {seed}")
    other = rng.choice(list(SECOND.values())) if rng.random() < 0.5 else SECOND["plain"]
    setup = (*rng.choice(list(FIRST.values())), other)
    body = [Step("v = a[:2]" if rng.random() < 0.5 else "v = a"), Step("c = b")]
    weights = [weight for weight, _ in KINDS]
    for _ in range(rng.randint(2, 4)):
        _, lines = rng.choices(KINDS, weights)[0]
        blocks = ("no_grad",) if rng.random() < 0.15 else ()
        body.append(Step(rng.choice(lines), blocks))
    made: dict[str, Any] = {}
    exec("\n".join(("import torch", *setup)), made)
    tensors = {name: made[name] for name in ("x0", "xb", "x1", "x2") if name in made}
    leaves = [n for n, t in tensors.items() if t.is_leaf and t.requires_grad]
    if tensors["x2"] is tensors["x1"] and "x2" in leaves:
        leaves.remove("x2")
    watched = tuple(name for name in tensors if name == "xb")
    inputs = setup, tuple(leaves), watched, ("a", "b"), ("x1", "x2")
    return Program(seed, *inputs, tuple(body), rng.choice(RESULTS))
