"""The main job end to end, in three columns: eager, compiled exactly, compiled fast.

A character transformer is trained three times from one seed, and a molecular potential is fitted to forces,
which needs second derivatives. All three take turns, step by step.

    eager   the model itself
    exact   compiled with backend="eager": the same ops, so everything is compared bit for bit
    fast    compiled with backend="inductor": fused, with rounding of its own

Any difference between the first two makes the script exit with status 1. The third is left out where there is
no C++ compiler.

    python -m examples.demo --steps 50
"""

import argparse
import copy
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aheadgrad
from examples.char_transformer import CONTEXT, TEXT, CharTransformer, batches, saved_bytes
from examples.force_matching import PairPotential, morse, with_forces

MOLECULES, ATOMS = 64, 5
Compile = Callable[[nn.Module], Any]


def columns() -> dict[str, Compile]:
    found: dict[str, Compile] = {
        "eager": lambda model: model,
        "exact": lambda model: aheadgrad.compile(model, fallback="error", backend="eager"),
    }
    if any(map(shutil.which, ("g++", "clang++", "c++"))):
        found["fast"] = lambda model: aheadgrad.compile(model, fallback="error", backend="inductor")
    return found


@dataclass
class Trainer:
    """One of the runs. It keeps its own random state, so that taking turns disturbs nobody."""

    model: nn.Module
    loss: Callable[..., Tensor]
    random_state: Tensor
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def step(self, *batch: Tensor) -> None:
        torch.set_rng_state(self.random_state)
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.loss(*batch)
        loss.backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())
        self.random_state = torch.get_rng_state()

    def saved(self, *batch: Tensor) -> int:
        known = [*self.model.parameters(), *self.model.buffers(), *batch]
        return saved_bytes(lambda: self.loss(*batch), known)


def trainers(model: nn.Module, loss_of: Callable[[Any], Callable[..., Tensor]]) -> dict[str, Trainer]:
    state = torch.get_rng_state()
    twins = {name: copy.deepcopy(model) for name in columns()}
    return {name: Trainer(twins[name], loss_of(fast(twins[name])), state) for name, fast in columns().items()}


def train(runs: dict[str, Trainer], given: Any, every: int) -> tuple[Tensor, ...]:
    """Trains all in turns and prints the losses; gives the last batch."""
    print(f"\n{'loss of step':>12}" + "".join(f"{name:>14}" for name in runs))
    batch: tuple[Tensor, ...] = ()
    order = list(runs.values())
    for step, batch in enumerate(given):
        for run in order if step % 2 else reversed(order):
            run.step(*batch)
        if step % every == 0:
            print(f"{step:>12}" + "".join(f"{run.losses[-1]:>14.8f}" for run in order), flush=True)
    return batch


def print_costs(runs: dict[str, Trainer], saved: dict[str, int] | None = None) -> None:
    # The first step pays for compiling (and, in eager, for first use); it has a line of its own.
    rows = {
        "first step, ms": [run.seconds[0] * 1e3 for run in runs.values()],
        "step, median ms": [statistics.median(run.seconds[1:]) * 1e3 for run in runs.values()],
    }
    if saved is not None:
        rows["saved for backward, KiB"] = [count / 1024 for count in saved.values()]
    print(f"\n{'':<26}" + "".join(f"{name:>12}" for name in runs))
    for label, numbers in rows.items():
        print(f"{label:<26}" + "".join(f"{n:>12,.1f}" for n in numbers))


def differences(eager: Trainer, exact: Trainer) -> list[str]:
    """Everything in which two runs are not bit for bit the same; empty when all is well."""
    found = [
        f"loss of step {step}: eager {a!r}, compiled {b!r}"
        for step, (a, b) in enumerate(zip(eager.losses, exact.losses, strict=True))
        if a != b
    ]
    compiled_state = exact.model.state_dict()
    for name, value in eager.model.state_dict().items():
        if not torch.equal(value, compiled_state[name]):
            found.append(f"{name} after training")
    if not torch.equal(eager.random_state, exact.random_state):
        found.append("the random state after training")
    return found


def first_order(seed: int, steps: int, every: int) -> list[str]:
    text = TEXT.read_text(encoding="utf-8")
    torch.manual_seed(seed)
    model = CharTransformer(len(set(text)), layers=3, width=64, heads=4, context=CONTEXT)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"A transformer: {parameters:,} parameters, dropout 0.1, {steps} steps of AdamW.")
    runs = trainers(model, lambda call: call)
    batch = train(runs, batches(text, steps), every)
    print_costs(runs, {name: run.saved(*batch) for name, run in runs.items()})
    return differences(runs["eager"], runs["exact"])


def second_order(seed: int, steps: int, every: int) -> list[str]:
    """A loss on forces: the gradient of a gradient. Sums of gradients may be added up in another order."""
    torch.manual_seed(seed)
    model = PairPotential(width=64).double()
    print(f"\nA potential fitted to forces (second derivatives): {MOLECULES} molecules, {steps} steps.")

    def loss_of(energy: Any) -> Callable[[Tensor], Tensor]:
        def loss(positions: Tensor) -> Tensor:
            expected = morse(positions)
            (gradient,) = torch.autograd.grad(expected.sum(), positions)
            energies, forces = with_forces(energy, positions)
            return 0.1 * F.mse_loss(energies, expected.detach()) + F.mse_loss(forces, -gradient)

        return loss

    runs = trainers(model, loss_of)
    given = [(1.2 * torch.randn(MOLECULES, ATOMS, 3).double()).requires_grad_() for _ in range(steps)]
    train(runs, zip(given, strict=True), every)
    print_costs(runs)
    pairs = enumerate(zip(runs["eager"].losses, runs["exact"].losses, strict=True))
    return [f"loss of step {k}: {a!r}, {b!r}" for k, (a, b) in pairs if abs(a - b) > 1e-12 * abs(a)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=25, help="print the losses every so many steps")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.steps < 2 or options.every < 1:
        parser.error("--steps must be at least 2 and --every at least 1")
    found = first_order(options.seed, options.steps, options.every)
    if not found:
        print("\neager = exact, bit for bit: every loss, every parameter, the random state.")
    others = second_order(options.seed, options.steps, options.every)
    if not others:
        print("\neager = exact at the second order: every loss, to 12 digits.")
    if found or others:
        print("\nDIFFERENT, the first of the places:", *(found + others)[:10], sep="\n  ")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
