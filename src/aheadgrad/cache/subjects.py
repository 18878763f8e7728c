"""Calls as the cache sees them (`lookup`): what can be told of them, and how they are recorded once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, fx, nn

from aheadgrad.cache.graph_texts import told_of_graph
from aheadgrad.cache.lookup import Subject
from aheadgrad.cache.sketches import Ambient, sketches
from aheadgrad.cache.value_texts import Teller, Unprovable
from aheadgrad.errors import AheadgradError
from aheadgrad.joint.level import Joint
from aheadgrad.options import Options
from aheadgrad.recording.forward import Call
from aheadgrad.recording.recording import Recording
from aheadgrad.report.journal import Journal
from aheadgrad.report.origins import first_origin
from aheadgrad.torchlayer.subclasses import is_plain

Record = Callable[[Call, Options, Journal], tuple[Recording, Joint]]


def call_of_function(making: Any, call: Call, again: Callable[[list[Any]], Any], record: Record) -> Subject:
    """A call that the front end is about to record by running it (`making`); `again` makes another of these
    for other leaves, and holds none of these."""
    look, flat = making.look, making.flat
    tensors = [*(t for _, t in call.inputs), *look.tensors]
    names = [slot.describe() for slot, _ in call.inputs] + [look.places[id(t)].path for t in look.tensors]
    modules = {id(m): f"module {path}" for path, m in making.state.modules}

    def tell(teller: Teller) -> Iterator[tuple[str, str]]:
        _must_be_plain(call, tensors)
        yield "the function", teller.tell(making.fn)
        yield "arguments", f"{flat.spec} {flat.paths}"
        for path, leaf in zip(flat.paths, flat.leaves, strict=True):
            yield path, teller.tell(leaf)
        for path, token in look.found:
            simple = type(token) is tuple and len(token) == 2 and type(token[1]) is token[0]
            yield path, teller.tell(token[1] if simple else token)

    def hold(options: Options) -> Callable[[], tuple[Recording, Joint]]:
        leaves, ambient = sketches(flat.leaves), Ambient()

        def once_more() -> tuple[Recording, Joint]:
            other = again(leaves())
            if other.look.found != look.found:
                path, was, now = look.differences(other.look)[0]
                raise AheadgradError(
                    "This backward needs more than what was compiled, and the entry came from the cache: "
                    f"the function is recorded again, but {path} was {was} at the call and is {now} now."
                )
            try:
                with ambient.active():
                    return record(other.call(), options, Journal())
            finally:
                other.put_back()
                other.settle()

        return once_more

    name = f"{_origin(making.fn)} {making.name}"
    return Subject(name, tell, tensors, names, hold, call.returns, {**modules, **_numbered(tensors)})


def call_of_graph(
    module: nn.Module, flat: Any, call: Call, again: Callable[[list[Any]], Call], record: Record
) -> Subject:
    """A graph that Dynamo has found; `again` makes the call for other leaves."""
    tensors = [t for _, t in call.inputs]
    names = [slot.describe() for slot, _ in call.inputs]

    def tell(teller: Teller) -> Iterator[tuple[str, str]]:
        _must_be_plain(call, tensors)
        yield from told_of_graph(module, teller)
        for leaf in flat.leaves:
            yield "an input", teller.tell(leaf)

    def hold(options: Options) -> Callable[[], tuple[Recording, Joint]]:
        leaves, ambient = sketches(flat.leaves), Ambient()

        def once_more() -> tuple[Recording, Joint]:
            with ambient.active():
                return record(again(leaves()), options, Journal())

        return once_more

    return Subject(_place(module), tell, tensors, names, hold, None, _numbered(tensors))


def _numbered(tensors: Sequence[Tensor]) -> dict[int, str]:
    return {id(t): f"tensor {i}" for i, t in reversed(list(enumerate(tensors)))}


def _must_be_plain(call: Call, tensors: Sequence[Any]) -> None:
    if call.symbols.mode is not None:
        raise Unprovable("a size that is a symbol")
    if not all(map(is_plain, tensors)):
        raise Unprovable("a tensor subclass")


def _origin(fn: Any) -> str:
    kind = fn if hasattr(fn, "__qualname__") else type(fn)
    return f"{getattr(kind, '__module__', '')}.{kind.__qualname__}"


def _place(module: nn.Module) -> str:
    """The function of the user's that a graph begins in."""
    origin = first_origin(module.graph.nodes if isinstance(module, fx.GraphModule) else ())
    return "graph" if origin is None else f"graph {origin.file}, {origin.function}"
