"""The configuration of the service: one frozen object, made from flags, environment and a file.

Each setting declares its name, meaning and valid values once; flags, variables, the file, the help
and the error messages all derive from that. Nothing here reads the clock, or any other file.
"""

from __future__ import annotations

import math
import re
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from tickwheel.errors import TickwheelError
from tickwheel.values.store_url import MEMORY, SQLITE, kind_of, sqlite_path
from tickwheel.values.zookeeper_url import ZooKeeperUrl

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FILE = "tickwheel.toml"  # read from the working directory if it exists
PREFIX = "TICKWHEEL_"  # of every variable
FILE_VARIABLE = "TICKWHEEL_CONFIG"
OTHER_VARIABLES = {"CONFIG", "SERVER", "TOKEN", "NAMESPACE", "PURE", "NATIVE"}  # read elsewhere
MIN_SIMILARITY = 0.75  # of 1, between a mistyped name and a known one
MASK = "********"
DEFAULT = "default"

UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
UNIT_BYTES = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
UNIT_BYTES |= {"kb": 1000, "mb": 1000**2, "gb": 1000**3}
BOOLEANS = {"1": True, "true": True, "yes": True, "on": True}
BOOLEANS |= {"0": False, "false": False, "no": False, "off": False}
DAY = 86_400.0
DEFAULT_MAX_PAYLOAD = 1 << 20  # bytes


class ConfigError(TickwheelError, ValueError):
    """An invalid setting; the message names its source, its value and what would be valid."""

    code = "config_error"


class Listen(NamedTuple):
    """The address that the server listens on; port 0 is any free port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Kind(NamedTuple):
    """The type of a setting's values.

    - `expected` describes valid values; it completes the sentence "must be …".
    - `parse` turns a string into a value, and `check` returns a value or raises ValueError.
    - `native`: the TOML types that the file may use. A string in the file is parsed only if `text`
      is true.
    - `many`: a list of values.
    """

    expected: str
    parse: Callable[[str], Any]
    check: Callable[[Any], Any] = lambda value: value
    native: tuple[type, ...] = ()
    text: bool = False
    many: bool = False
    metavar: str = "TEXT"
    format: Callable[[Any], str] = str  # the inverse of `parse`

    def of_text(self, value: str) -> Any:
        """Return the value of a flag's or variable's text."""
        if self.many:
            parts = (part.strip() for part in value.split(","))
            return tuple(self.check(self.parse(part)) for part in parts if part)
        return self.check(self.parse(value.strip()))

    def of_file(self, value: object) -> Any:
        """Return the value of an entry in the file."""
        if self.many:
            if not isinstance(value, list):
                raise ValueError
            return tuple(self._one(item) for item in value)
        return self._one(value)

    def _one(self, value: object) -> Any:
        if isinstance(value, str) and self.text:
            return self.check(self.parse(value))
        if isinstance(value, bool) and bool not in self.native:
            raise ValueError
        if not isinstance(value, self.native):
            raise ValueError  # noqa: TRY004 - callers report all errors alike
        return self.check(value)


class Setting(NamedTuple):
    """One field of `Config`, as users see it."""

    field: str
    name: str  # in the file; the flag and the variable derive from it
    kind: Kind
    help: str
    default: Any
    secret: bool = False

    @property
    def flag(self) -> str | None:
        """The flag of `serve`; None for a secret, because others can see a process's flags."""
        return None if self.secret else f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """The name in the environment."""
        return f"{PREFIX}{self.name.upper()}"

    def mask(self, value: object) -> Any:
        """Return a value for output, also as JSON, without secrets."""
        if self.secret:
            return None if value is None else MASK
        if isinstance(value, str):
            return without_password(value)
        if isinstance(value, Listen | Path):
            return str(value)
        return list(value) if isinstance(value, tuple) else value

    def format(self, value: object) -> str | None:
        """Return a value as a user would type it, without secrets; None if it is not set."""
        masked = self.mask(value)
        if masked in (None, []):
            return None
        if isinstance(masked, bool):
            return "yes" if masked else "no"
        return ", ".join(masked) if isinstance(masked, list) else self.kind.format(masked)


