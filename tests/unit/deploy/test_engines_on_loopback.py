"""Every engine that `deploy/` starts: on loopback, behind a relay with credentials, or named here as an exception."""

from __future__ import annotations

from collections.abc import Mapping

from deploy.setup_env import ROOT
from protos.access.listening import is_loopback
from tests.unit.deploy import test_compose, test_kubernetes, test_systemd
from tests.unit.deploy.command_lines import env_file, words

EXCEPTIONS = {"kubernetes/base": "a pod of its own: network policies guard it, and overlays/one-pod has it on loopback"}


def engines() -> Mapping[str, list[str]]:
    """The command line of each, by where it is."""
    base = test_kubernetes.by_hand(test_kubernetes.BASE)
    found = {
        f"kubernetes/base {container['name']}": next(test_kubernetes.daemon_lines(base, one, container))
        for one, container in test_kubernetes.each_container(base)
    }
    job = env_file(ROOT / "deploy/slurm/job.env")
    node = {**job, "engine_host": job["ENGINE_HOST"]}
    lines = (ROOT / "deploy/slurm/on-node.sh").read_text().replace("\\\n", " ").splitlines()
    for start in ("keep vllm serve", "keep gateway engine"):
        [line] = [line.strip() for line in lines if line.strip().startswith(start)]
        found[f"slurm {start}"] = words(line.removeprefix("keep "), node)
    found |= {f"systemd {name}": test_systemd.command_lines(name)[0] for name in test_systemd.SERVICES}
    found |= {f"compose {name}": test_compose.command_line(name) for name in test_compose.DAEMONS}
    return {where: line for where, line in found.items() if line[1] == "engine" or line[0] == "vllm"}


def test_an_engine_listens_on_loopback_unless_it_is_named_here() -> None:
    found = engines()
    assert {where.partition(" ")[0] for where in found} == {"kubernetes/base", "slurm", "systemd", "compose"}
    open_to_others = {
        where.partition(" ")[0]
        for where, line in found.items()
        if "--insecure" in line or not is_loopback(line[line.index("--host") + 1])
    }
    assert open_to_others == set(EXCEPTIONS)


def test_overlays_have_no_exceptions() -> None:
    """As text, for where there is no kustomize; test_kubernetes.py reads what it makes."""
    texts = [path.read_text() for path in (ROOT / "deploy/kubernetes/overlays").glob("*/*.yaml")]
    starts = [text for text in texts if "exec gateway engine" in text or "exec vllm serve" in text]
    assert len(starts) == 2
    assert all("--host 127.0.0.1" in text and "--insecure" not in text for text in starts)
