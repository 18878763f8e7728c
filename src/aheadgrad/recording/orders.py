"""Higher orders: the gradients of a backward as outputs that can be differentiated again.

The backward is recorded once more in the same session, this time with a history (as under
`create_graph=True`). From then on its gradients are to the next order what the function's outputs
are to the first: exits of a `Joint`, with the same inputs to lead back to, and the tangents beside
them. Autograd itself decides what depends on what; nothing is differentiated twice, nothing of the
user's code runs again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from aheadgrad.joint import level as values
from aheadgrad.options import Options
from aheadgrad.program.slots import Gradient, Slot, Tangent
from aheadgrad.recording.components import Target
from aheadgrad.recording.exits import Exit
from aheadgrad.recording.joint import Gradients, Joint
from aheadgrad.recording.lower_values import Lowering
from aheadgrad.recording.recording import Recording, record_expected
from aheadgrad.recording.session import Session
from aheadgrad.torchlayer.assumptions import Sizes
from aheadgrad.torchlayer.autocast import AutocastState


@dataclass(eq=False)
class Derivative:
    """The gradients of one backward, ready to be differentiated.

    It offers what `Recording` offers for the first order: exits, a joint, and a way to record more.
    `below` is what the backward belongs to.
    """

    below: Recording | Derivative
    recorded: Gradients
    backward_autocast: AutocastState | None
    exits: list[Exit] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    slots: dict[int, Slot] = field(default_factory=dict)
    gradients: list[Gradients | None] = field(default_factory=list)
    failures: dict[int, Exception] = field(default_factory=dict)
    fixed_sizes: Sizes | None = None  # what symbols stand for, if it was recorded for these sizes only
    components: tuple[values.Component, ...] = ()  # as values, once it is lowered
    joint: Joint = field(init=False)

    def __post_init__(self) -> None:
        traced = self.recorded.traced
        assert traced is not None
        component = self.recorded.component
        for target, grad, value in zip(component.targets, traced.grads, self.recorded.grads, strict=True):
            slot = Gradient(self.below.slot_of(target))
            again = grad is not None and grad.requires_grad and grad.grad_fn is not None
            self.exits.append(Exit(slot, grad, value, again))
        self.targets = list(component.targets)
        for i, tangent in zip(component.exits, traced.tangents, strict=True):
            if tangent is not None and tangent.requires_grad:
                self.targets.append(Target("tangent", i, tangent))
                self.slots[id(tangent)] = Tangent(self.below.joint.exits[i].slot)
        join = not (self.has_symbols or self.session.veiled)
        self.joint = Joint(self.session, self.exits, self.targets, one_node=False, join=join)
        for number, part in enumerate(self.joint.components):
            self.gradients.append(record_expected(self, number, part))

    @property
    def order(self) -> int:
        """Which derivatives the exits are: 1 for gradients of the function itself."""
        return self.below.order + 1

    @property
    def session(self) -> Session:
        return self.below.session

    @property
    def lowering(self) -> Lowering:
        return self.below.lowering

    @property
    def options(self) -> Options:
        return self.below.options

    @property
    def fixed_autocast(self) -> bool:
        return self.below.fixed_autocast

    @property
    def has_symbols(self) -> bool:
        return self.below.has_symbols

    def slot_of(self, target: Target) -> Slot:
        return self.slots[id(target.leaf)] if id(target.leaf) in self.slots else self.below.slot_of(target)

    def passed_on(self, exit_number: int) -> Target | None:
        """The target that a gradient simply is: the tangent of `x + y`, for instance."""
        traced = self.exits[exit_number].traced
        if not isinstance(traced, Tensor) or traced.grad_fn is not None:
            return None
        return next((t for t in self.targets if t.leaf is traced), None)
