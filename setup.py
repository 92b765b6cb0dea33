"""The native core as an optional extension; all else about the package is in pyproject.toml.

- No compiler, or one that fails: the package is built without it, with one warning.
- Windows, a free-threaded interpreter, or TICKWHEEL_PURE=1: it is not attempted.
- TICKWHEEL_NATIVE=1: a native core that cannot be built is an error.
"""

import os
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

WARNING = (
    "the native core was not built ({reason}); "
    "the pure wheel, which does the same more slowly, will be used"
)


class OptionalBuild(build_ext):
    command_name = "build_ext"

    def build_extensions(self) -> None:
        # CFLAGS with an -O of its own wins: the flags below come after it.
        if self.compiler.compiler_type == "unix" and "-O" not in os.environ.get("CFLAGS", ""):
            for extension in self.extensions:
                extension.extra_compile_args += ["-O3", "-fvisibility=hidden"]
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except (CCompilerError, BaseError, OSError) as error:
            if not ext.optional:
                raise
            self.warn(WARNING.format(reason=error))


def native_core() -> list[Extension]:
    free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    if sys.platform == "win32" or free_threaded or os.environ.get("TICKWHEEL_PURE") == "1":
        return []
    required = os.environ.get("TICKWHEEL_NATIVE") == "1"
    sources = [
        f"src/tickwheel/{name}.c" for name in ("_wheel", "_deadlines", "_idle", "_purgatory")
    ]
    depends = sorted(map(str, Path("src/tickwheel").glob("_*.h")))
    return [Extension("tickwheel._wheel", sources, depends=depends, optional=not required)]


setup(ext_modules=native_core(), cmdclass={"build_ext": OptionalBuild})
