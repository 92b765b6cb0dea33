/* Deadlines and their handles, native: the hot path of the timers of deadlines.py.
 *
 * It reads the clock, converts seconds to a tick, places a handle on the wheel, and runs due handles. It has no
 * thread and never sleeps. A driver (Timer, AsyncTimer) does that, and is notified through `_wake_driver` if a
 * handle is due before its sleep ends. Each method runs under the GIL from its first to its last access to the
 * wheel: the GIL is the lock.
 *
 * A handle is an entry: the same 64 bytes, of another type. Its item is the callback or, with arguments, a
 * Call, which is private. Like entries, a Call is not tracked by the collector; the wheel visits its parts.
 */
#include "_wheel.h"
#include <math.h>

#define SECOND 1000000000
#define SLOW_NS ((int64_t)100 * 1000 * 1000) /* a callback that takes longer is reported */
#define AWAKE (-1)
#define ASLEEP_FOREVER INT64_MAX
#define LATENESS_BINS 64
#define YIELD_GIL_EVERY 256 /* callbacks after which the GIL is released: native ones do not release it themselves */

enum { CANCELLED = 0, RUNNING = 1, DONE = 2 };

typedef struct {
    PyObject_HEAD
    WheelObject *wheel;
    PyObject *clock;     /* NULL: the system's */
    PyObject *closed;    /* NULL, or the reason for which it is closed */
    int indirect;        /* due handles go to self._execute(handle) */
    int64_t tick_ends;   /* before this time the wheel need not turn */
    int64_t sleeping_until;
    int64_t latest; /* the last time read from the clock */
    uint64_t fired, cancelled;
    int64_t lateness_sum, lateness_max;
    uint64_t lateness_bins[LATENESS_BINS]; /* by the highest bit of the nanoseconds */
    PyObject *weakrefs;
} Deadlines;

static PyObject *str_time_ns, *str_wake_driver, *str_report_error, *str_report_slow, *str_execute, *str_refuse;

static int ask_clock(Deadlines *d, int64_t *ns)
{
    PyObject *answer = PyObject_CallMethodNoArgs(d->clock, str_time_ns);
    if (answer == NULL) return -1;
    *ns = PyLong_AsLongLong(answer);
    Py_DECREF(answer);
    return *ns == -1 && PyErr_Occurred() ? -1 : 0;
}

/* Store the time in *ns, in nanoseconds; if the clock went back, the latest one. */
static inline int read_clock(Deadlines *d, int64_t *ns)
{
    if (LIKELY(d->clock == NULL)) *ns = system_ns();
    else if (ask_clock(d, ns) < 0) return -1;
    if (LIKELY(*ns > d->latest)) d->latest = *ns; else *ns = d->latest;
    return 0;
}

/* Convert to float seconds, rounded once, as Python's division does. */
static PyObject *as_seconds(int64_t ns)
{
    if (LIKELY(ns < (int64_t)1 << 53)) return PyFloat_FromDouble((double)ns / 1e9);
    PyObject *whole = PyLong_FromLongLong(ns), *second = PyLong_FromLong(SECOND);
    PyObject *seconds = whole && second ? PyNumber_TrueDivide(whole, second) : NULL;
    Py_XDECREF(whole);
    Py_XDECREF(second);
    return seconds;
}

static int refuse_seconds(const char *name, PyObject *value)
{
    PyObject *type = PyType_GetName(Py_TYPE(value));
    if (type) refuse(PyExc_TypeError, "%s must be a number of seconds, got %.100R (%U)", name, value, type);
    Py_XDECREF(type);
    return -1;
}

int as_ns(const char *name, PyObject *value, int64_t *ns)
{
    double seconds;
    if (LIKELY(PyFloat_CheckExact(value))) seconds = PyFloat_AS_DOUBLE(value);
    else {
        PyNumberMethods *number = Py_TYPE(value)->tp_as_number;
        if (PyBool_Check(value) || number == NULL || (number->nb_float == NULL && number->nb_index == NULL))
            return refuse_seconds(name, value);
        seconds = PyFloat_AsDouble(value);
        if (seconds == -1.0 && PyErr_Occurred()) {
            if (!PyErr_ExceptionMatches(PyExc_OverflowError)) return -1;
            PyErr_Clear();
            seconds = INFINITY;
        }
    }
    double exact = seconds * 1e9;
    if (UNLIKELY(!(exact > -9.2e18 && exact < 9.2e18))) {
        refuse(OutOfRange, "%s must be a finite number of seconds within 292 years, got %.100R", name, value);
        return -1;
    }
    *ns = (int64_t)floor(exact + 0.5);
    if (UNLIKELY(seconds < 0 && *ns == 0)) *ns = -1;
    return 0;
}

