"""What a build has to know of the network it runs in: a package index of one's own, and its certificates.

A build sees neither the environment nor the files of the machine that it runs on. pip's settings and the certificates
come in as secrets of the build, which no layer holds, as the address of an index may have a password in it; a folder of
wheels is mounted. Proxies are not here: buildah itself hands `http_proxy` and the like on.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CA_VARIABLES = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
"""Where a machine names its certificates, the first one first."""
CA_INSIDE = "/run/secrets/ca.crt"
"""Where the Containerfile mounts the certificates."""
WHEELS_INSIDE = "/mnt"
"""Where the folder of wheels is mounted: a folder that Debian has, as any other would stay in the images."""
PLACES = ("index-url", "extra-index-url", "find-links")
"""pip's settings that name places for packages."""
OTHERS = ("trusted-host", "timeout", "retries", "proxy")


@dataclass(frozen=True, slots=True)
class Network:
    """The settings of one build. `wheels` is a folder of this machine; `left_out` are the places on its disk that the
    build does not see."""

    pip: Mapping[str, str]
    ca: Path | None = None
    wheels: Path | None = None
    left_out: tuple[str, ...] = ()

    @property
    def pip_conf(self) -> str:
        """A configuration file of pip for the inside of a build."""
        found = {**self.pip}
        if self.wheels is not None:
            found["find-links"] = f"{self.pip.get('find-links', '')} {WHEELS_INSIDE}".strip()
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
    config_list: str, environment: Mapping[str, str], ca: Path | None = None, wheels: Path | None = None
) -> Network:
    """The network of this machine: from the output of `pip config list` and the environment. The certificates `ca` and
    the folder `wheels` go before theirs. Raises ValueError for what is named and not there."""
    of_pip = settings(config_list)
    kept = {key: of_pip[key] for key in OTHERS if key in of_pip}
    on_disk: list[str] = []
    for key in PLACES:
        places = of_pip.get(key, "").split()
        on_disk += [place for place in places if _is_on_disk(place)]
        if remote := [place for place in places if not _is_on_disk(place)]:
            kept[key] = " ".join(remote)
    if wheels is not None and not wheels.is_dir():
        raise ValueError(f"--wheels {wheels}: there is no such folder")
    links = [Path(place) for place in of_pip.get("find-links", "").split() if _is_on_disk(place)]
    folder = wheels or next((link for link in links if link.is_dir()), None)
    left_out = tuple(place for place in on_disk if place != str(folder))
    return Network(kept, _certificates(ca, of_pip, environment), folder, left_out)


def _is_on_disk(place: str) -> bool:
    return "://" not in place or place.startswith("file:")


def _certificates(ca: Path | None, of_pip: Mapping[str, str], environment: Mapping[str, str]) -> Path | None:
    named = [*filter(None, (of_pip.get("cert"), *(environment.get(name) for name in CA_VARIABLES)))]
    found = ca if ca is not None else Path(named[0]) if named else None
    if found is not None and not found.is_file():
        raise ValueError(f"the certificates {found} are not there; --ca names a file of certificates")
    return found
