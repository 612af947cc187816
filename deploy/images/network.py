"""What a build has to know of the network it runs in: a package index of one's own, and its certificates.

A build sees neither the environment nor the files of the machine that it runs on. pip's settings and the certificates
come in as secrets of the build, which no layer holds, as the address of an index may have a password in it; folders of
wheels are mounted. Proxies are not here: buildah itself hands `http_proxy` and the like on.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CA_VARIABLES = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
"""Where a machine names its certificates, the first one first."""
CA_INSIDE = "/run/secrets/ca.crt"
"""Where the Containerfile mounts the certificates."""
WHEELS_INSIDE = "/run/laminar-wheels"
"""Below it, folders of wheels are mounted, by their number."""
INDEXES = ("index-url", "extra-index-url")
OTHERS = ("trusted-host", "timeout", "retries", "proxy")


@dataclass(frozen=True, slots=True)
class Network:
    """The settings of one build. `wheels` are folders of this machine; `left_out` are indexes on its disk, which the
    build cannot see."""

    pip: Mapping[str, str]
    ca: Path | None = None
    wheels: tuple[Path, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def mounts(self) -> Mapping[str, Path]:
        """The folders of wheels, by where they are mounted."""
        return {f"{WHEELS_INSIDE}/{number}": folder for number, folder in enumerate(self.wheels)}

    @property
    def pip_conf(self) -> str:
        """A configuration file of pip for the inside of a build."""
        found = {**self.pip}
        links = [*self.pip.get("find-links", "").split(), *self.mounts]
        if links:
            found["find-links"] = " ".join(links)
        if self.ca is not None:
            found["cert"] = CA_INSIDE
        return "[global]\n" + "".join(f"{key} = {value}\n" for key, value in found.items())


def settings(config_list: str) -> dict[str, str]:
    """pip's settings from the output of `pip config list`; the environment wins over files, as it does in pip.

    A line is `global.index-url='https://...'`, or `:env:.index-url='...'` for PIP_INDEX_URL.
    """
    of_files: dict[str, str] = {}
    of_environment: dict[str, str] = {}
    for line in config_list.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in ("global", "install", ":env:"):
            (of_environment if section == ":env:" else of_files)[key] = str(ast.literal_eval(value))
    return of_files | of_environment


def read(
    config_list: str, environment: Mapping[str, str], ca: Path | None = None, wheels: Sequence[Path] = ()
) -> Network:
    """The network of this machine: from the output of `pip config list` and the environment, with the certificates `ca`
    in place of theirs, and the folders `wheels` beside theirs. Raises ValueError for what is named and not there."""
    of_pip = settings(config_list)
    kept = {key: of_pip[key] for key in OTHERS if key in of_pip}
    left_out: list[str] = []
    for key in INDEXES:
        places = of_pip.get(key, "").split()
        left_out += [place for place in places if place.startswith("file:")]
        if elsewhere := [place for place in places if not place.startswith("file:")]:
            kept[key] = " ".join(elsewhere)
    links = of_pip.get("find-links", "").split()
    if remote := [link for link in links if "://" in link]:
        kept["find-links"] = " ".join(remote)
    folders = [*wheels, *(Path(link) for link in links if "://" not in link and Path(link).is_dir())]
    if missing := [folder for folder in folders if not folder.is_dir()]:
        raise ValueError(f"--wheels {missing[0]}: there is no such folder")
    return Network(kept, _certificates(ca, of_pip, environment), tuple(dict.fromkeys(folders)), tuple(left_out))


def _certificates(ca: Path | None, of_pip: Mapping[str, str], environment: Mapping[str, str]) -> Path | None:
    named = [*filter(None, (of_pip.get("cert"), *(environment.get(name) for name in CA_VARIABLES)))]
    found = ca if ca is not None else Path(named[0]) if named else None
    if found is not None and not found.is_file():
        raise ValueError(f"the certificates {found} are not there; --ca names a file of certificates")
    return found
