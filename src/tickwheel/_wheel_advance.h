/* Part of _wheel.c: moving time. Cascades, firing, the rounds of a RoundsWheel, and the functions of _wheel.h. */

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
            turned = index - level->index; /* if a level does not turn, no level above it does */
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
        uint32_t ahead = slots_to_next(level);
        if (ahead) {
            uint64_t at = (level->index + ahead) * level->unit;
            if (at < *tick) *tick = at;
        }
    }
    return 0;
}

/* Move the entries under the pointer to the front of finer buckets, the last one first. */
static int cascade(WheelObject *w, Level *level)
{
    /* Empty the slot first: an entry that an idle tracker has touched may belong there, a turn later. */
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
            if (UNLIKELY(to == NULL)) { /* out of memory: a turn late rather than lost */
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

/* Place the entries that the buffer returned; they are older than all on the levels. Steals no reference. */
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
        if (e->place != OUTSIDE) continue; /* cancelled in the meantime */
        if (!fits(w, deadline)) { failed = call_buffer_for(w, str_put, e); continue; }
        uint32_t place;
        Bucket *b = bucket_for(w, deadline, 1, &place);
        if (b == NULL) { failed = -1; break; }
        bucket_remove(&w->outside, e);
        put(w, b, e, place, 1);
    }
    PyMem_Free(entries);
    if (!failed && ours != n) {
        PyErr_SetString(PyExc_ValueError, "the overflow buffer returned an entry that this wheel did not put");
        failed = -1;
    }
    return failed;
}

static int hand_over(WheelObject *w)
{
    uint64_t last = w->current + w->levels[w->level_count - 1]->interval - 1, reach = MAX_TIME;
    if (last <= (uint64_t)MAX_TIME / w->tick) reach = last * w->tick;
    PyObject *before = PyLong_FromUnsignedLongLong(reach + 1);
    PyObject *answer = before ? call_buffer(w, str_take, before) : NULL;
    PyObject *taken = answer ? PySequence_Tuple(answer) : NULL;
    Py_XDECREF(before);
    Py_XDECREF(answer);
    if (taken == NULL) return -1;
    w->handed_over_at = (int64_t)w->current;
    int failed = place_taken(w, taken);
    Py_DECREF(taken);
    return failed;
}

/* Turn to `tick` and empty the buckets that are due then, finer levels first. */
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
        release_entry(e); /* a weakref callback may call the wheel: read everything again */
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
    if (LIKELY(!w->late.live && !w->backlog.live)) return &w->levels[0]->buckets[w->levels[0]->pointer];
    if (w->late.live && !w->late_sorted && sort_late(w) < 0) return NULL;
    if (!w->late.live) return &w->backlog;
    if (!w->backlog.live) return &w->late;
    return comes_first(bucket_first(&w->backlog), bucket_first(&w->late), w->tick) ? &w->backlog : &w->late;
}

/* Move the due entries that a `limit` left under the pointer to the backlog, so that the pointer can move on to now. */
static int move_to_backlog(WheelObject *w)
{
    Level *lowest = w->levels[0];
    Bucket *b = &lowest->buckets[lowest->pointer];
    while (b->live) {
        if (b->head + FETCH_AHEAD < b->tail) PREFETCH(b->cells[b->head + FETCH_AHEAD]);
        EntryObject *e = b->cells[b->head];
        if (e != NULL) {
            if (bucket_reserve(&w->backlog, 0) < 0) return -1;
            b->cells[b->head] = NULL;
            b->live--;
            bucket_put(&w->backlog, e, BACKLOG, 0);
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
            Py_ssize_t share = w->backlog.live && w->late.live ? 1 : room, left = share; /* alternate */
            if (fire(w, due, fired, &left) < 0) return -1;
            room -= share - left;
            if (due->live == 0) {
                bucket_emptied(due);
                if (due != &w->late && due != &w->backlog)
                    occupancy_remove(&w->levels[0]->occupied, w->levels[0]->pointer);
            }
            continue;
        }
        uint64_t tick;
        if (next_event(w, &tick) < 0) return -1;
        if ((tick < target ? tick : target) > w->current
            && UNLIKELY(w->levels[0]->buckets[w->levels[0]->pointer].live) && move_to_backlog(w) < 0) return -1;
        if (tick > target) { turn_to(w, target); return 0; }
        if (visit(w, tick) < 0) return -1;
    }
}

/* ---- The functions of _wheel.h */

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

/* Pass one slot: due entries leave it, the others stay. */
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
