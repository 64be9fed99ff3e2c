"""Functions that the user names in the configuration, by path. Imports no torch: see ``rlhf.rewards.process``.

A path is ``package.module.function`` or ``path/to/file.py:function``.
"""

import functools
import hashlib
import importlib
import importlib.util
import inspect
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf.errors import ConfigError


def split_file(path: str) -> tuple[str, str] | None:
    """The file and the function of ``path/to/file.py:function``; None for a path of the other form."""
    file, _, attribute = path.rpartition(":")
    return (file, attribute) if ".py:" in path else None


def load_function(
    path: str, key: str, *, built_in: Mapping[str, Callable[..., Any]] | None = None
) -> Callable[..., Any]:
    """The function at ``path``; names in ``built_in`` take precedence. ``key``: where the configuration names it.

    Raises ConfigError if it cannot be loaded.
    """
    if built_in and path in built_in:
        return built_in[path]
    if named := split_file(path):
        file, attribute = named
        module = _import_file(Path(file).expanduser(), key)
    else:
        module_name, _, attribute = path.rpartition(".")
        if not module_name or not attribute:
            wrong = f"is not a built-in function ({', '.join(sorted(built_in))})" if built_in else "names no module"
            use = "use one of them, " if built_in else "use "
            raise ConfigError(f"{key} {wrong}; {use}package.module.function, or path/to/file.py:function")
        module = _import_module(module_name, key)
    if not hasattr(module, attribute):
        functions = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise ConfigError(f"{key}: the module has no {attribute!r}; its callables are {', '.join(functions) or 'none'}")
    call = getattr(module, attribute)
    if not callable(call):
        raise ConfigError(f"{key} is a {type(call).__name__}, not callable; name a function")
    return call


def source_digest(path: str) -> str | None:
    """Hex digest of the file that defines the loaded function at ``path``; None if there is no file."""
    if named := split_file(path):
        file = Path(named[0]).expanduser()
    else:
        module = sys.modules.get(path.rpartition(".")[0])
        file = Path(getattr(module, "__file__", None) or "")
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else None


def named_parameters(call: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters that can be passed by keyword."""
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: p for name, p in inspect.signature(call).parameters.items() if p.kind in by_keyword}


def takes_any_keyword(call: Callable[..., Any]) -> bool:
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(call).parameters.values())


def described(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def defined_at(call: Callable[..., Any]) -> tuple[str, int]:
    """The file and the line where a function, or the class of a callable object, says what calling it does; ('', 0) if
    that is not Python."""
    inner = call.func if isinstance(call, functools.partial) else call
    code = getattr(inspect.unwrap(inner), "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code else ("", 0)


def place_in(file: str, error: BaseException) -> str:
    """' (at mine.py:12)': the last line of ``file`` on the way to what raised ``error``; '' if it was not on it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" (at {Path(file).name}:{lines[-1]})" if lines else ""


def _import_module(name: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a module may raise anything while it is imported
        missing = error.name if isinstance(error, ModuleNotFoundError) and error.name else "?"
        if name == missing or name.startswith(f"{missing}."):
            remedy = "install it, add its directory to PYTHONPATH, or use path/to/file.py:function"
            raise ConfigError(f"{key}: no module {missing!r}; {remedy}") from error
        raise ConfigError(f"{key}: importing it failed: {described(error)}; fix the module") from error


def _import_file(file: Path, key: str) -> ModuleType:
    """Imports a file once per process: two functions of one file share its module."""
    if not file.is_file():
        raise ConfigError(
            f"{key}: no such file {file.absolute()} on {socket.gethostname()}; correct it, put it where all nodes see "
            "it at that path, or upload it with `rlhf submit`"
        )
    resolved = file.resolve()
    name = f"rlhf_user_{resolved.stem}_{hashlib.sha256(str(resolved).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, resolved)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a module may raise anything while it is imported
        del sys.modules[name]
        failed = f"{described(error)}{place_in(str(resolved), error)}"
        raise ConfigError(f"{key}: importing it failed: {failed}; fix the module") from error
    return module
