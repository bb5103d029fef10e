/* `Numbers`, an iterator whose numbers are claims, and `DropCount`, a count in shared memory.

   Invariants: a number is handed out once, and a count only grows, because the GIL is held from
   the read to the write. Neither type is tracked by the garbage collector. */

#include "hot.h"

/* -- Numbers ------------------------------------------------------------------------------ */

static PyObject *
numbers_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    long long next, stop, step;
    static char *names[] = {"start", "stop", "step", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "LLL:Numbers", names, &next, &stop, &step)) {
        return NULL;
    }
    if (next < 0 || step <= 0 || stop > INT64_MAX - step) {
        PyErr_SetString(PyExc_ValueError, "start must be 0 or more and step positive,"
                                          " and stop + step must fit into 63 bits");
        return NULL;
    }
    Numbers *self = (Numbers *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->next = next;
        self->stop = stop;
        self->step = step;
    }
    return (PyObject *)self;
}

static PyObject *
numbers_next(Numbers *self)
{
    if (self->next >= self->stop) {
        return NULL;
    }
    PyObject *number = PyLong_FromLongLong(self->next);
    if (number != NULL) {
        self->next += self->step;
    }
    return number;
}

static PyObject *
numbers_length_hint(Numbers *self, PyObject *Py_UNUSED(ignored))
{
    int64_t left = self->stop - self->next;
    return PyLong_FromLongLong(left <= 0 ? 0 : (left + self->step - 1) / self->step);
}

static PyMethodDef numbers_methods[] = {
    {"__length_hint__", (PyCFunction)numbers_length_hint, METH_NOARGS,
     "Return how many numbers are left."},
    {NULL},
};

PyTypeObject NumbersType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "rankscope.tracer.native._hot.Numbers",
    .tp_doc = "An iterator over a `range`; taking a number claims it.",
    .tp_basicsize = sizeof(Numbers),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = numbers_new,
    .tp_iter = PyObject_SelfIter,
    .tp_iternext = (iternextfunc)numbers_next,
    .tp_methods = numbers_methods,
};

/* -- DropCount ---------------------------------------------------------------------------- */

static PyObject *
drops_add(DropCount *self, PyObject *Py_UNUSED(ignored))
{
    increment(self);
    Py_RETURN_NONE;
}

static PyObject *
drops_write_to(DropCount *self, PyObject *bytes)
{
    Py_buffer buffer;
    if (PyObject_GetBuffer(bytes, &buffer, PyBUF_WRITABLE) < 0) {
        return NULL;
    }
    if (check_offset(&buffer, self->offset, sizeof(self->count)) < 0) {
        PyBuffer_Release(&buffer);
        return NULL;
    }
    PyBuffer_Release(&self->buffer);
    self->buffer = buffer;
    Py_RETURN_NONE;
}

static PyObject *
drops_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *bytes;
    long long offset;
    static char *names[] = {"buffer", "offset", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OL:DropCount", names, &bytes, &offset)) {
        return NULL;
    }
    DropCount *self = (DropCount *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->offset = offset;
    PyObject *done = drops_write_to(self, bytes);
    if (done == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    Py_DECREF(done);
    return (PyObject *)self;
}

static void
drops_dealloc(DropCount *self)
{
    PyBuffer_Release(&self->buffer);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef drops_methods[] = {
    {"add", (PyCFunction)drops_add, METH_NOARGS, "Count one record."},
    {"write_to", (PyCFunction)drops_write_to, METH_O, "Write further counts to another buffer."},
    {NULL},
};

static PyMemberDef drops_members[] = {
    {"count", T_LONGLONG, offsetof(DropCount, count), READONLY, NULL},
    {"offset", T_LONGLONG, offsetof(DropCount, offset), READONLY, NULL},
    {NULL},
};

PyTypeObject DropCountType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "rankscope.tracer.native._hot.DropCount",
    .tp_doc = "The count of records dropped for one reason, readable in a buffer.",
    .tp_basicsize = sizeof(DropCount),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = drops_new,
    .tp_dealloc = (destructor)drops_dealloc,
    .tp_methods = drops_methods,
    .tp_members = drops_members,
};

int
add_numbers(PyObject *module)
{
    if (PyType_Ready(&NumbersType) < 0 ||
        PyModule_AddObjectRef(module, "numbers", (PyObject *)&NumbersType) < 0) {
        return -1;
    }
    return PyModule_AddType(module, &DropCountType);
}
