"""Train a Wasserstein GAN with gradient penalty on a ring of points, compiled and in eager.

The critic's loss contains the norm of its gradient with respect to its input, and training it
differentiates that norm with respect to its weights. The critic is compiled; the penalty is
taken outside of it, or, with `inside`, compiled as one function with the critic.

    python examples/gradient_penalty.py
"""

import torch
from torch import Tensor, nn

import aheadgrad

BATCH = 32
CRITIC_STEPS = 2


def make_critic(width: int = 32) -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, width),
        nn.LayerNorm(width),
        nn.SiLU(),
        nn.Linear(width, width),
        nn.Softplus(),
        nn.Linear(width, 1),
    )


def make_generator(width: int = 32) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.LeakyReLU(0.2), nn.Linear(width, 2))


def ring() -> Tensor:
    angle = 2 * torch.pi * torch.rand(BATCH, dtype=torch.float64)
    radius = 1 + 0.05 * torch.randn(BATCH, dtype=torch.float64)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1)


def penalty(critic: nn.Module, between: Tensor) -> Tensor:
    """How far the critic's slope is from one at the points `between` real and made ones."""
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (slope.norm(dim=-1) - 1).pow(2).mean()


def run(compiled: bool, steps: int, inside: bool = False) -> list[float]:
    """The critic's losses of `steps` training steps."""
    torch.manual_seed(0)
    model, generator = make_critic().double(), make_generator().double()
    critic, slope_penalty = model, penalty
    if compiled:
        critic = aheadgrad.compile(model)
    if compiled and inside:
        slope_penalty = aheadgrad.compile(penalty)
    critic_optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.9))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    losses = []
    for step in range(steps):
        real = ring()
        made = generator(torch.randn(BATCH, 4, dtype=torch.float64))
        mix = torch.rand(BATCH, 1, dtype=torch.float64)
        between = (mix * real + (1 - mix) * made.detach()).requires_grad_()
        distance = critic(made.detach()).mean() - critic(real).mean()
        loss = distance + 10 * slope_penalty(critic, between)
        critic_optimizer.zero_grad()
        loss.backward()
        critic_optimizer.step()
        if step % CRITIC_STEPS == 0:
            generator_optimizer.zero_grad()
            (-critic(made).mean()).backward()
            generator_optimizer.step()
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
