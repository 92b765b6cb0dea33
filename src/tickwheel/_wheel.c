/* The wheels of wheel.py and rounds.py, native: the same behaviour, to the last detail.
 *
 * The essay is in wheel.py. What differs is only how it lies in memory:
 *
 * - One object of 64 bytes per entry, in one cache line, from arenas of its own (see "Arenas").
 * - A bucket is an array of pointers, not a linked list, so that a visit can fetch ahead. An entry
 *   knows its position; cancelling leaves a hole, and holes keep the order. Cascades prepend, so the
 *   array grows at both ends. Positions are logical: sliding the array moves `base`, not entries.
 * - Entries are unknown to the cyclic collector. The wheel owns them and their items, and its
 *   tp_traverse visits the items, so cycles through a wheel are found without tracking a million objects.
 *   For this an entry must not keep its wheel alive: it points to a shared Owner, which the wheel
 *   clears when it goes.
 *
 * No clock, no threads, no policy. Everything runs under the GIL; arbitrary Python code can run only
 * where an object is released, an overflow buffer is called, or an argument is converted, and at
 * those places the wheel is whole.
 */
#include "_wheel.h"

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#endif

static PyTypeObject SimpleWheel_Type, RoundsWheel_Type;
PyObject *OutOfRange, *TimerClosed;
static PyObject *TimeWentBack, *WheelBusy;
static PyObject *str_put, *str_take, *str_discard, *str_next_expiry, *str_bit_length;

/* ---- Arenas: 64-byte entries on 64-byte boundaries, so that touching one costs one cache miss.
 *
 * An arena is 2 MiB at a multiple of 2 MiB: a header, a stack of the cells that were freed, the cells. The
 * stack is apart from the cells, so that those whose turn comes next can be fetched ahead. Arenas with
 * room form a list whose head is the one freed into last: what was just freed is warm, and is used next. An
 * arena that falls empty goes back to the system, except a few, kept so that a wheel whose size swings
 * does not map and unmap for ever.
 */

#if (defined(__unix__) || defined(__APPLE__)) && !defined(__SANITIZE_ADDRESS__) && UINTPTR_MAX > UINT32_MAX
#define ARENA_BYTES ((size_t)1 << 21)
#define ARENA_CELLS_AT 65536
#define ARENA_CELLS ((ARENA_BYTES - ARENA_CELLS_AT) / 64)
#define SPARE_ARENAS 4
#define SMALL_ARENAS 4 /* from here on huge pages are asked for: fewer faults, fewer TLB misses */

typedef struct Arena {
    struct Arena *before, *after;
    uint32_t live;
    uint32_t fresh; /* cells from here on were never used */
    uint32_t freed_count;
    uint16_t freed[ARENA_CELLS];
} Arena;

static_assert(sizeof(Arena) <= ARENA_CELLS_AT && ARENA_CELLS <= 65536, "an arena's header fits");
static_assert(sizeof(EntryObject) <= 64, "an entry fits its cell");

static Arena *arenas;
static size_t arena_count, empty_arenas;

static inline Arena *arena_of(void *p) { return (Arena *)((uintptr_t)p & ~(ARENA_BYTES - 1)); }

static inline char *arena_cell(Arena *a, size_t i) { return (char *)a + ARENA_CELLS_AT + 64 * i; }

static void arena_unlink(Arena *a)
{
    if (a->before) a->before->after = a->after; else arenas = a->after;
    if (a->after) a->after->before = a->before;
}

static void arena_link(Arena *a)
{
    a->before = NULL;
    a->after = arenas;
    if (arenas) arenas->before = a;
    arenas = a;
}

static Arena *arena_new(void)
{
    size_t both = 2 * ARENA_BYTES;
    char *raw = mmap(NULL, both, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) return NULL;
    char *start = (char *)(((uintptr_t)raw + ARENA_BYTES - 1) & ~(ARENA_BYTES - 1));
    if (start > raw) munmap(raw, (size_t)(start - raw));
    if (start + ARENA_BYTES < raw + both)
        munmap(start + ARENA_BYTES, (size_t)(raw + both - start) - ARENA_BYTES);
#ifdef MADV_HUGEPAGE
    if (arena_count >= SMALL_ARENAS) (void)madvise(start, ARENA_BYTES, MADV_HUGEPAGE);
#endif
    Arena *a = (Arena *)start; /* the system gives zeroed pages */
    arena_count++;
    empty_arenas++;
    arena_link(a);
    return a;
}

static void *arena_fresh(Arena *a)
{
    char *cell = arena_cell(a, a->fresh);
#ifdef MADV_POPULATE_WRITE
    /* 64 KiB at a time: a page fault for every 64 entries would cost more than the entries do. */
    if (a->fresh % 1024 == 0) (void)madvise(cell, 65536, MADV_POPULATE_WRITE);
#endif
    a->fresh++;
    return cell;
}

static inline void *entry_alloc(void)
{
    Arena *a = arenas;
    if (UNLIKELY(a == NULL) && (a = arena_new()) == NULL) return NULL;
    void *p;
    if (a->freed_count) {
        p = arena_cell(a, a->freed[--a->freed_count]);
        if (a->freed_count >= FETCH_AHEAD) PREFETCH(arena_cell(a, a->freed[a->freed_count - FETCH_AHEAD]));
    }
    else p = arena_fresh(a);
    if (a->live++ == 0) empty_arenas--;
    if (UNLIKELY(a->live == ARENA_CELLS)) arena_unlink(a);
    return p;
}

static void entry_free(void *p)
{
    Arena *a = arena_of(p);
    int was_full = a->live == ARENA_CELLS;
    a->freed[a->freed_count++] = (uint16_t)(((char *)p - arena_cell(a, 0)) / 64);
    if (UNLIKELY(--a->live == 0)) {
        if (empty_arenas >= SPARE_ARENAS) {
            if (!was_full) arena_unlink(a);
            arena_count--;
            munmap(a, ARENA_BYTES);
            return;
        }
        empty_arenas++;
    }
    if (was_full) arena_link(a);
    else if (arenas != a) { arena_unlink(a); arena_link(a); }
}
#else
static void *entry_alloc(void) { return PyObject_Malloc(sizeof(EntryObject)); }
static void entry_free(void *p) { PyObject_Free(p); }
#endif

/* ---- Occupancy */

static int occupancy_init(Occupancy *o, uint32_t size)
{
    uint32_t total = 0, n = size;
    o->layers = 0;
    do {
        n = (n + 63) / 64;
        o->counts[o->layers++] = n;
        total += n;
    } while (n > 1);
    uint64_t *words = PyMem_Calloc(total, sizeof(uint64_t));
    if (words == NULL) return -1;
    for (int i = 0; i < o->layers; i++) { o->words[i] = words; words += o->counts[i]; }
    return 0;
}

static inline int occupancy_has(const Occupancy *o, uint32_t slot)
{
    return (int)(o->words[0][slot >> 6] >> (slot & 63) & 1);
}

static inline void occupancy_add(Occupancy *o, uint32_t slot)
{
    for (int i = 0; i < o->layers; i++) {
        uint64_t *word = &o->words[i][slot >> 6], before = *word;
        *word = before | (uint64_t)1 << (slot & 63);
        if (before) return;
        slot >>= 6;
    }
}

static inline void occupancy_remove(Occupancy *o, uint32_t slot)
{
    for (int i = 0; i < o->layers; i++) {
        uint64_t *word = &o->words[i][slot >> 6];
        *word &= ~((uint64_t)1 << (slot & 63));
        if (*word) return;
        slot >>= 6;
    }
}

/* The smallest member from `start` on, or -1. */
static int64_t occupancy_first(const Occupancy *o, uint32_t start)
{
    for (int i = 0; i < o->layers; i++) {
        uint32_t word = start >> 6;
        if (word >= o->counts[i]) return -1;
        uint64_t bits = o->words[i][word] & (~(uint64_t)0 << (start & 63));
        if (bits) {
            uint64_t at = (uint64_t)word * 64 + COUNT_TRAILING_ZEROS(bits);
            while (i-- > 0) at = at * 64 + COUNT_TRAILING_ZEROS(o->words[i][at]);
            return (int64_t)at;
        }
        start = word + 1;
    }
    return -1;
}

static inline int occupancy_any(const Occupancy *o) { return o->words[o->layers - 1][0] != 0; }

/* ---- Buckets */

#define SMALLEST_CAPACITY 8u
#define LARGEST_CAPACITY (1u << 30)
#define KEPT_CAPACITY 256u /* an emptied bucket keeps this much memory, no more */

static int bucket_resize(Bucket *b, uint32_t capacity, uint32_t head)
{
    if (capacity > LARGEST_CAPACITY) { PyErr_NoMemory(); return -1; }
    EntryObject **cells = PyMem_Malloc(capacity * sizeof(*cells));
    if (cells == NULL) { PyErr_NoMemory(); return -1; }
    uint32_t used = b->tail - b->head;
    if (used) memcpy(cells + head, b->cells + b->head, used * sizeof(*cells));
    PyMem_Free(b->cells);
    b->cells = cells;
    b->base += b->head - head;
    b->capacity = capacity;
    b->head = head;
    b->tail = head + used;
    return 0;
}

static void bucket_slide(Bucket *b, uint32_t head)
{
    uint32_t used = b->tail - b->head;
    memmove(b->cells + head, b->cells + b->head, used * sizeof(*b->cells));
    b->base += b->head - head;
    b->head = head;
    b->tail = head + used;
}

/* Close the holes. Every entry gets a new position; O(live), paid for by the holes. */
static void bucket_compact(Bucket *b)
{
    EntryObject **cells = b->cells;
    uint32_t to = b->head;
    for (uint32_t i = b->head; i < b->tail; i++) {
        if (i + FETCH_AHEAD < b->tail) PREFETCH(cells[i + FETCH_AHEAD]);
        if (cells[i] == NULL) continue;
        cells[to] = cells[i];
        cells[to]->position = to + b->base;
        to++;
    }
    b->tail = to;
}

static inline uint32_t bucket_grown(const Bucket *b) { return b->capacity + b->capacity / 2 + SMALLEST_CAPACITY; }

static int bucket_make_room(Bucket *b, int in_front)
{
    uint32_t used = b->tail - b->head;
    if (used - b->live > used / 2) { bucket_compact(b); used = b->live; }
    if (b->capacity && used <= b->capacity / 4 * 3) {
        uint32_t room = b->capacity - used;
        bucket_slide(b, in_front ? room - room / 4 : room / 4);
        return 0;
    }
    uint32_t capacity = bucket_grown(b), room = capacity - used;
    return bucket_resize(b, capacity, in_front ? room - room / 4 : (b->head ? room / 8 : 0));
}

static inline int bucket_reserve(Bucket *b, int in_front)
{
    if (b->live == 0) {
        b->base = 0;
        b->head = b->tail = in_front ? b->capacity : 0;
    }
    if (LIKELY(in_front ? b->head > 0 : b->tail < b->capacity)) return 0;
    return bucket_make_room(b, in_front);
}

