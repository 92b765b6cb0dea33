/* The ring of the idle tracker, native: the hot path of idle.py.
 *
 * Keys in a dictionary, each with an entry on a wheel. A touch is a look-up and a stamp: it moves the
 * entry's expiry ahead and leaves the entry in the slot where it is. When that slot comes due the entry is
 * placed anew by its stamp, or, if nothing was heard since, its key is idle.
 */
#include "_wheel.h"
#include <math.h>
#include <time.h>

typedef struct {
    PyObject_HEAD
    WheelObject *wheel;
    PyObject *entries; /* key -> Entry */
    PyObject *clock;   /* NULL: the system's; None: by hand, the time of the last advance */
    int64_t timeout;   /* in nanoseconds, as all times here */
    int64_t latest;    /* the last time that was seen */
    int armed;         /* the driver will come by itself */
    PyObject *weakrefs;
} IdleRing;

static PyObject *str_time_ns, *str_arm;

static inline int read_now(IdleRing *ring, int64_t *now)
{
    if (ring->clock == Py_None) *now = ring->wheel->now;
    else if (ring->clock == NULL) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        *now = (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
    }
    else {
        PyObject *answer = PyObject_CallMethodNoArgs(ring->clock, str_time_ns);
        if (answer == NULL) return -1;
        *now = PyLong_AsLongLong(answer);
        Py_DECREF(answer);
        if (*now == -1 && PyErr_Occurred()) return -1;
    }
    if (*now < ring->wheel->now) *now = ring->wheel->now;
    if (*now > ring->latest) ring->latest = *now; else *now = ring->latest; /* a clock that went back stands still */
    if (LIKELY(*now <= INT64_MAX - ring->timeout)) return 0;
    PyErr_Format(OutOfRange, "expiry must be from 0 to %lld, got %llu", (long long)INT64_MAX,
                 (unsigned long long)*now + (unsigned long long)ring->timeout);
    return -1;
}

static int add_key(IdleRing *ring, PyObject *key, int64_t now)
{
    if (wheel_turn(ring->wheel, now) < 0) return -1;
    EntryObject *e = wheel_place(ring->wheel, &Entry_Type, now + ring->timeout, Py_NewRef(key));
    if (e == NULL) return -1;
    int failed = PyDict_SetItem(ring->entries, key, (PyObject *)e);
    if (failed && e->place < NOWHERE) {
        wheel_unlink(ring->wheel, e);
        Py_DECREF(e);
    }
    Py_DECREF(e);
    if (failed) return -1;
    if (!ring->armed) {
        PyObject *answer = PyObject_CallMethodNoArgs((PyObject *)ring, str_arm);
        if (answer == NULL) return -1;
        Py_DECREF(answer);
    }
    return 0;
}

static inline int touch(IdleRing *ring, PyObject *key, int64_t now)
{
    EntryObject *e = (EntryObject *)PyDict_GetItemWithError(ring->entries, key);
    if (LIKELY(e != NULL && IS_PENDING(e))) {
        int64_t expiry = now + ring->timeout;
        if (expiry > e->expiry) e->expiry = expiry;
        return 0;
    }
    return e == NULL && PyErr_Occurred() ? -1 : add_key(ring, key, now);
}

