"""Finding an actor's class in another process: by module and name, never by value.

A class of the driver's ``__main__`` is found by loading the definitions of its file (imports,
classes, functions, assignments) under another name. The statements that start the program are left
out, so the program does not run twice, with or without a guard.
"""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import types
from typing import Any

from gymrl.actors.actor import Actor
from gymrl.actors.messages import Start
from gymrl.errors import ActorStartError

SCRIPT_MODULE = "__gymrl_main__"
_DEFINITIONS = (
    ast.Import,
    ast.ImportFrom,
    ast.ClassDef,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.Assign,
    ast.AnnAssign,
    ast.AugAssign,
)
_script_being_loaded: list[str] = []


def locate(cls: type[Actor], name: str) -> Start:
    """Where another process finds `cls`.

    Raises:
        ActorStartError: It cannot be found there: it is local to a function, or was typed into a
            notebook, a prompt or ``python -c``.
    """
    if "<locals>" in cls.__qualname__:
        raise ActorStartError(
            f"{cls.__qualname__} is defined inside a function, where a worker process cannot find "
            "it; move it to the top level of a module, or pass in_process=True",
            actor=name,
        )
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    if cls.__module__ not in ("__main__", SCRIPT_MODULE):
        path = os.path.abspath(file) if file else None
        return Start(cls.__module__, cls.__qualname__, path, False, name)
    if file is None or not os.path.isfile(file):
        raise ActorStartError(
            f"{cls.__qualname__} is defined in an interactive __main__ (a notebook, a prompt, "
            "python -c), whose source a worker process cannot import; move the class to a module, "
            "or pass in_process=True",
            actor=name,
        )
    spec = getattr(module, "__spec__", None)
    package = spec.parent if spec is not None else ""
    return Start(package or "", cls.__qualname__, os.path.abspath(file), True, name)


def load(start: Start) -> type[Actor]:
    """The class that the driver spoke of.

    Raises:
        Exception: Whatever importing its module raised.
        ActorStartError: The module has no such class.
    """
    if start.is_script and start.file is not None:
        module = _load_script(start.file, start.module)
    else:
        module = _import(start.module, start.file)
    found: Any = module
    for part in start.qualname.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, Actor)):
        raise ActorStartError(
            f"{start.file or start.module} has no actor class {start.qualname} when it is imported "
            f"in a worker process (found {found!r}); define it at the top level",
            actor=start.name,
        )
    return found


def _import(name: str, file: str | None) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name
        if (
            file is None
            or missing is None
            or not (name == missing or name.startswith(missing + "."))
        ):
            raise
    # Loaded by its driver from a file outside sys.path, as test runners do.
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"no module {name}, and {file} cannot be loaded", name=name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _load_script(file: str, package: str) -> types.ModuleType:
    with open(file, "rb") as source:
        tree = ast.parse(source.read(), file)
    tree.body = definitions(tree.body)
    module = types.ModuleType(SCRIPT_MODULE)
    module.__file__ = file
    module.__package__ = package
    sys.modules[SCRIPT_MODULE] = module
    _script_being_loaded.append(file)
    try:
        exec(compile(tree, file, "exec"), module.__dict__)
    except BaseException as error:
        error.add_note(
            f"raised while a worker process loaded the definitions of the script {file}; what "
            'starts work belongs under `if __name__ == "__main__":`'
        )
        raise
    finally:
        _script_being_loaded.pop()
    return module


def definitions(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements of a script that define something, in order."""
    kept: list[ast.stmt] = []
    for node in body:
        if isinstance(node, _DEFINITIONS) or _is_text(node):
            kept.append(node)
        elif isinstance(node, ast.If) and not _is_main_guard(node.test):
            node.body = definitions(node.body) or [ast.Pass(lineno=node.lineno, col_offset=0)]
            node.orelse = definitions(node.orelse)
            kept.append(node)
        elif isinstance(node, ast.Try):
            node.body = definitions(node.body) or [ast.Pass(lineno=node.lineno, col_offset=0)]
            for handler in node.handlers:
                handler.body = definitions(handler.body) or [
                    ast.Pass(lineno=handler.lineno, col_offset=0)
                ]
            node.orelse = definitions(node.orelse)
            node.finalbody = definitions(node.finalbody)
            kept.append(node)
    return [ast.fix_missing_locations(node) for node in kept]


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_main_guard(test: ast.expr) -> bool:
    return any(isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(test))


def refuse_while_loading(name: str) -> None:
    """Keep a script that is being loaded in a worker from starting workers of its own.

    Raises:
        ActorStartError: It tries to.
    """
    if _script_being_loaded:
        raise ActorStartError(
            f"{_script_being_loaded[-1]} starts an actor while a worker process loads its "
            'definitions; put that under `if __name__ == "__main__":`',
            actor=name,
        )