static int cancel(Deadlines *d, EntryObject *handle)
{
    if (!IS_PENDING(handle)) return 0;
    PyObject *item = handle->item;
    wheel_unlink(d->wheel, handle);
    d->cancelled++;
    handle->item = NULL; /* its place now means cancelled */
    Py_DECREF(handle);
    Py_DECREF(item); /* may run any code */
    return 1;
}

static inline int turn(Deadlines *d, int64_t now)
{
    if (now < d->tick_ends) {
        if (now > d->wheel->now) d->wheel->now = now;
        return 0;
    }
    if (wheel_turn(d->wheel, now) < 0) return -1;
    uint64_t tick = d->wheel->tick, next = d->wheel->current + 1;
    d->tick_ends = next > (uint64_t)INT64_MAX / tick ? INT64_MAX : (int64_t)(next * tick);
    return 0;
}

/* Whether `when`, rounded up to its tick, is before the end of the driver's sleep. */
static inline int is_earlier(const Deadlines *d, int64_t when)
{
    if (LIKELY(when >= d->sleeping_until)) return 0;
    uint64_t tick = d->wheel->tick;
    return ((uint64_t)when + tick - 1) / tick * tick < (uint64_t)d->sleeping_until;
}

/* Notify the driver that `handle` is due before its sleep ends. If that fails, cancel the handle. */
static int notify_driver(Deadlines *d, EntryObject *handle)
{
    int64_t before = d->sleeping_until;
    d->sleeping_until = AWAKE;
    PyObject *answer = PyObject_CallMethodNoArgs((PyObject *)d, str_wake_driver);
    Py_XDECREF(answer);
    if (LIKELY(answer != NULL)) return 0;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    d->sleeping_until = before;
    cancel(d, handle);
    PyErr_Restore(type, value, traceback);
    return -1;
}

static void Call_dealloc(CallObject *call)
{
    for (Py_ssize_t i = 0; i < Py_SIZE(call); i++) Py_DECREF(call->parts[i]);
    PyObject_Free(call);
}

PyTypeObject Call_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "tickwheel._wheel.Call",
    .tp_basicsize = offsetof(CallObject, parts),
    .tp_itemsize = sizeof(PyObject *),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)Call_dealloc,
};

/* The callback with its arguments as one item; a new reference. */
static inline PyObject *pack(PyObject *const *args, Py_ssize_t n)
{
    if (n == 1) return Py_NewRef(args[0]);
    CallObject *call = PyObject_NewVar(CallObject, &Call_Type, n);
    if (call == NULL) return NULL;
    for (Py_ssize_t i = 0; i < n; i++) call->parts[i] = Py_NewRef(args[i]);
    return (PyObject *)call;
}

static PyObject *call_at_ns(Deadlines *d, int64_t now, int64_t when, PyObject *const *args, Py_ssize_t n)
{
    PyObject *item = pack(args, n);
    if (item == NULL) return NULL;
    if (UNLIKELY(d->closed != NULL)) {
        Py_DECREF(item);
        PyErr_SetObject(TimerClosed, d->closed);
        return NULL;
    }
    if (turn(d, now) < 0) { Py_DECREF(item); return NULL; }
    EntryObject *handle = wheel_place(d->wheel, &Handle_Type, when, item);
    if (UNLIKELY(handle == NULL)) return NULL;
    if (UNLIKELY(is_earlier(d, when)) && notify_driver(d, handle) < 0) Py_CLEAR(handle);
    return (PyObject *)handle;
}

