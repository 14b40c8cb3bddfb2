"""What runs inside the sandbox for the tool `python`: execute code and return what it printed."""

import ast
import contextlib
import io
import math  # noqa: F401  (loaded before the sandbox closes, so that code can import it quickly)
import sys
from collections.abc import Callable


def prepare() -> None:
    """Nothing to load beside this module."""


def runner(longest: int) -> Callable[[str], str]:
    """The function that executes code. It returns at most `longest` characters."""

    def execute(code: str) -> str:
        printed, sys.stdin = io.StringIO(), io.StringIO()  # the real one is the pipe of the questions
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                _execute(code)
            except SystemExit as end:
                if end.code:
                    print(f"error: SystemExit: {end.code}")
            except BaseException as error:
                said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                print(f"error: {said}")
        return printed.getvalue()[:longest]

    return execute


def _execute(code: str) -> None:
    """Run the code, and print the value of its last line if that is an expression, as a notebook does."""
    tree, names = ast.parse(code), {"__name__": "__main__"}
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<code>", "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "<code>", "eval"), names)
        if value is not None:
            print(value)
