"""Evidence that a recording would come out the same in another process.

The function, its arguments and the state that the contract of tracing covers are part of the key of a call.
Beyond these, a recording depends on the code that ran and on what that code names: functions, classes, values
of modules. All of it is told (`value_texts`) when it was recorded, item by item:

    config:WIDTH            a global that some code names; also that of torch's own code which ran beneath
    import model.parts      a module that some code imports when it runs
    class model.Block       the methods of a class, and the attributes that some code names

Later each item is told again and compared: the first that differs is the reason to record anew. Code that ran
and that no item leads to leaves the recording unproven.
"""

from __future__ import annotations

import re
import sys
from _abc import _get_dump
from abc import ABCMeta
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from aheadgrad.cache.code import code_digest, digest, globals_in, imports_in, makes_sets, whose
from aheadgrad.cache.value_texts import ASKING, BUILTINS, DESCRIPTORS, Teller, Unprovable
from aheadgrad.cache.witness import Witness
from aheadgrad.recording.compared_values import SIMPLE
from aheadgrad.torchlayer.custom_ops import replaced_kernels
from aheadgrad.torchlayer.process import settings_of

_ABSENT = object()
_NOWHERE = ModuleType("nowhere")
_DATA = (*SIMPLE, list, tuple, dict, set, frozenset, MemberDescriptorType)  # no code is in these
# Attributes that C gives, and that nobody tells.
_UNKNOWN = {"_version", "grad_fn", "_cdata", "__hash__", "__subclasses__", "__annotations__"}
_IGNORED = {"__dict__", "__weakref__", "__module__", "__annotations__", "__slots__", "_abc_impl"}
_IGNORED |= {"__builtins__", "__cached__", "__file__", "__firstlineno__", "__static_attributes__"}
_OF_CLASSES = (FunctionType, property, staticmethod, classmethod, *DESCRIPTORS)  # what classes are made of
_WORD = re.compile(r"\w+")
_IMPLICIT = {
    "__match_args__",
    "_fields",
    "_field_defaults",
    "__dataclass_fields__",
}  # read without their names
_BY_NAME = {*ASKING, "__dict__", "attrgetter", "getmembers", "format", "format_map"}


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
    facts.beneath(witness.beneath, items)
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
            later = [code for code in left if code not in witness.texts]  # nothing leads to those of others
            if later:
                raise Unprovable(f"{later[0].co_qualname} ran, and nothing that can be compared leads to it")
        left = later
    if unseen := teller.asked_for - names:
        raise Unprovable(f"attributes are asked for by names that no code has ({min(unseen)})")
    return Proof(names, items)


