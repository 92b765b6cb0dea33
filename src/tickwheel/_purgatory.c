/* Operations and the lists that watch them, native: the hot path of watchlists.py, which explains how they work.
 *
 * The layout in memory and the locks differ:
 *
 * - A key is a node of a hash table, with a list of links, one per operation watched on it, in order of arrival. An
 *   operation owns its links, so it leaves each list in one step, without a hash or a comparison. A node is freed
 *   with its last link.
 * - The GIL is the purgatory's lock. User code runs only where a key is hashed or compared, a method is called, or an
 *   object is created or released, and at those places the lists are consistent: first the keys are looked up and their
 *   nodes reserved, then the operation is linked to all of them in one step. It is unlinked from all of them in one
 *   step, and its references are released after that.
 * - An operation's lock is an owner and a count. Only a thread that finds another thread inside needs more: it sleeps
 *   on a lock of the system, without the GIL.
 *
 * The collector tracks a purgatory, its operations and its keys. A purgatory has one reference to each of its
 * operations, and each of them has one to its purgatory.
 */
#include "_wheel.h"
#include "pythread.h"

#if defined(_MSC_VER)
#define THREAD_LOCAL __declspec(thread)
#else
#define THREAD_LOCAL __thread
#endif

#define MIN_SLOTS 8
#define INLINE_LINKS 2 /* keys of an operation that need no allocated links: most operations have no more */
#define ON_STACK 8     /* keys of an operation, or operations of a key, that need no allocated array */

typedef struct Node Node;
typedef struct Link Link;
typedef struct Operation Operation;
typedef struct WatchLists WatchLists;

/* An operation on a key's list. */
struct Link {
    Link *before, *after;
    Operation *operation;
    Node *node;
};

/* A key that operations are watched on. */
struct Node {
    Node *next; /* in the same slot */
    PyObject *key;
    Py_hash_t hash;
    Link *first, *last;
    Py_ssize_t uses; /* links, and operations that are about to be linked */
    uint64_t mark;   /* the last watch that linked here: a key given twice is linked once */
};

struct Operation {
    PyObject_HEAD
    unsigned long owner;  /* the thread that holds the lock */
    unsigned int depth;   /* how often it holds it */
    unsigned int waiting; /* threads that sleep on wait_lock */
    char initialized, ticket, completed, signalled;
    char one_thread;   /* its purgatory needs no locks */
    WatchLists *lists; /* the lists that watch it, or NULL */
    Link *links;       /* `inline_links`, or an allocated array, or NULL */
    Py_ssize_t link_count;
    Link inline_links[INLINE_LINKS];
    Operation *before, *after; /* among the operations of `lists` */
    PyObject *timeout;
    PyObject *handle;             /* of its deadline, or NULL */
    PyThread_type_lock wait_lock; /* NULL until a thread has to wait; held, except while `signalled` */
};

enum { COMPLETED, EXPIRED, CANCELLED, END_KINDS };

struct WatchLists {
    PyObject_HEAD
    PyObject *timer;
    PyObject *closed; /* NULL, or the reason for which it is closed */
    Node **slots;     /* a power of two of them, or NULL */
    size_t slot_count;
    size_t node_count;
    uint64_t version; /* of the table: after user code ran, nodes read before may have been freed */
    uint64_t marks;
    Operation *first, *last;
    Py_ssize_t operation_count, watched, delayed;
    unsigned long long ended[END_KINDS];
    char one_thread;
    PyObject *weakrefs;
};

/* A deferred check. */
typedef struct Check {
    struct Check *next;
    WatchLists *lists;
    PyObject *key;
} Check;

/* The depth of a thread's running operations, and the checks deferred until they end. */
typedef struct {
    int depth;
    int draining;
    Check *first, *last;
} Deferred;

static THREAD_LOCAL Deferred deferred;

static PyTypeObject Operation_Type, WatchLists_Type;
static PyObject *str_try_complete, *str_on_complete, *str_on_expiration, *str_report_error, *str_take_ticket, *str_timeout;
static PyObject *str_call_later, *str_cancel, *str_expire;
static PyObject *own_take_ticket, *own_timeout; /* the attributes of a type that does not override them; borrowed */

static Py_ssize_t check(WatchLists *w, PyObject *key);

#include "_purgatory_turn.h"
#include "_purgatory_lists.h"

