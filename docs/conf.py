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
    (
        r"py:.*",
        r"(abc|_?asyncio|collections|concurrent|typing|pathlib|enum|logging|contextlib|random|socket|types)(\..*)?",
    ),
    (
        r"py:.*",
        r"(msgspec|yaml|numpy|np|npt|aiohttp|web|anyio|torch|transformers|tokenizers|PIL|Image)(\..*)?",
    ),
    (r"py:(class|obj)", r"(.*\.)?([A-Z][A-Za-z]*T|T|R)"),
    # Aliases, and names that modules import for the type checker alone.
    (r"py:class", r"(.*\.)?(LogprobsMode|TokenCallback|WeightSource|PauseMode|FinishReason)"),
    (r"py:class", r".*vllm_wire\.Choice"),
    # A name without a module: what a module imports for the type checker alone stays unresolved.
    (r"py:(class|meth|func|data)", r"[A-Za-z_]\w*(\.[a-z_]+)?"),
    (r"py:class", r"(optional|Any|Path|Callable|Awaitable|Coroutine|Struct)"),
]
