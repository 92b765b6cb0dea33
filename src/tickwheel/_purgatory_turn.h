/* Part of _purgatory.c: errors, an operation's lock, and the checks that wait for it. */

/* ---- Exceptions as one object */

static PyObject *take_error(void)
{
#if PY_VERSION_HEX >= 0x030C0000
    return PyErr_GetRaisedException();
#else
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (type == NULL) return NULL;
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback) PyException_SetTraceback(value, traceback);
    Py_DECREF(type);
    Py_XDECREF(traceback);
    return value;
#endif
}

static void raise_again(PyObject *error)
{
#if PY_VERSION_HEX >= 0x030C0000
    PyErr_SetRaisedException(error);
#else
    PyErr_Restore(Py_NewRef(Py_TYPE(error)), error, PyException_GetTraceback(error));
#endif
}

/* Tell self._failed(name, error) of an Exception: 0, or -1 when it must go on to the caller. */
static int report(Operation *op, PyObject *name)
{
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
    PyObject *error = take_error();
    PyObject *answer = PyObject_CallMethodObjArgs((PyObject *)op, str_failed, name, error, NULL);
    Py_XDECREF(error);
    Py_XDECREF(answer);
    return answer ? 0 : -1;
}

/* The argument as an operation that was made, or NULL with an error. */
static Operation *as_operation(PyObject *given)
{
    if (UNLIKELY(!PyObject_TypeCheck(given, &Operation_Type))) {
        refuse(PyExc_TypeError, "operation must be a DelayedOperation, got %.100R", given);
        return NULL;
    }
    Operation *op = (Operation *)given;
    if (LIKELY(op->made)) return op;
    refuse(PyExc_AttributeError, "%R has no timeout: call super().__init__(timeout) first", given);
    return NULL;
}

/* ---- An operation's turn: its lock, and at the end of the outermost one the checks put off */

/* Sleep until nobody is inside; -1 when a signal's handler raises. Waking up is no promise: others may be first. */
static int wait_outside(Operation *op, unsigned long me)
{
    while (op->depth && op->owner != me) {
        if (op->gate == NULL) {
            op->gate = PyThread_allocate_lock();
            if (op->gate == NULL) { PyErr_NoMemory(); return -1; }
            PyThread_acquire_lock(op->gate, WAIT_LOCK);
        }
        PyLockStatus status;
        op->waiting++;
        Py_BEGIN_ALLOW_THREADS
        status = PyThread_acquire_lock_timed(op->gate, -1, 1);
        Py_END_ALLOW_THREADS
        op->waiting--;
        if (status == PY_LOCK_ACQUIRED) op->rung = 0;
        else if (Py_MakePendingCalls() < 0) return -1;
    }
    return 0;
}

/* 1 when it has the lock now, 0 when none is needed, -1 with an error: pass it to `end_turn`. */
static inline int begin_turn(Operation *op)
{
    if (!op->one_thread) {
        unsigned long me = PyThread_get_thread_ident();
        if (UNLIKELY(op->depth && op->owner != me) && wait_outside(op, me) < 0) return -1;
        op->owner = me;
        op->depth++;
    }
    later.depth++;
    return !op->one_thread;
}

/* Make the checks that were put off, one after the other, however many they bring on. An interrupt waits for those
 * behind it. */
static int drain(void)
{
    PyObject *before = take_error(), *failure = NULL;
    Check *next;
    later.draining = 1;
    while ((next = later.first) != NULL) {
        later.first = next->next;
        if (check(next->lists, next->key) < 0) {
            PyObject *error = take_error();
            if (failure == NULL) failure = error; else Py_DECREF(error);
        }
        Py_DECREF(next->lists);
        Py_DECREF(next->key);
        PyMem_Free(next);
    }
    later.draining = 0;
    if (failure == NULL) {
        if (before == NULL) return 0;
        failure = before;
    }
    else if (before && before != failure) PyException_SetContext(failure, before);
    else Py_XDECREF(before);
    raise_again(failure);
    return -1;
}

/* -1 with an error, which may be the one that was set before. */
static inline int end_turn(Operation *op, int held, int failed)
{
    later.depth--;
    if (held && --op->depth == 0 && UNLIKELY(op->waiting) && !op->rung) {
        op->rung = 1;
        PyThread_release_lock(op->gate);
    }
    if (UNLIKELY(later.first != NULL) && !later.depth && !later.draining) return drain();
    return failed;
}

static int put_off(WatchLists *w, PyObject *key)
{
    if (PyObject_Hash(key) == -1) return -1; /* what cannot be a key is told now */
    Check *one = PyMem_Malloc(sizeof(Check));
    if (one == NULL) { PyErr_NoMemory(); return -1; }
    *one = (Check){NULL, (WatchLists *)Py_NewRef(w), Py_NewRef(key)};
    if (later.first) later.last->next = one; else later.first = one;
    later.last = one;
    return 0;
}
