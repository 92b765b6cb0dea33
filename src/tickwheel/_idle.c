/* The ring of the idle tracker, native: the hot path of idle.py. ring.py is its twin.
 *
 * The keys are in a table, each with an expiry and an entry on a wheel. A touch looks up the key and sets its expiry; the
 * entry stays in its slot. When the slot is due, the entry is rescheduled by its expiry or, if the key was not touched
 * since, the key is idle.
 *
 * The expiry is next to the key, so that a touch costs two cache misses, the key's hash and its cell: a dict costs one
 * more, and the entry would be another. Probing is linear; a removed cell is filled from the cells after it. Comparing
 * two keys may run any code; if that changes the table, the lookup starts again.
 */
#include "_wheel.h"
#include <math.h>

#define MIN_BITS 3

typedef struct {
    PyObject *key; /* NULL: empty */
    Py_hash_t hash;
    int64_t expiry; /* the last touch plus the timeout; the twin in ring.py stores the touch alone */
    EntryObject *entry;
} Cell;

typedef struct {
    PyObject_HEAD
    WheelObject *wheel;
    Cell *cells;      /* 2 ** bits of them, at most two thirds in use */
    size_t mask;
    int bits;
    size_t count;
    uint64_t version; /* of the table */
    uint64_t added;   /* keys added so far */
    PyObject *clock;  /* NULL: the system's; None: by hand, the time of the last advance */
    int64_t timeout;  /* in nanoseconds, as all times here */
    int64_t latest;   /* the last time read */
    int armed;        /* the driver will call by itself */
    PyObject *weakrefs;
} IdleRing;

static PyObject *str_time_ns, *str_arm;

static inline int read_now(IdleRing *ring, int64_t *now)
{
    if (ring->clock == Py_None) *now = ring->wheel->now;
    else if (ring->clock == NULL) *now = system_ns();
    else {
        PyObject *answer = PyObject_CallMethodNoArgs(ring->clock, str_time_ns);
        if (answer == NULL) return -1;
        *now = PyLong_AsLongLong(answer);
        Py_DECREF(answer);
        if (*now == -1 && PyErr_Occurred()) return -1;
    }
    if (*now < ring->wheel->now) *now = ring->wheel->now;
    if (*now > ring->latest) ring->latest = *now; else *now = ring->latest; /* if the clock went back, the latest time */
    if (LIKELY(*now <= INT64_MAX - ring->timeout)) return 0;
    PyErr_Format(OutOfRange, "expiry must be from 0 to %lld, got %llu", (long long)INT64_MAX,
                 (unsigned long long)*now + (unsigned long long)ring->timeout);
    return -1;
}

/* ---- The table */

static inline size_t home_of(const IdleRing *ring, Py_hash_t hash)
{
    return (size_t)(((uint64_t)hash * 0x9E3779B97F4A7C15u) >> (64 - ring->bits));
}

/* Change the number of cells; 0 or -1. */
static int resize(IdleRing *ring, int bits)
{
    Cell *old = ring->cells, *cells = PyMem_Calloc((size_t)1 << bits, sizeof(Cell));
    if (cells == NULL) { PyErr_NoMemory(); return -1; }
    size_t old_size = old ? ring->mask + 1 : 0;
    ring->cells = cells;
    ring->bits = bits;
    ring->mask = ((size_t)1 << bits) - 1;
    ring->version++;
    for (size_t i = 0; i < old_size; i++) {
        if (old[i].key == NULL) continue;
        size_t at = home_of(ring, old[i].hash);
        while (cells[at].key) at = (at + 1) & ring->mask;
        cells[at] = old[i];
    }
    PyMem_Free(old);
    return 0;
}

/* Whether the two keys are equal; 2 if the comparison has changed the table, -1 with an error. */
static int is_same(IdleRing *ring, PyObject *known, PyObject *key)
{
    uint64_t version = ring->version;
    Py_INCREF(known);
    int same = PyObject_RichCompareBool(known, key, Py_EQ);
    Py_DECREF(known);
    return same >= 0 && version != ring->version ? 2 : same;
}