static PyObject *IdleRing_touch(IdleRing *ring, PyObject *key)
{
    int64_t now;
    if (read_now(ring, &now) < 0 || touch(ring, key, now) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *IdleRing_touch_many(IdleRing *ring, PyObject *keys)
{
    int64_t now;
    PyObject *each = PyObject_GetIter(keys), *key;
    if (each == NULL) return NULL;
    if (read_now(ring, &now) < 0) { Py_DECREF(each); return NULL; }
    while ((key = PyIter_Next(each)) != NULL) {
        int failed = touch(ring, key, now);
        Py_DECREF(key);
        if (failed) break;
    }
    Py_DECREF(each);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static void drop(IdleRing *ring, EntryObject *e)
{
    PyObject *item = e->item;
    wheel_unlink(ring->wheel, e);
    e->item = NULL;
    Py_DECREF(e);
    Py_DECREF(item);
}

/* Forget `key`: 1 when it was known, 0 when not, -1 with an error. */
static int forget(IdleRing *ring, PyObject *key)
{
    EntryObject *e = (EntryObject *)PyDict_GetItemWithError(ring->entries, key);
    if (e == NULL) return PyErr_Occurred() ? -1 : 0;
    Py_INCREF(e);
    if (PyDict_DelItem(ring->entries, key) < 0) { Py_DECREF(e); return -1; }
    int known = IS_PENDING(e);
    if (known) drop(ring, e);
    Py_DECREF(e);
    return known;
}

static PyObject *IdleRing_discard(IdleRing *ring, PyObject *key)
{
    int known = forget(ring, key);
    return known < 0 ? NULL : PyBool_FromLong(known);
}

static PyObject *IdleRing_last_seen_ns(IdleRing *ring, PyObject *key)
{
    EntryObject *e = (EntryObject *)PyDict_GetItemWithError(ring->entries, key);
    if (e == NULL) {
        if (!PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, key);
        return NULL;
    }
    return PyLong_FromLongLong(e->expiry - ring->timeout);
}

/* Take one key that is due: 1 when it went into `idle`, 0 when nothing is due, -1 with an error. */
static int expire_one(IdleRing *ring, PyObject *idle)
{
    for (;;) {
        EntryObject *e = wheel_due(ring->wheel);
        if (e == NULL) return PyErr_Occurred() ? -1 : 0;
        uint64_t deadline = ((uint64_t)e->expiry + ring->wheel->tick - 1) / ring->wheel->tick;
        if (deadline > ring->wheel->current) { /* heard of since it was placed */
            if (wheel_move(ring->wheel, e, e->expiry) < 0) return -1;
            continue;
        }
        PyObject *key = Py_NewRef(e->item);
        int failed = PyList_Append(idle, key) < 0;
        if (!failed && forget(ring, key) < 0) { /* a key that cannot be looked up any more keeps no other */
            PyErr_WriteUnraisable(key);
            if (e == wheel_due(ring->wheel)) drop(ring, e);
        }
        Py_DECREF(key);
        return failed ? -1 : 1;
    }
}

/* Move time to `now` and return the keys that have gone idle, as one list. */
static PyObject *IdleRing_expire(IdleRing *ring, PyObject *now_ns)
{
    int64_t now = PyLong_AsLongLong(now_ns);
    if (now == -1 && PyErr_Occurred()) return NULL;
    if (now < ring->wheel->now) now = ring->wheel->now;
    uint64_t target = (uint64_t)now / ring->wheel->tick;
    PyObject *idle = PyList_New(0);
    int taken = idle ? 1 : -1;
    while (taken > 0 || (taken == 0 && ring->wheel->current < target)) {
        if (wheel_turn(ring->wheel, now) < 0) taken = -1;
        else taken = expire_one(ring, idle);
    }
    if (taken < 0) Py_CLEAR(idle);
    return idle;
}

static PyObject *IdleRing_now_ns(IdleRing *ring, PyObject *Py_UNUSED(ignored))
{
    int64_t now;
    return read_now(ring, &now) < 0 ? NULL : PyLong_FromLongLong(now);
}

static PyObject *IdleRing_wakeup_ns(IdleRing *ring, PyObject *Py_UNUSED(ignored))
{
    int64_t wakeup = wheel_wakeup(ring->wheel);
    if (wakeup >= 0) return PyLong_FromLongLong(wakeup);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static PyObject *IdleRing_set_armed(IdleRing *ring, PyObject *value)
{
    int armed = PyObject_IsTrue(value);
    if (armed < 0) return NULL;
    ring->armed = armed;
    Py_RETURN_NONE;
}

static Py_ssize_t IdleRing_length(IdleRing *ring) { return PyDict_GET_SIZE(ring->entries); }

static int IdleRing_contains(IdleRing *ring, PyObject *key) { return PyDict_Contains(ring->entries, key); }

static int IdleRing_bool(IdleRing *Py_UNUSED(ring)) { return 1; }

static PyObject *IdleRing_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    IdleRing *ring = (IdleRing *)type->tp_alloc(type, 0);
    if (ring == NULL) return NULL;
    ring->entries = PyDict_New();
    ring->wheel = wheel_make(1, 0);
    ring->clock = Py_NewRef(Py_None);
    if (ring->entries == NULL || ring->wheel == NULL) { Py_DECREF(ring); return NULL; }
    return (PyObject *)ring;
}

/* IdleRing(timeout_ns, tick_ns, clock, by_hand) */
static int IdleRing_init(IdleRing *ring, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"timeout", "tick", "clock", "by_hand", NULL};
    long long timeout, tick;
    PyObject *clock;
    int by_hand;
    int64_t now;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "LLOp:IdleRing", names, &timeout, &tick, &clock, &by_hand)) return -1;
    ring->timeout = timeout;
    Py_XSETREF(ring->clock, by_hand ? Py_NewRef(Py_None) : clock == Py_None ? NULL : Py_NewRef(clock));
    WheelObject *before = ring->wheel, *wheel = wheel_make(tick, 0);
    if (wheel == NULL) return -1;
    ring->wheel = wheel;
    Py_DECREF(before);
    if (read_now(ring, &now) < 0) return -1;
    return by_hand ? 0 : wheel_turn(ring->wheel, now);
}

