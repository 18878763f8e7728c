"""One call looked up in the cache: before it is recorded, after that, and when an entry is made.

Two kinds of files are kept. An *entry* has the joint program and how it was split; its name is a digest of
the program, the options, versions and devices. A *call* says which entry serves a call of some function: its
name is a digest of everything that can be asked before recording, and it holds the proof that a recording
would come out the same (`proof`).

    find          a call whose proof holds: nothing is recorded
    same_program  the call was recorded; an entry for the same program: nothing is partitioned
    keep          both are written

`reason` says why a call was not found.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from aheadgrad.cache.code import digest, whose
from aheadgrad.cache.entry_bytes import as_bytes, from_bytes, program_digest
from aheadgrad.cache.proof import Proof, differs, patches, prove
from aheadgrad.cache.remembered import LaterDoor, Memo, Remembered, adopt
from aheadgrad.cache.store import Store, limit_of_size, place_of, warn
from aheadgrad.cache.value_texts import Teller, Unprovable
from aheadgrad.cache.witness import Witness
from aheadgrad.errors import ArtifactError
from aheadgrad.joint.level import Joint
from aheadgrad.options import Options
from aheadgrad.partition.saved import Split
from aheadgrad.recording.recording import Recording
from aheadgrad.torchlayer import process
from aheadgrad.torchlayer import trees as pytree

Pairs = Iterator[tuple[str, str]]
_NOT_TOLD = ("cache", "max_entries", "decompositions", "partition")
_PROOFS = 8  # that are kept for one call: a helper that was changed and changed back
_MANY = 32  # calls that are looked at to tell what has changed
_EACH = "recorded in each process: "
_SHORT = 100  # longer texts are kept as digests


@dataclass(eq=False)
class Subject:
    """The call itself. `tell` gives everything there is to ask before recording; `tensors` are all that it
    can take as inputs, with `names` for people; `known` has texts for objects that are told by then. `hold`
    keeps what it takes to record the call once more, later, and gives a function that does."""

    name: str
    tell: Callable[[Teller], Pairs]
    tensors: Sequence[Tensor]
    names: Sequence[str]
    hold: Callable[[Options], Callable[[], tuple[Recording, Joint]]]
    returns: Any = None
    known: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Found:
    """What an entry is made from without recording."""

    joint: Joint
    split: Split
    recording: Remembered
    door: LaterDoor


class Lookup:
    def __init__(self, subject: Subject, options: Options) -> None:
        self.subject, self.options = subject, options
        self.reason = ""
        self.teller = self._before = Teller(subject.known)
        self._witness = Witness()
        self._pairs: list[tuple[str, str]] = []
        self._around: list[tuple[str, str]] = []
        self._name = ""  # of the entry
        self._store = Store(place_of(options.cache), limit_of_size())
        self._off = self._store.usable()
        if self._off:
            self.reason = self._off
            warn(f"{self._off}; nothing is kept")

    def find(self, options: Options) -> Found | None:
        """`options` are settled. Whatever goes wrong here, the call can be recorded."""
        self.options = options
        if self._off:
            return None
        try:
            self._around = list(self._surroundings())
        except Unprovable as error:
            self._off = self.reason = str(error)
            return None
        try:
            self._before = self.teller.copy()
            self._pairs = self._told(self.teller)
            kept = [told for name in self._call_names for told in self._heads(name)]
            for told in kept:
                found = None if "unproven" in told else self._load(told)
                if found is not None:
                    return found
            self.reason = next(filter(None, map(_still_unproven, kept)), self.reason)
            if self.reason.startswith(_EACH):
                self._pairs = []  # it need not be watched
            self.reason = self.reason or self._closest()
        except Unprovable as error:
            self.reason = f"{_EACH}{error} cannot be compared"
        except Exception as error:
            self._pairs = []
            self.reason = f"it failed with {type(error).__name__}: {error}"
        return None

    def _surroundings(self) -> Pairs:
        """What an entry depends on besides its program."""
        yield "aheadgrad", process.own_version()
        yield from process.versions()
        yield from process.devices(t.device.type for t in self.subject.tensors)
        options = self.options
        if callable(options.partition):
            raise Unprovable("partition= is a function")
        yield "partition", str(options.partition)
        for f in fields(options):
            if f.name not in _NOT_TOLD:
                yield f.name, self.teller.tell(getattr(options, f.name))
        chosen = sorted(options.decompositions.items(), key=lambda pair: str(pair[0]))
        yield "decompositions", str([(str(op), self._function(function)) for op, function in chosen])

    def _function(self, function: Any) -> str:
        """A decomposition: torch's own are known by their names, as long as its version is the same."""
        codes = [getattr(f, "__code__", None) for f in (function, inspect.unwrap(function))]
        if all(code is not None and whose(code.co_filename) == "torch" for code in codes):
            return f"{function.__module__}.{function.__qualname__}"
        return self.teller.tell(function)

    def _told(self, teller: Teller) -> list[tuple[str, str]]:
        return [(what, _short(text)) for what, text in self._telling(teller)]

    def _telling(self, teller: Teller) -> Pairs:
        yield from self._around
        yield from process.switches()
        yield from patches(teller)
        yield from self.subject.tell(teller)
        keys: dict[int, int] = {}
        for i, (t, name) in enumerate(zip(self.subject.tensors, self.subject.names, strict=True)):
            yield name, f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}"
            yield f"what else is known of {name}", process.look_of(t) + teller.tell(process.noted_on(t))
            first = keys.setdefault(process.memory_of(t), i)
            if first != i:
                yield name, f"in the memory of {self.subject.names[first]}"

    @property
    def _call_names(self) -> list[str]:
        start = f"{digest(self.subject.name)}-{digest(str(self._pairs))}"
        return [f"{start}-{n}.call" for n in range(_PROOFS)]

    def _heads(self, name: str) -> list[dict[str, Any]]:
        kept = self._store.read(name)
        return [] if kept is None else [json.loads(kept.partition(b"\n")[0])]

    def _closest(self) -> str:
        """What is different from the call of the same function that differs least."""
        found: list[list[str]] = []
        for name in self._store.names(digest(self.subject.name))[:_MANY]:
            kept = self._store.read(name)
            if kept is not None:
                found.append(list(_differences(json.loads(kept.partition(b"\n")[2]), self._pairs)))
        found = [differences for differences in found if differences]
        return min(found, key=len)[0] if found else "no call of this function is kept"

    def _load(self, told: dict[str, Any]) -> Found | None:
        self.reason = differs(Proof(frozenset(told["names"]), told["items"]), self.teller.copy())
        if self.reason:
            return None
        both = self._entry(told["entry"])
        if both is None:
            self.reason = "its entry was removed"
            return None
        joint, split = both
        memo = Memo.from_json(told["memo"])
        subject = self.subject
        spec = pytree.spec_from(memo.spec)
        remembered = Remembered(memo, joint, subject.tensors, spec, subject.returns)
        around, entry = self._around, told["entry"]

        def is_same(recorded: Joint) -> bool:  # it is kept: nothing of this call goes with it
            return _entry_name(around, recorded) == entry

        return Found(joint, split, remembered, LaterDoor(joint, subject.hold(self.options), is_same))

    def _entry(self, name: str) -> tuple[Joint, Split] | None:
        data = self._store.read(name)
        if data is None:
            return None
        try:
            joint, split = from_bytes(data)
        except Exception as error:  # whatever it holds, it is no entry
            self._store.drop(name, f"it cannot be read ({type(error).__name__}: {error})")
            return None
        return replace(joint, options=self.options), split

    def watching(self) -> AbstractContextManager[None]:
        """Around the recording."""
        return nullcontext() if self._off or not self._pairs else self._witness

    def same_program(self, recording: Recording, joint: Joint) -> tuple[Joint, Split] | None:
        """An entry that was kept for what was just recorded, which goes on with its values."""
        if self._off:
            return None
        try:
            self._name = _entry_name(self._around, joint)
        except ArtifactError as error:
            self._off = str(error)
            self.reason += f"; not kept: {error}"
            return None
        both = self._entry(self._name)
        if both is not None:
            self.reason += "; the same program was kept, and is not partitioned again"
            adopt(recording, both[0])
        return both

    def keep(self, recording: Recording, joint: Joint, split: Split) -> None:
        """Whatever goes wrong here, the entry itself is made."""
        if self._off:
            return
        try:
            self._store.write(self._name, as_bytes(joint, split))
            if self._pairs:
                self._keep_call(self._call(recording, self._name))
        except FileNotFoundError:  # somebody cleans up
            pass
        except OSError as error:
            warn(f"nothing is written to {self._store.place}: {error.strerror}")
        except Exception as error:
            self.reason += f"; not kept: {type(error).__name__}: {error}"

    def _keep_call(self, told: bytes) -> None:
        kept = {name: self._store.read(name) for name in self._call_names}
        free = [name for name, data in kept.items() if data is None]
        if told not in kept.values():
            self._store.write((free or list(kept))[0], told, over=not free)

    def _call(self, recording: Recording, entry: str) -> bytes:
        try:
            memo = Memo.of(recording, self.subject.tensors, _spec(recording.forward.out_spec))
            if memo is None:
                raise Unprovable("the recording depends on more than what is kept")
            for what in _differences(self._pairs, self._told(self._before)):
                raise Unprovable(f"it changes what it depends on ({what})")
            proof = prove(self._witness, self.teller)
        except Unprovable as error:  # others need not watch it again
            self.reason += f"; {_EACH}{error}"
            files = {code.co_filename for code in self._witness.ran}
            head = {"unproven": str(error), "files": {file: _stamp(file) for file in sorted(files)}}
        else:
            items = dict(proof.items)
            head = {"entry": entry, "memo": asdict(memo), "names": sorted(proof.names), "items": items}
        return json.dumps(head).encode() + b"\n" + json.dumps(self._pairs).encode()