/* The room must have been reserved. */
static inline void bucket_put(Bucket *b, EntryObject *e, uint32_t place, int in_front)
{
    uint32_t cell = in_front ? --b->head : b->tail++;
    b->cells[cell] = e;
    b->live++;
    e->place = place;
    e->position = cell + b->base;
}

static void bucket_emptied(Bucket *b)
{
    if (b->capacity > KEPT_CAPACITY) {
        PyMem_Free(b->cells);
        b->cells = NULL;
        b->capacity = 0;
    }
    b->head = b->tail = 0;
    b->base = 0;
}

/* Take `e` out, leaving a hole; give memory back when most of it is holes. */
static inline void bucket_remove(Bucket *b, EntryObject *e)
{
    uint32_t cell = e->position - b->base;
    b->cells[cell] = NULL;
    e->place = NOWHERE;
    if (--b->live == 0) { bucket_emptied(b); return; }
    if (cell == b->tail - 1) { do b->tail--; while (b->cells[b->tail - 1] == NULL); }
    else if (cell == b->head) { do b->head++; while (b->cells[b->head] == NULL); }
    uint32_t used = b->tail - b->head;
    if (UNLIKELY(used > KEPT_CAPACITY && b->live < used / 4)) {
        bucket_compact(b);
        if (bucket_resize(b, b->live + b->live / 2 + SMALLEST_CAPACITY, 0) < 0) PyErr_Clear();
    }
}

/* ---- Levels */

static inline uint64_t level_span(const Level *level, uint64_t tick)
{
    return level->unit_shift >= 0 ? tick >> level->unit_shift : tick / level->unit;
}

static inline uint32_t level_slot(const Level *level, uint64_t span)
{
    return level->mask ? (uint32_t)span & level->mask : (uint32_t)(span % level->size);
}

static void level_free(Level *level)
{
    for (uint32_t i = 0; level->buckets && i < level->size; i++) PyMem_Free(level->buckets[i].cells);
    PyMem_RawFree(level->buckets);
    PyMem_Free(level->occupied.words[0]);
    PyMem_Free(level);
}

static Level *add_level(WheelObject *w, uint32_t size)
{
    Level *level = PyMem_Calloc(1, sizeof(Level));
    if (level == NULL) { PyErr_NoMemory(); return NULL; }
    level->unit = w->level_count ? w->levels[w->level_count - 1]->interval : 1;
    level->interval = level->unit > (uint64_t)MAX_TIME / size ? UINT64_MAX : level->unit * size;
    level->size = size;
    level->mask = size & (size - 1) ? 0 : size - 1;
    level->unit_shift = level->unit & (level->unit - 1) ? -1 : HIGHEST_BIT(level->unit);
    level->index = level_span(level, w->current);
    level->pointer = level_slot(level, level->index);
    /* Raw, so that the pages of a large wheel come zeroed from the system and only when used. */
    level->buckets = PyMem_RawCalloc(size, sizeof(Bucket));
    if (level->buckets == NULL || occupancy_init(&level->occupied, size) < 0) {
        level_free(level);
        PyErr_NoMemory();
        return NULL;
    }
    w->levels[w->level_count++] = level;
    return level;
}

static Level *make_levels(WheelObject *w, uint64_t left)
{
    Level *level = w->levels[w->level_count - 1];
    while (left >= level->interval)
        if ((level = add_level(w, level->size)) == NULL) return NULL;
    return level;
}

/* The lowest level whose interval exceeds `left`; NULL with an error when memory ran out. */
static inline Level *level_for(WheelObject *w, uint64_t left, int *number)
{
    int n;
    if (w->size_shift) {
        n = left ? w->level_of_bit[HIGHEST_BIT(left)] : 0;
        *number = n + 1;
        if (LIKELY(n < w->level_count)) return w->levels[n];
    }
    else {
        for (n = 0; n < w->level_count; n++)
            if (left < w->levels[n]->interval) { *number = n + 1; return w->levels[n]; }
    }
    Level *level = make_levels(w, left);
    *number = w->level_count;
    return level;
}

/* Slots to the next occupied one, 1 .. size; 0 for none. */
static inline uint32_t level_ahead(const Level *level)
{
    if (!occupancy_any(&level->occupied)) return 0;
    int64_t slot = occupancy_first(&level->occupied, level->pointer + 1);
    if (slot < 0) slot = occupancy_first(&level->occupied, 0) + level->size;
    return (uint32_t)(slot - level->pointer);
}

static inline Bucket *bucket_at(WheelObject *w, uint32_t place)
{
    if (place == LATE) return &w->late;
    if (place == REST) return &w->rest;
    if (place == OUTSIDE) return &w->outside;
    return &w->levels[(place >> 24) - 1]->buckets[place & 0xFFFFFF];
}

static inline uint64_t deadline_of(const WheelObject *w, int64_t expiry)
{
    return w->tick == 1 ? (uint64_t)expiry : ((uint64_t)expiry + w->tick - 1) / w->tick;
}

static inline int fits(const WheelObject *w, uint64_t deadline)
{
    return !w->is_bounded || deadline <= w->current
        || deadline - w->current < w->levels[w->level_count - 1]->interval;
}

/* The bucket for a deadline that fits, with room for one more; NULL with an error. */
static inline Bucket *bucket_for(WheelObject *w, uint64_t deadline, int in_front, uint32_t *place)
{
    Bucket *b;
    if (UNLIKELY(deadline < w->current || (w->kind == ROUNDS && deadline == w->current))) {
        *place = LATE;
        b = &w->late;
        in_front = 0; /* it is sorted before it fires */
    }
    else {
        int number = 1;
        Level *level = w->kind == ROUNDS ? w->levels[0] : level_for(w, deadline - w->current, &number);
        if (UNLIKELY(level == NULL)) return NULL;
        uint32_t slot = level_slot(level, level_span(level, deadline));
        *place = PLACE(number, slot);
        b = &level->buckets[slot];
    }
    return bucket_reserve(b, in_front) < 0 ? NULL : b;
}

static inline void put(WheelObject *w, Bucket *b, EntryObject *e, uint32_t place, int in_front)
{
    if (UNLIKELY(place == LATE)) {
        w->late_sorted = b->live == 0;
        in_front = 0;
    }
    else if (b->live == 0)
        occupancy_add(&w->levels[(place >> 24) - 1]->occupied, place & 0xFFFFFF);
    bucket_put(b, e, place, in_front);
}

static inline void unlink_entry(WheelObject *w, EntryObject *e)
{
    uint32_t place = e->place;
    Bucket *b = bucket_at(w, place);
    bucket_remove(b, e);
    if (b->live == 0 && IS_ON_LEVEL(place))
        occupancy_remove(&w->levels[(place >> 24) - 1]->occupied, place & 0xFFFFFF);
}

/* Order by deadline, then serial: a merge sort of cells. tick 0 orders by serial alone. */
static inline int comes_first(const EntryObject *a, const EntryObject *b, uint64_t tick)
{
    if (tick) {
        uint64_t da = ((uint64_t)a->expiry + tick - 1) / tick, db = ((uint64_t)b->expiry + tick - 1) / tick;
        if (da != db) return da < db;
    }
    return a->serial < b->serial;
}

static int sort_entries(EntryObject **cells, size_t n, uint64_t tick)
{
    size_t i = 1;
    while (i < n && comes_first(cells[i - 1], cells[i], tick)) i++;
    if (i >= n) return 0;
    EntryObject **other = PyMem_Malloc(n * sizeof(*other)), **from = cells, **to = other;
    if (other == NULL) { PyErr_NoMemory(); return -1; }
    for (size_t width = 1; width < n; width *= 2) {
        for (size_t low = 0; low < n; low += 2 * width) {
            size_t a = low, mid = low + width < n ? low + width : n, b = mid;
            size_t high = low + 2 * width < n ? low + 2 * width : n;
            for (size_t k = low; k < high; k++)
                to[k] = a < mid && (b >= high || comes_first(from[a], from[b], tick)) ? from[a++] : from[b++];
        }
        EntryObject **swap = from; from = to; to = swap;
    }
    if (from != cells) memcpy(cells, from, n * sizeof(*cells));
    PyMem_Free(other);
    return 0;
}

static int sort_late(WheelObject *w)
{
    Bucket *b = &w->late;
    bucket_compact(b);
    if (sort_entries(b->cells + b->head, b->live, w->tick) < 0) return -1;
    for (uint32_t i = b->head; i < b->tail; i++) b->cells[i]->position = i + b->base;
    w->late_sorted = 1;
    return 0;
}

/* ---- Arguments and their errors, word for word as in entry.py */

PyObject *refuse(PyObject *type, const char *format, ...)
{
    va_list parts;
    va_start(parts, format);
    PyObject *text = PyUnicode_FromFormatV(format, parts);
    va_end(parts);
    if (text == NULL) return NULL;
    PyErr_SetObject(type, text);
    Py_DECREF(text);
    return NULL;
}

static PyObject *as_int(const char *name, PyObject *value)
{
    if (PyLong_Check(value) && !PyBool_Check(value)) return Py_NewRef(value);
    if (!PyBool_Check(value) && PyIndex_Check(value)) return PyNumber_Index(value);
    PyObject *type = PyType_GetName(Py_TYPE(value));
    if (type) refuse(PyExc_TypeError, "%s must be an int, got %.100R (%U)", name, value, type);
    Py_XDECREF(type);
    return NULL;
}

static PyObject *shown(PyObject *number)
{
    PyObject *bits = PyObject_CallMethodNoArgs(number, str_bit_length);
    if (bits == NULL) return NULL;
    long long n = PyLong_AsLongLong(bits);
    Py_DECREF(bits);
    if (n < 0 && PyErr_Occurred()) return NULL;
    return n <= 128 ? PyObject_Str(number) : PyUnicode_FromFormat("an int of %lld bits", n);
}

static void refuse_number(PyObject *type, const char *name, int64_t low, int64_t high, PyObject *number)
{
    PyObject *text = shown(number);
    if (text == NULL) return;
    PyErr_Format(type, "%s must be from %lld to %lld, got %U", name, (long long)low, (long long)high, text);
    Py_DECREF(text);
}

static int as_number(PyObject *error, const char *name, PyObject *value, int64_t low, int64_t high, int64_t *out)
{
    PyObject *number = as_int(name, value);
    if (number == NULL) return -1;
    int overflow;
    long long n = PyLong_AsLongLongAndOverflow(number, &overflow);
    if (n == -1 && !overflow && PyErr_Occurred()) { Py_DECREF(number); return -1; }
    if (overflow || n < low || n > high) {
        refuse_number(error, name, low, high, number);
        Py_DECREF(number);
        return -1;
    }
    Py_DECREF(number);
    *out = n;
    return 0;
}

static inline int as_time(const char *name, PyObject *value, int64_t *out)
{
    if (LIKELY(PyLong_CheckExact(value))) {
        int overflow;
        long long n = PyLong_AsLongLongAndOverflow(value, &overflow);
        if (LIKELY(!overflow && n >= 0)) { *out = n; return 0; }
    }
    return as_number(OutOfRange, name, value, 0, MAX_TIME, out);
}

