"""What is left out when a compiled graph is looked for: keys, results and the settings of others stay."""

from __future__ import annotations

import gc
import io
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aheadgrad
from aheadgrad.backends.contract import Request
from aheadgrad.report import progress
from aheadgrad.torchlayer import dynamo_besides, inductor_lookup
from aheadgrad.torchlayer.collection import collection_again, garbage_of_its_own


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache of Inductor's, in a process that has not asked for the key of torch yet."""
    from torch._inductor.codecache import torch_key

    key = torch_key()
    forget = torch_key.clear, inductor_lookup._tell_key_of_torch.cache_clear  # type: ignore[attr-defined]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for each in forget:
        each()
    yield tmp_path
    for each in forget:
        each()
    torch_key.set(key)  # type: ignore[attr-defined]


def told_key() -> bytes:
    from torch._inductor.codecache import torch_key

    torch_key.clear()  # type: ignore[attr-defined]
    inductor_lookup._tell_key_of_torch.cache_clear()
    inductor_lookup._tell_key_of_torch()
    return torch_key()


def test_the_digest_of_torch_is_kept_and_read_again(place: Path) -> None:
    real = told_key()
    (note,) = place.iterdir()
    assert bytes.fromhex(note.read_text()) == real
    note.write_text("ab" * 32)
    assert told_key() == bytes.fromhex("ab" * 32)


@pytest.mark.parametrize("damaged", ["", "ab", "no digest"])
def test_a_damaged_digest_is_made_again(place: Path, damaged: str) -> None:
    real = told_key()
    (note,) = place.iterdir()
    note.write_text(damaged)
    assert told_key() == real
    assert note.read_text() == real.hex()


def test_a_changed_file_of_torch_is_another_torch(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    file = tmp_path / "part" / "ops.py"
    file.write_text("x = 1")
    before = inductor_lookup._look_of(tmp_path)
    assert inductor_lookup._look_of(tmp_path) == before
    file.write_text("x = 2")
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    assert inductor_lookup._look_of(tmp_path) != before


def test_keys_are_those_of_inductor(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import codecache

    monkeypatch.setattr(inductor_lookup, "_TRACE", logging.Logger("nobody listens"))
    requests: list[Request] = []

    def noting(request: Request) -> Any:
        requests.append(request)
        return torch.fx.Interpreter(request.module).boxed_run

    w = torch.randn(3, 3, requires_grad=True)
    aheadgrad.compile(lambda x: (x @ w).sin().sum(), backend=noting)(torch.randn(2, 3)).backward()
    assert {r.role for r in requests} == {"forward", "backward"}
    for request in requests:
        given = request.module, request.example_inputs(), {}, []
        key, lines = codecache.compiled_fx_graph_hash(*given)
        with inductor_lookup.looked_up_quickly():
            assert codecache.compiled_fx_graph_hash(*given) == (key, [])
        assert lines


def test_a_graph_whose_text_was_only_read_can_still_be_run() -> None:
    from torch._inductor import codecache

    module: Any = torch.fx.symbolic_trace(lambda x: x.sin() + 1)
    with inductor_lookup.looked_up_quickly():
        codecache.compiled_fx_graph_hash(module, [torch.ones(2)], {}, [])
    assert torch.equal(module(torch.ones(2)), torch.ones(2).sin() + 1)


def test_where_torch_lies_is_told_as_by_torch_without_setuptools() -> None:
    script = (
        "import sys; from torch._inductor import cpp_builder\n"
        "from aheadgrad.torchlayer import inductor_lookup\n"
        "told = cpp_builder._get_torch_related_args\n"
        "quickly = inductor_lookup._without_setuptools(told)(True, False)\n"
        "assert 'setuptools' not in sys.modules\n"
        "assert quickly == told(True, False)\n"
        "assert 'setuptools' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


class Knot:
    def __init__(self) -> None:
        self.own = self


def test_a_compile_collects_its_own_garbage_and_nothing_else() -> None:
    gc.collect()
    before = Knot()
    assert gc.isenabled()
    with garbage_of_its_own():
        assert not gc.isenabled()
        frozen = gc.get_freeze_count()
        assert frozen
        with collection_again():
            assert gc.isenabled()
        assert not gc.isenabled()
        for _ in range(3):
            Knot()
    assert gc.isenabled()
    assert not gc.get_freeze_count()
    assert not [k for k in gc.get_objects() if type(k) is Knot and k is not before]


def test_who_has_frozen_or_stopped_collection_finds_it_so() -> None:
    frozen = Knot()
    gc.freeze()
    after = Knot()
    try:
        with garbage_of_its_own():
            pass
        seen = [k for k in gc.get_objects() if k is frozen or k is after]  # none that is frozen
        assert seen == [after]
    finally:
        gc.unfreeze()
    gc.disable()
    try:
        with garbage_of_its_own(), collection_again():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_error_leaves_collection_as_it_was() -> None:
    class Refuses(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        aheadgrad.compile(Refuses())(torch.ones(2))
    assert gc.isenabled()
    assert not gc.get_freeze_count()


def test_dynamo_loads_nothing_to_look_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.variables.higher_order_ops import LocalMapWrappedHigherOrderVariable as Mapped

    monkeypatch.delitem(sys.modules, dynamo_besides._LOCAL_MAP, raising=False)
    with dynamo_besides.nothing_besides():
        assert not Mapped.should_wrap_in_hop(len)
    assert dynamo_besides._LOCAL_MAP not in sys.modules


@pytest.mark.parametrize(("log", "name"), [("trace_call", "get_funcname"), ("guards", "profile")])
def test_logs_that_are_asked_for_are_whole(log: str, name: str) -> None:
    from torch._dynamo import guards, symbolic_convert

    both = {"get_funcname": symbolic_convert.get_funcname, "profile": guards.profile_guard_manager}
    torch._logging.set_logs(**{log: True})
    try:
        with dynamo_besides.nothing_besides():
            now = {"get_funcname": symbolic_convert.get_funcname, "profile": guards.profile_guard_manager}
            assert [k for k in both if now[k] is both[k]] == [name]
    finally:
        torch._logging.set_logs()


def test_progress_is_shown_at_a_terminal_to_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "_PATIENCE", 0.01)
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    with progress.progress("compiling a backward"):
        time.sleep(0.4)
    assert "compiling a backward" in shown.getvalue()
