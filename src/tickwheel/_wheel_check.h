/* Part of _wheel.c: `_check`, which verifies every invariant of a wheel. */

#define HOLDS(condition, what) \
    do { if (!(condition)) { PyErr_SetString(PyExc_AssertionError, what); return -1; } } while (0)

static int check_cells(WheelObject *w, Bucket *b, uint32_t place)
{
    uint32_t live = 0;
    HOLDS(b->head <= b->tail && b->tail <= b->capacity, "the cells of a bucket are within its memory");
    for (uint32_t i = b->head; i < b->tail; i++) {
        EntryObject *e = b->cells[i];
        if (e == NULL) continue;
        live++;
        HOLDS((Py_IS_TYPE(e, &Entry_Type) || Py_IS_TYPE(e, &Handle_Type)) && Py_REFCNT(e) > 0, "a cell holds a live entry");
        HOLDS(e->place == place && e->position - b->base == i, "an entry knows its bucket");
        HOLDS(e->owner == w->owner && e->owner->wheel == w, "an entry knows its wheel");
        HOLDS(e->item != NULL, "a pending entry has its item");
    }
    HOLDS(live == b->live, "a bucket counts its entries");
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

static int check_backlog(WheelObject *w)
{
    const EntryObject *last = NULL;
    for (uint32_t i = w->backlog.head; i < w->backlog.tail; i++) {
        const EntryObject *e = w->backlog.cells[i];
        if (e == NULL) continue;
        HOLDS(deadline_of(w, e->expiry) < w->current, "the backlog is overdue");
        HOLDS(last == NULL || comes_first(last, e, w->tick), "the backlog is in order");
        last = e;
    }
    return check_cells(w, &w->backlog, BACKLOG);
}

static int check(WheelObject *w)
{
    Py_ssize_t total = w->late.live + w->backlog.live + w->outside.live;
    if (check_cells(w, &w->late, LATE) < 0 || check_cells(w, &w->outside, OUTSIDE) < 0 || check_backlog(w) < 0) return -1;
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
        HOLDS(n == (Py_ssize_t)w->outside.live, "the buffer holds all outside");
    }
    return 0;
}

static PyObject *Wheel_check(WheelObject *w, PyObject *Py_UNUSED(ignored))
{
    if (check(w) < 0) return NULL;
    Py_RETURN_NONE;
}
