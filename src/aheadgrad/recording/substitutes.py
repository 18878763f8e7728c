"""Functions that get a twin, or help: kernels that write to arguments without saying so, and dropout.

`torch.batch_norm` updates its running statistics although its schema does not mention it, and
functionalization would lose the update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from aheadgrad.recording.overlaps import check_list
from aheadgrad.recording.told_by_name import writes_a_list
from aheadgrad.recording.walks import edge_of, walk
from aheadgrad.torchlayer.autograd import set_version, version
from aheadgrad.torchlayer.dispatch import in_transform, without_mkldnn
from aheadgrad.torchlayer.formulas import of_plain_tensors
from aheadgrad.torchlayer.functional import is_wrapped
from aheadgrad.torchlayer.functions import (
    assert_async,
    batch_norm_in_eval,
    batch_norm_legit,
    verify_batch_size,
    verify_spatial_size,
)
from aheadgrad.torchlayer.subclasses import is_foreign
from aheadgrad.torchlayer.symbols import typical


def _batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    if running_mean is None or running_var is None or typical(input.numel()) == 0:
        return torch.batch_norm(
            input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled
        )
    if not training:  # the op that says in its schema that it writes nothing
        return batch_norm_in_eval(input, weight, bias, running_mean, running_var, momentum, eps)[0]
    before = version(running_mean), version(running_var)
    out: Tensor = batch_norm_legit(input, weight, bias, running_mean, running_var, True, momentum, eps)[0]
    set_version(running_mean, before[0])  # as in eager, where nobody is told of the write
    set_version(running_var, before[1])
    return out


def _native_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    *rest: Any,
    **named: Any,
) -> Any:
    plain = running_mean is None or running_var is None
    norm = torch.native_batch_norm if plain else batch_norm_legit
    return norm(input, weight, bias, running_mean, running_var, *rest, **named)


def _instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    if not use_input_stats or running_mean is None or running_var is None:
        return torch.instance_norm(
            input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled
        )
    batch, channels = input.shape[0], input.shape[1]
    mean, var = running_mean.repeat(batch), running_var.repeat(batch)
    scale = None if weight is None else weight.repeat(batch)
    shift = None if bias is None else bias.repeat(batch)
    flat = input.contiguous().view(1, batch * channels, *input.shape[2:])
    out = _batch_norm(flat, scale, shift, mean, var, True, momentum, eps, cudnn_enabled)
    with torch.no_grad():
        running_mean.copy_(mean.view(batch, channels).mean(0))
        running_var.copy_(var.view(batch, channels).mean(0))
    return out.view(input.shape)


def _functional_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if running_mean is None or running_var is None:
        return functional.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    if training:
        verify_batch_size(input.size())
    return _batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, True)


def _functional_instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not use_input_stats or running_mean is None or running_var is None:
        return functional.instance_norm(
            input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
        )
    verify_spatial_size(input.size())
    return _instance_norm(input, weight, bias, running_mean, running_var, True, momentum, eps, True)


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """The same numbers from the same seed, with a mask of one byte instead of four to save."""
    plain = not train or not 0.0 < p < 1.0 or typical(input.numel()) == 0
    if plain or input.device.type != "cpu" or input.dtype not in (torch.float32, torch.float64):
        return torch.dropout(input, p, train)
    out: Tensor = torch.native_dropout(input, p, True)[0]
    return out


def _functional_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if inplace or not 0.0 <= p <= 1.0:
        return functional.dropout(input, p, training, inplace)
    return _dropout(input, p, training)


def set_item(t: Tensor, index: Any, value: Any) -> None:
    """`t[condition] = value` with a single truth value, which eager would look at."""
    if isinstance(index, Tensor) and index.dim() == 0 and index.dtype in (torch.bool, torch.uint8):
        t.unsqueeze(0)[index.unsqueeze(0)] = value
    else:
        t[index] = value


def counted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a function. The version counters of what `_foreach_mul_` and the like write are moved by kernels,
    which do not run here; and before what is saved of the results."""
    if args and writes_a_list(func):
        check_list(args, kwargs)
        for t in args[0]:
            if is_wrapped(t) and not is_foreign(t):
                set_version(t, version(t) + 1)
    return func(*args, **kwargs)


def _unfold(t: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """Windows that do not overlap, from views that a write can be undone through (unfold is none)."""
    if t.dim() == 0 or not all(isinstance(n, int) for n in (*t.shape, size, step)) or not 0 < size <= step:
        return t.unfold(dimension, size, step)
    dim, length = dimension % t.dim(), t.size(dimension)
    count = (length - size) // step + 1
    if count < 2 or count * step > length or 1 in t.shape:  # strides of unit dimensions would differ
        return t.unfold(dimension, size, step)
    whole = t if count * step == length else t.narrow(dim, 0, count * step)
    windows = whole.unflatten(dim, (count, step))
    if size < step:
        windows = windows.narrow(dim + 1, 0, size)
    return windows.movedim(dim + 1, -1)


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """The same with checks that are recorded; eager's look at the values at once."""
    plain = not isinstance(num_classes, int | torch.SymInt) or num_classes < 1
    if plain or in_transform(tensor) or tensor.dtype is not torch.int64 or tensor.numel() == 0:
        return functional.one_hot(tensor, num_classes)
    if tensor.device.type == "cpu":  # elsewhere the kernel below refuses
        assert_async((tensor >= 0).all(), "Class values must be non-negative.")
        assert_async((tensor < num_classes).all(), "Class values must be smaller than num_classes.")
    empty = torch.zeros((*tensor.shape, num_classes), dtype=torch.int64, device=tensor.device)
    return empty.scatter(-1, tensor.unsqueeze(-1), 1)


class _Trace(torch.autograd.Function):
    """The trace, with derivatives that can be differentiated without looking at values."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        ctx.size = t.size()
        return torch.trace(t)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad,) = grads
        diagonal = torch.eye(*ctx.size, dtype=torch.bool, device=grad.device)
        return torch.where(diagonal, grad, torch.zeros((), dtype=grad.dtype, device=grad.device))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return torch.trace(tangents[0])


def _trace(input: Tensor) -> Tensor:
    if in_transform(input) or input.dim() != 2 or not input.requires_grad:
        return torch.trace(input)
    out: Tensor = _Trace.apply(input)
    return out


def _grad(outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Derivatives inside the function: those of plain tensors."""
    given = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    nodes = {n for t in given if isinstance(t, Tensor) for n in walk(edge_of(t)).nodes}
    with of_plain_tensors(nodes):
        return torch.autograd.grad(outputs, *args, **kwargs)


def _without_mkldnn(func: Callable[..., Any]) -> Callable[..., Any]:
    """The oneDNN kernel keeps its workspace out of sight of whoever records it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with without_mkldnn():
            return func(*args, **kwargs)

    return run


SUBSTITUTES: dict[Any, Callable[..., Any]] = {
    torch.autograd.grad: _grad,
    torch.lstm: _without_mkldnn(torch.lstm),
    functional.one_hot: _one_hot,
    torch.trace: _trace,
    torch.Tensor.trace: _trace,
    torch.batch_norm: _batch_norm,
    torch.Tensor.unfold: _unfold,
    torch.dropout: _dropout,
    functional.dropout: _functional_dropout,
    torch.native_batch_norm: _native_batch_norm,
    torch.instance_norm: _instance_norm,
    functional.batch_norm: _functional_batch_norm,
    functional.instance_norm: _functional_instance_norm,
}