/* ---- Ending */

/* Whether the class of `op` does not override `name`. */
static inline int has_own(Operation *op, PyObject *name, PyObject *own)
{
    return _PyType_Lookup(Py_TYPE(op), name) == own;
}

/* Claim the right to end it: 1 for one caller only, 0 for all others, -1 with an error. */
static int take_ticket(Operation *op)
{
    if (LIKELY(has_own(op, str_take_ticket, own_take_ticket))) {
        int had = op->ticket;
        op->ticket = 0;
        return had;
    }
    PyObject *answer = PyObject_CallMethodNoArgs((PyObject *)op, str_take_ticket);
    int had = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return had;
}

/* Call a user's method; report an error of it instead of raising it. */
static int call(Operation *op, PyObject *name)
{
    PyObject *answer = PyObject_CallMethodNoArgs((PyObject *)op, name);
    if (LIKELY(answer != NULL)) { Py_DECREF(answer); return 0; }
    return report(op, name);
}

/* 1 if this call completed it, 0 if not, -1 with an error. */
static int complete(Operation *op, int how)
{
    int taken = take_ticket(op);
    if (taken <= 0) return taken;
    op->completed = 1;
    if (op->lists && leave(op, how) < 0) return -1;
    int held = begin_turn(op);
    if (held < 0) return -1;
    return end_turn(op, held, call(op, str_on_complete)) < 0 ? -1 : 1;
}

/* Evaluate the condition: 1 if this completed it, 0 if not, -1 with an error. */
static int evaluate(Operation *op)
{
    if (!op->ticket) return 0;
    PyObject *answer = PyObject_CallMethodNoArgs((PyObject *)op, str_try_complete);
    if (answer == NULL) return -1;
    int yes = PyObject_IsTrue(answer);
    Py_DECREF(answer);
    return yes > 0 ? op->completed : yes;
}