static int check_call(PyObject *self, const char *function, const char *time, PyObject *const *args, Py_ssize_t nargs,
                      PyObject *keywords)
{
    if (UNLIKELY(nargs == 1))
        PyErr_Format(PyExc_TypeError, "Deadlines.%s() missing 1 required positional argument: 'callback'", function);
    else if (UNLIKELY(nargs == 0))
        PyErr_Format(PyExc_TypeError, "Deadlines.%s() missing 2 required positional arguments: '%s' and 'callback'",
                     function, time);
    if (UNLIKELY(nargs < 2)) return -1;
    if (UNLIKELY(keywords && PyTuple_GET_SIZE(keywords))) {
        PyObject *type = PyType_GetName(Py_TYPE(self));
        if (type) PyErr_Format(PyExc_TypeError, "%U.%s() takes no keyword arguments: use functools.partial", type, function);
        Py_XDECREF(type);
        return -1;
    }
    if (UNLIKELY(!PyCallable_Check(args[1]))) {
        PyObject *type = PyType_GetName(Py_TYPE(args[1]));
        if (type) refuse(PyExc_TypeError, "callback must be callable, got %.100R (%U)", args[1], type);
        Py_XDECREF(type);
        return -1;
    }
    return 0;
}

/* `when`, but not before the start of the current tick. A callback for the past is due now, after those that are
 * already due: otherwise it would starve them. */
static inline int64_t not_past(const Deadlines *d, int64_t when, int64_t now)
{
    if (LIKELY(when >= now)) return when;
    int64_t tick_began = now - now % (int64_t)d->wheel->tick;
    return when < tick_began ? tick_began : when;
}

static int due_time(const Deadlines *d, int64_t now, int64_t delay, PyObject *given, int64_t *when)
{
    if (UNLIKELY(delay > INT64_MAX - now)) {
        refuse(OutOfRange, "delay must be a finite number of seconds within 292 years, got %.100R", given);
        return -1;
    }
    *when = not_past(d, now + delay, now);
    return 0;
}

static PyObject *Deadlines_call_later(Deadlines *d, PyObject *const *args, Py_ssize_t nargs, PyObject *keywords)
{
    int64_t delay, now, when;
    if (check_call((PyObject *)d, "call_later", "delay", args, nargs, keywords) < 0) return NULL;
    if (as_ns("delay", args[0], &delay) < 0) return NULL;
    if (read_clock(d, &now) < 0 || due_time(d, now, delay, args[0], &when) < 0) return NULL;
    return call_at_ns(d, now, when, args + 1, nargs - 1);
}

static PyObject *Deadlines_call_at(Deadlines *d, PyObject *const *args, Py_ssize_t nargs, PyObject *keywords)
{
    int64_t now, when;
    if (check_call((PyObject *)d, "call_at", "when", args, nargs, keywords) < 0) return NULL;
    if (as_ns("when", args[0], &when) < 0) return NULL;
    if (read_clock(d, &now) < 0) return NULL;
    return call_at_ns(d, now, not_past(d, when, now), args + 1, nargs - 1);
}

static PyObject *Deadlines_time(Deadlines *d, PyObject *Py_UNUSED(ignored))
{
    int64_t now;
    if (d->clock == NULL) now = system_ns();
    else if (ask_clock(d, &now) < 0) return NULL;
    return as_seconds(now);
}

/* ---- Running what is due */

static inline void note_lateness(Deadlines *d, int64_t late)
{
    if (late < 0) late = 0;
    d->lateness_sum += late;
    if (late > d->lateness_max) d->lateness_max = late;
    d->lateness_bins[late ? HIGHEST_BIT((uint64_t)late) : 0]++;
}

static void finish(EntryObject *handle)
{
    PyObject *item = handle->item;
    handle->place = NOWHERE | DONE;
    handle->item = NULL;
    Py_XDECREF(item);
}

static PyObject *invoke(PyObject *item)
{
    if (!Py_IS_TYPE(item, &Call_Type)) return PyObject_CallNoArgs(item);
    CallObject *call = (CallObject *)item;
    return PyObject_Vectorcall(call->parts[0], call->parts + 1, (size_t)Py_SIZE(call) - 1, NULL);
}

/* Pass the current exception to self._report_error(exception, handle). -1 if the caller must raise it. */
static int report(Deadlines *d, EntryObject *handle)
{
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback) PyException_SetTraceback(value, traceback);
    PyObject *answer = PyObject_CallMethodObjArgs((PyObject *)d, str_report_error, value, handle, NULL);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    Py_XDECREF(answer);
    return answer ? 0 : -1;
}

static int report_slow(Deadlines *d, EntryObject *handle, int64_t took)
{
    PyObject *seconds = PyFloat_FromDouble((double)took / 1e9);
    PyObject *answer = seconds ? PyObject_CallMethodObjArgs((PyObject *)d, str_report_slow, handle, seconds, NULL) : NULL;
    Py_XDECREF(seconds);
    Py_XDECREF(answer);
    return answer ? 0 : -1;
}