static int as_limit(PyObject *value, Py_ssize_t *room)
{
    *room = PY_SSIZE_T_MAX;
    if (value == NULL || value == Py_None) return 0;
    PyObject *number = as_int("limit", value);
    if (number == NULL) return -1;
    int overflow;
    long long n = PyLong_AsLongLongAndOverflow(number, &overflow);
    if (overflow < 0 || (!overflow && n < 1)) {
        PyObject *text = shown(number);
        if (text) PyErr_Format(PyExc_ValueError, "limit must be at least 1, got %U", text);
        Py_XDECREF(text);
        Py_DECREF(number);
        return -1;
    }
    Py_DECREF(number);
    if (!overflow && n < PY_SSIZE_T_MAX) *room = (Py_ssize_t)n;
    return 0;
}

/* Positional and keyword arguments of a vectorcall into out[]; the first `required` must be there. */
int bind_arguments(const char *function, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
                   const char *const *names, Py_ssize_t n, Py_ssize_t required, PyObject **out)
{
    if (nargs > n) {
        PyErr_Format(PyExc_TypeError, "%s() takes at most %zd arguments (%zd given)", function, n, nargs);
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) out[i] = i < nargs ? args[i] : NULL;
    Py_ssize_t given = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
    for (Py_ssize_t k = 0; k < given; k++) {
        PyObject *key = PyTuple_GET_ITEM(kwnames, k);
        Py_ssize_t i = 0;
        while (i < n && PyUnicode_CompareWithASCIIString(key, names[i]) != 0) i++;
        if (i == n) {
            PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument '%U'", function, key);
            return -1;
        }
        if (out[i]) {
            PyErr_Format(PyExc_TypeError, "%s() got multiple values for argument '%U'", function, key);
            return -1;
        }
        out[i] = args[nargs + k];
    }
    for (Py_ssize_t i = 0; i < required; i++)
        if (out[i] == NULL) {
            PyErr_Format(PyExc_TypeError, "%s() missing required argument '%s'", function, names[i]);
            return -1;
        }
    return 0;
}

/* 0 when `object` is an entry of this wheel. */
static int claim(WheelObject *w, PyObject *object)
{
    if (!Py_IS_TYPE(object, &Entry_Type)) {
        PyObject *type = PyType_GetName(Py_TYPE(object));
        if (type) refuse(PyExc_TypeError, "expected an Entry, got %.100R (%U)", object, type);
        Py_XDECREF(type);
        return -1;
    }
    if (((EntryObject *)object)->owner != w->owner) {
        refuse(PyExc_ValueError, "%R belongs to another wheel", object);
        return -1;
    }
    return 0;
}

static int admit(WheelObject *w, int64_t expiry)
{
    if (LIKELY(w->overflow || fits(w, deadline_of(w, expiry)))) return 0;
    PyObject *last = PyLong_FromUnsignedLongLong(w->current + w->levels[w->level_count - 1]->interval - 1);
    PyObject *tick = PyLong_FromUnsignedLongLong(w->tick);
    PyObject *time = last && tick ? PyNumber_Multiply(last, tick) : NULL;
    if (time)
        PyErr_Format(OutOfRange, "expiry %lld is out of range: at %lld this wheel holds up to %S",
                     (long long)expiry, (long long)w->now, time);
    Py_XDECREF(last);
    Py_XDECREF(tick);
    Py_XDECREF(time);
    return -1;
}

/* ---- The overflow buffer. While it runs, `advance` is refused. The collector may have cleared it: then nobody answers. */

static PyObject *ask(WheelObject *w, PyObject *verb, PyObject *argument)
{
    if (UNLIKELY(w->overflow == NULL)) return PyTuple_New(0);
    char busy = w->busy;
    w->busy = 1;
    w->hand_over_known = 0;
    PyObject *overflow = Py_NewRef(w->overflow);
    PyObject *answer = PyObject_CallMethodOneArg(overflow, verb, argument);
    Py_DECREF(overflow);
    w->busy = busy;
    return answer;
}

static int tell(WheelObject *w, PyObject *verb, EntryObject *e)
{
    PyObject *answer = ask(w, verb, (PyObject *)e);
    if (answer == NULL) return -1;
    Py_DECREF(answer);
    return 0;
}

/* The buffer's smallest expiry into *expiry; 0 when it has none, -1 with an error. */
static int smallest_outside(WheelObject *w, int64_t *expiry)
{
    if (UNLIKELY(w->overflow == NULL)) return 0;
    PyObject *overflow = Py_NewRef(w->overflow);
    PyObject *answer = PyObject_CallMethodNoArgs(overflow, str_next_expiry);
    Py_DECREF(overflow);
    if (answer == NULL) return -1;
    int found = answer != Py_None;
    if (found && as_time("next_expiry()", answer, expiry) < 0) found = -1;
    Py_DECREF(answer);
    return found;
}

static int hand_over_at(WheelObject *w, uint64_t *tick)
{
    if (!w->hand_over_known) {
        int64_t smallest;
        int found = smallest_outside(w, &smallest);
        if (found < 0) return -1;
        if (!found) { *tick = NEVER; return 0; }
        const Level *top = w->levels[w->level_count - 1];
        uint64_t deadline = deadline_of(w, smallest);
        uint64_t from = deadline >= top->interval ? deadline - top->interval + 1 : 0;
        if (from < w->current) from = w->current;
        uint64_t turn = (from + top->unit - 1) / top->unit * top->unit;
        if (w->handed_over_at >= 0 && turn <= (uint64_t)w->handed_over_at)
            turn = (uint64_t)w->handed_over_at + top->unit;
        w->next_hand_over = turn;
        w->hand_over_known = 1;
    }
    *tick = w->next_hand_over;
    return 0;
}

/* ---- Entries */

static inline EntryObject *new_entry(WheelObject *w, PyTypeObject *type, int64_t expiry, PyObject *item)
{
    EntryObject *e = entry_alloc();
    if (UNLIKELY(e == NULL)) { PyErr_NoMemory(); return NULL; }
#if defined(Py_REF_DEBUG) || defined(Py_TRACE_REFS)
    (void)PyObject_Init((PyObject *)e, type);
#else
    Py_SET_TYPE((PyObject *)e, type); /* a static type: it is not counted */
    Py_SET_REFCNT((PyObject *)e, 1);
#endif
    e->item = Py_NewRef(item);
    e->expiry = expiry;
    e->serial = w->serial++;
    e->owner = w->owner;
    e->owner->refs++;
    e->weakrefs = NULL;
    e->place = NOWHERE;
    return e;
}

static void owner_release(Owner *owner)
{
    if (--owner->refs == 0) PyMem_Free(owner);
}

void entry_dealloc(EntryObject *e)
{
    if (e->weakrefs) PyObject_ClearWeakRefs((PyObject *)e);
    owner_release(e->owner);
    Py_XDECREF(e->item); /* only when placing it failed */
    entry_free(e);
}

/* `e` was taken off its bucket: let go of it and of its item. May run any code. */
static void let_go(EntryObject *e)
{
    PyObject *item = e->item;
    e->item = NULL;
    Py_DECREF(e);
    Py_DECREF(item);
}

/* Put a new entry into the overflow buffer. 0 or -1; the wheel takes a reference of its own. */
static int put_outside(WheelObject *w, EntryObject *e)
{
    if (bucket_reserve(&w->outside, 0) < 0) return -1;
    Py_INCREF(e);
    bucket_put(&w->outside, e, OUTSIDE, 0);
    w->count++;
    if (tell(w, str_put, e) == 0) return 0;
    if (e->place == OUTSIDE) {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        bucket_remove(&w->outside, e);
        w->count--;
        let_go(e);
        PyErr_Restore(type, value, traceback);
    }
    return -1;
}

static inline EntryObject *schedule(WheelObject *w, PyTypeObject *type, int64_t expiry, PyObject *item)
{
    uint64_t deadline = deadline_of(w, expiry);
    if (UNLIKELY(!fits(w, deadline))) {
        EntryObject *e = new_entry(w, type, expiry, item);
        if (e != NULL && put_outside(w, e) < 0) Py_CLEAR(e);
        return e;
    }
    uint32_t place;
    Bucket *b = bucket_for(w, deadline, 0, &place);
    if (UNLIKELY(b == NULL)) return NULL;
    EntryObject *e = new_entry(w, type, expiry, item);
    if (UNLIKELY(e == NULL)) return NULL;
    Py_INCREF(e);
    put(w, b, e, place, 0);
    w->count++;
    return e;
}

static void take_off(WheelObject *w, EntryObject *e)
{
    unlink_entry(w, e);
    w->count--;
    let_go(e);
}

/* 1 when this call took `e` off, 0 when the buffer did, -1 with an error. */
static int cancel_outside(WheelObject *w, EntryObject *e)
{
    Py_INCREF(w); /* the overflow buffer may drop the last reference */
    int won = tell(w, str_discard, e) < 0 ? -1 : e->place == OUTSIDE;
    if (won > 0) take_off(w, e);
    Py_DECREF(w);
    return won;
}

/* 1 when this call took `e` off, 0 when it was not pending, -1 with an error. */
static int cancel(EntryObject *e)
{
    WheelObject *w = e->owner->wheel;
    if (!IS_PENDING(e) || w == NULL) return 0;
    if (UNLIKELY(e->place == OUTSIDE)) return cancel_outside(w, e);
    take_off(w, e);
    return 1;
}

static void place_again(WheelObject *w, EntryObject *e, Bucket *b, uint32_t place, int64_t expiry)
{
    if (e->place == place) { /* within one bucket: the new cell first, so that it never falls empty */
        uint32_t cell = e->position - b->base;
        bucket_put(b, e, place, 0);
        b->cells[cell] = NULL;
        b->live--;
        if (place == LATE) w->late_sorted = 0;
    }
    else {
        unlink_entry(w, e);
        put(w, b, e, place, 0);
    }
    e->expiry = expiry;
    e->serial = w->serial++;
}

/* Reschedule into the overflow buffer; when that fails, nothing has changed. */
static int move_outside(WheelObject *w, EntryObject *e, int64_t expiry)
{
    uint32_t place = e->place;
    int64_t before = e->expiry;
    if (place == OUTSIDE && tell(w, str_discard, e) < 0) return -1;
    if (e->place != place) return 0;
    e->expiry = expiry;
    if (tell(w, str_put, e) < 0) {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        e->expiry = before;
        if (e->place == OUTSIDE && tell(w, str_put, e) < 0) {
            Py_XDECREF(type); Py_XDECREF(value); Py_XDECREF(traceback);
            return -1;
        }
        PyErr_Restore(type, value, traceback);
        return -1;
    }
    if (e->place != place) return tell(w, str_discard, e) < 0 ? -1 : 0;
    if (bucket_reserve(&w->outside, 0) < 0) return -1;
    if (place != OUTSIDE) {
        unlink_entry(w, e);
        bucket_put(&w->outside, e, OUTSIDE, 0);
    }
    e->serial = w->serial++;
    return 1;
}

