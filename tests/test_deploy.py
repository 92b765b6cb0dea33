"""The files in deploy/: their options, variables, paths, names and times are those of the code."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
import yaml

from tickwheel.cli.root import root
from tickwheel.cli.serve import serve
from tickwheel.config import SETTINGS, load, parse_duration
from tickwheel.supervisor import KILL_SECONDS
from tickwheel.values.zookeeper_url import ZooKeeperUrl

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
UNIT = (DEPLOY / "systemd" / "tickwheel@.service").read_text("utf-8")
COMPOSE = (DEPLOY / "compose.yaml").read_text("utf-8")
SMALL = (DEPLOY / "compose-small.yaml").read_text("utf-8")
KUBERNETES = (DEPLOY / "kubernetes" / "tickwheel.yaml").read_text("utf-8")
DOCKERFILE = (DEPLOY / "Dockerfile").read_text("utf-8")
PAGE = (ROOT / "docs" / "how-to" / "service-deploy.md").read_text("utf-8")
PATHS = json.loads((ROOT / "docs" / "reference" / "openapi.json").read_text("utf-8"))["paths"]
SECRETS = {"PGPASSWORD", "POSTGRES_PASSWORD", "TICKWHEEL_SECRET_KEY"}
VARIABLES = {setting.variable for setting in SETTINGS}
PATIENCE = 60
POD_IP = "192.0.2.7"
FIELDS = {"metadata.name": "${name}", "status.podIP": POD_IP}  # of a pod
INCLUDED = {"sqlite", "client", "cli"}  # extras that `server` has
OTHERS = {"django", "test", "check", "docs", "bench", "fuzz"}  # extras of no server
EXPOSURE = 20  # tenths; what systemd-analyze calls "OK" ends at 49


def configured(command, environ):
    """Return the configuration of a command line that ends in `serve …`; raise if it is wrong."""
    name, *words = command
    assert name == "serve"
    assert environ.keys() <= VARIABLES | {"PGPASSWORD", "POD_IP"}, environ
    flags = serve.make_context(name, words).params
    flags.pop("config_file")
    # A secret and a reference have no value here.
    known = {name: value for name, value in environ.items() if value and "${" not in value}
    return load(flags, known, None)[0]


def is_pinned(image):
    """Return whether this is an official image, by its short name and with a version."""
    return re.fullmatch(r"[a-z]+:[0-9][\w.-]*", image) is not None


# systemd


def service_of(text):
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str
    parser.read_string(text)
    return parser["Service"]


def check_unit(text):
    unit = service_of(text)
    program, *command = shlex.split(unit["ExecStart"])
    assert program == "/opt/tickwheel/bin/tickwheel"
    config = configured(command, {})
    assert parse_duration(unit["TimeoutStopSec"]) >= config.grace + KILL_SECONDS
    assert unit["Type"] == "exec"  # the server sends no notification that it is ready


def systemd_analyze(*words, text, directory):
    """Run systemd-analyze on the unit, with the program of this environment; return its output."""
    assert shutil.which("systemd-analyze"), "install the package systemd"
    path = directory / "tickwheel@.service"
    path.write_text(text.replace("/opt/tickwheel/bin/tickwheel", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", *words, path],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_unit_is_one_that_systemd_takes_without_a_warning(tmp_path):
    assert systemd_analyze("verify", text=UNIT, directory=tmp_path) == (0, "")
    wrong = UNIT.replace("TimeoutStopSec", "TimeoutStopSecs")
    assert "TimeoutStopSecs" in systemd_analyze("verify", text=wrong, directory=tmp_path)[1]


def test_the_unit_is_hardened(tmp_path):
    words = "security", "--offline=yes", "--no-pager", f"--threshold={EXPOSURE}"
    code, shown = systemd_analyze(*words, text=UNIT, directory=tmp_path)
    assert code == 0, shown
    soft = UNIT.replace("CapabilityBoundingSet=", "").replace("SystemCallFilter", "#")
    assert systemd_analyze(*words, text=soft, directory=tmp_path)[0] != 0


def test_the_commands_before_the_first_start_run_as_the_unit_does():
    (shown,) = re.findall(r"^\$ as_blue\(\) \{ (.*?); \}$", PAGE, re.MULTILINE | re.DOTALL)
    words = shlex.split(shown)
    given = dict(words[at + 1].split("=", 1) for at, word in enumerate(words) if word == "-p")
    unit = service_of(UNIT.replace("%i", "blue"))
    assert {"User", "EnvironmentFile", "UMask", "LimitNOFILE"} < given.keys()
    assert given == {name: unit[name] for name in given}
    program, *_ = shlex.split(unit["ExecStart"])
    _, *options = words[words.index(program) + 1 :]  # after "$@"
    calls = re.findall(r"^\$ as_blue (.*)$", PAGE, re.MULTILINE)
    for call in calls:
        command, left = root, [*shlex.split(call), *options]
        while isinstance(command, click.Group):
            command = command.get_command(click.Context(command), left.pop(0))
        command.make_parser(click.Context(command)).parse_args(left)
    assert [call.split()[0] for call in calls] == ["tokens", "doctor"]
    assert PAGE.index("$ as_blue tokens") < PAGE.index("$ systemctl enable")


# The compose files


def check_compose(text):
    services, nodes = check_services(text)
    check_ensemble({name: one for name, one in services.items() if name.startswith("zoo")})
    assert len(nodes) == 3
    for name, node in nodes.items():
        hosts = ZooKeeperUrl.parse(check_node(name, node).coordinator).hosts.split(",")
        assert {host.removesuffix(":2181") for host in hosts} <= {*services}
        assert len(hosts) == 3


def check_small(text):
    services, nodes = check_services(text)
    assert {*services} - {*nodes} == {"postgres"}
    assert len(nodes) == 2
    for name, node in nodes.items():
        assert check_node(name, node).coordinator is None


def check_services(text):
    """Check what all compose files have; return the services, and those that are nodes."""
    content = yaml.safe_load(text)
    services = content["services"]
    for name, service in services.items():
        assert is_pinned(service["image"]) or "build" in service, service["image"]
        assert {*service.get("depends_on", {})} <= {*services}
        mounted = {volume.partition(":")[0] for volume in service.get("volumes", [])}
        assert mounted <= {*content["volumes"]}, name
        for variable, value in service["environment"].items():
            assert variable not in SECRETS or re.fullmatch(r"\$\{\w+:\?.*\}", value), variable
    nodes = {name: one for name, one in services.items() if name.startswith("node")}
    assert len({node["ports"][0] for node in nodes.values()}) == len(nodes)
    return services, nodes


def check_ensemble(zookeepers):
    servers = re.findall(
        r"server\.(\d)=(\w+):2888:3888;2181", zookeepers["zoo1"]["environment"]["ZOO_SERVERS"]
    )
    assert len(servers) == 3
    assert {(one["environment"]["ZOO_MY_ID"], name) for name, one in zookeepers.items()} == {
        *servers
    }


def check_node(name, node):
    environ = {variable: value or "" for variable, value in node["environment"].items()}
    config = configured(node["command"], image_environment() | environ)
    assert config.node == name
    assert config.advertise == f"http://{name}:{config.listen.port}"
    assert config.store.startswith("postgresql://tickwheel@postgres/")
    assert parse_duration(node["stop_grace_period"]) >= config.grace + KILL_SECONDS
    assert node["ports"][0].endswith(f":{config.listen.port}")
    (probe,) = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", node["healthcheck"]["test"][-1])
    assert probe == (str(config.listen.port), "/readyz")
    assert (DEPLOY / node["build"]["context"] / node["build"]["dockerfile"]).is_file()
    return config


# Kubernetes


def check_kubernetes(text):
    found = {one["kind"]: one for one in yaml.safe_load_all(text)}
    versions = {kind: one["apiVersion"] for kind, one in found.items()}
    assert versions == {
        "Service": "v1",
        "PodDisruptionBudget": "policy/v1",
        "Deployment": "apps/v1",
    }
    deployment = found["Deployment"]["spec"]
    pod = deployment["template"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    (spread,) = pod["topologySpreadConstraints"]
    selectors = [
        found["Service"]["spec"]["selector"],
        found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        deployment["selector"]["matchLabels"],
        spread["labelSelector"]["matchLabels"],
    ]
    for selector in selectors:
        assert selector
        assert selector.items() <= labels.items()
    assert 0 < found["PodDisruptionBudget"]["spec"]["maxUnavailable"] < deployment["replicas"]
    (container,) = pod["containers"]
    (port,) = container["ports"]
    assert found["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    config = configured(container["args"], environment_of(container))
    assert config.listen.port == port["containerPort"]
    assert config.advertise == f"http://{POD_IP}:{config.listen.port}"
    check_probes(container, port["name"])
    stop = container["lifecycle"]["preStop"]["exec"]["command"]
    assert stop[0] == "sleep"
    assert pod["terminationGracePeriodSeconds"] >= int(stop[1]) + config.grace + KILL_SECONDS
    assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
    assert {one["name"] for one in container["volumeMounts"]} == {
        one["name"] for one in pod["volumes"]
    }
    assert str(pod["securityContext"]["runAsUser"]) in re.findall(
        r"^USER (\w+)", DOCKERFILE, re.MULTILINE
    )


def environment_of(container):
    """Return the container's variables, a reference as "${…}"; secrets must be references."""
    environ = image_environment()
    for one in container["env"]:
        if "value" in one:
            # A value may refer to variables before it.
            environ[one["name"]] = re.sub(r"\$\((\w+)\)", lambda at: environ[at[1]], one["value"])
        elif "secretKeyRef" in one["valueFrom"]:
            assert one["valueFrom"]["secretKeyRef"].keys() == {"name", "key"}
            environ[one["name"]] = "${secret}"
        else:
            environ[one["name"]] = FIELDS[one["valueFrom"]["fieldRef"]["fieldPath"]]
    for secret in ("TICKWHEEL_STORE", "TICKWHEEL_SECRET_KEY"):
        assert environ[secret] == "${secret}"
    return environ


