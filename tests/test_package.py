"""The package as a user meets it: its names, what it imports, its layers, what is built."""

import ast
import importlib
import os
import re
import runpy
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from itertools import chain
from pathlib import Path

import pytest

import cores
import tickwheel
from source_tree import copied_tree

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "tickwheel"

PUBLIC = {
    "AsyncPurgatory",
    "AsyncTimer",
    "Clock",
    "DelayedOperation",
    "Entry",
    "EventLoop",
    "Every",
    "Handle",
    "IdleTracker",
    "ManualClock",
    "MemoryBuffer",
    "NATIVE",
    "OutOfRange",
    "OverflowBuffer",
    "Purgatory",
    "RoundsWheel",
    "SimpleWheel",
    "SystemClock",
    "TickwheelError",
    "TimeWentBack",
    "Timer",
    "TimerClosed",
    "Wheel",
    "WheelBusy",
    "__version__",
    "new_event_loop",
}
# The names that import asyncio or logging on first use.
LATER = {
    "asyncio": {"AsyncPurgatory", "AsyncTimer", "EventLoop", "new_event_loop"},
    "logging": {"DelayedOperation", "IdleTracker", "Purgatory", "Timer"},
}

# The exports of the other packages.
EXPORTED = {
    "client": """ApiError AsyncClient Attempt Audit Client Health InsecureToken Json Node Page
        Schedule ServerTimedOut ServerUnavailable Service Shard State Submitted Task Verdict
        problem_of""",
    "receiver": """Accepted BadDelivery Delivery Gone InProgress InvalidSignature MemorySeen
        Receiver Reply Retry Seen Settlement""",
    "durable": """AlreadyReplayed Attempt AttemptOver Backoff Blocking Breaker CannotDrain Fail
        KeyReused KeyTaken NotStarted Overloaded Page Request Retry Schedule ScheduleChanged
        Scheduler Service ServiceChanged ServiceInUse Snooze State StoreUnavailable TargetRefused
        Task TaskFunction TaskGone UnknownNode UnknownSchedule UnknownService UnknownTask Verdict
        WrongStore current_task""",
    "consumer": "Consumer Message Source SourceUnavailable source_at",
    "celery": "install",
    "django": "scheduler submit_on_commit",
    "web": "dashboard",
    "testing": """JumpingEventLoop ManualClock Submitted new_jumping_event_loop run_jumping
        submitted""",
    "testing.channel_suite": "ChannelSuite Peer make_task",
    "overflow_buffers": "PostgresBuffer RedisBuffer SqliteBuffer",
    "durable.buffers": "PostgresBuffer RedisBuffer SqliteBuffer",
}

# From the inside out; a module may import what stands before it. `tickwheel` is the package itself.
LAYERS = [
    "errors", "arguments", "clock", "entry", "overflow", "wheel", "rounds", "deadlines", "ring",
    "watchlists", "_wheel", "kernel", "every", "timer", "aio", "loop", "purgatory",
    "async_purgatory", "idle", "tickwheel", "testing", "pytest_plugin", "keyboard", "lab",
    "progress", "supervisor", "config", "__main__",
]  # fmt: skip
# The packages inside it, and which other packages they may import besides the modules above.
PACKAGES = {
    "values": set(),
    "http": set(),
    "v1": set(),
    "scenes": set(),
    "overflow_buffers": {"durable", "values"},  # the stores' connections
    "durable": {"http", "overflow_buffers", "v1", "values"},
    "client": {"http", "values"},
    "receiver": {"values"},
    "testing": {"durable", "values"},
    "celery": {"client", "values"},
    "django": {"cli", "durable", "values"},
    "consumer": {"values"},
    "web": {"config", "durable", "http", "scenes", "v1", "values"},
    "cli": {"client", "config", "consumer", "durable", "http", "values", "web"},
}


def test_the_public_names_are_these():
    assert set(tickwheel.__all__) == PUBLIC
    assert len(tickwheel.__all__) == len(PUBLIC)
    assert all(hasattr(tickwheel, name) for name in PUBLIC)