/* Run `handle`, and set *started to its end. */
static int run_one(Deadlines *d, EntryObject *handle, int64_t *started)
{
    handle->place = NOWHERE | RUNNING;
    d->fired++;
    PyObject *item = Py_NewRef(handle->item), *answer;
    if (d->indirect) answer = PyObject_CallMethodOneArg((PyObject *)d, str_execute, (PyObject *)handle);
    else answer = invoke(item);
    if (UNLIKELY(answer && !d->indirect && PyCoro_CheckExact(answer)))
        Py_SETREF(answer, PyObject_CallMethodObjArgs((PyObject *)d, str_refuse, answer, handle, NULL));
    int failed = answer == NULL ? report(d, handle) : 0;
    int64_t ended = system_ns();
    if (UNLIKELY(ended - *started > SLOW_NS) && !failed) failed = report_slow(d, handle, ended - *started);
    *started = ended;
    if (!(d->indirect && answer == Py_True)) finish(handle); /* else it continues elsewhere */
    Py_XDECREF(answer);
    Py_DECREF(item);
    return failed;
}

/* Run up to `limit` handles that are due, excluding new ones; the number run, or -1. */
static Py_ssize_t run_due(Deadlines *d, Py_ssize_t limit)
{
    int64_t now, started;
    Py_ssize_t ran = 0;
    if (read_clock(d, &now) < 0) return -1;
    uint64_t newer = d->wheel->serial;
    started = d->clock ? system_ns() : now;
    while (ran < limit && d->closed == NULL) {
        if (turn(d, now) < 0) return -1;
        EntryObject *handle = wheel_due(d->wheel);
        if (handle == NULL && PyErr_Occurred()) return -1;
        if (handle == NULL || handle->serial >= newer) break; /* handles that callbacks make wait for the next call */
        wheel_unlink(d->wheel, handle);
        ran++;
        note_lateness(d, (d->clock ? now : started) - handle->expiry);
        int failed = run_one(d, handle, &started);
        Py_DECREF(handle);
        if (failed) return -1;
        if (UNLIKELY(ran % YIELD_GIL_EVERY == 0)) {
            Py_BEGIN_ALLOW_THREADS
            Py_END_ALLOW_THREADS
        }
    }
    return ran;
}

static PyObject *Deadlines_run_due(Deadlines *d, PyObject *limit)
{
    Py_ssize_t most = PyLong_AsSsize_t(limit);
    if (most == -1 && PyErr_Occurred()) return NULL;
    Py_ssize_t ran = run_due(d, most);
    return ran < 0 ? NULL : PyLong_FromSsize_t(ran);
}

/* ---- For the driver */

/* The nanoseconds to sleep, or None; then `_wake_driver` reports earlier ones. */
static PyObject *Deadlines_begin_sleep(Deadlines *d, PyObject *Py_UNUSED(ignored))
{
    int64_t now;
    if (read_clock(d, &now) < 0 || turn(d, now) < 0) return NULL;
    int64_t wakeup = wheel_wakeup(d->wheel);
    if (wakeup < 0) {
        if (PyErr_Occurred()) return NULL;
        d->sleeping_until = ASLEEP_FOREVER;
        Py_RETURN_NONE;
    }
    d->sleeping_until = wakeup;
    return PyLong_FromLongLong(wakeup <= now ? 0 : wakeup - now);
}

/* Mark the driver as awake; True if `_wake_driver` was called during the sleep. */
static PyObject *Deadlines_end_sleep(Deadlines *d, PyObject *Py_UNUSED(ignored))
{
    int notified = d->sleeping_until == AWAKE;
    d->sleeping_until = AWAKE;
    return PyBool_FromLong(notified);
}

/* Close it for `reason`; cancel and return the pending handles. */
static PyObject *Deadlines_shut(Deadlines *d, PyObject *reason)
{
    PyObject *handles = PyList_New(0), *items = handles ? PyList_New(0) : NULL;
    if (items == NULL) { Py_XDECREF(handles); return NULL; }
    Py_XSETREF(d->closed, Py_NewRef(reason));
    EntryObject *e;
    while ((e = wheel_any(d->wheel)) != NULL) {
        if (PyList_Append(handles, (PyObject *)e) < 0 || PyList_Append(items, e->item) < 0) { Py_CLEAR(handles); break; }
        wheel_unlink(d->wheel, e);
        d->cancelled++;
        Py_CLEAR(e->item); /* `items` keeps it until the wheel is empty: releasing it may run any code */
        Py_DECREF(e);
    }
    Py_DECREF(items);
    return handles;
}