/* Handle the deadline: evaluate the condition once more, then expire. */
static PyObject *expire(Operation *op)
{
    int held = begin_turn(op);
    if (held < 0) return NULL;
    int failed = evaluate(op);
    if (failed < 0) failed = report(op, str_try_complete);
    if (failed >= 0 && op->ticket) {
        failed = complete(op, EXPIRED);
        if (failed > 0) failed = call(op, str_on_expiration);
    }
    if (end_turn(op, held, failed < 0 ? -1 : 0) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *Operation_expire(Operation *op, PyObject *Py_UNUSED(ignored)) { return as_operation((PyObject *)op) ? expire(op) : NULL; }

static PyObject *Expiry_call(ExpiryObject *expiry, PyObject *const *Py_UNUSED(args), size_t Py_UNUSED(n), PyObject *Py_UNUSED(names))
{
    return expire((Operation *)expiry->operation);
}

static PyObject *Expiry_repr(ExpiryObject *expiry) { return PyUnicode_FromFormat("<expiry of %R>", expiry->operation); }

static void Expiry_dealloc(ExpiryObject *expiry)
{
    Py_DECREF(expiry->operation);
    PyObject_Free(expiry);
}

PyTypeObject Expiry_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "tickwheel._wheel.Expiry",
    .tp_basicsize = sizeof(ExpiryObject),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(ExpiryObject, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_repr = (reprfunc)Expiry_repr,
    .tp_dealloc = (destructor)Expiry_dealloc,
};

/* The callback for the deadline. A wheel visits the operation of an Expiry for the collector; another timer cannot. */
static PyObject *expiry_of(Operation *op, PyObject *timer)
{
    if (UNLIKELY(!PyObject_TypeCheck(timer, &Deadlines_Type))) return PyObject_GetAttr((PyObject *)op, str_expire);
    ExpiryObject *expiry = PyObject_New(ExpiryObject, &Expiry_Type);
    if (expiry == NULL) return NULL;
    expiry->vectorcall = (vectorcallfunc)Expiry_call;
    expiry->operation = Py_NewRef(op);
    return (PyObject *)expiry;
}

static PyObject *timeout_of(Operation *op)
{
    if (LIKELY(op->timeout && has_own(op, str_timeout, own_timeout))) return Py_NewRef(op->timeout);
    return PyObject_GetAttr((PyObject *)op, str_timeout);
}

/* timer.call_later(op.timeout, expiry) */
static PyObject *call_later(PyObject *timer, Operation *op)
{
    PyObject *args[4] = {NULL, timer, timeout_of(op), NULL}, *handle = NULL;
    if (args[2] && (args[3] = expiry_of(op, timer)))
        handle = PyObject_VectorcallMethod(str_call_later, args + 1, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    Py_XDECREF(args[2]);
    Py_XDECREF(args[3]);
    return handle;
}

/* Add it to the timer. */
static int delay(WatchLists *w, Operation *op)
{
    PyObject *timer = Py_NewRef(w->timer), *handle = call_later(timer, op);
    Py_DECREF(timer);
    if (handle == NULL) return -1;
    if (LIKELY(op->ticket && op->lists == w && op->handle == NULL)) {
        op->handle = handle;
        w->delayed++;
        return 0;
    }
    int failed = cancel_handle(handle); /* it has completed in the meantime */
    Py_DECREF(handle);
    return failed;
}

/* ---- The methods of a purgatory */

/* Cancel an operation that could not be watched; the error stays set. */
static void cancel_failed_watch(WatchLists *w, Operation *op)
{
    PyObject *error = take_error();
    PyObject *answer = PyObject_CallMethodOneArg((PyObject *)w, str_cancel, (PyObject *)op);
    if (answer) { Py_DECREF(answer); raise_again(error); return; }
    PyObject *another = take_error();
    if (another == error) Py_DECREF(error); else PyException_SetContext(another, error);
    raise_again(another);
}

/* 1 if this completed it, 0 if not, -1 with an error. The caller has begun its turn. */
static int try_else_watch(WatchLists *w, Operation *op, PyObject *keys, const Py_hash_t *hashes)
{
    if (op->lists) return refuse_watched(op);
    int done = evaluate(op);
    if (done > 0) w->ended[COMPLETED]++;
    if (done || !op->ticket) return done;
    done = watch(w, op, keys, hashes);
    if (done == 0) done = evaluate(op);
    if (done == 0) done = op->ticket ? delay(w, op) : 0;
    if (done < 0) cancel_failed_watch(w, op);
    return done;
}

/* Hash every key, so that an unhashable one raises an error before anything changes. */
static int hash_all(PyObject *keys, Py_hash_t *hashes)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(keys); i++)
        if ((hashes[i] = PyObject_Hash(PyTuple_GET_ITEM(keys, i))) == -1) return -1;
    return 0;
}

static PyObject *watch_on(WatchLists *w, Operation *op, PyObject *keys)
{
    Py_hash_t on_stack[ON_STACK], *hashes = on_stack;
    Py_ssize_t n = PyTuple_GET_SIZE(keys);
    if (n > ON_STACK && (hashes = PyMem_New(Py_hash_t, n)) == NULL) return PyErr_NoMemory();
    int done = -1;
    if (w->timer == NULL) PyErr_SetString(PyExc_AttributeError, "the purgatory has no timer: call super().__init__() first");
    else if (hash_all(keys, hashes) < 0) {}
    else if (n == 0) PyErr_SetString(PyExc_ValueError, "keys must not be empty: an operation without keys is never checked");
    else if (w->closed) refuse_closed(w);
    else {
        if (w->one_thread) op->one_thread = 1;
        int held = begin_turn(op);
        if (held >= 0) {
            done = try_else_watch(w, op, keys, hashes);
            if (end_turn(op, held, done < 0 ? -1 : 0) < 0) done = -1;
        }
    }
    if (hashes != on_stack) PyMem_Free(hashes);
    return done < 0 ? NULL : PyBool_FromLong(done);
}

static PyObject *WatchLists_try_complete_else_watch(WatchLists *w, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"operation", "keys"};
    PyObject *given[2];
    if (bind_arguments("try_complete_else_watch", args, nargs, kwnames, names, 2, 2, given) < 0) return NULL;
    Operation *op = as_operation(given[0]);
    PyObject *keys = op ? PySequence_Tuple(given[1]) : NULL;
    if (keys == NULL) return NULL;
    PyObject *answer = watch_on(w, op, keys);
    Py_DECREF(keys);
    return answer;
}

/* Store references to the operations watched on `key` in `*found`, which is `on_stack` or an array to free. The
 * number of them, or -1. */
