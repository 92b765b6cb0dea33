/* Part of _wheel.c: bitmaps of occupied slots, buckets of entries, and levels of buckets. */

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

/* The smallest member >= `start`, or -1. */
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
#define KEPT_CAPACITY 256u /* an emptied bucket keeps at most this many cells */

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

/* Close the holes. Every entry gets a new position; O(live), amortised over the cancels that left the holes. */
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

/* Add `e` to a cell that bucket_reserve has reserved. */
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

/* Remove `e`, leaving a hole; free memory if most of it is holes. */
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
    /* Raw: the system provides zeroed pages for a large wheel, and only when they are used. */
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

/* The lowest level whose interval exceeds `left`; NULL with an error if memory runs out. */
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

/* The distance to the next occupied slot, 1 .. size, or 0 if all are empty. */
static inline uint32_t slots_to_next(const Level *level)
{
    if (!occupancy_any(&level->occupied)) return 0;
    int64_t slot = occupancy_first(&level->occupied, level->pointer + 1);
    if (slot < 0) slot = occupancy_first(&level->occupied, 0) + level->size;
    return (uint32_t)(slot - level->pointer);
}

static inline Bucket *bucket_at(WheelObject *w, uint32_t place)
{
    if (place == LATE) return &w->late;
    if (place == BACKLOG) return &w->backlog;
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
        in_front = 0; /* the bucket is sorted before it fires */
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

/* Order by deadline, then serial; tick 0 orders by serial only. */
static inline int comes_first(const EntryObject *a, const EntryObject *b, uint64_t tick)
{
    if (tick) {
        uint64_t da = ((uint64_t)a->expiry + tick - 1) / tick, db = ((uint64_t)b->expiry + tick - 1) / tick;
        if (da != db) return da < db;
    }
    return a->serial < b->serial;
}

/* A merge sort. */
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

/* 0 if `expiry` is within the span of the levels or there is a buffer, else -1 with OutOfRange. */
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
