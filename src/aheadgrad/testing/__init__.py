"""Tools that tell whether a compiled function equals eager: an oracle and generated programs.

>>> from aheadgrad.testing import compare, generate
>>> program = generate(seed=7)
>>> compare(program.fn, aheadgrad.compile(program.fn, backend="eager"), program.make_inputs)
[]
"""

from aheadgrad.testing.observe import Inputs
from aheadgrad.testing.oracle import Disagreement, assert_same, compare
from aheadgrad.testing.programs import Config, Program, generate
from aheadgrad.testing.shrink import shrink

__all__ = ["Config", "Disagreement", "Inputs", "Program", "assert_same", "compare", "generate", "shrink"]
