"""The last line of an entry: flat outputs in the structure that the user's function returned."""

from __future__ import annotations

import functools
from itertools import islice
from typing import Any

from aheadgrad.emit.script import Namespace
from aheadgrad.torchlayer import trees as pytree

_BRACKETS = {tuple: "({})", list: "[{}]", dict: "{{{}}}"}


def return_text(spec: Any, texts: list[str], names: Namespace) -> str:
    """The flat outputs in the user's structure."""
    if spec.is_leaf():
        return texts[0]
    if spec.type not in _BRACKETS:
        rebuild = functools.partial(pytree.tree_unflatten, treespec=spec)
        return f"{names.name(rebuild, 'rebuild')}([{', '.join(texts)}])"
    rest = iter(texts)
    parts = [return_text(c, list(islice(rest, c.num_leaves)), names) for c in pytree.children(spec)]
    if spec.type is dict:
        parts = [f"{names.literal(key)}: {part}" for key, part in zip(spec.context, parts, strict=True)]
    return _BRACKETS[spec.type].format("".join(f"{part}, " for part in parts))