static int reschedule(WheelObject *w, EntryObject *e, int64_t expiry)
{
    if (admit(w, expiry) < 0) return -1;
    uint64_t deadline = deadline_of(w, expiry);
    if (!fits(w, deadline)) return move_outside(w, e, expiry);
    if (e->place == OUTSIDE) {
        if (tell(w, str_discard, e) < 0) return -1;
        if (e->place != OUTSIDE) return 0;
    }
    uint32_t place;
    Bucket *b = bucket_for(w, deadline, 0, &place);
    if (b == NULL) return -1;
    place_again(w, e, b, place, expiry);
    return 1;
}

static PyObject *Entry_cancel(EntryObject *e, PyObject *Py_UNUSED(ignored))
{
    int won = cancel(e);
    return won < 0 ? NULL : PyBool_FromLong(won);
}

static PyObject *Entry_reschedule(EntryObject *e, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"expiry"};
    PyObject *given[1];
    int64_t expiry;
    if (bind_arguments("reschedule", args, nargs, kwnames, names, 1, 1, given) < 0) return NULL;
    if (as_time("expiry", given[0], &expiry) < 0) return NULL;
    WheelObject *w = e->owner->wheel;
    if (!IS_PENDING(e) || w == NULL) Py_RETURN_FALSE;
    Py_INCREF(w); /* the overflow buffer may drop the last reference */
    int moved = reschedule(w, e, expiry);
    Py_DECREF(w);
    return moved < 0 ? NULL : PyBool_FromLong(moved);
}

static PyObject *Entry_get_expiry(EntryObject *e, void *Py_UNUSED(closure)) { return PyLong_FromLongLong(e->expiry); }

static PyObject *Entry_get_item(EntryObject *e, void *Py_UNUSED(closure)) { return Py_NewRef(e->item ? e->item : Py_None); }

static PyObject *Entry_get_pending(EntryObject *e, void *Py_UNUSED(closure)) { return PyBool_FromLong(IS_PENDING(e)); }

static PyObject *Entry_get_rounds(EntryObject *e, void *Py_UNUSED(closure))
{
    const WheelObject *w = e->owner->wheel;
    if (!IS_PENDING(e) || w == NULL || w->kind != ROUNDS) return PyLong_FromLong(0);
    uint64_t deadline = deadline_of(w, e->expiry);
    return PyLong_FromUnsignedLongLong(deadline <= w->current ? 0 : (deadline - w->current - 1) / w->levels[0]->size);
}

static PyObject *Entry_repr(EntryObject *e)
{
    return PyUnicode_FromFormat("<Entry expiry=%lld %spending>", (long long)e->expiry,
                                IS_PENDING(e) ? "" : "not ");
}

static PyObject *refuse_pickle(PyObject *self, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(nargs))
{
    PyObject *type = PyType_GetName(Py_TYPE(self));
    if (type)
        PyErr_Format(PyExc_TypeError,
                     "cannot pickle '%U' object: its entries live in this process; "
                     "pickle what you would schedule again", type);
    Py_XDECREF(type);
    return NULL;
}

/* ---- Turning */

static inline void turn_to(WheelObject *w, uint64_t tick)
{
    uint64_t turned = tick - w->current;
    w->current = tick;
    for (int i = 0; i < w->level_count && turned; i++) {
        Level *level = w->levels[i];
        if (w->pushed) {
            uint64_t slots = level->pointer + turned;
            level->index += turned;
            level->pointer = level_slot(level, slots);
            turned = slots / level->size;
        }
        else {
            uint64_t index = level_span(level, tick);
            turned = index - level->index; /* where one does not turn, none above it does */
            level->index = index;
            level->pointer = level_slot(level, index);
        }
    }
}

static inline int next_event(WheelObject *w, uint64_t *tick)
{
    *tick = NEVER;
    if (UNLIKELY(w->outside.live) && hand_over_at(w, tick) < 0) return -1;
    for (int i = 0; i < w->level_count; i++) {
        const Level *level = w->levels[i];
        uint32_t ahead = level_ahead(level);
        if (ahead) {
            uint64_t at = (level->index + ahead) * level->unit;
            if (at < *tick) *tick = at;
        }
    }
    return 0;
}

/* Move the entries under the pointer to finer levels, in front, the last one first. */
static int cascade(WheelObject *w, Level *level)
{
    /* The slot is emptied first: what an idle tracker has touched may belong there, a turn later. */
    Bucket *slot = &level->buckets[level->pointer], from = *slot;
    memset(slot, 0, sizeof(*slot));
    occupancy_remove(&level->occupied, level->pointer);
    while (from.live) {
        uint32_t cell = from.tail - 1;
        if (cell >= from.head + FETCH_AHEAD) PREFETCH(from.cells[cell - FETCH_AHEAD]);
        EntryObject *e = from.cells[cell];
        if (e != NULL) {
            uint32_t place;
            Bucket *to = bucket_for(w, deadline_of(w, e->expiry), 1, &place);
            if (UNLIKELY(to == NULL)) { /* out of memory: late, by a turn, rather than lost */
                if (slot->live) Py_FatalError("tickwheel: out of memory in the middle of a cascade");
                PyMem_Free(slot->cells);
                *slot = from;
                occupancy_add(&level->occupied, level->pointer);
                return -1;
            }
            from.live--;
            put(w, to, e, place, 1);
        }
        from.tail = cell;
    }
    bucket_emptied(&from);
    if (slot->cells == NULL) *slot = from; else PyMem_Free(from.cells);
    return 0;
}

/* Place what the buffer gave; it is older than anything on the levels. Steals nothing. */
static int place_taken(WheelObject *w, PyObject *taken)
{
    Py_ssize_t n = PyTuple_GET_SIZE(taken), ours = 0;
    EntryObject **entries = PyMem_Malloc((size_t)(n ? n : 1) * sizeof(*entries));
    if (entries == NULL) { PyErr_NoMemory(); return -1; }
    for (Py_ssize_t i = 0; i < n; i++) {
        EntryObject *e = (EntryObject *)PyTuple_GET_ITEM(taken, i);
        if (Py_IS_TYPE(e, &Entry_Type) && e->owner == w->owner) entries[ours++] = e;
    }
    int failed = sort_entries(entries, (size_t)ours, 0);
    for (Py_ssize_t i = ours - 1; i >= 0 && !failed; i--) {
        EntryObject *e = entries[i];
        uint64_t deadline = deadline_of(w, e->expiry);
        if (e->place != OUTSIDE) continue; /* cancelled meanwhile */
        if (!fits(w, deadline)) { failed = tell(w, str_put, e); continue; }
        uint32_t place;
        Bucket *b = bucket_for(w, deadline, 1, &place);
        if (b == NULL) { failed = -1; break; }
        bucket_remove(&w->outside, e);
        put(w, b, e, place, 1);
    }
    PyMem_Free(entries);
    if (!failed && ours != n) {
        PyErr_SetString(PyExc_ValueError, "the overflow buffer handed over what this wheel did not put there");
        failed = -1;
    }
    return failed;
}

static int hand_over(WheelObject *w)
{
    uint64_t last = w->current + w->levels[w->level_count - 1]->interval - 1, reach = MAX_TIME;
    if (last <= (uint64_t)MAX_TIME / w->tick) reach = last * w->tick;
    PyObject *before = PyLong_FromUnsignedLongLong(reach + 1);
    PyObject *answer = before ? ask(w, str_take, before) : NULL;
    PyObject *taken = answer ? PySequence_Tuple(answer) : NULL;
    Py_XDECREF(before);
    Py_XDECREF(answer);
    if (taken == NULL) return -1;
    w->handed_over_at = (int64_t)w->current;
    int failed = place_taken(w, taken);
    Py_DECREF(taken);
    return failed;
}

/* Turn to `tick` and empty the buckets that are due then, the finer levels first. */
static inline int visit(WheelObject *w, uint64_t tick)
{
    if (tick > w->current) {
        turn_to(w, tick);
        if (occupancy_has(&w->levels[0]->occupied, w->levels[0]->pointer)) w->visits++;
        for (int i = 1; i < w->level_count; i++) {
            Level *level = w->levels[i];
            if (level->index * level->unit != tick) break;
            if (occupancy_has(&level->occupied, level->pointer)) {
                w->visits++;
                if (cascade(w, level) < 0) return -1;
            }
        }
    }
    if (UNLIKELY(w->outside.live) && w->hand_over_known && tick == w->next_hand_over) return hand_over(w);
    return 0;
}

/* Move up to *room items from `b` to `fired`. */
static int fire(WheelObject *w, Bucket *b, PyObject *fired, Py_ssize_t *room)
{
    while (*room && b->live) {
        uint32_t cell = b->head;
        if (cell + FETCH_AHEAD < b->tail) PREFETCH(b->cells[cell + FETCH_AHEAD]);
        EntryObject *e = b->cells[cell];
        if (e == NULL) { b->head++; continue; }
        if (PyList_Append(fired, e->item) < 0) return -1;
        b->cells[cell] = NULL;
        b->head++;
        b->live--;
        w->count--;
        e->place = NOWHERE;
        (*room)--;
        let_go(e); /* a weakref callback may call the wheel: everything is read anew */
    }
    return 0;
}

static inline EntryObject *bucket_first(Bucket *b)
{
    while (b->cells[b->head] == NULL) b->head++;
    return b->cells[b->head];
}

/* The bucket whose first entry is due first; it may be empty. NULL with an error. */
static inline Bucket *due_bucket(WheelObject *w)
{
    if (LIKELY(!w->late.live && !w->rest.live)) return &w->levels[0]->buckets[w->levels[0]->pointer];
    if (w->late.live && !w->late_sorted && sort_late(w) < 0) return NULL;
    if (!w->late.live) return &w->rest;
    if (!w->rest.live) return &w->late;
    return comes_first(bucket_first(&w->rest), bucket_first(&w->late), w->tick) ? &w->rest : &w->late;
}

/* Have what is due under the pointer, and left there by a `limit`, wait elsewhere: so the pointer goes on to now. */
static int set_aside(WheelObject *w)
{
    Level *lowest = w->levels[0];
    Bucket *b = &lowest->buckets[lowest->pointer];
    while (b->live) {
        if (b->head + FETCH_AHEAD < b->tail) PREFETCH(b->cells[b->head + FETCH_AHEAD]);
        EntryObject *e = b->cells[b->head];
        if (e != NULL) {
            if (bucket_reserve(&w->rest, 0) < 0) return -1;
            b->cells[b->head] = NULL;
            b->live--;
            bucket_put(&w->rest, e, REST, 0);
        }
        b->head++;
    }
    bucket_emptied(b);
    occupancy_remove(&lowest->occupied, lowest->pointer);
    return 0;
}

