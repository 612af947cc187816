"""Compiles the C of `paramserver/data` where there is a compiler; without one the package works, and copies slower."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

DATA = "paramserver/data"
SOURCES = ("stream.c", "receive.c")


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs before a wheel is made, and before an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
        if self.target_name != "wheel" or compiler is None:
            return
        folder = Path(self.root) / DATA
        partial = folder / f"_stream.{os.getpid()}.partial"  # a process that runs keeps the file it has mapped
        sources = [str(folder / name) for name in SOURCES]
        command = [compiler, "-O3", "-shared", "-fPIC", "-o", str(partial), *sources]
        try:
            subprocess.run(command, check=True)
        except subprocess.CalledProcessError as error:
            self.app.display_warning(f"{' '.join(SOURCES)} do not compile here, copies are slower: {error}")
            return
        partial.rename(folder / "_stream.so")
        build_data["artifacts"].append(f"{DATA}/_stream.so")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
