"""Steps that differentiate gradients, against eager: time, and memory at the worst moment.

Compiled is what a user compiles: the energy, the critic, the network, the loss; gradients are taken outside.
"""

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aheadgrad
from aheadgrad.testing.peak import peak_of

from .measure import EAGER, OURS, Bar, Row, in_turns

ROUNDS = 41
SECONDS = 0.02  # of a turn, about
LIMIT = 1.0
LIMIT_MEAN = 0.9
LIMIT_ONE = 1.1

Compile = Callable[[Callable[..., Tensor]], Callable[..., Tensor]]
Step = Callable[[], object]

ATOMS, BASIS, WIDTH = 8, 16, 32


class PairPotential(nn.Module):
    """A sum over pairs of atoms of a learned function of their distance."""

    pairs: Tensor
    centers: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pairs", torch.triu_indices(ATOMS, ATOMS, offset=1))
        self.register_buffer("centers", torch.linspace(0.5, 4.0, BASIS))
        sizes = [BASIS, *[WIDTH] * 4]
        layers = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.SiLU())]
        self.net = nn.Sequential(*layers, nn.Linear(WIDTH, 1))

    def forward(self, positions: Tensor) -> Tensor:
        distance = (positions[:, self.pairs[0]] - positions[:, self.pairs[1]]).norm(dim=-1, keepdim=True)
        features = torch.exp(-4 * (distance - self.centers) ** 2)
        cutoff = 0.5 * (1 + torch.cos(torch.pi * distance.clamp(max=5.0) / 5.0))
        return (self.net(features) * cutoff).sum(dim=(-1, -2))


def force_matching(molecules: int) -> Callable[[Compile], Step]:
    def make(compiled: Compile) -> Step:
        model = PairPotential()
        energy = compiled(model)
        positions = (1.2 * torch.randn(molecules, ATOMS, 3)).requires_grad_()
        energies, forces = torch.randn(molecules), torch.randn(molecules, ATOMS, 3)

        def step() -> None:
            found = energy(positions)
            (gradient,) = torch.autograd.grad(found.sum(), positions, create_graph=True)
            loss = 0.1 * F.mse_loss(found, energies) + F.mse_loss(-gradient, forces)
            model.zero_grad()
            loss.backward(inputs=list(model.parameters()))

        return step

    return make


def gradient_penalty(compiled: Compile) -> Step:
    width = 64
    critic = nn.Sequential(
        nn.Linear(2, width),
        nn.LayerNorm(width),
        nn.SiLU(),
        nn.Linear(width, width),
        nn.Softplus(),
        nn.Linear(width, 1),
    )
    judge = compiled(critic)
    between = torch.randn(128, 2, requires_grad=True)

    def step() -> None:
        (slope,) = torch.autograd.grad(judge(between).sum(), between, create_graph=True)
        critic.zero_grad()
        (slope.norm(dim=-1) - 1).pow(2).mean().backward()

    return step


