"""A character-level transformer, a text to train it on, and a count of what it saves for its backward."""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


def batches(text: str, steps: int) -> Iterable[tuple[Tensor, Tensor]]:
    letters = {letter: index for index, letter in enumerate(sorted(set(text)))}
    data = torch.tensor([letters[letter] for letter in text])
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,), generator=generator)
        rows = torch.stack([data[start : start + CONTEXT + 1] for start in starts.tolist()])
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
