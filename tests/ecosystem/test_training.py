"""Libraries that train: the compiled model goes where a model goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aheadgrad

from .common import Call, assert_near, same_training


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(6, 4), torch.randint(0, 2, (6,))) for _ in range(count)]


def assert_same_state(found: nn.Module, expected: nn.Module, tolerance: float = 0.0) -> None:
    left, right = found.state_dict(), expected.state_dict()
    assert list(left) == list(right)
    for name in right:
        assert_near(left[name], right[name], tolerance, name)


def test_lightning(tmp_path: Path) -> None:
    import lightning
    from torch.utils.data import DataLoader

    class Task(lightning.LightningModule):
        def __init__(self, model: nn.Module, call: Call) -> None:
            super().__init__()
            self.model = model
            self.calls = [call]  # in a list: not a part of this module

        def training_step(self, batch: Any, index: int) -> Tensor:
            return nn.functional.cross_entropy(self.calls[0](batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    def fit(model: nn.Module, call: Call) -> None:
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(Task(model, call), DataLoader(batches(), batch_size=None))

    torch.manual_seed(0)
    eager = network()
    torch.manual_seed(0)
    other = network()
    fit(eager, eager)
    compiled = aheadgrad.compile(other, fallback="error")
    fit(other, compiled)
    assert_same_state(other, eager)
    assert compiled.entries
    assert not compiled.fallbacks


def test_accelerate() -> None:
    from accelerate import Accelerator

    def fit(model: nn.Module) -> nn.Module:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        ready, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in batches():
            with accelerator.accumulate(ready):
                accelerator.backward(nn.functional.cross_entropy(ready(x), y))
                optimizer.step()
                optimizer.zero_grad()
        return ready

    torch.manual_seed(0)
    eager = network()
    torch.manual_seed(0)
    other = network()
    fit(eager)
    compiled = aheadgrad.compile(other, fallback="error")
    fit(compiled)
    assert_same_state(other, eager)
    assert compiled.entries
    assert not compiled.fallbacks


def test_peft() -> None:
    """Low-rank additions to a frozen language model."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    def make() -> nn.Module:
        sizes = LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            use_cache=False,
        )
        setting = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
        return get_peft_model(LlamaForCausalLM(sizes), setting)

    def loss_of(call: Call) -> Tensor:
        words = torch.randint(0, 32, (2, 8))
        return call(input_ids=words, labels=words).loss

    same_training(make, loss_of, tolerance=1e-5)


def test_torchmetrics() -> None:
    """A metric that can be differentiated as the loss, and one that only counts."""
    from torchmetrics.classification import MulticlassAccuracy
    from torchmetrics.functional import mean_squared_error

    counted = []

    def loss_of(call: Call) -> Tensor:
        x, y = torch.randn(6, 4), torch.randint(0, 2, (6,))
        out = call(x)
        accuracy = MulticlassAccuracy(num_classes=2)
        accuracy.update(out.detach(), y)
        counted.append(accuracy.compute())
        return mean_squared_error(out.softmax(-1), nn.functional.one_hot(y, 2).float())

    same_training(network, loss_of)
    half = len(counted) // 2
    assert torch.equal(torch.stack(counted[:half]), torch.stack(counted[half:]))


def test_pytorch_metric_learning() -> None:
    from pytorch_metric_learning.losses import ContrastiveLoss

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.normalize(self.layers(x), dim=-1)

    loss = ContrastiveLoss()
    same_training(Model, lambda call: loss(call(torch.randn(8, 4)), torch.arange(8) % 3))


@pytest.mark.filterwarnings("ignore:Full backward hook:UserWarning")
def test_opacus() -> None:
    """Clipped gradients of single samples, with functional calls of the compiled step."""
    from opacus.grad_sample import GradSampleModule

    def fit(model: nn.Module, loss_of: Call) -> list[Tensor]:
        seen = []
        for x, y in batches(3):
            loss = loss_of(model, x, y)
            loss.backward()
            for p in model.parameters():
                each = p.grad_sample
                norms = each.flatten(1).norm(dim=1).clamp(min=1.0)
                with torch.no_grad():
                    p -= 0.1 * (each / norms.view(-1, *[1] * (each.dim() - 1))).mean(0)
                p.grad = p.grad_sample = None
            seen.append(loss.detach())
        return seen

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.inner(x).tanh())

    score = aheadgrad.compile(nn.functional.cross_entropy, fallback="error")
    torch.manual_seed(0)
    eager = GradSampleModule(Model())
    torch.manual_seed(0)
    other = GradSampleModule(Model())
    expected = fit(eager, lambda model, x, y: nn.functional.cross_entropy(model(x), y))
    found = fit(other, lambda model, x, y: score(model(x), y))
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))
    assert_same_state(other, eager)
    assert not score.fallbacks
