"""Coverage-guided fuzzing with atheris: `python -m fuzz [TARGET ...]`, each for some time.

- New inputs that reach new code go to build/fuzz/corpus/TARGET; `--keep` adds to
  tests/fuzz/corpus/TARGET those that it lacks, as few and as short as possible.
- An input that fails is written to build/fuzz/failures, and its target ends.
- Targets of the native core run with the one in build/fuzz/lib, which `make fuzz` builds: it
  counts its own coverage, and ASan and UBSan watch it.
"""

import argparse
import hashlib
import importlib
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import atheris

from fuzz.inputs import CORPUS, NATIVE, TARGETS

BUILD = Path("build/fuzz")
LIBRARY = BUILD / "lib"
FAILURES = BUILD / "failures"
MAX_BYTES = 4_000  # of an input: JSON too deep for a decoder fits
SLOW_SECONDS = 10  # one input that takes longer is a failure


def environment(target):
    """Return the environment of a run; an instrumented core needs the sanitizers' library."""
    found = {**os.environ, "PYTHONPATH": str(CORPUS.parent.parent)}
    if target in NATIVE:
        found["PYTHONPATH"] = f"{LIBRARY.resolve()}:{found['PYTHONPATH']}"
        found["LD_PRELOAD"] = f"{atheris.path()}/asan_with_fuzzer.so"
        found["ASAN_OPTIONS"] = "detect_leaks=0:malloc_context_size=3:quarantine_size_mb=16"
        found["PYTHONMALLOC"] = "malloc"
    return found


def launch(target, *options):
    """Run one target in a process of its own; return its exit code."""
    for folder in (BUILD / "corpus" / target, FAILURES):
        folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "fuzz", "--inside", target, *map(str, options)]
    return subprocess.run(command, check=False, env=environment(target)).returncode


def fuzz(target, seconds):
    """Search for new inputs; return 0 if none of them fails."""
    found = BUILD / "corpus" / target
    print(f"\n{target}: {seconds} s", flush=True)
    code = launch(
        target, found, CORPUS / target, f"-max_total_time={seconds}", f"-max_len={MAX_BYTES}",
        f"-timeout={SLOW_SECONDS}", f"-artifact_prefix={FAILURES}/{target}-", "-verbosity=1",
        "-print_final_stats=1",
    )  # fmt: skip
    if code:
        print(f"{target} fails: the input is in {FAILURES}; CONTRIBUTING.md says what to do")
    return code


def keep(target):
    """Add to the kept corpus the inputs found that reach code which no kept one does."""
    kept, found = CORPUS / target, BUILD / "corpus" / target
    kept.mkdir(exist_ok=True)
    # Without counters, a line that runs more often is not new: tens of inputs, not hundreds.
    return launch(target, "-merge=1", "-use_counters=0", f"-max_len={MAX_BYTES}", kept, found)


def run_inside(target, *options):
    """Run libFuzzer in this process."""
    # The native core counts its own coverage; that of its twin as well would make a run slower.
    with nullcontext() if target in NATIVE else atheris.instrument_imports(include=["tickwheel"]):
        module = importlib.import_module(f"fuzz.targets.{target}")
    if target in NATIVE:
        core = sys.modules["tickwheel._wheel"].__file__
        if not core.startswith(str(LIBRARY.resolve())):
            raise SystemExit(f"{core} counts no coverage: run `make fuzz`")

    def run(data):
        try:
            module.run(data)
        except BaseException:  # libFuzzer writes the input of a crash or a timeout, but not of this
            name = f"{target}-error-{hashlib.sha1(data).hexdigest()}"
            (FAILURES / name).write_bytes(data)
            print(f"\n{FAILURES / name}", file=sys.stderr, flush=True)
            raise

    program = BUILD / f"run-{target}"  # `-merge` starts its first argument again
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m fuzz --inside {target} "$@"\n')
    program.chmod(0o755)
    atheris.Setup([str(program), *options], run)
    atheris.Fuzz()


def main(arguments):
    if arguments[:1] == ["--inside"]:
        run_inside(*arguments[1:])
        return 0
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", default=TARGETS, metavar="TARGET")
    parser.add_argument("--seconds", type=int, default=180, help="of each target")
    parser.add_argument("--keep", action="store_true", help="add to the kept corpus instead")
    given = parser.parse_args(arguments)
    codes = [keep(one) if given.keep else fuzz(one, given.seconds) for one in given.targets]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
