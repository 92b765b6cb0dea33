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

/* Pass an Exception to self._report_error(name, error): 0, or -1 if the caller must raise it. */
static int report(Operation *op, PyObject *name)
{
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
    PyObject *error = take_error();
    PyObject *answer = PyObject_CallMethodObjArgs((PyObject *)op, str_report_error, name, error, NULL);
    Py_XDECREF(error);
    Py_XDECREF(answer);
    return answer ? 0 : -1;
}

/* The argument as an initialized operation, or NULL with an error. */
static Operation *as_operation(PyObject *given)
{
    if (UNLIKELY(!PyObject_TypeCheck(given, &Operation_Type))) {
        refuse(PyExc_TypeError, "operation must be a DelayedOperation, got %.100R", given);
        return NULL;
    }
    Operation *op = (Operation *)given;
    if (LIKELY(op->initialized)) return op;
    refuse(PyExc_AttributeError, "%R has no timeout: call super().__init__(timeout) first", given);
    return NULL;
}

/* ---- An operation's turn: hold its lock; the end of the outermost turn runs the deferred checks */

/* Sleep until the lock is free; -1 if a signal handler raises. After waking, another thread may have taken the lock. */
static int wait_for_lock(Operation *op, unsigned long me)
{
    while (op->depth && op->owner != me) {
        if (op->wait_lock == NULL) {
            op->wait_lock = PyThread_allocate_lock();
            if (op->wait_lock == NULL) { PyErr_NoMemory(); return -1; }
            PyThread_acquire_lock(op->wait_lock, WAIT_LOCK);
        }
        PyLockStatus status;
        op->waiting++;
        Py_BEGIN_ALLOW_THREADS
        status = PyThread_acquire_lock_timed(op->wait_lock, -1, 1);
        Py_END_ALLOW_THREADS
        op->waiting--;
        if (status == PY_LOCK_ACQUIRED) op->signalled = 0;
        else if (Py_MakePendingCalls() < 0) return -1;
    }
    return 0;
}

/* 1 if it took the lock, 0 if no lock is needed, -1 with an error. Pass the result to `end_turn`. */
static inline int begin_turn(Operation *op)
{
    if (!op->one_thread) {
        unsigned long me = PyThread_get_thread_ident();
        if (UNLIKELY(op->depth && op->owner != me) && wait_for_lock(op, me) < 0) return -1;
        op->owner = me;
        op->depth++;
    }
    deferred.depth++;
    return !op->one_thread;
}

/* Run the deferred checks one after the other, including those that they defer. After an interrupt the remaining
 * checks run first. */
static int drain(void)
{
    PyObject *before = take_error(), *failure = NULL;
    Check *next;
    deferred.draining = 1;
    while ((next = deferred.first) != NULL) {
        deferred.first = next->next;
        if (check(next->lists, next->key) < 0) {
            PyObject *error = take_error();
            if (failure == NULL) failure = error; else Py_DECREF(error);
        }
        Py_DECREF(next->lists);
        Py_DECREF(next->key);
        PyMem_Free(next);
    }
    deferred.draining = 0;
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
    deferred.depth--;
    if (held && --op->depth == 0 && UNLIKELY(op->waiting) && !op->signalled) {
        op->signalled = 1;
        PyThread_release_lock(op->wait_lock);
    }
    if (UNLIKELY(deferred.first != NULL) && !deferred.depth && !deferred.draining) return drain();
    return failed;
}

static int defer(WatchLists *w, PyObject *key)
{
    if (PyObject_Hash(key) == -1) return -1; /* raise an error for an unhashable key now */
    Check *one = PyMem_Malloc(sizeof(Check));
    if (one == NULL) { PyErr_NoMemory(); return -1; }
    *one = (Check){NULL, (WatchLists *)Py_NewRef(w), Py_NewRef(key)};
    if (deferred.first) deferred.last->next = one; else deferred.first = one;
    deferred.last = one;
    return 0;
}
