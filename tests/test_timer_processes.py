"""Timer across processes: interpreter exit, fork, and a KeyboardInterrupt on the thread.

Each test runs a separate program: it must end at once, with code 0 and an empty stderr.
"""

import os
import signal
import time

import pytest

from stage import LONG, program

FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")

START = """
import logging, os, sys, threading, time, signal
import tickwheel
from tickwheel import ManualClock, Timer, TimerClosed

logging.getLogger("tickwheel").setLevel(logging.ERROR)  # a machine that stood still is no matter

def watch(seconds=60):
    # a hang ends with SIGALRM, and so fails the test
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)

def child_of(work):
    # what `work()` prints in the child, and how the child ended
    sys.stdout.flush()
    receive, send = os.pipe()
    child = os.fork()
    if not child:
        watch(20)
        status = 1
        try:
            os.close(receive)
            os.write(send, repr(work()).encode())
            status = 0
        except BaseException as error:
            os.write(send, repr(error).encode())
        finally:
            os._exit(status)
    os.close(send)
    results = b""
    while part := os.read(receive, 65536):
        results += part
    os.close(receive)
    return results.decode(), os.waitpid(child, 0)[1]

def works(timer):
    came = threading.Event()
    timer.call_later(0.001, came.set)
    return came.wait(20)

watch()
"""


def run(text, **options):
    return program(START + text, **options)


class TestExit:
    def test_exit_with_pending_timers_is_clean_and_immediate(self):
        started = time.monotonic()
        run("""
timer = Timer()
timer.call_later(3600, print, "never")
timer.call_every(1800, print, "never")
timer.call_later(0.001, int)
time.sleep(0.01)
""")
        assert time.monotonic() - started < LONG

    def test_exit_while_many_timers_fire_is_clean(self):
        for _ in range(5):
            run("""
timers = [Timer(tick=0.0005) for _ in range(4)]
for timer in timers:
    for i in range(5000):
        timer.call_later(i / 50000, int)
    timer.call_every(0.0005, int)
time.sleep(0.02)
""")

    def test_exit_does_not_wait_for_a_running_callback(self):
        run("""
begun = threading.Event()
timer = Timer()
timer.call_later(0, lambda: (begun.set(), time.sleep(3600)))
assert begun.wait(20)
""")

    def test_exit_with_a_ticking_driver_is_clean(self):
        run("""
timer = Timer(tick=0.0002, driver="ticking")
timer.call_later(3600, print, "never")
time.sleep(0.02)
""")

    def test_exit_with_an_executor_that_refuses_work_is_silent(self):
        run("""
import atexit
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(2)
timer = Timer(executor=pool, tick=0.0002)
for i in range(2000):
    timer.call_later(i / 5000, int)
time.sleep(0.02)
atexit.register(time.sleep, 0.3)  # the pool takes nothing more, and the timer goes on
""")

    def test_a_callback_refused_at_exit_is_done_and_not_an_error(self):
        out = run("""
import atexit
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(2)
errors = []
timer = Timer(executor=pool, on_error=lambda error, handle: errors.append(error))
pool.submit(int).result()
timer.call_later(3600, int)  # its thread starts here: from 3.12 on none can at exit
@atexit.register
def later():
    handle = timer.call_later(0.01, int)
    while handle.state in ("pending", "running"):
        time.sleep(0.001)
    print(handle.state, errors)
""")
        assert out == "done []\n"

    def test_exit_inside_with_is_clean(self):
        run("""
with Timer() as timer:
    timer.call_later(3600, print, "never")
    sys.exit(0)
""")

    def test_a_timer_created_at_exit_causes_no_error(self):
        out = run("""
import atexit
@atexit.register
def later():
    timer = Timer()
    try:
        print(works(timer))
    except RuntimeError as refused:
        print(True)  # no new threads at shutdown: it raises and does not hang
""")
        assert out == "True\n"

    def test_a_timer_in_a_cycle_and_in_globals_is_torn_down_in_silence(self):
        run("""
class Holder:
    def work(self): pass
holder = Holder()
holder.timer = Timer()
holder.handle = holder.timer.call_later(3600, holder.work)
holder.every = holder.timer.call_every(0.001, holder.work)
Holder.kept = holder
time.sleep(0.01)
""")

    def test_exit_with_manual_clocks_and_closed_timers_is_clean(self):
        run("""
clock = ManualClock()
one = Timer(clock=clock)
one.call_later(1, int)
other = Timer()
other.call_later(1, int)
other.close()
""")

    def test_importing_alone_starts_no_thread_and_no_asyncio(self):
        out = run("""
print(threading.active_count(), "asyncio" in sys.modules)
Timer()
print(threading.active_count())
""")
        assert out == "1 False\n1\n"


