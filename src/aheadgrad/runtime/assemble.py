"""Assembles the entry function: the program's call and everything around it, as one script.

Sections, in the order in which they run:

    forward      the compiled forward, without grad mode; updates that autograd must not see
    leaves       tensors that become leaves inside
    nodes        one autograd node per component adopts its outputs
    updates      input updates that autograd must see
    views        outputs that share memory, made again from their roots
    grad mode    as the function left it
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aheadgrad.conventions import outputs, updates
from aheadgrad.conventions.assembly import Assembly, NodeCall
from aheadgrad.emit.script import Namespace, Script
from aheadgrad.joint.level import Joint, Target
from aheadgrad.torchlayer.autograd import history_now, set_grad_enabled

_PARAMETER = re.compile(r"\b[pm]\d")


@dataclass(frozen=True, eq=False)
class Assembled:
    """The entry function `run(*inputs) -> list of flat outputs`, and its source.

    `inline(arguments)` gives its lines for a caller that wants to save the call: where one node does it
    all, and takes the inputs as they come. The lines use `names`.
    """

    run: Callable[..., Any]
    source: str
    names: Namespace
    inline: Callable[[str], list[str]] | None


def assemble(a: Assembly) -> Assembled:
    script = Script("entry", a.names)
    params = [f"p{i}" for i in range(a.inputs)]
    for name in a.used_before:
        now = script.names.name(history_now, "history_now")
        script.line(f"used_{name} = {now}({name}.requires_grad_())")  # a leaf, if only from now on
    if any(node.direct for node in a.nodes):
        _direct_section(script, a, params)
    else:
        _forward_section(script, a, params)
    updates.emit_leaves(script, a)
    outputs.emit_inner_leaves(script, a)
    if a.nodes or not a.inference:
        _graded_sections(script, a)
    else:
        outputs.emit(script, a)
    if a.facts.grad_mode_after is not None:
        script.line(f"{script.names.name(set_grad_enabled, 'set_grad')}({a.facts.grad_mode_after})")
    returned = outputs.expressions(a)
    script.line(f"return {a.returns(returned) if a.returns else '[' + ', '.join(returned) + ']'}")
    run, source = script.function(", ".join([*params, *a.members]))
    return Assembled(run, source, a.names, _inline(script, a, params))


def _inline(script: Script, a: Assembly, params: list[str]) -> Callable[[str], list[str]] | None:
    first, *rest = script.lines
    call = f"({', '.join(params)})"
    takes_all = any(node.direct for node in a.nodes) and call in first
    if not takes_all or a.names.sizes is not None or any(_PARAMETER.search(line) for line in rest):
        return None
    return lambda arguments: [first.replace(call, f"({arguments})"), *rest]


def _direct_section(script: Script, a: Assembly, params: list[str]) -> None:
    """One node does it all; what remains is to put the outputs into the user's structure."""
    (node,) = a.nodes
    outs = ", ".join(result_name(i) for i in node.exits)
    _take(script, node, outs, f"{script.names.name(node.apply, 'apply')}({', '.join(params)})")


def _take(script: Script, node: NodeCall, outs: str, call: str) -> None:
    """Names a node's outputs; what comes behind them are links."""
    count = len(node.exits)
    if node.links and count > 1:
        call += f"[:{count}]"
    script.line(f"{outs} = {call}")
    if node.links and count == 1:
        with script.block(f"if {outs}.__class__ is tuple:"):
            script.line(f"{outs} = {outs}[0]")


def result_name(i: int) -> str:
    return f"r{i}"


def _forward_section(script: Script, a: Assembly, params: list[str]) -> None:
    set_grad = script.names.name(set_grad_enabled, "set_grad")
    if a.joint.autocast is not None:
        off = script.names.name(torch.set_autocast_enabled, "set_autocast")
        for device, _ in a.joint.autocast.enabled:
            script.line(f"{off}({device!r}, False)")
    if a.joint.grad_before and not a.inference:
        script.line(f"{set_grad}(False)")
    needs_restore = (a.joint.grad_before and not a.inference) or a.joint.autocast is not None
    if not needs_restore:
        _call_forward(script, a, params)
        return
    with script.block("try:"):
        _call_forward(script, a, params)
    with script.block("finally:"):
        if a.joint.grad_before and not a.inference:
            script.line(f"{set_grad}(True)")
        if a.joint.autocast is not None:
            for device, _ in a.joint.autocast.enabled:
                script.line(f"{off}({device!r}, True)")


