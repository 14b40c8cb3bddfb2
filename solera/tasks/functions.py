"""The user's own code: find it by name, and recognise reward functions by their parameters."""

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Set
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

from solera.config import alike
from solera.errors import SoleraError, one_line
from solera.tasks.graders import GRADERS, JUDGED, is_grader

SOLERA = Path(__file__).parents[1]
"""Folder of the package."""

GIVEN = frozenset(("prompts", "completions", "completion_ids"))
"""What a function with TRL's signature gets besides the columns."""


@dataclass(frozen=True)
class OwnFunction:
    """A function, its name in the config, and how it is called.

    `takes` names the keywords that a function with TRL's signature gets for a whole batch. `None` means Solera's
    signature, `(rollout, row)` for one response.
    """

    spec: str
    call: Callable[..., Any]
    takes: frozenset[str] | None

    @property
    def name(self) -> str:
        return part_name(self.spec)


def part_name(spec: str) -> str:
    """The name of a function's reward part.

    >>> part_name("rewards.py:brevity"), part_name("exact")
    ('brevity', 'exact')
    """
    return spec.rpartition(":")[2]


def check_spec(spec: str) -> None:
    """Refuse what cannot name a grader or a function, before anything is imported."""
    if is_grader(spec):
        return
    if not is_spec(spec):
        known = (*GRADERS, *JUDGED)
        hint = alike(spec, known, 1)
        raise SoleraError(
            f"reward.functions: {spec!r} is not one of the graders {', '.join(known)}"
            f"{f'{hint} Write' if hint else '; write'} your own function as package.module:function or file.py:function"
        )
    check_file(spec, "reward.functions")


def is_spec(spec: str) -> bool:
    """Whether the text could name something in a file or a package.

    >>> is_spec("rewards.py:brevity"), is_spec("package.module:TwoTries"), is_spec("rewards.py"), is_spec("a:b c")
    (True, True, False, False)
    """
    source, colon, name = spec.rpartition(":")
    return bool(colon and source and name.isidentifier())


def check_file(spec: str, field: str) -> None:
    """Refuse a missing file; `field` is the config field that names it."""
    source = spec.rpartition(":")[0]
    if source.endswith(".py") and not Path(source).expanduser().is_file():
        raise SoleraError(f"{field}: {spec}: there is no file {source}")


def load(specs: list[str], columns: Set[str], prompt: str) -> list[OwnFunction]:
    """Load the functions, each module once. `columns` are those of the data, `prompt` that of the prompt."""
    modules = {spec.rpartition(":")[0]: load_module(spec, "reward.functions") for spec in specs}
    return [_function(modules[spec.rpartition(":")[0]], spec, columns - {prompt}) for spec in specs]


def given(call: Callable[..., Any], columns: Set[str]) -> OwnFunction:
    """Wrap a function that was passed in Python."""
    spec = spec_of(call)
    return OwnFunction(spec, call, _takes(spec, _signature(spec, call), columns))


def spec_of(call: Callable[..., Any]) -> str:
    """The display name of such a function."""
    return f"{getattr(call, '__module__', type(call).__module__)}:{getattr(call, '__name__', type(call).__name__)}"


def load_module(spec: str, field: str) -> ModuleType:
    """Load the module that `spec` refers to; `field` is the config field that names it."""
    source = spec.rpartition(":")[0]
    try:
        return _from_file(Path(source).expanduser()) if source.endswith(".py") else _from_package(source)
    except (Exception, SystemExit) as error:
        place = where(error, source) if source.endswith(".py") and not isinstance(error, SyntaxError) else ""
        raise SoleraError(
            f"{field}: {spec}: {source} cannot be imported: {type(error).__name__}: {one_line(error)}{place}"
        ) from error


def _from_file(path: Path) -> ModuleType:
    """Execute a file once per content. A file may load a model, and it is checked early and used again later. It may
    import files in its folder."""
    code = path.read_bytes()
    name = f"solera_own_{blake2b(str(path.resolve()).encode() + code, digest_size=6).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    module = sys.modules[name] = ModuleType(name)  # dataclasses and pickle look it up there
    module.__file__ = str(path)
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)  # last, so that no file there hides a package
    try:
        exec(compile(code, path, "exec"), vars(module))  # an import might find the bytecode of an older file
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _from_package(name: str) -> ModuleType:
    if os.getcwd() not in sys.path and "" not in sys.path:  # an installed command does not search the current folder
        sys.path.append(os.getcwd())
    return importlib.import_module(name)


def _function(module: ModuleType, spec: str, columns: Set[str]) -> OwnFunction:
    source, _, name = spec.rpartition(":")
    call = getattr(module, name, None)
    if not callable(call):
        fault = "is not a function" if hasattr(module, name) else "does not exist"
        known = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise SoleraError(
            f"reward.functions: {spec}: {name} {fault}; functions of {source}: {', '.join(known) or 'none'}"
        )
    return OwnFunction(spec, call, _takes(spec, _signature(spec, call), columns))


def _signature(spec: str, call: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(call)
    except (TypeError, ValueError) as error:
        raise SoleraError(
            f"reward.functions: {spec}: its parameters cannot be inspected; wrap it in a function"
        ) from error


def _takes(spec: str, signature: inspect.Signature, columns: Set[str]) -> frozenset[str] | None:
    """Recognise TRL's signature: it has `completions`, or takes keywords only."""
    anything = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    if "completions" not in signature.parameters and (_binds(signature, 2) or not anything):
        if _binds(signature, 2):
            return None
        raise SoleraError(
            f"reward.functions: {spec} takes {signature}; a reward function takes (rollout, row), or TRL's (prompts, "
            "completions, **columns)"
        )
    if clash := sorted(GIVEN & columns):
        raise SoleraError(f"reward.functions: {spec} already gets {clash[0]!r} from Solera: rename that column")
    takes = GIVEN | columns if anything else (GIVEN | columns) & signature.parameters.keys()
    try:
        signature.bind(**dict.fromkeys(takes))
    except TypeError as error:
        known = ", ".join(sorted(columns)) or "none"
        raise SoleraError(f"reward.functions: {spec} takes {signature}: {error}; the columns are {known}") from None
    return frozenset(takes)


def _binds(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def where(error: BaseException, source: str) -> str:
    """The line that raised: the last one in `source` in the traceback, else the last that is not of Solera."""
    frames = traceback.extract_tb(error.__traceback__)
    others = [frame for frame in frames if not Path(frame.filename).is_relative_to(SOLERA)]
    own = [frame for frame in others if Path(frame.filename).name == Path(source).name]
    return "".join(f" ({Path(frame.filename).name}, line {frame.lineno})" for frame in (own or others or frames)[-1:])
