"""The options of ``gymrl eval``. What a command needs is loaded when it runs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

eval_app = typer.Typer(
    name="eval",
    help="Evaluate a model on benchmarks: plan, run, continue after a kill, report, compare.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Repeats = Annotated[
    int | None,
    typer.Option(
        "--repeats", "-n", min=1, help="Attempts at each task (default: the benchmark's)."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--overrides",
        metavar="[BENCHMARK:]KEY=VALUE",
        help="Configuration key of the benchmarks, or of one; dots nest. Repeatable.",
    ),
]
TaskIds = Annotated[list[str] | None, typer.Option("--task-id", help="Only this task. Repeatable.")]
Roots = Annotated[
    list[Path] | None,
    typer.Option(
        "--root",
        help="Folder that benchmarks (and their servers) are looked up in first. Repeatable.",
    ),
]
GymPython = Annotated[
    str | None,
    typer.Option(
        help="Interpreter that has NeMo Gym, for servers of its own (default: GYMRL_GYM_PYTHON)."
    ),
]
Model = Annotated[
    str | None, typer.Option(help="Model to load for the run: a directory, a hub id, or smollm2.")
]
ModelName = Annotated[str | None, typer.Option(help="Name that requests ask a policy server for.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"] | None,
    typer.Option(help="Of the loaded weights (default: float32)."),
]
Backend = Annotated[
    Literal["transformers", "vllm"] | None,
    typer.Option(help="What runs the loaded model (default: transformers)."),
]
MaxModelLen = Annotated[
    int | None, typer.Option(min=1, help="Context in tokens (default: the model's own).")
]
Temperature = Annotated[
    float | None, typer.Option(min=0.0, help="0 is greedy (default: as each task says, else 1).")
]
TopP = Annotated[float | None, typer.Option(help="Nucleus sampling (default: as each task says).")]
MaxOutputTokens = Annotated[
    int | None,
    typer.Option(
        min=1, help="Sampled tokens of a model call, at most (default: as each task says)."
    ),
]
Seed = Annotated[int | None, typer.Option(help="Of the sampling (default: 0).")]


@eval_app.command()
def plan(  # noqa: PLR0913 - one parameter an option
    benchmarks: Annotated[
        list[str],
        typer.Argument(metavar="[LABEL=]BENCHMARK...", help="Names; see `gymrl benchmarks`."),
    ],
    repeats: Repeats = None,
    overrides: Overrides = None,
    task_id: TaskIds = None,
    root: Roots = None,
    gym_python: GymPython = None,
    model: Model = None,
    model_name: ModelName = None,
    dtype: Dtype = None,
    backend: Backend = None,
    max_model_len: MaxModelLen = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    max_output_tokens: MaxOutputTokens = None,
    seed: Seed = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The plan's file (default: standard output)."),
    ] = None,
) -> None:
    """Prepare the tasks, and write a plan that can be run anywhere.

    Example: gymrl eval plan chain_sum tool_arithmetic --repeats 4 --output plan.json
    """
    from gymrl.cli.evaluation import PlanOptions, plan_command

    options = PlanOptions(
        benchmarks=tuple(benchmarks),
        repeats=repeats,
        overrides=tuple(overrides or ()),
        task_ids=tuple(task_id or ()),
        roots=tuple(root or ()),
        gym_python=gym_python,
        model=model,
        model_name=model_name,
        dtype=dtype,
        backend=backend,
        max_model_len=max_model_len,
        temperature=temperature,
        top_p=top_p,
        max_output_tokens=max_output_tokens,
        seed=seed,
    )
    raise typer.Exit(plan_command(options, output))


@eval_app.command()
def run(  # noqa: PLR0913 - one parameter an option
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="Directory; one that holds this evaluation is continued."
        ),
    ],
    target: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PLAN.json | [LABEL=]BENCHMARK...]",
            help="A plan's file, or benchmarks (default: what --output holds).",
        ),
    ] = None,
    repeats: Repeats = None,
    overrides: Overrides = None,
    task_id: TaskIds = None,
    root: Roots = None,
    gym_python: GymPython = None,
    model: Model = None,
    model_name: ModelName = None,
    dtype: Dtype = None,
    backend: Backend = None,
    max_model_len: MaxModelLen = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    max_output_tokens: MaxOutputTokens = None,
    seed: Seed = None,
    base_url: Annotated[
        list[str] | None,
        typer.Option(
            help="Policy server with OpenAI's Responses API, instead of --model. Repeatable; "
            "servers take turns."
        ),
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(help="Environment variable that holds the key of --base-url."),
    ] = None,
    registry: Annotated[
        str | None, typer.Option(help="URL of the registry of Gym servers that already run.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Decodes the text kept beside the tokens.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Gym worker processes.")] = 1,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Everything in this process, for debugging.")
    ] = False,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Sequences a loaded model decodes together (16). 1 makes tokens independent of load.",
        ),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Rows under way at a time.")] = 128,
    max_tries: Annotated[
        int, typer.Option(min=1, help="Times that a row may fail, over all runs.")
    ] = 3,
    row_timeout: Annotated[
        float, typer.Option(min=0.001, help="Deadline of one attempt, in seconds.")
    ] = 1800.0,
    start_timeout: Annotated[
        float,
        typer.Option(min=0.001, help="Deadline for model and servers to be ready, in seconds."),
    ] = 300.0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Throw away what --output holds.")
    ] = False,
    extend: Annotated[
        bool,
        typer.Option("--extend", help="Add tasks, repeats or benchmarks to what --output holds."),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Log more, to standard error.")
    ] = False,
) -> None:
    """Run an evaluation, or continue one that was ended, however it was.

    Example: gymrl eval run chain_sum --model smollm2 --repeats 4 --output runs/first
    """
    from gymrl.cli.evaluation import PlanOptions, key_from, run_command
    from gymrl.evaluation.settings import RunOptions

    planned = PlanOptions(
        benchmarks=tuple(target or ()),
        repeats=repeats,
        overrides=tuple(overrides or ()),
        task_ids=tuple(task_id or ()),
        roots=tuple(root or ()),
        gym_python=gym_python,
        model=model,
        model_name=model_name,
        dtype=dtype,
        backend=backend,
        max_model_len=max_model_len,
        temperature=temperature,
        top_p=top_p,
        max_output_tokens=max_output_tokens,
        seed=seed,
    )
    options = RunOptions(
        base_urls=tuple(base_url or ()),
        api_key=key_from(api_key_env),
        registry_url=registry,
        gym_python=gym_python,
        gym_roots=tuple(str(folder) for folder in root or ()),
        tokenizer=tokenizer,
        workers=workers,
        in_process=in_process,
        batch_size=batch_size,
        concurrency=concurrency,
        max_tries=max_tries,
        row_timeout_s=row_timeout,
        start_timeout_s=start_timeout,
    )
    raise typer.Exit(
        run_command(planned, options, output, overwrite=overwrite, extend=extend, verbose=verbose)
    )


@eval_app.command()
def report(  # noqa: PLR0913 - one parameter an option
    directory: Annotated[
        list[Path],
        typer.Argument(metavar="DIRECTORY [DIRECTORY_B]", help="One to report on, two to compare."),
    ],
    form: Annotated[
        Literal["table", "json", "markdown"], typer.Option("--format", help="Of the report.")
    ] = "table",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for json or markdown.")
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(help="Directory for pictures as PNG (extra `plots`).")
    ] = None,
    pass_reward: Annotated[
        float, typer.Option(help="A row passes when its verifier's reward is at least this.")
    ] = 1.0,
    confidence: Annotated[float, typer.Option(help="Of the intervals.")] = 0.95,
    common: Annotated[
        bool, typer.Option("--common", help="Compare what both have, where tasks differ.")
    ] = False,
) -> None:
    """Report on an evaluation, finished or not, or compare two, task by task.

    Example: gymrl eval report runs/first runs/second --plots pictures
    """
    from gymrl.cli.eval_report import ReportOptions, report_command

    options = ReportOptions(
        form=form,
        output=output,
        plots=plots,
        pass_reward=pass_reward,
        confidence=confidence,
        common=common,
    )
    raise typer.Exit(report_command(tuple(directory), options))
