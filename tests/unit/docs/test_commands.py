"""Commands and programs on the pages that no test runs as they stand: they are checked here, or listed with a reason.

Blocks of code with a language are run: `tests/e2e/test_docs.py` has the list. These are the commands within sentences
and tables, and the blocks that are pictures or settings.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from deploy.setup_env import ROOT
from tests.unit.deploy.command_lines import COMMANDS

PAGES = [
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "tests/README.md",
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md") if path.parent.name != "reference"),
]
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
OF_OTHERS = {
    "apt": "an operator's package manager",
    "apt-get": "the same",
    "cd": "`tests/unit/deploy/test_slurm.py` runs the batch script that follows",
    "chmod": "POSIX",
    "cp": "POSIX",
    "curl": "routes are those of `docs/reference/http.md`; those of fleet.md are sent by `tests/e2e/test_docs.py`",
    "buildah": "`tests/images/docker.py` hands images to Docker so",
    "docker": "`tests/images` loads images and runs the compose file; test_monitoring.py reads the other",
    "etcdctl": "etcd's own",
    "export": "the shell's",
    "git": "git's own",
    "grep": "POSIX; reads /proc",
    "kill": "POSIX",
    "kubectl": "no cluster here; the manifests are read by test_kubernetes.py and test_monitoring.py",
    "ls": "POSIX; reads /proc",
    "mount": "Linux; changes the host",
    "openenv": "run by `tests/openenv`",
    "pip": "the wheel and its extras are installed by `tests/e2e/operating/test_wheel.py` and `deploy/setup_env.py`",
    "prlimit": "Linux; reads and changes a process' limits",
    "promtool": "run by test_prometheus.py",
    "pytest": "runs tests, which are there",
    "python": "programs of the page, run by the test of its blocks",
    "python3": "the same",
    "redis-cli": "Redis' own",
    "scancel": "no Slurm here; `tests/unit/deploy/test_slurm.py` runs the batch script",
    "ss": "Linux; shows sockets",
    "systemctl": "systemd is not the first process here; the units are read by test_systemd.py",
    "systemd-analyze": "run by test_systemd.py where it is installed",
    "ulimit": "the shell's",
    "vf-eval": "run by `tests/verifiers`",
    "vllm": "run by `tests/vllm`",
}
"""Programs of others, with the reason why their commands in sentences are not run."""
INDENTED = {"docs/prompt-pool.md": 1}
"""Lines of code set in by four blanks. The curriculum's is a call of `tests/unit/trainer_client/test_tasks.py`."""
UNNAMED = {
    "README.md": "`make test-fleet` installs a wheel of the checkout so, with these extras, and runs what it brings",
    "docs/learning-curve.md": "a benchmark of 40 minutes; `tests/e2e/test_learning_bench.py` runs a small one",
    "docs/openenv.md": "`tests/openenv` runs both ways, in an environment of its own",
    "docs/prime-rl.md": "`tests/e2e/test_prime_rl.py` starts the server",
    "docs/environments.md": "`tests/unit/agents_env/test_commands.py` runs it",
    "docs/verifiers.md": "`tests/verifiers` runs it, in an environment of its own",
}
"""Pages with commands in blocks without a language, and the reason why `tests/e2e/test_docs.py` does not run them."""
OURS = re.compile(r"^\s*\$?\s*(?:paramserver|gateway|agents-env|make|python3?|pip|curl) [\w-]", re.MULTILINE)


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str) -> list[tuple[str, str]]:
    """The language and the text of each block."""
    return re.findall(r"^```(\w*)\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL)


def inline(page: str) -> Iterator[str]:
    """What stands between backticks in sentences and tables, in one line."""
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    for found in re.findall(r"`([^`]+)`", prose):
        yield " ".join(found.replace("\\|", "|").split())


def words_of(command: str) -> list[str]:
    try:
        words = shlex.split(command, comments=False)
    except ValueError:  # a piece of code with one quote
        return []
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    return words


def wrong_with(words: list[str]) -> str:
    """What is wrong with a command of ours; "" for nothing. Values are the reader's: only names are looked at."""
    name, *rest = words
    command: click.Command = COMMANDS[name]
    while isinstance(command, click.Group) and rest and re.fullmatch(r"[a-z][\w-]*", rest[0]):
        found = command.get_command(click.Context(command), rest[0])
        if found is None:
            return f"{name} has no command {rest[0]!r}"
        command, rest = found, rest[1:]
    own = rest[: rest.index("--")] if "--" in rest else rest
    asked = {word.partition("=")[0] for word in own if re.match(r"--?[a-zA-Z]", word)}
    unknown = asked - options_of(command) - {"--help", "--version", "-h"}
    return f"{' '.join(words)}: no option {', '.join(sorted(unknown))}" if unknown else ""


def options_of(command: click.Command) -> set[str]:
    """Of a group, where the page leaves the command to its reader: those of all its commands."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        return {
            option
            for name in command.list_commands(context)
            if (found := command.get_command(context, name)) is not None
            for option in options_of(found)
        }
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_sentences_are_ours_and_right_or_listed(page: str) -> None:
    wrong: list[str] = []
    for command in inline(page):
        words = words_of(command)
        if len(words) < 2:
            continue
        if words[0] in COMMANDS:
            wrong.append(wrong_with(words))
        elif words[0] == "make":
            wrong.append("" if words[1] in TARGETS else f"no target {words[1]}")
        elif re.fullmatch(r"[a-z][a-z0-9-]*", words[0]) and any(re.match(r"--?[a-z]", word) for word in words[1:]):
            wrong.append("" if words[0] in OF_OTHERS or of_a_command_of_ours(words) else f"whose is `{command}`?")
    assert [found for found in wrong if found] == []


def of_a_command_of_ours(words: list[str]) -> bool:
    """`status --wait-s`, in a table whose rows name the program."""
    return any(not wrong_with([name, *words]) for name in COMMANDS)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_without_a_language_hold_no_commands_that_are_not_listed(page: str) -> None:
    found = [text for language, text in blocks(page) if not language and OURS.search(text)]
    assert bool(found) == (page in UNNAMED), f"give it a language, and a test that runs it: {found}"
    for line in "".join(found).replace("\\\n", " ").splitlines():
        words = words_of(line.partition(" #")[0])
        if words and words[0] in COMMANDS:
            assert wrong_with(words) == ""


def test_every_listed_page_is_there() -> None:
    assert set(UNNAMED) <= set(PAGES)


def test_programs_set_in_by_blanks_are_listed() -> None:
    found: dict[str, int] = {}
    for page in PAGES:
        prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
        code = re.findall(r"(?<=\n\n)    (?![-*|\d ]).+", prose)
        if code:
            found[page] = len(code)
    assert found == INDENTED


def test_a_wrong_command_is_found() -> None:
    assert wrong_with(["gateway", "serve", "--no-such"]) == "gateway serve --no-such: no option --no-such"
    assert wrong_with(["paramserver", "fly"]) == "paramserver has no command 'fly'"
    assert wrong_with(["agents-env", "exec", "--gateway", "URL", "--", "python", "--any"]) == ""
    assert wrong_with(["paramserver", "drain", "--relay", "HOST:PORT"]) == ""


def test_every_listed_program_stands_on_a_page() -> None:
    named = {words[0] for page in PAGES for command in inline(page) if (words := words_of(command))}
    assert set(OF_OTHERS) - named == set()


def test_files_and_folders_of_links_are_there() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text_of(page)):
            if not re.match(r"https?://", target):
                assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"


def test_anchors_of_links_are_headings() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", text_of(page)):
            if re.match(r"https?://", target):
                continue
            path = Path(ROOT / page).parent / target if target else ROOT / page
            headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{page}: {target}#{anchor}"
