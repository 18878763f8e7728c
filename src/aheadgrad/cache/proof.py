"""Evidence that a recording would come out the same in another process.

The function, its arguments and the state that the contract of tracing covers are part of the key of a call.
Beyond these, a recording depends on the code that ran and on what that code names: functions, classes, values
of modules. All of it is told (`tell`) when it was recorded, item by item:

    model:Block.forward     the function that is found under this name
    config:WIDTH            a global that some code names
    class model.Block       the methods of a class, and the attributes that some code names

Later each item is told again and compared: the first that differs is the reason to record anew. Code that ran
and that no item explains leaves the recording unproven.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from aheadgrad.cache.code import code_digest, digest, whose
from aheadgrad.cache.tell import BUILTINS, Teller, Unprovable
from aheadgrad.cache.witness import Witness
from aheadgrad.recording.plain import SIMPLE

_ABSENT = object()
_NOWHERE = ModuleType("nowhere")
_DATA = (*SIMPLE, list, tuple, dict, set, frozenset, MemberDescriptorType)  # no code is in these
_TOLD = (FunctionType, type, ModuleType, *SIMPLE, list, tuple)  # of torch's modules and Python's
_IGNORED = {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__slots__", "_abc_impl"}
_IGNORED |= {"__builtins__", "__cached__", "__file__", "__firstlineno__", "__static_attributes__"}
_BY_NAME = {"getattr", "vars", "__dict__", "__getattribute__", "attrgetter", "hasattr", "dir", "getmembers"}


@dataclass(frozen=True)
class Proof:
    """`names` are those in all code that ran; `items` have a digest for each thing."""

    names: frozenset[str]
    items: Mapping[str, str]


def prove(witness: Witness, teller: Teller) -> Proof:
    """`teller` has told what the key consists of. Raises `Unprovable`."""
    for doubt in witness.doubts:
        raise Unprovable(doubt)
    names = frozenset(name for code in witness.ran for name in _mentioned(code))
    facts = _Facts(names, teller)
    items = facts.classes({})
    left = witness.ran
    while left:
        later = []
        for code in left:
            space = teller.codes.get(code_digest(code))
            if space is None:
                later.append(code)
            else:
                facts.named(code, space, items)
        if len(later) == len(left):
            facts.find(left[0], items)
        left = later
    return Proof(names, items)


def _mentioned(code: CodeType) -> Iterator[str]:
    """The names in some code, also those that it may give to `getattr`."""
    yield from code.co_names
    yield from (value for value in code.co_consts if type(value) is str)


def differs(proof: Proof, teller: Teller) -> str:
    """What is not as it was, in words; nothing if all of it is. Items are told in the order they were."""
    facts = _Facts(proof.names, teller)
    for item, known in proof.items.items():
        try:
            now = facts.told(item)
        except Unprovable as error:
            return str(error)
        if now != known:
            return facts.words(item)
    extra = next((name for name in teller.classes if f"class {name}" not in proof.items), None)
    return "" if extra is None else f"class {extra} is new"


class _Facts:
    """Tells the items of a proof."""

    def __init__(self, names: frozenset[str], teller: Teller) -> None:
        self.names, self.teller = names, teller
        self._modules: set[str] = set()
        self._any_name = bool(names & _BY_NAME)  # attributes may be asked for by names that are made

    def named(self, code: CodeType, space: dict[str, Any], items: dict[str, str]) -> None:
        """Everything that some code names."""
        module = str(space.get("__name__"))
        if vars(sys.modules.get(module, _NOWHERE)) is not space:
            raise Unprovable(f"{code.co_qualname} ran, which was defined in no module")
        for name in code.co_names:
            item = f"{module}:{name}"
            if item not in items and (name in space or name in BUILTINS):
                items[item] = self.told(item)
        items.update(self.classes(items))

    def find(self, code: CodeType, items: dict[str, str]) -> None:
        """Code that was reached in some other way has to be found under its name."""
        for name, module in list(sys.modules.items()):
            if getattr(module, "__file__", None) == code.co_filename:
                item = f"{name}:{code.co_qualname}"
                items[item] = self.told(item)
                items.update(self.classes(items))
                if code_digest(code) in self.teller.codes:
                    return
        raise Unprovable(f"{code.co_qualname} ran, and cannot be found by its name")

    def told(self, item: str) -> str:
        if item.startswith("class "):
            name = item.removeprefix("class ")
            return digest(self._class(name, self.teller.classes[name])) if name in self.teller.classes else ""
        value = _found(item)
        text = "absent" if value is _ABSENT else self._told(value, item)
        return digest(text)

    def _told(self, value: Any, what: str) -> str:
        try:
            return self._module(value) if isinstance(value, ModuleType) else self.teller.tell(value)
        except Unprovable as error:
            raise Unprovable(f"{what.replace(':', '.')} is named, and cannot be compared: {error}") from None

    def _module(self, module: ModuleType) -> str:
        """The attributes that some code names; torch's own objects are those of its version."""
        name = module.__name__
        if name in self._modules:
            return f"module {name}"
        self._modules.add(name)
        safe = whose(str(getattr(module, "__file__", None) or "<frozen"))
        found = []
        for key, value in sorted(vars(module).items()):
            named = key in self.names and (not safe or isinstance(value, _TOLD))
            by_name = self._any_name and not safe and isinstance(value, _DATA) and key not in _IGNORED
            if named or by_name:
                found.append(f"{key}: {self._told(value, f'{name}.{key}')}")
        return f"module {name} {found}"

    def classes(self, known: Mapping[str, str]) -> dict[str, str]:
        """All classes that were told so far, and those that these lead to."""
        made: dict[str, str] = {}
        while left := [name for name in self.teller.classes if f"class {name}" not in {**known, **made}]:
            for name in left:
                made[f"class {name}"] = self.told(f"class {name}")
        return made

    def _class(self, name: str, kind: type) -> str:
        found = []
        for one in kind.__mro__:
            if one is not kind:
                found.append(self.teller.tell(one))
        for key, member in vars(kind).items():
            if key in _IGNORED or (_is_standard(kind) and not _is_patched(member)):
                continue
            if self._any_name or key in self.names or not isinstance(member, _DATA):
                found.append(f"{key}: {self._told(member, f'{name}.{key}')}")
        return " ".join(found)

    def words(self, item: str) -> str:
        """What has changed, for people."""
        if item.startswith("class "):
            return f"{item} has changed{_file(self.teller.classes.get(item.removeprefix('class ')))}"
        module, _, path = item.partition(":")
        value = _found(item)
        if value is _ABSENT:
            return f"{module}.{path} is not there"
        return f"{module}.{path} has changed{_file(value)}"


