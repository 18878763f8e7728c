"""Files that somebody damaged or forged: each is refused with one kind of error, or loads as something sound.

The attacks run in a process of their own, with little memory to spare, in an empty folder.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import random
import resource
import struct
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aheadgrad
from aheadgrad.errors import ArtifactError
from aheadgrad.export.checking import check_export
from aheadgrad.export.exported import Exported
from aheadgrad.export.file import packed, read, unpacked, write
from aheadgrad.export.trees import Tree
from aheadgrad.program.slots import Saved

NAMES = ("manifest.json", "program.json", "tensors.safetensors")
SPARE = 512 << 20  # bytes


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x)).relu() + torch.tensor([1.0, 2.0, 3.0, 4.0])
        return nn.functional.dropout(h.reshape(-1, 2), 0.5).sum()


def example() -> tuple[Any, dict[str, Tensor]]:
    """An export with sizes of any number, and state in which memory is shared."""
    torch.manual_seed(0)
    sizes = {"x": {0: "batch"}}
    exported = aheadgrad.export(
        Model(), (torch.randn(6, 4),), loss=0, partition="default", dynamic_shapes=sizes
    )
    state = dict(exported.state)
    base = torch.arange(12.0)
    state |= {"view": base[2:8].view(2, 3), "turned": base.view(3, 4).t(), "number": torch.tensor(3 + 4j)}
    state |= {"tied": state["first.weight"], "double": torch.ones(2, dtype=torch.complex128)}
    return exported.stages, state


# ---- files taken apart and put together ------------------------------------------------------


def members(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def compact(tree: Any) -> bytes:
    return json.dumps(tree, separators=(",", ":")).encode()


def sealed(program: bytes, tensors: bytes, **changes: Any) -> bytes:
    """A file with checksums that fit, as an attacker would make it."""
    parts = [
        [n, len(d), hashlib.sha256(d).hexdigest()] for n, d in zip(NAMES[1:], (program, tensors), strict=True)
    ]
    manifest = {
        "format": "aheadgrad",
        "version": 1,
        "torch": torch.__version__.partition("+")[0],
        "members": parts,
    }
    manifest |= changes
    manifest["sha256"] = hashlib.sha256(compact(manifest)).hexdigest()
    return zipped(list(zip(NAMES, (compact(manifest), program, tensors), strict=True)))


def zipped(parts: list[tuple[str, bytes]], kind: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", kind) as archive:
        for name, data in parts:
            info = zipfile.ZipInfo(name)
            info.create_system = 0
            info.compress_type = kind
            archive.writestr(info, data)
    return out.getvalue()


# ---- attacks ---------------------------------------------------------------------------------

Attack = tuple[str, bytes]


def damaged(good: bytes, rng: random.Random) -> Iterator[Attack]:
    """Bits that flip, ends that are missing or too many."""
    for _ in range(80):
        bad = bytearray(good)
        for _ in range(rng.choice((1, 1, 2, 20))):
            bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        yield "bit flip", bytes(bad)
    for _ in range(30):
        yield "truncated", good[: rng.randrange(len(good))]
    for _ in range(10):
        at, length = rng.randrange(len(good)), rng.randrange(1, 200)
        yield "cut out", good[:at] + good[at + length :]
        yield "put in", good[:at] + rng.randbytes(length) + good[at:]


EVIL: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    1 << 40,
    1 << 200,
    1e308,
    "",
    "x; import os",
    "../../evil",
    "aten.from_file.default",
    [],
    {},
    [0],
    [-1],
    [10**9],
    ["tuple"],
    ["list", ["list", ["list"]]],
    ["tensor", 10**9],
    ["tensor", -1],
    ["dtype", "nothing"],
    ["device", "nowhere:7"],
    ["class", "os", "system"],
    ["float", "nan"],
    ["bytes", "zz"],
    ["frozenset", ["list"]],
    ["dict", 1],
    ["size", -3],
    ["slice", 1],
]


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to everything in a tree."""
    if path:
        yield path
    if isinstance(tree, dict | list):
        for k in tree if isinstance(tree, dict) else range(len(tree)):
            yield from places(tree[k], (*path, k))


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    for k in path:
        tree = tree[k]
    return tree


