"""The configuration of the service: one frozen object, made from flags, environment and a file.

Each setting says once what it is called, what it means and what is right for it; the command line,
the environment, the file and their messages all come from that. Nothing here asks the time, or
reads anything but the one file.
"""

from __future__ import annotations

import math
import re
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from tickwheel.errors import TickwheelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FILE = "tickwheel.toml"  # read from the working directory when it is there
PREFIX = "TICKWHEEL_"  # of every variable
FILE_VARIABLE = "TICKWHEEL_CONFIG"
OTHERS = {"CONFIG", "SERVER", "TOKEN", "NAMESPACE", "PURE", "NATIVE"}  # read elsewhere
NEAR = 0.75  # how alike names are, of 1, that may be one mistyped
MASK = "********"
DEFAULT = "default"

UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
SIZES = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
SIZES |= {"kb": 1000, "mb": 1000**2, "gb": 1000**3}
WORDS = {"1": True, "true": True, "yes": True, "on": True}
WORDS |= {"0": False, "false": False, "no": False, "off": False}
DAY = 86_400.0
PAYLOAD = 1 << 20  # bytes


class ConfigError(TickwheelError, ValueError):
    """A setting that cannot be used: where it is from, its value, and what would be right."""

    code = "config_error"


class Listen(NamedTuple):
    """Where the server listens; port 0 is any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Kind(NamedTuple):
    """What a setting's values are.

    - `right` says in words what would be right; it ends the sentence "must be …".
    - `parse` makes a value of a string, and `check` returns a value or raises ValueError.
    - `native`: the types that the file may have for it besides a string, which is parsed only
      where `text` says that the file writes it so.
    """

    right: str
    parse: Callable[[str], Any]
    check: Callable[[Any], Any] = lambda value: value
    native: tuple[type, ...] = ()
    text: bool = False
    many: bool = False
    metavar: str = "TEXT"
    spell: Callable[[Any], str] = str  # back to what `parse` reads, for people

    def of_text(self, value: str) -> Any:
        """Return the value that a flag or a variable spells."""
        if self.many:
            parts = (part.strip() for part in value.split(","))
            return tuple(self.check(self.parse(part)) for part in parts if part)
        return self.check(self.parse(value.strip()))

    def of_file(self, value: object) -> Any:
        """Return the value that the file has."""
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
            raise ValueError  # noqa: TRY004 - told with all that is wrong, in one form
        return self.check(value)


class Setting(NamedTuple):
    """One field of `Config`, as users meet it."""

    field: str
    name: str  # in the file; the flag and the variable are made of it
    kind: Kind
    help: str
    default: Any
    secret: bool = False

    @property
    def flag(self) -> str | None:
        """The flag of `serve`; a secret has none, since others can see a process's flags."""
        return None if self.secret else f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """The name in the environment."""
        return f"{PREFIX}{self.name.upper()}"

    def shown(self, value: object) -> Any:
        """Return a value for people and for JSON: without secrets."""
        if self.secret:
            return None if value is None else MASK
        if isinstance(value, str):
            return without_password(value)
        if isinstance(value, Listen | Path):
            return str(value)
        return list(value) if isinstance(value, tuple) else value

    def spelled(self, value: object) -> str | None:
        """Return a value as it may be typed, without secrets; None for none."""
        shown = self.shown(value)
        if shown in (None, []):
            return None
        if isinstance(shown, bool):
            return "yes" if shown else "no"
        return ", ".join(shown) if isinstance(shown, list) else self.kind.spell(shown)


def duration(text: str) -> float:
    """Return the seconds that `30s`, `1h30m`, `250ms` or a plain number spells."""
    plain = text.strip().lower()
    try:
        seconds = float(plain)
    except ValueError:
        parts = re.findall(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|w)\s*", plain)
        if not parts or re.sub(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|w)\s*", "", plain):
            raise ValueError(f"{text!r:.50} is no duration: 30s, 5m, 2h, 1d or seconds") from None
        seconds = sum(float(number) * UNITS[unit] for number, unit in parts)
    if not math.isfinite(seconds):
        raise ValueError(f"{text!r:.50} is no duration: it must be finite")
    return seconds


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d{1,15})\s*([a-z]*)", text.lower())
    if match is None or match[2] not in SIZES:
        raise ValueError
    return int(match[1]) * SIZES[match[2]]


def _spelled_size(size: int) -> str:
    for unit in ("GiB", "MiB", "KiB"):
        whole, rest = divmod(size, SIZES[unit.lower()])
        if whole and not rest:
            return f"{whole}{unit}"
    return str(size)