static Py_ssize_t watched_on(WatchLists *w, PyObject *key, Operation **on_stack, Operation ***found)
{
    Node *node;
    Py_ssize_t n = 0, room = ON_STACK;
    *found = on_stack;
    Py_hash_t hash = PyObject_Hash(key);
    if (hash == -1 || find(w, key, hash, &node) < 0) return -1;
    for (Link *link = node ? node->first : NULL; link; link = link->after) {
        if (n == room) {
            Operation **more = PyMem_New(Operation *, 2 * room);
            if (more) memcpy(more, *found, (size_t)n * sizeof(Operation *));
            if (*found != on_stack) PyMem_Free(*found);
            if (more == NULL) { PyErr_NoMemory(); return -1; }
            *found = more;
            room *= 2;
        }
        (*found)[n++] = link->operation;
    }
    for (Py_ssize_t i = 0; i < n; i++) Py_INCREF((*found)[i]);
    return n;
}

/* Evaluate one operation in its turn: 1 if this completed it, 0 if not, -1 with an error. */
static int check_one(Operation *op)
{
    int held = begin_turn(op);
    if (held < 0) return -1;
    int done = evaluate(op);
    if (done < 0) done = report(op, str_try_complete);
    return end_turn(op, held, done < 0 ? -1 : 0) < 0 ? -1 : done;
}

/* Evaluate every operation watched on `key`; the number that this completed, or -1. */
static Py_ssize_t check(WatchLists *w, PyObject *key)
{
    Operation *on_stack[ON_STACK], **found;
    Py_ssize_t n = watched_on(w, key, on_stack, &found), completed = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        int done = completed < 0 ? 0 : check_one(found[i]);
        completed = done < 0 ? -1 : completed + done;
        if (completed >= 0) Py_DECREF(found[i]);
        else {
            PyObject *error = take_error();
            Py_DECREF(found[i]);
            raise_again(error);
        }
    }
    if (n > 0 && found != on_stack) PyMem_Free(found);
    return n < 0 ? -1 : completed;
}

static PyObject *WatchLists_check_and_complete(WatchLists *w, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"key"};
    PyObject *key;
    if (bind_arguments("check_and_complete", args, nargs, kwnames, names, 1, 1, &key) < 0) return NULL;
    Py_ssize_t completed = deferred.depth ? defer(w, key) : check(w, key);
    return completed < 0 ? NULL : PyLong_FromSsize_t(completed);
}

static PyObject *WatchLists_cancel(WatchLists *w, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"operation"};
    PyObject *given;
    if (bind_arguments("cancel", args, nargs, kwnames, names, 1, 1, &given) < 0) return NULL;
    Operation *op = as_operation(given);
    if (op == NULL) return NULL;
    int taken = op->lists == w ? take_ticket(op) : 0;
    if (taken > 0 && op->lists && leave(op, CANCELLED) < 0) taken = -1;
    return taken < 0 ? NULL : PyBool_FromLong(taken);
}

static PyObject *WatchLists_watched_on(WatchLists *w, PyObject *key)
{
    Operation *on_stack[ON_STACK], **found;
    Py_ssize_t n = watched_on(w, key, on_stack, &found);
    PyObject *list = n < 0 ? NULL : PyList_New(n);
    for (Py_ssize_t i = 0; i < n; i++)
        if (list) PyList_SET_ITEM(list, i, (PyObject *)found[i]); else Py_DECREF(found[i]);
    if (n > 0 && found != on_stack) PyMem_Free(found);
    return list;
}

static PyObject *WatchLists_stats(WatchLists *w, PyObject *Py_UNUSED(ignored))
{
    return Py_BuildValue("{snsnsKsKsK}", "watched", w->watched, "delayed", w->delayed, "completed", w->ended[COMPLETED],
                         "expired", w->ended[EXPIRED], "cancelled", w->ended[CANCELLED]);
}

/* All operations, in order of arrival. Creating the list may run any code; if that changes them, start again. */
static PyObject *all_operations(WatchLists *w)
{
    for (;;) {
        Py_ssize_t n = w->operation_count, i = 0;
        PyObject *list = PyList_New(n);
        if (list == NULL) return NULL;
        if (LIKELY(n == w->operation_count)) {
            for (Operation *op = w->first; op; op = op->after) PyList_SET_ITEM(list, i++, Py_NewRef(op));
            return list;
        }
        Py_DECREF(list);
    }
}