def parse_duration(text: str) -> float:
    """Return the seconds of `30s`, `1h30m`, `250ms` or a plain number."""
    plain = text.strip().lower()
    try:
        seconds = float(plain)
    except ValueError:
        parts = re.findall(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|w)\s*", plain)
        if not parts or re.sub(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|w)\s*", "", plain):
            raise ValueError(
                f"{text!r:.50} is not a duration: 30s, 5m, 2h, 1d or seconds"
            ) from None
        seconds = sum(float(number) * UNIT_SECONDS[unit] for number, unit in parts)
    if not math.isfinite(seconds):
        raise ValueError(f"{text!r:.50} is not a duration: it must be finite")
    return seconds


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d{1,15})\s*([a-z]*)", text.lower())
    if match is None or match[2] not in UNIT_BYTES:
        raise ValueError
    return int(match[1]) * UNIT_BYTES[match[2]]


def _format_size(size: int) -> str:
    for unit in ("GiB", "MiB", "KiB"):
        whole, rest = divmod(size, UNIT_BYTES[unit.lower()])
        if whole and not rest:
            return f"{whole}{unit}"
    return str(size)


def _format_duration(seconds: float) -> str:
    for unit in ("d", "h", "m"):
        whole, rest = divmod(seconds, UNIT_SECONDS[unit])
        if whole and not rest:
            return f"{whole:.0f}{unit}"
    return f"{seconds:.15g}s"


def _parse_listen(text: str) -> Listen:
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    bracketed = host == f"[{bare}]"
    if not colon or not bare or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65_535:
        raise ValueError
    if bracketed != (":" in bare) or not re.fullmatch(r"[A-Za-z0-9._:%-]+", bare):
        raise ValueError
    return Listen(bare, int(port))


def _parse_network(text: str) -> str:
    import ipaddress  # noqa: PLC0415 - few commands need it

    return str(ipaddress.ip_network(text))


def _parse_boolean(text: str) -> bool:
    try:
        return BOOLEANS[text.lower()]
    except KeyError:
        raise ValueError from None


def _parse_text(text: str) -> str:
    if not text or not text.isprintable() or text != text.strip():
        raise ValueError
    return text


def _parse_keys(text: str) -> str:
    keys = [_parse_text(key.strip()) for key in text.split(",") if key.strip()]
    if not keys or min(map(len, keys)) < 16:
        raise ValueError
    return ",".join(keys)


def _parse_path(text: str) -> Path:
    return Path(_parse_text(text)).expanduser()


def _parse_store(text: str) -> str:
    if kind_of(text) == SQLITE:
        sqlite_path(text)
    elif kind_of(text) == MEMORY or not text.partition(":")[2].startswith("//"):
        raise ValueError
    return text


def _parse_coordinator(text: str) -> str:
    if text not in ("solo", "postgres"):
        ZooKeeperUrl.parse(text)
    return text