static PyObject *Deadlines_set_indirect(Deadlines *d, PyObject *value)
{
    d->indirect = PyObject_IsTrue(value);
    if (d->indirect < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *Deadlines_counts(Deadlines *d, PyObject *Py_UNUSED(ignored))
{
    PyObject *bins = PyList_New(LATENESS_BINS);
    for (int i = 0; bins && i < LATENESS_BINS; i++) {
        PyObject *n = PyLong_FromUnsignedLongLong(d->lateness_bins[i]);
        if (n == NULL) Py_CLEAR(bins); else PyList_SET_ITEM(bins, i, n);
    }
    if (bins == NULL) return NULL;
    return Py_BuildValue("{sKsKsLsLsN}", "fired", (unsigned long long)d->fired, "cancelled", (unsigned long long)d->cancelled,
                         "lateness_sum", (long long)d->lateness_sum, "lateness_max", (long long)d->lateness_max,
                         "lateness_bins", bins);
}

static PyObject *Deadlines_snapshot(Deadlines *d, PyObject *Py_UNUSED(ignored))
{
    return PyObject_CallMethod((PyObject *)d->wheel, "snapshot", NULL);
}

static PyObject *Deadlines_check(Deadlines *d, PyObject *Py_UNUSED(ignored))
{
    return PyObject_CallMethod((PyObject *)d->wheel, "_check", NULL);
}

static Py_ssize_t Deadlines_length(Deadlines *d) { return d->wheel->count; }

static int Deadlines_bool(Deadlines *Py_UNUSED(d)) { return 1; }

static PyObject *Deadlines_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    Deadlines *d = (Deadlines *)type->tp_alloc(type, 0);
    if (d == NULL) return NULL;
    d->sleeping_until = AWAKE;
    d->wheel = wheel_make(SECOND / 1000, 0);
    if (d->wheel == NULL) { Py_DECREF(d); return NULL; }
    d->wheel->driver = d;
    return (PyObject *)d;
}

static int Deadlines_init(Deadlines *d, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tick", "clock", NULL};
    PyObject *tick, *clock = Py_None;
    int64_t ns, now;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O:Deadlines", names, &tick, &clock)) return -1;
    if (as_ns("tick", tick, &ns) < 0) return -1;
    if (ns < 1) { refuse(PyExc_ValueError, "tick must be at least 1e-09 seconds, got %.100R", tick); return -1; }
    if (d->wheel->count) { PyErr_SetString(PyExc_RuntimeError, "a timer can be initialized only once"); return -1; }
    Py_XSETREF(d->clock, clock == Py_None ? NULL : Py_NewRef(clock));
    if (d->clock == NULL) now = system_ns();
    else if (ask_clock(d, &now) < 0) return -1;
    WheelObject *wheel = wheel_make(ns, now < 0 ? 0 : now), *before = d->wheel;
    if (wheel == NULL) return -1;
    wheel->driver = d;
    before->driver = NULL;
    d->wheel = wheel;
    d->tick_ends = 0;
    d->latest = d->wheel->now;
    Py_DECREF(before);
    return 0;
}

static int Deadlines_traverse(Deadlines *d, visitproc visit, void *arg)
{
    Py_VISIT((PyObject *)d->wheel);
    Py_VISIT(d->clock);
    Py_VISIT(d->closed);
    return 0;
}

static int Deadlines_clear(Deadlines *d)
{
    Py_CLEAR(d->clock);
    return 0; /* the wheel clears itself */
}

static void Deadlines_dealloc(Deadlines *d)
{
    PyTypeObject *type = Py_TYPE(d);
    PyObject_GC_UnTrack(d);
    if (d->weakrefs) PyObject_ClearWeakRefs((PyObject *)d);
    if (d->wheel) { d->wheel->driver = NULL; Py_CLEAR(d->wheel); }
    Py_CLEAR(d->clock);
    Py_CLEAR(d->closed);
    type->tp_free((PyObject *)d);
}

/* ---- Handles */

static Deadlines *driver_of(const EntryObject *handle)
{
    return handle->owner->wheel ? handle->owner->wheel->driver : NULL;
}

int handle_cancel(EntryObject *handle)
{
    Deadlines *d = driver_of(handle);
    return d != NULL && cancel(d, handle);
}

static PyObject *Handle_cancel(EntryObject *handle, PyObject *Py_UNUSED(ignored)) { return PyBool_FromLong(handle_cancel(handle)); }

static PyObject *Handle_reschedule(EntryObject *handle, PyObject *given)
{
    int64_t delay, now, when;
    Deadlines *d = driver_of(handle);
    if (as_ns("delay", given, &delay) < 0) return NULL;
    if (d == NULL) Py_RETURN_FALSE;
    Py_INCREF(d); /* a clock written in Python may drop the last reference */
    int failed = read_clock(d, &now) < 0 || due_time(d, now, delay, given, &when) < 0 || turn(d, now) < 0;
    int pending = IS_PENDING(handle);
    if (!failed && pending) {
        failed = wheel_move(d->wheel, handle, when) < 0;
        if (!failed && is_earlier(d, when)) failed = notify_driver(d, handle) < 0;
    }
    Py_DECREF(d);
    return failed ? NULL : PyBool_FromLong(pending);
}

/* Call the callback with its arguments, for a driver that runs it elsewhere. */
static PyObject *Handle_invoke(EntryObject *handle, PyObject *Py_UNUSED(ignored))
{
    if (handle->item == NULL) Py_RETURN_NONE;
    PyObject *item = Py_NewRef(handle->item), *answer = invoke(item);
    Py_DECREF(item);
    return answer;
}

static PyObject *Handle_finish(EntryObject *handle, PyObject *Py_UNUSED(ignored))
{
    if (handle->place == (NOWHERE | RUNNING)) finish(handle);
    Py_RETURN_NONE;
}

static PyObject *Handle_get_when(EntryObject *handle, void *Py_UNUSED(closure))
{
    return as_seconds(handle->expiry);
}

static const char *state_of(const EntryObject *handle)
{
    if (IS_PENDING(handle)) return "pending";
    return handle->place == (NOWHERE | RUNNING) ? "running" : handle->place == (NOWHERE | DONE) ? "done" : "cancelled";
}

static PyObject *Handle_get_state(EntryObject *handle, void *Py_UNUSED(closure)) { return PyUnicode_FromString(state_of(handle)); }

static PyObject *Handle_get_callback(EntryObject *handle, void *Py_UNUSED(closure))
{
    PyObject *item = handle->item ? handle->item : Py_None;
    return Py_NewRef(Py_IS_TYPE(item, &Call_Type) ? ((CallObject *)item)->parts[0] : item);
}

static PyObject *Handle_repr(EntryObject *handle)
{
    PyObject *when = Handle_get_when(handle, NULL);
    PyObject *text = when ? PyUnicode_FromFormat("<Handle when=%R %s>", when, state_of(handle)) : NULL;
    Py_XDECREF(when);
    return text;
}

static PyObject *Handle_refuse_pickle(PyObject *Py_UNUSED(self), PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(nargs))
{
    PyErr_SetString(PyExc_TypeError, "cannot pickle 'Handle' object: it exists only in this process; "
                                     "pickle the data and schedule it again");
    return NULL;
}

static PyMethodDef Handle_methods[] = {
    {"cancel", (PyCFunction)Handle_cancel, METH_NOARGS,
     "cancel($self, /)\n--\n\nRemove it from its timer and release the callback; return True if this call did. O(1)."},
    {"reschedule", (PyCFunction)Handle_reschedule, METH_O,
     "reschedule($self, delay, /)\n--\n\nMove it to `delay` seconds from now; return False if it was not pending. O(1)."},
    {"_invoke", (PyCFunction)Handle_invoke, METH_NOARGS, NULL},
    {"_finish", (PyCFunction)Handle_finish, METH_NOARGS, NULL},
    {"__reduce__", (PyCFunction)(void (*)(void))Handle_refuse_pickle, METH_FASTCALL, NULL},
    {"__reduce_ex__", (PyCFunction)(void (*)(void))Handle_refuse_pickle, METH_FASTCALL, NULL},
    {NULL}
};

static PyGetSetDef Handle_getset[] = {
    {"when", (getter)Handle_get_when, NULL, "The time at which it is due, in seconds of its timer's clock."},
    {"state", (getter)Handle_get_state, NULL, "'pending', 'running', 'done' or 'cancelled'."},
    {"callback", (getter)Handle_get_callback, NULL, "The callback; None after it ran or was cancelled."},
    {NULL}
};

PyTypeObject Handle_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "tickwheel.Handle",
    .tp_doc = "A scheduled callback, returned by `call_later` and `call_at`: cancel or reschedule it.",
    .tp_basicsize = sizeof(EntryObject),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)entry_dealloc,
    .tp_repr = (reprfunc)Handle_repr,
    .tp_methods = Handle_methods,
    .tp_getset = Handle_getset,
    .tp_weaklistoffset = offsetof(EntryObject, weakrefs),
};