/* Close it for `reason`, and return the watched operations. */
static PyObject *WatchLists_shut(WatchLists *w, PyObject *reason)
{
    Py_XSETREF(w->closed, Py_NewRef(reason));
    return all_operations(w);
}

/* The operations of each key, for tests and debugging. */
static PyObject *WatchLists_get_lists(WatchLists *w, void *Py_UNUSED(closure))
{
    PyObject *lists = PyDict_New(), *keys = lists ? PyList_New(0) : NULL, *list = NULL;
    int failed = keys == NULL;
    for (size_t slot = 0; !failed && slot < w->slot_count; slot++)
        for (Node *node = w->slots[slot]; !failed && node; node = node->next) failed = PyList_Append(keys, node->key) < 0;
    for (Py_ssize_t i = 0; !failed && i < PyList_GET_SIZE(keys); i++) {
        list = WatchLists_watched_on(w, PyList_GET_ITEM(keys, i));
        failed = list == NULL || PyDict_SetItem(lists, PyList_GET_ITEM(keys, i), list) < 0;
        Py_XDECREF(list);
    }
    Py_XDECREF(keys);
    if (failed) Py_CLEAR(lists);
    return lists;
}

#define HOLDS(condition, text) \
    if (!(condition)) { PyErr_SetString(PyExc_AssertionError, text); return NULL; }

static PyObject *WatchLists_check(WatchLists *w, PyObject *Py_UNUSED(ignored))
{
    Py_ssize_t operations = 0, links = 0, linked = 0, delayed = 0;
    size_t nodes = 0;
    for (Operation *op = w->first; op; op = op->after, operations++) {
        HOLDS(op->lists == w && op->ticket, "a watched operation has its ticket");
        HOLDS(op->after ? op->after->before == op : w->last == op, "the operations are linked both ways");
        for (Py_ssize_t i = 0; i < op->link_count; i++) HOLDS(op->links[i].operation == op, "a link belongs to its operation");
        links += op->link_count;
        delayed += op->handle != NULL;
    }
    for (size_t slot = 0; slot < w->slot_count; slot++)
        for (Node *node = w->slots[slot]; node; node = node->next, nodes++) {
            Py_ssize_t uses = 0;
            HOLDS(slot_of(w, node->hash) == slot, "a key is in its slot");
            for (Link *link = node->first; link; link = link->after, uses++) {
                HOLDS(link->node == node && link->operation->lists == w, "a link belongs to its key");
                HOLDS(link->after ? link->after->before == link : node->last == link, "the links are linked both ways");
            }
            HOLDS(uses && uses == node->uses, "a key has links");
            linked += uses;
        }
    HOLDS(operations == w->operation_count && nodes == w->node_count, "operations and keys are counted");
    HOLDS(links == w->watched && linked == w->watched && delayed == w->delayed, "watched and delayed are exact");
    Py_RETURN_NONE;
}

static PyObject *WatchLists_get_watched(WatchLists *w, void *Py_UNUSED(closure)) { return PyLong_FromSsize_t(w->watched); }

static PyObject *WatchLists_get_delayed(WatchLists *w, void *Py_UNUSED(closure)) { return PyLong_FromSsize_t(w->delayed); }

static PyObject *WatchLists_get_timer(WatchLists *w, void *Py_UNUSED(closure)) { return Py_NewRef(w->timer ? w->timer : Py_None); }

/* ---- Creating and freeing a purgatory */

/* WatchLists(timer, one_thread) */
static int WatchLists_init(WatchLists *w, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"timer", "one_thread", NULL};
    PyObject *timer;
    int one_thread;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Op:WatchLists", names, &timer, &one_thread)) return -1;
    if (w->operation_count) { PyErr_SetString(PyExc_RuntimeError, "a purgatory can be initialized only once"); return -1; }
    Py_XSETREF(w->timer, Py_NewRef(timer));
    w->one_thread = (char)one_thread;
    return 0;
}

static int WatchLists_traverse(WatchLists *w, visitproc visit, void *arg)
{
    Py_VISIT(w->timer);
    Py_VISIT(w->closed);
    for (Operation *op = w->first; op; op = op->after) Py_VISIT(op);
    for (size_t slot = 0; slot < w->slot_count; slot++)
        for (Node *node = w->slots[slot]; node; node = node->next) Py_VISIT(node->key);
    return 0;
}