/* Store the cell of `key`, or NULL, in *found: 0, or -1 with an error of the comparison. */
static inline int find(IdleRing *ring, PyObject *key, Py_hash_t hash, Cell **found)
{
    size_t at = home_of(ring, hash);
    for (;;) {
        Cell *cell = &ring->cells[at];
        int same = cell->key == key;
        if (UNLIKELY(!same && cell->key && cell->hash == hash)) same = is_same(ring, cell->key, key);
        if (LIKELY(same == 1)) { *found = cell; return 0; }
        if (UNLIKELY(same < 0)) return -1;
        if (same == 0 && cell->key == NULL) { *found = NULL; return 0; }
        at = same == 2 ? home_of(ring, hash) : (at + 1) & ring->mask;
    }
}

static inline int look_up(IdleRing *ring, PyObject *key, Cell **found)
{
    Py_hash_t hash = PyObject_Hash(key);
    return hash == -1 ? -1 : find(ring, key, hash, found);
}

/* Remove a cell, and its entry from the wheel. Releases the key, which may run any code. */
static void remove_cell(IdleRing *ring, Cell *cell)
{
    Cell removed = *cell;
    size_t hole = (size_t)(cell - ring->cells), at = hole;
    while (ring->cells[at = (at + 1) & ring->mask].key) { /* a cell that probing would not reach moves into the hole */
        size_t home = home_of(ring, ring->cells[at].hash);
        if (((at - home) & ring->mask) < ((at - hole) & ring->mask)) continue;
        ring->cells[hole] = ring->cells[at];
        hole = at;
    }
    ring->cells[hole].key = NULL;
    ring->count--;
    ring->version++;
    if (ring->bits > MIN_BITS && ring->count < ring->mask / 8 && resize(ring, ring->bits - 1) < 0) PyErr_Clear();
    PyObject *item = NULL;
    if (IS_PENDING(removed.entry)) {
        item = removed.entry->item;
        wheel_unlink(ring->wheel, removed.entry);
        removed.entry->item = NULL;
        Py_DECREF(removed.entry); /* the wheel's */
    }
    Py_DECREF(removed.entry);
    Py_XDECREF(item);
    Py_DECREF(removed.key);
}

/* Add a key that is not in the table. */
static int add(IdleRing *ring, PyObject *key, Py_hash_t hash, int64_t now)
{
    if (3 * (ring->count + 1) > 2 * (ring->mask + 1) && resize(ring, ring->bits + 1) < 0) return -1;
    if (wheel_turn(ring->wheel, now) < 0) return -1;
    EntryObject *entry = wheel_place(ring->wheel, &Entry_Type, now + ring->timeout, Py_NewRef(key));
    if (entry == NULL) return -1;
    size_t at = home_of(ring, hash);
    while (ring->cells[at].key) at = (at + 1) & ring->mask;
    ring->cells[at] = (Cell){Py_NewRef(key), hash, now + ring->timeout, entry};
    ring->count++;
    ring->added++;
    ring->version++;
    if (ring->armed) return 0;
    PyObject *answer = PyObject_CallMethodNoArgs((PyObject *)ring, str_arm);
    Py_XDECREF(answer);
    return answer ? 0 : -1;
}

/* ---- Methods */

static inline int touch(IdleRing *ring, PyObject *key, Py_hash_t hash, int64_t now)
{
    Cell *cell;
    if (UNLIKELY(find(ring, key, hash, &cell) < 0)) return -1;
    if (UNLIKELY(cell == NULL)) return add(ring, key, hash, now);
    int64_t expiry = now + ring->timeout;
    if (expiry > cell->expiry) cell->expiry = expiry;
    return 0;
}

