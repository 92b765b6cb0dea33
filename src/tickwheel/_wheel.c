/* The wheels of wheel.py and rounds.py, native: identical behaviour in every detail.
 *
 * wheel.py explains how they work. Only the layout in memory differs:
 *
 * - An entry is one object of 64 bytes, in one cache line, from arenas (see _wheel_arena.h).
 * - A bucket is an array of pointers, not a linked list, so that a visit can prefetch. An entry
 *   stores its position; cancelling leaves a hole, and holes keep the order. Cascades prepend, so the
 *   array grows at both ends. Positions are logical: sliding the array moves `base`, not entries.
 * - The cyclic collector does not track entries. The wheel owns them and their items, and its
 *   tp_traverse visits the items, so cycles through a wheel are found without tracking a million objects.
 *   For this an entry must not keep its wheel alive: it points to a shared Owner, which the wheel
 *   clears when it is freed.
 *
 * A wheel has no clock, no threads and no policy. Everything runs under the GIL; arbitrary Python code can
 * run only where an object is released, an overflow buffer is called, or an argument is converted, and at
 * those places the wheel is consistent.
 */
#include "_wheel.h"

static PyTypeObject SimpleWheel_Type, RoundsWheel_Type;
PyObject *OutOfRange, *TimerClosed;
static PyObject *TimeWentBack, *WheelBusy;
static PyObject *str_put, *str_take, *str_discard, *str_next_expiry, *str_bit_length;

/* One translation unit, so that the compiler inlines across its parts. Each part uses only the parts above it. */
#include "_wheel_arena.h"
#include "_wheel_levels.h"
#include "_wheel_arguments.h"
#include "_wheel_entries.h"
#include "_wheel_advance.h"
#include "_wheel_methods.h"
#include "_wheel_check.h"
#include "_wheel_construction.h"

/* ---- Tables */

#define REFUSE_PICKLE \
    {"__reduce__", (PyCFunction)(void (*)(void))refuse_pickle, METH_FASTCALL, NULL}, \
    {"__reduce_ex__", (PyCFunction)(void (*)(void))refuse_pickle, METH_FASTCALL, NULL}

static PyMethodDef Entry_methods[] = {
    {"cancel", (PyCFunction)Entry_cancel, METH_NOARGS,
     "cancel($self, /)\n--\n\nRemove it from its wheel and release its item; return True if this call did. O(1)."},
    {"reschedule", FAST(Entry_reschedule),
     "reschedule($self, /, expiry)\n--\n\nMove it to `expiry`, as if newly scheduled; return False if it was not pending. O(1)."},
    {"__class_getitem__", Py_GenericAlias, METH_O | METH_CLASS, NULL},
    REFUSE_PICKLE,
    {NULL}
};

static PyGetSetDef Entry_getset[] = {
    {"expiry", (getter)Entry_get_expiry, NULL, "The time that it was scheduled for, as given."},
    {"item", (getter)Entry_get_item, NULL, "The scheduled item; None after it fired or was cancelled."},
    {"pending", (getter)Entry_get_pending, NULL, "Whether a later `advance` will still return its item."},
    {"rounds", (getter)Entry_get_rounds, NULL, "The full turns that it still waits on a `RoundsWheel`; 0 on any other wheel."},
    {NULL}
};

PyTypeObject Entry_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "tickwheel.Entry",
    .tp_doc = "One item on a wheel, returned by `schedule`: the handle to cancel or reschedule it.",
    .tp_basicsize = sizeof(EntryObject),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)entry_dealloc,
    .tp_repr = (reprfunc)Entry_repr,
    .tp_methods = Entry_methods,
    .tp_getset = Entry_getset,
    .tp_weaklistoffset = offsetof(EntryObject, weakrefs),
};

static PyMethodDef Wheel_methods[] = {
    {"schedule", FAST(Wheel_schedule),
     "schedule($self, /, expiry, item)\n--\n\nSchedule `item`: the first `advance` that reaches `expiry` returns it. O(1)."},
    {"schedule_many", FAST(Wheel_schedule_many),
     "schedule_many($self, /, expiries, items)\n--\n\nSchedule one item per expiry, all or none; return the entries in the same order."},
    {"cancel_many", FAST(Wheel_cancel_many),
     "cancel_many($self, /, entries)\n--\n\nCancel all `entries`; return the number that were pending."},
    {"advance", FAST(Wheel_advance),
     "advance($self, /, now, limit=None)\n--\n\nMove time to `now` and return the due items, at most `limit` of them."},
    {"next_wakeup", (PyCFunction)Wheel_next_wakeup, METH_NOARGS,
     "next_wakeup($self, /)\n--\n\nReturn when the next bucket is due: the time until which a driver may sleep."},
    {"next_expiry", (PyCFunction)Wheel_next_expiry, METH_NOARGS,
     "next_expiry($self, /)\n--\n\nReturn the exact smallest pending expiry, or None."},
    {"where", FAST(Wheel_where),
     "where($self, /, entry)\n--\n\nReturn the level (1 is the lowest) and slot of `entry`, or None if it is not pending."},
    {"snapshot", (PyCFunction)Wheel_snapshot, METH_NOARGS,
     "snapshot($self, /)\n--\n\nReturn one dict per existing level: level, tick, size, pointer, counts by slot."},
    {"_check", (PyCFunction)Wheel_check, METH_NOARGS,
     "_check($self, /)\n--\n\nRaise AssertionError if an invariant is broken."},
    {"__sizeof__", (PyCFunction)Wheel_sizeof, METH_NOARGS, NULL},
    {"__class_getitem__", Py_GenericAlias, METH_O | METH_CLASS, NULL},
    REFUSE_PICKLE,
    {NULL}
};

