"""Models are exported, written to a file, and trained in another process that knows nothing of their source:
five steps by the reference runner, with losses and weights equal to eager's.

`make test` runs some, `make test-more` all of them.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aheadgrad

STEPS, RATE = 5, 0.05

# What the other process runs: it has the file and the batches, and neither the model nor its libraries.
TRAIN = """
import pathlib
import sys
import torch
import aheadgrad

for place in pathlib.Path(sys.argv[1]).iterdir():
    exported = aheadgrad.load(place / "model.ag")
    given = torch.load(place / "batches", weights_only=True)
    trained = [p for p in exported.parameters.values() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=given["rate"])
    losses = []
    for seed, batch in enumerate(given["batches"]):
        torch.manual_seed(seed)
        out = exported.backward(*batch["args"], **batch["kwargs"])
        losses.append(torch.utils._pytree.tree_leaves(out)[exported.signature.loss].clone())
        optimizer.step()
        optimizer.zero_grad()
    foreign = [name for name in ("transformers", "tests") if name in sys.modules]
    state = {name: t.detach() for name, t in exported.state.items()}
    torch.save({"losses": losses, "state": state, "foreign": foreign}, place / "seen")
"""


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    args: Callable[[], tuple[Any, ...]]
    kwargs: Callable[[], dict[str, Any]] = dict
    loss: int | str = 0
    fast: bool = False


class WithLoss(nn.Module):
    """A model of torch's own, with a loss behind it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Any:
        out = self.model(*inputs)
        first = out[0] if isinstance(out, tuple) else out
        return first.square().mean(), out


class Tied(nn.Module):
    """One weight twice, a buffer that counts, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        self.out.weight = self.embed.weight
        self.drop = nn.Dropout(0.1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, words: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.out(self.drop(self.embed(words)).cumsum(1))
        return out


def torchs() -> dict[str, Case]:
    def layers() -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def convolutions() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3)
        )

    def normed() -> nn.Module:
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), nn.GELU())

    def words() -> tuple[Tensor]:
        return (torch.randint(0, 32, (3, 7)),)

    return {
        "transformer": Case(lambda: WithLoss(layers()), lambda: (torch.randn(2, 5, 16),), fast=True),
        "convolutions": Case(lambda: WithLoss(convolutions()), lambda: (torch.randn(2, 3, 8, 8),), fast=True),
        "gru": Case(lambda: WithLoss(nn.GRU(4, 6)), lambda: (torch.randn(5, 2, 4),)),
        "spectral norm": Case(lambda: WithLoss(normed()), lambda: (torch.randn(4, 6),)),
        "tied": Case(lambda: WithLoss(Tied()), words, fast=True),
    }


def hugging_face() -> dict[str, Case]:
    from tests.hf import decoders, encoders, senses

    found = {}
    models = {**decoders.MODELS, **encoders.MODELS, **senses.MODELS}
    for name in HUGGING_FACE:
        fast = name in ("gpt2", "bert")
        found[name] = Case(_without_cache(models[name].make), tuple, models[name].batch, "loss", fast)
    return found


def _without_cache(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model: Any = make()
        model.config.use_cache = False
        return model

    return made


HUGGING_FACE = (
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "mixtral with router loss",
    "mamba",
    "bert",
    "roberta",
    "albert",
    "deberta_v2",
    "xlnet",
    "longt5",
    "vit",
    "swin",
    "resnet",
    "siglip",
)
CASES = {**torchs(), **hugging_face()}


def eager(model: nn.Module, case: Case, batches: list[dict[str, Any]]) -> tuple[list[Tensor], nn.Module]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    losses = []
    for seed, batch in enumerate(batches):
        torch.manual_seed(seed)
        out = model(*batch["args"], **batch["kwargs"])
        loss = out[case.loss]
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


def groups() -> list[Any]:
    """Models that share a process to be trained in: starting one takes longer than training."""
    fast = [name for name, case in CASES.items() if case.fast]
    slow = [name for name, case in CASES.items() if not case.fast]
    more = [pytest.param(slow[k : k + 4], marks=pytest.mark.zoo) for k in range(0, len(slow), 4)]
    return [fast, *more]


def exported_to(place: Path, name: str) -> list[Any]:
    """Writes a model and its batches; what eager makes of them."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make().train()
    batches = [{"args": case.args(), "kwargs": case.kwargs()} for _ in range(STEPS)]
    exported = aheadgrad.export(model, batches[0]["args"], batches[0]["kwargs"], loss=case.loss)
    place.mkdir(parents=True)
    exported.save(place / "model.ag")
    torch.save({"batches": batches, "rate": RATE}, place / "batches")
    return list(eager(copy.deepcopy(model), case, batches))


@pytest.mark.parametrize("names", groups(), ids=", ".join)
def test_trained_elsewhere(names: list[str], tmp_path: Path) -> None:
    expected = {name: exported_to(tmp_path / "all" / name, name) for name in names}
    subprocess.run([sys.executable, "-c", TRAIN, str(tmp_path / "all")], check=True, cwd=tmp_path)
    for name, (losses, model) in expected.items():
        seen = torch.load(tmp_path / "all" / name / "seen", weights_only=True)
        assert seen["foreign"] == []
        torch.testing.assert_close(seen["losses"], losses, rtol=0, atol=0, msg=f"losses of {name} differ")
        held = {n: t.detach() for n, t in model.state_dict(keep_vars=True).items() if n in seen["state"]}
        assert len(held) >= len(list(model.parameters()))
        for key, wanted in held.items():
            found = seen["state"][key]
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, msg=f"{key} of {name} differs")
