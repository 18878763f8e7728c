"""Potentials: energies and forces, and training on both (a second derivative)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .common import Call, same_training, with_forces

ATOMS = 5


def molecule(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Positions of a few atoms, and all pairs of them."""
    positions = torch.randn(ATOMS, 3, dtype=dtype) + 2.0 * torch.arange(ATOMS).view(-1, 1)
    pairs = [(i, j) for i in range(ATOMS) for j in range(ATOMS) if i != j]
    return positions, torch.tensor(pairs).t().contiguous()


@pytest.mark.usefixtures("without_script")
def test_e3nn() -> None:
    from e3nn import o3
    from e3nn.nn import Gate

    class Potential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.harmonics = o3.SphericalHarmonics("0e+1o", normalize=True)
            self.product = o3.FullyConnectedTensorProduct("4x0e", "0e+1o", "6x0e+2x1o")
            self.gate = Gate("4x0e", [torch.tanh], "2x0e", [torch.sigmoid], "2x1o")
            self.start = nn.Parameter(torch.randn(1, 4))
            self.last = o3.Linear(self.gate.irreps_out, "1x0e")

        def forward(self, positions: Tensor, edges: Tensor) -> Tensor:
            apart = positions[edges[0]] - positions[edges[1]]
            weight = torch.exp(-apart.pow(2).sum(-1, keepdim=True))
            messages = self.product(self.start.expand(len(apart), -1), self.harmonics(apart)) * weight
            gathered = torch.zeros(len(positions), messages.shape[1]).index_add(0, edges[1], messages)
            return self.last(self.gate(gathered)).sum()

    def loss_of(call: Call) -> Tensor:
        positions, edges = molecule()
        positions.requires_grad_()
        return with_forces(call(positions, edges), positions)

    same_training(Potential, loss_of, frontend="trace", tolerance=1e-5)


def mace() -> nn.Module:
    import numpy as np
    from e3nn import o3
    from mace import modules

    return modules.MACE(
        r_max=5.0,
        num_bessel=4,
        num_polynomial_cutoff=3,
        max_ell=1,
        interaction_cls=modules.interaction_classes["RealAgnosticResidualInteractionBlock"],
        interaction_cls_first=modules.interaction_classes["RealAgnosticResidualInteractionBlock"],
        num_interactions=2,
        num_elements=2,
        hidden_irreps=o3.Irreps("4x0e+4x1o"),
        MLP_irreps=o3.Irreps("4x0e"),
        gate=torch.nn.functional.silu,
        atomic_energies=np.array([-1.0, -2.0]),
        avg_num_neighbors=4.0,
        atomic_numbers=[1, 8],
        correlation=2,
        radial_type="bessel",
    )


@pytest.mark.usefixtures("without_script")
def test_mace() -> None:
    def make() -> nn.Module:
        return mace().float()

    def loss_of(call: Call) -> Tensor:
        positions, edges = molecule()
        kinds = torch.arange(ATOMS) % 2
        data: dict[str, Any] = {
            "positions": positions,
            "edge_index": edges,
            "shifts": torch.zeros(edges.shape[1], 3),
            "unit_shifts": torch.zeros(edges.shape[1], 3),
            "cell": torch.zeros(3, 3),
            "node_attrs": nn.functional.one_hot(kinds, 2).float(),
            "batch": torch.zeros(ATOMS, dtype=torch.long),
            "ptr": torch.tensor([0, ATOMS]),
            "head": torch.zeros(1, dtype=torch.long),
        }
        out = call(data, training=True, compute_force=True)
        return out["energy"].pow(2).sum() + out["forces"].pow(2).mean()

    same_training(make, loss_of, frontend="trace", tolerance=1e-4)


@pytest.fixture
def without_script() -> Iterator[None]:
    """e3nn can leave its generated code as it is instead of handing it to TorchScript."""
    torch.serialization.add_safe_globals([slice])  # its file of constants has some
    import e3nn

    before = e3nn.get_optimization_defaults()
    e3nn.set_optimization_defaults(jit_script_fx=False)
    yield
    e3nn.set_optimization_defaults(**before)


@pytest.fixture
def schnetpack(monkeypatch: pytest.MonkeyPatch) -> Any:
    """It imports a type variable that torch's loader no longer has under that name."""
    from torch.utils.data import dataloader

    if not hasattr(dataloader, "T_co"):
        monkeypatch.setattr(dataloader, "T_co", dataloader._T_co, raising=False)
    import schnetpack as module

    return module


def test_schnetpack(schnetpack: Any) -> None:
    """(By tracing it is refused: the number of molecules is read off the last atom.)"""

    def make() -> nn.Module:
        basis = schnetpack.nn.GaussianRBF(n_rbf=8, cutoff=5.0)
        cutoff = schnetpack.nn.CosineCutoff(5.0)
        inside = schnetpack.representation.SchNet(
            n_atom_basis=8, n_interactions=2, radial_basis=basis, cutoff_fn=cutoff
        )
        energy = schnetpack.atomistic.Atomwise(n_in=8, output_key="energy")

        class Potential(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.distances = schnetpack.atomistic.PairwiseDistances()
                self.inside, self.energy = inside, energy

            def forward(self, inputs: dict[str, Tensor]) -> Tensor:
                return self.energy(self.inside(self.distances(dict(inputs))))["energy"]

        return Potential()

    def loss_of(call: Call) -> Tensor:
        names = schnetpack.properties
        positions, edges = molecule()
        positions.requires_grad_()
        inputs = {
            names.Z: torch.arange(ATOMS) % 3 + 1,
            names.R: positions,
            names.idx_i: edges[0],
            names.idx_j: edges[1],
            names.offsets: torch.zeros(edges.shape[1], 3),
            names.idx_m: torch.zeros(ATOMS, dtype=torch.long),
            names.n_atoms: torch.tensor([ATOMS]),
        }
        return with_forces(call(inputs), positions)

    same_training(make, loss_of, tolerance=1e-5)


def test_torchani() -> None:
    """Networks on features of the surroundings of each atom."""
    from torchani.aev import AEVComputer
    from torchani.nn import ANINetworks, AtomicNetwork

    class Potential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = AEVComputer.like_1x(num_species=2)
            size = self.features.out_dim
            self.networks = ANINetworks(
                {s: AtomicNetwork([size, 8, 1], activation="celu") for s in ("H", "C")}
            )

        def forward(self, species: Tensor, positions: Tensor) -> Tensor:
            return self.networks(species, self.features(species, positions))

    def loss_of(call: Call) -> Tensor:
        positions = molecule()[0].unsqueeze(0).requires_grad_()
        return with_forces(call(torch.arange(ATOMS).unsqueeze(0) % 2, positions), positions)

    same_training(Potential, loss_of, tolerance=1e-4)
