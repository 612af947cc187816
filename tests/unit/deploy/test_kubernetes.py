"""The manifests of `deploy/kubernetes`: what selects finds, what is mounted is there, the daemons take their options.

The base is read as its files stand. Base and overlays as kustomize makes them pass the same where there is a `kubectl`.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml
from kubernetes_validate.utils import all_versions

from deploy.setup_env import ROOT
from gateway.api.routes import ROUTES
from gateway.app import DRAIN_TIMEOUT_S
from paramserver.config import EngineBeside
from paramserver.credentials.fleet import Fleet
from paramserver.daemon.access import check_serves
from paramserver.daemon.health import LIVE_PATH, SERVING_PATH
from paramserver.daemon.process import DRAIN_S
from protos.access.credentials import CREDENTIALS_VARIABLE, Credentials
from protos.access.secret_file import FORBIDDEN
from protos.options import parse_bytes
from tests.support.skips import needs
from tests.unit.deploy.command_lines import check, env_file, words

FOLDER = ROOT / "deploy/kubernetes"
BASE, OVERLAYS = FOLDER / "base", sorted(path.parent for path in FOLDER.glob("overlays/*/kustomization.yaml"))
KUBECTL = shutil.which("kubectl")

Object = Mapping[str, Any]

KUBERNETES = (all_versions()[0], all_versions()[-1])
"""The releases whose schemas the manifests are compared with: the oldest and the newest that there are schemas of."""
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
USERS_LABELS = {"laminar/trainer", "laminar/agent"}
"""Of pods that are the user's own."""
GIVEN = {"NODE_NAME": "node-0", "POD_IP": "10.1.0.7", "HOST_IP": "10.0.0.7", "NAMESPACE": "laminar"}
"""What the node gives a pod."""
POD_HOST = "10-1-0-7"
"""What the script of a relay makes of the address."""
SECRETS = {"relay": "laminar-relay", "gateway": "laminar-gateway"}
"""Of whom the pods of each name have credentials."""


def read(path: Path) -> list[Object]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


def by_hand(folder: Path) -> list[Object]:
    """The objects of a kustomization without patches, and its config map under the name that it is made from."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    found = [one for name in kustomization["resources"] for one in read(folder / name)]
    for made in kustomization["configMapGenerator"]:
        data: dict[str, str] = {}
        for name in made["envs"]:
            data |= env_file(folder / name)
        found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": made["name"]}, "data": data})
    return found


def by_kustomize(folder: Path) -> list[Object]:
    if KUBECTL is None:
        pytest.skip(needs("no kubectl", "install it from your Kubernetes distribution"))
    done = subprocess.run([KUBECTL, "kustomize", str(folder)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


@pytest.fixture(scope="module", params=["by hand", "base", *(path.name for path in OVERLAYS)])
def objects(request: pytest.FixtureRequest) -> list[Object]:
    if request.param == "by hand":
        return by_hand(BASE)
    return by_kustomize(BASE if request.param == "base" else FOLDER / "overlays" / request.param)


def of_kind(objects: Sequence[Object], *kinds: str) -> list[Object]:
    found = [one for one in objects if one["kind"] in kinds]
    assert found, kinds
    return found


def workloads(objects: Sequence[Object]) -> list[Object]:
    return of_kind(objects, "DaemonSet", "StatefulSet")


def name_of(one: Object) -> str:
    return str(one["metadata"]["name"])


def pod_of(one: Object) -> Object:
    found: Object = one["spec"]["template"]["spec"]
    return found


def containers_of(one: Object) -> list[Object]:
    found: list[Object] = pod_of(one)["containers"]
    return found


def container_of(one: Object) -> Object:
    """The container that the workload is named after: the other one is the engine beside a relay."""
    [found] = [container for container in containers_of(one) if container["name"] == app_of(one)]
    assert {container["name"] for container in containers_of(one)} <= {app_of(one), "engine"}
    return found


def each_container(objects: Sequence[Object]) -> Iterator[tuple[Object, Object]]:
    """Each container, after its workload."""
    for one in workloads(objects):
        for container in containers_of(one):
            yield one, container


def labels_of(one: Object) -> Mapping[str, str]:
    found: Mapping[str, str] = one["spec"]["template"]["metadata"]["labels"]
    return found


def ports_of(one: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container_of(one)["ports"]}


def selected(objects: Sequence[Object], labels: Mapping[str, str]) -> list[Object]:
    """The workloads whose pods have all of the labels."""
    return [one for one in workloads(objects) if labels.items() <= labels_of(one).items()]


def variables(objects: Sequence[Object], container: Object) -> dict[str, str]:
    """The environment of a container: of the config maps, of its own, and what the node gives."""
    maps = {name_of(found): found["data"] for found in of_kind(objects, "ConfigMap")}
    found: dict[str, str] = {}
    for source in container["envFrom"]:
        found |= maps[source["configMapRef"]["name"]]
    for variable in container.get("env", ()):
        name = variable["name"]
        found[name] = variable["value"] if "value" in variable else GIVEN.get(name, "")
    return {**found, "POD_HOST": POD_HOST}


def parsed(objects: Sequence[Object], one: Object, line: Sequence[str]) -> click.Context:
    """With the credentials of its environment, if its pod has any."""
    has_some = app_of(one) in SECRETS and line[1] != "engine"
    return check(line, variables(objects, container_of(one))[CREDENTIALS_VARIABLE] if has_some else "")


def app_of(one: Object) -> str:
    return labels_of(one)["app.kubernetes.io/name"]


def daemon_lines(objects: Sequence[Object], one: Object, container: Object | None = None) -> Iterator[list[str]]:
    """The command line that its shell ends in, and that of its preStop."""
    container = container if container is not None else container_of(one)
    assert container["command"] == ["sh", "-c"]
    [script] = container["args"]
    yield words(script.partition("exec ")[2], variables(objects, container))
    hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
    if hook:
        assert hook[:2] == ["sh", "-c"]
        yield words(hook[2], variables(objects, container))


@pytest.mark.parametrize("version", KUBERNETES)
def test_objects_are_what_the_api_takes(objects: list[Object], version: str) -> None:
    """By Kubernetes' own schemas, in which a field that there is not is an error; the API server only warns of it."""
    for one in objects:
        try:
            kubernetes_validate.validate(dict(one), version, strict=True)
        except kubernetes_validate.ValidationError as error:
            pytest.fail(f"{one['kind']} {name_of(one)}, {'.'.join(map(str, error.path))}: {error.message}")