static int drain(WheelObject *w, uint64_t target, Py_ssize_t room, PyObject *fired)
{
    for (;;) {
        Bucket *due = room ? due_bucket(w) : NULL;
        if (due == NULL && room) return -1;
        if (due != NULL && due->live) {
            Py_ssize_t some = w->rest.live && w->late.live ? 1 : room, left = some; /* of both: by turns */
            if (fire(w, due, fired, &left) < 0) return -1;
            room -= some - left;
            if (due->live == 0) {
                bucket_emptied(due);
                if (due != &w->late && due != &w->rest)
                    occupancy_remove(&w->levels[0]->occupied, w->levels[0]->pointer);
            }
            continue;
        }
        uint64_t tick;
        if (next_event(w, &tick) < 0) return -1;
        if ((tick < target ? tick : target) > w->current
            && UNLIKELY(w->levels[0]->buckets[w->levels[0]->pointer].live) && set_aside(w) < 0) return -1;
        if (tick > target) { turn_to(w, target); return 0; }
        if (visit(w, tick) < 0) return -1;
    }
}

/* ---- For _deadlines.c */

EntryObject *wheel_place(WheelObject *w, PyTypeObject *type, int64_t expiry, PyObject *item)
{
    EntryObject *e = schedule(w, type, expiry, item);
    Py_DECREF(item);
    return e;
}

void wheel_unlink(WheelObject *w, EntryObject *e)
{
    unlink_entry(w, e);
    w->count--;
}

int wheel_move(WheelObject *w, EntryObject *e, int64_t expiry)
{
    return reschedule(w, e, expiry) < 0 ? -1 : 0;
}

int wheel_turn(WheelObject *w, int64_t now)
{
    uint64_t target = (uint64_t)now / w->tick;
    w->now = now;
    while (w->current < target) {
        uint64_t tick;
        if (w->late.live || w->levels[0]->buckets[w->levels[0]->pointer].live) return 0;
        if (next_event(w, &tick) < 0) return -1;
        if (tick > target) turn_to(w, target);
        else if (visit(w, tick) < 0) return -1;
    }
    return 0;
}

EntryObject *wheel_due(WheelObject *w)
{
    Bucket *b = due_bucket(w);
    if (b == NULL || b->live == 0) return NULL;
    EntryObject *first = bucket_first(b);
    if (b->head + FETCH_AHEAD < b->tail) PREFETCH(b->cells[b->head + FETCH_AHEAD]);
    return first;
}

EntryObject *wheel_ahead(WheelObject *w, uint32_t n)
{
    Bucket *b = w->late.live ? &w->late : &w->levels[0]->buckets[w->levels[0]->pointer];
    return b->live && n < b->tail - b->head ? b->cells[b->head + n] : NULL;
}

EntryObject *wheel_any(WheelObject *w)
{
    Bucket *b = &w->late;
    for (int i = 0; b->live == 0; i++) {
        if (i == w->level_count) return NULL;
        int64_t slot = occupancy_first(&w->levels[i]->occupied, 0);
        if (slot >= 0) b = &w->levels[i]->buckets[slot];
    }
    return bucket_first(b);
}

int64_t wheel_wakeup(WheelObject *w)
{
    uint64_t tick = NEVER;
    if (w->count == 0) return -1;
    if (w->late.live || w->levels[0]->buckets[w->levels[0]->pointer].live) return w->now;
    if (next_event(w, &tick) < 0) return -1;
    if (tick > (uint64_t)MAX_TIME / w->tick) return MAX_TIME;
    return tick * w->tick <= (uint64_t)w->now ? w->now : (int64_t)(tick * w->tick);
}

/* ---- Rounds */

/* Let the pointer pass one slot: what is due by now leaves it, the others stay. */
static int pass_slot(WheelObject *w, Level *level, uint32_t slot)
{
    Bucket *b = &level->buckets[slot];
    EntryObject **cells = b->cells;
    uint32_t to = b->head;
    w->visits++;
    for (uint32_t i = b->head; i < b->tail; i++) {
        EntryObject *e = cells[i];
        if (i + FETCH_AHEAD < b->tail) PREFETCH(cells[i + FETCH_AHEAD]);
        if (e == NULL) continue;
        if (deadline_of(w, e->expiry) <= w->current && bucket_reserve(&w->late, 0) == 0) {
            b->live--;
            put(w, &w->late, e, LATE, 0);
        }
        else {
            w->wasted++;
            cells[to] = e;
            e->position = to + b->base;
            to++;
        }
    }
    b->tail = to;
    if (b->live == 0) {
        bucket_emptied(b);
        occupancy_remove(&level->occupied, slot);
    }
    return PyErr_Occurred() ? -1 : 0;
}

static int pass_slots(WheelObject *w, uint64_t target)
{
    Level *level = w->levels[0];
    uint64_t passed = target - w->current;
    uint32_t first = level->pointer;
    uint32_t last = passed < level->size ? (uint32_t)passed : level->size;
    turn_to(w, target);
    for (int wrapped = 0; wrapped < 2; wrapped++) {
        int64_t low = wrapped ? 0 : (int64_t)first + 1;
        int64_t high = (int64_t)first + last - (wrapped ? level->size : 0);
        while (low <= high) {
            int64_t slot = occupancy_first(&level->occupied, (uint32_t)low);
            if (slot < 0 || slot > high) break;
            if (pass_slot(w, level, (uint32_t)slot) < 0) return -1;
            low = slot + 1;
        }
    }
    return 0;
}

static int drain_rounds(WheelObject *w, uint64_t target, Py_ssize_t room, PyObject *fired)
{
    if (pass_slots(w, target) < 0) return -1;
    if (!w->late_sorted && sort_late(w) < 0) return -1;
    if (fire(w, &w->late, fired, &room) < 0) return -1;
    if (w->late.live == 0) bucket_emptied(&w->late);
    return 0;
}

/* ---- Methods of all wheels */

static PyObject *Wheel_schedule(WheelObject *w, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"expiry", "item"};
    PyObject *given[2];
    int64_t expiry;
    if (UNLIKELY(nargs != 2 || kwnames != NULL)) {
        if (bind_arguments("schedule", args, nargs, kwnames, names, 2, 2, given) < 0) return NULL;
        args = given;
    }
    if (UNLIKELY(as_time("expiry", args[0], &expiry) < 0 || admit(w, expiry) < 0)) return NULL;
    return (PyObject *)schedule(w, &Entry_Type, expiry, args[1]);
}

/* Have the buffer forget what a failed schedule_many had put there; -1 when that is interrupted. */
static int discard_all(WheelObject *w, PyObject *entries)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(entries); i++) {
        EntryObject *e = (EntryObject *)PyList_GET_ITEM(entries, i);
        if (e == NULL) break;
        if (e->place != OUTSIDE || tell(w, str_discard, e) == 0) continue;
        if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
        PyErr_Clear();
    }
    return 0;
}

/* Take off what a failed schedule_many had placed, whatever the buffer says. The error stays, or is an interrupt. */
static void undo(WheelObject *w, PyObject *entries)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (w->overflow && discard_all(w, entries) < 0) {
        Py_XDECREF(type); Py_XDECREF(value); Py_XDECREF(traceback);
        PyErr_Fetch(&type, &value, &traceback);
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(entries); i++) {
        EntryObject *e = (EntryObject *)PyList_GET_ITEM(entries, i);
        if (e == NULL) break;
        if (IS_PENDING(e)) take_off(w, e);
    }
    PyErr_Restore(type, value, traceback);
}

/* A list of plain ints, which run no code; NULL without an error when it is not that. */
static int64_t *as_times_at_once(PyObject *list, Py_ssize_t *n)
{
    Py_ssize_t size = PyList_GET_SIZE(list);
    int64_t *times = PyMem_New(int64_t, size ? size : 1);
    if (times == NULL) { PyErr_NoMemory(); return NULL; }
    for (Py_ssize_t i = 0; i < size; i++) {
        PyObject *value = PyList_GET_ITEM(list, i);
        int overflow = 1;
        if (LIKELY(PyLong_CheckExact(value))) times[i] = PyLong_AsLongLongAndOverflow(value, &overflow);
        if (UNLIKELY(overflow || times[i] < 0)) { PyMem_Free(times); return NULL; }
    }
    *n = size;
    return times;
}

/* Every expiry as a time. They are converted as they are read: converting may run any code. */
static int64_t *as_times(PyObject *iterable, Py_ssize_t *n)
{
    if (PyList_CheckExact(iterable)) {
        int64_t *times = as_times_at_once(iterable, n);
        if (times != NULL || PyErr_Occurred()) return times;
    }
    PyObject *each = PyObject_GetIter(iterable), *value = NULL;
    if (each == NULL) return NULL;
    Py_ssize_t room = PyObject_LengthHint(iterable, 8);
    int64_t *times = room < 0 ? NULL : PyMem_New(int64_t, (room ? room : 1));
    if (times == NULL && room >= 0) PyErr_NoMemory();
    *n = 0;
    while (times != NULL && (value = PyIter_Next(each)) != NULL) {
        if (*n >= room) {
            int64_t *grown = PyMem_Realloc(times, (size_t)(room = 2 * room + 8) * sizeof(*times));
            if (grown != NULL) times = grown; else PyErr_NoMemory();
        }
        if (!PyErr_Occurred()) as_time("expiry", value, &times[(*n)++]);
        Py_DECREF(value);
        if (PyErr_Occurred()) break;
    }
    Py_DECREF(each);
    if (PyErr_Occurred()) { PyMem_Free(times); times = NULL; }
    return times;
}

static int schedule_each(WheelObject *w, const int64_t *times, PyObject *items, Py_ssize_t n, PyObject *entries)
{
    PyObject **each = PySequence_Fast_ITEMS(items);
    if (PySequence_Fast_GET_SIZE(items) != n) {
        PyErr_Format(PyExc_ValueError, "expiries and items must be of one length, got %zd expiries and %zd items",
                     n, PySequence_Fast_GET_SIZE(items));
        return -1;
    }
    for (Py_ssize_t i = 0; i < n && w->is_bounded; i++)
        if (admit(w, times[i]) < 0) return -1;
    for (Py_ssize_t i = 0; i < n; i++) {
        EntryObject *e = schedule(w, &Entry_Type, times[i], each[i]);
        if (e == NULL) { undo(w, entries); return -1; }
        PyList_SET_ITEM(entries, i, (PyObject *)e);
    }
    return 0;
}

static PyObject *Wheel_schedule_many(WheelObject *w, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"expiries", "items"};
    PyObject *given[2], *items = NULL, *entries = NULL;
    Py_ssize_t n;
    if (bind_arguments("schedule_many", args, nargs, kwnames, names, 2, 2, given) < 0) return NULL;
    int64_t *times = as_times(given[0], &n);
    /* A list is read as it is, once the last code that could change it has run: an overflow buffer could. */
    if (times != NULL)
        items = PyList_CheckExact(given[1]) && w->overflow == NULL ? Py_NewRef(given[1]) : PySequence_Tuple(given[1]);
    if (items != NULL) entries = PyList_New(n); /* may run the collector */
    if (entries != NULL) {
        PyObject_GC_UnTrack(entries); /* until it is full: an overflow buffer runs meanwhile */
        int failed = schedule_each(w, times, items, n, entries);
        PyObject_GC_Track(entries);
        if (failed) Py_CLEAR(entries);
    }
    PyMem_Free(times);
    Py_XDECREF(items);
    return entries;
}

