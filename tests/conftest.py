"""The cores under test: every wheel test runs on the pure wheels and on the native ones.

- TICKWHEEL_TEST_CORE=native (or pure) runs one of them only: what `make sanitize` does.
- TICKWHEEL_TEST_PURE_ONLY=1 says that there is no native module on purpose. Without it, a native
  module that cannot be imported fails the native tests: a broken build must not look green.
"""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))  # model and cores, under every import mode

import cores as wheel_cores

# A shell without job control starts what runs in the background with interrupts ignored, and
# children inherit that: the tests that interrupt one would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


settings.register_profile(
    "tickwheel",
    deadline=None,  # no timing decides a test
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("thorough", settings.get_profile("tickwheel"), max_examples=2_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "tickwheel"))


def pytest_configure(config):
    config.addinivalue_line("markers", "soak: a long random run; select it with -m soak")


def pytest_report_header(config):
    return f"wheel cores under test: {', '.join(wheel_cores.NAMES)}"


def pytest_collection_modifyitems(config, items):
    """Leaves the soak out of an ordinary run; `-m soak` runs it."""
    if "soak" in (config.option.markexpr or ""):
        return
    skip = pytest.mark.skip(reason="a soak: run it with -m soak")
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker(skip)


def _load(name):
    try:
        return wheel_cores.load(name)
    except ImportError as missing:
        pytest.fail(f"the {name} core cannot be imported: {missing}", pytrace=False)


@pytest.fixture(params=wheel_cores.NAMES)
def core(request):
    """Wheel, SimpleWheel, RoundsWheel and Entry, of the pure module or of the native one."""
    return _load(request.param)


@pytest.fixture(params=[("pure", "native")], ids=["pure-and-native"])
def both(request):
    """The two cores side by side, for what must be the same to the last detail."""
    if wheel_cores.PURE_ONLY:
        pytest.skip("TICKWHEEL_TEST_PURE_ONLY=1: there is no native core to compare with")
    return [_load(name) for name in request.param]


@pytest.fixture(params=["own", "pushed"])
def pointers(request):
    """R4's two ways for the pointers of a hierarchy to move."""
    return request.param


@pytest.fixture(scope="module")
def young_heap():
    """Puts all that exists out of the collector's sight, so that a full collection is cheap."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
