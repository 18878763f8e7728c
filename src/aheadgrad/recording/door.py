"""The door of a live recording (`joint/requests`): further backwards, and the next order."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from aheadgrad.errors import AheadgradError, CaptureError, DataDependentError, reason_of
from aheadgrad.joint import level as values
from aheadgrad.joint.requests import Further, LooksAtValues, NeedsSizes, Request, Unusual
from aheadgrad.program.slots import Between
from aheadgrad.program.values import Value
from aheadgrad.recording.forward import explained
from aheadgrad.recording.lower_levels import lower_gradients, lower_next
from aheadgrad.recording.meeting import record_handing
from aheadgrad.recording.orders import Derivative
from aheadgrad.recording.recording import Recording
from aheadgrad.recording.subclass_borders import with_sizes
from aheadgrad.torchlayer.assumptions import Sizes, as_numbers, assumptions, on_trial
from aheadgrad.torchlayer.autograd import number_of
from aheadgrad.torchlayer.letting_go import let_go_of_locals
from aheadgrad.torchlayer.lock import RECORDING
from aheadgrad.torchlayer.strides import dense_strides

_DIFFERENT_WAYS = (
    "This backward takes different ways for different sizes, and not all of them are known when it runs. "
    "Compile with dynamic=False, or differentiate all outputs together."
)


class LiveDoor:
    """Where an entry asks for more of one level of its recording."""

    def __init__(self, level: Recording | Derivative) -> None:
        self.level = level

    def more(self, request: Request) -> Further:
        with RECORDING:
            mark = self.level.lowering.mark()
            try:
                found = self._more(request)
            except Exception as error:
                self.level.lowering.forget(mark)
                let_go_of_locals(error)
                told = explained(error)
                try:
                    if isinstance(told, DataDependentError):
                        strict = self.level.options.fallback == "error" or self.level.session.veiled
                        raise told if strict else LooksAtValues(reason_of(told)) from error
                    eagers = type(self.level.failures.get(request.component)) is type(error)
                    if isinstance(told, AheadgradError) and request.requiring is not None and not eagers:
                        raise told from error
                    raise
                finally:
                    del told  # which holds this frame
            if request.values is not None and request.requiring is None:
                self.level.lowering.forget(mark)
            return found

    def _more(self, request: Request) -> Further:
        mode = self.level.session.mode
        sizes = self.level.fixed_sizes if request.sizes is None else request.sizes
        if sizes is None and request.values is not None:
            sizes = {}
        if mode.shape_env is None:
            return self._record(request, None)
        if sizes is not None:
            sizes = dict(sizes)
            with as_numbers(mode, sizes):
                before = assumptions(mode)
                made = self._record(request, sizes)
                if request.values is None and assumptions(mode) != before:
                    raise CaptureError(_DIFFERENT_WAYS)
            return made
        failed: Exception | None = None
        with on_trial(mode) as assumes_more:
            try:
                made = self._record(request, None)
            except Exception as error:  # perhaps because of the symbols
                failed = error
            if failed is None and not assumes_more():
                return made
        raise (CaptureError if self.level.session.veiled else NeedsSizes)(_DIFFERENT_WAYS) from failed

    def _record(self, request: Request, sizes: Sizes | None) -> Further:
        level = self.level
        component = level.joint.components[request.component]
        state = level.backward_autocast if level.fixed_autocast else request.autocast
        layouts = zip(component.exits, request.tangents, strict=True)
        pattern = tuple(self._layout(i, asked) for i, asked in layouts)
        if request.hands or request.handed:
            return self._record_handing(component, pattern, state, request, sizes)
        with self._values(request):
            gradients = level.joint.record(component, pattern, state, request.requiring, request.wanted)
            if request.requiring is None:
                made = lower_gradients(level, gradients)
                edges = _edges(component.nodes) if request.edges else {}
                return Further(made, level.lowering.tape(), sizes, edges)
            derivative = Derivative(level, gradients, state, fixed_sizes=sizes)
        next_level = lower_next(derivative)
        return Further(next_level.recorded, next_level.tape, sizes, {}, next_level, LiveDoor(derivative))

    def _record_handing(
        self, component: Any, pattern: Any, state: Any, request: Request, sizes: Sizes | None
    ) -> Further:
        level, low = self.level, self.level.lowering
        gradients, ends = record_handing(level, component, pattern, state, request)
        frozen = level.components[request.component]
        places = gradients.component.targets[len(frozen.targets) :]
        more = (
            values.Target("exit", k, low.key(t.leaf), Between(k), passage=True) for k, t in enumerate(places)
        )
        tangents, grads = tuple(map(low.frozen, gradients.tangents)), tuple(map(low.frozen, gradients.grads))
        whole = replace(frozen, targets=(*frozen.targets, *more))
        made = values.Gradients(whole, tangents, grads, gradients.phase, usual=False)
        handed = tuple(map(low.frozen, gradients.handed))
        return Further(made, low.tape(), sizes, {}, handed=handed, ends=tuple(ends))

    def _layout(self, number: int, asked: Any) -> Any:
        """What a tangent is recorded with."""
        if asked is True:
            return self.level.joint.expected(number)
        if not isinstance(asked, Unusual):
            return asked
        size = tuple(self.level.joint.exits[number].traced.size())
        return dense_strides(size, asked.order) if asked.form is None else with_sizes(asked.form, size)

    def _values(self, request: Request) -> Any:
        if request.values is None:
            return nullcontext()
        pairs, tangents = request.values
        known = [(self.level.lowering.traced(v), real) for v, real in pairs if type(v) is Value]
        return self.level.session.values.known_to_be(known, tangents)


def _edges(nodes: set[Any]) -> dict[int, tuple[tuple[int, int], ...]]:
    """By the number of a node of the forward: which of its gradients go to which nodes."""
    return {
        number_of(node): tuple(
            (i, number_of(m)) for i, (m, _) in enumerate(node.next_functions) if m is not None
        )
        for node in nodes
    }
