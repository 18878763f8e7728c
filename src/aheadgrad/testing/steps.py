"""The lines that generated programs are made of: one function per kind, ``Scene -> text``.

A function looks at the values on the scene and writes a line that fits them, or gives up with None.
Lines need not be valid, only likely to be: the writer tries them out.

    >>> WRITERS["inplace"](scene)
    'a.mul_(b)'
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from aheadgrad.testing.scene import Scene, is_guarded_leaf, requires_grad
from aheadgrad.testing.views import pick_dim, several_views, view_of

Writer = Callable[[Scene], "str | None"]


def templates(text: str) -> tuple[str, ...]:
    """The templates in a block of text, separated by semicolons."""
    return tuple(part.strip() for part in text.split(";"))


UNARY = templates("""
    {x}.sin(); {x}.cos(); {x}.tanh(); {x}.sigmoid(); {x}.relu(); {x}.exp(); {x}.neg(); {x}.abs();
    {x}.square(); -{x}; {x} ** 2; {x}.cumsum(0); {x}.softmax(-1); {x}.log_softmax(0); {x}.abs().sqrt();
    {x}.reciprocal(); {x}.flip(0); {x}.roll(1, 0); {x}.tril(); {x}.round(); {x}.sign();
    {x}.clamp(-0.5, 0.5); {x}.sort(0).values; torch.nn.functional.gelu({x}); torch.nn.functional.silu({x});
    torch.nn.functional.softplus({x}); torch.nn.functional.layer_norm({x}, {x}.shape[-1:]);
    {x}.lerp({x}.detach(), 0.3); torch.atleast_2d({x}); torch.complex({x}, {x});
    torch.complex({x}, {x} * 2).abs()
""")
BINARY = templates("""
    {x} + {y}; {x} - {y}; {x} * {y}; {x} / ({y}.abs() + 1); torch.maximum({x}, {y});
    torch.where({x} > {y}, {x}, {y}); torch.where({x} > 0, {x}, {y}); torch.add({x}, {y}, alpha=2);
    torch.addcmul({x}, {x}, {y}); {x}.lerp({y}, 0.25); torch.hypot({x}, {y}); {x}.mul({y}.detach());
    torch.stack([{x}, {x} * {y}]); torch.outer({x}.flatten(), {y}.flatten())
""")
SCALAR = templates("""
    {x} * {n}; {x} + {n}; {n} - {x}; {x} / {n}; {x}.add({n}); torch.where({x} > {n}, {x}, {n})
""")
REDUCTIONS = templates("""
    {x}.sum(); {x}.mean(); {x}.sum({d}); {x}.mean({d}); {x}.sum({d}, keepdim=True); {x}.amax({d});
    {x}.max({d}).values; {x}.argmax({d}); {x}.prod(); {x}.logsumexp({d}); {x}.norm();
    {x}.var({d}, correction=0)
""")
SELF_WRITES = templates("""
    {x}.mul_({n}); {x}.add_({n}); {x}.sub_({n}); {x}.div_(2); {x}.fill_({n}); {x}.zero_(); {x}.relu_();
    {x}.sin_(); {x}.sigmoid_(); {x}.tanh_(); {x}.neg_(); {x}.clamp_(-1, 1); {x}.cumsum_(0); {x}.square_();
    {x}.pow_(2); {x}.abs_(); {x}[0] = {n}; {x}[..., 1:] = {n}; {x}[{x} > 0] = {n};
    {x}.masked_fill_({x} > 0, {n}); {x}.index_fill_(0, torch.tensor([0]), {n});
    {x}[torch.tensor([0])] = {n}; {x}[1:] *= {n}; {x} *= {n}; {x} += {n}; {x}.detach().add_({n});
    {x}.data.mul_({n}); {x}.detach().zero_(); {x}.diagonal().fill_({n}); {x}[0].mul_({n});
    {x}.transpose(0, -1).mul_({n}); {x}.view(-1)[0] = {n}; {x}.unsqueeze(0).exp_();
    {x}.chunk(2)[0].mul_({n}); {x}.unbind(0)[0].add_({n}); torch.nn.functional.relu({x}, inplace=True)
""")
OTHER_WRITES = templates("""
    {x}.add_({y}); {x}.mul_({y}); {x}.copy_({y}); {x}.sub_({y}, alpha=2); {x} += {y}; {x} *= {y};
    {x}[...] = {y}; {x}[:] = {y}; {x}.addcmul_({y}, {y}); {x}.lerp_({y}, 0.5); {x}.detach().copy_({y});
    {x}.data.add_({y}); {x}.copy_({y}.detach())
