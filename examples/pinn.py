"""A physics-informed network for Burgers' equation, compiled and in eager.

    u_t + u u_x = nu u_xx,   u(x, 0) = -sin(pi x),   u(-1, t) = u(1, t) = 0

The residual holds u_xx, a second derivative of the network, and training differentiates it once more:
third derivatives through a compiled network. With `inside`, the whole residual is compiled instead.

    python examples/pinn.py
"""

import torch
from torch import Tensor, nn

import aheadgrad

NU = 0.05
POINTS = 48


class Network(nn.Module):
    def __init__(self, width: int = 20) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, width), nn.Linear(width, width)
        self.last = nn.Linear(width, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = torch.tanh(self.first(torch.stack([x, t], dim=-1)))
        return self.last(torch.tanh(self.second(h))).squeeze(-1)


def residual(u_of: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    """What is left of the equation at the points (x, t); zero for a solution."""
    u = u_of(x, t)
    u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
    (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
    return u_t + u * u_x - NU * u_xx


def run(compiled: bool, steps: int, inside: bool = False) -> list[float]:
    """The losses of `steps` training steps."""
    torch.manual_seed(0)
    model = Network().double()
    network, equation = model, residual
    if compiled:
        network = aheadgrad.compile(model)
    if compiled and inside:
        equation = aheadgrad.compile(residual)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(steps):
        x = (2 * torch.rand(POINTS, dtype=torch.float64) - 1).requires_grad_()
        t = torch.rand(POINTS, dtype=torch.float64).requires_grad_()
        start = network(x, torch.zeros_like(t)) + torch.sin(torch.pi * x)
        walls = network(x.sign(), t)
        loss = equation(network, x, t).pow(2).mean() + start.pow(2).mean() + walls.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(steps: int = 100) -> None:
    print(f"{'step':>6}  {'eager':>14}  {'compiled':>14}  {'grad inside':>14}")
    columns = run(False, steps), run(True, steps), run(True, steps, inside=True)
    for step, losses in enumerate(zip(*columns, strict=True)):
        if step % 10 == 0 or step == steps - 1:
            print(f"{step:>6}  " + "  ".join(f"{loss:>14.10f}" for loss in losses))


if __name__ == "__main__":
    main()