def _file(value: Any) -> str:
    """Where something is defined."""
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    file = (
        code.co_filename
        if code is not None
        else getattr(sys.modules.get(getattr(value, "__module__", "")), "__file__", None)
    )
    return f" ({file.rpartition('/')[2]})" if isinstance(file, str) else ""


def _found(item: str) -> Any:
    """What a module has under a name; methods as their classes hold them."""
    module, _, path = item.partition(":")
    found: Any = sys.modules.get(module)
    for i, name in enumerate(path.split(".")):
        inside = getattr(found, "__dict__", None)
        if inside is None:
            return _ABSENT
        found = inside.get(name, BUILTINS.get(name, _ABSENT) if i == 0 else _ABSENT)
    return found


def _is_standard(kind: type) -> bool:
    root = kind.__module__.partition(".")[0]
    return root in ("torch", "builtins", "aheadgrad") or root in sys.stdlib_module_names


def _is_patched(member: Any) -> bool:
    """Is a method of torch's not torch's own?"""
    code = getattr(getattr(member, "__func__", member), "__code__", None)
    return code is not None and not whose(code.co_filename)


def patches(teller: Teller) -> Iterator[tuple[str, str]]:
    """Functions that somebody has put in the place of torch's."""
    for where in (torch, nn.functional, Tensor, nn.Module):
        for name, value in vars(where).items():
            if isinstance(value, FunctionType) and not whose(value.__code__.co_filename):
                yield f"{where.__name__}.{name}", teller.tell(value)