def _mentioned(code: CodeType) -> Iterator[str]:
    """The names in some code, also those that it may give to `getattr`, `str.format` or a pattern."""
    yield from code.co_names
    for value in code.co_consts:
        if type(value) is str:
            yield value
            yield from _WORD.findall(value) if "{" in value else ()
        elif type(value) is tuple:
            yield from (part for part in value if type(part) is str)


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
        self._modules: set[int] = set()
        self._any_name = bool(names & _BY_NAME)  # attributes may be asked for by names that are made

    def named(self, code: CodeType, space: dict[str, Any], items: dict[str, str]) -> None:
        """Everything that some code names."""
        module = str(space.get("__name__"))
        if module.startswith("namedtuple_") and code.co_filename == "<string>":
            return  # Python has written it, and names nothing else
        if vars(sys.modules.get(module, _NOWHERE)) is not space:
            raise Unprovable(f"{code.co_qualname} ran, which was defined in no module")
        if unknown := _UNKNOWN & set(code.co_names):
            raise Unprovable(f"{code.co_qualname} asks for {min(unknown)}, which cannot be compared")
        if makes_sets(code):
            raise Unprovable(f"{code.co_qualname} makes a set, which has another order in each process")
        for name in sorted(globals_in(code)):
            self._add(f"{module}:{name}", items)
        for name in imports_in(code, space):
            self._add(f"import {name}" if name in sys.modules else f"no import {name}", items)
        items.update(self.classes(items))

    def beneath(self, codes: Sequence[CodeType], items: dict[str, str]) -> None:
        """What torch's code names in its own modules: somebody may have put something else there."""
        loaded = list(sys.modules.items())
        modules = {getattr(module, "__dict__", {}).get("__file__"): name for name, module in loaded}
        for code in codes:
            module = modules.get(code.co_filename)
            for name in code.co_names if module else ():
                if name in vars(sys.modules[str(module)]):
                    self._add(f"{module}:{name}", items)
        items.update(self.classes(items))

    def _add(self, item: str, items: dict[str, str]) -> None:
        if item not in items:
            items[item] = self.told(item)

    def told(self, item: str) -> str:
        if item.startswith("class "):
            name = item.removeprefix("class ")
            return digest(self._class(name, self.teller.classes[name])) if name in self.teller.classes else ""
        if item.startswith("no import "):
            return str(find_spec(item.removeprefix("no import ").partition(".")[0]) is not None)
        value = _imported(item.removeprefix("import ")) if item.startswith("import ") else _found(item)
        text = "absent" if value is _ABSENT else self._told(value, item)
        return digest(text)

    def _told(self, value: Any, what: str) -> str:
        try:
            return self._module(value) if isinstance(value, ModuleType) else self.teller.tell(value)
        except Unprovable as error:
            raise Unprovable(f"{what.replace(':', '.')} is named, and cannot be compared: {error}") from None

    def _module(self, module: ModuleType) -> str:
        """The attributes that some code names; torch's own functions are those of its version."""
        name = module.__name__
        if id(module) in self._modules:
            return f"module {name}"
        self._modules.add(id(module))
        if module is sys and "modules" in self.names:
            raise Unprovable("sys.modules")
        safe = _is_safe(module)
        found = [] if type(module) is ModuleType else [self.teller.tell(type(module))]
        for key, value in sorted(vars(module).items()):
            by_name = self._any_name and not safe and isinstance(value, _DATA) and key not in _IGNORED
            if key in self.names or by_name or (key == "__getattr__" and not safe):
                found.append(f"{key}: {self._told(value, f'{name}.{key}')}")
        for key, value in sorted(settings_of(module).items()):
            if self._any_name or key.rpartition(".")[2] in self.names:
                found.append(f"{key}: {self._told(value, f'{name}.{key}')}")
        names = sorted(vars(module).keys() - _IGNORED) if self._any_name and not safe else ""
        return f"module {name} {found} {names}"

    def classes(self, known: Mapping[str, str]) -> dict[str, str]:
        """All classes that were told so far, and those that these lead to."""
        made: dict[str, str] = {}
        while left := [name for name in self.teller.classes if f"class {name}" not in {**known, **made}]:
            for name in left:
                made[f"class {name}"] = self.told(f"class {name}")
        return made

    def _class(self, name: str, kind: type) -> str:
        found = [self.teller.tell(one) for one in (type(kind), *kind.__mro__) if one not in (type, kind)]
        standard = _is_standard(kind)
        for key, member in vars(kind).items():
            if key in _IGNORED:
                continue
            if standard and isinstance(member, _OF_CLASSES):
                found += _if_changed(member, f"{kind.__qualname__}.{key}", self.teller)
            elif (
                key in self.names
                or (key in _IMPLICIT and not standard)
                or (self._any_name if isinstance(member, _DATA) else not standard)
            ):
                found.append(f"{key}: {self._told(member, f'{name}.{key}')}")
        if "__name__" in self.names:
            found.append(kind.__name__)
        if isinstance(kind, ABCMeta):
            found += sorted({f"registered {one}" for one in _registered(kind)})
        return " ".join(found)

    def words(self, item: str) -> str:
        """What has changed, for people."""
        if item.startswith("class "):
            return f"{item} has changed{_file(self.teller.classes.get(item.removeprefix('class ')))}"
        if "import " in item:
            return f"what it imports has changed: {item.rpartition(' ')[2]}"
        module, _, path = item.partition(":")
        value = _found(item)
        if value is _ABSENT:
            return f"{module}.{path} is not there"
        return f"{module}.{path} has changed{_file(value)}"


_PATCHED: tuple[Any, ...] = (torch, nn.functional, Tensor, nn.Parameter, nn.Module, torch.autograd.Function)


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


def _imported(name: str) -> Any:
    """A module that the function would import; what it does when it is loaded it would do then as well."""
    if name not in sys.modules:
        try:
            import_module(name)
        except Exception:  # whatever the module does
            return _ABSENT
    return sys.modules.get(name, _ABSENT)


def _is_safe(module: ModuleType) -> bool:
    """Is it one of torch's modules or Python's?"""
    file = vars(module).get("__file__")
    return bool(whose(str(file))) if file else module.__name__ in sys.builtin_module_names


def _is_standard(kind: type) -> bool:
    root = kind.__module__.partition(".")[0]
    return root in ("torch", "builtins", "aheadgrad") or root in sys.stdlib_module_names


def _registered(kind: Any) -> Iterator[str]:
    """The names of classes that were registered with an ABC; those of Python's library are always."""
    for ref in _get_dump(kind)[0]:
        one = ref()
        if one is not None and one.__module__.partition(".")[0] not in sys.stdlib_module_names:
            yield f"{one.__module__}.{one.__qualname__}"


def _if_changed(member: Any, name: str, teller: Teller) -> Iterator[str]:
    """A method of torch's or Python's, if it is somebody else's, or has another name."""
    f = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    code = getattr(f, "__code__", None)
    if code is None:
        return
    if not whose(code.co_filename):
        yield f"{name}: {teller.tell(member)}"
    elif code.co_qualname != name:
        yield f"{name}: {code.co_qualname}"


def patches(teller: Teller) -> Iterator[tuple[str, str]]:
    """What somebody has put in the place of torch's functions and kernels."""
    for where in _PATCHED:
        others = []
        for name, value in vars(where).items():
            if isinstance(value, FunctionType) and not whose(value.__code__.co_filename):
                yield f"{where.__name__}.{name}", teller.tell(value)
            elif callable(value) and not isinstance(value, type) and getattr(value, "__name__", "") != name:
                others.append((name, getattr(value, "__name__", f"{type(value)}")))
            elif isinstance(where, type) and not callable(value) and not isinstance(value, _OF_CLASSES):
                others.append((name, "" if name.startswith("__") else teller.tell(value)))
        yield f"names in {where.__name__}", str(others)
    yield "kernels for ops of torch", str(replaced_kernels())