class TestKeyboardInterrupt:
    """The interrupt is raised only when the main thread can catch it: else the program ends."""

    @pytest.mark.parametrize("executor", ["None", "ThreadPoolExecutor(1)"])
    def test_an_interrupt_in_a_callback_reaches_the_main_thread(self, executor):
        out = run(f"""
from concurrent.futures import ThreadPoolExecutor
ready = threading.Event()
def interrupted():
    ready.wait()
    raise KeyboardInterrupt
timer = Timer(executor={executor})
handle = timer.call_later(0.01, interrupted)
try:
    ready.set()
    end = time.monotonic() + 5
    while time.monotonic() < end:
        time.sleep(0.005)
    print("swallowed")
except KeyboardInterrupt:
    print("interrupted")
print(works(timer), handle.state)
timer.close()
""")
        assert out == "interrupted\nTrue done\n"

    @pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="nothing to wake it with")
    def test_an_interrupt_reaches_a_main_thread_that_waits(self):
        out = run("""
ready = threading.Event()
def interrupted():
    ready.wait()
    raise KeyboardInterrupt
timer = Timer()
timer.call_later(0.01, interrupted)
started = time.monotonic()
try:
    ready.set()
    threading.Event().wait(10)
    print("swallowed")
except KeyboardInterrupt:
    print("in time" if time.monotonic() - started < 9 else "when the wait was over")
print(works(timer))
""")
        assert out == "in time\nTrue\n"

    def test_an_interrupt_in_on_error_reaches_the_main_thread(self):
        out = run("""
ready = threading.Event()
def on_error(error, handle):
    ready.wait()
    raise KeyboardInterrupt
timer = Timer(on_error=on_error)
timer.call_later(0.01, lambda: 1 / 0)
try:
    ready.set()
    end = time.monotonic() + 5
    while time.monotonic() < end:
        time.sleep(0.005)
    print("swallowed")
except KeyboardInterrupt:
    print("interrupted")
print(works(timer))
""")
        assert out == "interrupted\nTrue\n"

    def test_ctrl_c_while_the_main_thread_waits_is_not_swallowed(self):
        out = run("""
ready = threading.Event()
def interrupt():
    ready.wait()
    os.kill(os.getpid(), signal.SIGINT)
timer = Timer()
for i in range(2000):
    timer.call_later(i / 5000, int)
timer.call_later(0.05, interrupt)
try:
    ready.set()
    threading.Event().wait(20)
    print("swallowed")
except KeyboardInterrupt:
    print("interrupted")
print(works(timer))
""")
        assert out == "interrupted\nTrue\n"


