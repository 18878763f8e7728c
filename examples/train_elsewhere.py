"""A whole training step as a file: exported here, run by a process that does not have the model's source.

    python examples/train_elsewhere.py

docs/export.md says more.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import aheadgrad

STEPS = 5
ELSEWHERE = """
import sys, torch, aheadgrad

step = aheadgrad.load(sys.argv[1]).compile("eager")
torch.manual_seed(1)
for _ in range(int(sys.argv[2])):
    print(float(step(torch.randn(16, 4), torch.randn(16, 2))))
"""


def make_step() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def main() -> None:
    model, optimizer = make_step()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    exported = aheadgrad.export(step, (torch.randn(16, 4), torch.randn(16, 2)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.ag"
        exported.save(path)
        print(f"{path.name}: {path.stat().st_size} bytes, {len(exported.program.ops)} ops")
        run = [sys.executable, "-c", ELSEWHERE, str(path), str(STEPS)]
        lines = subprocess.run(run, check=True, capture_output=True, text=True).stdout.splitlines()
    torch.manual_seed(1)
    for line in lines:
        here = float(step(torch.randn(16, 4), torch.randn(16, 2)))
        print(f"elsewhere {float(line):.6f}  eager {here:.6f}  difference {abs(float(line) - here):.1e}")


if __name__ == "__main__":
    main()
