"""What can be seen of a call: an ordered table of facts about inputs, outputs and ambient state.

Two runs are "the same" when their tables are. A table maps a name such as ``output[1].stride`` to a
plain value, to a snapshot of a tensor, or to ``Raised`` where looking itself raised (a view that may
not be differentiated raises when asked for ``requires_grad``; that, too, is something eager does).

Tensors get the name of the first place they were met, inputs first. Identity therefore shows in the
tree of the outputs, and sharing of memory in the name of the first tensor with the same storage:

    >>> x = torch.ones(2)
    >>> register = Register()
    >>> tree([x], "args", register), tree((x, 3), "output", register)
    ('list(args[0])', 'tuple(args[0], int 3)')
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Facts = dict[str, object]

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, slice)


@dataclass
class Inputs:
    """One fresh set of inputs.

    ``leaves`` are the tensors whose gradients are compared, also those behind views and non-leaves;
    ``watched`` are further tensors to look at afterwards, such as the bases behind views.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    leaves: list[Tensor] = field(default_factory=list)
    watched: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Raised:
    """An exception as an observation."""

    type: type[BaseException]
    message: str

    @staticmethod
    def of(error: BaseException) -> Raised:
        return Raised(type(error), str(error).split("\n", 1)[0][:160])

    def __str__(self) -> str:
        return f"raises {self.type.__name__}: {self.message}"


def look(question: Callable[[], object]) -> object:
    """The answer to a question about a tensor, or ``Raised`` where asking raises."""
    try:
        return question()
    except Exception as error:
        return Raised.of(error)


class Register:
    """Tensors by the name of the first place where they were met; ``visits`` tells every meeting."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.visits: list[str] = []
        self._names: dict[int, str] = {}

    def add(self, name: str, tensor: Tensor) -> str:
        known = self._names.setdefault(id(tensor), name)
        self.tensors.setdefault(known, tensor)
        self.visits.append(known)
        return known


def tree(value: Any, path: str, register: Register) -> str:
    """The structure of a value as text, tensors by name; registers the tensors on the way."""
    if isinstance(value, Tensor):
        return register.add(path, value)
    kind = type(value).__name__
    if isinstance(value, PLAIN):
        return "None" if value is None else f"{kind} {value!r}"
    if isinstance(value, (list, tuple)):
        return f"{kind}({', '.join(tree(item, f'{path}[{i}]', register) for i, item in enumerate(value))})"
    if isinstance(value, dict):
        items = (f"{key!r}: {tree(item, f'{path}[{key!r}]', register)}" for key, item in value.items())
        return f"{kind}({', '.join(items)})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (f.name for f in dataclasses.fields(value))
        items = (f"{name}={tree(getattr(value, name), f'{path}.{name}', register)}" for name in names)
        return f"{kind}({', '.join(items)})"
    return kind


def snapshot(tensor: Tensor) -> object:
    """The values of a tensor, safe from later writes; those of its parts for a wrapper subclass."""
    parts = inner_tensors(tensor)
    if parts:
        return tuple(snapshot(part) for part in parts.values())
    return look(lambda: tensor.detach().clone())


def inner_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """The parts of a traceable wrapper subclass; nothing for a plain tensor."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return {}
    names, _ = flatten()
    return {name: getattr(tensor, name) for name in names}


class Memory:
    """Which tensors share a storage: each gets the first of its group, and its offset in bytes there.

    The offset is absolute where the group starts with an input, and relative to the first member where
    all are outputs: how a fresh storage is laid out inside is nobody's business.
    """

    def __init__(self, fresh_from: str) -> None:
        self._groups: dict[tuple[torch.device, int], tuple[str, int]] = {}
        self._fresh_from = fresh_from

    def place(self, name: str, tensor: Tensor) -> tuple[str, int] | None:
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            return None
        offset = int(tensor.storage_offset()) * tensor.element_size()
        key = (tensor.device, storage.data_ptr())
        if key not in self._groups:
            origin = offset if name.startswith(self._fresh_from) else 0
            self._groups[key] = (name, origin)
        anchor, origin = self._groups[key]
        return anchor, offset - origin


def true_strides(tensor: Tensor) -> object:
    """Strides that mean something: those of dimensions with more than one element."""
    sizes = tuple(tensor.shape)
    if 0 in sizes:
        return ()
    return look(lambda: tuple(s for s, n in zip(tensor.stride(), sizes, strict=True) if n > 1))


def tensor_facts(name: str, tensor: Tensor, memory: Memory, facts: Facts) -> None:
    """Everything to be seen at one tensor, except its version counter and its gradient."""
    facts[name + ".type"] = type(tensor).__name__
    facts[name + ".dtype"] = tensor.dtype
    facts[name + ".device"] = tensor.device
    facts[name + ".layout"] = tensor.layout
    facts[name + ".shape"] = tuple(tensor.shape)
    facts[name + ".stride"] = look(tensor.stride)
    facts[name + ".true stride"] = true_strides(tensor)
    facts[name + ".conj"] = (tensor.is_conj(), tensor.is_neg())
    facts[name + ".requires_grad"] = look(lambda: tensor.requires_grad)
    facts[name + ".is_leaf"] = look(lambda: tensor.is_leaf)
    facts[name + ".grad_fn is None"] = look(lambda: tensor.grad_fn is None)
    parts = inner_tensors(tensor)
    if parts:
        for part, inner in parts.items():
            tensor_facts(f"{name}.{part}", inner, memory, facts)
        return
    facts[name + ".memory"] = look(lambda: memory.place(name, tensor))
    facts[name + ".values"] = snapshot(tensor)


def value_facts(register: Register, suffix: str, facts: Facts) -> None:
    """Only the values of every tensor met so far (to see that nothing clobbered them)."""
    for name, tensor in register.tensors.items():
        if not inner_tensors(tensor):
            facts[f"{name}.values{suffix}"] = snapshot(tensor)


def random_facts(suffix: str, facts: Facts) -> None:
    facts["random state" + suffix] = torch.default_generator.get_state()
    if torch.cuda.is_available():
        facts["cuda random state" + suffix] = torch.cuda.get_rng_state()


def seed_generators(seed: int) -> None:
    """Like ``torch.manual_seed``, which takes a hundred times longer when there is only a CPU."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Ambient:
    """State of the process that a call may change."""

    grad_mode: bool
    inference_mode: bool
    autocast: tuple[bool, ...]
    autocast_dtype: tuple[torch.dtype, ...]
    default_dtype: torch.dtype
    deterministic: bool

    @staticmethod
    def now() -> Ambient:
        return Ambient(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple(torch.is_autocast_enabled(device) for device in DEVICES),
            tuple(torch.get_autocast_dtype(device) for device in DEVICES),
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
        )

    def restore(self) -> None:
        """Put everything back that has a plain setter (inference mode cannot leak out of its block)."""
        torch.set_grad_enabled(self.grad_mode)
        now = Ambient.now()
        if now == self:
            return
        for device, enabled, dtype in zip(DEVICES, self.autocast, self.autocast_dtype, strict=True):
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_default_dtype(self.default_dtype)
        torch.use_deterministic_algorithms(self.deterministic)

    def facts(self, suffix: str, facts: Facts) -> None:
        facts.update((f"ambient {f.name}{suffix}", getattr(self, f.name)) for f in dataclasses.fields(self))
