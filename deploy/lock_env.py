"""Renews requirements.lock: the newest versions that pyproject.toml allows, for all extras, torch kept as it is pinned.

torch is kept because another release may bring several gigabytes of accelerator packages with it.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
HEADER = (
    "# Exact versions of everything that the development environment installs (all extras).\n"
    "# Renew with `make lock`; the environment is cached under a key made from this file.\n"
)


def resolve() -> dict[str, str]:
    """Package name to version, as pip would install `.[dev]` into an empty environment."""
    torch_pin = re.search(r"^torch==\S+", LOCK.read_text(), re.MULTILINE)
    with tempfile.TemporaryDirectory() as scratch:
        constraints, report = Path(scratch) / "constraints.txt", Path(scratch) / "report.json"
        constraints.write_text(torch_pin.group(0) if torch_pin else "")
        pip = ["python3", "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run([*pip, "--report", str(report), "--constraint", str(constraints), f"{ROOT}[dev]"], check=True)
        rows = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    names = {row["name"].lower().replace("_", "-"): row["version"].split("+")[0] for row in rows}
    names.pop("laminar-rl")
    return names


def main() -> None:
    LOCK.write_text(HEADER + "".join(f"{name}=={version}\n" for name, version in sorted(resolve().items())))
    print(f"wrote {LOCK.name}; `make env` installs it")


if __name__ == "__main__":
    main()
