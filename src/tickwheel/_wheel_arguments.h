/* Part of _wheel.c: convert arguments to C values. The messages equal those of arguments.py and entry.py. */

PyObject *refuse(PyObject *type, const char *format, ...)
{
    va_list parts;
    va_start(parts, format);
    PyObject *text = PyUnicode_FromFormatV(format, parts);
    va_end(parts);
    if (text == NULL) return NULL;
    PyErr_SetObject(type, text);
    Py_DECREF(text);
    return NULL;
}

static PyObject *as_int(const char *name, PyObject *value)
{
    if (PyLong_Check(value) && !PyBool_Check(value)) return Py_NewRef(value);
    if (!PyBool_Check(value) && PyIndex_Check(value)) return PyNumber_Index(value);
    PyObject *type = PyType_GetName(Py_TYPE(value));
    if (type) refuse(PyExc_TypeError, "%s must be an int, got %.100R (%U)", name, value, type);
    Py_XDECREF(type);
    return NULL;
}

static PyObject *int_text(PyObject *number)
{
    PyObject *bits = PyObject_CallMethodNoArgs(number, str_bit_length);
    if (bits == NULL) return NULL;
    long long n = PyLong_AsLongLong(bits);
    Py_DECREF(bits);
    if (n < 0 && PyErr_Occurred()) return NULL;
    return n <= 128 ? PyObject_Str(number) : PyUnicode_FromFormat("an int of %lld bits", n);
}

static void refuse_number(PyObject *type, const char *name, int64_t low, int64_t high, PyObject *number)
{
    PyObject *text = int_text(number);
    if (text == NULL) return;
    PyErr_Format(type, "%s must be from %lld to %lld, got %U", name, (long long)low, (long long)high, text);
    Py_DECREF(text);
}

static int as_number(PyObject *error, const char *name, PyObject *value, int64_t low, int64_t high, int64_t *out)
{
    PyObject *number = as_int(name, value);
    if (number == NULL) return -1;
    int overflow;
    long long n = PyLong_AsLongLongAndOverflow(number, &overflow);
    if (n == -1 && !overflow && PyErr_Occurred()) { Py_DECREF(number); return -1; }
    if (overflow || n < low || n > high) {
        refuse_number(error, name, low, high, number);
        Py_DECREF(number);
        return -1;
    }
    Py_DECREF(number);
    *out = n;
    return 0;
}

static inline int as_time(const char *name, PyObject *value, int64_t *out)
{
    if (LIKELY(PyLong_CheckExact(value))) {
        int overflow;
        long long n = PyLong_AsLongLongAndOverflow(value, &overflow);
        if (LIKELY(!overflow && n >= 0)) { *out = n; return 0; }
    }
    return as_number(OutOfRange, name, value, 0, MAX_TIME, out);
}

static int as_limit(PyObject *value, Py_ssize_t *room)
{
    *room = PY_SSIZE_T_MAX;
    if (value == NULL || value == Py_None) return 0;
    PyObject *number = as_int("limit", value);
    if (number == NULL) return -1;
    int overflow;
    long long n = PyLong_AsLongLongAndOverflow(number, &overflow);
    if (overflow < 0 || (!overflow && n < 1)) {
        PyObject *text = int_text(number);
        if (text) PyErr_Format(PyExc_ValueError, "limit must be at least 1, got %U", text);
        Py_XDECREF(text);
        Py_DECREF(number);
        return -1;
    }
    Py_DECREF(number);
    if (!overflow && n < PY_SSIZE_T_MAX) *room = (Py_ssize_t)n;
    return 0;
}

/* Store the positional and keyword arguments of a vectorcall in out[]; the first `required` must be given. */
int bind_arguments(const char *function, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
                   const char *const *names, Py_ssize_t n, Py_ssize_t required, PyObject **out)
{
    if (nargs > n) {
        PyErr_Format(PyExc_TypeError, "%s() takes at most %zd arguments (%zd given)", function, n, nargs);
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) out[i] = i < nargs ? args[i] : NULL;
    Py_ssize_t given = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
    for (Py_ssize_t k = 0; k < given; k++) {
        PyObject *key = PyTuple_GET_ITEM(kwnames, k);
        Py_ssize_t i = 0;
        while (i < n && PyUnicode_CompareWithASCIIString(key, names[i]) != 0) i++;
        if (i == n) {
            PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument '%U'", function, key);
            return -1;
        }
        if (out[i]) {
            PyErr_Format(PyExc_TypeError, "%s() got multiple values for argument '%U'", function, key);
            return -1;
        }
        out[i] = args[nargs + k];
    }
    for (Py_ssize_t i = 0; i < required; i++)
        if (out[i] == NULL) {
            PyErr_Format(PyExc_TypeError, "%s() missing required argument '%s'", function, names[i]);
            return -1;
        }
    return 0;
}

/* 0 if `object` is an entry of this wheel, else -1 with an error. */
static int check_owned(WheelObject *w, PyObject *object)
{
    if (!Py_IS_TYPE(object, &Entry_Type)) {
        PyObject *type = PyType_GetName(Py_TYPE(object));
        if (type) refuse(PyExc_TypeError, "expected an Entry, got %.100R (%U)", object, type);
        Py_XDECREF(type);
        return -1;
    }
    if (((EntryObject *)object)->owner != w->owner) {
        refuse(PyExc_ValueError, "%R belongs to another wheel", object);
        return -1;
    }
    return 0;
}