@FORKS
class TestFork:
    def test_the_childs_timer_is_closed_and_the_parents_continues(self):
        out = run("""
timer, seen = Timer(), []
handle = timer.call_later(60, seen.append, 1)
every = timer.call_every(3600, int)
far = timer.call_later(3600, int)

def child():
    try:
        timer.call_later(1, int)
        results = "nothing"
    except TimerClosed as error:
        results = str(error)
    return (len(timer), bool(timer), far.state, handle.state, every.state, results,
            timer.close(), far.cancel(), far.reschedule(1), timer.stats()["pending"])

print(*child_of(child))
handle.reschedule(0.01)
while not seen:
    time.sleep(0.001)
print(seen, far.state, every.state, works(timer))
""")
        child, parent = out.splitlines()
        results = "this timer belongs to the parent process: create a new one after the fork"
        assert child == (
            f"(0, True, 'cancelled', 'cancelled', 'cancelled', '{results}', [], False, False, 0) 0"
        )
        assert parent == "[1] pending pending True"

    def test_no_callback_of_the_parent_runs_in_the_child(self):
        out = run("""
timer, seen = Timer(), []
for i in range(100):
    timer.call_later(i / 1000, seen.append, i)
def child():
    had = len(seen)
    time.sleep(0.3)
    return len(seen) - had
print(*child_of(child))
while len(seen) < 100:
    time.sleep(0.001)
""")
        assert out == "0 0\n"

    def test_the_child_can_create_a_new_timer(self):
        out = run("""
timer = Timer()
works(timer)
def child():
    with Timer() as mine:
        return works(mine), len(mine), mine.stats()["fired"]
print(*child_of(child))
print(works(timer))
""")
        assert out == "(True, 0, 1) 0\nTrue\n"

    def test_an_unused_timer_belongs_to_the_parent_too(self):
        out = run("""
timer = Timer()
def child():
    try:
        timer.call_later(1, int)
    except TimerClosed:
        return "closed"
print(*child_of(child))
print(works(timer))
""")
        assert out == "'closed' 0\nTrue\n"

    def test_a_closed_timer_stays_closed_in_the_child(self):
        out = run("""
timer = Timer()
works(timer)
timer.close()
def child():
    try:
        timer.call_later(1, int)
    except TimerClosed as error:
        return str(error), timer.close()
print(*child_of(child))
""")
        assert out.endswith(" 0\n")
        assert "[]" in out

    def test_after_a_fork_in_a_callback_neither_process_hangs(self):
        out = run("""
timer, results = Timer(), []
def fork():
    def child():
        with Timer() as mine:
            return len(timer), works(mine)
    results.append(child_of(child))
timer.call_later(0.001, fork)
far = timer.call_later(3600, int)
while not results:
    time.sleep(0.001)
print(*results[0], far.state, works(timer))
""")
        assert out == "(0, True) 0 pending True\n"

    def test_a_child_that_returns_from_the_callback_ends(self):
        out = run("""
timer, children = Timer(), []
def fork():
    child = os.fork()
    if child:
        children.append(child)
    else:
        watch(20)
timer.call_later(0.001, fork)
while not children:
    time.sleep(0.001)
print(os.waitpid(children[0], 0)[1], works(timer))
""")
        assert out == "0 True\n"

    def test_after_a_fork_in_a_callback_on_a_manual_clock_neither_process_hangs(self):
        out = run("""
clock, results = ManualClock(), []
timer = Timer(clock=clock)
def fork():
    def child():
        seen = []
        with Timer(clock=clock) as mine:
            mine.call_later(1, seen.append, 1)
            clock.advance(2)
        return len(timer), seen
    results.append(child_of(child))
timer.call_later(1, fork)
timer.call_later(5, results.append, "parent")
clock.advance(10)
print(results)
""")
        assert out == "[('(0, [1])', 0), 'parent']\n"

    def test_the_child_can_advance_a_clock_that_another_thread_was_advancing(self):
        out = run("""
clock = ManualClock()
timer = Timer(clock=clock)
begun, go_on = threading.Event(), threading.Event()
timer.call_later(1, lambda: (begun.set(), go_on.wait(20)))
thread = threading.Thread(target=clock.advance, args=(1,))
thread.start()
begun.wait(20)
def child():
    seen = []
    with Timer(clock=clock) as mine:
        mine.call_later(1, seen.append, 1)
        clock.advance(2)
    return seen
print(*child_of(child))
go_on.set()
thread.join(20)
""")
        assert out == "[1] 0\n"

    @pytest.mark.parametrize("driver", ["precise", "ticking"])
    def test_a_fork_at_any_moment_hangs_neither_process(self, driver):
        out = run(f"""
import random
sys.setswitchinterval(1e-6)
timer = Timer(tick=0.0005, driver={driver!r})
stop = threading.Event()
def storm(seed):
    generator, handles = random.Random(seed), []
    while not stop.is_set():
        handles.append(timer.call_later(generator.random() * 0.01, int))
        handle = generator.choice(handles)
        handle.cancel() if generator.random() < 0.5 else handle.reschedule(0.001)
        del handles[:-100]
threads = [threading.Thread(target=storm, args=(i,)) for i in range(4)]
for thread in threads:
    thread.start()
def child():
    first = len(timer)
    try:
        timer.call_later(1, int)
    except TimerClosed:
        with Timer() as mine:
            return first, works(mine)
answers = {{child_of(child) for _ in range(25)}}
stop.set()
for thread in threads:
    thread.join(20)
print(answers, works(timer), [thread.is_alive() for thread in threads])
""")
        assert out == "{('(0, True)', 0)} True [False, False, False, False]\n"

    def test_a_fork_while_other_threads_close_and_make_timers_hangs_neither_process(self):
        out = run("""
sys.setswitchinterval(1e-6)
stop = threading.Event()
def churn():
    while not stop.is_set():
        with Timer() as timer:
            timer.call_later(0.0005, int)
            timer.call_every(0.0005, int)
            time.sleep(0.0007)
threads = [threading.Thread(target=churn) for _ in range(3)]
for thread in threads:
    thread.start()
def child():
    with Timer() as mine:
        return works(mine)
answers = {child_of(child) for _ in range(20)}
stop.set()
for thread in threads:
    thread.join(20)
print(answers, [thread.is_alive() for thread in threads])
""")
        assert out == "{('True', 0)} [False, False, False]\n"

    def test_a_grandchild_works_too(self):
        out = run("""
timer = Timer()
works(timer)
def child():
    mine = Timer()
    first = works(mine)
    def grandchild():
        with Timer() as own:
            return len(mine), works(own)
    results, status = child_of(grandchild)
    return first, results, status, works(mine)
print(*child_of(child))
""")
        assert out == "(True, '(0, True)', 0, True) 0\n"

    def test_the_child_releases_the_parents_callbacks(self):
        out = run("""
import weakref
class Thing:
    def __call__(self): pass
thing = Thing()
watch_it = weakref.ref(thing)
timer = Timer()
handle = timer.call_later(3600, thing)
del thing
print(*child_of(lambda: watch_it() is None))
print(watch_it() is None)
""")
        assert out == "True 0\nFalse\n"

    def test_the_child_of_a_program_with_pending_timers_exits_cleanly(self):
        out = run("""
timer = Timer()
timer.call_later(3600, int)
sys.stdout.flush()
child = os.fork()
if not child:
    sys.exit(0)  # the whole way out, not _exit
print(os.waitpid(child, 0)[1])
""")
        assert out == "0\n"

    def test_multiprocessing_by_fork_works_together_with_a_timer(self):
        out = run("""
import multiprocessing
timer = Timer()
timer.call_every(0.001, int)
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(sum(pool.map(abs, range(-100, 0))))
print(works(timer))
""")
        assert out == "5050\nTrue\n"

    def test_an_async_timer_is_closed_in_the_child_too(self):
        out = run("""
import asyncio
async def main():
    async with tickwheel.AsyncTimer() as timer:
        seen = asyncio.Event()
        handle = timer.call_later(0.01, seen.set)
        def child():
            try:
                timer.call_later(1, int)
                results = "nothing"
            except TimerClosed as error:
                results = str(error)
            return len(timer), handle.state, results
        print(*child_of(child))
        await asyncio.wait_for(seen.wait(), 20)
        print("parent", handle.state)
asyncio.run(main())
""")
        child, parent = out.splitlines()
        results = "this timer belongs to the parent process: create a new one after the fork"
        assert child == f"(0, 'cancelled', '{results}') 0"
        assert parent == "parent done"