@pytest.mark.parametrize("name", EXPORTED)
def test_the_packages_export_these_names(name):
    package = importlib.import_module(f"tickwheel.{name}")
    assert sorted(package.__all__) == sorted(EXPORTED[name].split())
    if name != "django":  # its names need the settings of a project
        assert all(hasattr(package, each) for each in package.__all__)


def test_no_other_name_of_the_package_looks_public():
    submodules = {path.stem for path in PACKAGE.iterdir()}
    names = {name for name in vars(tickwheel) if name.isidentifier()}  # pytest adds others
    loose = {name for name in names if not name.startswith("_")} - PUBLIC - submodules
    assert loose <= {"Any", "TYPE_CHECKING", "import_module"}


def test_all_public_names_are_in_dir_and_an_unknown_one_is_an_error():
    assert set(dir(tickwheel)) >= PUBLIC
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tickwheel.nothing  # noqa: B018


@pytest.mark.parametrize("module", LATER)
def test_a_slow_module_is_imported_only_with_the_names_that_need_it(module):
    there = f"print({module!r} in sys.modules)"
    for name in LATER[module]:
        code = f"import sys, tickwheel; {there}; tickwheel.{name}; {there}"
        ran = run(sys.executable, "-c", code)
        assert ran.stdout.split() == ["False", "True"], name


@pytest.mark.parametrize("name", ["Wheel", "SimpleWheel", "RoundsWheel", "Entry", "Handle"])
def test_a_public_class_belongs_to_the_package_itself(name):
    assert getattr(tickwheel, name).__module__ == "tickwheel"


