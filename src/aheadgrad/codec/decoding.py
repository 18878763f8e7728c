"""Plain data as stage values: the way back of `encoding`.

Nothing here imports, evaluates or calls what a file names: objects are of the kinds in the closed table, ops
are looked up among those that this process has. What the annotations of a kind say is checked, and so is what
has to be true of it besides (`field_checks`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from aheadgrad.codec.encoding import ERRORS, SPECIAL, Encoded, encode
from aheadgrad.codec.field_checks import CHECKS, identifier
from aheadgrad.codec.kinds import KINDS, Kind
from aheadgrad.codec.reading import Reader, chosen, pairs, parsed
from aheadgrad.codec.sound import check_extent, check_sound, check_trust
from aheadgrad.errors import ArtifactError
from aheadgrad.options import Options
from aheadgrad.program.check import check
from aheadgrad.program.doors import program_of_body
from aheadgrad.program.names import Naming
from aheadgrad.program.program import Program
from aheadgrad.program.values import Op, Origin, Region, Value, values_in
from aheadgrad.torchlayer import expressions
from aheadgrad.torchlayer.autograd import AutogradNode
from aheadgrad.torchlayer.collection import no_collection
from aheadgrad.torchlayer.dispatch import HigherOrderOperator, OpOverload
from aheadgrad.torchlayer.named import named_op
from aheadgrad.torchlayer.replay import Drawn, Replayed

__all__ = ["decode", "parsed"]

_OPS = (OpOverload, HigherOrderOperator, Drawn, Replayed)
_NOTES = ((Origin, type(None)), (AutogradNode, type(None)), (Region, type(None)))
_NESTED = (list, tuple, dict)


@no_collection()
def decode(encoded: Encoded, trust: Collection[str] | None = None) -> Any:
    """What was encoded; ArtifactError for anything that `encode` would not have given.

    With `trust` it may come from anybody: all of it is checked, and ops are torch's own or in one of these
    namespaces.
    """
    reader = Reader(encoded, trust)
    try:
        return _read(reader, encoded.tree)
    except ArtifactError as error:
        raise ArtifactError(f"{error}{reader.where()}") from None
    except Exception as error:  # forged data disappoints in more ways than can be told
        raise ArtifactError(f"The data makes no sense: {error}{reader.where()}") from error


def _read(reader: Reader, tree: Any) -> Any:
    if type(tree) is not dict or list(tree) != ["kinds", "objects", "root"]:
        raise ArtifactError("This is no data of programs: kinds, objects and a root are expected.")
    if type(tree["kinds"]) is not list or type(tree["objects"]) is not list:
        raise ArtifactError("This is no data of programs: kinds and objects are lists.")
    kinds = [_maker(k) for k in tree["kinds"]]
    objects, strict = reader.objects, reader.trust is not None
    if strict:
        check_extent(tree["objects"])
    for row in tree["objects"]:
        if type(row) is not list or not row or type(row[0]) is not int or not 0 <= row[0] < len(kinds):
            raise ArtifactError("An object is no row that begins with its kind.")
        reader.kind, count, make = kinds[row[0]]
        if len(row) != count:
            raise ArtifactError("An object has too many fields, or too few.")
        made = make(reader, row)
        if strict:
            check_sound(made)
        objects.append(made)
    reader.kind = ""
    return reader.value(tree["root"])


_Make = Callable[[Reader, list[Any]], Any]


def _maker(described: Any) -> tuple[str, int, _Make]:
    """A kind's name, how long its rows are, and what makes an object of one."""
    if type(described) is not list or not described or not all(type(d) is str for d in described):
        raise ArtifactError("A kind is no list of names.")
    name, *names = described
    known = KINDS.get(name)
    expected = known.fields if known is not None else SPECIAL.get(name)
    if expected is None:
        raise ArtifactError(f"There is no kind of object called {name[:80]!r}.")
    if list(expected) != names:
        raise ArtifactError(
            f"A {name} has the fields {', '.join(expected)}; the file has {', '.join(names)[:200]}. It was "
            "written by another version of aheadgrad: write it again with this one."
        )
    return name, len(described), _MAKE[name] if known is None else _of_kind(known)


def _of_kind(kind: Kind) -> _Make:
    make, check, is_value = kind.make, CHECKS.get(kind.kind), kind.kind is Value
    tests = [(k, test) for k, test in enumerate(kind.tests) if test is not None]

    def made(reader: Reader, row: list[Any]) -> Any:
        parts = reader.values(row[1:])
        for k, test in tests:
            if not test(parts[k]):
                raise ArtifactError(
                    f"{str(parts[k])[:80]!r} is nothing for {kind.fields[k]} of a {kind.name}."
                )
        made = make(*parts)
        if check is not None:
            check(made)
        if is_value:
            reader.names.append(made.name)
        return made

    return made


