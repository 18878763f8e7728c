"""Model-agnostic meta-learning of sine waves, compiled and in eager.

Each task adapts the shared weights with a few gradient steps; the meta-loss is taken after the
adaptation and differentiated through it, so the inner gradients need `create_graph=True`. The loss
of a task is compiled; with `inside`, the whole adaptation is, inner gradients included.

    python examples/maml.py
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import aheadgrad

TASKS, POINTS, INNER_STEPS, INNER_RATE = 3, 10, 2, 0.05
Weights = tuple[Tensor, ...]
TaskLoss = Callable[[Weights, Tensor, Tensor], Tensor]


def make_weights(width: int = 24) -> Weights:
    shapes = [(width, 1), (width,), (width, width), (width,), (1, width), (1,)]
    return tuple((0.4 * torch.randn(shape, dtype=torch.float64)).requires_grad_() for shape in shapes)


def task_loss(weights: Weights, x: Tensor, y: Tensor) -> Tensor:
    w1, b1, w2, b2, w3, b3 = weights
    h = torch.tanh(F.linear(x, w1, b1))
    h = torch.tanh(F.linear(h, w2, b2))
    return F.mse_loss(F.linear(h, w3, b3), y)


def adapted_loss(loss: TaskLoss, weights: Weights, x: Tensor, y: Tensor) -> Tensor:
    """The loss on the second half of a task's points after a few gradient steps on the first."""
    for _ in range(INNER_STEPS):
        inner = loss(weights, x[:POINTS], y[:POINTS])
        gradients = torch.autograd.grad(inner, weights, create_graph=True)
        weights = tuple(w - INNER_RATE * g for w, g in zip(weights, gradients, strict=True))
    return loss(weights, x[POINTS:], y[POINTS:])


def waves() -> list[tuple[Tensor, Tensor]]:
    """Points of some sine waves, of random height and shift."""
    tasks = []
    for _ in range(TASKS):
        height, shift = 0.5 + 2 * torch.rand(1).double(), 3 * torch.rand(1).double()
        x = 10 * torch.rand(2 * POINTS, 1).double() - 5
        tasks.append((x, height * torch.sin(x + shift)))
    return tasks


def run(compiled: bool, steps: int, inside: bool = False) -> list[float]:
    """The meta-losses of `steps` training steps."""
    torch.manual_seed(0)
    weights = make_weights()
    loss, adapt = task_loss, adapted_loss
    if compiled and inside:
        adapt = aheadgrad.compile(adapted_loss)
    elif compiled:
        loss = aheadgrad.compile(task_loss)
    optimizer = torch.optim.Adam(weights, lr=3e-3)
    losses = []
    for _ in range(steps):
        meta_loss = sum(adapt(loss, weights, x, y) for x, y in waves()) / TASKS
        assert isinstance(meta_loss, Tensor)
        optimizer.zero_grad()
        meta_loss.backward()
        optimizer.step()
        losses.append(meta_loss.item())
    return losses


def main(steps: int = 100) -> None:
    print(f"{'step':>6}  {'eager':>14}  {'compiled':>14}  {'grad inside':>14}")
    columns = run(False, steps), run(True, steps), run(True, steps, inside=True)
    for step, losses in enumerate(zip(*columns, strict=True)):
        if step % 10 == 0 or step == steps - 1:
            print(f"{step:>6}  " + "  ".join(f"{loss:>14.10f}" for loss in losses))


if __name__ == "__main__":
    main()
