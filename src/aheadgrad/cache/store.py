"""The files of a cache directory: whole or not there, and not more of them than the limit allows.

    store = Store(place, limit)
    store.write("3f2a.entry", data)     # a temporary file that takes the name at once
    store.read("3f2a.entry")            # None if it is gone; one that is damaged is dropped, with a warning

Any number of processes may do so together: the name of an entry is made from what the file holds, so that
whoever writes it writes the same. What was not used for the longest time goes first.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path

from aheadgrad.errors import CacheWarning, InvalidOption
from aheadgrad.report.origins import stacklevel_of_user

_MAGIC = b"aheadgrad cache 1\n"
_HEAD = len(_MAGIC) + 32
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_LIMIT = "1G"


def warn(text: str) -> None:
    warnings.warn(f"aheadgrad's cache: {text}", CacheWarning, stacklevel=stacklevel_of_user())


def place_of(asked: object) -> Path:
    """The directory that `cache=` asks for; with True that of the user, or AHEADGRAD_CACHE_DIR."""
    if asked is not True:
        return Path(os.fspath(asked)).expanduser()  # type: ignore[call-overload]
    named = os.environ.get("AHEADGRAD_CACHE_DIR")
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aheadgrad"


def limit_of_size() -> int:
    """How many bytes a directory may hold: AHEADGRAD_CACHE_SIZE, as `200M`."""
    told = os.environ.get("AHEADGRAD_CACHE_SIZE") or _LIMIT
    number, unit = told.rstrip("kKmMgGbB"), told.rstrip("bB")[-1:].upper()
    try:
        return int(float(number) * _UNITS.get(unit, 1))
    except ValueError:
        raise InvalidOption(
            f"AHEADGRAD_CACHE_SIZE={told!r}: give bytes, or a number with K, M or G."
        ) from None


class Store:
    """One directory."""

    def __init__(self, place: Path, limit: int) -> None:
        self.place, self.limit = place, limit

    def usable(self) -> str:
        """Nothing, or why it is not to be used: what is read there decides what is computed."""
        try:
            self.place.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.place.stat()
        except OSError as error:
            return f"{self.place} cannot be made: {error.strerror}"
        if hasattr(os, "getuid") and found.st_uid != os.getuid():
            return f"{self.place} belongs to another user"
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"others may write to {self.place}: chmod go-w makes it usable"
        return ""

    def read(self, name: str) -> bytes | None:
        path = self.place / name
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if data[: len(_MAGIC)] != _MAGIC or _sum(data[_HEAD:]) != data[len(_MAGIC) : _HEAD]:
            self.drop(name, "it is damaged")
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return data[_HEAD:]

    def write(self, name: str, body: bytes, *, over: bool = False) -> None:
        path = self.place / name
        if path.exists() and not over:
            return
        handle, temporary = tempfile.mkstemp(prefix=".new-", dir=self.place)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_MAGIC + _sum(body) + body)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        self._trim()

    def drop(self, name: str, why: str) -> None:
        warn(f"{name} is dropped, {why}")
        self._remove(self.place / name)

    def names(self, start: str) -> list[str]:
        """Files whose names start like this, the latest first."""
        found = sorted(self._files(), reverse=True)
        return [path.name for _, _, path in found if path.name.startswith(start)]

    def _trim(self) -> None:
        files = sorted(self._files())
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total <= self.limit:
                return
            self._remove(path)
            total -= size

    def _files(self) -> Iterable[tuple[float, int, Path]]:
        """When each was used last, its size, and where it is; others may remove some meanwhile."""
        try:
            found = list(os.scandir(self.place))
        except OSError:
            return
        for one in found:
            try:
                told = one.stat()
            except OSError:
                continue
            if stat.S_ISREG(told.st_mode):
                yield told.st_mtime, told.st_size, Path(one.path)

    @staticmethod
    def _remove(path: Path) -> None:
        with contextlib.suppress(OSError):  # somebody else has
            path.unlink()


def _sum(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()