# ---- kinds whose fields are not simply those of a class --------------------------------------


def _op(reader: Reader, row: list[Any]) -> Op:
    _, target, args, kwargs, out, name, phase, keep, origin, node, region = row
    target, out, origin, node, region = reader.values([target, out, origin, node, region])
    identifier(name)
    if not isinstance(target, _OPS):
        raise ArtifactError(f"{str(target)[:80]} is no op.")
    if not all(type(a) is list and a[:1] == ["tuple"] for a in (args, kwargs)):
        raise ArtifactError(f"The arguments of {name} are no list.")
    values = tuple(reader.values(args[1:]))
    named = pairs(reader, kwargs[1:]) if len(kwargs) > 1 else {}
    for key in named:
        identifier(key)
    told = type(phase) is str and type(keep) is bool
    if not told or not all(map(isinstance, (origin, node, region), _NOTES)):
        raise ArtifactError(f"What is told of {name} is of the wrong types.")
    reader.names.append(name)
    uses = _used(values, named)
    return Op(target, values, named, out, uses, name, phase, keep, origin, node, None, region)


def _used(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Value, ...]:
    found: list[Value] = []
    for value in (*args, *kwargs.values()):
        if type(value) is Value:
            found.append(value)
        elif isinstance(value, _NESTED):
            found += values_in(value)
    return tuple(found)


def _origin(reader: Reader, row: list[Any]) -> Origin:
    _, file, line, function = row
    if type(file) is not str or type(line) is not int or type(function) is not str or "/" in file:
        raise ArtifactError("An origin is the name of a file, a line and a function.")
    return Origin(file, line, function)


def _options(reader: Reader, row: list[Any]) -> Options:
    given = dict(zip(SPECIAL["Options"], reader.values(row[1:]), strict=True))
    for name in ("backend", "partition", "mode"):
        if not isinstance(given[name], str | None):
            raise ArtifactError(f"{name}={str(given[name])[:80]} is no option.")
    return Options(**given)


def _naming(reader: Reader, row: list[Any]) -> Naming:
    sizes, writes = reader.values(row[1:])
    if type(sizes) is not dict or type(writes) is not dict:
        raise ArtifactError("Names of sizes and updates are no mappings.")
    for name in (*sizes.values(), *writes.values()):
        identifier(name)
        reader.names.append(name)
    if not all(map(expressions.is_expression, sizes)) or not all(type(v) is Value for v in writes):
        raise ArtifactError("Names are of sizes, and of updates of values.")
    return Naming(sizes, writes, reader.names)


def _body(reader: Reader, row: list[Any]) -> Any:
    program, single = reader.values(row[1:])
    if type(program) is not Program or type(single) is not bool:
        raise ArtifactError("The function of a control-flow operator is no program.")
    module = check(program).module
    if single:
        last = module.graph.output_node()
        last.args = (last.all_input_nodes[0],)  # the only result by itself
        module.recompile()
    if reader.trust is not None and encode(program_of_body(module)).text() != encode(program).text():
        raise ArtifactError("The function of a control-flow operator has parts that its graph does not have.")
    return module


def _operator(reader: Reader, row: list[Any]) -> Any:
    if type(row[1]) is not str:
        raise ArtifactError("The name of an op is no text.")
    try:
        op = named_op(row[1])
        if reader.trust is not None:
            check_trust(op, reader.trust)
        return op
    except NameError:
        raise ArtifactError(
            f"There is no op called {row[1][:80]!r} here: import what registers it before you load the file."
        ) from None


def _symbol(reader: Reader, row: list[Any]) -> Any:
    _, name, is_, is_not = row
    texts = [name, *reader.list(is_), *reader.list(is_not)]
    if not all(type(t) is str for t in texts):
        raise ArtifactError("A symbol is a name and what is known of it.")
    return expressions.symbol(name, is_, is_not)


def _expression(reader: Reader, row: list[Any]) -> Any:
    if type(row[1]) is not str:
        raise ArtifactError("The head of an expression is no text.")
    return expressions.expression(row[1], reader.list(row[2]))


def _error(reader: Reader, row: list[Any]) -> Exception:
    return chosen(ERRORS, row[1])(str(row[2]))


_MAKE: dict[str, _Make] = {
    "Op": _op,
    "Origin": _origin,
    "Options": _options,
    "Naming": _naming,
    "Body": _body,
    "operator": _operator,
    "symbol": _symbol,
    "expression": _expression,
    "error": _error,
}