def test_importing_the_package_brings_in_no_third_party_module():
    code = (
        "import sys; before = set(sys.modules); import tickwheel;"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    imported = set(run(sys.executable, "-c", code).stdout.split())
    assert imported - set(sys.stdlib_module_names) == {"tickwheel"}


@pytest.mark.parametrize("name", ["client.Client", "client.AsyncClient", "receiver.Receiver"])
def test_clients_and_receivers_load_no_scheduler(name):
    module, _, used = name.partition(".")
    code = f"import sys, tickwheel.{module} as m; m.{used}; print(*sys.modules)"
    loaded = run(sys.executable, "-c", code).stdout.split()
    assert f"tickwheel.{module}" in loaded
    packages = {each.split(".")[1] for each in loaded if each.startswith("tickwheel.")}
    assert not packages & {"cli", "config", "durable", "overflow_buffers", "web"}


def test_the_pure_wheels_can_be_asked_for_at_import():
    code = "import tickwheel; print(tickwheel.NATIVE, tickwheel.Wheel is tickwheel.wheel.Wheel)"
    ran = run(sys.executable, "-W", "error", "-c", code, TICKWHEEL_PURE="1")
    assert (ran.stdout, ran.stderr) == ("False True\n", "")


def test_every_module_has_its_layer():
    assert {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"} <= set(LAYERS)


def test_every_package_has_its_place():
    found = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert found == set(PACKAGES)


def test_packages_import_only_what_is_further_in():
    for own, others in PACKAGES.items():
        refused = {*PACKAGES, "config"} - {own, *others}
        for path in (PACKAGE / own).rglob("*.py"):
            nodes = ast.walk(ast.parse(path.read_text("utf-8")))
            modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
            ours = {name.split(".")[1] for name in modules if name.startswith("tickwheel.")}
            assert not ours & refused, path


def test_imports_point_inward():
    for path in PACKAGE.glob("*.py"):
        own = LAYERS.index("tickwheel" if path.stem == "__init__" else path.stem)
        for module in imported_by(path):
            if path.stem == "__main__" and module == "cli":
                continue  # the one edge that has no package of its own
            if path.stem == "config" and module.startswith("values."):
                continue  # pure: they import no more than errors and arguments
            if path.stem == "pytest_plugin" and module in {"durable", "testing.tasks"}:
                continue  # as a user would; when a fixture is used
            assert LAYERS.index(module) < own, f"{path.stem} imports {module}"


def imported_by(path):
    """The package's modules that a file imports at run time; imports for types are not counted."""
    for node in runtime_nodes(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            names = [node.module]
        else:
            continue
        for name in names:
            package, _, module = name.partition(".")
            if package == "tickwheel":
                yield module or package


def runtime_nodes(node):
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from runtime_nodes(child)


def run(*command, cwd=None, **environment):
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        check=True,
        cwd=cwd,
        env=os.environ | environment,
        text=True,
        timeout=300,
    )


def build(folder, **environment):
    """Build a wheel file from a copy of the tree, without a network; return it and the output."""
    tree, out = folder / "tree", folder / "out"
    copied_tree(tree)
    environment["PYTHONDONTWRITEBYTECODE"] = ""  # setuptools warns of it
    out.mkdir()
    code = "from setuptools.build_meta import build_wheel; build_wheel('../out')"  # as pip does
    built = run(sys.executable, "-c", code, cwd=tree, **environment)
    (wheel,) = out.glob("tickwheel-*.whl")
    return wheel, built.stdout + built.stderr


def installed_says(wheel, folder, code, **environment):
    """Return what `code` prints in a fresh venv that has only the wheel file."""
    venv = folder / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-compile"]
    run(*pip, "--no-index", "--no-deps", wheel)
    ran = run(python, "-I", "-W", "error", "-c", code, cwd=folder, **environment)
    assert ran.stderr == ""
    return ran.stdout.split()


USE = (
    "import tickwheel; w = tickwheel.Wheel(); w.schedule(70, 'item'); "
    "print(tickwheel.NATIVE, *w.advance(70), tickwheel.__version__)"
)


def test_without_a_compiler_it_is_the_pure_wheel_with_one_warning_at_build(tmp_path):
    wheel, output = build(tmp_path, CC="/bin/false", TICKWHEEL_NATIVE="")
    warnings = [line.strip() for line in output.splitlines() if "warning" in line.lower()]
    assert len(warnings) == 1, warnings
    assert "the native core was not built" in warnings[0]
    assert installed_says(wheel, tmp_path, USE) == ["False", "item", tickwheel.__version__]


def test_a_native_core_that_is_required_and_fails_is_an_error(tmp_path):
    with pytest.raises(subprocess.CalledProcessError):
        build(tmp_path, CC="/bin/false", TICKWHEEL_NATIVE="1")


def test_the_pure_wheel_can_be_asked_for_at_build(tmp_path):
    wheel, output = build(tmp_path, CC="/bin/false", TICKWHEEL_PURE="1")
    assert "warning" not in output.lower()
    assert wheel.name.endswith("-py3-none-any.whl")
    assert names_in(wheel) >= {"py.typed", "_wheel.pyi", "wheel.py"} | dashboard_files()
    assert installed_says(wheel, tmp_path, USE) == ["False", "item", tickwheel.__version__]


@pytest.mark.skipif(cores.PURE_ONLY, reason="TICKWHEEL_TEST_PURE_ONLY=1: no native core here")
def test_the_built_package_holds_the_native_core_and_the_types(tmp_path):
    wheel, _ = build(tmp_path, CFLAGS="-O0", TICKWHEEL_NATIVE="1", TICKWHEEL_PURE="")
    core = "_wheel" + sysconfig.get_config_var("EXT_SUFFIX")
    assert names_in(wheel) >= {"py.typed", "_wheel.pyi", core}
    assert not any(name.endswith((".c", ".h")) for name in names_in(wheel))
    assert installed_says(wheel, tmp_path, USE) == ["True", "item", tickwheel.__version__]


def dashboard_files():
    files = (ROOT / "src/tickwheel/web/static").iterdir()
    return {f"web/static/{file.name}" for file in files}


def names_in(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    return {name.removeprefix("tickwheel/") for name in names if name.startswith("tickwheel/")}


@pytest.fixture(scope="module")
def source_archive(tmp_path_factory):
    """Build the source archive from a copy of the tree."""
    folder = tmp_path_factory.mktemp("archive")
    copied_tree(folder / "tree")
    code = "from setuptools.build_meta import build_sdist; build_sdist('..')"
    run(sys.executable, "-c", code, cwd=folder / "tree")
    (archive,) = folder.glob("tickwheel-*.tar.gz")
    return archive


def test_the_source_archive_holds_what_builds(source_archive):
    with tarfile.open(source_archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.py"} <= names
    assert {str(file.relative_to(ROOT)) for file in ROOT.glob("src/tickwheel/_*.[ch]")} <= names
    assert "src/tickwheel/py.typed" in names
    assert not any(name.endswith(".so") or name.startswith("tests") for name in names)


def test_a_wheel_built_from_the_source_archive_passes_twine_and_works(tmp_path, source_archive):
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    run("tar", "-xf", source_archive, "-C", unpacked)  # Python 3.11.2 has no filter for tarfile
    (tree,) = unpacked.iterdir()
    code = f"from setuptools.build_meta import build_wheel; build_wheel({str(tmp_path)!r})"
    run(sys.executable, "-c", code, cwd=tree, TICKWHEEL_PURE="1")
    (wheel,) = tmp_path.glob("tickwheel-*.whl")
    run(sys.executable, "-m", "twine", "check", "--strict", source_archive, wheel)
    assert installed_says(wheel, tmp_path, USE) == ["False", "item", tickwheel.__version__]


def test_make_dist_uses_every_extra_that_is_not_for_developers():
    used = runpy.run_path(str(ROOT / "tools" / "dist"))["USES"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"].keys() - {"test", "check", "fuzz", "docs", "bench"}
    assert used.keys() == extras | {""}


# The first release of each without a published hole; later advisories raise these.
SAFE_FROM = {
    "aiohttp": "3.14.4",
    "click": "8.3.3",
    "cryptography": "50",
    "flask": "3.1.3",
    "httptools": "0.8",
    "opentelemetry-exporter-otlp-proto-http": "1.45",
    "pytest": "9.0.3",
    "setuptools": "83",
}


def floors():
    """Return the lowest version that each requirement of the project admits, by name."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        declared = tomllib.load(file)
    extras = declared["project"]["optional-dependencies"].values()
    found = {}
    for requirement in chain(declared["build-system"]["requires"], *extras):
        match = re.match(r"([\w-]+)(?:\[.*\])?>=([\d.]+)", requirement)
        if match is not None:
            found.setdefault(match[1], []).append(match[2])
    return found


@pytest.mark.parametrize("name", SAFE_FROM)
def test_no_declared_floor_admits_a_release_with_a_known_hole(name):
    def numbers(version):
        return [int(part) for part in version.split(".")]

    declared = floors().get(name, [])
    assert all(numbers(floor) >= numbers(SAFE_FROM[name]) for floor in declared), declared


def test_the_lowest_versions_of_all_that_the_package_uses_can_be_asked_for():
    printed = run(sys.executable, ROOT / "tools" / "lowest-versions").stdout.split()
    lowest = dict(line.split("==") for line in printed)
    used = {"apsw", "asyncpg", "click", "httptools", "kazoo", "msgspec", "redis", "uvicorn"}
    assert used <= set(lowest)
    assert all(lowest[name] in floors()[name] for name in lowest)


def test_one_minor_version_of_uvicorn_is_admitted_since_a_private_class_of_it_is_extended():
    (requirement,) = re.findall(r'"(uvicorn.*?)"', (ROOT / "pyproject.toml").read_text("utf-8"))
    match = re.fullmatch(r"uvicorn>=0\.(\d+),<0\.(\d+)", requirement)
    assert match is not None, requirement
    assert int(match[2]) == int(match[1]) + 1
