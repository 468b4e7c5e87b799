"""What pages show exists: snippets compile, names and their parameters are there, options and keys too."""

import ast
import importlib
import inspect
import json
import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from gymrl.cli.app import app
from gymrl.config import GenerationConfig, GymConfig, VllmConfig
from gymrl.recipes.settings import GrpoConfig
from gymrl.scoring import ScoringConfig
from gymrl.settings import parse_yaml

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if "_build" not in page.parts]


def fences(text):
    """(line, language, body) of each fenced block of a page."""
    opening, body = None, []
    for number, line in enumerate(text.splitlines(), start=1):
        fence = re.match(r"( *)```(\w*)", line)
        if opening is None and fence:
            opening, body = (number + 1, *fence.groups()), []
        elif opening is not None and fence:
            first, _, language = opening
            yield first, language, "".join(body)
            opening = None
        elif opening is not None:
            body.append(line.removeprefix(opening[1]) + "\n")


def blocks(*languages):
    """Each fenced block in one of the languages, named by its page and line."""
    for page in PAGES:
        for line, language, body in fences(page.read_text(encoding="utf-8")):
            if language in languages:
                yield pytest.param(body, id=f"{page.relative_to(ROOT)}:{line}")


def public_names(tree):
    """What a snippet calls what, of gymrl; an import of what is not there fails."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "gymrl":
                    module = importlib.import_module(alias.name)
                    names[alias.asname or "gymrl"] = (
                        module if alias.asname else importlib.import_module("gymrl")
                    )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gymrl":
            module = importlib.import_module(node.module)
            for alias in node.names:
                try:
                    value = getattr(module, alias.name)
                except AttributeError:
                    value = importlib.import_module(f"{node.module}.{alias.name}")
                names[alias.asname or alias.name] = value
    return names


def value_of(node, names):
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and inspect.ismodule(owner := value_of(node.value, names)):
        return getattr(owner, node.attr)
    return None


@pytest.mark.parametrize("code", list(blocks("python")))
def test_a_snippet_compiles_and_what_it_uses_of_gymrl_is_there(code):
    tree = ast.parse(code)
    compile(tree, "snippet", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names = public_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            value_of(node, names)
        if isinstance(node, ast.Call) and callable(called := value_of(node.func, names)):
            parameters = inspect.signature(called).parameters
            if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
                continue
            unknown = {k.arg for k in node.keywords if k.arg} - set(parameters)
            assert not unknown, f"{ast.unparse(node.func)} takes no {sorted(unknown)}"


SETTINGS = {"generation": GenerationConfig, "gym": GymConfig, "vllm": VllmConfig}
SCORING = ("effort", "penalties", "length_penalty")


@pytest.mark.parametrize("text", list(blocks("yaml")))
def test_settings_that_a_page_shows_are_there(text):
    values = parse_yaml(text)
    if "learning_rate" in values:
        GrpoConfig.from_dict(values)
        return
    ScoringConfig.from_dict({name: values[name] for name in SCORING if name in values})
    for name in SETTINGS.keys() & values.keys():
        needed = {"model": "m"} if name == "generation" else {}
        SETTINGS[name].from_dict(needed | values[name])


@pytest.mark.parametrize("text", list(blocks("json")))
def test_json_that_a_page_shows_is_one_value_a_line(text):
    for line in text.splitlines():
        json.loads(line)


def commands():
    for block in blocks("console", "bash", ""):
        (text,) = block.values
        for line in text.replace("\\\n", " ").splitlines():
            command = line.removeprefix("$ ")
            if command.startswith("gymrl "):
                words = shlex.split(command, comments=True)
                yield pytest.param(words[1:], id=f"{block.id}:{' '.join(words[:3])}")


@pytest.mark.parametrize("words", list(commands()))
def test_options_that_a_page_shows_are_there(words):
    command = get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words[0]]
        words = words[1:]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    assert {word.partition("=")[0] for word in words if word.startswith("-")} <= known


def test_links_of_the_readme_lead_somewhere():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)", readme)
    local = [link for link in links if not link.startswith("http")]
    assert local
    assert [link for link in local if not (ROOT / link).exists()] == []


def test_targets_that_pages_name_are_in_the_makefile():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"(?:^\$ |`)make ([a-z]+)", text, re.MULTILINE))
    assert named
    assert named <= targets