static int WatchLists_clear(WatchLists *w)
{
    Py_INCREF(w); /* its operations may hold the last references */
    while (w->first) {
        Operation *op = w->first;
        release(op, detach(op));
    }
    Py_CLEAR(w->timer);
    Py_DECREF(w);
    return 0;
}

static void WatchLists_dealloc(WatchLists *w)
{
    assert(w->first == NULL && w->node_count == 0); /* watched operations keep it alive */
    PyObject_GC_UnTrack(w);
    if (w->weakrefs) PyObject_ClearWeakRefs((PyObject *)w);
    Py_CLEAR(w->timer);
    Py_CLEAR(w->closed);
    PyMem_Free(w->slots);
    Py_TYPE(w)->tp_free((PyObject *)w);
}

static PyMethodDef WatchLists_methods[] = {
    {"try_complete_else_watch", FAST(WatchLists_try_complete_else_watch),
     "try_complete_else_watch($self, /, operation, keys)\n--\n\n"
     "Complete `operation` now, or watch it on `keys` until it completes or times out.\n\nReturn True if this call completed it."},
    {"check_and_complete", FAST(WatchLists_check_and_complete),
     "check_and_complete($self, /, key)\n--\n\nEvaluate every operation watched on `key`; return the number that this completed.\n\n"
     "Inside an operation it defers the check until that operation's lock is free, and returns 0."},
    {"cancel", FAST(WatchLists_cancel),
     "cancel($self, /, operation)\n--\n\nRemove `operation` without completing it; return True if this call did."},
    {"stats", (PyCFunction)WatchLists_stats, METH_NOARGS,
     "stats($self, /)\n--\n\nReturn the current watched and delayed, and counts of how operations have ended."},
    {"_watched_on", (PyCFunction)WatchLists_watched_on, METH_O, NULL},
    {"_shut", (PyCFunction)WatchLists_shut, METH_O, NULL},
    {"_check", (PyCFunction)WatchLists_check, METH_NOARGS, NULL},
    {NULL}
};

static PyGetSetDef WatchLists_getset[] = {
    {"watched", (getter)WatchLists_get_watched, NULL, "The number of watched (operation, key) pairs."},
    {"delayed", (getter)WatchLists_get_delayed, NULL, "The number of operations in the timer."},
    {"_timer", (getter)WatchLists_get_timer, NULL, NULL},
    {"_lists", (getter)WatchLists_get_lists, NULL, NULL},
    {NULL}
};

static PyTypeObject WatchLists_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "tickwheel._wheel.WatchLists",
    .tp_doc = "Operations by the keys that they are watched on; see tickwheel.watchlists.",
    .tp_basicsize = sizeof(WatchLists),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .tp_init = (initproc)WatchLists_init,
    .tp_dealloc = (destructor)WatchLists_dealloc,
    .tp_traverse = (traverseproc)WatchLists_traverse,
    .tp_clear = (inquiry)WatchLists_clear,
    .tp_methods = WatchLists_methods,
    .tp_getset = WatchLists_getset,
    .tp_weaklistoffset = offsetof(WatchLists, weakrefs),
};

/* ---- Operations */

static PyObject *Operation_force_complete(Operation *op, PyObject *Py_UNUSED(ignored))
{
    int done = as_operation((PyObject *)op) ? complete(op, COMPLETED) : -1;
    return done < 0 ? NULL : PyBool_FromLong(done);
}

static PyObject *Operation_take_ticket(Operation *op, PyObject *Py_UNUSED(ignored))
{
    int had = op->ticket;
    op->ticket = 0;
    return PyBool_FromLong(had);
}

static PyObject *Operation_get_completed(Operation *op, void *Py_UNUSED(closure))
{
    return as_operation((PyObject *)op) ? PyBool_FromLong(op->completed) : NULL;
}

static PyObject *Operation_get_timeout(Operation *op, void *Py_UNUSED(closure))
{
    if (op->timeout) return Py_NewRef(op->timeout);
    PyErr_SetObject(PyExc_AttributeError, str_timeout);
    return NULL;
}

static int Operation_set_timeout(Operation *op, PyObject *value, void *Py_UNUSED(closure))
{
    Py_XSETREF(op->timeout, Py_XNewRef(value));
    return 0;
}

