"""Probabilities, flows and differential equations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .common import Call, assert_near, same_training


def test_torchdiffeq() -> None:
    """The compiled network is called by the solver; gradients go through its steps."""
    from torchdiffeq import odeint

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))

        def forward(self, time: Tensor, state: Tensor) -> Tensor:
            return self.layers(state) * torch.cos(time)

    def loss_of(call: Call) -> Tensor:
        start, times = torch.randn(3, 2), torch.linspace(0.0, 1.0, 4)
        return odeint(call, start, times, method="rk4").pow(2).mean()

    same_training(Field, loss_of)


def test_torchdiffeq_whole() -> None:
    """The solver itself is compiled, fixed steps and all."""
    from torchdiffeq import odeint

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))

        def forward(self, start: Tensor, times: Tensor) -> Tensor:
            return odeint(lambda t, x: self.layers(x), start, times, method="euler")[-1]

    def loss_of(call: Call) -> Tensor:
        return call(torch.randn(3, 2), torch.linspace(0.0, 1.0, 4)).pow(2).mean()

    same_training(Flow, loss_of, tolerance=1e-5)


def test_torchsde() -> None:
    import torchsde

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drift, self.spread = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, state: Tensor) -> Tensor:
            return torch.cat([self.drift(state).tanh(), self.spread(state).sigmoid()], -1)

    class Solved:
        """An equation whose two terms come from the compiled network."""

        noise_type, sde_type = "diagonal", "ito"

        def __init__(self, call: Call) -> None:
            self.call = call

        def f(self, time: Any, state: Tensor) -> Tensor:
            return self.call(state)[:, :2]

        def g(self, time: Any, state: Tensor) -> Tensor:
            return self.call(state)[:, 2:]

    def loss_of(call: Call) -> Tensor:
        noise = torchsde.BrownianInterval(t0=0.0, t1=1.0, size=(3, 2), entropy=3)
        times = torch.tensor([0.0, 0.5, 1.0])
        return (
            torchsde.sdeint(Solved(call), torch.randn(3, 2), times, bm=noise, dt=0.25, method="euler")
            .pow(2)
            .mean()
        )

    same_training(Field, loss_of)


def test_gpytorch() -> None:
    import gpytorch

    xs = torch.linspace(0, 1, 12)
    ys = torch.sin(6 * xs)

    class Process(gpytorch.models.ExactGP):
        def __init__(self) -> None:
            super().__init__(xs, ys, gpytorch.likelihoods.GaussianLikelihood())
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    class Likelihood(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.process = Process().train()
            self.marginal = gpytorch.mlls.ExactMarginalLogLikelihood(self.process.likelihood, self.process)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return -self.marginal(self.process(x), y)

    same_training(Likelihood, lambda call: call(xs, ys), tolerance=1e-4)


def test_botorch() -> None:
    """A step towards the best point of an acquisition function."""
    from botorch.acquisition import ExpectedImprovement
    from botorch.models import SingleTaskGP

    torch.manual_seed(0)
    points = torch.rand(8, 2, dtype=torch.float64)
    model = SingleTaskGP(points, points.pow(2).sum(-1, keepdim=True))
    model.eval()
    gain = ExpectedImprovement(model, best_f=0.5)

    class Candidate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.where = nn.Parameter(torch.full((1, 1, 2), 0.3, dtype=torch.float64))

        def forward(self) -> Tensor:
            return -gain(self.where).sum()

    same_training(Candidate, lambda call: call(), tolerance=1e-6)


def test_pyro() -> None:
    """Variational inference; the network inside of the guide is compiled."""
    import pyro
    from pyro import distributions as dist
    from pyro.infer import Trace_ELBO

    def loss_of(call: Call) -> Tensor:
        pyro.clear_param_store()
        data = torch.randn(6, 3)

        def model(x: Tensor) -> None:
            with pyro.plate("data", len(x)):
                z = pyro.sample("z", dist.Normal(torch.zeros(len(x), 2), 1.0).to_event(1))
                pyro.sample("x", dist.Normal(z.sum(-1, keepdim=True).expand(-1, 3), 1.0).to_event(1), obs=x)

        def guide(x: Tensor) -> None:
            with pyro.plate("data", len(x)):
                found = call(x)
                pyro.sample("z", dist.Normal(found[:, :2], found[:, 2:].exp()).to_event(1))

        return Trace_ELBO().differentiable_loss(model, guide, data)

    same_training(lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)), loss_of)


def test_nflows() -> None:
    from nflows.distributions.normal import StandardNormal
    from nflows.flows.base import Flow
    from nflows.transforms.autoregressive import MaskedAffineAutoregressiveTransform
    from nflows.transforms.base import CompositeTransform
    from nflows.transforms.permutations import ReversePermutation

    class Density(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            parts = []
            for _ in range(2):
                parts += [
                    ReversePermutation(features=3),
                    MaskedAffineAutoregressiveTransform(features=3, hidden_features=8),
                ]
            self.flow = Flow(CompositeTransform(parts), StandardNormal([3]))

        def forward(self, x: Tensor) -> Tensor:
            return -self.flow.log_prob(x).mean()

    same_training(Density, lambda call: call(torch.randn(5, 3)), tolerance=1e-5)


def test_distances_are_told() -> None:
    """The comparison itself: a difference is found, a missing gradient too."""
    for found, expected in [(torch.ones(2), torch.full((2,), 1.1)), (None, torch.ones(2))]:
        try:
            assert_near(found, expected, 1e-3)
        except AssertionError:
            continue
        raise AssertionError("not found")
