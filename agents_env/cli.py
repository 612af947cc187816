"""The command `agents-env`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from agents_env import commands, session_view
from agents_env.environments.reasoning import DEFAULT_DATASET, Reasoning, UnknownDataset, datasets
from agents_env.environments.task_files import BadTaskFile
from agents_env.environments.tool_chain import ToolChain
from agents_env.evaluate import start as start_evaluation
from agents_env.options import (
    NOT_OF_PROGRAMS,
    SETTINGS,
    EvalOptions,
    ExecOptions,
    JsonObject,
    Start,
    TasksOptions,
    mirror,
    starting,
)
from agents_env.programs import Programs, read_tasks
from agents_env.run import print_tasks, run_options
from agents_env.run import start as start_run
from agents_env.verifiers import command as verifiers
from protos.options import Group, config_option


@click.group(cls=Group, context_settings=SETTINGS)
@click.version_option(package_name="laminar-rl", prog_name="agents-env")
def main() -> None:
    """Agent environments that roll out against an OpenAI-compatible server.

    \b
    agents-env list
    agents-env run tool-chain --gateway http://127.0.0.1:8080 --concurrency 16 --group-size 8 --groups 4
    agents-env run tool-chain --gateway http://127.0.0.1:8080 --pool
    agents-env eval tool-chain --gateway http://127.0.0.1:8080 --tasks 50 --samples 4 --json eval.json
    agents-env run reasoning --gateway http://127.0.0.1:8000/v1 --no-sessions --model NAME --dataset gcd
    """


@main.group(cls=Group, context_settings=SETTINGS)
def run() -> None:
    """Roll out an environment: groups of samples of one task, with their rewards sent to the gateway.

    Ends with status 0 when --groups are done or the --pool is drained, after --duration-s, or on SIGTERM or Ctrl-C,
    which abandon open sessions and give leases back. With --journal the same command goes on where it was stopped.
    The key of a gateway is read from LAMINAR_API_KEY, or from OPENAI_API_KEY, as another server's is.
    """


@main.group("eval", cls=Group, context_settings=SETTINGS)
def evaluate() -> None:
    """Score a fixed set of tasks: the mean reward with its standard error, and a table by task.

    The sessions are of split `eval`, so no trainer gets them.
    """


@main.group(cls=Group, context_settings=SETTINGS)
def tasks() -> None:
    """Print an environment's own tasks as JSON lines, for a prompt pool (`PromptPool.add_jsonl`, id_column="id")."""


@run.command("tool-chain", context_settings=SETTINGS)
@run_options
def tool_chain(start: Start) -> None:
    """Multi-turn: 1 to 8 calls of a calculator, then the answer."""
    start(ToolChain())


@run.command("reasoning", context_settings=SETTINGS)
@click.option(
    "--dataset", default=DEFAULT_DATASET, help="Dataset of reasoning-gym; `agents-env list --datasets` names them."
)
@click.option(
    "--dataset-config",
    default=None,
    type=JsonObject(),
    metavar="JSON",
    help="Settings of the dataset, such as '{\"max_words\": 4}'.",
)
@click.option("--max-tokens", default=16, type=click.IntRange(min=1), help="Tokens of a reply at most.")
@click.option("--examples", default=1, type=click.IntRange(min=0), help="Worked examples before the question.")
@run_options
def reasoning(
    start: Start, dataset: str, dataset_config: Mapping[str, Any] | None, max_tokens: int, examples: int
) -> None:
    """Single-turn: problems of the reasoning-gym library, with its own scoring."""
    try:
        environment = Reasoning(dataset, dataset_config, num_examples=examples, max_tokens=max_tokens)
    except UnknownDataset as error:
        raise click.UsageError(str(error)) from error
    start(environment)


@main.command("exec", context_settings=SETTINGS)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "--tasks",
    "tasks_file",
    default=None,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON lines, a task each; the program reads its own from $AGENTS_ENV_TASK_FILE.",
)
@click.option("--reward-file", is_flag=True, help="The reward is the number in $AGENTS_ENV_REWARD_FILE.")
@click.option("--score", default=None, metavar="COMMAND", help="The reward is the last line that COMMAND prints.")
@click.option(
    "--log-dir",
    default=None,
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for the output of runs: SESSION.log.",
)
@starting(ExecOptions, start_run, **{name: {"hidden": True} for name in NOT_OF_PROGRAMS})
def execute(
    start: Start,
    command: tuple[str, ...],
    tasks_file: Path | None,
    reward_file: bool,
    score: str | None,
    log_dir: Path | None,
) -> None:
    """Run any program that reads OPENAI_BASE_URL or ANTHROPIC_BASE_URL, each run as one session.

    \b
    agents-env exec --gateway http://127.0.0.1:8080 --runs 8 -- python agent.py
    agents-env exec --gateway http://127.0.0.1:8080 --tasks tasks.jsonl --score "sh score.sh" -- ./agent

    The reward is 1 for exit status 0 and 0 for any other, unless --reward-file or --score gives it. The program also
    gets OPENAI_API_KEY, ANTHROPIC_API_KEY, AGENTS_ENV_MODEL, AGENTS_ENV_SESSION_ID, AGENTS_ENV_SAMPLE_INDEX and
    AGENTS_ENV_TASK_FILE. A run that takes too long, or is stopped, ends with all processes of its group.
    """
    if reward_file and score is not None:
        raise click.UsageError("--reward-file and --score both give the reward; choose one")
    try:
        tasks = read_tasks(tasks_file)
    except BadTaskFile as error:
        raise click.UsageError(str(error)) from error
    programs = Programs(command, tasks, reward_file=reward_file, score=score, log_dir=log_dir)
    start(programs)


@main.command("inspect", context_settings=SETTINGS)
@click.argument("session")
@config_option(ExecOptions, "gateway")
@click.option("--tokens", is_flag=True, help="Show each token, with its id, version and logprob.")
@click.option("--json", "as_json", is_flag=True, help="All that the gateway has of the session, as JSON.")
def inspect_session(session: str, gateway: str, tokens: bool, as_json: bool) -> None:
    """Show a session turn by turn: a live one, or one that no trainer has used yet."""
    session_view.start(session, gateway, tokens=tokens, as_json=as_json)


@main.command("list", context_settings=SETTINGS)
@click.option("--datasets", "with_datasets", is_flag=True, help="Name the datasets that `reasoning` can use, too.")
def list_environments(with_datasets: bool) -> None:
    """Name the environments."""
    width = max(map(len, run.commands)) + 2
    for name, command in sorted(run.commands.items()):
        click.echo(f"{name:{width}}{command.help}")
    if with_datasets:
        click.echo("\n".join(["", "datasets of `reasoning`:", *(f"  {name}" for name in datasets())]))


commands.add_to(run)
main.add_command(verifiers)
mirror(run, evaluate, EvalOptions, start_evaluation)
mirror(run, tasks, TasksOptions, print_tasks)
