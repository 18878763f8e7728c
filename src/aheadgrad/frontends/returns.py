"""What a compiled call gives back: the flat outputs in the user's structure, and what it leaves behind."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from aheadgrad.frontends.places import Given
from aheadgrad.frontends.results import Kept, is_copied, replaced
from aheadgrad.runtime.emit import Namespace
from aheadgrad.torchlayer import trees as pytree
from aheadgrad.torchlayer.trees import children


@dataclass(frozen=True, eq=False)
class Left:
    """A result, what is still to be put into the caller's lists and dictionaries, and which it has."""

    result: Any
    contents: list[tuple[Given, Any]]
    kept: Sequence[Kept]


def leave(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = call(args, kwargs)
    if not isinstance(out, Left):
        return out
    for place, value in out.contents:
        place.put((args, kwargs), value)
    result = out.result
    for part in out.kept:
        result = replaced(result, part.path, part.find((args, kwargs)))
    return result


def return_text(
    changed: list[Callable[[Any], None] | Given],
    kept: Sequence[Kept],
    spec: Any,
    texts: list[str],
    names: Namespace,
) -> str:
    """The flat outputs in the user's structure; what the run rebinds is bound again."""
    texts = [f"{t}.copy()" if is_copied(names.values.get(t)) else t for t in texts]
    if not changed and not kept:
        return _structure_text(children(spec)[0], iter(texts), names)

    def finish(outs: list[Any]) -> Any:
        result, values = pytree.tree_unflatten(outs, spec)
        contents = []
        for put, value in zip(changed, values, strict=True):
            if isinstance(put, Given):
                contents.append((put, value))
            else:
                put(value)
        return Left(result, contents, kept) if contents or kept else result

    return f"{names.name(finish, 'finish')}([{', '.join(texts)}])"


def _structure_text(spec: Any, texts: Iterator[str], names: Namespace) -> str:
    if spec.is_leaf():
        return next(texts)
    if spec.type is tuple:
        return f"({''.join(f'{_structure_text(c, texts, names)}, ' for c in children(spec))})"
    if spec.type is list:
        return f"[{', '.join(_structure_text(c, texts, names) for c in children(spec))}]"
    if spec.type is dict:
        keys = [names.literal(key) for key in spec.context]
        parts = [_structure_text(c, texts, names) for c in children(spec)]
        return "{" + ", ".join(f"{k}: {p}" for k, p in zip(keys, parts, strict=True)) + "}"
    leaves = ", ".join(next(texts) for _ in range(spec.num_leaves))
    rebuild = functools.partial(pytree.tree_unflatten, treespec=spec)
    return f"{names.name(rebuild, 'rebuild')}([{leaves}])"
