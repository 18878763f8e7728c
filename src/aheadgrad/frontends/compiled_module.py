"""A compiled module: looks like the original, runs compiled."""

from __future__ import annotations

from typing import Any

from torch import nn

from aheadgrad.frontends.entries import Compiled


class CompiledModule(nn.Module):
    """Shares the original's parameters, buffers and submodules, under the same names."""

    def __init__(self, original: nn.Module, compiled: Compiled) -> None:
        super().__init__()
        own = self.__dict__
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            own[table] = original.__dict__[table]
        own["_original"] = original
        own["_compiled"] = compiled

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_compiled"](*args, **kwargs)

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

    def explain(self) -> str:
        return str(self._compiled.explain())
