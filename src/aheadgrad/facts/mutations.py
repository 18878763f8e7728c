"""What happened to each input, read off the trace after the run."""

from __future__ import annotations

from aheadgrad.capture.entrances import Entrance
from aheadgrad.capture.layouts import geometry_of
from aheadgrad.facts.facts import InputFacts
from aheadgrad.torchlayer import functional
from aheadgrad.torchlayer.autograd import version


def input_facts(index: int, entrance: Entrance) -> InputFacts:
    """Compares an input before and after the run."""
    seen, value = entrance.seen, entrance.value
    storage_changed = (
        functional.storage_key(seen) != entrance.storage or functional.storage_was_changed(seen)
    ) and functional.unwrap(seen) is not value
    changed_geometry = None
    if functional.has_metadata_mutation(seen) and geometry_of(seen) != geometry_of(value):
        changed_geometry = geometry_of(seen)
    history = seen.grad_fn
    becomes_leaf = None
    if history is None and seen.requires_grad != entrance.required_grad and entrance.is_leaf:
        becomes_leaf = seen.requires_grad
    return InputFacts(
        index,
        data_changed=functional.has_data_mutation(seen) and functional.unwrap(seen) is not value,
        geometry=changed_geometry,
        storage_changed=storage_changed,
        history_changed=history is not None and history is not entrance.history,
        history_dropped=history is None and entrance.history is not None,
        becomes_leaf=becomes_leaf,
        version_bumps=version(seen) - entrance.version,
    )
