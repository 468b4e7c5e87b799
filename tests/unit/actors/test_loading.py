"""Definitions of a script, without the statements that start it."""

from __future__ import annotations

import ast
import textwrap

import pytest

from gymrl.actors import Actor
from gymrl.actors.loading import definitions, load, locate
from gymrl.actors.messages import Start
from gymrl.errors import ActorStartError


class Somewhere(Actor):
    async def method(self) -> None: ...


def kept(source: str) -> str:
    tree = ast.parse(textwrap.dedent(source))
    tree.body = definitions(tree.body)
    return ast.unparse(tree)


def test_imports_classes_functions_and_assignments_are_kept():
    source = "import os\n\nX = 3\n\nclass A:\n    pass\n\ndef f():\n    pass\ny: int = X"
    assert kept(source) == ast.unparse(ast.parse(source))


def test_calls_loops_and_guards_are_left_out():
    assert (
        kept(
            """
            import os
            print("hello")
            for i in range(3):
                run(i)
            with open("f") as f:
                f.read()
            if __name__ == "__main__":
                main()
            if os.name == "posix":
                import fcntl
                print(fcntl)
            else:
                fcntl = None
            try:
                import torch
                print(torch)
            except ImportError:
                torch = None
            main()
            """
        )
        == textwrap.dedent(
            """
            import os
            if os.name == 'posix':
                import fcntl
            else:
                fcntl = None
            try:
                import torch
            except ImportError:
                torch = None
            """
        ).strip()
    )


def test_a_class_is_found_by_module_and_name():
    start = locate(Somewhere, "name")
    assert start.qualname == "Somewhere"
    assert not start.is_script
    assert load(start) is Somewhere


def test_a_name_that_is_no_actor_class_is_refused():
    for qualname in ("kept", "Missing", "Somewhere.method"):
        with pytest.raises(ActorStartError, match="no actor class"):
            load(Start(__name__, qualname, __file__, False, "name"))


def test_a_class_inside_a_function_is_refused():
    class Local(Somewhere):
        pass

    with pytest.raises(ActorStartError, match="inside a function"):
        locate(Local, "name")


def test_a_script_is_loaded_under_another_name(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from gymrl.actors import Actor\nclass A(Actor):\n    name = __name__\nraise SystemExit\n"
    )
    found = load(Start("", "A", str(script), True, "name"))
    assert found.name == "__gymrl_main__"
