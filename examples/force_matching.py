"""Fit a small molecular potential to energies and forces, compiled and in eager.

Forces are the negative gradient of the energy, so a loss on forces needs the gradient of a gradient:
`autograd.grad(..., create_graph=True)` through the compiled energy, then `backward()`. With `inside`,
energy and forces are one compiled function and the gradient is taken within it.

    python examples/force_matching.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aheadgrad

ATOMS, MOLECULES = 5, 8


class PairPotential(nn.Module):
    """A sum over pairs of atoms of a learned function of their distance."""

    pairs: Tensor
    centers: Tensor

    def __init__(self, basis: int = 12, width: int = 16) -> None:
        super().__init__()
        self.register_buffer("pairs", torch.triu_indices(ATOMS, ATOMS, offset=1))
        self.register_buffer("centers", torch.linspace(0.5, 4.0, basis))
        self.net = nn.Sequential(
            nn.Linear(basis, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
        )

    def forward(self, positions: Tensor) -> Tensor:
        """(molecules, atoms, 3) -> (molecules,)"""
        distance = (positions[:, self.pairs[0]] - positions[:, self.pairs[1]]).norm(dim=-1, keepdim=True)
        features = torch.exp(-4 * (distance - self.centers) ** 2)
        cutoff = 0.5 * (1 + torch.cos(torch.pi * distance.clamp(max=5.0) / 5.0))
        return (self.net(features) * cutoff).sum(dim=(-1, -2))


def morse(positions: Tensor) -> Tensor:
    """The potential to be learned."""
    i, j = torch.triu_indices(ATOMS, ATOMS, offset=1)
    distance = (positions[:, i] - positions[:, j]).norm(dim=-1)
    return ((1 - torch.exp(-(distance - 1.5))) ** 2 - 1).sum(-1)


def with_forces(energy: nn.Module, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Energies and forces of a batch; the forces can be differentiated again."""
    energies = energy(positions)
    (gradient,) = torch.autograd.grad(energies.sum(), positions, create_graph=True)
    return energies, -gradient


def run(compiled: bool, steps: int, inside: bool = False) -> list[float]:
    """The losses of `steps` training steps."""
    torch.manual_seed(0)
    model = PairPotential().double()
    energy, predict = model, with_forces
    if compiled and inside:
        predict = aheadgrad.compile(with_forces)
    elif compiled:
        energy = aheadgrad.compile(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        positions = (1.2 * torch.randn(MOLECULES, ATOMS, 3, dtype=torch.float64)).requires_grad_()
        true_energies = morse(positions)
        (true_gradient,) = torch.autograd.grad(true_energies.sum(), positions)
        energies, forces = predict(energy, positions)
        loss = 0.1 * F.mse_loss(energies, true_energies.detach()) + F.mse_loss(forces, -true_gradient)
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
