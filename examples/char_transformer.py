"""Train a character-level transformer twice from one seed, compiled and in eager, in lock step.

Both runs start from the same parameters and the same random state, see the same batches, and
take turns step by step. Compiled must equal eager, so the losses, the final parameters and the
final random state are compared bit for bit; any difference makes the script exit with status 1.

    python examples/char_transformer.py
    python examples/char_transformer.py --steps 50 --compiler eager
"""

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aheadgrad

TEXT = Path(__file__).parent / "data" / "text.txt"
BATCH = 16
CONTEXT = 48


class Attention(nn.Module):
    """Causal self-attention, written out so that every step of it is in the captured graph."""

    mask: Tensor

    def __init__(self, width: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", torch.ones(context, context).tril() == 0, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5
        scores = scores.masked_fill(self.mask[:length, :length], float("-inf"))
        mixed = self.dropout(scores.softmax(-1)) @ v
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return result


class Block(nn.Module):
    def __init__(self, width: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, context, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class CharTransformer(nn.Module):
    """A decoder-only transformer that returns the mean next-character loss."""

    def __init__(
        self, vocabulary: int, *, layers: int, width: int, heads: int, context: int, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, context, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass
class Trainer:
    """One of the two runs. It keeps its own random state, so that taking turns disturbs nobody."""

    name: str
    model: nn.Module
    forward: Callable[[Tensor, Tensor], Tensor]
    random_state: Tensor
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        torch.set_rng_state(self.random_state)
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.forward(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())
        self.random_state = torch.get_rng_state()

    def saved_bytes(self, tokens: Tensor, targets: Tensor) -> int:
        known = [*self.model.parameters(), *self.model.buffers(), tokens, targets]
        return saved_bytes(lambda: self.forward(tokens, targets), known)


def saved_bytes(forward: Callable[[], Tensor], known: Iterable[Tensor]) -> int:
    """Bytes of storage that `forward` keeps for its backward, each storage once, `known` not counted."""
    ours = {tensor.untyped_storage().data_ptr() for tensor in known}
    saved: dict[int, torch.UntypedStorage] = {}  # keeps them alive, so no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    total = sum(storage.nbytes() for storage in saved.values())
    del result
    return total


def compile_with(compiler: str, model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return aheadgrad.compile(model, fallback="error", backend="eager") if compiler == "aheadgrad" else model


def batches(text: str, steps: int) -> Iterable[tuple[Tensor, Tensor]]:
    letters = {letter: index for index, letter in enumerate(sorted(set(text)))}
    data = torch.tensor([letters[letter] for letter in text])
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,), generator=generator)
        rows = torch.stack([data[start : start + CONTEXT + 1] for start in starts.tolist()])
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def differences(eager: Trainer, compiled: Trainer) -> list[str]:
    """Everything in which the two runs are not bit for bit the same; empty when all is well."""
    found = [
        f"loss of step {step}: eager {a!r}, compiled {b!r}"
        for step, (a, b) in enumerate(zip(eager.losses, compiled.losses, strict=True))
        if a != b
    ]
    compiled_state = compiled.model.state_dict()
    for name, value in eager.model.state_dict().items():
        if not torch.equal(value, compiled_state[name]):
            found.append(f"{name} after training")
    if not torch.equal(eager.random_state, compiled.random_state):
        found.append("the random state after training")
    return found


def train(eager: Trainer, compiled: Trainer, text: str, steps: int, every: int) -> tuple[int, int]:
    """Train both in turns, print the losses, and return the bytes each of them saves for backward."""
    print(f"\n{'step':>6}  {'eager loss':>12}  {'compiled loss':>13}  equal")
    tokens = targets = torch.empty(0)
    for step, (tokens, targets) in enumerate(batches(text, steps)):
        for trainer in (eager, compiled) if step % 2 else (compiled, eager):
            trainer.step(tokens, targets)
        if step % every == 0 or step == steps - 1:
            a, b = eager.losses[-1], compiled.losses[-1]
            print(f"{step:>6}  {a:>12.8f}  {b:>13.8f}  {'yes' if a == b else 'NO'}", flush=True)
    return eager.saved_bytes(tokens, targets), compiled.saved_bytes(tokens, targets)


def print_costs(eager: Trainer, compiled: Trainer, saved: tuple[int, int]) -> None:
    # The first step pays for compiling (and, in eager, for first use); it has a line of its own.
    first = [trainer.seconds[0] * 1e3 for trainer in (eager, compiled)]
    median = [statistics.median(trainer.seconds[1:]) * 1e3 for trainer in (eager, compiled)]
    kilobytes = [count / 1024 for count in saved]
    print(f"\n{'':<26}{'eager':>12}{'compiled':>12}{'ratio':>8}")
    print(f"{'first step, ms':<26}{first[0]:>12.1f}{first[1]:>12.1f}")
    for label, (a, b) in (("step, median ms", median), ("saved for backward, KiB", kilobytes)):
        print(f"{label:<26}{a:>12,.1f}{b:>12,.1f}{b / a:>8.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--compiler", choices=("aheadgrad", "eager"), default="aheadgrad")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=25, help="print the losses every so many steps")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.steps < 2 or options.every < 1:
        parser.error("--steps must be at least 2 and --every at least 1")

    text = TEXT.read_text(encoding="utf-8")
    torch.manual_seed(options.seed)
    model = CharTransformer(len(set(text)), layers=3, width=64, heads=4, context=CONTEXT)
    twin = copy.deepcopy(model)
    state = torch.get_rng_state()
    eager = Trainer("eager", model, model, state)
    compiled = Trainer("compiled", twin, compile_with(options.compiler, twin), state)

    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{len(text):,} characters, {parameters:,} parameters, dropout 0.1, {options.steps} steps of AdamW")
    saved = train(eager, compiled, text, options.steps, options.every)
    print_costs(eager, compiled, saved)

    found = differences(eager, compiled)
    if found:
        print(f"\nDIFFERENT in {len(found)} places, the first of them:", *found[:10], sep="\n  ")
        return 1
    print("\nEqual bit for bit: every loss, every parameter, the random state.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
