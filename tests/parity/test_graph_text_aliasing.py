"""Forward graphs of programs whose outputs are views, or whose inputs get other metadata."""

from __future__ import annotations

import torch

from . import programs as p
from .common import Inputs, forward_text


def test_view_of_an_input() -> None:
    expected = """\
def forward(self, arg0_1):
    view = torch.ops.aten.view.default(arg0_1, [-1]);  arg0_1 = None
    return (view,)"""
    assert forward_text(p.flat, p.leaves(1, 2, 2)) == expected


def test_views_of_changed_and_unchanged_inputs() -> None:
    expected = """\
def forward(self, primals_1, primals_2, primals_3):
    clone = torch.ops.aten.clone.default(primals_1);  primals_1 = None
    clone_1 = torch.ops.aten.clone.default(primals_3);  primals_3 = None
    mul = torch.ops.aten.mul.Tensor(clone, 2);  clone = None
    mul_1 = torch.ops.aten.mul.Tensor(clone_1, 3);  clone_1 = None
    view = torch.ops.aten.view.default(primals_2, [2, 2]);  primals_2 = None
    view_2 = torch.ops.aten.view.default(mul_1, [2, 2])
    return (mul, mul_1, view, view_2)"""
    assert forward_text(p.scale_two_view_two, p.leaves(3, 2, 2)) == expected


def test_views_of_inputs_changed_in_data_and_in_metadata() -> None:
    expected = """\
def forward(self, primals_1, primals_2, primals_3):
    clone = torch.ops.aten.clone.default(primals_2);  primals_2 = None
    view = torch.ops.aten.view.default(primals_3, [2, 2]);  primals_3 = None
    mul = torch.ops.aten.mul.Tensor(clone, 3);  clone = None
    t = torch.ops.aten.t.default(view);  view = None
    view_1 = torch.ops.aten.view.default(primals_1, [2, 2]);  primals_1 = None
    view_3 = torch.ops.aten.view.default(t, [2, 2])
    view_4 = torch.ops.aten.view.default(mul, [2, 2])
    return (mul, t, view_1, view_4, view_3)"""
    assert forward_text(p.scale_one_transpose_one_view_all, p.leaves(3, 2, 2)) == expected


def test_view_of_a_changed_input() -> None:
    expected = """\
def forward(self, primals_1):
    clone = torch.ops.aten.clone.default(primals_1);  primals_1 = None
    add = torch.ops.aten.add.Tensor(clone, 1);  clone = None
    view_1 = torch.ops.aten.view.default(add, [-1])
    return (add, view_1)"""
    assert forward_text(p.increment_and_flat, p.leaves(1, 2, 2)) == expected


def test_diagonal_of_a_transposed_input() -> None:
    expected = """\
def forward(self, primals_1, primals_2, primals_3, primals_4):
    view = torch.ops.aten.view.default(primals_2, [2, 2]);  primals_2 = None
    clone = torch.ops.aten.clone.default(primals_3);  primals_3 = None
    transpose = torch.ops.aten.transpose.int(view, 1, 0);  view = None
    add = torch.ops.aten.add.Tensor(clone, 1);  clone = None
    add_1 = torch.ops.aten.add.Tensor(primals_4, 1);  primals_4 = None
    diagonal = torch.ops.aten.diagonal.default(transpose)
    add_2 = torch.ops.aten.add.Tensor(primals_1, add);  primals_1 = None
    return (transpose, add, add_1, diagonal, add_2)"""
    assert forward_text(p.transpose_increment_diagonal, p.leaves(4, 2, 2)) == expected


def test_single_view_of_an_intermediate_needs_no_base() -> None:
    expected = """\
def forward(self, primals_1):
    mul = torch.ops.aten.mul.Tensor(primals_1, 3);  primals_1 = None
    view = torch.ops.aten.view.default(mul, [-1]);  mul = None
    return (view,)"""
    assert forward_text(p.triple_flat, p.leaves(1, 3, 3)) == expected


def test_view_of_an_intermediate_without_grad_needs_no_base() -> None:
    def make() -> list[torch.Tensor]:
        return [torch.randn(3, 3), torch.randn(3, 3, requires_grad=True)]

    expected = """\
def forward(self, primals_1, primals_2):
    mul = torch.ops.aten.mul.Tensor(primals_1, 3);  primals_1 = None
    view = torch.ops.aten.view.default(mul, [-1]);  mul = None
    add = torch.ops.aten.add.Tensor(primals_2, 1);  primals_2 = None
    return (view, add)"""
    assert forward_text(p.triple_flat_beside, make) == expected


def test_two_views_of_an_intermediate_bring_their_base() -> None:
    expected = """\
def forward(self, primals_1):
    mul = torch.ops.aten.mul.Tensor(primals_1, 3);  primals_1 = None
    view = torch.ops.aten.view.default(mul, [-1])
    view_1 = torch.ops.aten.view.default(mul, [-1])
    return (view, view_1, mul)"""
    assert forward_text(p.triple_flat_twice, p.leaves(1, 3, 3)) == expected


def test_base_returned_after_its_view() -> None:
    expected = """\
def forward(self, primals_1):
    mul = torch.ops.aten.mul.Tensor(primals_1, 3);  primals_1 = None
    view = torch.ops.aten.view.default(mul, [-1])
    return (view, mul)"""
    assert forward_text(p.triple_view_then_base, p.leaves(1, 3, 3)) == expected


