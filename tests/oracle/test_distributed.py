"""Several processes, as in eager: DDP, FSDP2, parallel modules, functions of DTensors, collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch was built without torch.distributed, or without gloo", allow_module_level=True)

from . import distributed_cases as cases
from .processes import Pool

WAYS = ["dynamo", "backend", "trace"]
BOTH = ["dynamo", "trace"]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool(2)
    yield made
    made.stop()


def fully_compiled(pool: Pool, case: Callable[..., None], *args: Any) -> int:
    """As in eager, and no call ran uncompiled; how many graphs were compiled."""
    told = pool.run(case, *args)
    assert told.uncompiled == []
    assert told.graphs > 0
    return told.graphs


def refused(pool: Pool, reason: str, case: Callable[..., None], *args: Any) -> None:
    """As in eager, uncompiled, for a reason that names the front end to use."""
    told = pool.run(case, *args)
    assert told.graphs == 0
    assert any(reason in text and 'frontend="dynamo"' in text for text in told.uncompiled), told.uncompiled


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}],
    ids=lambda options: next(iter(options), "plain"),
)
@pytest.mark.parametrize(
    ("way", "place"), [("dynamo", "outside"), ("backend", "inside"), ("trace", "inside")]
)
def test_ddp(pool: Pool, way: str, place: str, options: dict[str, Any]) -> None:
    fully_compiled(pool, cases.ddp, way, place, options)


@pytest.mark.parametrize("case", [cases.ddp_accumulates, cases.ddp_forces, cases.ddp_branches])
@pytest.mark.parametrize(("way", "place"), [("dynamo", "outside"), ("dynamo", "inside"), ("trace", "inside")])
def test_ddp_in_other_ways(pool: Pool, case: Callable[..., None], way: str, place: str) -> None:
    fully_compiled(pool, case, way, place)


@pytest.mark.parametrize(("way", "place"), [("dynamo", "outside"), ("backend", "inside")])
def test_dynamo_splits_the_graph_at_buckets(pool: Pool, way: str, place: str) -> None:
    assert fully_compiled(pool, cases.ddp_buckets, way, place) > 2


def test_ddp_is_not_traced(pool: Pool) -> None:
    refused(pool, "DistributedDataParallel talks to other processes", cases.ddp, "trace", "outside", {})


@pytest.mark.parametrize("case", [cases.fsdp, cases.fsdp_blocks, cases.fsdp_accumulates])
def test_fsdp(pool: Pool, case: Callable[..., None]) -> None:
    fully_compiled(pool, case, "dynamo")


def test_fsdp_is_not_traced(pool: Pool) -> None:
    refused(pool, "fully_shard talks to other processes", cases.fsdp, "trace")


@pytest.mark.parametrize("way", WAYS)
def test_tensor_parallel_modules(pool: Pool, way: str) -> None:
    fully_compiled(pool, cases.tensor_parallel, way)


FUNCTIONS = [
    cases.local,
    cases.matmul,
    cases.partial,
    cases.redistribute,
    cases.in_and_out,
    cases.changed,
    cases.dropout,
    cases.all_reduce,
    cases.all_gather,
    cases.scattered,
    cases.unused,
    cases.twice,
]


@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_functions(pool: Pool, way: str, fn: Callable[..., Any]) -> None:
    fully_compiled(pool, cases.function, way, fn)


def test_a_subclass_asks_what_a_random_op_would_give(pool: Pool) -> None:
    """It asks once for each kind of call, with fake tensors, which draw no numbers: so here only."""
    fully_compiled(pool, cases.function, "trace", cases.noise)


def test_collectives_in_place(pool: Pool) -> None:
    fully_compiled(pool, cases.function, "dynamo", cases.in_place)


def test_collectives_in_place_are_not_traced(pool: Pool) -> None:
    refused(pool, "exchanges tensors with other processes in place", cases.function, "trace", cases.in_place)


@pytest.mark.parametrize("way", BOTH)
def test_one_process_compiles_and_the_other_does_not(pool: Pool, way: str) -> None:
    fully_compiled(pool, cases.one_compiles, way)


@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize(
    "case",
    [cases.waits_for_inputs, cases.waits_for_parts, cases.waits_for_tangents],
    ids=lambda c: c.__name__,
)
def test_results_that_are_still_on_their_way(pool: Pool, case: Callable[..., None], way: str) -> None:
    fully_compiled(pool, case, way)
