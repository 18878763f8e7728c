"""Stage values as plain data and back: everything a program can hold, the same text, the same bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import aheadgrad
from aheadgrad.backends.eager import compile_eager
from aheadgrad.codec.decoding import decode, parsed
from aheadgrad.codec.encoding import Encoded, encode
from aheadgrad.errors import ArtifactError
from aheadgrad.facts.facts import Constant, Geometry
from aheadgrad.partition.split import split
from aheadgrad.program.program import Program
from aheadgrad.program.slots import Parameter, Slot, Tangent, UserInput, UserOutput
from aheadgrad.program.values import Op, Origin, Port, Region, TensorType, Value
from aheadgrad.testing.programs import generate
from aheadgrad.torchlayer.replay import Drawn, Replayed
from aheadgrad.torchlayer.symbols import Number, Shape

aten = torch.ops.aten
CPU = torch.device("cpu")


def again(value: Any) -> Any:
    """A value through text and back, strictly; what is written of that is the same."""
    encoded = encode(value)
    made = decode(Encoded(parsed(encoded.text()), encoded.tensors), ())
    assert encode(made).text() == encoded.text()
    return made


def symbol(name: str = "s0") -> Any:
    return sympy.Symbol(name, integer=True, positive=True)


def looks(*size: Any) -> TensorType:
    return TensorType(torch.float32, size, (1,) * len(size), 0, CPU)


PLAIN = [
    None,
    True,
    0,
    -(1 << 70),
    "text with \n and ü",
    0.1,
    -0.0,
    1e-320,
    math.inf,
    -math.inf,
    complex(-0.0, math.inf),
    b"\x00\xff",
    (1, [2, (3,)], ()),
    {1: "a", (2, None): [], "x": {}},
    frozenset({3, 1, 2}),
    slice(None, 3, -1),
    ...,
    torch.Size([2, 0]),
    torch.bfloat16,
    torch.sparse_csr,
    torch.channels_last,
    torch.device("cuda", 1),
    aten.mul.Tensor,
    aten.mul,
    torch.ops.higher_order.cond,
    Origin("model.py", 3, "forward"),
    Region(1, True),
    Tangent(Parameter("layer.weight")),
    Geometry((2, 3), (3, 1), 0),
    Constant((1, "x")),
    Drawn(aten.native_dropout.default, CPU),
    Replayed(aten.native_dropout.default, CPU),
    TwoTensor,
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda v: f"{type(v).__name__} {v}"[:40])
def test_plain_values(value: Any) -> None:
    made = again(value)
    assert type(made) is type(value)
    assert repr(made) == repr(value)
    assert made == value


def test_floats_are_exact() -> None:
    assert math.isnan(again(math.nan))
    assert math.copysign(1, again(-0.0)) == -1
    assert again(0.1 + 0.2).hex() == (0.1 + 0.2).hex()
    assert math.copysign(1, again(complex(-0.0, 1)).real) == -1


def _expressions() -> list[Any]:
    from torch.utils._sympy.functions import CleanDiv, FloorDiv, Max, Min, Mod, PythonMod, ToFloat

    s, t = symbol("s0"), symbol("s1")
    u = sympy.Symbol("u0", integer=True)
    return [
        s,
        u,
        s * 3 + t,
        s**2 * t - 1,
        FloorDiv(s + 1, 2),
        CleanDiv(s * t, 7),
        Max(s, t),
        Min(s, 2 * t),
        Mod(s, 3),
        PythonMod(u, t),
        ToFloat(s) * 0.5,
        sympy.Rational(1, 3) * s,
        sympy.Eq(Mod(s, 4), 0),
        sympy.And(s > 3, sympy.Ne(t, s)),
        sympy.Not(s < t),
        sympy.Integer(5),
        sympy.true,
        sympy.floor(s / 2),
    ]


@pytest.mark.parametrize("expr", _expressions(), ids=str)
def test_expressions(expr: Any) -> None:
    made = again(Number(expr, int, 7))
    assert made.expr == expr
    assert str(made.expr) == str(expr)
    assert made.hint == 7
    assert {x.name: x.assumptions0 for x in made.expr.free_symbols} == {
        x.name: x.assumptions0 for x in expr.free_symbols
    }


def test_symbolic_sizes_and_shapes() -> None:
    size = Number(symbol(), int, 4)
    assert again(Shape((size, 3))) == (size, 3)
    assert type(again(Shape((size, 3)))) is Shape
    assert again(looks(size, 2)) == looks(size, 2)


def test_one_value_stays_one() -> None:
    x, y = Value(0, looks(3)), Value(1, looks(3), "y", 0)
    first, second, both = again((x, y, {x: [y, y]}))
    assert list(both) == [first]
    assert both[first][0] is both[first][1] is second
    assert first.type is second.type


def test_constants_stay_one_tensor() -> None:
    held = torch.randn(3)
    first, (second, third) = again((held, [held, held.clone()]))
    assert first is second is held
    assert third is not held


def test_origins_tell_nothing_of_the_machine() -> None:
    text = encode(Origin("/home/somebody/model.py", 1, "f")).text()
    assert "somebody" not in text
    assert again(Origin("C:\\users\\somebody\\model.py", 1, "f")).file == "model.py"


UNKNOWN = [object(), torch.Generator(), lambda: 1, {1, 2}, print, json, int.__add__, range(3), torch.load]


@pytest.mark.parametrize("value", UNKNOWN, ids=lambda v: type(v).__name__)
def test_what_is_not_in_the_table_is_refused_with_its_place(value: Any) -> None:
    op = Op(aten.mul.Tensor, (value,), {}, None, (), "mul_3")
    with pytest.raises(ArtifactError, match="in args of Op mul_3"):
        encode([op])


def test_nesting_without_end_is_refused() -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ArtifactError, match="nested"):
        encode(deep)
    data: Any = 1
    for _ in range(200):
        data = ["list", data]
    tree = {"kinds": [], "objects": [], "root": data}
    with pytest.raises(ArtifactError, match="nested"):
        decode(Encoded(tree))
    with pytest.raises(ArtifactError):
        parsed("[" * 200_000)


def mix(x: Tensor, w: Tensor) -> Any:
    h = (x @ w).relu()
    return h, h.sum(0), x.t(), torch.nn.functional.dropout(h, 0.5)


def update(x: Tensor, w: Tensor) -> Any:
    x = x * 2
    x.add_(w.sum())
    return x.view(-1), torch.topk(x, 2), x.to(torch.float64, memory_format=torch.channels_last) if 0 else x


def constants(x: Tensor, w: Tensor) -> Any:
    return x + torch.tensor([1.0, 2.0, 3.0, math.inf]), x.masked_fill(x > 0, -math.inf), x[..., 1:3]


def branches(x: Tensor, w: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x, w: x @ w, lambda x, w: (x * 2) @ w.t(), (x, w))


def writes(x: Tensor, w: Tensor) -> Any:
    w.mul_(2)
    return torch.cat([x, x]).reshape(x.shape[0] * 2, -1) @ w


PROGRAMS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (mix, update, constants, branches, writes)}


def example() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)


def runs_equal(first: Program, second: Program) -> None:
    """Both give the same for inputs of the types that they take."""
    inputs = [_input(p.value) for p in first.inputs]
    results: list[Any] = []
    for program in (first, second):
        torch.manual_seed(1)
        given = [t.clone() if isinstance(t, Tensor) else t for t in inputs]
        with torch.no_grad():
            try:
                results.append(compile_eager(program).call(given))
            except RuntimeError as error:  # an input has no room behind it for what it is a view of
                results.append(str(error))
    if isinstance(results[0], str):
        assert results[1] == results[0]
        return
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0, equal_nan=True)


def _input(value: Any) -> Any:
    if type(value) is not Value:
        return value.hint if type(value) is Number else value
    t = value.type
    made = torch.empty_strided(t.size, t.stride, dtype=t.dtype)
    if t.dtype is torch.uint8:
        return torch.get_rng_state()
    if t.dtype.is_complex:
        return made.fill_(1 + 2j)
    return made.zero_() if not t.dtype.is_floating_point else made.uniform_(0.1, 1)


@pytest.mark.parametrize("partition", ["default", "min_cut"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, partition: str) -> None:
    options = {"memory_budget": 0.2} if partition == "min_cut" else {}
    compiled = aheadgrad.compile(
        PROGRAMS[name], partition=partition, frontend="trace", fallback="error", **options
    )
    compiled(*example())
    joint = compiled.entries[0].entry.joint
    parts = split(joint)
    joint_again, parts_again = again((joint, parts))
    assert str(joint_again) == str(joint)
    assert str(joint_again.facts) == str(joint.facts)
    assert str(split(joint_again).forward) == str(parts.forward)
    pairs = zip((parts.forward, *parts.backwards), (parts_again.forward, *parts_again.backwards), strict=True)
    for first, second in pairs:
        assert str(second) == str(first)
        assert second.naming is joint_again.tape.naming
        runs_equal(first, second)


def test_generated_programs() -> None:
    """Programs of the fuzzer, but for those that cannot be recorded."""
    count = 0
    for seed in range(40):
        program = generate(seed)
        try:
            joint = aheadgrad.capture(program.fn, *program.make_inputs().args).joint
            parts = split(joint)
        except Exception:
            continue
        joint_again, parts_again = again((joint, parts))
        assert str(joint_again) == str(joint), seed
        pairs = zip(
            (parts.forward, *parts.backwards), (parts_again.forward, *parts_again.backwards), strict=True
        )
        for first, second in pairs:
            assert str(second) == str(first), seed
            if first is not None:
                runs_equal(first, second)
        count += 1
    assert count > 25


def test_subclasses() -> None:
    x = TwoTensor(torch.randn(3), torch.randn(3)).requires_grad_()
    joint = aheadgrad.capture(lambda x: (x * 2).sin(), x).joint
    made = again(joint)
    assert str(made) == str(joint)
    assert made.entrances[0].value.form == joint.entrances[0].value.form
    assert made.entrances[0].value.form.kind is TwoTensor


def test_a_class_that_is_not_here_is_named() -> None:
    tree = encode(TwoTensor).tree
    tree["root"][2] = "Nowhere"
    with pytest.raises(ArtifactError, match=r"import torch\.testing\._internal\.two_tensor"):
        decode(Encoded(tree))


def test_fields_of_another_version_are_named() -> None:
    tree = encode(Parameter("weight")).tree
    tree["kinds"][0] += ["shape"]
    tree["objects"][0] += [3]
    with pytest.raises(ArtifactError, match=r"has the fields name; the file has name, shape"):
        decode(Encoded(tree))
    tree["kinds"][0] = ["Tensor", "shape"]
    with pytest.raises(ArtifactError, match="no kind of object called 'Tensor'"):
        decode(Encoded(tree))


def test_an_op_that_is_not_here_is_named() -> None:
    tree = encode(aten.mul.Tensor).tree
    tree["objects"][0][1] = "mylib.mul.default"
    with pytest.raises(ArtifactError, match=r"no op called 'mylib.mul.default'.*import"):
        decode(Encoded(tree))


@pytest.mark.parametrize("name", ["aten.from_file.default", "load_library.a.b", "aten.__class__.__init__"])
def test_ops_that_reach_out_are_refused(name: str) -> None:
    tree = encode(aten.mul.Tensor).tree
    tree["objects"][0][1] = name
    with pytest.raises(ArtifactError):
        decode(Encoded(tree), ())


def test_custom_ops_need_trust() -> None:
    with torch.library._scoped_library("codec_test", "DEF") as lib:
        lib.define("twice(Tensor x) -> Tensor")
        encoded = encode(torch.ops.codec_test.twice.default)
        with pytest.raises(ArtifactError, match=r"trust=\('codec_test',\)"):
            decode(encoded, ())
        assert decode(encoded, ("codec_test",)) is torch.ops.codec_test.twice.default


def test_names_that_are_code_are_refused() -> None:
    bad = "x; import os"
    for value in (
        Value(0, looks(1), bad),
        Port(Slot(), 1, bad),
        Op(aten.neg.default, (1,), {bad: 1}, None, (), "neg"),
        Number(sympy.Symbol(bad, integer=True), int, 1),
    ):
        with pytest.raises(ArtifactError):
            decode(encode(value))


def _power(base: Any, exponent: Any) -> Any:
    rows = [[0, "s0", ["integer"], []], [1, "integer", [base]], [1, "integer", [exponent]]]
    kinds = [["symbol", "name", "is", "is_not"], ["expression", "head", "args"]]
    rows.append([1, "sympy.Pow", [[1], [2]]])
    return Encoded({"kinds": kinds, "objects": rows, "root": [3]})


@pytest.mark.parametrize("exponent", [3, 10**9, -(10**9)])
def test_sizes_that_take_for_ever_to_compute_are_refused(exponent: int) -> None:
    with pytest.raises(ArtifactError):
        decode(_power(10, exponent))


def test_doubling_is_refused() -> None:
    kinds = [["Constant", "value"]]
    rows: list[Any] = [[0, 1]]
    rows += [[0, ["tuple", [k], [k]]] for k in range(60)]
    with pytest.raises(ArtifactError, match="too"):
        decode(Encoded({"kinds": kinds, "objects": rows, "root": ["frozenset", [60]]}), ())


def test_wrong_arguments_are_refused() -> None:
    x = Value(0, looks(3), "x")
    wrong = [
        (aten.neg.default, (x, x), {}),
        (aten.neg.default, (), {}),
        (aten.neg.default, ("x",), {}),
        (aten.sum.dim_IntList, (x, ["a"]), {}),
        (aten.sum.dim_IntList, (x, [0]), {"nothing": 1}),
        (aten.sum.dim_IntList, (x, [0]), {"dtype": 3}),
    ]
    for target, args, kwargs in wrong:
        uses = tuple(a for a in args if a is x)
        op = Op(target, args, kwargs, Value(1, looks(), "y", 0), uses, "y")
        with pytest.raises(ArtifactError, match="as it is to be called"):
            decode(encode(op), ())


def test_values_used_before_they_are_made_are_refused() -> None:
    x, y = Value(0, looks(3)), Value(1, looks(3), "y", 0)
    op = Op(aten.neg.default, (y,), {}, y, (y,), "y")
    program = Program("inference", (Port(UserInput("x"), x, "x"),), (op,), ((UserOutput(0), y),))
    with pytest.raises(ArtifactError, match="before it is made"):
        decode(encode(program), ())


def test_the_same_model_gives_the_same_bytes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4))
    texts = set()
    for _ in range(2):
        joint = aheadgrad.capture(model, torch.randn(2, 4)).joint
        texts.add(encode((joint, split(joint))).text())
    assert len(texts) == 1


def test_forged_functions_of_control_flow_are_refused_or_stable() -> None:
    """The graph of such a function has no slots: what a file says of them is what `encode` would say."""
    from torch._higher_order_ops.scan import scan

    stages = aheadgrad.export(
        lambda x: scan(lambda total, part: (total + part, total * part), torch.zeros(3), x),
        (torch.randn(4, 3),),
    ).stages
    text = encode(stages).text()
    tree = json.loads(text)
    names = [kind[0] for kind in tree["kinds"]]
    (body, *_) = [row for row in tree["objects"] if names[row[0]] == "Body"]
    program = tree["objects"][body[1][0]]
    refused = 0
    for holder, k in list(_references(program)):
        was = holder[k]
        for other in range(body[1][0]):
            holder[k] = other
            try:
                found = decode(Encoded(tree, ()), ())
            except ArtifactError:
                refused += 1
                continue
            again = encode(found).text()
            assert encode(decode(Encoded(parsed(again), ()), ())).text() == again
        holder[k] = was
    assert refused > 100
    assert json.dumps(tree, separators=(",", ":")) == text


def _references(data: Any) -> Iterator[tuple[list[Any], int]]:
    """Where `[17]` stands for an object."""
    for part in data:
        if type(part) is list:
            if len(part) == 1 and type(part[0]) is int:
                yield part, 0
            else:
                yield from _references(part)