def _spelled_duration(seconds: float) -> str:
    for unit in ("d", "h", "m"):
        whole, rest = divmod(seconds, UNITS[unit])
        if whole and not rest:
            return f"{whole:.0f}{unit}"
    return f"{seconds:.15g}s"


def _listen(text: str) -> Listen:
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    bracketed = host == f"[{bare}]"
    if not colon or not bare or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65_535:
        raise ValueError
    if bracketed != (":" in bare) or not re.fullmatch(r"[A-Za-z0-9._:%-]+", bare):
        raise ValueError
    return Listen(bare, int(port))


def _network(text: str) -> str:
    import ipaddress  # noqa: PLC0415 - few need it

    return str(ipaddress.ip_network(text))


def _flag(text: str) -> bool:
    try:
        return WORDS[text.lower()]
    except KeyError:
        raise ValueError from None


def _filled(text: str) -> str:
    if not text or not text.isprintable() or text != text.strip():
        raise ValueError
    return text


def _keys(text: str) -> str:
    keys = [_filled(key.strip()) for key in text.split(",") if key.strip()]
    if not keys or min(map(len, keys)) < 16:
        raise ValueError
    return ",".join(keys)


def _path(text: str) -> Path:
    return Path(_filled(text)).expanduser()


def _store(text: str) -> str:
    scheme, rest = urlsplit(text).scheme, text.partition(":")[2]
    if scheme == "sqlite" and rest.startswith("///") and rest.strip("/") not in ("", ":memory:"):
        return text
    if scheme in ("postgresql", "postgres") and rest.startswith("//"):
        return text
    raise ValueError


def _coordinator(text: str) -> str:
    if text in ("solo", "postgres"):
        return text
    raise ValueError


