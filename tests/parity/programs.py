"""Small functions that change or alias what they are given; used for behaviour and for graph text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# -- inputs ------------------------------------------------------------------------------------


def leaves(count: int, *shape: int, grad: bool = True) -> Callable[[], list[Tensor]]:
    """A maker of `count` random leaves of one shape."""
    return lambda: [torch.randn(*shape, requires_grad=grad) for _ in range(count)]


def hollow(*sizes: int) -> Callable[[], list[Tensor]]:
    """A maker of leaves, the first of which has a shape but no memory yet."""

    def make() -> list[Tensor]:
        made = [torch.randn(size, requires_grad=True) for size in sizes]
        made[0].untyped_storage().resize_(0)
        return made

    return make


# -- an input's data changes -------------------------------------------------------------------


def double_then_triple(x: Tensor) -> Tensor:
    x.mul_(2)
    return x * 3


def double_and_return(x: Tensor) -> Tensor:
    x.mul_(2)
    return x


def double_first_and_last(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    x.mul_(2)
    z.mul_(2)
    return x + y + z


def sine_into(x: Tensor, out: Tensor) -> Tensor:
    return torch.sin(x, out=out)


def double_flat_unseen(x: Tensor) -> Tensor:
    flat = x.view(-1)
    with torch.no_grad():
        flat.mul_(2)
    return x + 1


def double_unseen(x: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(2)
    return x + 3


def double_and_add_unseen(x: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(2)
        return x + 3


# -- an input's metadata changes ---------------------------------------------------------------


def transpose_then_scale_a_row(x: Tensor) -> Tensor:
    x.t_()
    x[0].mul_(2)
    return x.view(x.shape)


def transpose_one_view_both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x.t_()
    return y.view(y.shape), x.view(x.shape)


def begin_to_require_grad(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    x.requires_grad_(True)
    return x.mul(3), y.mul(4)


# -- an input's storage changes ----------------------------------------------------------------


def adopt_then_double_source(x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        x.set_(y)
        y.mul_(2)
    return x + y


def adopt_and_come_back(x: Tensor) -> Tensor:
    other = torch.arange(9, dtype=x.dtype)
    before = torch.ops.aten.alias.default(x)
    with torch.no_grad():
        x.set_(other)
        x.set_(before)
    return x + other.reshape(3, 3)


def grow_and_fill(x: Tensor) -> Tensor:
    """Eight float32 elements take 32 bytes; the input comes with none."""
    torch.ops.inductor.resize_storage_bytes_(x, 32)
    with torch.no_grad():
        x.copy_(torch.ones(8))
    return x + 1


def sine_then_empty(x: Tensor) -> Tensor:
    out = x.sin()
    torch.ops.inductor.resize_storage_bytes_(x, 0)
    return out


def grow_fill_sine_empty(x: Tensor) -> Tensor:
    torch.ops.inductor.resize_storage_bytes_(x, 32)
    with torch.no_grad():
        x.copy_(torch.ones(8))
    out = x.sin()
    torch.ops.inductor.resize_storage_bytes_(x, 0)
    return out


class Stand(torch.autograd.Function):
    """The second argument takes over the memory of the first, and the gradient with it."""

    @staticmethod
    def forward(_ctx: Any, gathered: Tensor, stand_in: Tensor) -> Tensor:
        return stand_in.set_(gathered)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


def gather_use_empty(stand_in: Tensor, shard: Tensor) -> Tensor:
    """A sharded parameter: gathered, used through a stand-in, and its memory given back."""
    with torch.no_grad():
        gathered = torch.cat([shard, shard])
    Stand.apply(gathered, stand_in)
    out = stand_in.sin()
    torch.ops.inductor.resize_storage_bytes_(stand_in, 0)
    return out


# -- outputs are views of inputs ---------------------------------------------------------------


def flat(x: Tensor) -> Tensor:
    return x.view(-1)


def scale_two_view_two(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    x.mul_(2)
    z.mul_(3)
    return y.view(2, 2), z.view(2, 2)


def scale_one_transpose_one_view_all(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y.mul_(3)
    z.t_()
    return x.view(2, 2), y.view(2, 2), z.view(2, 2)


def increment_and_flat(x: Tensor) -> Tensor:
    x.add_(1)
    return x.view(-1)


def transpose_increment_diagonal(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y.transpose_(1, 0)
    z.add_(1)
    return w + 1, y.diagonal(), x + z


# -- outputs are views of intermediates --------------------------------------------------------


def triple_flat(x: Tensor) -> Tensor:
    tripled = torch.mul(x, 3)
    return tripled.view(-1)


def triple_flat_beside(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    tripled = torch.mul(x, 3)
    return tripled.view(-1), y.add(1)


def triple_flat_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    tripled = torch.mul(x, 3)
    return tripled.view(-1), tripled.view(-1)


def triple_view_then_base(x: Tensor) -> tuple[Tensor, Tensor]:
    tripled = torch.mul(x, 3)
    return tripled.view(-1), tripled


def triple_base_then_view(x: Tensor) -> tuple[Tensor, Tensor]:
    tripled = torch.mul(x, 3)
    return tripled, tripled.view(-1)


def triple_view_base_detached_row(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    tripled = torch.mul(x, 3)
    return tripled.view(-1), tripled, tripled[0].detach()


def triple_transposed_detached(x: Tensor) -> tuple[Tensor, Tensor]:
    tripled = torch.mul(x, 3)
    tripled.t_()
    tripled.detach_()
    return tripled, x + 1


def views_of_two(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    first = torch.mul(x, 3)
    second = torch.mul(x, 4)
    return first.view(-1), second.transpose(1, 0), first.transpose(1, 0)


def every_kind_of_view(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Changes metadata of the input; returns views of an intermediate and one of the input."""
    x.transpose_(1, 0)
    doubled = x.mul(2)
    return doubled.squeeze(), doubled.transpose(1, 0), x.unsqueeze(0)