static inline void fetch_for_cancel(WheelObject *w, PyObject *sequence, Py_ssize_t i)
{
    Py_ssize_t size = PySequence_Fast_GET_SIZE(sequence);
    PyObject **entries = PySequence_Fast_ITEMS(sequence);
    if (i + 2 * FETCH_AHEAD < size) PREFETCH(entries[i + 2 * FETCH_AHEAD]);
    if (i + FETCH_AHEAD >= size) return;
    EntryObject *e = (EntryObject *)entries[i + FETCH_AHEAD];
    if (!Py_IS_TYPE(e, &Entry_Type) || e->owner != w->owner || !IS_PENDING(e)) return;
    Bucket *b = bucket_at(w, e->place);
    PREFETCH(&b->cells[e->position - b->base]);
}

static PyObject *Wheel_cancel_many(WheelObject *w, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"entries"};
    PyObject *given[1];
    Py_ssize_t won = 0, failed = 0;
    if (bind_arguments("cancel_many", args, nargs, kwnames, names, 1, 1, given) < 0) return NULL;
    /* A copy: what cancelling releases may run code that changes the list. */
    PyObject *entries = PySequence_Tuple(given[0]);
    if (entries == NULL) return NULL;
    Py_ssize_t size = PyTuple_GET_SIZE(entries);
    for (Py_ssize_t i = 0; i < size && !failed; i++) failed = claim(w, PyTuple_GET_ITEM(entries, i));
    for (Py_ssize_t i = 0; i < size && !failed; i++) {
        fetch_for_cancel(w, entries, i);
        int answer = cancel((EntryObject *)PyTuple_GET_ITEM(entries, i));
        if (answer < 0) failed = -1; else won += answer;
    }
    Py_DECREF(entries);
    return failed ? NULL : PyLong_FromSsize_t(won);
}

static PyObject *Wheel_advance(WheelObject *w, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"now", "limit"};
    PyObject *given[2];
    int64_t now;
    Py_ssize_t room;
    if (bind_arguments("advance", args, nargs, kwnames, names, 2, 1, given) < 0) return NULL;
    if (as_time("now", given[0], &now) < 0 || as_limit(given[1], &room) < 0) return NULL;
    PyObject *fired = PyList_New(0); /* may run the collector: before the checks */
    if (fired == NULL) return NULL;
    if (now < w->now) {
        PyErr_Format(TimeWentBack, "now must not go back: got %lld, the wheel is at %lld", (long long)now,
                     (long long)w->now);
        Py_DECREF(fired);
        return NULL;
    }
    if (w->busy) {
        PyErr_SetString(WheelBusy, "advance() was called from inside advance()");
        Py_DECREF(fired);
        return NULL;
    }
    w->now = now;
    w->busy = 1;
    uint64_t target = w->tick == 1 ? (uint64_t)now : (uint64_t)now / w->tick;
    int failed = w->kind == ROUNDS ? drain_rounds(w, target, room, fired) : drain(w, target, room, fired);
    w->busy = 0;
    if (failed) {
        if (PyList_GET_SIZE(fired) == 0 || !PyErr_ExceptionMatches(PyExc_Exception)) Py_CLEAR(fired);
        else PyErr_Clear(); /* nothing is lost: the next call meets the error again */
    }
    return fired;
}

static PyObject *Wheel_next_wakeup(WheelObject *w, PyObject *Py_UNUSED(ignored))
{
    if (w->count == 0) Py_RETURN_NONE;
    if (w->late.live || w->rest.live) return PyLong_FromLongLong(w->now);
    uint64_t tick;
    if (w->kind == ROUNDS) tick = w->current + level_ahead(w->levels[0]);
    else {
        if (w->levels[0]->buckets[w->levels[0]->pointer].live) return PyLong_FromLongLong(w->now);
        if (next_event(w, &tick) < 0) return NULL;
    }
    if (tick <= (uint64_t)w->now / w->tick) return PyLong_FromLongLong(w->now);
    if (tick == NEVER) Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(tick * w->tick);
}

static int64_t smallest_expiry(const Bucket *b, int64_t smallest)
{
    for (uint32_t i = b->head; i < b->tail; i++) {
        if (i + FETCH_AHEAD < b->tail) PREFETCH(b->cells[i + FETCH_AHEAD]);
        if (b->cells[i] && (smallest < 0 || b->cells[i]->expiry < smallest)) smallest = b->cells[i]->expiry;
    }
    return smallest;
}

/* The smallest of the rest: among those that are due at its first tick. */
static int64_t smallest_of_rest(WheelObject *w, int64_t smallest)
{
    const Bucket *b = &w->rest;
    for (uint32_t i = b->head, first = UINT32_MAX; i < b->tail; i++) {
        const EntryObject *e = b->cells[i];
        if (e == NULL) continue;
        if (first == UINT32_MAX) first = i;
        if (deadline_of(w, e->expiry) != deadline_of(w, b->cells[first]->expiry)) break;
        if (smallest < 0 || e->expiry < smallest) smallest = e->expiry;
    }
    return smallest;
}

static PyObject *Wheel_next_expiry(WheelObject *w, PyObject *Py_UNUSED(ignored))
{
    int64_t smallest = smallest_of_rest(w, smallest_expiry(&w->late, -1)), outside;
    const Level *lowest = w->levels[0];
    if (w->kind == ROUNDS) {
        int64_t slot = -1;
        while ((slot = occupancy_first(&lowest->occupied, (uint32_t)(slot + 1))) >= 0)
            smallest = smallest_expiry(&lowest->buckets[slot], smallest);
    }
    else {
        smallest = smallest_expiry(&lowest->buckets[lowest->pointer], smallest);
        for (int i = 0; i < w->level_count; i++) {
            const Level *level = w->levels[i];
            uint32_t ahead = level_ahead(level);
            if (ahead)
                smallest = smallest_expiry(&level->buckets[((uint64_t)level->pointer + ahead) % level->size], smallest);
        }
    }
    if (w->outside.live) {
        int found = smallest_outside(w, &outside);
        if (found < 0) return NULL;
        if (found && (smallest < 0 || outside < smallest)) smallest = outside;
    }
    if (smallest < 0) Py_RETURN_NONE;
    return PyLong_FromLongLong(smallest);
}

static PyObject *Wheel_where(WheelObject *w, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"entry"};
    PyObject *given[1];
    if (bind_arguments("where", args, nargs, kwnames, names, 1, 1, given) < 0 || claim(w, given[0]) < 0) return NULL;
    uint32_t place = ((EntryObject *)given[0])->place;
    if (place >= NOWHERE) Py_RETURN_NONE;
    if (place == LATE || place == REST) return Py_BuildValue("iI", 1, w->levels[0]->pointer);
    return Py_BuildValue("II", place >> 24, place & 0xFFFFFF);
}

static PyObject *level_counts(const WheelObject *w, int number)
{
    const Level *level = w->levels[number];
    PyObject *counts = PyList_New(level->size);
    for (uint32_t i = 0; counts && i < level->size; i++) {
        uint32_t n = level->buckets[i].live;
        if (number == 0 && i == level->pointer) n += w->late.live + w->rest.live;
        PyObject *count = PyLong_FromUnsignedLong(n);
        if (count == NULL) Py_CLEAR(counts); else PyList_SET_ITEM(counts, i, count);
    }
    return counts;
}

static PyObject *Wheel_snapshot(WheelObject *w, PyObject *Py_UNUSED(ignored))
{
    PyObject *levels = PyList_New(0);
    for (int i = 0; levels && i < w->level_count; i++) {
        const Level *level = w->levels[i];
        PyObject *counts = level_counts(w, i);
        PyObject *one = counts ? Py_BuildValue("{sisKsIsIsN}", "level", i + 1, "tick",
                                               (unsigned long long)(level->unit * w->tick), "size", level->size,
                                               "pointer", level->pointer, "counts", counts) : NULL;
        if (one == NULL || PyList_Append(levels, one) < 0) Py_CLEAR(levels);
        Py_XDECREF(one);
    }
    return levels;
}

/* ---- Invariants */

#define HOLDS(condition, what) \
    do { if (!(condition)) { PyErr_SetString(PyExc_AssertionError, what); return -1; } } while (0)

static int check_cells(WheelObject *w, Bucket *b, uint32_t place)
{
    uint32_t live = 0;
    HOLDS(b->head <= b->tail && b->tail <= b->capacity, "a bucket's cells are within its memory");
    for (uint32_t i = b->head; i < b->tail; i++) {
        EntryObject *e = b->cells[i];
        if (e == NULL) continue;
        live++;
        HOLDS((Py_IS_TYPE(e, &Entry_Type) || Py_IS_TYPE(e, &Handle_Type)) && Py_REFCNT(e) > 0, "a cell holds a live entry");
        HOLDS(e->place == place && e->position - b->base == i, "an entry knows its bucket");
        HOLDS(e->owner == w->owner && e->owner->wheel == w, "an entry knows its wheel");
        HOLDS(e->item != NULL, "a pending entry has its item");
    }
    HOLDS(live == b->live, "a bucket's count is its entries'");
    return 0;
}

static int check_entries(WheelObject *w, const Level *level, int number, uint32_t slot)
{
    const Bucket *b = &level->buckets[slot];
    for (uint32_t i = b->head; i < b->tail; i++) {
        const EntryObject *e = b->cells[i];
        if (e == NULL) continue;
        uint64_t deadline = deadline_of(w, e->expiry), span = level_span(level, deadline);
        HOLDS(level_slot(level, span) == slot, "an entry is in its slot");
        if (w->kind == ROUNDS) { HOLDS(deadline > w->current, "a due entry is not in a slot"); continue; }
        HOLDS(span >= level->index + (number > 1) && span <= level->index + level->size,
              "a slot holds one span, the next one");
        for (uint32_t k = i + 1; k < b->tail && k < i + 64; k++)
            HOLDS(b->cells[k] == NULL || b->cells[k]->serial > e->serial
                  || deadline_of(w, b->cells[k]->expiry) != deadline, "entries of one tick keep their order");
    }
    return 0;
}

static int check_level(WheelObject *w, int number, Py_ssize_t *total)
{
    Level *level = w->levels[number - 1];
    HOLDS(level->index == w->current / level->unit, "pointers keep time");
    HOLDS(level->pointer == level->index % level->size, "a pointer points at its slot");
    HOLDS(number == 1 || level->unit == w->levels[number - 2]->interval, "a level's tick is the interval below");
    for (uint32_t slot = 0; slot < level->size; slot++) {
        Bucket *b = &level->buckets[slot];
        HOLDS(occupancy_has(&level->occupied, slot) == (b->live > 0), "the bitmap is exact");
        HOLDS(occupancy_first(&level->occupied, slot) >= 0 || b->live == 0, "the bitmap's layers agree");
        if (check_cells(w, b, PLACE(number, slot)) < 0 || check_entries(w, level, number, slot) < 0) return -1;
        *total += b->live;
    }
    return 0;
}