static int Operation_init(Operation *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"timeout", NULL};
    PyObject *timeout;
    int64_t ns;
    if (LIKELY(kwargs == NULL && PyTuple_GET_SIZE(args) == 1)) timeout = PyTuple_GET_ITEM(args, 0);
    else if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:DelayedOperation", names, &timeout)) return -1;
    if (as_ns("timeout", timeout, &ns) < 0) return -1;
    if (op->lists) return refuse_watched(op);
    if (LIKELY(has_own(op, str_timeout, own_timeout))) Py_XSETREF(op->timeout, Py_NewRef(timeout));
    else if (PyObject_SetAttr((PyObject *)op, str_timeout, timeout) < 0) return -1;
    op->initialized = op->ticket = 1;
    op->completed = 0;
    return 0;
}

static int Operation_traverse(Operation *op, visitproc visit, void *arg)
{
    Py_VISIT(op->timeout);
    Py_VISIT(op->lists);
    Py_VISIT(op->handle);
    return 0;
}

static int Operation_clear(Operation *op)
{
    Py_CLEAR(op->timeout);
    return 0; /* its purgatory releases it */
}

static void Operation_dealloc(Operation *op)
{
    assert(op->lists == NULL && op->links == NULL); /* its purgatory keeps a watched operation alive */
    PyObject_GC_UnTrack(op);
    Py_CLEAR(op->timeout);
    if (op->wait_lock) {
        if (!op->signalled) PyThread_release_lock(op->wait_lock);
        PyThread_free_lock(op->wait_lock);
    }
    Py_TYPE(op)->tp_free((PyObject *)op);
}

static PyMethodDef Operation_methods[] = {
    {"force_complete", (PyCFunction)Operation_force_complete, METH_NOARGS,
     "force_complete($self, /)\n--\n\nComplete it; return True for the one call that did."},
    {"_take_ticket", (PyCFunction)Operation_take_ticket, METH_NOARGS, NULL},
    {"_expire", (PyCFunction)Operation_expire, METH_NOARGS, NULL},
    {NULL}
};

static PyGetSetDef Operation_getset[] = {
    {"completed", (getter)Operation_get_completed, NULL, "Whether it has completed, by its condition or its deadline."},
    {"timeout", (getter)Operation_get_timeout, (setter)Operation_set_timeout, "The seconds from its being watched to its deadline."},
    {NULL}
};

static PyTypeObject Operation_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "tickwheel._wheel.Operation",
    .tp_doc = "One operation; see tickwheel.watchlists.",
    .tp_basicsize = sizeof(Operation),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .tp_init = (initproc)Operation_init,
    .tp_dealloc = (destructor)Operation_dealloc,
    .tp_traverse = (traverseproc)Operation_traverse,
    .tp_clear = (inquiry)Operation_clear,
    .tp_methods = Operation_methods,
    .tp_getset = Operation_getset,
};

int purgatory_exec(PyObject *module)
{
    str_try_complete = PyUnicode_InternFromString("try_complete");
    str_on_complete = PyUnicode_InternFromString("on_complete");
    str_on_expiration = PyUnicode_InternFromString("on_expiration");
    str_report_error = PyUnicode_InternFromString("_report_error");
    str_take_ticket = PyUnicode_InternFromString("_take_ticket");
    str_timeout = PyUnicode_InternFromString("timeout");
    str_call_later = PyUnicode_InternFromString("call_later");
    str_cancel = PyUnicode_InternFromString("cancel");
    str_expire = PyUnicode_InternFromString("_expire");
    if (!str_try_complete || !str_on_complete || !str_on_expiration || !str_report_error || !str_take_ticket || !str_timeout
        || !str_call_later || !str_cancel || !str_expire)
        return -1;
    /* object's tp_new lays out the attributes of a Python class where the interpreter finds them fastest */
    Operation_Type.tp_new = WatchLists_Type.tp_new = PyBaseObject_Type.tp_new;
    if (PyType_Ready(&Expiry_Type) < 0) return -1;
    if (PyModule_AddType(module, &Operation_Type) < 0 || PyModule_AddType(module, &WatchLists_Type) < 0) return -1;
    own_take_ticket = _PyType_Lookup(&Operation_Type, str_take_ticket);
    own_timeout = _PyType_Lookup(&Operation_Type, str_timeout);
    return 0;
}