def test_a_misspelled_field_is_refused() -> None:
    relay = yaml.safe_load(yaml.safe_dump(of_kind(by_hand(BASE), "DaemonSet")[0]))
    container_of(relay)["readinesProbe"] = container_of(relay).pop("readinessProbe")
    with pytest.raises(kubernetes_validate.ValidationError, match="readinesProbe"):
        kubernetes_validate.validate(relay, KUBERNETES[-1], strict=True)


def test_objects_have_names_of_their_own_and_daemons_their_probes(objects: list[Object]) -> None:
    names = [(one["kind"], name_of(one)) for one in objects]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", name) for _, name in names)
    for one in workloads(objects):
        assert set(PROBES) <= set(container_of(one))
    for _, container in each_container(objects):
        for probe in set(PROBES) & set(container):
            assert {"httpGet", "exec"} & set(container[probe]), "kubelet takes gRPC in the clear alone"


def test_a_workload_selects_its_own_pods_and_no_others(objects: list[Object]) -> None:
    for one in workloads(objects):
        assert selected(objects, one["spec"]["selector"]["matchLabels"]) == [one], name_of(one)


def test_services_lead_to_ports_of_pods(objects: list[Object]) -> None:
    for service in of_kind(objects, "Service"):
        behind = selected(objects, service["spec"]["selector"])
        assert behind, name_of(service)
        for port in service["spec"]["ports"]:
            assert all(port["targetPort"] in ports_of(one) for one in behind)
            assert all(port["port"] == ports_of(one)[port["targetPort"]] for one in behind)
    for one in of_kind(objects, "StatefulSet"):
        [governing] = [s for s in of_kind(objects, "Service") if name_of(s) == one["spec"]["serviceName"]]
        assert governing["spec"]["clusterIP"] == "None"


def test_policies_let_in_who_is_there_at_ports_that_are_there(objects: list[Object]) -> None:
    policies = of_kind(objects, "NetworkPolicy")
    for policy in policies:
        behind = selected(objects, policy["spec"]["podSelector"]["matchLabels"])
        assert behind, name_of(policy)
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        for rule in policy["spec"]["ingress"]:
            for port in rule["ports"]:
                those = [port["port"] in ports_of(one) for one in behind]
                assert any(those) if port["port"] == "engine" else all(those), "a relay may be without an engine"
            for source in rule["from"]:
                labels = source.get("podSelector", {}).get("matchLabels", {})
                assert "namespaceSelector" in source or set(labels) <= USERS_LABELS or selected(objects, labels)
    covered = [name_of(one) for p in policies for one in selected(objects, p["spec"]["podSelector"]["matchLabels"])]
    assert sorted(covered) == sorted(name_of(one) for one in workloads(objects)), (
        "a pod without a policy is open to all"
    )


