"""Run the JVM peers: find or fetch their jars, compile the sources in java/, start one peer.

Jars that Debian lacks come from Maven by their coordinates, into a cache outside the tree.
A peer that is not available raises `Missing` with an actionable reason.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "java"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tickwheel-bench"
DEBIAN_JARS = Path("/usr/share/java")

KAFKA_VERSION = "4.1.1"
KAFKA_ARTIFACTS = (
    f"org.apache.kafka:kafka-server-common:{KAFKA_VERSION}",
    f"org.apache.kafka:kafka-clients:{KAFKA_VERSION}",
    "org.slf4j:slf4j-api:1.7.36",
)

HEAP = ("-Xms1g", "-Xmx1g", "-XX:+AlwaysPreTouch")
"""The default collector, and a heap whose pages are already mapped: both favour the peers."""


class Missing(Exception):
    """A peer is not available here; the message says why."""


@dataclass(frozen=True)
class JvmPeer:
    """A peer that is ready to run."""

    label: str
    main_class: str
    classpath: str
    version: str

    def run(self, size: int, seconds: float, warm_up_seconds: float) -> dict[str, list[float]]:
        """Return the rounds of every operation, from a fresh virtual machine."""
        command = ["java", *HEAP, "-cp", self.classpath, self.main_class]
        command += [str(size), str(seconds), str(warm_up_seconds)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        except subprocess.TimeoutExpired:
            raise Missing(f"its run at {size:,} did not end within 300 s") from None
        if done.returncode != 0:
            raise Missing(f"its run failed: {last_line(done.stderr)}")
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        return {line["operation"]: line["rounds"] for line in lines}


def kafka() -> JvmPeer:
    """Return Kafka's SystemTimer, from Maven."""
    jars = [maven_jar(artifact) for artifact in KAFKA_ARTIFACTS]
    classpath = compile_peer("KafkaPeer", jars)
    return JvmPeer("Kafka SystemTimer", "KafkaPeer", classpath, KAFKA_VERSION)


def netty() -> JvmPeer:
    """Return Netty's HashedWheelTimer, from Debian's libnetty-java."""
    names = ("netty-common.jar", "jctools-core.jar", "slf4j-api.jar")
    jars = [path for path in (DEBIAN_JARS / name for name in names) if path.exists()]
    if not (DEBIAN_JARS / names[0]).exists():
        raise Missing("no netty-common.jar (apt-get install libnetty-java)")
    classpath = compile_peer("NettyPeer", jars)
    return JvmPeer("Netty HashedWheelTimer", "NettyPeer", classpath, debian_version("netty-common"))


def executor() -> JvmPeer:
    """Return the JDK's ScheduledThreadPoolExecutor."""
    classpath = compile_peer("ExecutorPeer", [])
    return JvmPeer("ScheduledThreadPoolExecutor", "ExecutorPeer", classpath, "")


JVM_PEERS = {"kafka": kafka, "netty": netty, "executor": executor}


def java_version() -> str | None:
    """Return the installed Java's version, or None."""
    if shutil.which("java") is None:
        return None
    done = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False)
    first = (done.stderr or done.stdout).splitlines()[0]
    return first.split('"')[1] if '"' in first else first


def compile_peer(main_class: str, jars: list[Path]) -> str:
    """Compile a peer into the cache and return its class path."""
    for program in ("java", "javac"):
        if shutil.which(program) is None:
            raise Missing(f"{program} is not installed")
    target = CACHE / "classes" / main_class
    target.mkdir(parents=True, exist_ok=True)
    classpath = os.pathsep.join(map(str, [target, *jars]))
    sources = [str(SOURCES / f"{name}.java") for name in ("Peer", main_class)]
    done = subprocess.run(
        ["javac", "-d", str(target), "-cp", classpath, *sources],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise Missing(f"javac failed: {last_line(done.stderr)}")
    return classpath


def maven_jar(artifact: str) -> Path:
    """Return the jar of group:name:version, fetched if it is not in the cache."""
    _, name, version = artifact.split(":")
    jar = CACHE / f"{name}-{version}.jar"
    if jar.exists():
        return jar
    if shutil.which("mvn") is None:
        raise Missing(f"{name} is not in the cache and mvn is not installed")
    copy = ["mvn", "-q", "-B", "dependency:copy", f"-Dartifact={artifact}"]
    copy += [f"-DoutputDirectory={CACHE}"]
    with suppress(subprocess.TimeoutExpired):
        subprocess.run(copy, capture_output=True, timeout=300, check=False)
    if not jar.exists():
        raise Missing(f"Maven could not fetch {artifact}")
    return jar


def debian_version(jar_name: str) -> str:
    """Return the version in the name that Debian links a jar under."""
    versioned = sorted(DEBIAN_JARS.glob(f"{jar_name}-[0-9]*.jar"))
    return versioned[-1].stem.removeprefix(f"{jar_name}-") if versioned else "unknown"


def last_line(text: str) -> str:
    """Return the last non-empty line."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"