def _parse_endpoint(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError
    return text


def _parse_address(text: str) -> str:
    parts = urlsplit(_parse_endpoint(_parse_text(text)))
    if parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError
    return f"{parts.scheme}://{parts.netloc}"


def _string(
    expected: str, parse: Callable[[str], Any], metavar: str, *, many: bool = False
) -> Kind:
    return Kind(expected, parse, text=True, many=many, metavar=metavar)


def _whole(low: int, high: int) -> Kind:
    return Kind(
        f"a whole number from {low} to {high}",
        int, _between(low, high), native=(int,), metavar="N",
    )  # fmt: skip


def _bytes(low: int, high: int) -> Kind:
    return Kind(
        f"a number of bytes from {low} to {high}, or like 512KiB or 16MiB",
        _parse_size, _between(low, high), native=(int,), text=True, metavar="SIZE",
        format=_format_size,
    )  # fmt: skip


def _seconds(low: float, high: float) -> Kind:
    return Kind(
        f"a duration like 30s, 5m, 2h or 7d, or seconds, from {low:g} to {high:g} seconds",
        parse_duration, _between(low, high, float), native=(int, float), text=True,
        metavar="DURATION", format=_format_duration,
    )  # fmt: skip


def _number(low: float, high: float) -> Kind:
    return Kind(
        f"a number from {low:g} to {high:g}",
        float, _between(low, high, float), native=(int, float), metavar="NUMBER",
    )  # fmt: skip


def _between(low: float, high: float, kind: type[float] = int) -> Callable[[Any], Any]:
    def check(value: float) -> float:
        if not low <= value <= high:  # NaN fails, too
            raise ValueError
        return kind(value)

    return check


def _choice(*words: str) -> Kind:
    def parse(text: str) -> str:
        if text.lower() not in words:
            raise ValueError
        return text.lower()

    listed = f"{', '.join(words[:-1])} or {words[-1]}"
    return Kind(listed, parse, text=True, metavar="|".join(words))


SWITCH = Kind("true or false", _parse_boolean, native=(bool,), metavar="")
STORE = _string("sqlite:///PATH or postgresql://USER@HOST/DATABASE", _parse_store, "URL")
LISTEN = _string("HOST:PORT, an IPv6 host in brackets: 127.0.0.1:7380", _parse_listen, "HOST:PORT")
COORDINATOR = _string(
    "solo, postgres or zookeeper://HOST:PORT,HOST:PORT/PATH", _parse_coordinator, "NAME"
)
NETWORKS = _string("networks like 10.0.0.0/8 or fd00::/8", _parse_network, "CIDR", many=True)
FILE_NAME = _string("the name of a file", _parse_path, "FILE")
NAME = _string("1 or more printable characters", _parse_text, "NAME")
KEYS = _string("keys of 16 or more characters each, separated by commas", _parse_keys, "KEYS")
ADDRESS = _string("an http:// or https:// URL without a path", _parse_address, "URL")
ENDPOINT = _string("an http:// or https:// URL", _parse_endpoint, "URL")


def _setting(
    default: Any, kind: Kind, text: str, *, name: str | None = None, secret: bool = False
) -> Any:
    metadata = {"kind": kind, "help": text, "name": name, "secret": secret}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Config:
    """Every setting of `tickwheel serve`.

    - Times are seconds, sizes are bytes; None means not set.
    - `load` checks every value; the constructor checks only that settings fit together.
    - `repr` masks secrets, and passwords in URLs.
    """

    store: str = _setting(
        "sqlite:///tickwheel.db", STORE, "The database in which tasks are stored."
    )
    listen: Listen = _setting(  # noqa: RUF009
        Listen("127.0.0.1", 7380), LISTEN, "The address to listen on; port 0 is any free port."
    )
    grpc_listen: Listen | None = _setting(  # noqa: RUF009
        None, LISTEN, "The address of the gRPC API; by default there is none."
    )
    coordinator: str | None = _setting(
        None, COORDINATOR,
        "What assigns shards to nodes; by default the coordinator that fits the store.",
    )  # fmt: skip
    node: str | None = _setting(
        None, NAME, "This node's name in the cluster; by default host, process and a random part."
    )
    weight: float = _setting(
        1.0, _number(0.01, 1000), "This node's part of the shards, relative to the other nodes'."
    )
    advertise: str | None = _setting(
        None, ADDRESS,
        "The URL at which other nodes reach this one; by default the address that it listens on.",
    )  # fmt: skip
    shards: int = _setting(
        64, _whole(1, 4096), "The number of shards; fixed when the store is created."
    )
    workers: int = _setting(
        1, _whole(1, 256), "The number of server processes; more than one needs PostgreSQL."
    )
    submit_only: bool = _setting(
        False, SWITCH, "Serve the API, but leave sending tasks to other nodes."
    )
    allow_private_targets: bool = _setting(
        False, SWITCH,
        "Allow services on loopback and private addresses; cloud metadata stays refused.",
    )  # fmt: skip
    allow_target: tuple[str, ...] = _setting(
        (), NETWORKS, "Allow services in this private network; may be given several times."
    )
    tls_cert: Path | None = _setting(  # noqa: RUF009
        None, FILE_NAME, "The certificate chain in PEM form; it turns on HTTPS."
    )
    tls_key: Path | None = _setting(  # noqa: RUF009
        None, FILE_NAME, "The certificate's private key in PEM form."
    )
    grpc_client_ca: Path | None = _setting(  # noqa: RUF009
        None, FILE_NAME,
        "The authority that must have signed the certificates of gRPC clients (mTLS).",
    )  # fmt: skip
    grpc_ca: Path | None = _setting(  # noqa: RUF009
        None, FILE_NAME, "The certificate authorities that calls to grpcs:// endpoints trust."
    )
    grpc_cert: Path | None = _setting(  # noqa: RUF009
        None, FILE_NAME, "The client certificate chain presented to grpcs:// endpoints."
    )
    grpc_key: Path | None = _setting(None, FILE_NAME, "The private key of grpc_cert.")  # noqa: RUF009
    open_access: bool = _setting(
        False, SWITCH, "Allow everything without a token to anyone who can reach the address.",
        name="insecure_without_tokens",
    )  # fmt: skip
    token_rate: float | None = _setting(
        None, _number(0.001, 1_000_000),
        "Requests per second for a token without its own rate; by default no limit.",
    )  # fmt: skip
    max_connections: int = _setting(
        10_000, _whole(1, 1_000_000),
        "The most open connections of one process; never more than three fifths of its file"
        " descriptors. With grpc_listen, half of them are for gRPC.",
    )  # fmt: skip
    max_calls: int = _setting(
        10_000, _whole(1, 1_000_000),
        "The most calls of services in flight in one process; never more than a fifth of its file"
        " descriptors.",
    )  # fmt: skip
    max_body: int = _setting(
        16 << 20, _bytes(1024, 1 << 30),
        "The largest request body; the clients send batches of up to 4 MiB.",
    )  # fmt: skip
    max_batch: int = _setting(10_000, _whole(1, 100_000), "The most tasks in one batch.")
    max_payload: int = _setting(
        DEFAULT_MAX_PAYLOAD, _bytes(1, 1 << 28), "The largest payload of a task."
    )
    retention: float = _setting(
        7 * DAY, _seconds(0, 36_500 * DAY), "How long ended tasks are kept."
    )
    audit_retention: float | None = _setting(
        None, _seconds(0, 36_500 * DAY),
        "How long lines of the audit log are kept; by default forever.",
    )  # fmt: skip
    grace: float = _setting(10.0, _seconds(0, DAY), "How long a stop waits for calls in flight.")
    horizon: float = _setting(
        60.0, _seconds(1, DAY), "Tasks due within this time are kept in memory."
    )
    cap: int = _setting(50_000, _whole(1, 100_000_000), "The most tasks kept in memory.")
    log_level: str = _setting(
        "info", _choice("debug", "info", "warning", "error"), "The lowest level that is logged."
    )
    log_format: str = _setting(
        "auto", _choice("auto", "text", "json"), "The log format; auto: text on a terminal."
    )
    otlp_endpoint: str | None = _setting(
        None, ENDPOINT, "The OpenTelemetry collector that traces are sent to, over HTTP."
    )
    secret_key: str | None = _setting(
        None,
        KEYS,
        "The key that encrypts services' secrets in the store; older ones after a comma.",
        secret=True,
    )

    def __repr__(self) -> str:
        fields = (f"{s.field}={s.mask(getattr(self, s.field))!r}" for s in SETTINGS)
        return f"Config({', '.join(fields)})"

    def __post_init__(self) -> None:
        for pair, what in ((("tls_cert", "tls_key"), "HTTPS"), (("grpc_cert", "grpc_key"), "mTLS")):
            given = [name for name in pair if getattr(self, name) is not None]
            if len(given) == 1:
                (other,) = {*pair} - {*given}
                raise ConfigError(f"{given[0]} is set and {other} is not: {what} needs both")
        if self.grpc_client_ca is not None and (self.grpc_listen is None or self.tls_cert is None):
            raise ConfigError("grpc_client_ca is set: it needs grpc_listen, tls_cert and tls_key")
        # A smaller body limit silently overrides the default payload limit.
        if self.max_body < self.max_payload != DEFAULT_MAX_PAYLOAD:
            raise ConfigError(
                f"max_payload is {_format_size(self.max_payload)} and max_body is"
                f" {_format_size(self.max_body)}: max_body must be at least max_payload"
            )
        if self.weight != 1 and self._has_one_node():
            raise ConfigError(
                f"weight is {self.weight:g} and the coordinator is solo: one node owns every shard"
            )
        if not self.store.startswith("sqlite:"):
            return
        if self.workers > 1:
            raise ConfigError(
                f"workers is {self.workers} and the store is SQLite: more than one worker needs"
                " a store on PostgreSQL"
            )
        if self.coordinator not in (None, "solo"):
            raise ConfigError(
                f"coordinator is {self.coordinator!r} and the store is SQLite: a file has only one"
                " node, so it must be solo"
            )

    def _has_one_node(self) -> bool:
        return self.coordinator == "solo" or self.store.startswith("sqlite:")


def _setting_of(of: Field[Any]) -> Setting:
    about = of.metadata
    return Setting(
        of.name, about["name"] or of.name, about["kind"], about["help"], of.default, about["secret"]
    )


SETTINGS: tuple[Setting, ...] = tuple(map(_setting_of, fields(Config)))


def load(
    flags: Mapping[str, object], environ: Mapping[str, str], file: str | Path | None = None
) -> tuple[Config, dict[str, str]]:
    """Return the configuration, and the source of each of its fields.

    - A flag overrides the environment, which overrides the file, which overrides the default.
    - `flags` maps fields to values: strings as typed, bools for switches, lists for repeatable
      flags; None is not given. An empty variable is not set.
    - The file is `file`, or the one that TICKWHEEL_CONFIG names, or `tickwheel.toml` if it exists.
    - Raises `ConfigError`, which never shows a secret.
    """
    path, table = _read(file, environ)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for setting in SETTINGS:
        given = flags.get(setting.field)
        if given is not None and given not in ((), []):
            values[setting.field] = _parse_flag(setting, given)
            origins[setting.field] = f"flag {setting.flag}"
        elif text := environ.get(setting.variable, "").strip():
            values[setting.field] = _parse(setting, setting.variable, text, setting.kind.of_text)
            origins[setting.field] = f"environment {setting.variable}"
        elif setting.name in table:
            source, value = f"{path}: {setting.name}", table[setting.name]
            values[setting.field] = _parse(setting, source, value, setting.kind.of_file)
            origins[setting.field] = f"file {path}"
        else:
            origins[setting.field] = DEFAULT
    return Config(**values), origins


def find_mistyped(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables whose names are almost those of settings, each with that name.

    Other TICKWHEEL_ variables may be legitimate: Kubernetes derives some from a service's name.
    """
    import difflib  # noqa: PLC0415 - for a message

    known = {setting.variable.removeprefix(PREFIX) for setting in SETTINGS} | OTHER_VARIABLES
    found: dict[str, str] = {}
    for variable in environ:
        name = variable.removeprefix(PREFIX)
        if name == variable or name in known:
            continue
        for near in difflib.get_close_matches(name, known, 1, MIN_SIMILARITY):
            found[variable] = PREFIX + near
    return found


def _read(file: str | Path | None, environ: Mapping[str, str]) -> tuple[Path, dict[str, Any]]:
    """Return the file's path and content; a missing default file is empty."""
    import tomllib  # noqa: PLC0415 - few commands need it

    named = file or environ.get(FILE_VARIABLE) or None
    path = Path(named or FILE)
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        if named is None:
            return path, {}
        raise ConfigError(f"configuration file {path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"configuration file {path}: {why}") from None
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"configuration file {path} is not TOML: {error}") from None
    _check_names(path, table)
    return path, table


def _check_names(path: Path, table: Mapping[str, object]) -> None:
    known = {setting.name: setting for setting in SETTINGS}
    for name in table:
        if name not in known:
            import difflib  # noqa: PLC0415 - for a message

            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"settings are {', '.join(known)}"
            raise ConfigError(f"{path}: unknown setting {name!r:.100}; {hint}")
        if known[name].secret:
            raise ConfigError(
                f"{path}: {name} must not be in a file: set {known[name].variable} in the"
                " environment"
            )


def _parse_flag(setting: Setting, given: object) -> Any:
    """Return the value of a flag: a string, a bool for a switch, a list if repeatable."""
    assert setting.flag is not None, "a secret has no flag"
    if isinstance(given, bool):
        return given
    text = ",".join(given) if isinstance(given, list | tuple) else str(given)
    return _parse(setting, setting.flag, text, setting.kind.of_text)


def _parse(setting: Setting, source: str, value: Any, read: Callable[[Any], Any]) -> Any:
    """Return `read(value)`, or raise a ConfigError that says what would be valid."""
    try:
        return read(value)
    except (ValueError, TypeError, OverflowError):
        # An invalid URL is not shown: its password may be anywhere in it.
        hidden = setting.kind in (STORE, COORDINATOR, ADDRESS, ENDPOINT) and re.search(
            r"[@=\s]", str(value)
        )
        got = "" if hidden else f"; got {setting.mask(value)!r:.100}"
        raise ConfigError(f"{source} must be {setting.kind.expected}{got}") from None


def without_password(text: str) -> str:
    """Return a URL, or an invalid one, with its password masked.

    It masks too much rather than too little: a password may contain unquoted characters.
    """
    if text.startswith("sqlite:"):
        return text
    if ":/" in text:
        known = "@" in text  # without it, only a port may follow the colon
        secret = ":.*@" if known else r":(?![0-9]*(?:[/?#,]|$))[^/?#]*"
        text = re.sub(rf"^([^:]*:/*[^:@/\[]*){secret}", rf"\1:{MASK}{'@' * known}", text, count=1)
    return re.sub(r"(?i)((?:password|passfile)=)[^&#\s]*", rf"\1{MASK}", text)