def check_probes(container, port):
    probes = {"startupProbe": "/healthz", "readinessProbe": "/readyz", "livenessProbe": "/healthz"}
    for probe, path in probes.items():
        assert container[probe]["httpGet"] == {"path": path, "port": port}
        assert path in PATHS


def test_the_image_that_the_page_builds_is_pushed_and_runs_in_the_pods():
    (built,) = re.findall(r"^\$ docker build .* -t (\S+) \.$", PAGE, re.MULTILINE)
    (pushed,) = re.findall(r"^\$ docker push (\S+)$", PAGE, re.MULTILINE)
    (program,) = re.findall(
        r"^\$ sed '(.*)' deploy/kubernetes/tickwheel\.yaml \| kubectl apply -f -$",
        PAGE, re.MULTILINE,
    )  # fmt: skip
    applied = subprocess.check_output(["sed", program], input=KUBERNETES, text=True)
    (image,) = re.findall(r"^ *image: (\S+)", applied, re.MULTILINE)
    assert image == pushed == built


# The image


def image_environment():
    (line,) = re.findall(r"^ENV (.*)$", DOCKERFILE, re.MULTILINE)
    return dict(pair.split("=", 1) for pair in line.split())


def check_image(text):
    for image in re.findall(r"^FROM (\S+)", text, re.MULTILINE):
        assert is_pinned(image)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = re.findall(r"\.whl\)\[([\w,]+)\]", text)
    assert {*wanted.split(",")} == extras["optional-dependencies"].keys() - INCLUDED - OTHERS
    assert re.findall(r"pip install '\.\[([\w,]+)\]'", PAGE) == [wanted]
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (?!--)(.*)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists()
            assert f"!{source}" in ignored
    assert 'ENTRYPOINT ["tickwheel"]' in text
    (command,) = re.findall(r"^CMD (.*)$", text, re.MULTILINE)
    configured(json.loads(command), image_environment())