def forged(good: bytes, rng: random.Random) -> Iterator[Attack]:
    """Fields that are exchanged for others, with checksums that fit."""
    parts = members(good)
    tree = json.loads(parts["program.json"])
    every = list(places(tree))
    for k in range(180):
        bad = copy.deepcopy(tree)
        for _ in range(rng.choice((1, 1, 1, 3))):
            *way, last = rng.choice(every)
            try:
                holder = at(bad, tuple(way))
                change(holder, last, bad, every, rng)
            except (KeyError, IndexError, TypeError):
                continue
        yield f"forged {k}", sealed(compact(bad), parts["tensors.safetensors"])


def change(holder: Any, last: Any, tree: Any, every: list[Any], rng: random.Random) -> None:
    kind = rng.choice(("evil", "evil", "swap", "delete", "twice", "number", "reference"))
    if kind == "evil":
        holder[last] = copy.deepcopy(rng.choice(EVIL))
    elif kind == "swap":
        *way, other = rng.choice(every)
        there = at(tree, tuple(way))
        holder[last], there[other] = copy.deepcopy(there[other]), holder[last]
    elif kind == "delete":
        del holder[last]
    elif kind == "twice":
        holder.insert(last, copy.deepcopy(holder[last]))
    elif kind == "number":
        if type(holder[last]) is int:
            holder[last] += rng.choice((-1, 1, 7))
    else:  # to itself, to what comes later, to anything
        holder[last] = [rng.randrange(len(tree["data"]["objects"]) + 3)]


def containers(good: bytes, rng: random.Random) -> Iterator[Attack]:
    """Tricks with the zip."""
    parts = members(good)
    ordered = list(parts.items())
    for name in (
        "../evil",
        "/tmp/evil",
        "C:\\evil",
        "a/../../evil",
        "evil\x00.json",
        "manifest.json/",
        "evil",
    ):
        yield f"extra member {name!r}", zipped([*ordered, (name, b"evil")])
        yield f"renamed to {name!r}", zipped([*ordered[:2], (name, ordered[2][1])])
    for k in range(3):
        yield "missing member", zipped(ordered[:k] + ordered[k + 1 :])
        with pytest.warns(UserWarning, match="Duplicate"):
            twice = zipped([*ordered, ordered[k]])
        yield "member twice", twice
    yield "other order", zipped(ordered[::-1])
    yield "nothing inside", zipped([])
    yield "no zip", b"aheadgrad" * 100
    yield "empty", b""
    yield (
        "bomb",
        zipped([(n, b"0" * (64 << 20) if n == NAMES[1] else d) for n, d in ordered], zipfile.ZIP_DEFLATED),
    )
    for _ in range(6):  # sizes in the directory that are not there
        bad = bytearray(good)
        start = bad.rindex(b"PK\x01\x02")
        struct.pack_into("<II", bad, start + 20, *(rng.choice((0xFFFFFFF0, 1 << 30, 1 << 24)),) * 2)
        yield "huge member", bytes(bad)
    program, tensors = parts[NAMES[1]], parts[NAMES[2]]
    yield "newer version", sealed(program, tensors, version=2)
    yield "version of another kind", sealed(program, tensors, version="1")
    yield "other format", sealed(program, tensors, format="other")
    yield "deep", sealed(b"[" * 100_000, tensors)
    yield "key twice", sealed(program[:-1] + b',"data":1}', tensors)
    yield "numbers without end", sealed(b"1" * 100_000, tensors)
    yield "no text", sealed(b"\xff\xfe", tensors)