class Network(nn.Module):
    """u(x, t)"""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, width), nn.Linear(width, width)
        self.last = nn.Linear(width, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = torch.tanh(self.first(torch.stack([x, t], dim=-1)))
        return self.last(torch.tanh(self.second(h))).squeeze(-1)


def physics(order: int) -> Callable[[Compile], Step]:
    """The residual has derivatives by x of up to this order; training differentiates once more."""

    def make(compiled: Compile) -> Step:
        model = Network()
        network = compiled(model)
        x, t = (torch.rand(256, requires_grad=True) for _ in range(2))

        def step() -> None:
            u = network(x, t)
            by_x, by_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
            high = by_x
            for _ in range(order - 1):
                (high,) = torch.autograd.grad(high.sum(), x, create_graph=True)
            model.zero_grad()
            (by_t + u * by_x - 0.05 * high).pow(2).mean().backward(inputs=list(model.parameters()))

        return step

    return make


def hessian_vector_product(compiled: Compile) -> Step:
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    predict = compiled(model)
    x, y = torch.randn(64, 32), torch.randn(64, 8)
    weights = list(model.parameters())
    vector = [torch.randn_like(w) for w in weights]

    def step() -> object:
        gradients = torch.autograd.grad(F.mse_loss(predict(x), y), weights, create_graph=True)
        return torch.autograd.grad(gradients, weights, vector)

    return step


def task_loss(weights: tuple[Tensor, ...], x: Tensor, y: Tensor) -> Tensor:
    w1, b1, w2, b2, w3, b3 = weights
    h = torch.tanh(F.linear(x, w1, b1))
    h = torch.tanh(F.linear(h, w2, b2))
    return F.mse_loss(F.linear(h, w3, b3), y)


def maml(compiled: Compile) -> Step:
    width = 40
    loss = compiled(task_loss)
    shapes = [(width, 1), (width,), (width, width), (width,), (1, width), (1,)]
    leaves = tuple((0.4 * torch.randn(shape)).requires_grad_() for shape in shapes)
    x, y, x_after, y_after = (torch.randn(10, 1) for _ in range(4))

    def step() -> object:
        weights = leaves
        for _ in range(2):
            gradients = torch.autograd.grad(loss(weights, x, y), weights, create_graph=True)
            weights = tuple(w - 0.05 * g for w, g in zip(weights, gradients, strict=True))
        return torch.autograd.grad(loss(weights, x_after, y_after), leaves)

    return step


def one_of_many(compiled: Compile) -> Step:
    def fn(*inputs: Tensor) -> Tensor:
        total = inputs[0]
        for t in inputs[1:]:
            total = torch.tanh(total * t)
        return total

    run = compiled(fn)
    inputs = [torch.randn(8, 8, requires_grad=True) for _ in range(50)]
    tangent = torch.randn(8, 8)
    return lambda: torch.autograd.grad(run(*inputs), inputs[25], tangent)


CASES = {
    "force matching, 2 molecules": force_matching(2),
    "force matching, 64 molecules": force_matching(64),
    "gradient penalty": gradient_penalty,
    "physics-informed, second derivatives": physics(2),
    "physics-informed, third derivatives": physics(3),
    "Hessian-vector product": hessian_vector_product,
    "MAML step": maml,
}


def prepared(make: Callable[[Compile], Step]) -> dict[str, Step]:
    """The same step, eager and compiled; warm."""
    steps: dict[str, Step] = {}
    for name, compiled in ((EAGER, lambda fn: fn), (OURS, _compiled)):
        torch.manual_seed(0)
        steps[name] = make(compiled)
        for _ in range(5):
            steps[name]()
    return steps


def _compiled(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    compiled: Callable[..., Tensor] = aheadgrad.compile(fn, fallback="error", frontend="trace")
    return compiled


def turns(steps: dict[str, Step]) -> dict[str, Callable[[], float]]:
    start = time.perf_counter()
    steps[EAGER]()
    calls = max(2, int(SECONDS / (time.perf_counter() - start)))

    def turn(step: Step) -> Callable[[], float]:
        def measured() -> float:
            start = time.perf_counter()
            for _ in range(calls):
                step()
            return (time.perf_counter() - start) / calls * 1e6

        return measured

    return {name: turn(step) for name, step in steps.items()}


def run() -> list[Row]:
    times, peaks = [], []
    for name, make in CASES.items():
        steps = prepared(make)
        peak = {who: float(peak_of(step)) / 1024 for who, step in steps.items()}
        times.append(Row(name, "µs", in_turns(turns(steps), ROUNDS), (Bar(EAGER, LIMIT),)))
        peaks.append(Row(f"{name}, peak", "KiB", peak, (Bar(EAGER, LIMIT),)))
    average = {EAGER: 1.0, OURS: mean(row.ratio(EAGER) for row in times)}
    times.append(Row("average of these", "of eager", average, (Bar(EAGER, LIMIT_MEAN),)))
    few = in_turns(turns(prepared(one_of_many)), ROUNDS)
    return [*times, Row("gradient of one of 50 inputs", "µs", few, (Bar(EAGER, LIMIT_ONE),)), *peaks]
