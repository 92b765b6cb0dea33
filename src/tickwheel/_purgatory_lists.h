/* Part of _purgatory.c: the hash table of keys, and linking operations to them. */

/* ---- Keys */

static inline size_t slot_of(const WatchLists *w, Py_hash_t hash)
{
    return (size_t)(((uint64_t)hash * 0x9E3779B97F4A7C15u) >> 32) & (w->slot_count - 1);
}

/* Change the number of slots; without memory the table stays as it is, and is only slower. */
static void resize(WatchLists *w, size_t slot_count)
{
    Node **old = w->slots, **slots = PyMem_Calloc(slot_count, sizeof(Node *));
    if (slots == NULL) return;
    size_t old_count = w->slot_count;
    w->slots = slots;
    w->slot_count = slot_count;
    w->version++;
    for (size_t i = 0; i < old_count; i++)
        for (Node *node = old[i], *next; node; node = next) {
            size_t slot = slot_of(w, node->hash);
            next = node->next;
            node->next = slots[slot];
            slots[slot] = node;
        }
    PyMem_Free(old);
}

/* Store the node of `key`, or NULL, in *found: 0, or -1 with an error of the comparison. A comparison may run any code;
 * if that changes the table, the search starts again. */
static int find(WatchLists *w, PyObject *key, Py_hash_t hash, Node **found)
{
    *found = NULL;
again:
    if (w->slots == NULL) return 0;
    for (Node *node = w->slots[slot_of(w, hash)]; node; node = node->next) {
        if (node->key != key) {
            if (node->hash != hash) continue;
            uint64_t version = w->version;
            PyObject *other = Py_NewRef(node->key);
            int same = PyObject_RichCompareBool(other, key, Py_EQ);
            Py_DECREF(other);
            if (same < 0) return -1;
            if (UNLIKELY(version != w->version)) goto again;
            if (!same) continue;
        }
        *found = node;
        return 0;
    }
    return 0;
}

/* Return the node of `key`, created if needed, with one more use; NULL with an error. */
static Node *reserve(WatchLists *w, PyObject *key, Py_hash_t hash)
{
    Node *node;
    if (find(w, key, hash, &node) < 0) return NULL;
    if (node == NULL) {
        if (w->node_count >= w->slot_count) resize(w, w->slot_count ? 2 * w->slot_count : MIN_SLOTS);
        node = w->slots ? PyMem_Malloc(sizeof(Node)) : NULL;
        if (node == NULL) { PyErr_NoMemory(); return NULL; }
        Node **slot = &w->slots[slot_of(w, hash)];
        *node = (Node){.next = *slot, .key = Py_NewRef(key), .hash = hash};
        *slot = node;
        w->node_count++;
        w->version++;
    }
    node->uses++;
    return node;
}

/* Remove one use. An unused node joins `*unused`, which is freed later, where any code may run. */
static void unreserve(WatchLists *w, Node *node, Node **unused)
{
    if (--node->uses) return;
    Node **at = &w->slots[slot_of(w, node->hash)];
    while (*at != node) at = &(*at)->next;
    *at = node->next;
    w->node_count--;
    w->version++;
    if (w->slot_count > MIN_SLOTS && w->node_count < w->slot_count / 8) resize(w, w->slot_count / 2);
    node->next = *unused;
    *unused = node;
}

static void free_nodes(Node *node)
{
    while (node) {
        Node *next = node->next;
        Py_DECREF(node->key);
        PyMem_Free(node);
        node = next;
    }
}

/* ---- Watching and leaving */

static void link_to(Link *link, Node *node, Operation *op)
{
    *link = (Link){node->last, NULL, op, node};
    if (node->last) node->last->after = link; else node->first = link;
    node->last = link;
}

static void unlink_from(Link *link)
{
    Node *node = link->node;
    if (link->before) link->before->after = link->after; else node->first = link->after;
    if (link->after) link->after->before = link->before; else node->last = link->before;
}

/* The references of a removed operation, to be released where any code may run. */
typedef struct {
    WatchLists *lists;
    PyObject *handle;
    Link *links; /* the allocated array, or NULL */
    Node *nodes; /* a list of unused nodes */
} Detached;

