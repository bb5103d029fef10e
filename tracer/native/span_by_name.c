/* Spans found by their name: `tracer.span` without a line of Python. */

#include "hot.h"

static PyObject *s_ready;

/* -- Finder: the ready spans of each thread by name --------------------------------------- */

#define NUM_FOUND 16 /* a power of two */

typedef struct {
    PyObject *name;
    ReadySpan *ready;
    uint64_t thread; /* its id, which no other thread ever gets */
} Found;

typedef struct {
    PyObject_HEAD
    PyObject *threads; /* `tracer.record.lane.Lanes.threads` */
    Found found[NUM_FOUND];
} Finder;

/* Look a name up in the thread's own dictionary, and keep it: borrowed, NULL where it is not. */
static ReadySpan *
find_anew(Finder *self, PyObject *name, Found *at, uint64_t thread)
{
    if (!PyUnicode_CheckExact(name)) { /* one of a subclass would run the job's code */
        return NULL;
    }
    PyObject *spans = PyObject_GetAttr(self->threads, s_ready);
    PyObject *ready = NULL;
    if (spans != NULL && PyDict_CheckExact(spans)) {
        ready = PyDict_GetItemWithError(spans, name);
    }
    if (ready != NULL && Py_IS_TYPE(ready, &ReadySpanType)) {
        Py_XSETREF(at->name, Py_NewRef(name));
        Py_XSETREF(at->ready, (ReadySpan *)Py_NewRef(ready));
        at->thread = thread;
    } else {
        PyErr_Clear();
        ready = NULL;
    }
    Py_XDECREF(spans);
    return (ReadySpan *)ready; /* which `at` holds */
}

static PyObject *
finder_find(Finder *self, PyObject *name)
{
    uint64_t thread = PyThreadState_GetID(PyThreadState_Get());
    Found *at = &self->found[((uintptr_t)name >> 4) % NUM_FOUND];
    ReadySpan *ready = at->ready;
    if (at->name != name || at->thread != thread) {
        ready = find_anew(self, name, at, thread);
    }
    if (ready == NULL || ready->in_use) {
        Py_RETURN_NONE;
    }
    return Py_NewRef(ready);
}

static int
finder_clear(Finder *self)
{
    for (int i = 0; i < NUM_FOUND; i++) {
        Py_CLEAR(self->found[i].name);
        Py_CLEAR(self->found[i].ready);
    }
    return 0;
}

static PyObject *
finder_forget(Finder *self, PyObject *Py_UNUSED(ignored))
{
    finder_clear(self);
    Py_RETURN_NONE;
}

static PyObject *
finder_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *threads;
    static char *names[] = {"threads", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:Finder", names, &threads)) {
        return NULL;
    }
    Finder *self = (Finder *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->threads = Py_NewRef(threads);
    }
    return (PyObject *)self;
}

static int
finder_traverse(Finder *self, visitproc visit, void *arg)
{
    Py_VISIT(self->threads);
    for (int i = 0; i < NUM_FOUND; i++) {
        Py_VISIT(self->found[i].ready);
    }
    return 0;
}

static void
finder_dealloc(Finder *self)
{
    PyObject_GC_UnTrack(self);
    finder_clear(self);
    Py_XDECREF(self->threads);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef finder_methods[] = {
    {"find", (PyCFunction)finder_find, METH_O,
     "Return the calling thread's span of a name; None: there is none, or it is in use."},
    {"forget", (PyCFunction)finder_forget, METH_NOARGS, "Forget the names that were asked for."},
    {NULL},
};

static PyTypeObject FinderType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "rankscope.tracer.native._hot.Finder",
    .tp_doc = "The ready spans of each thread by name.",
    .tp_basicsize = sizeof(Finder),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = finder_new,
    .tp_dealloc = (destructor)finder_dealloc,
    .tp_traverse = (traverseproc)finder_traverse,
    .tp_clear = (inquiry)finder_clear,
    .tp_methods = finder_methods,
};

/* -- `tracer.span`, asked for by a name alone --------------------------------------------- */

static struct {
    Finder *finder;       /* of the tracer at work; NULL where plain host spans are not recorded */
    PyObject *unrecorded; /* `tracer.record.noop.NOOP_SPAN` */
    PyObject *plain;      /* `tracer.span` in Python, which knows all the rest */
} asked;

static PyObject *
span_by_name(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t num, PyObject *keywords)
{
    if (num == 1 && keywords == NULL) {
        Finder *finder = asked.finder;
        if (finder == NULL) {
            return Py_NewRef(asked.unrecorded);
        }
        Py_INCREF(finder); /* another thread may turn recording off meanwhile */
        PyObject *ready = finder_find(finder, args[0]);
        Py_DECREF(finder);
        if (ready != Py_None) {
            return ready;
        }
        Py_DECREF(ready);
    }
    return PyObject_Vectorcall(asked.plain, args, (size_t)num, keywords);
}

static PyMethodDef span_method = {
    "span", (PyCFunction)(void (*)(void))span_by_name, METH_FASTCALL | METH_KEYWORDS, NULL};

/* Take `tracer.span` in Python; return it in compiled lines, with the help that is given. */
static PyObject *
fast_span(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t num)
{
    if (num != 3 || !PyCallable_Check(args[0]) || !PyUnicode_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "fast_span takes a function, a span and a text");
        return NULL;
    }
    const char *text = PyUnicode_AsUTF8(args[2]);
    PyObject *module_name = PyObject_GetAttrString(args[0], "__module__");
    char *help = text == NULL || module_name == NULL ? NULL : PyMem_Malloc(strlen(text) + 1);
    if (help != NULL) {
        span_method.ml_doc = strcpy(help, text); /* for as long as the function: for good */
        Py_XSETREF(asked.plain, Py_NewRef(args[0])); /* of a module that was loaded again, too */
        Py_XSETREF(asked.unrecorded, Py_NewRef(args[1]));
        Py_CLEAR(asked.finder);
    } else if (!PyErr_Occurred()) {
        PyErr_NoMemory();
    }
    PyObject *span = help == NULL ? NULL : PyCFunction_NewEx(&span_method, NULL, module_name);
    Py_XDECREF(module_name);
    return span;
}

/* Say whose spans are asked for from now on; None: nobody's. */
static PyObject *
set_finder(PyObject *Py_UNUSED(module), PyObject *finder)
{
    if (finder != Py_None && !Py_IS_TYPE(finder, &FinderType)) {
        PyErr_SetString(PyExc_TypeError, "a Finder, or None");
        return NULL;
    }
    Finder *before = asked.finder;
    asked.finder = finder == Py_None ? NULL : (Finder *)Py_NewRef(finder);
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

/* -- nothing ------------------------------------------------------------------------------ */

static PyObject *
do_nothing(PyObject *Py_UNUSED(module), PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(num))
{
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"do_nothing", (PyCFunction)(void (*)(void))do_nothing, METH_FASTCALL,
     "Take any arguments and do nothing."},
    {"fast_span", (PyCFunction)(void (*)(void))fast_span, METH_FASTCALL,
     "Take `tracer.span` in Python; return it in compiled lines, with the help that is given."},
    {"set_finder", (PyCFunction)set_finder, METH_O,
     "Say whose spans are asked for from now on; None: nobody's."},
    {NULL},
};

int
add_span_by_name(PyObject *module)
{
    static const InternedName names[] = {{&s_ready, "ready"}};
    if (intern_names(names, Py_ARRAY_LENGTH(names)) < 0 ||
        PyModule_AddType(module, &FinderType) < 0) {
        return -1;
    }
    return PyModule_AddFunctions(module, functions);
}
