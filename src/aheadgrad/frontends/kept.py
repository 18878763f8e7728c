"""A call as the cache sees it (`cache.visit`): what can be told of it, and how it is recorded once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from aheadgrad import pipeline
from aheadgrad.cache.again import Ambient, sketches
from aheadgrad.cache.tell import Teller, Unprovable
from aheadgrad.cache.visit import Subject
from aheadgrad.errors import AheadgradError
from aheadgrad.frontends.function import Flat
from aheadgrad.joint.level import Joint
from aheadgrad.options import Options
from aheadgrad.recording.forward import Call
from aheadgrad.recording.recording import Recording
from aheadgrad.report.journal import Journal
from aheadgrad.runtime.structure import return_text
from aheadgrad.torchlayer.subclasses import is_plain


def subject_of(making: Any, call: Call, again: Callable[[Flat], Any]) -> Subject:
    """Of one `Making`; `again` makes another, for other leaves."""
    state, look, flat = making.state, making.look, making.flat
    tensors = [*(t for _, t in call.inputs), *look.tensors]
    known = {id(m): f"module {path}" for path, m in state.modules}
    known.update((id(t), f"tensor {i}") for i, t in reversed(list(enumerate(tensors))))

    def tell(teller: Teller) -> Iterator[tuple[str, str]]:
        if call.symbols.mode is not None:
            raise Unprovable("a size that is a symbol")
        if not all(map(is_plain, tensors)):
            raise Unprovable("a tensor subclass")
        yield "the function", teller.tell(making.fn)
        yield "arguments", f"{flat.spec} {flat.paths}"
        for path, leaf in zip(flat.paths, flat.leaves, strict=True):
            yield path, teller.tell(leaf)
        for path, token in look.found:
            yield path, teller.tell(token)

    def hold(options: Options) -> Callable[[], tuple[Recording, Joint]]:
        leaves, ambient = sketches(flat.leaves), Ambient()

        def record() -> tuple[Recording, Joint]:
            other = again(replace(flat, leaves=leaves()))
            if other.look.found != look.found:
                path, was, now = look.differences(other.look)[0]
                raise AheadgradError(
                    "This backward needs more than what was compiled, and the entry came from the cache: "
                    f"the function is recorded again, but {path} was {was} at the call and is {now} now."
                )
            try:
                with ambient.active():
                    return pipeline.record(other.call(), options, Journal())
            finally:
                other.put_back()
                other.settle()

        return record

    return Subject(f"{_origin(making.fn)} {making.name}", tell, tensors, hold, return_text, known)


def _origin(fn: Any) -> str:
    kind = fn if hasattr(fn, "__qualname__") else type(fn)
    return f"{kind.__module__}.{kind.__qualname__}"