def _endpoint(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError
    return text


def _string(right: str, parse: Callable[[str], Any], metavar: str, *, many: bool = False) -> Kind:
    return Kind(right, parse, text=True, many=many, metavar=metavar)


def _whole(low: int, high: int) -> Kind:
    return Kind(
        f"a whole number from {low} to {high}",
        int, _between(low, high), native=(int,), metavar="N",
    )  # fmt: skip


def _bytes(low: int, high: int) -> Kind:
    return Kind(
        f"a number of bytes from {low} to {high}, or like 512KiB or 16MiB",
        _size, _between(low, high), native=(int,), text=True, metavar="SIZE", spell=_spelled_size,
    )  # fmt: skip


def _seconds(low: float, high: float) -> Kind:
    return Kind(
        f"a duration like 30s, 5m, 2h or 7d, or seconds, from {low:g} to {high:g} seconds",
        duration, _between(low, high, float), native=(int, float), text=True, metavar="DURATION",
        spell=_spelled_duration,
    )  # fmt: skip


def _number(low: float, high: float) -> Kind:
    return Kind(
        f"a number from {low:g} to {high:g}",
        float, _between(low, high, float), native=(int, float), metavar="NUMBER",
    )  # fmt: skip


def _between(low: float, high: float, kind: type[float] = int) -> Callable[[Any], Any]:
    def check(value: float) -> float:
        if not low <= value <= high:  # also what is not a number
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


SWITCH = Kind("true or false", _flag, native=(bool,), metavar="")
STORE = _string("sqlite:///PATH or postgresql://USER@HOST/DATABASE", _store, "URL")
LISTEN = _string("HOST:PORT, an IPv6 host in brackets: 127.0.0.1:7380", _listen, "HOST:PORT")
COORDINATOR = _string("solo or postgres", _coordinator, "NAME")
NETWORKS = _string("networks like 10.0.0.0/8 or fd00::/8", _network, "CIDR", many=True)
FILE_NAME = _string("the name of a file", _path, "FILE")
NAME = _string("1 or more printable characters", _filled, "NAME")
KEYS = _string("keys of 16 or more characters each, with commas between them", _keys, "KEYS")
ENDPOINT = _string("an http:// or https:// URL", _endpoint, "URL")


def _setting(
    default: Any, kind: Kind, text: str, *, name: str | None = None, secret: bool = False
) -> Any:
    metadata = {"kind": kind, "help": text, "name": name, "secret": secret}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Config:
    """Every setting of `tickwheel serve`.

    - Times are seconds, sizes are bytes; None means that the setting is not set.
    - Made by `load`, or directly; then only what settings ask of each other is checked.
    - `repr` shows no secret, and of a URL not the password.
    """

    store: str = _setting(
        "sqlite:///tickwheel.db", STORE, "The database in which tasks are stored."
    )
    listen: Listen = _setting(  # noqa: RUF009
        Listen("127.0.0.1", 7380), LISTEN, "The address to listen on; port 0 is any free port."
    )
    coordinator: str | None = _setting(
        None, COORDINATOR,
        "Who shares the shards out among nodes; by default the one that fits the store.",
    )  # fmt: skip
    node: str | None = _setting(
        None, NAME, "This node's name in the cluster; by default host, process and a random part."
    )
    shards: int = _setting(
        64, _whole(1, 4096), "Into how many shards tasks are divided; counts when a store is made."
    )
    workers: int = _setting(
        1, _whole(1, 256), "How many processes serve; more than one needs PostgreSQL."
    )
    submit_only: bool = _setting(
        False, SWITCH, "Take and answer requests, but send no task: other nodes do that."
    )
    allow_private_targets: bool = _setting(
        False, SWITCH,
        "Let services be on loopback and private addresses; cloud metadata stays refused.",
    )  # fmt: skip
    allow_target: tuple[str, ...] = _setting(
        (), NETWORKS, "A private network in which services may be; may be given several times."
    )
    tls_cert: Path | None = _setting(  # noqa: RUF009
        None, FILE_NAME, "The certificate chain in PEM form: the server then speaks HTTPS."
    )
    tls_key: Path | None = _setting(  # noqa: RUF009
        None, FILE_NAME, "The certificate's private key in PEM form."
    )
    open_access: bool = _setting(
        False, SWITCH, "Let anybody who can reach the address do anything, without a token.",
        name="insecure_without_tokens",
    )  # fmt: skip
    token_rate: float | None = _setting(
        None, _number(0.001, 1_000_000),
        "Requests per second for a token that has no rate of its own; by default no limit.",
    )  # fmt: skip
    max_connections: int = _setting(
        10_000, _whole(1, 1_000_000),
        "How many connections one process has open at once; never more than three fifths of its"
        " file descriptors.",
    )  # fmt: skip
    max_calls: int = _setting(
        10_000, _whole(1, 1_000_000),
        "How many calls of services one process has under way at once; never more than a fifth of"
        " its file descriptors.",
    )  # fmt: skip
    max_body: int = _setting(
        16 << 20, _bytes(1024, 1 << 30),
        "The largest body of a request; the clients send batches of up to 4 MiB.",
    )  # fmt: skip
    max_batch: int = _setting(10_000, _whole(1, 100_000), "The most tasks in one batch.")
    max_payload: int = _setting(PAYLOAD, _bytes(1, 1 << 28), "The largest payload of a task.")
    retention: float = _setting(
        7 * DAY, _seconds(0, 36_500 * DAY), "For how long tasks that ended are kept."
    )
    audit_retention: float | None = _setting(
        None, _seconds(0, 36_500 * DAY),
        "For how long lines of the audit log are kept; by default for ever.",
    )  # fmt: skip
    grace: float = _setting(
        10.0, _seconds(0, DAY), "How long a stop waits for calls that are under way."
    )
    horizon: float = _setting(
        60.0, _seconds(1, DAY), "Tasks due within this time are kept in memory."
    )
    cap: int = _setting(50_000, _whole(1, 100_000_000), "How many tasks are kept in memory.")
    log_level: str = _setting(
        "info", _choice("debug", "info", "warning", "error"), "The least of what is logged."
    )
    log_format: str = _setting(
        "auto", _choice("auto", "text", "json"), "How it is logged; auto: text on a terminal."
    )
    otlp_endpoint: str | None = _setting(
        None, ENDPOINT, "Where traces are sent to, an OpenTelemetry collector over HTTP."
    )
    secret_key: str | None = _setting(
        None,
        KEYS,
        "The key that seals services' secrets in the store; older ones after a comma.",
        secret=True,
    )

    def __repr__(self) -> str:
        shown = (f"{s.field}={s.shown(getattr(self, s.field))!r}" for s in SETTINGS)
        return f"Config({', '.join(shown)})"

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            given, other = ("tls_cert", "tls_key") if self.tls_cert else ("tls_key", "tls_cert")
            raise ConfigError(f"{given} is set and {other} is not: HTTPS needs both")
        if self.max_body < self.max_payload != PAYLOAD:  # the default gives way to a small body
            raise ConfigError(
                f"max_payload is {_spelled_size(self.max_payload)} and max_body is"
                f" {_spelled_size(self.max_body)}: a payload comes in a body, which must be larger"
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
                f"coordinator is {self.coordinator!r} and the store is SQLite: a file has one node"
                " only, so that solo would be right"
            )


def _described(of: Field[Any]) -> Setting:
    about = of.metadata
    return Setting(
        of.name, about["name"] or of.name, about["kind"], about["help"], of.default, about["secret"]
    )


SETTINGS: tuple[Setting, ...] = tuple(map(_described, fields(Config)))


def load(
    flags: Mapping[str, object], environ: Mapping[str, str], file: str | Path | None = None
) -> tuple[Config, dict[str, str]]:
    """Return the configuration, and for each of its fields where it is from.

    - A flag counts before the environment, that before the file, and that before the default.
    - `flags` has values by field: strings as typed, bools for switches, lists for what may be
      given several times; None is not given. An empty variable is not set.
    - The file is `file`, else what TICKWHEEL_CONFIG names, else `tickwheel.toml` when it is there.
    - Raises `ConfigError`, which never shows a secret.
    """
    path, table = _read(file, environ)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for setting in SETTINGS:
        given = flags.get(setting.field)
        if given is not None and given not in ((), []):
            values[setting.field] = _flagged(setting, given)
            origins[setting.field] = f"flag {setting.flag}"
        elif text := environ.get(setting.variable, "").strip():
            values[setting.field] = _told(setting, setting.variable, text, setting.kind.of_text)
            origins[setting.field] = f"environment {setting.variable}"
        elif setting.name in table:
            source, value = f"{path}: {setting.name}", table[setting.name]
            values[setting.field] = _told(setting, source, value, setting.kind.of_file)
            origins[setting.field] = f"file {path}"
        else:
            origins[setting.field] = DEFAULT
    return Config(**values), origins


def mistyped(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are no setting but nearly one, each with what may have been meant.

    Others may be anybody's: Kubernetes makes some of a service's name.
    """
    import difflib  # noqa: PLC0415 - for a message

    known = {setting.variable.removeprefix(PREFIX) for setting in SETTINGS} | OTHERS
    found: dict[str, str] = {}
    for variable in environ:
        name = variable.removeprefix(PREFIX)
        if name == variable or name in known:
            continue
        for near in difflib.get_close_matches(name, known, 1, NEAR):
            found[variable] = PREFIX + near
    return found


def _read(file: str | Path | None, environ: Mapping[str, str]) -> tuple[Path, dict[str, Any]]:
    """Return the file's name, and what is in it."""
    import tomllib  # noqa: PLC0415 - few commands need it

    named = file or environ.get(FILE_VARIABLE) or None
    path = Path(named or FILE)
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        if named is None:
            return path, {}
        raise ConfigError(f"configuration file {path}: there is no such file") from None
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
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise ConfigError(f"{path}: there is no setting {name!r:.100}; {hint}")
        if known[name].secret:
            raise ConfigError(
                f"{path}: {name} must not be in a file: set {known[name].variable} in the"
                " environment"
            )


def _flagged(setting: Setting, given: object) -> Any:
    """Return the value of a flag, which is a string unless it is a switch or comes repeatedly."""
    assert setting.flag is not None, "a secret has no flag"
    if isinstance(given, bool):
        return given
    text = ",".join(given) if isinstance(given, list | tuple) else str(given)
    return _told(setting, setting.flag, text, setting.kind.of_text)


def _told(setting: Setting, source: str, value: Any, read: Callable[[Any], Any]) -> Any:
    """Return what `read` makes of a value, or say what is wrong with it and what would be right."""
    try:
        return read(value)
    except (ValueError, TypeError, OverflowError):
        # Of a URL that cannot be read nobody knows where its password is, if it has one.
        hidden = setting.kind in (STORE, ENDPOINT) and re.search(r"[@=\s]", str(value))
        got = "" if hidden else f"; got {setting.shown(value)!r:.100}"
        raise ConfigError(f"{source} must be {setting.kind.right}{got}") from None


def without_password(text: str) -> str:
    """Return a URL, or whatever was given for one, for people: a password in it is masked.

    Rather too much is masked than too little: a password may hold what should have been quoted.
    """
    if text.startswith("sqlite:"):
        return text
    if ":/" in text:
        known = "@" in text  # without it only a port may follow the colon
        secret = ":.*@" if known else r":(?![0-9]*(?:[/?#,]|$))[^/?#]*"
        text = re.sub(rf"^([^:]*:/*[^:@/\[]*){secret}", rf"\1:{MASK}{'@' * known}", text, count=1)
    return re.sub(r"(?i)((?:password|passfile)=)[^&#\s]*", rf"\1{MASK}", text)