FILES = {
    "unit": (check_unit, UNIT),
    "compose": (check_compose, COMPOSE),
    "small": (check_small, SMALL),
    "kubernetes": (check_kubernetes, KUBERNETES),
    "image": (check_image, DOCKERFILE),
}


@pytest.mark.parametrize("name", FILES)
def test_it_agrees_with_the_code(name):
    check, text = FILES[name]
    check(text)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("unit", "--grace 30s", "--grase 30s"),
        ("unit", "--grace 30s", "--grace 40s"),
        ("unit", "Type=exec", "Type=notify"),
        ("compose", '"--grace"', '"--grase"'),
        ("compose", "/readyz", "/ready"),
        ("compose", "127.0.0.1:7380/", "127.0.0.1:7381/"),
        ("compose", "TICKWHEEL_COORDINATOR:", "TICKWHEEL_CORDINATOR:"),
        ("compose", "zookeeper://zoo1", "zookeeper://zoo0"),
        ("compose", "server.3=zoo3", "server.3=zoo2"),
        ("compose", "stop_grace_period: 50s", "stop_grace_period: 40s"),
        ("compose", "http://node2:7380", "http://node1:7380"),
        ("compose", "${POSTGRES_PASSWORD:?set it in .env}", "secret"),
        ("compose", "postgres:15", "registry.example.com/postgres:15"),
        ("small", "/readyz", "/ready"),
        ("small", "127.0.0.1:7382:", "127.0.0.1:7381:"),
        ("small", "http://node2:7380", "http://node1:7380"),
        ("small", "TICKWHEEL_NODE: node2", "TICKWHEEL_NODE: node1"),
        ("small", "stop_grace_period: 50s", "stop_grace_period: 40s"),
        ("small", "PGPASSWORD: ${POSTGRES_PASSWORD:?set it in .env}", "PGPASSWORD: secret"),
        ("small", "  postgres:\n    image", "  database:\n    image"),
        ("kubernetes", '"--grace"', '"--grase"'),
        ("kubernetes", "path: /readyz", "path: /ready"),
        ("kubernetes", "livenessProbe", "livenesProbe"),
        ("kubernetes", "name: TICKWHEEL_LISTEN", "name: TICKWHEEL_LISTN"),
        ("kubernetes", "selector: {app.kubernetes.io/name: tickwheel}", "selector: {app: other}"),
        ("kubernetes", "fieldPath: status.podIP", "fieldPath: status.hostIP"),
        ("kubernetes", "value: http://$(POD_IP):7380", "value: http://tickwheel:7380"),
        ("kubernetes", "name: POD_IP", "name: PODIP"),
        ("kubernetes", "containerPort: 7380", "containerPort: 7381"),
        ("kubernetes", "targetPort: http", "targetPort: web"),
        ("kubernetes", "terminationGracePeriodSeconds: 55", "terminationGracePeriodSeconds: 45"),
        ("kubernetes", "apps/v1", "apps/v1beta1"),
        ("image", "[server,postgres,", "[server,postgresql,"),
        ("image", "setup.py", "setup.cfg"),
    ],
)
def test_a_mistake_is_found(name, right, wrong):
    check, text = FILES[name]
    assert right in text
    with pytest.raises((AssertionError, LookupError, ValueError, click.UsageError)):
        check(text.replace(right, wrong))


def test_no_file_has_a_secret():
    for path in DEPLOY.rglob("*"):
        if path.is_file():
            text = path.read_text("utf-8")
            assert not re.search(
                r"(?i)(password|secret_key|secret-key)['\"]?[:=] *['\"]?\w{8}", text
            )
            assert not re.search(r"://[^@/\s]*:[^@/\s]+@", text), path
