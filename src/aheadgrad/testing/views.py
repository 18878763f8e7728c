"""Views of a tensor as text: the expressions that generated programs look at memory with.

>>> view_of(scene, "x")
'x[:, 1:]'
"""

from __future__ import annotations

from aheadgrad.testing.scene import Scene


def pick_dim(scene: Scene, tensor: object) -> int:
    """A dimension of a tensor, counted from either end."""
    dims = max(1, getattr(tensor, "ndim", 1))
    return scene.rng.randrange(-dims, dims)


def spread(scene: Scene, x: str) -> str:
    """``expand``: the one kind of view that eager refuses to write into."""
    tensor = scene.tensor(x)
    sizes = [2 if n == 1 else -1 for n in tensor.shape]
    return f"{x}.expand({', '.join(map(str, [2, *sizes]))})"


def strided(scene: Scene, x: str) -> str | None:
    """``as_strided`` within the memory that the tensor itself covers."""
    tensor = scene.tensor(x)
    if tensor.ndim == 0 or tensor.numel() < 2:
        return None
    if scene.chance(0.5):
        return f"{x}.as_strided({tuple(reversed(tensor.shape))}, {tuple(reversed(tensor.stride()))})"
    sizes, strides = (tensor.shape[-1],), (tensor.stride(-1),)
    return f"{x}.as_strided({sizes}, {strides}, {tensor.storage_offset()})"


def rare_view(scene: Scene, x: str) -> str | None:
    tensor = scene.tensor(x)
    options = [
        f"{x}.detach()",
        f"{x}.detach()",
        f"{x}.data",
        f"torch.no_grad()(lambda: {x}.view_as({x}))()",
        f"{x}.detach().view(-1)",
        f"{x}.expand_as({x})",
        f"torch.broadcast_tensors({x}, {x})[0]",
        spread(scene, x),
    ]
    if tensor.element_size() == 4:
        options.append(f"{x}.view(torch.int32)")
    return scene.choose(options)


def matrix_view(scene: Scene, x: str) -> str:
    return scene.choose(
        (
            f"{x}.t()",
            f"{x}.t()",
            f"{x}.transpose(0, 1)",
            f"{x}.mT",
            f"{x}[:, 0]",
            f"{x}[:, 1:]",
            f"{x}.diagonal()",
            f"{x}[1]",
            f"{x}[:, ::2]",
        )
    )


def slice_view(scene: Scene, x: str) -> str:
    tensor = scene.tensor(x)
    dim = pick_dim(scene, tensor)
    size = tensor.shape[dim]
    return scene.choose(
        (
            f"{x}[0]",
            f"{x}[-1]",
            f"{x}[1:]",
            f"{x}[:-1]",
            f"{x}[::2]",
            f"{x}[..., 0]",
            f"{x}.select({dim}, {size - 1})",
            f"{x}.narrow({dim}, 0, {max(1, size - 1)})",
            f"{x}.chunk(2, {dim})[0]",
            f"{x}.split(1, {dim})[-1]",
            f"{x}.unbind({dim})[0]",
            f"{x}.unfold({dim}, {min(2, size)}, 2)",
            f"torch.tensor_split({x}, 2, {dim})[0]",
        )
    )


def shape_view(scene: Scene, x: str) -> str:
    tensor = scene.tensor(x)
    dims = list(range(tensor.ndim))
    scene.rng.shuffle(dims)
    dim = pick_dim(scene, tensor)
    turned = tuple(reversed(tensor.shape))
    return scene.choose(
        (
            f"{x}.view(-1)",
            f"{x}.reshape(-1)",
            f"{x}.view({turned})",
            f"{x}.reshape({turned})",
            f"{x}.flatten()",
            f"{x}.view_as({x})",
            f"{x}.unsqueeze({dim})",
            f"{x}.unsqueeze(0)",
            f"{x}.squeeze()",
            f"{x}.squeeze({dim})",
            f"{x}[None]",
            f"{x}[:]",
            f"{x}[...]",
            f"torch.ops.aten.alias({x})",
            f"{x}.permute({tuple(dims)})",
            f"{x}.movedim(0, -1)",
        )
    )


def view_of(scene: Scene, x: str, rare: float = 0.1) -> str | None:
    """An expression for a view of ``x``; most are valid."""
    dims = scene.tensor(x).ndim
    if scene.chance(rare):
        return rare_view(scene, x)
    if dims == 0:
        return scene.choose(
            (f"{x}.view(1)", f"{x}[None]", f"{x}.view_as({x})", f"{x}.expand(3)", f"{x}.reshape(1, 1)")
        )
    if scene.chance(0.05):
        return strided(scene, x)
    if dims == 2 and scene.chance(0.4):
        return matrix_view(scene, x)
    return slice_view(scene, x) if scene.chance(0.45) else shape_view(scene, x)


def several_views(scene: Scene, x: str) -> str | None:
    """Several names for the results of one operator that returns several views."""
    tensor = scene.tensor(x)
    if tensor.ndim == 0 or tensor.shape[0] not in (2, 3):
        return None
    names = ", ".join(scene.fresh() for _ in range(tensor.shape[0]))
    return f"{names} = {scene.choose((f'{x}.unbind(0)', f'{x}.split(1)', f'{x}.chunk({tensor.shape[0]})'))}"
