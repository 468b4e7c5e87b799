"""``gymrl doctor`` before a run: the chat template of a model, and what a policy server returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import msgspec
from rich.markup import escape
from rich.table import Table

from gymrl.api_keys import read_api_key
from gymrl.cli.consoles import configure_logging, error_console, output_console
from gymrl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from gymrl.generation.findings import Finding

EXIT_BREAKS = 1
_STYLES = {"ok": "green", "note": "cyan", "warn": "yellow", "break": "bold red"}


class SetupOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line said.

    Attributes:
        model: A directory, a hub id, or ``smollm2``; only its tokenizer and settings are read.
        base_url: With ``/v1``.
        model_name: What requests ask the server for.
        without: What the run does not do, and need not be checked.
        api_key_env: The environment variable that holds the server's key.
        tool_parser: As the run will have it.
        reasoning_parser: As well.
    """

    model: str | None = None
    base_url: str | None = None
    model_name: str | None = None
    without: tuple[str, ...] = ()
    api_key_env: str | None = None
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"


def check_setup(options: SetupOptions) -> int:
    """Check a model's chat template, a server, or both, and print what was found.

    Returns:
        1 where a run would break, else 0.

    Raises:
        ConfigError: Neither is named, the model is not there, the base URL is none, or the variable
            holds no key.
        GenerationTransportError: The server can't be reached.
    """
    model, base_url = options.model, options.base_url
    if model is None and base_url is None:
        raise ConfigError(
            "nothing to check: give --model for its chat template, --base-url for a server, or "
            "files of rollouts with --model",
            setting="--model",
        )
    if base_url is not None and not base_url.startswith(("http://", "https://")):
        raise ConfigError(
            f"--base-url {base_url!r} is no URL; write http://host:port/v1", setting="--base-url"
        )
    if options.api_key_env is not None and base_url is None:
        raise ConfigError(
            "--api-key-env names the key of a server: add its --base-url", setting="--api-key-env"
        )
    key = read_api_key(options.api_key_env, "--api-key-env")
    configure_logging(error_console(), verbose=False)
    console = output_console()
    findings: list[Finding] = []
    if model is not None:
        found = _check_model(options)
        print_findings(console, f"chat template of {model}", found)
        findings += found
    if base_url is not None:
        from gymrl.generation.server_check import check_server

        found = anyio.run(check_server, base_url, options.model_name, key)
        print_findings(console, f"server {base_url}", found)
        findings += found
    breaks = sum(finding.severity == "break" for finding in findings)
    if breaks:
        console.print(f"[bold red]{breaks} of these would break a run.[/]")
        return EXIT_BREAKS
    console.print("Nothing of this would break a run.")
    return 0


def _check_model(options: SetupOptions) -> list[Finding]:
    unknown = set(options.without) - {"turns", "tools", "reasoning"}
    if unknown:
        raise ConfigError(
            f"--without {sorted(unknown)[0]}: one of turns, tools and reasoning",
            setting="--without",
        )
    try:
        from gymrl.generation.chat import ChatFormat
        from gymrl.generation.checkpoints import load_tokenizer
        from gymrl.generation.models import resolve_model
        from gymrl.generation.template_check import ALL_USES, check_template, no_template
    except ImportError as error:
        raise ConfigError(
            f"checking a chat template needs transformers ({error}); install it with: "
            "pip install 'gymrl[transformers]'"
        ) from error
    tokenizer, stop_ids = load_tokenizer(resolve_model(options.model or ""))
    if not tokenizer.chat_template:
        return [no_template()]
    chat = ChatFormat(
        tokenizer,
        end_ids=stop_ids,
        tool_parser=options.tool_parser,
        reasoning_parser=options.reasoning_parser,
    )
    return check_template(
        chat, stop_ids=stop_ids, uses=[use for use in ALL_USES if use not in options.without]
    )


def print_findings(console: Console, title: str, findings: Sequence[Finding]) -> None:
    """A line a finding, what to change under it."""
    table = Table(title=escape(title), title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("check")
    table.add_column("")
    table.add_column("found", overflow="fold")
    for finding in findings:
        style = _STYLES[finding.severity]
        found = escape(finding.found)
        if finding.remedy:
            found += f"\n[dim]{escape(f'-> {finding.remedy}')}[/]"
        table.add_row(escape(finding.check), f"[{style}]{finding.severity}[/]", found)
    console.print(table)