def tensor_files(good: bytes, rng: random.Random) -> Iterator[Attack]:
    """Tensors that are not what they say, with checksums that fit."""
    parts = members(good)
    data = parts[NAMES[2]]
    (length,) = struct.unpack("<Q", data[:8])
    header, payload = json.loads(data[8 : 8 + length]), data[8 + length :]
    for _ in range(30):
        bad = copy.deepcopy(header)
        name = rng.choice(list(bad))
        kind = rng.choice(("shape", "offsets", "dtype", "name", "gone"))
        if kind == "shape":
            bad[name]["shape"] = rng.choice(([1 << 40], [1 << 62, 4], [-1], [], [0]))
        elif kind == "offsets":
            bad[name]["data_offsets"] = rng.choice(([0, 1 << 40], [4, 2], [0, 1], [-8, 8]))
        elif kind == "dtype":
            bad[name]["dtype"] = rng.choice(("F64", "U8", "X", 3))
        elif kind == "name":
            bad["../evil"] = bad.pop(name)
        else:
            del bad[name]
        text = compact(bad)
        yield f"tensors: {kind}", sealed(parts[NAMES[1]], struct.pack("<Q", len(text)) + text + payload)
    for size in (0, 1 << 40, (1 << 64) - 1, len(data)):
        yield "tensors: header", sealed(parts[NAMES[1]], struct.pack("<Q", size) + data[8:])
    tree = json.loads(parts[NAMES[1]])
    for row in range(len(tree["tensors"])):
        for value in ([1 << 40], [1 << 61, 1 << 61], [0, 1 << 61]):
            bad = copy.deepcopy(tree)
            bad["tensors"][row][4 + row % 2] = value
            yield "tensors: look", sealed(compact(bad), data)


def attacks(good: bytes) -> Iterator[Attack]:
    for make in (damaged, forged, containers, tensor_files):
        yield from make(good, random.Random(16))


def outcome(name: str, bad: bytes, good: bytes) -> str:
    """What becomes of one file: "refused", "equal" or "sound"; anything else is a finding."""
    started = time.perf_counter()
    try:
        stages, state = unpacked(bad)
        check_export(stages, state)
    except ArtifactError as error:
        found = "refused" if len(str(error)) < 2000 else "an endless message"
    except BaseException as error:
        found = f"{type(error).__name__}: {error}"
    else:
        assert str(Exported(stages, state))
        made = packed(stages, state)
        found = (
            "equal"
            if made == good
            else "sound"
            if name.startswith(("forged", "tensors"))
            else "loaded as another"
        )
        found = found if packed(*unpacked(made)) == made else "not the same when it is written again"
    return found if time.perf_counter() - started < 2 else f"{found}, but it took too long"


def main(good: bytes) -> dict[str, Any]:
    same = packed(*example()) == good
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    bad = list(attacks(good))
    resource.setrlimit(resource.RLIMIT_AS, (size + sum(len(b) for _, b in bad) + SPARE,) * 2)
    counts: Counter[str] = Counter()
    findings = []
    for name, data in bad:
        found = outcome(name, data, good)
        counts[found if found in ("refused", "equal", "sound") else "wrong"] += 1
        if found not in ("refused", "equal", "sound"):
            findings.append([name, found[:500]])
    return {"counts": counts, "findings": findings, "same": same}


def test_300_damaged_and_forged_files(tmp_path: Path) -> None:
    good = tmp_path / "outside" / "good"
    good.parent.mkdir()
    write(good, *example())
    inside = tmp_path / "inside"
    inside.mkdir()
    code = "import sys, json; from tests.test_artifact_attacks import main; "
    code += "print(json.dumps(main(open(sys.argv[1], 'rb').read())))"
    root = str(Path(__file__).parents[1])
    environment = {"PYTHONPATH": ":".join([root, *sys.path]), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(good)], cwd=inside, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["same"], "the same program in another process gives other bytes"
    assert found["findings"] == []
    assert sum(found["counts"].values()) >= 300
    assert found["counts"]["refused"] >= 250
    assert list(inside.iterdir()) == []
    assert [p.name for p in good.parent.iterdir()] == ["good"]


