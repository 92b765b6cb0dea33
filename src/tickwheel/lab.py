"""A demonstration: `python -m tickwheel.lab` draws a turning wheel in the terminal.

The picture uses `snapshot()`, `where()` and the counters, which any program may read. Only `watch`
reads the time.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections import Counter, deque
from random import Random
from typing import TYPE_CHECKING, Any, TextIO

import tickwheel
from tickwheel.keyboard import quit_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LONGEST_DELAY_TICKS = 3000
FOREVER = float("inf")
PENDING_ENTRIES = 150  # approximate number that the lab keeps pending
NEWS_LINES = 7  # log lines under the picture

BOLD, DIM, CYAN, YELLOW, RED, GREEN = "1", "2", "36", "33", "31", "32"
OPEN_SCREEN, CLOSE_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


class Lab:
    """A wheel with random schedules and cancels, and a driver that sleeps between buckets.

    - `turn(now)` moves the lab to `now`, an integer number of ticks.
    - The same seed and the same times result in the same pictures.
    """

    def __init__(self, size: int = 16, seed: int = 0) -> None:
        self.wheel: Any = tickwheel.Wheel(tick=1, size=size)
        self.fired = 0
        self.cancelled = 0
        self.wakeups = 0
        self.news: deque[str] = deque(maxlen=NEWS_LINES)
        self._entries: dict[int, Any] = {}
        self._random = Random(seed)  # noqa: S311
        self._last_item = 0
        while len(self._entries) < PENDING_ENTRIES:
            self._schedule()

    def turn(self, now: int) -> None:
        """Fire the entries due by `now`, then cancel and schedule some."""
        while (due := self.wheel.next_wakeup()) is not None and due <= now:
            self._wake(due)
        self.wheel.advance(now)
        if self._random.random() < 0.1:
            self._cancel()
        while len(self._entries) < PENDING_ENTRIES and self._random.random() < 0.8:
            self._schedule()

    @property
    def empty_ticks(self) -> int:
        """The number of ticks that cost nothing, because no bucket was due."""
        return int(self.wheel.now) - self.wakeups

    def _wake(self, due: int) -> None:
        levels = self._levels()
        items: list[int] = self.wheel.advance(due)
        self.wakeups += 1
        self.fired += len(items)
        for item in items:
            del self._entries[item]
        self._log_cascades(due, levels)
        if items:
            names = " ".join(f"#{item}" for item in items[:8])
            self._log(due, "fired", f"{names}{' ...' if len(items) > 8 else ''}")

    def _levels(self) -> dict[int, int]:
        return {item: self.wheel.where(entry)[0] for item, entry in self._entries.items()}

    def _log_cascades(self, due: int, before: dict[int, int]) -> None:
        after = self._levels()
        moves = Counter((before[item], level) for item, level in after.items())
        for (old, new), count in sorted(moves.items()):
            if old != new:
                self._log(due, "cascade", f"{_entries(count)} from level {old} to level {new}")

    def _schedule(self) -> None:
        # Log-uniform delays, so that every level has entries.
        delay = int(LONGEST_DELAY_TICKS ** self._random.random())
        self._last_item += 1
        self._entries[self._last_item] = self.wheel.schedule(
            self.wheel.now + delay, self._last_item
        )

    def _cancel(self) -> None:
        item = self._random.choice(list(self._entries))
        self._entries.pop(item).cancel()
        self.cancelled += 1
        self._log(self.wheel.now, "cancelled", f"#{item}")

    def _log(self, at: int, what: str, detail: str) -> None:
        self.news.append(f"at {at:>7,}  {what:<10} {detail}")


def draw(lab: Lab, *, colour: bool) -> str:
    """Return one frame: a row of slots per level with its pointer, the counters, and the log."""

    def paint(text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if colour else text

    def cell(count: int) -> str:
        style = DIM if not count else CYAN if count < 4 else YELLOW if count < 10 else RED
        return paint(f"{min(count, 99) or '·':>3}", style)

    core = "native core" if tickwheel.NATIVE else "pure wheel"
    lines = [f"{paint('tickwheel lab', BOLD)}   {core}   now {lab.wheel.now:,} ticks", ""]
    for level in lab.wheel.snapshot():
        name = paint(f"level {level['level']}", BOLD)
        pointer = " " * 3 * level["pointer"] + paint("  ▼", GREEN)
        lines.append(f"{name}  tick {level['tick']:<5}{pointer}")
        held = _entries(sum(level["counts"]))
        lines.append(f"  {held:<17}" + "".join(map(cell, level["counts"])))
    counters = {
        "pending": len(lab.wheel),
        "fired": lab.fired,
        "cancelled": lab.cancelled,
        "visits": lab.wheel.visits,
        "wake-ups": lab.wakeups,
        "empty ticks skipped": lab.empty_ticks,
    }
    lines += ["", "   ".join(f"{name} {paint(f'{n:,}', BOLD)}" for name, n in counters.items()), ""]
    lines += [paint(line, DIM) for line in lab.news]
    return "\n".join(lines)


def run(
    lab: Lab,
    out: TextIO,
    *,
    clock: Callable[[], float],
    wants_to_quit: Callable[[float], bool],
    rate: float = 20.0,
    frames: float = FOREVER,
    seconds: float = FOREVER,
    terminal: bool = False,
    colour: bool = False,
) -> bool:
    """Draw up to `frames` frames in up to `seconds`; return True if the user quits before that.

    A tick is 1 / `rate` seconds. On a terminal each frame overwrites the one before; otherwise a
    plain frame is written every second. `wants_to_quit(pause)` waits, and returns True to quit.
    """
    pause = 1 / rate if terminal else 1.0
    started_at, first = clock(), lab.wheel.now
    drawn = 0
    while True:
        elapsed = clock() - started_at
        lab.turn(first + int(elapsed * rate))
        frame = draw(lab, colour=colour)
        if terminal:
            out.write("\x1b[H" + frame.replace("\n", "\x1b[K\n") + "\x1b[K\n\x1b[J")
        else:
            out.write(("\n" if drawn else "") + frame + "\n")
        out.flush()
        drawn += 1
        if drawn >= frames or elapsed + pause > seconds:
            return False
        if wants_to_quit(pause):
            return True


def watch(
    *,
    size: int = 16,
    seed: int = 0,
    rate: float = 20.0,
    frames: float = FOREVER,
    seconds: float = FOREVER,
) -> int:
    """Draw a lab to stdout, and return the exit code.

    On a terminal it uses the alternate screen, unless it draws a single frame. Quitting with q or
    Ctrl-C restores the terminal; if it ends by itself, the last frame stays.
    """
    lab = Lab(size, seed)
    for now in range(1, 301):  # a history, so that the first frame has log lines
        lab.turn(now)
    capable = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    terminal = capable and frames > 1
    colour = capable and not os.environ.get("NO_COLOR")
    clock = tickwheel.SystemClock().time
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # restore the cursor then, too
    left = True
    try:
        with quit_keys() as wants_to_quit:
            if terminal:
                sys.stdout.write(OPEN_SCREEN)
            left = run(
                lab, sys.stdout, clock=clock, wants_to_quit=wants_to_quit, rate=rate, frames=frames,
                seconds=seconds, terminal=terminal, colour=colour,
            )  # fmt: skip
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # the reader has closed the pipe; do not write at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    finally:
        if terminal:
            sys.stdout.write(CLOSE_SCREEN)
            sys.stdout.flush()
    if terminal and not left:
        print(draw(lab, colour=colour))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Watch a wheel turn until q or Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m tickwheel.lab", description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=FOREVER, help="stop after this time")
    parser.add_argument(
        "--frames", type=int, default=FOREVER, help="stop after this number of frames"
    )
    parser.add_argument("--once", action="store_true", help="draw one frame and stop")
    parser.add_argument("--size", type=int, default=16, help="slots per level (default 16)")
    parser.add_argument("--rate", type=float, default=20.0, help="ticks per second (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the random schedules (default 0)")
    options = parser.parse_args(argv)
    if not 2 <= options.size <= 64:
        parser.error(f"--size must be from 2 to 64, got {options.size}")
    if not 0 < options.rate <= 1000:
        parser.error(f"--rate must be over 0 and at most 1000, got {options.rate}")
    return watch(
        size=options.size,
        seed=options.seed,
        rate=options.rate,
        frames=1 if options.once else options.frames,
        seconds=options.seconds,
    )


def _entries(count: int) -> str:
    return f"{count} entry" if count == 1 else f"{count} entries"


if __name__ == "__main__":
    sys.exit(main())
