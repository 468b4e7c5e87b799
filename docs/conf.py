"""Sphinx configuration: MyST pages, Google docstrings, warnings are errors."""

from gymrl import __version__

project = "gymrl"
author = "The gymrl developers"
copyright = "The gymrl developers"
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "gymrl"
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]

autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# Names of other projects are not resolved: building the pages needs no network.
nitpick_ignore_regex = [
    (r"py:.*", r"(asyncio|collections|typing|pathlib|enum|logging|contextlib|types)(\..*)?"),
    (r"py:.*", r"(msgspec|numpy|np|npt|aiohttp|anyio|torch|transformers|tokenizers)(\..*)?"),
    (r"py:class", r"(.*\.)?(T|R|ConfigT)"),
    # Aliases, and names that modules import for the type checker alone.
    (r"py:class", r"(.*\.)?(LogprobsMode|TokenCallback|WeightSource|PauseMode|FinishReason)"),
    (r"py:class", r"(Generated|VllmEngine|.*vllm_wire\.Choice)"),
    (r"py:class", r"(optional|Any|Path|Callable|Awaitable|Coroutine|Struct)"),
]
