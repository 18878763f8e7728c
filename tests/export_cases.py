"""Exports as tests make them: written down and read again before they are used."""

from __future__ import annotations

from typing import Any

import aheadgrad
from aheadgrad.codec.decoding import decode, parsed
from aheadgrad.codec.encoding import Encoded, encode
from aheadgrad.export.checking import check_export


def export(*args: Any, **kwargs: Any) -> aheadgrad.Exported:
    made = aheadgrad.export(*args, **kwargs)
    encoded = encode(made.stages)
    assert not encoded.tensors  # programs have no data of their own
    again = decode(Encoded(parsed(encoded.text()), ()))
    assert encode(again).text() == encoded.text()
    found = aheadgrad.Exported(check_export(again, made.state), made.state)
    assert str(found) == str(made)
    return found
