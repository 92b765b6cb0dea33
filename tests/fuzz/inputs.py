"""The kept corpus: inputs that together reach all code that the fuzzer has reached."""

import random
from pathlib import Path

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus"
TARGETS = sorted(path.stem for path in (HERE / "targets").glob("[a-z]*.py"))
NATIVE = {"wheel", "deadlines", "idle", "purgatory"}  # they compare the native core with its twin


def kept_inputs(target):
    """Return the kept inputs of a target, in a fixed order."""
    return [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]


def mutants(inputs, count, seed):
    """Yield `count` changed inputs, the same ones for the same seed."""
    chance = random.Random(seed)
    for _ in range(count):
        data = bytearray(chance.choice(inputs))
        for _ in range(chance.randint(1, 4)):
            mutate(data, chance, inputs)
        yield bytes(data)


def mutate(data, chance, inputs):
    """Change some bytes, remove or repeat a part, or put in a part of another input."""
    start = chance.randint(0, len(data))
    end = min(len(data), start + chance.choice((1, 1, 2, 4, 16, 64)))
    other = chance.choice(inputs)
    at = chance.randint(0, len(other))
    part = other[at : at + chance.choice((1, 4, 16, 64))]
    match chance.randrange(5):
        case 0:
            data[start:end] = chance.randbytes(end - start)
        case 1:
            del data[start:end]
        case 2:
            data[start:start] = data[start:end]
        case 3:
            data[start:start] = part
        case _:
            data[start : start + len(part)] = part