static int check_rest(WheelObject *w)
{
    const EntryObject *last = NULL;
    for (uint32_t i = w->rest.head; i < w->rest.tail; i++) {
        const EntryObject *e = w->rest.cells[i];
        if (e == NULL) continue;
        HOLDS(deadline_of(w, e->expiry) < w->current, "the rest is overdue");
        HOLDS(last == NULL || comes_first(last, e, w->tick), "the rest is in order");
        last = e;
    }
    return check_cells(w, &w->rest, REST);
}

static int check(WheelObject *w)
{
    Py_ssize_t total = w->late.live + w->rest.live + w->outside.live;
    if (check_cells(w, &w->late, LATE) < 0 || check_cells(w, &w->outside, OUTSIDE) < 0 || check_rest(w) < 0) return -1;
    for (int number = 1; number <= w->level_count; number++)
        if (check_level(w, number, &total) < 0) return -1;
    HOLDS(total == w->count, "len is exact");
    HOLDS(w->current <= (uint64_t)w->now / w->tick, "the pointer is not ahead of now");
    for (uint32_t i = w->late.head; i < w->late.tail; i++)
        HOLDS(w->late.cells[i] == NULL
              || deadline_of(w, w->late.cells[i]->expiry) < w->current + (w->kind == ROUNDS), "late means overdue");
    if (w->overflow) {
        Py_ssize_t n = PyObject_Length(w->overflow);
        if (n < 0) return -1;
        HOLDS(n == (Py_ssize_t)w->outside.live, "the buffer holds what is outside");
    }
    return 0;
}

static PyObject *Wheel_check(WheelObject *w, PyObject *Py_UNUSED(ignored))
{
    if (check(w) < 0) return NULL;
    Py_RETURN_NONE;
}

/* ---- Making and unmaking */

static int visit_items(const Bucket *b, visitproc visit, void *arg)
{
    for (uint32_t i = b->head; i < b->tail; i++) {
        if (i + 2 * FETCH_AHEAD < b->tail) PREFETCH(b->cells[i + 2 * FETCH_AHEAD]);
        if (i + FETCH_AHEAD < b->tail && b->cells[i + FETCH_AHEAD]) PREFETCH(b->cells[i + FETCH_AHEAD]->item);
        EntryObject *e = b->cells[i];
        if (e == NULL) continue;
        if (UNLIKELY(Py_IS_TYPE(e->item, &Call_Type))) /* unknown to the collector: show what is inside */
            for (Py_ssize_t k = 0; k < Py_SIZE(e->item); k++) Py_VISIT(((CallObject *)e->item)->parts[k]);
        else if (UNLIKELY(Py_IS_TYPE(e->item, &Expiry_Type))) Py_VISIT(((ExpiryObject *)e->item)->operation);
        else Py_VISIT(e->item);
    }
    return 0;
}

static int Wheel_traverse(WheelObject *w, visitproc visit, void *arg)
{
    int answer;
    Py_VISIT(w->overflow);
    if ((answer = visit_items(&w->late, visit, arg)) || (answer = visit_items(&w->rest, visit, arg))
        || (answer = visit_items(&w->outside, visit, arg))) return answer;
    for (int i = 0; i < w->level_count; i++) {
        int64_t slot = -1;
        while ((slot = occupancy_first(&w->levels[i]->occupied, (uint32_t)(slot + 1))) >= 0)
            if ((answer = visit_items(&w->levels[i]->buckets[slot], visit, arg))) return answer;
    }
    return 0;
}

/* Release every entry. Each step leaves the wheel whole, for releasing an item may run any code. */
static void release_all(WheelObject *w)
{
    for (int i = -3; i < w->level_count; i++) {
        Bucket *b = i == -3 ? &w->rest : i == -2 ? &w->late : i == -1 ? &w->outside : NULL;
        for (;;) {
            if (i >= 0) {
                int64_t slot = occupancy_first(&w->levels[i]->occupied, 0);
                b = slot < 0 ? NULL : &w->levels[i]->buckets[slot];
            }
            if (b == NULL || b->live == 0) break;
            while (b->cells[b->head] == NULL) b->head++;
            take_off(w, b->cells[b->head]);
        }
    }
}

static int Wheel_clear(WheelObject *w)
{
    release_all(w);
    Py_CLEAR(w->overflow);
    return 0;
}

static void Wheel_dealloc(WheelObject *w)
{
    PyObject_GC_UnTrack(w);
    if (w->weakrefs) PyObject_ClearWeakRefs((PyObject *)w);
    if (w->owner) w->owner->wheel = NULL; /* from here on nobody can schedule or cancel */
    release_all(w);
    Py_CLEAR(w->overflow);
    if (w->owner) owner_release(w->owner);
    PyMem_Free(w->late.cells);
    PyMem_Free(w->rest.cells);
    PyMem_Free(w->outside.cells);
    for (int i = 0; i < w->level_count; i++) level_free(w->levels[i]);
    Py_TYPE(w)->tp_free((PyObject *)w);
}

static PyObject *Wheel_sizeof(WheelObject *w, PyObject *Py_UNUSED(ignored))
{
    size_t bytes = sizeof(WheelObject) + sizeof(Owner) + (size_t)w->count * sizeof(EntryObject);
    bytes += (w->late.capacity + w->rest.capacity + w->outside.capacity) * sizeof(void *);
    for (int i = 0; i < w->level_count; i++) {
        const Level *level = w->levels[i];
        bytes += sizeof(Level) + level->size * sizeof(Bucket);
        for (int k = 0; k < level->occupied.layers; k++) bytes += level->occupied.counts[k] * sizeof(uint64_t);
        for (uint32_t slot = 0; slot < level->size; slot++) bytes += level->buckets[slot].capacity * sizeof(void *);
    }
    return PyLong_FromSize_t(bytes);
}

static WheelObject *new_wheel(PyTypeObject *type, Kind kind, PyObject *tick, PyObject *start)
{
    int64_t ticks = 1, from = 0;
    if (tick && as_number(PyExc_ValueError, "tick", tick, 1, MAX_TIME, &ticks) < 0) return NULL;
    if (start && as_time("start", start, &from) < 0) return NULL;
    WheelObject *w = (WheelObject *)type->tp_alloc(type, 0);
    if (w == NULL) return NULL;
    w->kind = kind;
    w->late_sorted = 1;
    w->handed_over_at = -1;
    w->tick = (uint64_t)ticks;
    w->now = from;
    w->current = (uint64_t)from / w->tick;
    w->owner = PyMem_Malloc(sizeof(Owner));
    if (w->owner == NULL) { Py_DECREF(w); PyErr_NoMemory(); return NULL; }
    w->owner->refs = 1;
    w->owner->wheel = w;
    return w;
}

static WheelObject *with_levels(WheelObject *w, const int64_t *sizes, Py_ssize_t n)
{
    for (Py_ssize_t i = 0; w && i < n; i++)
        if (add_level(w, (uint32_t)sizes[i]) == NULL) Py_CLEAR(w);
    return w;
}

/* Levels on demand of a power of two: the highest bit of the time left tells the level. */
static void index_levels(WheelObject *w, int64_t size)
{
    if (size & (size - 1)) return;
    w->size_shift = HIGHEST_BIT((uint64_t)size);
    for (int bit = 0; bit < 64; bit++) w->level_of_bit[bit] = (uint8_t)(bit / w->size_shift);
}

static int as_size(PyObject *value, int64_t *size)
{
    *size = DEFAULT_SIZE;
    return value ? as_number(PyExc_ValueError, "size", value, 2, MAX_SIZE, size) : 0;
}

/* Read `sizes`; -1 with an error. */
static Py_ssize_t as_sizes(PyObject *iterable, PyObject *tick, int64_t *sizes)
{
    PyObject *each = PySequence_Tuple(iterable);
    if (each == NULL) return -1;
    Py_ssize_t n = PyTuple_GET_SIZE(each);
    int64_t ticks = 1, ignored;
    for (Py_ssize_t i = 0; i < n && n >= 0; i++)
        if (as_size(PyTuple_GET_ITEM(each, i), i < MAX_LEVELS ? &sizes[i] : &ignored) < 0) { Py_DECREF(each); return -1; }
    Py_DECREF(each);
    if (n < 1 || n > MAX_LEVELS) {
        PyErr_Format(PyExc_ValueError, "sizes must name 1 to %d levels, got %zd", MAX_LEVELS, n);
        return -1;
    }
    if (tick && as_number(PyExc_ValueError, "tick", tick, 1, MAX_TIME, &ticks) < 0) return -1;
    for (Py_ssize_t i = 0; i + 1 < n; i++) {
        if (ticks > MAX_TIME / sizes[i]) {
            PyErr_Format(PyExc_ValueError, "level %zd is out of reach: its tick is over %lld", i + 2, (long long)MAX_TIME);
            return -1;
        }
        ticks *= sizes[i];
    }
    return n;
}

static PyObject *Wheel_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tick", "size", "start", "sizes", "overflow", "pointers", NULL};
    PyObject *tick = NULL, *size = NULL, *start = NULL, *sizes = NULL, *overflow = NULL, *pointers = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|OOO$OOO:Wheel", names, &tick, &size, &start, &sizes, &overflow,
                                     &pointers))
        return NULL;
    if (size == Py_None) size = NULL;
    if (sizes == Py_None) sizes = NULL;
    if (overflow == Py_None) overflow = NULL;
    int pushed = pointers && PyUnicode_Check(pointers) && PyUnicode_CompareWithASCIIString(pointers, "pushed") == 0;
    if (pointers && !pushed
        && !(PyUnicode_Check(pointers) && PyUnicode_CompareWithASCIIString(pointers, "own") == 0))
        return refuse(PyExc_ValueError, "pointers must be 'own' or 'pushed', got %.100R", pointers);
    int64_t each[MAX_LEVELS];
    Py_ssize_t n = 1;
    if (sizes == NULL) {
        if (overflow)
            return PyErr_Format(PyExc_ValueError, "overflow needs sizes: without them every time fits on a level");
        if (as_size(size, &each[0]) < 0) return NULL;
    }
    else {
        if (size) return PyErr_Format(PyExc_ValueError, "give size or sizes, not both");
        if ((n = as_sizes(sizes, tick, each)) < 0) return NULL;
    }
    WheelObject *w = new_wheel(type, WHEEL, tick, start);
    if (w == NULL) return NULL;
    w->pushed = (char)pushed;
    w->is_bounded = sizes != NULL;
    w->overflow = Py_XNewRef(overflow);
    if (!w->is_bounded) index_levels(w, each[0]);
    return (PyObject *)with_levels(w, each, n);
}