static PyMethodDef Deadlines_methods[] = {
    {"call_later", (PyCFunction)(void (*)(void))Deadlines_call_later, METH_FASTCALL | METH_KEYWORDS,
     "call_later($self, delay, callback, /, *args)\n--\n\nCall `callback(*args)` in `delay` seconds; a negative delay means now. O(1)."},
    {"call_at", (PyCFunction)(void (*)(void))Deadlines_call_at, METH_FASTCALL | METH_KEYWORDS,
     "call_at($self, when, callback, /, *args)\n--\n\nCall `callback(*args)` at `when` of `time()`, not `time.time()`; now if past. O(1)."},
    {"time", (PyCFunction)Deadlines_time, METH_NOARGS, "time($self, /)\n--\n\nReturn the time of its clock, in seconds."},
    {"snapshot", (PyCFunction)Deadlines_snapshot, METH_NOARGS,
     "snapshot($self, /)\n--\n\nReturn the snapshot of its wheel, with times in nanoseconds."},
    {"_run_due", (PyCFunction)Deadlines_run_due, METH_O, NULL},
    {"_begin_sleep", (PyCFunction)Deadlines_begin_sleep, METH_NOARGS, NULL},
    {"_end_sleep", (PyCFunction)Deadlines_end_sleep, METH_NOARGS, NULL},
    {"_shut", (PyCFunction)Deadlines_shut, METH_O, NULL},
    {"_set_indirect", (PyCFunction)Deadlines_set_indirect, METH_O, NULL},
    {"_shut_in_child", (PyCFunction)Deadlines_shut, METH_O, NULL}, /* after a fork we hold the GIL: the wheel is consistent */
    {"_counts", (PyCFunction)Deadlines_counts, METH_NOARGS, NULL},
    {"_check", (PyCFunction)Deadlines_check, METH_NOARGS, NULL},
    {NULL}
};

