/* The Python stacks of all other threads.

   Invariant: from the first frame to the last the garbage collector is off and the GIL is held, so
   no thread moves: all stacks are of one moment (docs/decisions/0067-stacks-of-others.md). */

#include "hot.h"

/* Add (code, line) of a frame and of its callers, up to `max_frames`: 0 or -1. */
static int
add_lines(PyObject *lines, PyFrameObject *frame, Py_ssize_t max_frames)
{
    int status = 0;
    Py_INCREF(frame);
    while (frame != NULL && status == 0 && PyList_GET_SIZE(lines) < max_frames) {
        PyObject *code = (PyObject *)PyFrame_GetCode(frame);
        int number = PyFrame_GetLineNumber(frame);
        PyObject *line = number > 0 ? Py_BuildValue("(Oi)", code, number)
                                    : Py_BuildValue("(OO)", code, Py_None);
        Py_DECREF(code);
        status = line == NULL ? -1 : PyList_Append(lines, line);
        Py_XDECREF(line);
        PyFrameObject *back = PyFrame_GetBack(frame);
        Py_DECREF(frame);
        frame = back;
    }
    Py_XDECREF(frame);
    return status;
}

static PyObject *
frames_of_threads(PyObject *Py_UNUSED(module), PyObject *number)
{
    Py_ssize_t max_frames = PyLong_AsSsize_t(number), at = 0;
    PyObject *current = PySys_GetObject("_current_frames"), *found = NULL, *ident, *frame;
    if (current == NULL && !PyErr_Occurred()) {
        PyErr_SetString(PyExc_RuntimeError, "sys._current_frames is missing");
    }
    if (PyErr_Occurred()) {
        return NULL;
    }
    int was_enabled = PyGC_Disable();
    PyObject *frames = PyObject_CallNoArgs(current);
    if (frames != NULL && PyDict_CheckExact(frames)) {
        found = PyList_New(0);
    }
    while (found != NULL && PyDict_Next(frames, &at, &ident, &frame)) {
        unsigned long thread = PyLong_AsUnsignedLong(ident);
        if (!PyErr_Occurred() && thread == PyThread_get_thread_ident()) {
            continue;
        }
        PyObject *lines = PyList_New(0);
        PyObject *pair = lines == NULL ? NULL : PyTuple_Pack(2, ident, lines);
        if (PyErr_Occurred() || !PyFrame_Check(frame) ||
            add_lines(lines, (PyFrameObject *)frame, max_frames) < 0 ||
            PyList_Append(found, pair) < 0) {
            Py_CLEAR(found);
        }
        Py_XDECREF(lines);
        Py_XDECREF(pair);
    }
    Py_XDECREF(frames);
    if (was_enabled) {
        PyGC_Enable();
    }
    if (found == NULL && !PyErr_Occurred()) {
        PyErr_SetString(PyExc_TypeError, "sys._current_frames returned no frames");
    }
    return found;
}

static PyMethodDef functions[] = {
    {"frames_of_threads", (PyCFunction)frames_of_threads, METH_O,
     "Return the Python stack of each thread except the calling one."},
    {NULL},
};

int
add_frames(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
