"""The door to tensor subclasses: forms, parts, makers, silent ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from aheadgrad.emit.makers import maker
from aheadgrad.torchlayer.subclasses import (
    Veil,
    build,
    can_be_traced,
    form_of,
    inside,
    is_foreign,
    is_plain,
    parts_of,
    same_meta,
    silent_copy,
)


def pair(*shape: int) -> Any:
    return TwoTensor(torch.randn(*shape), torch.randn(*shape))


def test_plain_and_foreign() -> None:
    x = torch.ones(2)
    assert is_plain(x) and is_plain(torch.nn.Parameter(x)) and not is_foreign(x)
    assert is_foreign(pair(2)) and not is_plain(pair(2)) and not is_foreign(Veil(x))
    assert can_be_traced(pair(2)) and can_be_traced(TwoTensor(pair(2), pair(2)))
    assert not can_be_traced(TwoTensor(x.to_sparse(), x.to_sparse()))


def test_taken_apart_and_put_together() -> None:
    whole = TwoTensor(pair(2, 3), pair(2, 3))
    again: Any = build(form_of(whole), iter(parts_of(whole)))
    assert again.a.b is whole.a.b and again.shape == whole.shape and again.stride() == whole.stride()
    assert form_of(again) == form_of(whole) and hash(form_of(again)) == hash(form_of(whole))
    assert form_of(whole).paths("x") == ["x.a.a", "x.a.b", "x.b.a", "x.b.b"]
    assert [name for name, _ in inside(whole, "x")] == ["x.a", "x.a.a", "x.a.b", "x.b", "x.b.a", "x.b.b"]


def test_forms_differ() -> None:
    x = pair(2, 3)
    assert form_of(x) != form_of(pair(3, 2)) and form_of(x) != form_of(x.double())
    assert form_of(x.t()) != form_of(pair(3, 2)) and form_of(x) != form_of(TwoTensor(x, x))


def test_metadata_that_cannot_be_compared_differs() -> None:
    assert same_meta({"a": 1}, {"a": 1}) and not same_meta(1, True) and not same_meta(None, 1)
    assert not same_meta(torch.ones(2), torch.ones(2))


def test_a_maker_does_what_the_constructor_does() -> None:
    x = pair(2, 3)
    make = maker(form_of(x))
    assert make is not None
    made: Any = make(x.a, x.b)
    assert type(made) is TwoTensor and made.a is x.a and made.shape == x.shape and made.stride() == x.stride()
    assert torch.equal((made * 2).b, (x * 2).b)


def test_a_maker_keeps_unusual_strides_and_offsets() -> None:
    base = torch.randn(5, 6)
    for part in (base, base[1:], base[:, ::2], base.t(), base[:3, :0], base[0, 0]):
        x: Any = TwoTensor(part, part)
        make = maker(form_of(x))
        made: Any = x if make is None else make(part, part)
        assert made.shape == x.shape and made.stride() == x.stride()
        assert make is None or made.untyped_storage().nbytes() >= x.numel() * 4


class Elaborate(Tensor):
    """An instance has more to it than parts and constants."""

    @staticmethod
    def __new__(cls, part: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, part.shape)

    def __init__(self, part: Tensor) -> None:
        self.part, self.cache = part, {"shape": part.shape}

    def __tensor_flatten__(self) -> Any:
        return ["part"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Any:
        return Elaborate(inner["part"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def test_no_maker_where_there_is_more_to_it() -> None:
    assert maker(form_of(Elaborate(torch.ones(3)))) is None
    assert maker(form_of(TwoTensor(pair(2), pair(2)))) is None
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert maker(form_of(jagged)) is None


def test_silent_copy_tells_autograd_alone() -> None:
    leaf = pair(3).requires_grad_()
    x, y = pair(3) * 1, leaf * 2
    before = x.a.clone()
    silent_copy(x, y)
    assert torch.equal(x.a, before) and x.requires_grad and x._version == 1
    (grad,) = torch.autograd.grad(x.sum(), leaf)
    assert torch.equal(grad.a, torch.full((3,), 2.0))


def test_a_veil_keeps_its_sizes() -> None:
    x = torch.randn(2, 3).t()
    veil = Veil(x)
    assert (veil.shape, veil.stride(), veil.dtype, veil.requires_grad) == (
        x.shape,
        x.stride(),
        x.dtype,
        False,
    )
