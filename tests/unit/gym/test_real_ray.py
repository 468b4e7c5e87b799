"""Which servers need Ray is read off their source."""

import textwrap

import pytest

from gymrl.gym.real_ray import says_no_ray, why_ray


@pytest.fixture
def server(tmp_path):
    def write(name, files, kind="resources_servers"):
        directory = tmp_path / kind / name
        for file, text in files.items():
            path = directory / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        place = (str(directory), "app.py", [str(tmp_path)])
        return why_ray(*place), says_no_ray(*place)

    return write


def test_a_server_that_says_so_does_without(server):
    said = server("calm", {"app.py": "class Server:\n    ray_enabled = False\n"})
    assert said == (None, True)


def test_an_annotated_word_counts_as_well(server):
    text = "class Server:\n    ray_enabled: ClassVar[bool | None] = False\n"
    assert server("calm", {"app.py": text}) == (None, True)


def test_a_server_that_wants_ray_needs_it(server):
    why, says_no = server("code_gen", {"app.py": "class Server:\n    ray_enabled = True\n"})
    assert not says_no
    assert why.endswith("app.py sets ray_enabled = True")


def test_a_server_that_says_nothing_and_uses_none_has_no_need_but_does_not_say_so(server):
    assert server("silent", {"app.py": "class Server:\n    pass\n"}) == (None, False)


def test_a_server_may_say_it_in_the_class_it_inherits_from(server):
    server("mcqa", {"app.py": "class Base:\n    ray_enabled = False\n"})
    text = "from resources_servers.mcqa.app import Base\n\nclass Server(Base):\n    pass\n"
    assert server("gpqa", {"app.py": text}) == (None, True)


def test_ray_in_the_module_of_another_server_that_is_imported_counts(server):
    server("code_gen", {"app.py": "import ray\n\nclass Base:\n    ray_enabled = False\n"})
    text = "from resources_servers.code_gen.app import Base\n\nclass Server(Base):\n    pass\n"
    why, _ = server("easier", {"app.py": text})
    assert why.endswith("code_gen/app.py uses Ray")


def test_a_class_in_a_module_beside_the_entrypoint_counts(server):
    files = {
        "app.py": "from base import Base\n\nclass Server(Base):\n    pass\n",
        "base.py": "class Base:\n    ray_enabled = False\n",
    }
    assert server("split", files) == (None, True)


def test_modules_that_import_each_other_come_to_an_end(server):
    files = {"app.py": "import other\n", "other.py": "import app\n"}
    assert server("circle", files) == (None, False)


@pytest.mark.parametrize(
    "use", ["import ray\n", "from ray.util import x\n", "@ray.remote\ndef f(): ...\n"]
)
def test_work_that_is_done_with_ray_needs_it_whatever_the_server_says(server, use):
    files = {"app.py": "class Server:\n    ray_enabled = False\n", "deep/runner.py": use}
    why, _ = server("torn", files)
    assert why.endswith("runner.py uses Ray")


def test_tests_and_prose_about_ray_do_not_count(server):
    files = {
        "app.py": '"""Unlike ``@ray.remote`` tasks."""\n\nclass S:\n    ray_enabled = False\n',
        "tests/test_app.py": "import ray\n",
    }
    assert server("told", files) == (None, True)