#define WHEEL_GETSET \
    {"now", (getter)Wheel_get_now, NULL, "The last time passed to `advance`, as given."}, \
    {"visits", (getter)Wheel_get_visits, NULL, "The number of buckets visited so far, on all levels: the cost of `advance`."}

static PyGetSetDef Wheel_getset[] = {WHEEL_GETSET, {NULL}};
static PyGetSetDef RoundsWheel_getset[] = {
    WHEEL_GETSET,
    {"wasted", (getter)RoundsWheel_get_wasted, NULL, "The number of entries that visits walked although they were not due."},
    {NULL}
};

static PyMappingMethods Wheel_as_mapping = {.mp_length = (lenfunc)Wheel_length};
static PyNumberMethods Wheel_as_number = {.nb_bool = (inquiry)Wheel_bool};

#define WHEEL_TYPE(name, doc, create, getset) { \
    PyVarObject_HEAD_INIT(NULL, 0) \
    .tp_name = name, \
    .tp_doc = doc, \
    .tp_basicsize = sizeof(WheelObject), \
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, \
    .tp_new = create, \
    .tp_dealloc = (destructor)Wheel_dealloc, \
    .tp_traverse = (traverseproc)Wheel_traverse, \
    .tp_clear = (inquiry)Wheel_clear, \
    .tp_repr = (reprfunc)Wheel_repr, \
    .tp_as_mapping = &Wheel_as_mapping, \
    .tp_as_number = &Wheel_as_number, \
    .tp_methods = Wheel_methods, \
    .tp_getset = getset, \
    .tp_weaklistoffset = offsetof(WheelObject, weakrefs), \
}

PyTypeObject Wheel_Type =
    WHEEL_TYPE("tickwheel.Wheel", "A hierarchical timing wheel: integer time, no clock, no threads.", Wheel_new, Wheel_getset);
static PyTypeObject SimpleWheel_Type =
    WHEEL_TYPE("tickwheel.SimpleWheel", "One level of slots: the plain timing wheel, for times within its interval.",
               SimpleWheel_new, Wheel_getset);
static PyTypeObject RoundsWheel_Type =
    WHEEL_TYPE("tickwheel.RoundsWheel", "One level of slots; each entry counts the rounds (full turns) that it still waits.",
               RoundsWheel_new, RoundsWheel_getset);

static int module_exec(PyObject *module)
{
    if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
        PyErr_SetString(PyExc_ImportError, "tickwheel._wheel does not support sub-interpreters");
        return -1;
    }
    PyObject *errors = PyImport_ImportModule("tickwheel.errors");
    if (errors == NULL) return -1;
    OutOfRange = PyObject_GetAttrString(errors, "OutOfRange");
    TimeWentBack = PyObject_GetAttrString(errors, "TimeWentBack");
    WheelBusy = PyObject_GetAttrString(errors, "WheelBusy");
    TimerClosed = PyObject_GetAttrString(errors, "TimerClosed");
    Py_DECREF(errors);
    str_put = PyUnicode_InternFromString("put");
    str_take = PyUnicode_InternFromString("take");
    str_discard = PyUnicode_InternFromString("discard");
    str_next_expiry = PyUnicode_InternFromString("next_expiry");
    str_bit_length = PyUnicode_InternFromString("bit_length");
    if (!OutOfRange || !TimeWentBack || !WheelBusy || !TimerClosed || !str_put || !str_take || !str_discard || !str_next_expiry
        || !str_bit_length)
        return -1;
    if (PyModule_AddType(module, &Entry_Type) < 0 || PyModule_AddType(module, &Wheel_Type) < 0
        || PyModule_AddType(module, &SimpleWheel_Type) < 0 || PyModule_AddType(module, &RoundsWheel_Type) < 0)
        return -1;
    return deadlines_exec(module) < 0 || idle_exec(module) < 0 || purgatory_exec(module) < 0 ? -1 : 0;
}

/* Static types and arenas exist once per process, so sub-interpreters and builds without the GIL cannot load this
 * module; tickwheel uses the wheels in Python there. */
static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_USED},
#endif
    {0, NULL}
};

static PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "tickwheel._wheel",
    .m_doc = "The wheels, native; see tickwheel.wheel.",
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__wheel(void) { return PyModuleDef_Init(&module_def); }
