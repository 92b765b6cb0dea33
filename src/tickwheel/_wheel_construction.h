/* Part of _wheel.c: constructors, the collector's hooks, the destructor, repr and properties. */

static int visit_items(const Bucket *b, visitproc visit, void *arg)
{
    for (uint32_t i = b->head; i < b->tail; i++) {
        if (i + 2 * FETCH_AHEAD < b->tail) PREFETCH(b->cells[i + 2 * FETCH_AHEAD]);
        if (i + FETCH_AHEAD < b->tail && b->cells[i + FETCH_AHEAD]) PREFETCH(b->cells[i + FETCH_AHEAD]->item);
        EntryObject *e = b->cells[i];
        if (e == NULL) continue;
        if (UNLIKELY(Py_IS_TYPE(e->item, &Call_Type))) /* not tracked by the collector: visit its parts */
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
    if ((answer = visit_items(&w->late, visit, arg)) || (answer = visit_items(&w->backlog, visit, arg))
        || (answer = visit_items(&w->outside, visit, arg))) return answer;
    for (int i = 0; i < w->level_count; i++) {
        int64_t slot = -1;
        while ((slot = occupancy_first(&w->levels[i]->occupied, (uint32_t)(slot + 1))) >= 0)
            if ((answer = visit_items(&w->levels[i]->buckets[slot], visit, arg))) return answer;
    }
    return 0;
}

/* Release every entry. Each step leaves the wheel consistent, because releasing an item may run any code. */
static void release_all(WheelObject *w)
{
    for (int i = -3; i < w->level_count; i++) {
        Bucket *b = i == -3 ? &w->backlog : i == -2 ? &w->late : i == -1 ? &w->outside : NULL;
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
    if (w->owner) w->owner->wheel = NULL; /* after this no entry can be scheduled or cancelled */
    release_all(w);
    Py_CLEAR(w->overflow);
    if (w->owner) owner_release(w->owner);
    PyMem_Free(w->late.cells);
    PyMem_Free(w->backlog.cells);
    PyMem_Free(w->outside.cells);
    for (int i = 0; i < w->level_count; i++) level_free(w->levels[i]);
    Py_TYPE(w)->tp_free((PyObject *)w);
}

static PyObject *Wheel_sizeof(WheelObject *w, PyObject *Py_UNUSED(ignored))
{
    size_t bytes = sizeof(WheelObject) + sizeof(Owner) + (size_t)w->count * sizeof(EntryObject);
    bytes += (w->late.capacity + w->backlog.capacity + w->outside.capacity) * sizeof(void *);
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

/* If size is a power of two, the highest bit of the time left determines the level. */
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
        PyErr_Format(PyExc_ValueError, "sizes must have 1 to %d levels, got %zd", MAX_LEVELS, n);
        return -1;
    }
    if (tick && as_number(PyExc_ValueError, "tick", tick, 1, MAX_TIME, &ticks) < 0) return -1;
    for (Py_ssize_t i = 0; i + 1 < n; i++) {
        if (ticks > MAX_TIME / sizes[i]) {
            PyErr_Format(PyExc_ValueError, "the tick of level %zd must be at most %lld", i + 2, (long long)MAX_TIME);
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
            return PyErr_Format(PyExc_ValueError, "overflow needs sizes: without sizes every time fits on a level");
        if (as_size(size, &each[0]) < 0) return NULL;
    }
    else {
        if (size) return PyErr_Format(PyExc_ValueError, "size and sizes exclude each other: give only one of them");
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