def test_base_returned_before_its_view() -> None:
    expected = """\
def forward(self, primals_1):
    mul = torch.ops.aten.mul.Tensor(primals_1, 3);  primals_1 = None
    view = torch.ops.aten.view.default(mul, [-1])
    return (mul, view)"""
    assert forward_text(p.triple_base_then_view, p.leaves(1, 3, 3)) == expected


def test_base_returned_with_a_view_and_a_detached_view() -> None:
    expected = """\
def forward(self, primals_1):
    mul = torch.ops.aten.mul.Tensor(primals_1, 3);  primals_1 = None
    view = torch.ops.aten.view.default(mul, [-1])
    select = torch.ops.aten.select.int(mul, 0, 0)
    detach = torch.ops.aten.detach.default(select);  select = None
    return (view, mul, detach)"""
    assert forward_text(p.triple_view_base_detached_row, p.leaves(1, 3, 3)) == expected


def test_intermediate_transposed_in_place_and_detached() -> None:
    expected = """\
def forward(self, primals_1):
    mul = torch.ops.aten.mul.Tensor(primals_1, 3)
    t = torch.ops.aten.t.default(mul);  mul = None
    add = torch.ops.aten.add.Tensor(primals_1, 1);  primals_1 = None
    return (t, add)"""
    assert forward_text(p.triple_transposed_detached, p.leaves(1, 2, 4)) == expected


def test_views_of_two_intermediates_bring_one_base() -> None:
    expected = """\
def forward(self, primals_1):
    mul = torch.ops.aten.mul.Tensor(primals_1, 3)
    mul_1 = torch.ops.aten.mul.Tensor(primals_1, 4);  primals_1 = None
    view = torch.ops.aten.view.default(mul, [-1])
    transpose = torch.ops.aten.transpose.int(mul_1, 1, 0);  mul_1 = None
    transpose_1 = torch.ops.aten.transpose.int(mul, 1, 0)
    return (view, transpose, transpose_1, mul)"""
    assert forward_text(p.views_of_two, p.leaves(1, 3, 3)) == expected


def test_all_kinds_of_aliasing_together() -> None:
    def make() -> Inputs:
        x = torch.randn(1, 2, 4, requires_grad=True).clone()
        return Inputs([x], [x])

    expected = """\
def forward(self, primals_1):
    view = torch.ops.aten.view.default(primals_1, [1, 2, 4]);  primals_1 = None
    transpose = torch.ops.aten.transpose.int(view, 1, 0);  view = None
    mul = torch.ops.aten.mul.Tensor(transpose, 2)
    squeeze = torch.ops.aten.squeeze.default(mul)
    transpose_1 = torch.ops.aten.transpose.int(mul, 1, 0)
    unsqueeze = torch.ops.aten.unsqueeze.default(transpose, 0)
    return (transpose, squeeze, transpose_1, unsqueeze, mul)"""
    assert forward_text(p.every_kind_of_view, make) == expected


def test_input_changed_in_metadata_and_then_in_data() -> None:
    expected = """\
def forward(self, primals_1):
    clone = torch.ops.aten.clone.default(primals_1);  primals_1 = None
    t = torch.ops.aten.t.default(clone)
    select = torch.ops.aten.select.int(t, 0, 0);  t = None
    mul = torch.ops.aten.mul.Tensor(select, 2);  select = None
    t_1 = torch.ops.aten.t.default(clone);  clone = None
    select_scatter = torch.ops.aten.select_scatter.default(t_1, mul, 0, 0);  t_1 = mul = None
    t_2 = torch.ops.aten.t.default(select_scatter);  select_scatter = None
    t_4 = torch.ops.aten.t.default(t_2)
    t_6 = torch.ops.aten.t.default(t_2);  t_2 = None
    view_1 = torch.ops.aten.view.default(t_6, [3, 3]);  t_6 = None
    return (t_4, view_1)"""
    assert forward_text(p.transpose_then_scale_a_row, p.leaves(1, 3, 3)) == expected


def test_metadata_change_and_views_of_inputs_alone_make_an_inference_graph() -> None:
    expected = """\
def forward(self, arg0_1, arg1_1):
    t = torch.ops.aten.t.default(arg0_1);  arg0_1 = None
    view = torch.ops.aten.view.default(arg1_1, [3, 3]);  arg1_1 = None
    view_1 = torch.ops.aten.view.default(t, [3, 3])
    return (t, view, view_1)"""
    assert forward_text(p.transpose_one_view_both, p.leaves(2, 3, 3)) == expected


def test_input_that_begins_to_require_grad() -> None:
    def make() -> list[torch.Tensor]:
        return [torch.randn(3, 3), torch.randn(3, 3, requires_grad=True)]

    expected = """\
def forward(self, primals_1, primals_2):
    mul = torch.ops.aten.mul.Tensor(primals_1, 3);  primals_1 = None
    mul_1 = torch.ops.aten.mul.Tensor(primals_2, 4);  primals_2 = None
    return (mul, mul_1)"""
    assert forward_text(p.begin_to_require_grad, make) == expected