def _call_forward(script: Script, a: Assembly, params: list[str]) -> None:
    results = [result_name(i) for i in range(a.results)]
    if a.forward.inline is not None:
        values = a.forward.inline(script, params, keep_places=True)
        if results:
            script.line(f"{', '.join(results)}, = {', '.join(values)},")
    else:
        call = f"{script.names.name(a.forward.call, 'forward')}([{', '.join(params)}])"
        script.line(f"{', '.join(results)}, = {call}" if results else call)
    for symbol, result in a.names.sizes.results.items() if a.names.sizes is not None else ():
        script.line(f"{symbol} = {result}")
    for i in sorted(a.view_results):
        script.line(f"{result_name(i)} = {result_name(i)}.detach()")
    outputs.emit_strides(script, a)
    outputs.emit_apart(script, a)
    updates.emit_versions(script, a)
    updates.emit_hidden(script, a)


def _graded_sections(script: Script, a: Assembly) -> None:
    """Nodes, tracked updates and views, in grad mode."""
    set_grad = script.names.name(set_grad_enabled, "set_grad")
    tracked = any(f.history_changed for f in a.facts.inputs)
    if a.joint.grad_before or not (a.nodes or a.facts.roots or tracked):
        _emit_graded(script, a)
        return
    script.line(f"{set_grad}(True)")
    with script.block("try:"):
        _emit_graded(script, a)
    with script.block("finally:"):
        script.line(f"{set_grad}(False)")


def _emit_graded(script: Script, a: Assembly) -> None:
    for node in a.nodes:
        if node.direct:
            return
        for t in node.targets:
            if t.kind == "view":
                outputs.emit_grown(script, a, t.index)
            elif (changed := changed_input(a.joint, t)) is not None:
                updates.emit_ahead(script, a, changed)
        outs = ", ".join(_exit_name(script, a, i) for i in node.exits)
        saved = "".join(f"{name}, " for name in node.saved)
        sizes = "".join(f"{name}, " for name in node.sizes)
        targets = "".join(f", {target_name(t, a.joint)}" for t in node.targets)
        if not node.targets:
            targets = f", {script.names.name(nowhere(), 'nowhere')}"
        apply = script.names.name(node.apply, "apply")
        single = "" if len(node.exits) > 1 else ","
        call = f"{apply}(({outs}{single}), ({saved}), ({sizes}){targets})"
        _take(script, node, outs, call)
    if a.joint.count < a.results:
        script.line(f"del {', '.join(result_name(i) for i in range(a.joint.count, a.results))}")
    updates.emit_tracked(script, a)
    updates.emit_watches(script, a)
    outputs.emit_unseen_looks(script, a)
    outputs.emit(script, a)


def nowhere() -> Tensor:
    """A leaf for nodes that lead to no input, so that their outputs require grad all the same."""
    return torch.empty(0, requires_grad=True)


def _exit_name(script: Script, a: Assembly, i: int) -> str:
    """The name of something that a node adopts; passages have no memory of their own."""
    if i < a.joint.count:
        return result_name(i)
    passage, literal = a.joint.exits[i], script.names.literal
    made = f"{literal(passage.size)}, {literal((0,) * len(passage.size))}, dtype={literal(passage.dtype)}"
    empty = script.names.name(torch.empty_strided, "f_empty_strided")
    script.line(f"passage{i} = {empty}({made}, device={literal(passage.device)})")
    return f"passage{i}"


def changed_input(joint: Joint, target: Target) -> int | None:
    """The input that a target is, as the call has left it; if it can be so that early."""
    if target.kind != "exit" or target.passage:
        return None
    index = next((i for i, position in joint.updated.items() if position == target.index), None)
    fact = None if index is None or index < 0 else joint.facts.input(index)  # not one of several in one base
    return index if fact is not None and fact.only_written else None


def target_name(target: Target, joint: Joint) -> str:
    """A node's input in the entry function."""
    changed = changed_input(joint, target)
    if changed is not None:
        return f"p{changed}"
    if target.kind == "input":
        return f"p{target.index}"
    if target.kind == "view":
        return f"out{target.index}"
    if target.kind == "exit":
        return f"passage{target.index}" if target.passage else result_name(target.index)
    if target.kind in ("inside", "member"):
        return target.name
    return f"leaf_{target.kind}_{target.index}"
