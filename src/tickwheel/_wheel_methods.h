/* Part of _wheel.c: the methods of all wheels. */

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

/* Discard from the buffer what a failed schedule_many has put there; -1 if that is interrupted. */
static int discard_all(WheelObject *w, PyObject *entries)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(entries); i++) {
        EntryObject *e = (EntryObject *)PyList_GET_ITEM(entries, i);
        if (e == NULL) break;
        if (e->place != OUTSIDE || call_buffer_for(w, str_discard, e) == 0) continue;
        if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
        PyErr_Clear();
    }
    return 0;
}

/* Remove the entries that a failed schedule_many has placed, even if the buffer raises. Keeps the error, unless an
 * interrupt replaces it. */
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

/* Convert a list of plain ints, which runs no code; NULL without an error if it has anything else. */
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

/* Convert every expiry to a time, each as it is read: converting may run any code. */
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
        PyErr_Format(PyExc_ValueError, "expiries and items must have the same length, got %zd expiries and %zd items",
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
    /* A list is read without a copy, because no code can change it from here on; an overflow buffer could. */
    if (times != NULL)
        items = PyList_CheckExact(given[1]) && w->overflow == NULL ? Py_NewRef(given[1]) : PySequence_Tuple(given[1]);
    if (items != NULL) entries = PyList_New(n); /* may run the collector */
    if (entries != NULL) {
        PyObject_GC_UnTrack(entries); /* until it is full: an overflow buffer may run in between */
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
    /* A copy: releasing a cancelled item may run code that changes the list. */
    PyObject *entries = PySequence_Tuple(given[0]);
    if (entries == NULL) return NULL;
    Py_ssize_t size = PyTuple_GET_SIZE(entries);
    for (Py_ssize_t i = 0; i < size && !failed; i++) failed = check_owned(w, PyTuple_GET_ITEM(entries, i));
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
    PyObject *fired = PyList_New(0); /* before the checks, because it may run the collector */
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
        else PyErr_Clear(); /* nothing is lost: the next call raises the error again */
    }
    return fired;
}

static PyObject *Wheel_next_wakeup(WheelObject *w, PyObject *Py_UNUSED(ignored))
{
    if (w->count == 0) Py_RETURN_NONE;
    if (w->late.live || w->backlog.live) return PyLong_FromLongLong(w->now);
    uint64_t tick;
    if (w->kind == ROUNDS) tick = w->current + slots_to_next(w->levels[0]);
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

/* The smallest expiry of the backlog, which is among the entries of its first tick. */
static int64_t smallest_of_backlog(WheelObject *w, int64_t smallest)
{
    const Bucket *b = &w->backlog;
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
    int64_t smallest = smallest_of_backlog(w, smallest_expiry(&w->late, -1)), outside;
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
            uint32_t ahead = slots_to_next(level);
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
    if (bind_arguments("where", args, nargs, kwnames, names, 1, 1, given) < 0 || check_owned(w, given[0]) < 0) return NULL;
    uint32_t place = ((EntryObject *)given[0])->place;
    if (place >= NOWHERE) Py_RETURN_NONE;
    if (place == LATE || place == BACKLOG) return Py_BuildValue("iI", 1, w->levels[0]->pointer);
    return Py_BuildValue("II", place >> 24, place & 0xFFFFFF);
}

static PyObject *level_counts(const WheelObject *w, int number)
{
    const Level *level = w->levels[number];
    PyObject *counts = PyList_New(level->size);
    for (uint32_t i = 0; counts && i < level->size; i++) {
        uint32_t n = level->buckets[i].live;
        if (number == 0 && i == level->pointer) n += w->late.live + w->backlog.live;
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