static PyObject *IdleRing_touch(IdleRing *ring, PyObject *key)
{
    int64_t now;
    Py_hash_t hash = PyObject_Hash(key);
    if (UNLIKELY(hash == -1)) return NULL;
    PREFETCH(&ring->cells[home_of(ring, hash)]); /* it arrives while the clock is read */
    if (read_now(ring, &now) < 0 || touch(ring, key, hash, now) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *IdleRing_touch_many(IdleRing *ring, PyObject *keys)
{
    int64_t now;
    PyObject *each = PyObject_GetIter(keys), *key;
    if (each == NULL) return NULL;
    if (read_now(ring, &now) < 0) { Py_DECREF(each); return NULL; }
    while ((key = PyIter_Next(each)) != NULL) {
        Py_hash_t hash = PyObject_Hash(key);
        int failed = hash == -1 || touch(ring, key, hash, now) < 0;
        Py_DECREF(key);
        if (failed) break;
    }
    Py_DECREF(each);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static PyObject *IdleRing_discard(IdleRing *ring, PyObject *key)
{
    Cell *cell;
    if (look_up(ring, key, &cell) < 0) return NULL;
    if (cell == NULL) Py_RETURN_FALSE;
    remove_cell(ring, cell);
    Py_RETURN_TRUE;
}

static PyObject *IdleRing_last_seen_ns(IdleRing *ring, PyObject *key)
{
    Cell *cell;
    if (look_up(ring, key, &cell) < 0) return NULL;
    if (cell) return PyLong_FromLongLong(cell->expiry - ring->timeout);
    PyObject *error = PyObject_CallOneArg(PyExc_KeyError, key); /* SetObject would unpack a tuple */
    if (error) PyErr_SetObject(PyExc_KeyError, error);
    Py_XDECREF(error);
    return NULL;
}

/* The cell of an entry, or NULL. Keys are not compared; if hashing the key fails, all cells are searched. */
static Cell *cell_of(IdleRing *ring, EntryObject *entry)
{
    PyObject *key = Py_NewRef(entry->item);
    Py_hash_t hash = PyObject_Hash(key);
    if (UNLIKELY(hash == -1)) PyErr_WriteUnraisable(key);
    Py_DECREF(key);
    size_t home = home_of(ring, hash), at = home;
    for (; ring->cells[at].key; at = (at + 1) & ring->mask)
        if (LIKELY(ring->cells[at].entry == entry)) return &ring->cells[at];
    for (at = 0; at <= ring->mask; at++)
        if (ring->cells[at].key && ring->cells[at].entry == entry) return &ring->cells[at];
    return NULL;
}

/* The next due entries are not in the cache: prefetch the key of one, and the cell of one whose key has arrived. */
static void fetch_ahead(IdleRing *ring)
{
    EntryObject *entry = wheel_ahead(ring->wheel, 2 * FETCH_AHEAD / 3);
    if (entry) PREFETCH(entry->item);
    entry = wheel_ahead(ring->wheel, FETCH_AHEAD / 3);
    if (entry && (PyUnicode_CheckExact(entry->item) || PyLong_CheckExact(entry->item))) /* their hash runs no code */
        PREFETCH(&ring->cells[home_of(ring, PyObject_Hash(entry->item))]);
}

/* Move one idle key to `idle`: 1, or 0 if no key is due, or -1 with an error. */
static int expire_one(IdleRing *ring, PyObject *idle)
{
    for (;;) {
        EntryObject *entry = wheel_due(ring->wheel);
        if (entry == NULL) return PyErr_Occurred() ? -1 : 0;
        fetch_ahead(ring);
        Py_INCREF(entry);
        Cell *cell = cell_of(ring, entry);
        Py_DECREF(entry);
        if (cell == NULL) continue; /* computing its hash ran code that discarded it */
        uint64_t deadline = ((uint64_t)cell->expiry + ring->wheel->tick - 1) / ring->wheel->tick;
        if (deadline > ring->wheel->current) { /* touched since it was scheduled */
            if (wheel_move(ring->wheel, cell->entry, cell->expiry) < 0) return -1;
            continue;
        }
        if (PyList_Append(idle, cell->key) < 0) return -1;
        remove_cell(ring, cell);
        return 1;
    }
}

/* Move time to `now` and return the keys that became idle. */
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

static PyObject *IdleRing_get_added(IdleRing *ring, void *Py_UNUSED(closure)) { return PyLong_FromUnsignedLongLong(ring->added); }

static Py_ssize_t IdleRing_length(IdleRing *ring) { return (Py_ssize_t)ring->count; }

static int IdleRing_contains(IdleRing *ring, PyObject *key)
{
    Cell *cell;
    return look_up(ring, key, &cell) < 0 ? -1 : cell != NULL;
}

static int IdleRing_bool(IdleRing *Py_UNUSED(ring)) { return 1; }

static PyObject *IdleRing_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    IdleRing *ring = (IdleRing *)type->tp_alloc(type, 0);
    if (ring == NULL) return NULL;
    ring->clock = Py_NewRef(Py_None);
    ring->wheel = wheel_make(1, 0);
    if (ring->wheel == NULL || resize(ring, MIN_BITS) < 0) { Py_DECREF(ring); return NULL; }
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
    if (ring->count) { PyErr_SetString(PyExc_RuntimeError, "a ring can be initialized only once"); return -1; }
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
    Py_VISIT(ring->clock);
    for (size_t at = 0; ring->count && at <= ring->mask; at++) Py_VISIT(ring->cells[at].key);
    return 0;
}

static int IdleRing_clear(IdleRing *ring)
{
    for (size_t at = 0; ring->count; at++)
        while (ring->count && ring->cells[at & ring->mask].key) remove_cell(ring, &ring->cells[at & ring->mask]);
    return 0; /* the wheel clears itself */
}

static void IdleRing_dealloc(IdleRing *ring)
{
    PyObject_GC_UnTrack(ring);
    if (ring->weakrefs) PyObject_ClearWeakRefs((PyObject *)ring);
    IdleRing_clear(ring);
    Py_CLEAR(ring->wheel);
    Py_CLEAR(ring->clock);
    PyMem_Free(ring->cells);
    Py_TYPE(ring)->tp_free((PyObject *)ring);
}

static PyMethodDef IdleRing_methods[] = {
    {"touch", (PyCFunction)IdleRing_touch, METH_O,
     "touch($self, key, /)\n--\n\nRecord activity of `key` at the current time. O(1): a lookup and a stamp."},
    {"touch_many", (PyCFunction)IdleRing_touch_many, METH_O,
     "touch_many($self, keys, /)\n--\n\nTouch all `keys`, with the same time."},
    {"discard", (PyCFunction)IdleRing_discard, METH_O,
     "discard($self, key, /)\n--\n\nForget `key` without a report; return True if it was known. O(1)."},
    {"_last_seen_ns", (PyCFunction)IdleRing_last_seen_ns, METH_O, NULL},
    {"_expire", (PyCFunction)IdleRing_expire, METH_O, NULL},
    {"_now_ns", (PyCFunction)IdleRing_now_ns, METH_NOARGS, NULL},
    {"_wakeup_ns", (PyCFunction)IdleRing_wakeup_ns, METH_NOARGS, NULL},
    {"_set_armed", (PyCFunction)IdleRing_set_armed, METH_O, NULL},
    {NULL}
};

static PyGetSetDef IdleRing_getset[] = {
    {"_added", (getter)IdleRing_get_added, NULL, NULL},
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
    .tp_doc = "Keys and when each was last touched; see tickwheel.ring.",
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
    .tp_getset = IdleRing_getset,
    .tp_weaklistoffset = offsetof(IdleRing, weakrefs),
};

int idle_exec(PyObject *module)
{
    str_time_ns = PyUnicode_InternFromString("time_ns");
    str_arm = PyUnicode_InternFromString("_arm");
    if (!str_time_ns || !str_arm) return -1;
    return PyModule_AddType(module, &IdleRing_Type);
}
