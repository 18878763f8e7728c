"""A compiled module: looks like the original, runs compiled."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from aheadgrad.frontends.entries import Compiled
from aheadgrad.frontends.guards import MISS


class CompiledModule(nn.Module):
    """Shares the original's parameters, buffers and submodules, under the same names."""

    def __init__(self, original: nn.Module, compiled: Compiled) -> None:
        super().__init__()
        own = self.__dict__
        for name, value in original.__dict__.items():  # tensors, submodules and hooks are shared
            if isinstance(value, dict | set) and name in own:
                own[name] = value
        own["_original"] = original
        own["_compiled"] = compiled

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiled = self.__dict__["_compiled"]
        for call in compiled.calls:  # as `Compiled.__call__`, without the way there
            out = call(args, kwargs)
            if out is not MISS:
                return out
        return compiled.miss(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        original = copy.deepcopy(self.__dict__["_original"], memo)
        return CompiledModule(original, Compiled(original, self.__dict__["_compiled"].options))

    def __setattr__(self, name: str, value: Any) -> None:
        """What is set here is set on the original, which runs."""
        if "_original" in self.__dict__:
            setattr(self.__dict__["_original"], name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__dict__["_original"], name)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_original"], name)

    @property
    def training(self) -> bool:
        return bool(self.__dict__["_original"].training)

    @training.setter
    def training(self, mode: bool) -> None:
        if "_original" in self.__dict__:
            self.__dict__["_original"].training = mode

    @property
    def source(self) -> str:
        return str(self._compiled.source)

    @property
    def fallbacks(self) -> dict[str, int]:
        return dict(self._compiled.fallbacks)

    @property
    def entries(self) -> Any:
        return self._compiled.entries

    @property
    def misses(self) -> Any:
        return self._compiled.misses

    def explain(self) -> str:
        return str(self._compiled.explain())