/* Remove it from every list. No user code runs here. */
static Detached detach(Operation *op)
{
    WatchLists *w = op->lists;
    Detached taken = {w, op->handle, op->links == op->inline_links ? NULL : op->links, NULL};
    w->operation_count--;
    w->watched -= op->link_count;
    w->delayed -= op->handle != NULL;
    for (Py_ssize_t i = 0; i < op->link_count; i++) {
        unlink_from(&op->links[i]);
        unreserve(w, op->links[i].node, &taken.nodes);
    }
    if (op->before) op->before->after = op->after; else w->first = op->after;
    if (op->after) op->after->before = op->before; else w->last = op->before;
    op->before = op->after = NULL;
    op->lists = NULL;
    op->handle = NULL;
    op->links = NULL;
    op->link_count = 0;
    return taken;
}

/* Release these references, and the one that the purgatory had to `op`. */
static void release(Operation *op, Detached taken)
{
    free_nodes(taken.nodes);
    PyMem_Free(taken.links);
    Py_XDECREF(taken.handle);
    Py_DECREF(taken.lists);
    Py_DECREF(op);
}

static int cancel_handle(PyObject *handle)
{
    if (LIKELY(Py_IS_TYPE(handle, &Handle_Type))) {
        handle_cancel((EntryObject *)handle);
        return 0;
    }
    PyObject *answer = PyObject_CallMethodNoArgs(handle, str_cancel);
    Py_XDECREF(answer);
    return answer ? 0 : -1;
}

/* Remove `op` from every list and the timer; the caller has its ticket. */
static int leave(Operation *op, int how)
{
    op->lists->ended[how]++;
    Detached taken = detach(op);
    int failed = taken.handle ? cancel_handle(taken.handle) : 0;
    PyObject *error = failed ? take_error() : NULL;
    release(op, taken);
    if (error) raise_again(error);
    return failed;
}

static int refuse_closed(WatchLists *w)
{
    PyErr_SetObject(TimerClosed, w->closed);
    return -1;
}

static int refuse_watched(Operation *op)
{
    refuse(PyExc_ValueError, "%R is already watched", op);
    return -1;
}

/* Link `op` to its reserved nodes. */
static void link_all(WatchLists *w, Operation *op, Link *links, Node **nodes, Py_ssize_t n)
{
    Py_ssize_t linked = 0;
    uint64_t mark = ++w->marks;
    for (Py_ssize_t i = 0; i < n; i++) {
        Node *node = nodes[i];
        if (node->mark == mark) { node->uses--; continue; } /* a key given twice */
        node->mark = mark;
        link_to(&links[linked++], node, op);
    }
    op->links = links;
    op->link_count = linked;
    op->lists = (WatchLists *)Py_NewRef(w);
    Py_INCREF(op);
    op->before = w->last;
    if (w->last) w->last->after = op; else w->first = op;
    w->last = op;
    w->operation_count++;
    w->watched += linked;
}

static int watch(WatchLists *w, Operation *op, PyObject *keys, const Py_hash_t *hashes)
{
    Py_ssize_t n = PyTuple_GET_SIZE(keys), reserved = 0;
    Node *on_stack[ON_STACK], **nodes = n > ON_STACK ? PyMem_New(Node *, n) : on_stack, *unused = NULL;
    Link *links = n > INLINE_LINKS ? PyMem_New(Link, n) : op->inline_links;
    int failed = nodes == NULL || links == NULL;
    if (failed) PyErr_NoMemory();
    while (!failed && reserved < n) {
        nodes[reserved] = reserve(w, PyTuple_GET_ITEM(keys, reserved), hashes[reserved]);
        if (nodes[reserved]) reserved++; else failed = 1;
    }
    /* No user code runs between this check and the linking. */
    if (LIKELY(!failed && w->closed == NULL && op->ticket && op->lists == NULL)) link_all(w, op, links, nodes, n);
    else {
        for (Py_ssize_t i = 0; i < reserved; i++) unreserve(w, nodes[i], &unused);
        if (links != op->inline_links) PyMem_Free(links);
        PyObject *error = take_error();
        free_nodes(unused);
        if (error) raise_again(error);
        else if (w->closed) failed = refuse_closed(w);
        else if (op->lists) failed = refuse_watched(op);
    }
    if (nodes != on_stack) PyMem_Free(nodes);
    return failed ? -1 : 0;
}
