"""Exports run as their originals do: results, updates, gradients, aliasing, to the last bit."""

from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aheadgrad.errors import AheadgradError, CaptureError, InvalidOption, UnsupportedInput
from aheadgrad.testing.two import TwoTensor
from tests.export_cases import export

Pair = namedtuple("Pair", "first second")


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


class Mlp(nn.Module):
    """Parameters, buffers that change, one that is tied, one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.tied = self.first.weight
        self.spare = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        h = torch.tanh(self.norm(self.first(x)))
        out = self.last(h) * self.frozen + (h @ self.tied)
        return {"loss": ((out - y) ** 2).mean(), "out": out}


def batch(count: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3), torch.randn(count, 3)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# ---- forward ------------------------------------------------------------------------------------


def test_a_forward_has_names_updates_and_results() -> None:
    model = Mlp()
    exported = export(model, batch())
    signature = exported.signature
    assert signature.kind == "forward"
    assert set(signature.parameters) == set(dict(model.named_parameters()))
    assert next(h.names for h in signature.held if h.name == "tied") == ("tied", "first.weight")
    assert set(signature.buffers) == set(dict(model.named_buffers()))
    assert signature.user_inputs == ("x", "y")
    assert signature.outputs == ("['loss']", "['out']")
    assert set(signature.updated) == {
        "calls",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    for _ in range(3):
        x, y = batch()
        same(exported.run(x, y), {k: v.detach() for k, v in model(x, y).items()})
    same({n: exported.state[n] for n in signature.buffers}, dict(model.named_buffers()))


def test_exporting_changes_nothing_of_the_original() -> None:
    model = Mlp()
    before = copy.deepcopy(model.state_dict())
    export(model, batch(), loss="loss").backward(*batch())
    same(dict(model.state_dict()), dict(before))
    assert all(p.grad is None for p in model.parameters())


def test_results_are_put_together_as_the_original_does() -> None:
    def fn(x: Tensor) -> Any:
        return OrderedDict(a=[x + 1, (x * 2, 3, "word", None)], b=Pair(x.sum(), {"c": x}))

    x = torch.randn(3)
    exported = export(fn, (x,))
    found = exported.run(x)
    assert repr(found) == repr(fn(x))
    assert type(found) is OrderedDict
    assert type(found["b"]) is Pair
    assert found["b"].second["c"] is x
    assert exported.signature.outputs[-2:] == ("['b'].first", "['b'].second['c']")


def test_arguments_may_be_anything_with_keywords_in_any_order() -> None:
    def fn(pair: Any, *, scale: float, bias: Tensor) -> Tensor:
        return pair["a"] * scale + bias + pair["b"][0]

    x = torch.randn(3)
    exported = export(fn, ({"a": x, "b": [x]},), {"scale": 2.0, "bias": x})
    a, b, c = torch.randn(3), torch.randn(3), torch.randn(3)
    exported = export(fn, ({"a": a, "b": [b]},), {"scale": 2.0, "bias": c})
    same(exported.run({"a": b, "b": [c]}, bias=a, scale=2.0), fn({"a": b, "b": [c]}, bias=a, scale=2.0))
    with pytest.raises(UnsupportedInput, match=r"scale is 3\.0; the export was made for 2\.0"):
        exported.run({"a": b, "b": [c]}, bias=a, scale=3.0)
    with pytest.raises(UnsupportedInput, match="not put together"):
        exported.run({"a": b, "b": [c, c]}, bias=a, scale=2.0)
    with pytest.raises(UnsupportedInput, match=r"pair\['a'\] has size \(4,\)"):
        exported.run({"a": torch.randn(4), "b": [c]}, bias=a, scale=2.0)
    with pytest.raises(UnsupportedInput, match=r"bias is torch\.float64"):
        exported.run({"a": b, "b": [c]}, bias=a.double(), scale=2.0)


def test_constants_and_closed_over_tensors_are_held() -> None:
    table = torch.randn(3)

    def fn(x: Tensor) -> Tensor:
        table.add_(1)
        return x * table + torch.tensor([1.0, 2.0, 3.0])

    x = torch.randn(3)
    exported = export(fn, (x,))
    kinds = {h.name: h.kind for h in exported.signature.held}
    assert kinds["table"] == "tensor"
    assert "constant" in kinds.values()
    for _ in range(3):
        same(exported.run(x), fn(x))
    same(exported.state["table"], table)
    assert not any(isinstance(a, Tensor) for op in exported.program.ops for a in op.args)


def test_a_function_of_torchs_and_long_lists() -> None:
    x = torch.randn(3)
    same(export(torch.sin, (x,)).run(x), x.sin())
    many = [torch.full((), float(k)) for k in range(1000)]
    exported = export(lambda x: x + many[7] + many[900], (x,))
    same(exported.run(x), x + 907)
    assert len(exported.signature.held) == 2


# ---- gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("partition", [None, "default", "min_cut"])
def test_five_steps_of_training_are_eagers(partition: str | None) -> None:
    model = Mlp()
    exported = export(model, batch(), loss="loss", partition=partition)
    signature = exported.signature
    assert len(exported.programs) == (1 if partition is None else 2)
    assert signature.loss == 0
    assert set(signature.gradients) == {n for n, _ in model.named_parameters()} - {"spare", "frozen"}
    ours = torch.optim.SGD([p for p in exported.parameters.values() if p.requires_grad], lr=0.1)
    theirs = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(5):
        x, y = batch()
        found = exported.backward(x, y)
        wanted = model(x, y)
        wanted["loss"].backward()
        same(found["loss"], wanted["loss"].detach())
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    same({n: exported.state[n] for n in dict(model.named_parameters())}, dict(model.named_parameters()))


def test_gradients_by_name_and_of_inputs() -> None:
    def fn(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return (x * y).sum(), y.exp()

    x, y, z = torch.randn(3, requires_grad=True), torch.randn(3), torch.randn(3, requires_grad=True)
    for loss in (0, "[0]"):
        step = export(fn, (x, y, z), loss=loss).run(x, y, z)
        same(dict(step.gradients), {"x": y})


def test_several_differentiable_outputs_take_tangents() -> None:
    def fn(x: Tensor, w: Tensor) -> Any:
        h = x @ w
        return h, h.sin().sum(0), w.exp()

    x, w = torch.randn(2, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    tangents = [torch.randn(2, 3), torch.randn(3), torch.randn(3, 3).t()]
    wanted = torch.autograd.grad(fn(x, w), (x, w), tangents)
    for partition in (None, "default", "min_cut"):
        exported = export(fn, (x, w), tangents=True, partition=partition)
        step = exported.call((x, w), tangents=tangents)
        torch.testing.assert_close((step.gradients["x"], step.gradients["w"]), wanted)
        with pytest.raises(InvalidOption, match="takes 3 tangents"):
            exported.run(x, w)


def test_a_loss_that_is_a_view_or_no_loss_at_all() -> None:
    def fn(x: Tensor) -> Any:
        h = (x * x).sum(0)
        return {"parts": h, "loss": h[0], "fixed": x.detach().sum()}

    x = torch.randn(2, 2, requires_grad=True)
    exported = export(fn, (x,), loss="loss")
    step = exported.run(x)
    (wanted,) = torch.autograd.grad(fn(x)["loss"], x)
    same(step.gradients["x"], wanted)
    assert step.output["loss"].data_ptr() == step.output["parts"].data_ptr()
    with pytest.raises(CaptureError, match=r"\['fixed'\]\) does not require grad"):
        export(fn, (x,), loss="fixed")
    with pytest.raises(InvalidOption, match="no single number"):
        export(fn, (x,), loss="parts")
    with pytest.raises(InvalidOption, match=r"loss='los' is no output; .* 1: \['loss'\]"):
        export(fn, (x,), loss="los")


def test_random_numbers_are_drawn_as_eager_draws_them() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def fn(x: Tensor) -> Tensor:
        return model(x).sum() + torch.rand(())

    x = torch.randn(4, 3)
    for partition in (None, "min_cut"):
        exported = export(fn, (x,), loss=0, partition=partition)
        for seed in range(3):
            torch.manual_seed(seed)
            found = exported.run(x)
            torch.manual_seed(seed)
            loss = fn(x)
            grads = torch.autograd.grad(loss, list(model.parameters()))
            same(found.output, loss.detach())
            names = [f"model.{n}" for n, _ in model.named_parameters()]
            same([found.gradients[n] for n in names], list(grads))
        assert len(exported.random_ops) >= 2
        assert "random     drawn by" in str(exported)


def test_arguments_with_a_history_lead_on() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(y)
        return x.square().sum()

    def run(call: Any) -> tuple[Tensor, Tensor, Tensor]:
        leaf, y = torch.arange(3.0, requires_grad=True), torch.ones(3, requires_grad=True)
        x = leaf * 2
        call(x, y)
        return leaf.grad, y.grad, x.detach()  # type: ignore[return-value]

    exported = export(fn, (torch.ones(3, requires_grad=True) * 1, torch.ones(3, requires_grad=True)), loss=0)
    same(run(exported.backward), run(lambda x, y: fn(x, y).backward()))


def test_a_grad_mode_that_is_left_changed() -> None:
    def fn(x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        return x * 2

    try:
        exported = export(fn, (torch.ones(3),))
        torch.set_grad_enabled(True)
        exported.run(torch.ones(3))
        assert not torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)


# ---- what torch's own export refuses ------------------------------------------------------------


def twice(a: Tensor, b: Tensor) -> Any:
    a.mul_(2)
    return a + b


def views(a: Tensor, b: Tensor) -> Any:
    a.add_(1)
    return b * 2


def turned(a: Tensor, b: Tensor) -> Any:
    a.t_()
    b.unsqueeze_(0)
    return a @ a.t(), b


def moved(a: Tensor, b: Tensor) -> Any:
    with torch.no_grad():
        a.set_(b)
    return a + 1


def aliases(a: Tensor, b: Tensor) -> Any:
    h = a.exp()
    return a, a[0], h, h.view(-1), h.view(-1)[1:], a.detach(), b.unbind(0), h


def resized(a: Tensor, b: Tensor) -> Any:
    a.resize_(2)
    return a * 2


def observed(fn: Callable[..., Any], a: Tensor, b: Tensor) -> Any:
    """What a caller sees: results, arguments afterwards, and who shares memory with whom."""
    out = fn(a, b)
    flat = torch.utils._pytree.tree_leaves((out, a, b))
    keys = [t.untyped_storage().data_ptr() for t in flat]
    sharing = [keys.index(k) for k in keys]
    looks = [(tuple(t.shape), t.stride(), t.storage_offset()) for t in flat]
    same_objects = [next(i for i, u in enumerate(flat) if u is t) for t in flat]
    return [t.detach().clone() for t in flat], sharing, looks, same_objects


PLAIN = (lambda: (torch.randn(3, 3), torch.randn(3, 3)),)
CASES: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Tensor, Tensor]]]] = {
    "one tensor twice": (twice, lambda: (lambda t: (t, t))(torch.randn(3))),
    "a view of the other": (views, lambda: (lambda t: (t, t[1:]))(torch.randn(4))),
    "two views that overlap": (views, lambda: (lambda t: (t[:3], t[1:4]))(torch.randn(5))),
    "other dtypes": (views, lambda: (lambda t: (t, t.view(torch.int32)))(torch.randn(4))),
    "turned in place": (turned, lambda: (torch.randn(2, 3), torch.randn(3))),
    "other memory": (moved, lambda: (torch.randn(2), torch.randn(3))),
    "aliases": (aliases, lambda: (torch.randn(3, 3), torch.randn(3, 3))),
    "resized": (resized, lambda: (torch.randn(3), torch.randn(3))),
}


@pytest.mark.parametrize("name", CASES)
def test_aliasing_and_updates_are_expressed(name: str) -> None:
    fn, make = CASES[name]
    exported = export(fn, make())
    for seed in range(2):
        torch.manual_seed(seed)
        found = observed(exported.run, *make())
        torch.manual_seed(seed)
        assert_equal = observed(fn, *make())
        same(found[0], assert_equal[0])
        assert found[1:] == assert_equal[1:]
    assert str(exported)


def test_duplicates_must_be_duplicates() -> None:
    x, y = torch.randn(3), torch.randn(3)
    exported = export(twice, (x, x))
    assert "the same tensor as a" in str(exported)
    with pytest.raises(UnsupportedInput, match="b and a were one tensor"):
        exported.run(x, y)
    with pytest.raises(UnsupportedInput, match="b and a are one tensor"):
        export(twice, (x, y)).run(x, x)


def test_arguments_may_lie_otherwise_where_that_does_not_matter() -> None:
    def fn(x: Tensor) -> Any:
        return x.reshape(-1) * 2, x.t()

    exported = export(fn, (torch.randn(2, 3) + 1,))
    for x in (torch.randn(3, 2).t(), torch.randn(4, 6)[::2, ::2], torch.randn(1, 3).expand(2, 3)):
        found = exported.run(x)
        same(found[0], x.reshape(-1) * 2)
        assert found[1].data_ptr() == x.data_ptr()
        assert found[1].stride() == x.t().stride()


def test_memory_that_matters_is_checked() -> None:
    x, y = torch.randn(4), torch.randn(4)
    exported = export(views, (x, y))
    with pytest.raises(UnsupportedInput, match="b and a share memory, and did not"):
        exported.run(x, x[1:].as_strided((4,), (0,)))
    memory = torch.randn(6)
    exported = export(views, (memory[:3], memory[1:4]))
    with pytest.raises(UnsupportedInput, match="b and a do not share memory, and did"):
        exported.run(x[:3], y[1:])
    with pytest.raises(UnsupportedInput, match=r"b has strides .* offset 2; .* offset 1 only"):
        exported.run(memory[:3], memory[2:5])
    picked = export(lambda x: x.as_strided((2,), (2,), 1) * 1, (torch.randn(4),))
    same(picked.run(x), x[1::2])
    with pytest.raises(UnsupportedInput, match="x has strides"):
        picked.run(torch.randn(8)[::2])


def test_subclasses_are_taken_apart_by_a_recipe() -> None:
    def fn(t: Tensor, w: Tensor) -> Any:
        t.mul_(2)
        return (t * w).sum(), t + 1

    def make() -> TwoTensor:
        return TwoTensor(torch.arange(3.0), torch.ones(3))

    w = torch.randn(3, requires_grad=True)
    exported = export(fn, (make(), w))
    ours, theirs = make(), make()
    found, wanted = exported.run(ours, w), fn(theirs, w)
    assert type(found[1]) is TwoTensor
    for a, b in ((found[0], wanted[0]), (found[1], wanted[1]), (ours, theirs)):
        same((a.a, a.b), (b.a.detach(), b.b.detach()))
    assert "TwoTensor[3] of a, b" in str(exported)


def test_parameters_that_the_function_changes() -> None:
    model = nn.Linear(3, 2)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().sum()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads, strict=True):
                p -= 0.1 * g
        return loss

    x = torch.randn(4, 3)
    exported = export(step, (x,))
    assert exported.signature.updated == ("model.weight", "model.bias")
    for _ in range(3):
        same(exported.run(x), step(x).detach())
    same(exported.state["model.weight"], model.weight)


# ---- sizes that may be any ----------------------------------------------------------------------


def test_sizes_that_may_be_any() -> None:
    model = Mlp()
    exported = export(model, batch(), loss="loss", dynamic_shapes={"x": {0: "batch"}, "y": {0: "batch"}})
    for count in (5, 7, 2):
        x, y = batch(count)
        found, wanted = exported.run(x, y), model(x, y)
        same(found.output, {k: v.detach() for k, v in wanted.items()})
        (grad,) = torch.autograd.grad(wanted["loss"], model.first.bias)
        same(found.gradients["first.bias"], grad)
    with pytest.raises(UnsupportedInput, match="y has size"):
        exported.run(batch(5)[0], batch(6)[1])
    with pytest.raises(UnsupportedInput, match="begin at 2"):
        exported.run(*batch(1))
    assert "dimension 0 of x" in str(exported)


def test_sizes_of_different_names_are_different() -> None:
    def fn(x: Tensor, y: Tensor) -> Any:
        return x.sum(0), y * 2

    exported = export(
        fn, (torch.randn(5, 2), torch.randn(5, 2)), dynamic_shapes={"x": {0: "rows"}, "y": {0: "others"}}
    )
    x, y = torch.randn(3, 2), torch.randn(4, 2)
    same(exported.run(x, y), fn(x, y))
    assert [s.name for s in exported.signature.sizes] == ["rows", "others"]
    with pytest.raises(InvalidOption, match="'rows' is 5 and 6 at once"):
        export(
            fn, (torch.randn(5, 2), torch.randn(6, 2)), dynamic_shapes={"x": {0: "rows"}, "y": {0: "rows"}}
        )


def test_autocast_is_part_of_the_program() -> None:
    model = nn.Linear(3, 3)

    def fn(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = model(x)
        return h.float() @ x.t()

    x = torch.randn(2, 3)
    exported = export(fn, (x,))
    same(exported.run(x), fn(x).detach())
    wanted = exported.run(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same(exported.run(x), wanted)


def test_views_and_conditions_with_sizes_that_may_be_any() -> None:
    def fn(x: Tensor) -> Any:
        half = x.shape[0] // 2
        if x.shape[0] > 4:
            return x[:half], x.reshape(x.shape[0] * 2, -1).sum(0)
        return x[:half], x

    exported = export(fn, (torch.randn(6, 4),), dynamic_shapes={"x": (0,)})
    for count in (6, 10):
        x = torch.randn(count, 4)
        found = exported.run(x)
        same(found, fn(x))
        assert found[0].data_ptr() == x.data_ptr()
    with pytest.raises(UnsupportedInput, match=r"x\.size\(0\) is 4: .* where x\.size\(0\) > 4"):
        exported.run(torch.randn(4, 4))
    with pytest.raises(CaptureError, match="Dimension 0 of x was to be of any size"):
        export(lambda x: x + torch.ones(6, 4), (torch.randn(6, 4),), dynamic_shapes={"x": (0,)})
    for wrong in ({"q": (0,)}, {"x": (2,)}, {"x": 0}, 3):
        with pytest.raises(InvalidOption, match="dynamic_shapes"):
            export(fn, (torch.randn(6, 4),), dynamic_shapes=wrong)


def test_code_is_told_of_the_export() -> None:
    def fn(x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting() and x.sum() > 0:
            return x * 2
        return x * 2

    x = torch.randn(3)
    same(export(fn, (x,)).run(x), x * 2)
    assert not torch.compiler.is_exporting()


# ---- mistakes -----------------------------------------------------------------------------------


def test_what_cannot_be_exported_says_so() -> None:
    x = torch.randn(3)
    with pytest.raises(InvalidOption, match="in a tuple"):
        export(torch.sin, x)  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="partition='most'"):
        export(torch.sin, (x,), partition="most")
    with pytest.raises(AheadgradError, match="value of a tensor"):
        export(lambda x: x + 1 if x.sum() > 0 else x, (x,))
    seen: list[int] = []

    def counts(x: Tensor) -> Tensor:
        seen.append(1)
        return x + len(seen)

    with pytest.raises(CaptureError, match="cannot be exported: the function changes seen"):
        export(counts, (x,))
