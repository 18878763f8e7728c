"""On a GPU: gradients are eager's at every budget, and random numbers that are drawn again are the same."""

from collections.abc import Callable

import pytest
import torch
from partition_cases import BUDGETS, Checkpointed, Dropout, Normed, trained
from torch import nn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("make", [Dropout, Normed, Checkpointed])
def test_equal_at_every_budget(make: Callable[[], nn.Module], order: int) -> None:
    expected = trained(make, order, "cuda")
    for budget in BUDGETS:
        found = trained(make, order, "cuda", memory_budget=budget, frontend="trace")
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(trained(make, order, "cuda", memory="less", frontend="trace"), expected)
