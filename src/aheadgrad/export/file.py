"""Files: one zip of JSON and safetensors for frozen values and the tensors beside them (`docs/format.md`).

    write("model.ag", value, {"weight": w})
    value, state = read("model.ag")

A file may come from anybody. It is read in one order, each step before the next relies on it: the members and
their sizes, the version, the checksums, tensors, objects, programs. Nothing in it is executed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aheadgrad.codec.decoding import decode, parsed
from aheadgrad.codec.encoding import Encoded, encode
from aheadgrad.codec.tensors import restore, store
from aheadgrad.errors import ArtifactError, InvalidOption
from aheadgrad.torchlayer.subclasses import Bundle, build, form_of, is_foreign, parts_of

FORMAT, VERSION = "aheadgrad", 1
_MANIFEST, _PROGRAM, _TENSORS = "manifest.json", "program.json", "tensors.safetensors"
_MEMBERS = (_MANIFEST, _PROGRAM, _TENSORS)
_SMALL = 1 << 20  # bytes: no manifest is larger


def write(path: str | os.PathLike[str], value: Any, state: Mapping[str, Tensor]) -> None:
    """Frozen values, and tensors by name, in one file: there is no half of one, whatever happens."""
    target = _path(path)
    if target.is_dir() or not target.parent.is_dir():
        what = "is a directory" if target.is_dir() else "is in a directory that is not there"
        raise ArtifactError(f"{path} {what}: give the path of a file in one that is.")
    data = packed(value, state)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.write_bytes(data)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def read(
    path: str | os.PathLike[str], *, trust: Collection[str] = (), here: bool = True
) -> tuple[Any, dict[str, Tensor]]:
    """The values and tensors of a file; ArtifactError says what is wrong with it.

    `trust` names namespaces of custom ops that it may use. Without `here` tensors stay on the CPU.
    """
    source = _path(path)
    if not source.is_file():
        there = "is a directory, or another thing that is no file" if source.exists() else "is not there"
        raise ArtifactError(f"{path} {there}: give the path of a file that exported.save(path) wrote.")
    return unpacked(source.read_bytes(), trust=trust, here=here)


def _path(path: Any) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise InvalidOption(f"path is a {type(path).__name__}: give the path of a file.")
    return Path(path)


def packed(value: Any, state: Mapping[str, Tensor]) -> bytes:
    """The bytes of a file; the same for the same values."""
    held = {n: Bundle(form_of(t), tuple(parts_of(t))) if is_foreign(t) else t for n, t in state.items()}
    encoded = encode({"value": value, "state": held})
    names: dict[int, str] = {}
    places = {id(t): k for k, t in enumerate(encoded.tensors)}
    for name, t in held.items():
        if id(t) in places:
            names.setdefault(places[id(t)], name)
    tensors, rows = store(encoded.tensors, names)
    program = _json({"data": encoded.tree, "tensors": rows})
    members = {_PROGRAM: program, _TENSORS: tensors}
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "torch": torch.__version__.partition("+")[0],
        "members": [[name, len(data), _digest(data)] for name, data in members.items()],
    }
    return _zipped({_MANIFEST: _json({**manifest, "sha256": _digest(_json(manifest))}), **members})


def unpacked(data: bytes, *, trust: Collection[str] = (), here: bool = True) -> tuple[Any, dict[str, Tensor]]:
    """The values and tensors of a file, given as bytes."""
    members = _checked(data)
    tree = parsed(members[_PROGRAM])
    if type(tree) is not dict or list(tree) != ["data", "tensors"]:
        raise ArtifactError(f"{_PROGRAM} has no data and tensors.")
    tensors = restore(members[_TENSORS], tree["tensors"], here=here)
    found = decode(Encoded(tree["data"], tuple(tensors)), trust)
    if type(found) is not dict or list(found) != ["value", "state"] or type(found["state"]) is not dict:
        raise ArtifactError("The file has no value and state.")
    return found["value"], {_named(name): _whole(t) for name, t in found["state"].items()}


def _named(name: Any) -> str:
    if type(name) is not str:
        raise ArtifactError("A tensor's name is no text.")
    return name


def _whole(held: Any) -> Tensor:
    """A tensor of the state; subclasses are put together by their class, which is imported already."""
    if type(held) is Bundle and all(isinstance(p, Tensor) for p in held.parts):
        try:
            return build(held.form, iter(held.parts))
        except Exception as error:
            raise ArtifactError(f"A {held.form.kind} cannot be put together: {error}") from error
    if not isinstance(held, Tensor):
        raise ArtifactError("The state has something that is no tensor.")
    return held


# ---- the container ---------------------------------------------------------------------------


def _json(tree: Any) -> bytes:
    return json.dumps(tree, separators=(",", ":"), allow_nan=False).encode()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _zipped(members: dict[str, bytes]) -> bytes:
    """Stored as they are, in this order and without dates."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            info = zipfile.ZipInfo(name)
            info.create_system = 0
            archive.writestr(info, data)
    return out.getvalue()


def _checked(data: bytes) -> dict[str, bytes]:
    """The members, if they are those that the manifest tells of."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return _members(archive, len(data))
    except ArtifactError:
        raise
    except Exception as error:  # of zipfile's, which knows many ways to be disappointed
        raise ArtifactError(f"This is no file of aheadgrad's, or a part of one: {error}") from error


def _members(archive: zipfile.ZipFile, size: int) -> dict[str, bytes]:
    infos = archive.infolist()
    for info in infos:
        stored = info.compress_type == zipfile.ZIP_STORED and info.file_size == info.compress_size
        if not stored or info.flag_bits & 1 or info.header_offset + info.file_size > size:
            raise ArtifactError("A member of the file is compressed, encrypted or larger than the file.")
    if not infos or infos[0].filename != _MANIFEST or infos[0].file_size > _SMALL:
        raise ArtifactError(f"This is no file of aheadgrad's: it does not begin with a {_MANIFEST}.")
    manifest = _manifest(archive.read(infos[0]))
    names = [info.filename for info in infos]
    if names != list(_MEMBERS):
        shown = ", ".join(name[:80] for name in names[:8])
        raise ArtifactError(f"A file has the members {', '.join(_MEMBERS)}, once each; this has {shown}.")
    found = {info.filename: archive.read(info) for info in infos[1:]}
    if manifest["members"] != [[name, len(data), _digest(data)] for name, data in found.items()]:
        raise ArtifactError("The file was altered or damaged: its checksums do not fit. Get it again.")
    return found


def _manifest(text: bytes) -> dict[str, Any]:
    told = parsed(text)
    if type(told) is not dict or told.get("format") != FORMAT:
        raise ArtifactError("This is no file of aheadgrad's.")
    version = told.get("version")
    if type(version) is not int or version < 1:
        raise ArtifactError("The file does not tell its version.")
    if version > VERSION:
        raise ArtifactError(
            f"The file is of version {version}; this aheadgrad reads {VERSION}. Update aheadgrad to load it."
        )
    rest = {k: v for k, v in told.items() if k != "sha256"}
    if list(told) != ["format", "version", "torch", "members", "sha256"] or _json(told) != text:
        raise ArtifactError(f"{_MANIFEST} is not as aheadgrad writes it.")
    if told["sha256"] != _digest(_json(rest)):
        raise ArtifactError("The file was altered or damaged: its checksums do not fit. Get it again.")
    return told
