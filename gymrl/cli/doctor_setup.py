"""``gymrl doctor`` before a run: the chat template of a model, and what a policy server returns."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING

import anyio
from rich.markup import escape
from rich.table import Table

from gymrl.api_keys import read_api_key
from gymrl.cli.consoles import configure_logging, error_console, output_console
from gymrl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from rich.console import Console

    from gymrl.generation.template_check import Finding

EXIT_BREAKS = 1
_STYLES = {"ok": "green", "note": "cyan", "warn": "yellow", "break": "bold red"}


def check_setup(
    model: str | None,
    base_url: str | None,
    model_name: str | None,
    without: Collection[str],
    api_key_env: str | None = None,
) -> int:
    """Check a model's chat template, a server, or both, and print what was found.

    Args:
        model: A directory, a hub id, or ``smollm2``; only its tokenizer and settings are read.
        base_url: With ``/v1``.
        model_name: What requests ask the server for.
        without: What the run does not do, and need not be checked.
        api_key_env: The environment variable that holds the server's key.

    Returns:
        1 where a run would break, else 0.

    Raises:
        ConfigError: Neither is named, the model is not there, or the variable holds no key.
        GenerationTransportError: The server can't be reached.
    """
    if model is None and base_url is None:
        raise ConfigError(
            "nothing to check: give --model for its chat template, --base-url for a server, or "
            "files of rollouts with --model",
            setting="--model",
        )
    if api_key_env is not None and base_url is None:
        raise ConfigError(
            "--api-key-env names the key of a server: add its --base-url", setting="--api-key-env"
        )
    key = read_api_key(api_key_env, "--api-key-env")
    configure_logging(error_console(), verbose=False)
    console = output_console()
    findings: list[Finding] = []
    if model is not None:
        found = _check_model(model, without)
        print_findings(console, f"chat template of {model}", found)
        findings += found
    if base_url is not None:
        from gymrl.generation.server_check import check_server

        found = anyio.run(check_server, base_url, model_name, key)
        print_findings(console, f"server {base_url}", found)
        findings += found
    breaks = sum(finding.severity == "break" for finding in findings)
    if breaks:
        console.print(f"[bold red]{breaks} of these would break a run.[/]")
        return EXIT_BREAKS
    console.print("Nothing of this would break a run.")
    return 0


def _check_model(model: str, without: Collection[str]) -> list[Finding]:
    unknown = set(without) - {"turns", "tools", "reasoning"}
    if unknown:
        raise ConfigError(
            f"--without {sorted(unknown)[0]}: one of turns, tools and reasoning",
            setting="--without",
        )
    try:
        import transformers

        from gymrl.generation.chat import ChatFormat
        from gymrl.generation.models import resolve_model
        from gymrl.generation.template_check import ALL_USES, check_template
        from gymrl.generation.transformers import model_end_ids
    except ImportError as error:
        raise ConfigError(
            f"checking a chat template needs transformers ({error}); install it with: "
            "pip install 'gymrl[transformers]'"
        ) from error
    source = resolve_model(model)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        settings = types.SimpleNamespace(
            generation_config=_generation_config(source),
            config=transformers.AutoConfig.from_pretrained(source),
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model={model!r} can't be read from {source}: {error}", setting="--model"
        ) from error
    stop_ids = model_end_ids(settings)
    if tokenizer.eos_token_id is not None:
        stop_ids = [*stop_ids, int(tokenizer.eos_token_id)]
    chat = ChatFormat(tokenizer, end_ids=stop_ids)
    return check_template(
        chat, stop_ids=stop_ids, uses=[use for use in ALL_USES if use not in without]
    )


def _generation_config(source: str) -> object:
    import transformers

    try:
        config: object = transformers.GenerationConfig.from_pretrained(source)
    except OSError:  # many models have none; then their own configuration speaks
        return None
    return config


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