def test_a_folder_or_device_is_no_file(tmp_path: Path) -> None:
    for path in (tmp_path, Path("/dev/zero")):
        with pytest.raises(ArtifactError, match="thing that is no file"):
            read(path)
    with pytest.raises(ArtifactError, match="nothing is not there"):
        read(tmp_path / "nothing")


def test_a_file_is_what_was_written(tmp_path: Path) -> None:
    value, state = example()
    path = tmp_path / "file"
    write(path, value, state)
    made, held = read(path)
    assert str(Exported(made, held)) == str(Exported(value, state))
    assert list(held) == list(state)
    for name, t in state.items():
        torch.testing.assert_close(held[name], t, rtol=0, atol=0)
        assert held[name].stride() == t.stride(), name
        assert held[name].requires_grad == t.requires_grad
    assert held["tied"] is held["first.weight"]
    held["view"].zero_()
    assert held["turned"].t().flatten().tolist() == [0, 1, 0, 0, 0, 0, 0, 0, 8, 9, 10, 11]
    assert packed(*read(path)) == path.read_bytes()


def test_memory_that_a_call_takes_away() -> None:
    """The next one would read what is not there."""
    seen = torch.zeros(3)
    exported = aheadgrad.export(lambda x: seen.add_(x).sum(), (torch.ones(3),))
    (stage,) = exported.stages
    facts = stage.signature.facts
    gone = tuple(f if f.untouched else replace(f, final_bytes=0) for f in facts.inputs)
    signature = replace(stage.signature, facts=replace(facts, inputs=gone))
    with pytest.raises(ArtifactError, match="takes the memory of seen away"):
        check_export((replace(stage, signature=signature),), exported.state)


def with_role(program: bytes, role: str) -> bytes:
    """A program's role is the name of a function in generated code."""
    tree = json.loads(program)
    kind = [name for name, *_ in tree["data"]["kinds"]].index("Program")
    for row in tree["data"]["objects"]:
        row[1] = role if row[0] == kind else row[1]
    return compact(tree)


def test_what_would_fail_when_it_is_run() -> None:
    """Names and keys that fit in type, and to nothing else."""
    value, state = example()
    (stage,) = value
    check_export(value, state)
    signature, (forward, backward) = stage.signature, stage.programs
    port = next(p for p in backward.inputs if isinstance(p.slot, Saved))
    other = replace(port, slot=Saved("another"))
    ports = tuple(other if p is port else p for p in backward.inputs)
    for broken, message in (
        (replace(stage, programs=(forward, replace(backward, inputs=ports))), "the forward does not save"),
        (
            replace(stage, signature=replace(signature, returns=Tree("dict", (signature.returns,)))),
            "a dict with other keys",
        ),
    ):
        with pytest.raises(ArtifactError, match=message):
            check_export((broken,), state)


WRONG: list[tuple[Callable[[dict[str, bytes]], bytes], str]] = [
    (lambda m: sealed(m[NAMES[1]], m[NAMES[2]], version=2), "version 2.*Update aheadgrad"),
    (lambda m: sealed(m[NAMES[1]], m[NAMES[2]])[:-30], "or a part of one"),
    (lambda m: zipped([*m.items(), ("../evil", b"")]), "has the members"),
    (
        lambda m: sealed(with_role(m[NAMES[1]], "a(b):pass\nexit()\ndef\tc"), m[NAMES[2]]),
        "what a program is for",
    ),
    (lambda m: sealed(with_role(m[NAMES[1]], "def"), m[NAMES[2]]), "what a program is for"),
    (lambda m: zipped([(n, d.replace(b"relu", b"rely")) for n, d in m.items()]), "altered or damaged"),
]


@pytest.mark.parametrize(("make", "message"), WRONG, ids=[message for _, message in WRONG])
def test_errors_say_what_is_wrong(make: Callable[[dict[str, bytes]], bytes], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        unpacked(make(members(packed(*example()))))