def _still_unproven(told: dict[str, Any]) -> str:
    """Why a call was not proven, if its files are what they were."""
    holds = "unproven" in told and all(_stamp(file) == stamp for file, stamp in told["files"].items())
    return f"{_EACH}{told['unproven']}" if holds else ""


def _stamp(file: str) -> list[int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns]


def _differences(kept: list[Any], now: list[tuple[str, str]]) -> Iterator[str]:
    """What was different when a call was kept, in words."""
    for (what, came), (path, was) in zip(now, kept, strict=False):
        if what != path:
            yield f"{what} came where {path} was"
        elif came != was:
            told = "#" not in was + came and what != "the function"
            yield f"{what}: {was} was kept, {came} came" if told else f"{what} changed"
    if len(kept) != len(now):
        yield "there is more, or less, than in the call that was kept"


def _entry_name(around: list[tuple[str, str]], joint: Joint) -> str:
    return f"{digest(str(around) + program_digest(joint))}.entry"


def _short(text: str) -> str:
    return text if len(text) < _SHORT else f"#{digest(text)}"


def _spec(spec: Any) -> str:
    try:
        text = pytree.spec_text(spec)
        if pytree.spec_from(text) == spec:
            return text
    except Exception:  # of several kinds
        pass
    raise Unprovable("the structure of the results cannot be written down")