""")
ROW_WRITES = templates("""
    {x}[0] = {y}; {x}[-1].copy_({y}); {x}[0].add_({y}); {x}.select(0, 0).mul_({y});
    {x}.index_put_((torch.tensor([0]),), {y});
    {x}.index_put_((torch.tensor([0, 0]),), {y}, accumulate=True);
    {x}.index_add_(0, torch.tensor([0]), {y}.unsqueeze(0));
    {x}.index_copy_(0, torch.tensor([0]), {y}.unsqueeze(0))
""")
OUT_WRITES = templates("""
    torch.add({x}, 1.5, out={z}); torch.sin({x}, out={z}); torch.mul({x}, 2.0, out={z})
""")


def number(scene: Scene) -> str:
    """A Python number, sometimes the one that was passed in."""
    if "s" in scene.values and scene.chance(0.4):
        return "s"
    return scene.choose(("2.0", "0.5", "-1.0", "3.0", "2", "1.5"))


def is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point()


def can_write(scene: Scene) -> Callable[[Tensor], bool]:
    """Eager refuses to write into leaves that require grad; expect it to, but not always."""
    if scene.chance(0.03):
        return lambda tensor: True
    return lambda tensor: is_real(tensor) and not is_guarded_leaf(tensor)


def broadcasts_into(shape: Sequence[int]) -> Callable[[Tensor], bool]:
    def fits(tensor: Tensor) -> bool:
        other = tensor.shape
        pairs = zip(reversed(shape), reversed(other), strict=False)
        return len(other) <= len(shape) and all(b in (1, a) for a, b in pairs)

    return fits


def unary(scene: Scene) -> str | None:
    x = scene.pick(is_real if scene.chance(0.97) else None)
    return x and f"{scene.fresh()} = {scene.choose(UNARY).format(x=x)}"


def binary(scene: Scene) -> str | None:
    x = scene.pick()
    if x is None:
        return None
    if scene.chance(0.3):
        return f"{scene.fresh()} = {scene.choose(SCALAR).format(x=x, n=number(scene))}"
    y = scene.pick(broadcasts_into(scene.tensor(x).shape), x)
    if y is None:
        return None
    x, y = (y, x) if scene.chance(0.3) else (x, y)
    return f"{scene.fresh()} = {scene.choose(BINARY).format(x=x, y=y)}"


def reduction(scene: Scene) -> str | None:
    x = scene.pick(is_real)
    if x is None:
        return None
    return f"{scene.fresh()} = {scene.choose(REDUCTIONS).format(x=x, d=pick_dim(scene, scene.tensor(x)))}"


def matmul(scene: Scene) -> str | None:
    x = scene.pick(lambda t: is_real(t) and t.dim() == 2)
    if x is None:
        return None
    columns = scene.tensor(x).shape[1]
    y = scene.pick(lambda t: is_real(t) and 1 <= t.dim() <= 2 and t.shape[0] == columns)
    return f"{scene.fresh()} = {x} @ {y}" if y else f"{scene.fresh()} = {x} @ {x}.t()"


def view(scene: Scene) -> str | None:
    x = scene.pick()
    if x is None:
        return None
    if scene.chance(0.12):
        return several_views(scene, x)
    text = view_of(scene, x)
    return text and f"{scene.fresh()} = {text}"


def inplace(scene: Scene) -> str | None:
    x = scene.pick(can_write(scene))
    if x is None:
        return None
    target, n = scene.tensor(x), number(scene)
    if scene.chance(0.5):
        return scene.choose(SELF_WRITES).format(x=x, n=n)
    if target.dim() > 0 and target.shape[0] > 0 and scene.chance(0.35):
        y = scene.pick(broadcasts_into(target.shape[1:]), x)
        return y and scene.choose(ROW_WRITES).format(x=x, y=y)
    y = scene.pick(broadcasts_into(target.shape), x)
    return y and scene.choose(OTHER_WRITES).format(x=x, y=y)


def out_variant(scene: Scene) -> str | None:
    z = scene.pick(lambda t: is_real(t) and not requires_grad(t))
    if z is None:
        return None
    shape = scene.tensor(z).shape
    x = scene.pick(lambda t: t.shape == shape, z)
    return x and scene.choose(OUT_WRITES).format(x=x, z=z)


def metadata(scene: Scene) -> str | None:
    x = scene.pick(can_write(scene))
    if x is None:
        return None
    dims = scene.tensor(x).dim()
    options = [f"{x}.unsqueeze_(0)", f"{x}.squeeze_()", f"{x}.unsqueeze_(-1)"]
    if dims >= 2:
        options += [f"{x}.transpose_(0, {dims - 1})", f"{x}.transpose_(0, 1)", f"{x}.swapaxes_(0, -1)"]
    if dims == 2:
        options += [f"{x}.t_()"] * 3
    if dims == 1 and scene.tensor(x).numel() > 1:
        size, stride = scene.tensor(x).numel(), scene.tensor(x).stride(0)
        options += [
            f"{x}.as_strided_(({size - 1},), ({stride},))",
            f"{x}.as_strided_(({size}, 1), ({stride}, 1))",
        ]
    return scene.choose(options)


def autograd_flag(scene: Scene) -> str | None:
    x = scene.pick(is_real)
    fresh = f"{scene.fresh()} = {x}.detach().requires_grad_()"
    return x and scene.choose((f"{x}.detach_()", f"{x}.requires_grad_()", fresh))


def copy(scene: Scene) -> str | None:
    x = scene.pick()
    if x is None:
        return None
    shape = scene.tensor(x).shape
    y = scene.pick(lambda t: t.shape == shape, x)
    expressions = (
        f"{x}.clone()",
        f"{x}.contiguous()",
        f"{x}.to(torch.float64)",
        f"{x}.float()",
        f"{x}.to({x}.dtype)",
        f"torch.cat([{x}, {y}])",
        f"torch.stack([{x}, {y}])",
        f"torch.cat([{x}, {x}], -1)",
        f"{x}.index_select(0, torch.tensor([0, 0]))",
        f"{x}[[0, -1]]",
        f"{x}[..., torch.tensor([1, 0])]",
        f"{x}.gather(0, torch.zeros({tuple(shape)}, dtype=torch.long))",
        f"{x}.clone().detach()",
        f"{x}.repeat({', '.join(['2'] * max(1, len(shape)))})",
    )
    return f"{scene.fresh()} = {scene.choose(expressions)}"


def factory(scene: Scene) -> str | None:
    x = scene.pick()
    if x is None:
        return None
    expressions = (
        f"torch.ones_like({x})",
        f"torch.zeros({tuple(scene.tensor(x).shape)})",
        f"{x}.new_ones({tuple(scene.tensor(x).shape)})",
        "torch.tensor(2.5)",
        "torch.arange(3.0)",
        f"torch.full_like({x}, 0.25)",
        f"{x} > 0",
    )
    return f"{scene.fresh()} = {scene.choose(expressions)}"


def rand(scene: Scene) -> str | None:
    x = scene.pick(is_real)
    if x is None:
        return None
    shape = tuple(scene.tensor(x).shape)
    options = (
        f"{scene.fresh()} = torch.rand_like({x})",
        f"{scene.fresh()} = torch.nn.functional.dropout({x}, 0.5)",
        f"{scene.fresh()} = torch.randn({shape})",
        f"{scene.fresh()} = {x} * torch.bernoulli(torch.full({shape}, 0.5))",
    )
    return scene.choose(options)


def grad_mode(scene: Scene) -> str | None:
    return scene.choose(("torch.set_grad_enabled(False)", "torch.set_grad_enabled(True)"))


def storage(scene: Scene) -> str | None:
    """Changes of what memory a tensor stands for: only on request."""
    x = scene.pick(can_write(scene))
    if x is None:
        return None
    dtype = scene.tensor(x).dtype
    y = scene.pick(lambda t: t.dtype == dtype)
    return scene.choose((f"{x}.set_({y}.detach())", f"{x}.data = {y}.detach().clone()", f"{x}.resize_(2)"))


WRITERS: dict[str, Writer] = {
    "unary": unary,
    "binary": binary,
    "reduction": reduction,
    "matmul": matmul,
    "view": view,
    "inplace": inplace,
    "out": out_variant,
    "metadata": metadata,
    "autograd_flag": autograd_flag,
    "copy": copy,
    "factory": factory,
    "random": rand,
    "grad_mode": grad_mode,
    "storage": storage,
}

WEIGHTS: dict[str, float] = {
    "unary": 16,
    "binary": 18,
    "reduction": 5,
    "matmul": 3,
    "view": 22,
    "inplace": 24,
    "out": 1,
    "metadata": 4,
    "autograd_flag": 0.6,
    "copy": 8,
    "factory": 3,
    "random": 1.5,
    "grad_mode": 0.3,
    "storage": 0,
}
