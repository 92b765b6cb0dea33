/* Part of _wheel.c: adding, cancelling and moving one entry, on a level or in the overflow buffer. */

/* ---- The overflow buffer. While it runs, `advance` is refused. It is NULL after the collector has cleared it. */

static PyObject *call_buffer(WheelObject *w, PyObject *method, PyObject *argument)
{
    if (UNLIKELY(w->overflow == NULL)) return PyTuple_New(0);
    char busy = w->busy;
    w->busy = 1;
    w->hand_over_known = 0;
    PyObject *overflow = Py_NewRef(w->overflow);
    PyObject *answer = PyObject_CallMethodOneArg(overflow, method, argument);
    Py_DECREF(overflow);
    w->busy = busy;
    return answer;
}

static int call_buffer_for(WheelObject *w, PyObject *method, EntryObject *e)
{
    PyObject *answer = call_buffer(w, method, (PyObject *)e);
    if (answer == NULL) return -1;
    Py_DECREF(answer);
    return 0;
}

/* Store the buffer's smallest expiry in *expiry: 1, or 0 if the buffer is empty, or -1 with an error. */
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
    Py_SET_TYPE((PyObject *)e, type); /* a static type has no reference count */
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
    Py_XDECREF(e->item); /* not NULL only if placing it failed */
    entry_free(e);
}

/* Release an entry that was removed from its bucket, and its item. May run any code. */
static void release_entry(EntryObject *e)
{
    PyObject *item = e->item;
    e->item = NULL;
    Py_DECREF(e);
    Py_DECREF(item);
}

/* Put a new entry into the overflow buffer. 0 or -1; the wheel takes its own reference. */
static int put_outside(WheelObject *w, EntryObject *e)
{
    if (bucket_reserve(&w->outside, 0) < 0) return -1;
    Py_INCREF(e);
    bucket_put(&w->outside, e, OUTSIDE, 0);
    w->count++;
    if (call_buffer_for(w, str_put, e) == 0) return 0;
    if (e->place == OUTSIDE) {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        bucket_remove(&w->outside, e);
        w->count--;
        release_entry(e);
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
    release_entry(e);
}

/* 1 if this call removed `e`, 0 if the buffer did, -1 with an error. */
static int cancel_outside(WheelObject *w, EntryObject *e)
{
    Py_INCREF(w); /* the overflow buffer may drop the last reference */
    int won = call_buffer_for(w, str_discard, e) < 0 ? -1 : e->place == OUTSIDE;
    if (won > 0) take_off(w, e);
    Py_DECREF(w);
    return won;
}

/* 1 if this call removed `e`, 0 if it was not pending, -1 with an error. */
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
    if (e->place == place) { /* within one bucket: add the new cell first, so that the bucket is never empty */
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

/* Reschedule into the overflow buffer; on failure nothing changes. */
static int move_outside(WheelObject *w, EntryObject *e, int64_t expiry)
{
    uint32_t place = e->place;
    int64_t before = e->expiry;
    if (place == OUTSIDE && call_buffer_for(w, str_discard, e) < 0) return -1;
    if (e->place != place) return 0;
    e->expiry = expiry;
    if (call_buffer_for(w, str_put, e) < 0) {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        e->expiry = before;
        if (e->place == OUTSIDE && call_buffer_for(w, str_put, e) < 0) {
            Py_XDECREF(type); Py_XDECREF(value); Py_XDECREF(traceback);
            return -1;
        }
        PyErr_Restore(type, value, traceback);
        return -1;
    }
    if (e->place != place) return call_buffer_for(w, str_discard, e) < 0 ? -1 : 0;
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
        if (call_buffer_for(w, str_discard, e) < 0) return -1;
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
                     "cannot pickle '%U' object: it exists only in this process; "
                     "pickle the data and schedule it again", type);
    Py_XDECREF(type);
    return NULL;
}
