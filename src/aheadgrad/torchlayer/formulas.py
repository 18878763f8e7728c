"""Derivatives that torch computes in another way for anything but plain tensors.

A few formulas look at values. Where torch sees a tensor subclass, or a mode, it takes a way that does not,
and that is not always as good: a largest value whose gradient is infinite makes NaN of all others, the second
derivative of a determinant is one of singular vectors, which have none where singular values are equal. A
recording is such a place. Here these nodes get the gradients of a plain tensor, without a look at values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aheadgrad.torchlayer.autograd import in_place_of
from aheadgrad.torchlayer.subclasses import is_foreign

Formula = Callable[[Any, Tensor, Tensor], Tensor | None]
"""From a node, its tangent and torch's gradient to the right one; None where torch's is."""


@contextmanager
def of_plain_tensors(nodes: Iterable[Any]) -> Iterator[None]:
    """Inside, backwards of these nodes compute what they would for plain tensors."""
    found = [(node, formula) for node in nodes if (formula := _FORMULAS.get(type(node).__name__))]
    hooks = [node.register_hook(partial(_instead, node, formula)) for node, formula in found]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _instead(node: Any, formula: Formula, grads: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    if grads[0] is None or is_foreign(grads[0]):
        return None
    with in_place_of(node):
        grad = formula(node, tangents[0], grads[0])
    return None if grad is None else (grad, *grads[1:])


def _selected(node: Any, grad: Tensor, _: Tensor) -> Tensor | None:
    """Of the largest, smallest or median of all: shared evenly by those that are it."""
    given, value = node._saved_self, node._saved_result
    if given.is_cuda:
        return None
    mask = (given == value) | (given.isnan() & value.isnan())
    return torch.zeros(given.size(), dtype=given.dtype, device=given.device).masked_fill(
        mask, grad / mask.sum()
    )


def _product(node: Any, _: Tensor, found: Tensor) -> Tensor | None:
    """Of one number: its gradient is a quotient that is 1, and has a history."""
    given = node._saved_self
    if not torch.is_grad_enabled() or given.dim() == 0:
        return None
    dim = getattr(node, "_saved_dim", None)
    if dim is not None and dim > given.dim():  # torch shows negative numbers as unsigned ones
        dim -= 1 << 64
    if (given.numel() if dim is None else given.size(dim)) != 1:
        return None
    divisor = torch.where(given == 0, torch.ones_like(given), given)
    return found * (divisor / divisor).conj()


def _determinant(node: Any, grad: Tensor, _: Tensor) -> Tensor | None:
    """By the inverse, unless the matrix has none; each way is given matrices that it has derivatives for."""
    a, det = node._saved_A, node._saved_result
    size, real = a.size(-1), a.real.dtype if a.is_complex() else a.dtype
    if not torch.is_grad_enabled() or size == 1 or a.numel() == 0:
        return None
    eye = torch.eye(size, dtype=a.dtype, device=a.device)
    singular = (det.abs() < 100 * torch.finfo(real).eps)[..., None, None]
    other = eye * (torch.arange(size, device=a.device) + 1)  # whose singular values are all different
    u, s, v = torch.linalg.svd(torch.where(singular, a, other))
    sign = torch.linalg.det(u) * torch.linalg.det(v)
    if not a.is_complex():
        sign = sign.detach()  # it is 1 or -1
    others = _products_of_others(s, (sign.conj() * grad)[..., None])
    by_others = (u * others[..., None, :]) @ v
    scaled = (grad * det.conj())[..., None].expand(a.shape[:-1])
    by_inverse = torch.linalg.solve(torch.where(singular, eye, a).mH, torch.diag_embed(scaled).mT)
    return torch.where(~singular, by_inverse, by_others)


def _products_of_others(s: Tensor, by: Tensor) -> Tensor:
    """For each number along the last dimension the product of the others, times a factor."""
    one = torch.ones_like(s[..., :1])
    before = torch.cat([one, s[..., :-1]], -1).cumprod(-1)
    after = torch.cat([one, s[..., 1:].flip(-1)], -1).cumprod(-1).flip(-1)
    return by * (before * after)


_FORMULAS: dict[str, Formula] = {
    "MaxBackward1": _selected,
    "MinBackward1": _selected,
    "MedianBackward0": _selected,
    "NanmedianBackward0": _selected,
    "LinalgDetBackward0": _determinant,
    "ProdBackward0": _product,
    "ProdBackward1": _product,
}
