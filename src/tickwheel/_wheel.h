/* The native wheel's structures, and the functions that _deadlines.c, _idle.c and _purgatory.c call. */
#ifndef TICKWHEEL_WHEEL_H
#define TICKWHEEL_WHEEL_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <assert.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#if defined(__GNUC__) || defined(__clang__)
#define PREFETCH(p) __builtin_prefetch(p)
#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)
#define COUNT_TRAILING_ZEROS(x) __builtin_ctzll(x)
#define HIGHEST_BIT(x) (63 - __builtin_clzll(x))
#else
#define PREFETCH(p) ((void)(p))
#define LIKELY(x) (x)
#define UNLIKELY(x) (x)
static inline int COUNT_TRAILING_ZEROS(uint64_t x) { int n = 0; while (!(x & 1)) { x >>= 1; n++; } return n; }
static inline int HIGHEST_BIT(uint64_t x) { int n = 0; while (x >>= 1) n++; return n; }
#endif

/* The clock of Python's time.monotonic(). On macOS it is not CLOCK_MONOTONIC, which runs during sleep. */
#ifdef __APPLE__
#define MONOTONIC_CLOCK CLOCK_UPTIME_RAW
#else
#define MONOTONIC_CLOCK CLOCK_MONOTONIC
#endif

static inline int64_t system_ns(void)
{
    struct timespec t;
    clock_gettime(MONOTONIC_CLOCK, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

#define FAST(function) (PyCFunction)(void (*)(void))(function), METH_FASTCALL | METH_KEYWORDS

#define MAX_TIME INT64_MAX
#define MAX_SIZE (1 << 24)
#define MAX_LEVELS 64 /* of `sizes`; a wheel on demand needs at most 63, so the array `levels` needs no check */
#define DEFAULT_SIZE 64
#define NEVER UINT64_MAX
#define FETCH_AHEAD 12

/* Where an entry is: a level number (1 .. 64) in the high byte, the slot below it; or one of these. */
#define OUTSIDE 0u            /* in the overflow buffer */
#define BACKLOG (0xFDu << 24) /* due, but left by a `limit` */
#define LATE (0xFEu << 24)    /* overdue when it was scheduled; on a RoundsWheel: due */
#define NOWHERE (0xFFu << 24) /* not pending; a Handle keeps its state in the low bits */
#define IS_PENDING(e) ((e)->place < NOWHERE)
#define IS_ON_LEVEL(place) ((place) < BACKLOG && (place) != OUTSIDE)
#define PLACE(level, slot) ((uint32_t)(level) << 24 | (uint32_t)(slot))

typedef struct WheelObject WheelObject;

/* Shared by a wheel and all its entries; freed with the last of them. */
typedef struct {
    Py_ssize_t refs;
    WheelObject *wheel; /* NULL after the wheel was freed */
} Owner;

typedef struct {
    PyObject_HEAD
    PyObject *item; /* NULL when not pending */
    int64_t expiry;
    uint64_t serial;
    Owner *owner;
    PyObject *weakrefs;
    uint32_t place;
    uint32_t position; /* cell number + the bucket's base, modulo 2^32 */
} EntryObject;

typedef struct {
    EntryObject **cells; /* used from head to tail; NULL is a hole */
    uint32_t base;
    uint32_t capacity;
    uint32_t head;
    uint32_t tail;
    uint32_t live;
} Bucket;

/* A set of slots: 64 per word, and layers above that mark the words that are not zero. */
typedef struct {
    int layers;
    uint32_t counts[4];
    uint64_t *words[4];
} Occupancy;

typedef struct {
    uint64_t unit;     /* the level's tick, in ticks of level 1 */
    uint64_t interval; /* UINT64_MAX when it exceeds every time */
    uint64_t index;    /* spans passed since time 0; the pointer is index % size */
    uint32_t size;
    uint32_t pointer;
    int unit_shift; /* log2 of unit, or -1 */
    uint32_t mask;  /* size - 1 when size is a power of two, else 0 */
    Occupancy occupied;
    Bucket *buckets;
} Level;

typedef enum { WHEEL, SIMPLE, ROUNDS } Kind;

struct WheelObject {
    PyObject_HEAD
    Kind kind;
    char is_bounded, pushed, busy, late_sorted, hand_over_known;
    int level_count;
    int size_shift; /* levels on demand with a power of two: log2 of size, else 0 */
    uint8_t level_of_bit[64];
    uint64_t tick;
    int64_t now;
    uint64_t current; /* in ticks */
    uint64_t serial;
    uint64_t visits;
    uint64_t wasted;
    Py_ssize_t count;
    Owner *owner;
    void *driver; /* the Deadlines that own this wheel, or NULL */
    PyObject *overflow; /* or NULL */
    uint64_t next_hand_over;
    int64_t handed_over_at;
    Bucket late;
    Bucket backlog; /* in order */
    Bucket outside;
    PyObject *weakrefs;
    Level *levels[MAX_LEVELS];
};

/* A callback with its arguments: the item of a Handle that has any. */
typedef struct {
    PyObject_VAR_HEAD
    PyObject *parts[1]; /* the callback first */
} CallObject;

/* The deadline of a purgatory's operation: the item of its Handle. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *operation;
} ExpiryObject;

extern PyTypeObject Entry_Type, Wheel_Type, Handle_Type, Call_Type, Deadlines_Type, Expiry_Type;
extern PyObject *OutOfRange, *TimerClosed;

/* Create a wheel that adds levels on demand. */
WheelObject *wheel_make(int64_t tick, int64_t start);

/* Schedule a new entry of `type`: a new reference, or NULL with an error. Steals `item` in both cases. */
EntryObject *wheel_place(WheelObject *w, PyTypeObject *type, int64_t expiry, PyObject *item);

/* Remove a pending entry; the wheel's reference to it passes to the caller. */
void wheel_unlink(WheelObject *w, EntryObject *e);

/* Move a pending entry, as if newly scheduled. 0 or -1. */
int wheel_move(WheelObject *w, EntryObject *e, int64_t expiry);

/* Move time towards `now`, which must not be before the wheel's, and stop where an entry is due. 0 or -1. */
int wheel_turn(WheelObject *w, int64_t now);

/* The next due entry after wheel_turn, borrowed; NULL if none is due, or with an error. */
EntryObject *wheel_due(WheelObject *w);

/* The entry `n` cells after that one, borrowed, or NULL: for prefetching. */
EntryObject *wheel_ahead(WheelObject *w, uint32_t n);

/* Any pending entry, borrowed, or NULL. */
EntryObject *wheel_any(WheelObject *w);

/* The time at which the next bucket is due, or -1 if no entry is pending. */
int64_t wheel_wakeup(WheelObject *w);

void entry_dealloc(EntryObject *e);

/* Store positional and keyword arguments in `out`, NULL for omitted ones. 0 or -1. */
int bind_arguments(const char *function, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
                   const char *const *names, Py_ssize_t n, Py_ssize_t required, PyObject **out);

/* Raise `type` with a message, as PyErr_Format does, but if a repr in it fails, raise that error. Before
 * Python 3.11.3, PyErr_Format raises `type` without a message in that case. Returns NULL. */
PyObject *refuse(PyObject *type, const char *format, ...);

/* Convert seconds to the nearest nanosecond; a value below 0 stays below 0. 0 or -1. */
int as_ns(const char *name, PyObject *value, int64_t *ns);

/* Cancel a handle; 1 if it was pending, else 0. */
int handle_cancel(EntryObject *handle);

int deadlines_exec(PyObject *module);
int idle_exec(PyObject *module);
int purgatory_exec(PyObject *module);

#endif
