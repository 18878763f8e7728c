"""The whole walk, in order. Every way in (compile, capture, compat, Dynamo) takes it.

call        what to capture: the user's function and its flat inputs
forward     ONE run of the function under functionalization
facts       what happened to inputs, what outputs share memory with
joint       gradients recorded in the same trace
split       forward and backward programs, and what is saved between them
compiled    executables
entry       one generated function with everything around the call
rehearsal   ops that eager would run and the program does not need are run once: they may raise
"""

from __future__ import annotations

from aheadgrad.backends.stage import compile_split
from aheadgrad.options import Options
from aheadgrad.partition.stage import partition
from aheadgrad.recording.captured import Captured, capture_call
from aheadgrad.recording.forward import Call
from aheadgrad.recording.rehearse import rehearse
from aheadgrad.report.journal import Journal
from aheadgrad.runtime.entry import Entry, make_entry
from aheadgrad.torchlayer.lock import RECORDING


def run_capture(call: Call, options: Options, journal: Journal) -> Captured:
    """From a call to its joint program."""
    with RECORDING:
        return capture_call(call, options, journal)


def run(call: Call, options: Options) -> Entry:
    """From a call to a compiled entry."""
    journal = Journal()
    with RECORDING:
        captured = run_capture(call, options, journal)
        with journal.stage("split"):
            split = partition(captured, options)
        with journal.stage("compile"):
            compiled = compile_split(split, options)
        with journal.stage("assemble"):
            entry = make_entry(captured, split, compiled, options, journal)
        with journal.stage("rehearse"):
            rehearse(captured)
        return entry