def test_budgets_are_for_what_has_more_than_one_pod(objects: list[Object]) -> None:
    for budget in of_kind(objects, "PodDisruptionBudget"):
        behind = selected(objects, budget["spec"]["selector"]["matchLabels"])
        assert behind
        assert all(one["kind"] == "DaemonSet" or one["spec"]["replicas"] > 1 for one in behind)
        assert isinstance(budget["spec"]["minAvailable"], int), "all that pods of a DaemonSet take"


def test_what_is_mounted_is_there_and_what_is_there_is_mounted(objects: list[Object]) -> None:
    claims = {name_of(one) for one in of_kind(objects, "PersistentVolumeClaim")}
    for one in workloads(objects):
        templates = {template["metadata"]["name"] for template in one["spec"].get("volumeClaimTemplates", ())}
        volumes = {volume["name"]: volume for volume in pod_of(one)["volumes"]}
        mounts = {mount["name"] for container in containers_of(one) for mount in container["volumeMounts"]}
        assert mounts == volumes.keys() | templates, name_of(one)
        assert all(len(volume) == 2 for volume in volumes.values()), "a name and one source"
        named = {v["persistentVolumeClaim"]["claimName"] for v in volumes.values() if "persistentVolumeClaim" in v}
        assert named <= claims


def test_probes_ask_the_daemons_own_health_at_ports_that_are_there(objects: list[Object]) -> None:
    of_gateway = {route.path: route.operation for route in ROUTES if route.method == "get"}
    for one in workloads(objects):
        container, ports = container_of(one), ports_of(one)
        for probe in PROBES:
            asked = container[probe]
            path = asked["httpGet"]["path"]
            assert asked["httpGet"]["port"] in ports
            if app_of(one) == "relay":
                assert asked["httpGet"]["port"] == "metrics", "kubelet has no certificate"
                assert path == (SERVING_PATH if probe == "readinessProbe" else LIVE_PATH)
            elif app_of(one) == "gateway":
                assert of_gateway[path].public, "kubelet has no key"
    ready = {name_of(one): container_of(one)["readinessProbe"] for one in workloads(objects)}
    assert ready["gateway"]["httpGet"]["path"] == "/healthz"
    [gateway] = of_kind(objects, "StatefulSet")
    alive = {container_of(gateway)[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe")}
    assert alive == {"/openapi.json"}, "a restart brings no engine back, so health is not asked for"


def test_the_daemons_take_their_command_lines(objects: list[Object]) -> None:
    for one, container in each_container(objects):
        for line in daemon_lines(objects, one, container):
            if line[0] != "vllm":
                parsed(objects, one, line)


def test_who_may_use_a_daemon_has_a_single_place(objects: list[Object]) -> None:
    options = env_file(BASE / "laminar.env")
    assert [options[name] for name in ("RELAY_ACCESS", "ENGINE_ACCESS")] == ["", "--insecure"]
    assert options[CREDENTIALS_VARIABLE] == "/etc/laminar-credentials"
    for _, container in each_container(objects):
        [script] = container["args"]
        expected = f"{container['name'].upper()}_ACCESS"
        assert re.findall(r"\$(\w+_ACCESS)", script) == [expected] * ("exec vllm" not in script)


def test_the_gateway_reads_its_keys_from_the_secret_and_nobody_else_may(objects: list[Object]) -> None:
    [gateway] = of_kind(objects, "StatefulSet")
    options = parsed(objects, gateway, next(daemon_lines(objects, gateway))).params
    path = options["api_keys"]
    assert str(options["credentials"]) == variables(objects, container_of(gateway))[CREDENTIALS_VARIABLE]
    [mount] = [mount for mount in container_of(gateway)["volumeMounts"] if mount["mountPath"] == str(path.parent)]
    [volume] = [volume for volume in pod_of(gateway)["volumes"] if volume["name"] == mount["name"]]
    assert mount["readOnly"] is True
    assert "subPath" not in mount, "it would stay as it was at the start"
    assert volume["secret"] == {"secretName": "laminar-keys", "defaultMode": 0o440}
    assert not 0o440 & FORBIDDEN
    user = pod_of(gateway)["securityContext"]
    assert user["fsGroup"] == user["runAsGroup"], "kubelet gives the files to this group"
    page = (ROOT / "docs/deploy.md").read_text()
    assert f"secret generic laminar-keys --namespace laminar --from-file={path.name}`" in page


def test_relays_and_the_gateway_have_credentials_of_their_own_and_nobody_else_may_read_them(
    objects: list[Object],
) -> None:
    for one in workloads(objects):
        volumes = [volume for volume in pod_of(one)["volumes"] if volume["name"] == "credentials"]
        if app_of(one) not in SECRETS:
            assert not volumes
            continue
        [volume] = volumes
        assert volume["secret"] == {"secretName": SECRETS[app_of(one)], "defaultMode": 0o440}
        assert not 0o440 & FORBIDDEN
        [(holder, mount)] = [
            (container["name"], mount)
            for container in containers_of(one)
            for mount in container["volumeMounts"]
            if mount["name"] == "credentials"
        ]
        assert holder == app_of(one)
        assert mount["mountPath"] == variables(objects, container_of(one))[CREDENTIALS_VARIABLE]
        assert mount["readOnly"] is True
        assert "subPath" not in mount, "it would stay as it was at the start"
        user = pod_of(one)["securityContext"]
        assert user["fsGroup"] == user["runAsGroup"], "kubelet gives the files to this group"
    page = (ROOT / "docs/deploy.md").read_text()
    for holder, secret in SECRETS.items():
        assert f"secret generic {secret} --namespace laminar --from-file=./fleet/{holder}" in page


def test_relays_are_called_by_names_for_which_the_page_has_certificates_made(
    objects: list[Object], tmp_path: Path
) -> None:
    [command] = re.findall(
        r"`paramserver (credentials init .*?)`", (ROOT / "docs/deploy.md").read_text().partition("## Kubernetes")[2]
    )
    hosts = check(["paramserver", *shlex.split(command)]).params["hosts"]
    Fleet.init(tmp_path / "fleet", hosts, days=1)
    credentials = Credentials(tmp_path / "fleet/relay")
    services = {name_of(one): one["spec"] for one in of_kind(objects, "Service")}
    assert "relay" in credentials.material.hosts, "trainers call the service"
    for one in workloads(objects):
        if app_of(one) != "relay":
            continue
        [script] = container_of(one)["args"]
        assert 'POD_HOST="$(echo "$POD_IP" | tr . -)"' in script
        name = parsed(objects, one, next(iter(daemon_lines(objects, one)))).params["advertise"]
        host, service, namespace, _ = name.split(".")
        assert (host, namespace) == (POD_HOST, "laminar")
        assert services[service]["clusterIP"] == "None"
        assert services[service]["publishNotReadyAddresses"] is True, "a relay fetches before it serves"
        assert services[service]["selector"].items() <= labels_of(one).items()
        check_serves(credentials, name)


def test_the_ports_of_a_container_are_those_that_its_daemon_listens_on(objects: list[Object]) -> None:
    for one in workloads(objects):
        line = next(iter(daemon_lines(objects, one)))
        given = {
            int(line[at + 1]) for at, word in enumerate(line) if word in ("--port", "--data-port", "--metrics-port")
        }
        if app_of(one) == "relay":
            beside = map(EngineBeside.parse, parsed(objects, one, line).params["engines"])
            given |= {engine.port for engine in beside if engine.port is not None}
        assert given == set(ports_of(one).values()), name_of(one)


def test_a_drain_has_the_time_that_it_takes(objects: list[Object]) -> None:
    for one in workloads(objects):
        grace_s = pod_of(one)["terminationGracePeriodSeconds"]
        if app_of(one) == "relay":
            _, drain = daemon_lines(objects, one)
            assert grace_s >= parsed(objects, one, drain).params["wait_s"] + DRAIN_S + 30, (
                "and the kernel frees the pool"
            )
        elif name_of(one) == "gateway":
            assert grace_s >= 2 * DRAIN_TIMEOUT_S


def test_relay_and_engine_are_one_user_and_share_a_host_path(objects: list[Object]) -> None:
    found = [one for one in workloads(objects) if app_of(one) in ("relay", "engine")]
    inside = [
        (one, container) for one, container in each_container(objects) if container["name"] in ("relay", "engine")
    ]
    assert {container["name"] for _, container in inside} == {"relay", "engine"}
    assert len({pod_of(one)["securityContext"]["runAsUser"] for one in found}) == 1
    places = set()
    for one, container in inside:
        [volume] = [volume for volume in pod_of(one)["volumes"] if volume["name"] == "pool"]
        [mount] = [mount for mount in container["volumeMounts"] if mount["name"] == "pool"]
        places.add((volume["hostPath"]["path"], volume["hostPath"]["type"], mount["mountPath"]))
    assert places == {("/run/laminar", "Directory", "/run/laminar")}
    for one in found:
        line = next(iter(daemon_lines(objects, one)))
        if line[0] == "paramserver":
            options = parsed(objects, one, line).params
            assert options["pool_dir"].is_relative_to("/run/laminar")
            limit = container_of(one)["resources"]["limits"]["memory"]
            assert parse_bytes(f"{limit}B") > options["pool_bytes"], "its pages count there"


def test_no_container_is_root_or_can_become_it(objects: list[Object]) -> None:
    for one, found in each_container(objects):
        pod, container = pod_of(one)["securityContext"], found["securityContext"]
        assert pod["runAsNonRoot"] is True
        assert pod["runAsUser"] >= 1000
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert pod_of(one)["automountServiceAccountToken"] is False


def test_a_relays_options_are_not_a_services_variables(objects: list[Object]) -> None:
    """A service named `paramserver-serve` would set PARAMSERVER_SERVE_PORT, which is an option of the relay."""
    assert all(pod_of(one)["enableServiceLinks"] is False for one in workloads(objects))


def test_an_engine_is_out_of_reach_where_it_shares_its_relays_loopback(objects: list[Object]) -> None:
    """The base has it in a pod of its own, and a policy in front of it."""
    alone = [one for one in workloads(objects) if app_of(one) == "engine"]
    beside = [(one, found) for one, found in each_container(objects) if found["name"] == "engine" and one not in alone]
    assert bool(alone) != bool(beside)
    for one, engine in beside:
        line = next(daemon_lines(objects, one, engine))
        host, port = (line[line.index(option) + 1] for option in ("--host", "--port"))
        assert "--insecure" not in line
        assert "ports" not in engine
        relay = parsed(objects, one, next(daemon_lines(objects, one))).params
        [registered] = map(EngineBeside.parse, relay["engines"])
        assert (registered.url, registered.on_loopback) == (f"http://{host}:{port}", True)
        assert relay["credentials"] is not None
        for probe in ("startupProbe", "livenessProbe"):
            interpreter, option, code = engine[probe]["exec"]["command"]
            assert (interpreter, option) == ("python3", "-c")
            assert f'"{registered.url}/health"' in code
            compile(code, "probe", "exec")
        [policy] = [one for one in of_kind(objects, "NetworkPolicy") if name_of(one) == "relay"]
        [rule] = [rule for rule in policy["spec"]["ingress"] if {"port": "engine"} in rule["ports"]]
        assert rule["from"] == [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "gateway"}}}]
        assert engine["image"].startswith("registry.example/"), "its name is replaced"


def test_an_overlay_patches_what_the_base_has() -> None:
    assert OVERLAYS
    base = {(one["kind"], name_of(one)) for one in by_hand(BASE)}
    for folder in OVERLAYS:
        kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
        assert {"../../base", "../one-pod"} & set(kustomization["resources"])
        for patch in kustomization["patches"]:
            if "path" in patch:
                patched = read(folder / patch["path"])
                assert {(one["kind"], name_of(one)) for one in patched} <= base
        for made in kustomization["configMapGenerator"]:
            named = {literal.partition("=")[0] for literal in made["literals"]}
            assert named <= set(env_file(BASE / "laminar.env")), "another name would be an option of nothing"


def test_the_redis_of_the_values_keeps_what_the_gateway_demands() -> None:
    from gateway.log.durability import SETTINGS

    text = yaml.safe_load((FOLDER / "charts/redis.values.yaml").read_text())["commonConfiguration"]
    found = dict(line.split(" ", 1) for line in text.splitlines())
    assert {setting.name: found.get(setting.name) for setting in SETTINGS} == {s.name: s.wanted for s in SETTINGS}
    assert yaml.safe_load((FOLDER / "charts/etcd.values.yaml").read_text())["replicaCount"] == 3
