"""Forces of molecules with changing numbers of atoms, and training on them: few compiles, equal to eager."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import aheadgrad
from aheadgrad.backends.eager import compile_eager
from aheadgrad.frontends.dynamo import backend

SIZES = (5, 3, 8, 2, 11, 4, 6, 3, 17, 5, 9, 7, 12, 2, 30, 10, 1, *range(13, 26))


def perceptron(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.SiLU()]
    return nn.Sequential(*layers[:-1])


def batch(n: int) -> tuple[Tensor, ...]:
    """Positions, species, edges (of a number of their own) and which molecule an atom is of."""
    generator = torch.Generator().manual_seed(n)
    pos = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    kind = torch.randint(0, 4, (n,), generator=generator)
    edges = torch.randint(0, n, (2, (5 * n + 3) // 4), generator=generator)
    edges[1] = (edges[0] + 1) % n
    molecule = (torch.arange(n) >= n // 2).long()
    return pos, kind, edges, molecule


class AllPairs(nn.Module):
    """The full matrix of distances."""

    def __init__(self) -> None:
        super().__init__()
        self.species = nn.Embedding(4, 3)
        self.net = perceptron(4, 8, 1)

    def forward(self, pos: Tensor, kind: Tensor, edges: Tensor, molecule: Tensor) -> Tensor:
        d = (pos[:, None] - pos[None]).pow(2).sum(-1).add(1e-6).sqrt()
        near = torch.exp(-d) * ~torch.eye(pos.shape[0], dtype=torch.bool)
        return self.net(torch.cat([self.species(kind), near.sum(1, keepdim=True)], -1)).sum()


class EdgeList(nn.Module):
    """Messages along edges, added up at atoms."""

    def __init__(self) -> None:
        super().__init__()
        self.species = nn.Embedding(4, 6)
        self.filter = perceptron(5, 8, 6)
        self.update = nn.ModuleList([perceptron(6, 8, 6) for _ in range(2)])
        self.readout = nn.Linear(6, 1)
        self.register_buffer("centers", torch.linspace(0, 3, 5))

    def forward(self, pos: Tensor, kind: Tensor, edges: Tensor, molecule: Tensor) -> Tensor:
        i, j = edges[0], edges[1]
        d = (pos[i] - pos[j]).square().sum(-1).add(1e-6).sqrt()
        weight = self.filter(torch.exp(-((d[:, None] - self.centers) ** 2)))
        h = self.species(kind)
        for update in self.update:
            h = h + update(torch.zeros_like(h).index_add(0, i, weight * h[j]))
        return self.readout(h).sum()


class Angles(nn.Module):
    """Terms of three atoms, from directions of all pairs; dimensions of one element come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(2, 8, 1)

    def forward(self, pos: Tensor, kind: Tensor, edges: Tensor, molecule: Tensor) -> Tensor:
        r = pos.unsqueeze(1) - pos.unsqueeze(0)
        d = torch.sqrt(r.square().sum(-1, keepdim=True) + 1e-4)
        u = r / d
        cosine = torch.einsum("ijc,ikc->ijk", u, u)
        cut = torch.exp(-d.transpose(-1, -2))
        three = (cosine * (cut * cut.mT)).unsqueeze(-1)
        features = torch.cat([three.sum(2), d], -1)
        return self.net(features).mean(1).sum()


class Readout(nn.Module):
    """Energies per atom, scattered to the molecules they are of; equivariant-like products of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.species = nn.Embedding(4, 4)
        self.mix = nn.Parameter(torch.randn(4, 3))
        self.norm = nn.LayerNorm(4)
        self.net = perceptron(4, 8, 1)

    def forward(self, pos: Tensor, kind: Tensor, edges: Tensor, molecule: Tensor) -> Tensor:
        i, j = edges.unbind(0)
        vectors = (pos[j] - pos[i]).unsqueeze(-1).transpose(1, 2)  # (edges, 1, 3)
        length = vectors.norm(dim=-1, keepdim=True) + 0.1
        scaled = vectors * 0.5 / length
        mixed = torch.einsum("euc,kc->ek", scaled * self.species(kind)[j][:, :1].unsqueeze(-1), self.mix)
        at = torch.zeros(pos.shape[0], 4, dtype=pos.dtype).scatter_add(0, i[:, None].expand(-1, 4), mixed)
        energies = self.net(self.norm(at + self.species(kind))).squeeze(-1)
        total = torch.zeros(2, dtype=pos.dtype).index_add(0, molecule, energies)
        return (total * torch.tensor([1.0, 2.0], dtype=pos.dtype)).sum()


OPTIONS: dict[str, Any] = {"fallback": "error"}


class Programs:
    """Counts what is compiled, by role."""

    def __init__(self) -> None:
        self.count: dict[str, int] = {}

    def __call__(self, program: Any) -> Any:
        self.count[program.role] = self.count.get(program.role, 0) + 1
        return compile_eager(program)


def train(run: Callable[..., Tensor], model: nn.Module) -> list[Any]:
    found: list[Any] = []
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for n in SIZES:
        pos, *others = batch(n)
        pos.requires_grad_()
        energy = run(pos, *others)
        (force,) = torch.autograd.grad(energy, pos, create_graph=True)
        (force.square().mean() + energy).backward()
        found += [energy.detach(), force.detach(), pos.grad]
        found += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("frontend", ["trace", "dynamo"])
@pytest.mark.parametrize("kind", [AllPairs, EdgeList, Angles, Readout])
def test_forces_of_thirty_sizes(kind: Any, frontend: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = kind().double()
    model = copy.deepcopy(eager)
    programs = Programs()
    frames = CompileCounterWithBackend(functools.partial(backend, options=OPTIONS | {"backend": programs}))
    if frontend == "trace":
        run = aheadgrad.compile(model, frontend="trace", backend=programs, **OPTIONS)
    else:
        run = torch.compile(model, backend=frames)
    expected = train(eager, eager)
    found = train(run, model)
    torch.testing.assert_close(found, expected, equal_nan=True)
    compiles = len(run.entries) if frontend == "trace" else frames.frame_count
    assert compiles <= 3, compiles
    assert programs.count["forward"] <= 3, programs.count
    assert programs.count["backward"] <= 12, programs.count
