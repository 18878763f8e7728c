"""The part of a check about what the function reaches: each place has what it had, or as many of it.

What lies in dictionaries that seldom change is looked at in `find`, the rest at each call (`call`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from aheadgrad.frontends.checks import Checks
from aheadgrad.frontends.guarded_values import ValueWriter
from aheadgrad.frontends.places import ABSENT, Fact
from aheadgrad.frontends.plain import SIMPLE, describe, freeze
from aheadgrad.frontends.reach import HOOKS, TABLES, Reach
from aheadgrad.runtime.emit import Namespace

FEW = 4


class ReachWriter:
    """Writes what is assumed about places within reach that hold no tensors."""

    def __init__(
        self, call: Checks, find: Checks, names: Namespace, reach: Reach, values: ValueWriter
    ) -> None:
        self.call = call
        self.find = find
        self.names = names
        self.reach = reach
        self.values = values

    def write(self) -> None:
        self._containers()
        for fact in self.reach.facts:
            if not isinstance(fact.value, Tensor):
                self._fact(self.find if fact.steady else self.call, fact)
        self._classes()
        for content in self.reach.contents:
            now = f"{self.names.name(freeze, 'freeze')}({self.names.name(content.holder, 'holder')})"
            test = f"{now} == {self.names.name(content.frozen, 'frozen')}"
            self.call.unless(test, content.path, "as it was", "'something else'")

    def text(self, fact: Fact) -> str:
        holder = self.names.name(fact.holder, "holder")
        if fact.how[1:].isidentifier() and fact.how != ".cell_contents":
            return f"getattr({holder}, {fact.how[1:]!r}, {self._default(fact)})"  # it may be gone
        if fact.value is None and fact.how.startswith(".get('"):
            return f"{holder}{fact.how[:-1]}, {self._default(fact)})"
        return holder + fact.how

    def _default(self, fact: Fact) -> str:
        """What a place gives that is gone: None, unless that is what was there."""
        return self.names.name(ABSENT, "ABSENT") if fact.value is None or fact.value is ABSENT else "None"

    def _fact(self, checks: Checks, fact: Fact) -> None:
        value, table, place = fact.value, fact.how[6:-2], self.text(fact)
        if value is ABSENT:
            where, _, key = fact.how.rpartition(".get(")
            test = f"{key[:-1]} not in {self.names.name(fact.holder, 'holder')}{where}"
            if not key.endswith(")"):
                test = f"{place} is {self._default(fact)}"
            checks.unless(test, fact.path, "absent", "'there'")
        elif type(value) in SIMPLE:
            if not (value is None or isinstance(value, bool)):
                checks.line(f"v = {place}")
                place = "v"
            self.values.constant(checks, self.names, place, value, fact.path)
        elif isinstance(value, dict) and table in HOOKS:
            test = f"list({place}) == {self.names.literal(list(value))}" if value else f"not {place}"
            checks.unless(test, fact.path, f"{len(value)} hooks", f"str(len({place})) + ' hooks'")
        elif isinstance(value, dict) and table in TABLES:
            checks.unless(
                f"{place} is {self.names.name(value, 'given')}", fact.path, "as it was", "'another'"
            )
        else:
            given, now = self.names.name(value, "given"), f"{self.names.name(describe, 'describe')}({place})"
            checks.unless(f"{place} is {given}", fact.path, describe(value), now)

    def _classes(self) -> None:
        """Objects of the user's own classes are still of these."""
        owned = self.reach.owned
        if len(owned) > FEW:
            now = f"tuple(map(type, {self.names.name(tuple(owned), 'objects')}))"
            test = f"{now} == {self.names.name(tuple(map(type, owned)), 'kinds')}"
        else:
            tests = (
                f"type({self.names.name(x, 'object')}) is {self.names.name(type(x), 'kind')}" for x in owned
            )
            test = " and ".join(tests)
        if test:
            self.call.unless(test, "a class", "as it was", "'another'")
        for value in owned:
            if hasattr(value, "__dict__") and not isinstance(value, nn.Module):
                name, table = self.names.name(value, "object"), self.names.name(vars(value), "table")
                self.call.unless(f"{name}.__dict__ is {table}", "__dict__", "as it was", "'another'")

    def _containers(self) -> None:
        """Lists are as long as they were, dictionaries have the same keys in the same order."""
        hooks = {id(f.value) for f in self.reach.facts if f.how[6:-2] in HOOKS}
        for value, path in self.reach.containers.values():
            if id(value) in self.reach.loose or id(value) in self.reach.idle or id(value) in hooks:
                continue
            if isinstance(value, list):
                now = f"len({self.names.name(value, 'given')})"
                self.call.unless(f"{now} == {len(value)}", path, f"{len(value)} elements", now, last=True)
            elif not value:
                given = self.names.name(value, "given")
                self.find.unless(f"not {given}", path, "0 elements", f"len({given})")
            elif all(type(key) in (str, int) for key in value):
                now = f"list({self.names.name(value, 'given')})"
                assumed = f"{len(value)} elements"
                test = f"{now} == {self.names.name(list(value), 'keys')}"
                self.find.unless(test, path, assumed, f"len({now})", last=True)
        tables = [(vars(m), table) for m in self.reach.modules for t in TABLES if (table := vars(m).get(t))]
        if tables:
            now = f"{self.names.name(_hidden, 'hidden')}({self.names.name(tables, 'tables')})"
            test = f"{now} == {self.names.name(_hidden(tables), 'hidden_before')}"
            self.find.unless(test, "an attribute", "what the module registered", "'hidden by another'")


def _hidden(tables: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[Any]:
    """Which parameters, buffers and modules have an attribute of the same name in front of them?"""
    return [table.keys() & attributes.keys() for attributes, table in tables]
