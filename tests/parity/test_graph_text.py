"""Forward graphs print, to the letter, as those of torch's own AOTAutograd do.

Inputs are non-leaves unless said otherwise. Where a program keeps changes of inputs inside the graph
(`keep=True`) the text has a `copy_` or `set_`; otherwise the new values are the first outputs.
torch 2.13 prints every one of these texts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import programs as p
from .common import forward_text


def test_change_seen_by_autograd_clones_the_input_first() -> None:
    expected = """\
def forward(self, primals_1):
    clone = torch.ops.aten.clone.default(primals_1);  primals_1 = None
    mul = torch.ops.aten.mul.Tensor(clone, 2);  clone = None
    mul_1 = torch.ops.aten.mul.Tensor(mul, 3)
    return (mul, mul_1)"""
    assert forward_text(p.double_then_triple, p.leaves(1, 3, 3)) == expected


def test_changed_input_returned_is_there_twice() -> None:
    expected = """\
def forward(self, primals_1):
    clone = torch.ops.aten.clone.default(primals_1);  primals_1 = None
    mul = torch.ops.aten.mul.Tensor(clone, 2);  clone = None
    return (mul, mul)"""
    assert forward_text(p.double_and_return, p.leaves(1, 3, 3)) == expected


def test_two_of_three_inputs_changed() -> None:
    expected = """\
def forward(self, primals_1, primals_2, primals_3):
    clone = torch.ops.aten.clone.default(primals_1);  primals_1 = None
    clone_1 = torch.ops.aten.clone.default(primals_3);  primals_3 = None
    mul = torch.ops.aten.mul.Tensor(clone, 2);  clone = None
    mul_1 = torch.ops.aten.mul.Tensor(clone_1, 2);  clone_1 = None
    add = torch.ops.aten.add.Tensor(mul, primals_2);  primals_2 = None
    add_1 = torch.ops.aten.add.Tensor(add, mul_1);  add = None
    return (mul, mul_1, add_1)"""
    assert forward_text(p.double_first_and_last, p.leaves(3, 3, 3)) == expected


def test_out_argument_is_copied_into() -> None:
    expected = """\
def forward(self, arg0_1, arg1_1):
    sin = torch.ops.aten.sin.default(arg0_1);  arg0_1 = None
    copy_ = torch.ops.aten.copy_.default(arg1_1, sin);  arg1_1 = sin = None
    return (copy_,)"""
    assert forward_text(p.sine_into, p.leaves(2, 3, 3, grad=False), keep=True) == expected


def test_change_hidden_from_autograd_through_a_view_stays_inside() -> None:
    expected = """\
def forward(self, primals_1):
    view = torch.ops.aten.view.default(primals_1, [-1])
    mul = torch.ops.aten.mul.Tensor(view, 2);  view = None
    view_1 = torch.ops.aten.view.default(mul, [4]);  mul = None
    add = torch.ops.aten.add.Tensor(view_1, 1)
    copy_ = torch.ops.aten.copy_.default(primals_1, view_1);  primals_1 = view_1 = copy_ = None
    return (add,)"""
    assert forward_text(p.double_flat_unseen, p.leaves(1, 4), keep=True) == expected


def test_change_hidden_from_autograd_stays_inside() -> None:
    expected = """\
def forward(self, primals_1):
    mul = torch.ops.aten.mul.Tensor(primals_1, 2)
    add = torch.ops.aten.add.Tensor(mul, 3)
    copy_ = torch.ops.aten.copy_.default(primals_1, mul);  primals_1 = mul = copy_ = None
    return (add,)"""
    assert forward_text(p.double_unseen, p.leaves(1, 4), keep=True) == expected


def test_no_output_needs_grad_makes_an_inference_graph() -> None:
    expected = """\
def forward(self, arg0_1):
    mul = torch.ops.aten.mul.Tensor(arg0_1, 2)
    add = torch.ops.aten.add.Tensor(mul, 3)
    copy_ = torch.ops.aten.copy_.default(arg0_1, mul);  arg0_1 = mul = copy_ = None
    return (add,)"""
    assert forward_text(p.double_and_add_unseen, p.leaves(1, 4), keep=True) == expected


def test_adopted_memory_changed_afterwards() -> None:
    expected = """\
def forward(self, primals_1, primals_2):
    mul = torch.ops.aten.mul.Tensor(primals_2, 2)
    add = torch.ops.aten.add.Tensor(mul, mul)
    set_ = torch.ops.aten.set_.source_Tensor(primals_1, mul);  primals_1 = set_ = None
    copy_ = torch.ops.aten.copy_.default(primals_2, mul);  primals_2 = mul = copy_ = None
    return (add,)"""
    assert forward_text(p.adopt_then_double_source, p.leaves(2, 3, 3), keep=True) == expected


def test_two_adoptions_that_cancel_leave_no_trace() -> None:
    expected = """\
def forward(self, primals_1):
    arange = torch.ops.aten.arange.default(9, dtype = torch.float32, device = device(type='cpu'), pin_memory = False)
    alias = torch.ops.aten.alias.default(primals_1);  primals_1 = None
    view = torch.ops.aten.view.default(arange, [3, 3]);  arange = None
    add = torch.ops.aten.add.Tensor(alias, view);  alias = view = None
    return (add,)"""  # noqa: E501
    assert forward_text(p.adopt_and_come_back, p.leaves(1, 3, 3), keep=True) == expected


def test_storage_resized_up() -> None:
    expected = """\
def forward(self, primals_1):
    resize_storage_bytes_ = torch.ops.inductor.resize_storage_bytes_.default(primals_1, 32);  resize_storage_bytes_ = None
    ones = torch.ops.aten.ones.default([8], device = device(type='cpu'), pin_memory = False)
    copy = torch.ops.aten.copy.default(primals_1, ones);  ones = None
    add = torch.ops.aten.add.Tensor(copy, 1)
    copy_ = torch.ops.aten.copy_.default(primals_1, copy);  primals_1 = copy = copy_ = None
    return (add,)"""  # noqa: E501
    assert forward_text(p.grow_and_fill, p.hollow(8), keep=True, nonleaf=False) == expected


def test_storage_resized_down() -> None:
    expected = """\
def forward(self, primals_1):
    sin = torch.ops.aten.sin.default(primals_1)
    resize_storage_bytes_ = torch.ops.inductor.resize_storage_bytes_.default(primals_1, 0);  resize_storage_bytes_ = None
    return (sin, primals_1)"""  # noqa: E501
    assert forward_text(p.sine_then_empty, p.leaves(1, 8), keep=True, nonleaf=False) == expected


class Affine(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        return result


def test_module_in_training_lifts_its_parameters() -> None:
    expected = """\
def forward(self, primals_1, primals_2, primals_3):
    t = torch.ops.aten.t.default(primals_1);  primals_1 = None
    addmm = torch.ops.aten.addmm.default(primals_2, primals_3, t);  primals_2 = None
    return (addmm, primals_3, t)"""
    assert forward_text(Affine(), p.leaves(1, 3, 3)) == expected


def test_module_in_inference_mode_lifts_its_parameters() -> None:
    with torch.inference_mode():
        text = forward_text(Affine(), p.leaves(1, 3, 3, grad=False))
    expected = """\
def forward(self, arg0_1, arg1_1, arg2_1):
    t = torch.ops.aten.t.default(arg0_1);  arg0_1 = None
    addmm = torch.ops.aten.addmm.default(arg1_1, arg2_1, t);  arg1_1 = arg2_1 = t = None
    return (addmm,)"""
    assert text == expected
