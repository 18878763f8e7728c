"""Print the size of every Python file of the package; files and functions that have grown too long stand out.

A file should stay within 400 lines and a function within 60. This prints and never fails: size is
something to look at, not something to enforce.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src/aheadgrad", "benchmarks", "examples", "tests")
FILE_LIMIT = 400
FUNCTION_LIMIT = 60


def long_functions(source: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LIMIT:
                yield node.name, length


def main() -> None:
    for folder in FOLDERS:
        files = sorted((ROOT / folder).rglob("*.py"))
        if not files:
            continue
        total = 0
        print(folder)
        for path in files:
            source = path.read_text(encoding="utf-8")
            lines = len(source.splitlines())
            total += lines
            marks = [f"over {FILE_LIMIT} lines"] if lines > FILE_LIMIT else []
            marks += [f"{name}() has {length}" for name, length in long_functions(source)]
            note = f"   <-- {', '.join(marks)}" if marks else ""
            print(f"{lines:>7,}  {path.relative_to(ROOT / folder)}{note}")
        print(f"{total:>7,}  in {len(files)} files\n")


if __name__ == "__main__":
    main()