WheelObject *wheel_make(int64_t tick, int64_t start)
{
    const int64_t size = DEFAULT_SIZE;
    WheelObject *w = new_wheel(&Wheel_Type, WHEEL, NULL, NULL);
    if (w == NULL) return NULL;
    w->tick = (uint64_t)tick;
    w->now = start;
    w->current = (uint64_t)start / w->tick;
    index_levels(w, size);
    return with_levels(w, &size, 1);
}

static PyObject *one_level(PyTypeObject *type, Kind kind, const char *format, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tick", "size", "start", NULL};
    PyObject *tick = NULL, *size = NULL, *start = NULL;
    int64_t slots;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, format, names, &tick, &size, &start)) return NULL;
    if (as_size(size, &slots) < 0) return NULL;
    WheelObject *w = new_wheel(type, kind, tick, start);
    if (w) w->is_bounded = kind == SIMPLE;
    return (PyObject *)with_levels(w, &slots, 1);
}

static PyObject *SimpleWheel_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    return one_level(type, SIMPLE, "|OOO:SimpleWheel", args, kwargs);
}

static PyObject *RoundsWheel_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    return one_level(type, ROUNDS, "|OOO:RoundsWheel", args, kwargs);
}

static PyObject *Wheel_repr(WheelObject *w)
{
    static const char *const names[] = {"Wheel", "SimpleWheel", "RoundsWheel"};
    PyObject *shape;
    if (w->kind == WHEEL && w->is_bounded) {
        PyObject *sizes = PyTuple_New(w->level_count);
        for (int i = 0; sizes && i < w->level_count; i++) {
            PyObject *size = PyLong_FromUnsignedLong(w->levels[i]->size);
            if (size == NULL) Py_CLEAR(sizes); else PyTuple_SET_ITEM(sizes, i, size);
        }
        shape = sizes ? PyUnicode_FromFormat("sizes=%R", sizes) : NULL;
        Py_XDECREF(sizes);
    }
    else shape = PyUnicode_FromFormat("size=%u", w->levels[0]->size);
    if (shape == NULL) return NULL;
    PyObject *text = PyUnicode_FromFormat("<%s now=%lld tick=%llu %U pending=%zd>", names[w->kind], (long long)w->now,
                                          (unsigned long long)w->tick, shape, w->count);
    Py_DECREF(shape);
    return text;
}

static Py_ssize_t Wheel_length(WheelObject *w) { return w->count; }

static int Wheel_bool(WheelObject *Py_UNUSED(w)) { return 1; }

static PyObject *Wheel_get_now(WheelObject *w, void *Py_UNUSED(closure)) { return PyLong_FromLongLong(w->now); }

static PyObject *Wheel_get_visits(WheelObject *w, void *Py_UNUSED(closure)) { return PyLong_FromUnsignedLongLong(w->visits); }

static PyObject *RoundsWheel_get_wasted(WheelObject *w, void *Py_UNUSED(closure)) { return PyLong_FromUnsignedLongLong(w->wasted); }

/* ---- Tables */

#define REFUSE_PICKLE \
    {"__reduce__", (PyCFunction)(void (*)(void))refuse_pickle, METH_FASTCALL, NULL}, \
    {"__reduce_ex__", (PyCFunction)(void (*)(void))refuse_pickle, METH_FASTCALL, NULL}

static PyMethodDef Entry_methods[] = {
    {"cancel", (PyCFunction)Entry_cancel, METH_NOARGS,
     "cancel($self, /)\n--\n\nTake it off its wheel and let go of its item; True when this call did. O(1)."},
    {"reschedule", FAST(Entry_reschedule),
     "reschedule($self, /, expiry)\n--\n\nMove it to `expiry`, as a new schedule; False when it was no longer pending. O(1)."},
    {"__class_getitem__", Py_GenericAlias, METH_O | METH_CLASS, NULL},
    REFUSE_PICKLE,
    {NULL}
};

static PyGetSetDef Entry_getset[] = {
    {"expiry", (getter)Entry_get_expiry, NULL, "The time it was scheduled for, as given."},
    {"item", (getter)Entry_get_item, NULL, "What it carries; None once it has fired or was cancelled."},
    {"pending", (getter)Entry_get_pending, NULL, "Whether it will still come out of an `advance`."},
    {"rounds", (getter)Entry_get_rounds, NULL, "Full turns that it still has to wait on a `RoundsWheel`; 0 on any other wheel."},
    {NULL}
};

PyTypeObject Entry_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "tickwheel.Entry",
    .tp_doc = "One item on a wheel: made by `schedule`, and a handle to cancel or reschedule it.",
    .tp_basicsize = sizeof(EntryObject),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)entry_dealloc,
    .tp_repr = (reprfunc)Entry_repr,
    .tp_methods = Entry_methods,
    .tp_getset = Entry_getset,
    .tp_weaklistoffset = offsetof(EntryObject, weakrefs),
};

static PyMethodDef Wheel_methods[] = {
    {"schedule", FAST(Wheel_schedule),
     "schedule($self, /, expiry, item)\n--\n\nPut `item` on the wheel, to come out of the first `advance` that reaches `expiry`. O(1)."},
    {"schedule_many", FAST(Wheel_schedule_many),
     "schedule_many($self, /, expiries, items)\n--\n\nSchedule one item per expiry, all or nothing; return the entries in that order."},
    {"cancel_many", FAST(Wheel_cancel_many),
     "cancel_many($self, /, entries)\n--\n\nCancel them all; return how many this call took off the wheel."},
    {"advance", FAST(Wheel_advance),
     "advance($self, /, now, limit=None)\n--\n\nMove time to `now` and return the items that are due, at most `limit` of them."},
    {"next_wakeup", (PyCFunction)Wheel_next_wakeup, METH_NOARGS,
     "next_wakeup($self, /)\n--\n\nReturn when the next bucket is due: how long a driver may sleep."},
    {"next_expiry", (PyCFunction)Wheel_next_expiry, METH_NOARGS,
     "next_expiry($self, /)\n--\n\nReturn the smallest pending expiry, exactly, or None."},
    {"where", FAST(Wheel_where),
     "where($self, /, entry)\n--\n\nReturn the level and slot of `entry`, from (1, 0) on, or None when it is not pending."},
    {"snapshot", (PyCFunction)Wheel_snapshot, METH_NOARGS,
     "snapshot($self, /)\n--\n\nReturn one dict per level made so far: level, tick, size, pointer, counts by slot."},
    {"_check", (PyCFunction)Wheel_check, METH_NOARGS,
     "_check($self, /)\n--\n\nRaise AssertionError when an invariant is broken."},
    {"__sizeof__", (PyCFunction)Wheel_sizeof, METH_NOARGS, NULL},
    {"__class_getitem__", Py_GenericAlias, METH_O | METH_CLASS, NULL},
    REFUSE_PICKLE,
    {NULL}
};

#define WHEEL_GETSET \
    {"now", (getter)Wheel_get_now, NULL, "The last time given to `advance`, as given."}, \
    {"visits", (getter)Wheel_get_visits, NULL, "Buckets visited so far, on all levels: the cost that is promised."}

static PyGetSetDef Wheel_getset[] = {WHEEL_GETSET, {NULL}};
static PyGetSetDef RoundsWheel_getset[] = {
    WHEEL_GETSET,
    {"wasted", (getter)RoundsWheel_get_wasted, NULL, "Entries that visits looked at and that were not due."},
    {NULL}
};

static PyMappingMethods Wheel_as_mapping = {.mp_length = (lenfunc)Wheel_length};
static PyNumberMethods Wheel_as_number = {.nb_bool = (inquiry)Wheel_bool};

#define WHEEL_TYPE(name, doc, create, getset) { \
    PyVarObject_HEAD_INIT(NULL, 0) \
    .tp_name = name, \
    .tp_doc = doc, \
    .tp_basicsize = sizeof(WheelObject), \
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, \
    .tp_new = create, \
    .tp_dealloc = (destructor)Wheel_dealloc, \
    .tp_traverse = (traverseproc)Wheel_traverse, \
    .tp_clear = (inquiry)Wheel_clear, \
    .tp_repr = (reprfunc)Wheel_repr, \
    .tp_as_mapping = &Wheel_as_mapping, \
    .tp_as_number = &Wheel_as_number, \
    .tp_methods = Wheel_methods, \
    .tp_getset = getset, \
    .tp_weaklistoffset = offsetof(WheelObject, weakrefs), \
}

PyTypeObject Wheel_Type =
    WHEEL_TYPE("tickwheel.Wheel", "A hierarchical timing wheel: integer time, no clock, no threads.", Wheel_new, Wheel_getset);
static PyTypeObject SimpleWheel_Type =
    WHEEL_TYPE("tickwheel.SimpleWheel", "One level of slots: the plain timing wheel, for times within its interval.",
               SimpleWheel_new, Wheel_getset);
static PyTypeObject RoundsWheel_Type =
    WHEEL_TYPE("tickwheel.RoundsWheel", "One level of slots; an entry carries the rounds, full turns, that it still has to wait.",
               RoundsWheel_new, RoundsWheel_getset);

static int module_exec(PyObject *module)
{
    if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
        PyErr_SetString(PyExc_ImportError, "tickwheel._wheel does not support sub-interpreters");
        return -1;
    }
    PyObject *errors = PyImport_ImportModule("tickwheel.errors");
    if (errors == NULL) return -1;
    OutOfRange = PyObject_GetAttrString(errors, "OutOfRange");
    TimeWentBack = PyObject_GetAttrString(errors, "TimeWentBack");
    WheelBusy = PyObject_GetAttrString(errors, "WheelBusy");
    TimerClosed = PyObject_GetAttrString(errors, "TimerClosed");
    Py_DECREF(errors);
    str_put = PyUnicode_InternFromString("put");
    str_take = PyUnicode_InternFromString("take");
    str_discard = PyUnicode_InternFromString("discard");
    str_next_expiry = PyUnicode_InternFromString("next_expiry");
    str_bit_length = PyUnicode_InternFromString("bit_length");
    if (!OutOfRange || !TimeWentBack || !WheelBusy || !TimerClosed || !str_put || !str_take || !str_discard || !str_next_expiry
        || !str_bit_length)
        return -1;
    if (PyModule_AddType(module, &Entry_Type) < 0 || PyModule_AddType(module, &Wheel_Type) < 0
        || PyModule_AddType(module, &SimpleWheel_Type) < 0 || PyModule_AddType(module, &RoundsWheel_Type) < 0)
        return -1;
    return deadlines_exec(module) < 0 || idle_exec(module) < 0 || purgatory_exec(module) < 0 ? -1 : 0;
}

/* One set of static types and arenas per process: sub-interpreters and builds without the GIL are told so, and
 * tickwheel takes the wheels in Python there. */
static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_USED},
#endif
    {0, NULL}
};

static PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "tickwheel._wheel",
    .m_doc = "The wheels, native; see tickwheel.wheel.",
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__wheel(void) { return PyModuleDef_Init(&module_def); }