static int IdleRing_traverse(IdleRing *ring, visitproc visit, void *arg)
{
    Py_VISIT((PyObject *)ring->wheel);
    Py_VISIT(ring->entries);
    Py_VISIT(ring->clock);
    return 0;
}

static int IdleRing_clear(IdleRing *ring)
{
    if (ring->entries) PyDict_Clear(ring->entries);
    return 0; /* the wheel clears itself */
}

static void IdleRing_dealloc(IdleRing *ring)
{
    PyObject_GC_UnTrack(ring);
    if (ring->weakrefs) PyObject_ClearWeakRefs((PyObject *)ring);
    Py_CLEAR(ring->wheel);
    Py_CLEAR(ring->entries);
    Py_CLEAR(ring->clock);
    Py_TYPE(ring)->tp_free((PyObject *)ring);
}

static PyMethodDef IdleRing_methods[] = {
    {"touch", (PyCFunction)IdleRing_touch, METH_O,
     "touch($self, key, /)\n--\n\nNote that `key` was heard of just now. O(1): a look-up and a stamp."},
    {"touch_many", (PyCFunction)IdleRing_touch_many, METH_O,
     "touch_many($self, keys, /)\n--\n\nTouch each of `keys`, at one time."},
    {"discard", (PyCFunction)IdleRing_discard, METH_O,
     "discard($self, key, /)\n--\n\nForget `key` without a word; True when it was known. O(1)."},
    {"_last_seen_ns", (PyCFunction)IdleRing_last_seen_ns, METH_O, NULL},
    {"_expire", (PyCFunction)IdleRing_expire, METH_O, NULL},
    {"_now_ns", (PyCFunction)IdleRing_now_ns, METH_NOARGS, NULL},
    {"_wakeup_ns", (PyCFunction)IdleRing_wakeup_ns, METH_NOARGS, NULL},
    {"_set_armed", (PyCFunction)IdleRing_set_armed, METH_O, NULL},
    {NULL}
};

static PySequenceMethods IdleRing_as_sequence = {
    .sq_length = (lenfunc)IdleRing_length,
    .sq_contains = (objobjproc)IdleRing_contains,
};
static PyNumberMethods IdleRing_as_number = {.nb_bool = (inquiry)IdleRing_bool};

static PyTypeObject IdleRing_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "tickwheel._wheel.IdleRing",
    .tp_doc = "Keys and when each was last heard of; see tickwheel.idle.",
    .tp_basicsize = sizeof(IdleRing),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .tp_new = IdleRing_new,
    .tp_init = (initproc)IdleRing_init,
    .tp_dealloc = (destructor)IdleRing_dealloc,
    .tp_traverse = (traverseproc)IdleRing_traverse,
    .tp_clear = (inquiry)IdleRing_clear,
    .tp_as_sequence = &IdleRing_as_sequence,
    .tp_as_number = &IdleRing_as_number,
    .tp_methods = IdleRing_methods,
    .tp_weaklistoffset = offsetof(IdleRing, weakrefs),
};

int idle_exec(PyObject *module)
{
    str_time_ns = PyUnicode_InternFromString("time_ns");
    str_arm = PyUnicode_InternFromString("_arm");
    if (!str_time_ns || !str_arm) return -1;
    return PyModule_AddType(module, &IdleRing_Type);
}
