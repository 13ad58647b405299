"""Files in deploy/ name only existing options, commands, routes and metrics.

Nothing is built here: the tests neither run nor need a container engine.
"""

from __future__ import annotations

import configparser
import json
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from cairn.api.app import build_app
from cairn.api.http.not_found import canonical
from cairn.cli import app
from cairn.config.config import Config
from cairn.config.option import options
from cairn.served_models import model_health
from cairn.served_models.loaded_models import Models
from cairn.served_models.served_model import served_models
from cairn.system.metrics import Metrics, ServerMetrics

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
FLAGS = {option.flag for option in options()}
VARIABLES = {option.variable for option in options()} | {"CAIRN_CONFIG"}


def metric_names() -> set[str]:
    """Return all names that /metrics can have, with the endings of histograms and counters."""
    models = Models(Config(), served_models(Config()))
    models.models[0].loads = 1
    text = (
        ServerMetrics("cairn", lambda: [Metrics("cairn", "m")], lambda: model_health.metrics(models)).render().decode()
    )
    return {line.split(" ")[0].partition("{")[0] for line in text.splitlines() if not line.startswith("#")}


def test_every_metric_of_the_dashboard_and_the_alerts_is_there() -> None:
    known = metric_names()
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [variable["query"] for variable in dashboard["templating"]["list"]]
    rules = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"][0]["rules"]
    expressions += [rule["expr"] for rule in rules]
    used = {name for text in expressions for name in re.findall(r"cairn:[a-z_]+", text)}
    assert len(used) > 20 and used <= known, used - known
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] for rule in rules)


def test_the_unit_names_existing_options_and_commands() -> None:
    unit = configparser.ConfigParser(strict=False, delimiters=("=",), interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "cairn.service")
    assert {"Unit", "Service", "Install"} <= set(unit.sections())
    text = (DEPLOY / "cairn.service").read_text()
    assert set(re.findall(r"CAIRN_[A-Z_]+", text)) <= VARIABLES
    program, command, *flags = shlex.split(unit["Service"]["ExecStart"])
    assert program.endswith("/cairn") and command in commands() and set(flags) <= FLAGS
    assert float(unit["Service"]["TimeoutStopSec"]) > Config().shutdown_grace


def test_the_container_names_existing_options_commands_and_routes() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    assert set(re.findall(r"CAIRN_[A-Z_]+", text)) - {"CAIRN_VARIANTS"} <= VARIABLES
    assert "cmake.define.CAIRN_VARIANTS=all" in text, "an image runs on machines with other CPUs"
    (command,) = re.findall(r"^CMD (\[.*\])$", text, re.M)
    assert json.loads(command)[0] in commands()
    (route,) = re.findall(r"127\.0\.0\.1:\d+(/[a-z/]+)", text)
    assert build_app(None, Config()).router.find(canonical(route))
    assert f"EXPOSE {Config().port}" in text
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["cairn"]
    assert set(compose["environment"]) <= VARIABLES
    assert {word for word in compose["command"] if word.startswith("--")} <= FLAGS
    assert (DEPLOY / compose["build"]["context"] / compose["build"]["dockerfile"]).exists()


def test_the_files_of_several_servers_name_options_and_commands_that_there_are() -> None:
    for name in ("cairn@.service", "cairn-router.service"):
        text = (DEPLOY / name).read_text()
        assert set(re.findall(r"CAIRN_[A-Z_]+", text)) <= VARIABLES
        words = shlex.split(re.findall(r"^ExecStart=(.*)$", text, re.M)[0])
        assert words[1] in commands()
        assert {word for word in words if word.startswith("--")} <= FLAGS | {"--replica"}
    services = yaml.safe_load((DEPLOY / "cluster-compose.yaml").read_text())["services"]
    assert set(services) == {"server-1", "server-2", "router"}
    for service in services.values():
        assert {variable for variable in service["environment"] if variable != "<<"} <= VARIABLES
        assert service["command"][0] in commands()
        assert {word.partition("=")[0] for word in service["command"] if word.startswith("--")} <= FLAGS | {"--replica"}


def test_the_manifests_for_kubernetes_fit_together() -> None:
    text = (DEPLOY / "kubernetes.yaml").read_text()
    manifests = list(yaml.safe_load_all(text))
    assert all(manifest["apiVersion"] and manifest["kind"] and manifest["metadata"]["name"] for manifest in manifests)
    by = {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in manifests}
    assert len(by) == len(manifests) == 6
    servers, router = by["StatefulSet", "cairn"]["spec"], by["Deployment", "cairn-router"]["spec"]
    labels = []
    for own in (servers, router):
        assert own["selector"]["matchLabels"] == own["template"]["metadata"]["labels"]
        labels.append(own["selector"]["matchLabels"])
        pod = own["template"]["spec"]
        (container,) = pod["containers"]
        volumes = {volume["name"] for volume in pod.get("volumes", ())}
        volumes |= {claim["metadata"]["name"] for claim in own.get("volumeClaimTemplates", ())}
        every = [container, *pod.get("initContainers", ())]
        mounts = [mount["name"] for container in every for mount in container.get("volumeMounts", ())]
        assert set(mounts) == volumes and all(container["image"] for container in every)
        check_container(container)
        assert pod["terminationGracePeriodSeconds"] > 60 and pod["securityContext"]["runAsUser"] == 999
    assert "--uid 999 " in (DEPLOY / "Containerfile").read_text()
    config = by["ConfigMap", "cairn-store"]
    assert all(isinstance(value, str) for value in config["data"].values())
    assert {name for name in config["data"] if name.startswith("CAIRN_")} <= VARIABLES
    names = [f"http://cairn-{at}.{servers['serviceName']}:8000" for at in range(servers["replicas"])]
    args = router["template"]["spec"]["containers"][0]["args"]
    hosts = ["cairn", "cairn.$(NAMESPACE)", "cairn.$(NAMESPACE).svc", "cairn.$(NAMESPACE).svc.cluster.local"]
    assert args == ["route", *(f"--allowed-hosts={one}" for one in hosts), *(f"--replica={name}" for name in names)]
    assert ("Service", hosts[0]) in by
    for name, target in (("cairn-servers", labels[0]), ("cairn", labels[1])):
        service = by["Service", name]["spec"]
        assert service["selector"] == target and service["ports"][0]["targetPort"] == "http"
    assert servers["serviceName"] == "cairn-servers" and by["Service", "cairn-servers"]["spec"]["clusterIP"] == "None"
    assert by["PodDisruptionBudget", "cairn"]["spec"]["selector"]["matchLabels"] == labels[0]


def check_container(container: dict[str, Any]) -> None:
    """Check that its options, variables, ports and probes exist, and that its memory is bounded."""
    own = [variable["name"] for variable in container["env"]]
    assert {name for name in own if name.startswith("CAIRN_")} <= VARIABLES
    assert all("value" in variable or variable["valueFrom"] for variable in container["env"])
    command, *flags = container["args"]
    assert command in commands()
    assert {word.partition("=")[0] for word in flags if word.startswith("--")} <= FLAGS | {"--replica"}
    assert container["ports"] == [{"name": "http", "containerPort": Config().port}]
    probes = [probe["httpGet"] for name, probe in container.items() if name.endswith("Probe")]
    find = build_app(None, Config()).router.find
    assert len(probes) >= 2 and all(probe["port"] == "http" and find(canonical(probe["path"])) for probe in probes)
    assert container["resources"]["limits"]["memory"] and container["resources"]["requests"]["cpu"]


def commands() -> set[str]:
    return {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