static PyMappingMethods Deadlines_as_mapping = {.mp_length = (lenfunc)Deadlines_length};
static PyNumberMethods Deadlines_as_number = {.nb_bool = (inquiry)Deadlines_bool};

PyTypeObject Deadlines_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "tickwheel._wheel.Deadlines",
    .tp_doc = "Callbacks by deadline: a wheel and a clock, without a driver.",
    .tp_basicsize = sizeof(Deadlines),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .tp_new = Deadlines_new,
    .tp_init = (initproc)Deadlines_init,
    .tp_dealloc = (destructor)Deadlines_dealloc,
    .tp_traverse = (traverseproc)Deadlines_traverse,
    .tp_clear = (inquiry)Deadlines_clear,
    .tp_as_mapping = &Deadlines_as_mapping,
    .tp_as_number = &Deadlines_as_number,
    .tp_methods = Deadlines_methods,
    .tp_weaklistoffset = offsetof(Deadlines, weakrefs),
};

int deadlines_exec(PyObject *module)
{
    str_time_ns = PyUnicode_InternFromString("time_ns");
    str_wake_driver = PyUnicode_InternFromString("_wake_driver");
    str_report_error = PyUnicode_InternFromString("_report_error");
    str_report_slow = PyUnicode_InternFromString("_report_slow");
    str_execute = PyUnicode_InternFromString("_execute");
    str_refuse = PyUnicode_InternFromString("_refuse_coroutine");
    if (!str_refuse || !str_time_ns || !str_wake_driver || !str_report_error || !str_report_slow || !str_execute) return -1;
    if (PyType_Ready(&Call_Type) < 0) return -1;
    return PyModule_AddType(module, &Handle_Type) < 0 || PyModule_AddType(module, &Deadlines_Type) < 0 ? -1 : 0;
}
