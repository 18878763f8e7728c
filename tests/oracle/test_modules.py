"""Modules: compiled, they train as in eager, bit by bit, and stay what they were."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import aheadgrad

from .common import assert_equal, assert_same_state, default, leaf, same_module, step, strict


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
        self.register_buffer("shift", torch.ones(3))
        self.register_buffer("hidden", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.body(x) * scale + self.shift


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens).tanh())


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body[0].requires_grad_(False)


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(3, 3)


def _tokens(n: int = 5) -> Tensor:
    return torch.arange(n) % 7


def _attention(kind: str) -> nn.Module:
    class Self(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1)

        def forward(self, x: Tensor) -> Any:
            mask = None
            if kind == "causal":
                mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            return self.attention(x, x, x, attn_mask=mask, need_weights=kind == "weights")

    return Self()


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "net": (Net, (leaf(2, 4),)),
    "tied": (Tied, (_tokens(),)),
    "frozen": (Frozen, (leaf(2, 4),)),
    "unused": (Unused, (leaf(2, 4),)),
    "conv": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2)),
        (leaf(2, 2, 6, 6),),
    ),
    "transposed": (lambda: nn.ConvTranspose1d(2, 3, 3, stride=2), (leaf(2, 2, 5),)),
    "conv channels last": (
        lambda: nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last),
        (leaf(2, 2, 6, 6).detach().to(memory_format=torch.channels_last),),
    ),
    "batch norm": (lambda: nn.BatchNorm1d(3), (leaf(5, 3),)),
    "batch norm without momentum": (lambda: nn.BatchNorm1d(3, momentum=None), (leaf(5, 3),)),
    "batch norm bare": (lambda: nn.BatchNorm1d(3, affine=False, track_running_stats=False), (leaf(5, 3),)),
    "instance norm": (lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True), (leaf(4, 3, 5),)),
    "layer norm": (lambda: nn.LayerNorm(3), (leaf(5, 3),)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (leaf(3, 4, 5),)),
    "rms norm": (lambda: nn.RMSNorm(3), (leaf(5, 3),)),
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5)), (leaf(3, 4),)),
    "dropouts": (
        lambda: nn.Sequential(nn.Dropout(0.3, inplace=False), nn.AlphaDropout(0.2), nn.Dropout1d(0.4)),
        (leaf(3, 4, 5),),
    ),
    "dropout in place": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5, inplace=True)),
        (leaf(3, 4),),
    ),
    "relu in place": (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True)), (leaf(3, 4),)),
    "rrelu": (lambda: nn.RReLU(), (leaf(3, 4),)),
    "lstm": (lambda: nn.LSTM(3, 4, num_layers=2, dropout=0.2, batch_first=True), (leaf(2, 5, 3),)),
    "lstm both ways": (lambda: nn.LSTM(3, 4, bidirectional=True, proj_size=2), (leaf(5, 2, 3),)),
    "gru": (lambda: nn.GRU(3, 4), (leaf(5, 2, 3), leaf(1, 2, 4, seed=3))),
    "rnn": (lambda: nn.RNN(3, 4, nonlinearity="relu"), (leaf(5, 2, 3),)),
    "lstm cell": (lambda: nn.LSTMCell(3, 4), (leaf(2, 3),)),
    "attention": (lambda: _attention("plain"), (leaf(2, 5, 8),)),
    "attention weights": (lambda: _attention("weights"), (leaf(2, 5, 8),)),
    "attention causal": (lambda: _attention("causal"), (leaf(2, 5, 8),)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (leaf(2, 5, 8),)),
    "transformer": (lambda: nn.Transformer(8, 2, 1, 1, 16), (leaf(3, 2, 8), leaf(4, 2, 8, seed=1))),
    "embedding": (lambda: nn.Embedding(7, 4, padding_idx=0), (_tokens(),)),
    "embedding scaled": (lambda: nn.Embedding(7, 4, scale_grad_by_freq=True), (_tokens(9),)),
    "embedding renormed": (lambda: nn.Embedding(7, 4, max_norm=0.5), (_tokens(),)),
    "embedding bag": (lambda: nn.EmbeddingBag(7, 4, mode="mean"), (_tokens(6).view(2, 3),)),
    "bilinear": (lambda: nn.Bilinear(3, 4, 2), (leaf(5, 3), leaf(5, 4, seed=1))),
    "pooling": (
        lambda: nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Softmax(-1)),
        (leaf(2, 3, 5, 5),),
    ),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), (leaf(2, 3),)),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)), (leaf(2, 3),)),
    "loss": (lambda: nn.CrossEntropyLoss(label_smoothing=0.1), (leaf(5, 7), _tokens())),
    "complex": (lambda: nn.Linear(3, 4, dtype=torch.complex64), (leaf(2, 3, dtype=torch.complex64),)),
    "half": (lambda: nn.Linear(3, 4, dtype=torch.bfloat16), (leaf(2, 3, dtype=torch.bfloat16),)),
}

READS_VALUES = ("batch norm without momentum",)  # a counter, in Python: tracing refuses that


def fresh(args: tuple[Any, ...], n: int) -> list[tuple[Any, ...]]:
    return [
        tuple(
            a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in args
        )
        for _ in range(n)
    ]


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize("name", MODULES)
def test_trains_as_in_eager(name: str) -> None:
    make, args = MODULES[name]
    eager, compiled = same_module(make, fresh(args, 3), compile=default if name in READS_VALUES else strict)
    eager.eval()
    compiled.eval()
    assert_equal(step(eager, *args), step(compiled, *args), "in eval mode")
    eager.train()
    compiled.train()
    assert_equal(step(eager, *args), step(compiled, *args), "in train mode again")
    assert compiled.fallbacks == {}


OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": functools.partial(torch.optim.Adam, lr=0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "name", ["net", "tied", "frozen", "unused", "conv", "lstm", "encoder layer", "dropout"]
)
def test_five_steps_with_an_optimizer(name: str, optimizer: str) -> None:
    make, args = MODULES[name]
    _, compiled = same_module(make, fresh(args, 5), optimizer=OPTIMIZERS[optimizer])
    assert len(compiled.entries) == 1


def test_sparse_gradients_of_an_embedding() -> None:
    torch.manual_seed(0)
    eager = nn.Embedding(7, 4, sparse=True)
    other = copy.deepcopy(eager)
    compiled = aheadgrad.compile(other, fallback="error", frontend="trace")
    for run, module in ((eager, eager), (compiled, other)):
        run(_tokens()).sin().sum().backward()
        assert module.weight.grad is not None
        assert module.weight.grad.is_sparse
    assert torch.equal(eager.weight.grad.to_dense(), other.weight.grad.to_dense())  # type: ignore[union-attr]


def test_batch_norm_twice_before_one_backward() -> None:
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    other = copy.deepcopy(eager)
    compiled = strict(other)
    x, y = leaf(4, 3), leaf(4, 3, seed=1)
    for run in (eager, compiled):
        (run(x) * 2 + run(y).sin()).sum().backward()
    assert_same_state(eager, other)
    for a, b in zip(eager.buffers(), other.buffers(), strict=True):
        assert a._version == b._version


def test_batch_norm_frozen_and_in_eval() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    def between(module: Any, i: int) -> None:
        module.a.train(i % 2 == 0)
        module.b.train(i >= 2)

    same_module(Mixed, fresh((leaf(4, 3),), 5), between=between)


# what stays untouched


def test_names_are_those_of_the_original() -> None:
    model = Net()
    before = copy.deepcopy(model.state_dict())
    compiled = strict(model)
    step(compiled, leaf(2, 4))
    assert list(compiled.state_dict()) == list(before) == list(model.state_dict())
    assert [n for n, _ in compiled.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert [n for n, _ in compiled.named_buffers()] == [n for n, _ in model.named_buffers()]
    assert [n for n, _ in compiled.named_modules()] == [n for n, _ in model.named_modules()]
    assert all(a is b for a, b in zip(compiled.parameters(), model.parameters(), strict=True))
    assert_equal(list(before.values()), list(model.state_dict().values()))
    assert isinstance(compiled, nn.Module)


def test_the_original_keeps_its_class_and_attributes() -> None:
    model = Net()
    before = set(vars(model))
    compiled = strict(model)
    step(compiled, leaf(2, 4))
    assert type(model) is Net
    assert set(vars(model)) == before
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert type(model.shift) is Tensor


def test_attributes_of_the_original_are_there() -> None:
    class Rich(Net):
        def __init__(self) -> None:
            super().__init__()
            self.width = 5

        def twice(self, x: Tensor) -> Tensor:
            return self(x) * 2

    compiled = strict(Rich())
    x = leaf(2, 4)
    assert compiled.width == 5
    assert compiled.body[0].weight.shape == (5, 4)
    assert torch.equal(compiled.twice(x), compiled(x) * 2)
    compiled.width = 6
    assert compiled.width == 6
    with pytest.raises(AttributeError):
        compiled.nothing_of_that_name


def test_pickle_and_deepcopy_of_the_original() -> None:
    model = Net()
    compiled = strict(model)
    x = leaf(2, 4)
    expected = compiled(x)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected)


def test_deepcopy_of_the_compiled_module() -> None:
    compiled = strict(Net())
    x = leaf(2, 4)
    expected = compiled(x).detach().clone()
    other = copy.deepcopy(compiled)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    assert torch.equal(other(x), torch.ones(2, 3))
    assert torch.equal(compiled(x), expected)


def test_repr_and_children() -> None:
    model = Net()
    compiled = strict(model)
    assert "Linear" in repr(compiled)
    assert list(compiled.children()) == list(model.children())
    compiled.requires_grad_(False)
    assert not any(p.requires_grad for p in model.parameters())
    assert not compiled(leaf(2, 4, grad=False)).requires_grad
    compiled.zero_grad()


def test_load_state_dict_between_calls() -> None:
    model, other = Net(), Net()
    compiled = strict(model)
    x = leaf(2, 4)
    compiled(x)
    compiled.load_state_dict(other.state_dict())
    assert torch.equal(compiled(x), other(x))


def test_load_state_dict_with_assign() -> None:
    model, other = Net(), Net()
    compiled = strict(model)
    x = leaf(2, 4)
    compiled(x)
    model.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(compiled(x), other(x))


# what changes after compiling


def test_train_and_eval_switched() -> None:
    def between(module: Any, i: int) -> None:
        module.train(i % 2 == 0)

    same_module(
        lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)),
        fresh((leaf(5, 4),), 4),
        between=between,
    )


def test_train_switched_on_the_compiled_module() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    compiled = strict(model)
    x = leaf(2, 4)
    compiled(x)
    assert compiled.eval() is compiled
    assert not model.training
    assert not model[1].training
    assert torch.equal(compiled(x), model[0](x))
    compiled.train()
    assert model[1].training


def test_converted_to_another_dtype() -> None:
    def between(module: Any, i: int) -> None:
        module.to([torch.float32, torch.float64, torch.bfloat16][i])

    same_module(
        Net,
        [(leaf(2, 4, dtype=d),) for d in (torch.float32, torch.float64, torch.bfloat16)],
        between=between,
    )


def test_a_parameter_replaced() -> None:
    def between(module: Any, i: int) -> None:
        if i:
            module.body[0].weight = nn.Parameter(torch.full((5, 4), 0.1 * i))

    same_module(Net, fresh((leaf(2, 4),), 3), between=between)


def test_a_parameter_replaced_on_the_compiled_module() -> None:
    model = nn.Linear(3, 2)
    compiled = strict(model)
    x = leaf(4, 3)
    compiled(x)
    compiled.weight = nn.Parameter(torch.ones(2, 3))
    assert torch.equal(compiled(x), F.linear(x, torch.ones(2, 3), model.bias))


def test_a_submodule_replaced() -> None:
    def between(module: Any, i: int) -> None:
        if i:
            torch.manual_seed(i)
            module.body[2] = nn.Linear(5, 3, bias=i == 1)

    same_module(Net, fresh((leaf(2, 4),), 3), between=between)


def test_a_submodule_added() -> None:
    def between(module: Any, i: int) -> None:
        if i:
            module.append(nn.Tanh() if i == 1 else nn.Linear(3, 3, bias=False))
            torch.manual_seed(5)
            for p in module.parameters():
                nn.init.normal_(p)

    same_module(lambda: nn.Sequential(nn.Linear(4, 3)), fresh((leaf(2, 4),), 3), between=between)


def test_a_parameter_removed() -> None:
    def between(module: Any, i: int) -> None:
        if i == 1:
            module.bias = None

    same_module(lambda: nn.Linear(4, 3), fresh((leaf(2, 4),), 3), between=between)


def test_tied_and_untied_later() -> None:
    def between(module: Any, i: int) -> None:
        if i == 1:
            module.head.weight = nn.Parameter(module.head.weight.detach().clone())
        if i == 2:
            module.head.weight = module.embed.weight

    same_module(Tied, fresh((_tokens(),), 3), between=between)


def test_requires_grad_switched() -> None:
    def between(module: Any, i: int) -> None:
        module.body[0].requires_grad_(i != 1)
        module.zero_grad()

    same_module(Net, fresh((leaf(2, 4),), 3), between=between)


def test_a_number_on_the_module_changes() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    def between(module: Any, i: int) -> None:
        module.scale = float(i)

    same_module(Scaled, fresh((leaf(3),), 3), between=between)


def test_the_rate_of_a_dropout_changes() -> None:
    def between(module: Any, i: int) -> None:
        module[1].p = 0.2 * i

    same_module(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5)), fresh((leaf(3, 4),), 3), between=between
    )


def test_an_activation_on_the_module_changes() -> None:
    class Active(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act: Callable[[Tensor], Tensor] = torch.sin
            self.sizes = [1, 2]

        def forward(self, x: Tensor) -> Tensor:
            return self.act(x) * sum(self.sizes)

    def between(module: Any, i: int) -> None:
        if i == 1:
            module.act = torch.cos
        if i == 2:
            module.sizes.append(5)

    same_module(Active, fresh((leaf(3),), 3), between=between)


# hooks


def test_forward_hooks_that_change_the_result() -> None:
    def make() -> nn.Module:
        model = Net()
        model.body[0].register_forward_hook(lambda m, args, out: out * 2)
        model.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
        model.register_forward_hook(lambda m, args, out: out.sin())
        return model

    same_module(make, fresh((leaf(2, 4),), 2))


def test_forward_hooks_added_and_removed_later() -> None:
    handles: dict[int, Any] = {}

    def between(module: Any, i: int) -> None:
        if i == 1:
            handles[id(module)] = module.body[0].register_forward_hook(lambda m, args, out: out * 2)
        if i == 2:
            handles[id(module)].remove()
        if i == 3:
            module.register_forward_hook(lambda m, args, out: out + 1)

    same_module(Net, fresh((leaf(2, 4),), 4), between=between)


def test_a_forward_hook_registered_on_the_compiled_module() -> None:
    compiled = strict(Net())
    x = leaf(2, 4)
    before = compiled(x)
    compiled.register_forward_hook(lambda m, args, out: out * 2)
    assert torch.equal(compiled(x), before * 2)


def test_full_backward_hooks() -> None:
    seen: dict[int, list[Tensor]] = {}

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))

    def between(module: Any, i: int) -> None:
        if i == 0:
            log = seen.setdefault(len(seen), [])
            module[1].register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))
            module.register_full_backward_hook(lambda m, gi, go: log.append(go[0].clone()))

    same_module(make, fresh((leaf(2, 4),), 2), between=between, compile=default)
    assert len(seen[0]) == 2
    assert_equal(seen[0], seen[1])


def test_state_dict_hooks_of_the_original() -> None:
    model = Net()
    model.register_state_dict_post_hook(lambda m, state, prefix, meta: state.update(extra=torch.ones(1)))
    assert list(strict(model).state_dict()) == list(model.state_dict())


# state that a call leaves behind: Dynamo follows it, tracing refuses all but changes in place


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        self.last = x.detach() * 2
        return x * self.count


def test_buffers_that_are_rebound() -> None:
    _, compiled = same_module(Counting, fresh((leaf(3),), 3), compile=default)
    assert compiled.count == 3
    with pytest.raises(aheadgrad.errors.FallbackError, match="changes count"):
        strict(Counting())(leaf(3))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.mul_(0.9).add_(x.detach(), alpha=0.1)
        self.steps += 1
        return x - self.seen


def test_buffers_that_are_changed_in_place() -> None:
    same_module(InPlace, fresh((leaf(3),), 3))


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        self.cache = h.sin()
        return h * 2


def test_a_tensor_kept_on_the_module() -> None:
    """An auxiliary loss is often kept on the module and added afterwards."""
    torch.manual_seed(0)
    eager = Caching()
    other = copy.deepcopy(eager)
    compiled = default(other)
    x = leaf(2, 3)
    for _ in range(2):
        for run, module in ((eager, eager), (compiled, other)):
            module.zero_grad()
            out = run(x)
            assert module.cache is not None
            (out.sum() + module.cache.sum()).backward()
        assert torch.equal(eager.cache, other.cache)  # type: ignore[arg-type]
        assert_same_state(eager, other)
    with pytest.raises(aheadgrad.errors.FallbackError, match="changes cache"):
        strict(Caching())(x)


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.previous: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = x if self.previous is None else x + self.previous
        self.previous = x.detach() * 2
        return out * 1


def test_a_tensor_of_the_last_call() -> None:
    same_module(Remembering, [(leaf(3, seed=i),) for i in range(4)], compile=default)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(x.shape[0], dtype=torch.float32)
        return x * self.table


def test_a_table_made_on_first_use() -> None:
    _, compiled = same_module(Lazy, fresh((leaf(3),), 3), compile=default)
    assert isinstance(compiled.table, Tensor)
    assert torch.equal(compiled.table, torch.arange(3.0))


def test_a_table_made_on_first_use_is_traced_from_the_second_call_on() -> None:
    compiled = aheadgrad.compile(Lazy(), frontend="trace")
    with pytest.warns(aheadgrad.errors.FallbackWarning, match="changes table"):
        compiled(leaf(3))
    assert_equal(compiled(leaf(3)), leaf(3) * torch.arange(3.0))
    assert len(compiled.entries) == 1


class CountingInPython(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def test_a_number_that_the_call_changes_and_uses() -> None:
    eager, model = CountingInPython(), CountingInPython()
    compiled = default(model)
    for _ in range(3):
        assert_equal(eager(leaf(3)), compiled(leaf(3)))
        assert model.calls == eager.calls
    with pytest.raises(aheadgrad.errors.FallbackError, match="changes calls"):
        strict(CountingInPython())(leaf(3))


def test_a_lazy_module() -> None:
    compiled = aheadgrad.compile(nn.LazyLinear(3), frontend="trace")
    with pytest.warns(aheadgrad.errors.FallbackWarning, match="UninitializedParameter"):
        compiled(leaf(2, 4))
    out = compiled(leaf(2, 4))
    assert len(compiled.entries) == 1
    assert out.shape == (2, 3)
    out.sum().backward()


# modules that are closed over


def test_a_function_that_calls_a_module() -> None:
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.3))
    other = copy.deepcopy(eager)
    compiled = strict(lambda x: other(x).sin())
    x = leaf(5, 4)
    for i in range(4):
        for module in (eager, other):
            module.train(i != 2)
        expected, found = step(lambda x: eager(x).sin(), x, seed=i), step(compiled, x, seed=i)
        assert_equal(expected, found, f"call {i}")
        assert_same_state(eager, other)


def test_a_module_as_argument() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    compiled = strict(lambda m, x: m(x) * 2)
    x = leaf(2, 3)
    for module in (first, second, first):
        assert torch.equal(compiled(module, x), module(x) * 2)
    first.weight = nn.Parameter(torch.ones(3, 3))
    assert torch.equal(compiled(first, x), first(x) * 2)
    compiled(second, x).sum().backward()
    assert second.weight.grad is not None


def test_a_bound_method_of_a_module() -> None:
    model = Net()
    compiled = strict(model.forward)
    x = leaf(2, 4)
    assert torch.equal(compiled(x), model(x))
    model.body[0].weight = nn.Parameter(torch.zeros(5, 4))
    assert torch.equal(compiled(x), model(x))
    compiled(x).sum().backward()
    assert model.body[0].weight.grad is not None


def test_a_compiled_module_inside_a_module() -> None:
    torch.manual_seed(0)
    inner = nn.Linear(4, 4)
    outer = nn.Sequential(strict(inner), nn.Tanh())
    x = leaf(2, 4)
    assert torch.equal(outer(x), inner(x).tanh())
    compiled = strict(outer)
    assert torch.equal(compiled(x), inner(x).tanh())
    compiled(x).sum().backward()
    assert inner.weight.grad is not None


def test_functional_call() -> None:
    model = Net()

    def fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, params, (x,))

    compiled = strict(fn)
    x = leaf(2, 4)
    for scale in (1.0, 2.0):
        params = {k: (p.detach() * scale).requires_grad_() for k, p in model.named_parameters()}
        compiled(params, x).sum().backward()
        assert all(p.grad is not None for p in params.values())
        assert torch.equal(compiled(params, x), fn(params, x))


def test_keyword_arguments_of_a_module() -> None:
    model = Net()
    compiled = strict(model)
    x = leaf(2, 4)
    assert torch.equal(compiled(x, scale=2.0), model(x, scale=2.0))
    assert torch.equal(compiled(x=x), model(x))


def test_parameters_in_lists_and_dicts() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ps = nn.ParameterList([nn.Parameter(torch.ones(3) * i) for i in range(3)])
            self.named = nn.ParameterDict({"a": nn.Parameter(torch.ones(3))})
            self.layers = nn.ModuleDict({"x": nn.Linear(3, 3)})

        def forward(self, x: Tensor) -> Tensor:
            for p in self.ps:
                x = x * 2 + p
            return self.layers["x"](x) * self.named["a"]

    same_module(Many, fresh((leaf(2, 3),), 2))


@pytest.mark.parametrize("build", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers_are_compiled_once(build: Any) -> None:
    """They keep a list of their parameters, and look at each call whether those are still the same."""
    model = build(2, 3, num_layers=2)
    compiled = strict(model)
    kept = model._flat_weights
    x = leaf(4, 1, 2)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), model(x))
    assert len(compiled.entries) == 1
    assert model._flat_weights is kept
    assert all(ref() is p for ref, p in zip(model._flat_weight_refs, kept, strict=True))
    model.weight_ih_l0 = nn.Parameter(torch.ones_like(model.weight_ih_l0))
    model(x)  # keeps the new parameter
    for _ in range(2):
        torch.testing.assert_close(compiled(x), model(x))
