"""Functions that Dynamo writes into its graphs for what Python does in other ways, said as Python says it.

`x.data` becomes a function that no function mode sees. A custom `autograd.Function` becomes an operator on
two graphs, which keeps what the backward needs in a closure: autograd does not check it there, and a
recording does not know whose it is. Here a context keeps it, as the user's forward did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.autograd_function import autograd_function_apply

from aheadgrad.torchlayer.fxmeta import Interpreter
from aheadgrad.torchlayer.written_backward import not_again, written_backward


def say_plainly(gm: fx.GraphModule) -> None:
    """Puts them into a graph of Dynamo's and the graphs inside it."""
    for inner in gm.modules():
        if isinstance(inner, fx.GraphModule):
            found = [node for node in inner.graph.nodes if node.target in _PLAIN]
            for node in found:
                node.target = _PLAIN[node.target]
            if found:
                inner.recompile()


def _data(t: Tensor) -> Tensor:
    return t.data


def _apply(
    fwd: fx.GraphModule,
    bwd: fx.GraphModule,
    *inputs: Any,
    non_differentiable_idx: Sequence[int] = (),
    saved_for_backward_idx: Sequence[int] | None = None,
    dirty_idx: Sequence[int] = (),
    **others: Any,
) -> Any:
    if saved_for_backward_idx is None:  # an older torch, which does not tell
        others["non_differentiable_idx"] = non_differentiable_idx
        return autograd_function_apply(fwd, bwd, *inputs, **others)
    saved, written = tuple(saved_for_backward_idx), written_backward(bwd)

    class Custom(torch.autograd.Function):
        kept: Sequence[Any]  # from `forward` to `setup_context`

        @staticmethod
        def forward(*args: Any) -> Any:
            out, Custom.kept = Interpreter(fwd).run(*args)
            return out

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            outputs = output if isinstance(output, tuple | list) else (output,)
            ctx.set_materialize_grads(written is None or written.materializes)
            ctx.mark_dirty(*(outputs[k] for k in dirty_idx))
            ctx.mark_non_differentiable(*(outputs[k] for k in non_differentiable_idx))
            ctx.save_for_backward(*(Custom.kept[k] for k in saved))
            ctx.kept = [None if k in saved else t for k, t in enumerate(Custom.kept)]
            del Custom.kept

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            kept = list(ctx.kept)
            for k, t in zip(saved, ctx.saved_tensors, strict=True):
                kept[k] = t
            again = torch.is_grad_enabled()
            if written is not None and (again or any(g is None for g in grads)):
                return written.run(grads, kept, ctx.needs_input_grad)
            found = Interpreter(bwd).run(*grads, *kept)
            return not_again(found, (*grads, *kept)) if again else found

    return Custom.apply(*inputs)


_PLAIN: dict[Any, Callable[..., Any]] = {torch._C._autograd._get_data_attr: _data}  # type: ignore[attr-defined]
_PLAIN[autograd_function_apply] = _apply
