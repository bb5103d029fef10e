/* `Finder`, the lookup of a thread's ready spans by name, and `tracer.span` over it.

   Invariants:
   - A cache entry is used only for the same name object and the same thread id. Thread ids are
     never reused, so a span cannot be found by another thread.
   - A span in use is never returned.
   - Only names of type `str` itself are looked up: the hash of a subclass may be the job's code. */

#include "hot.h"

/* -- Finder ------------------------------------------------------------------------------- */

#define CACHE_SIZE 16 /* a power of two */

typedef struct {
    PyObject *name;
    ReadySpan *ready;
    uint64_t thread; /* id of the thread, never reused */
} CacheEntry;

typedef struct {
    PyObject_HEAD
    PyObject *threads; /* `tracer.record.lane.Lanes.threads` */
    CacheEntry cache[CACHE_SIZE];
} Finder;

/* Look a name up in the thread's dictionary and cache it: a borrowed reference, NULL if unknown. */
static ReadySpan *
look_up(Finder *self, PyObject *name, CacheEntry *entry, uint64_t thread)
{
    if (!PyUnicode_CheckExact(name)) {
        return NULL;
    }
    PyObject *spans = PyObject_GetAttr(self->threads, s_ready);
    PyObject *ready = NULL;
    if (spans != NULL && PyDict_CheckExact(spans)) {
        ready = PyDict_GetItemWithError(spans, name);
    }
    if (ready != NULL && Py_IS_TYPE(ready, &ReadySpanType)) {
        Py_XSETREF(entry->name, Py_NewRef(name));
        Py_XSETREF(entry->ready, (ReadySpan *)Py_NewRef(ready));
        entry->thread = thread;
    } else {
        PyErr_Clear();
        ready = NULL;
    }
    Py_XDECREF(spans);
    return (ReadySpan *)ready; /* held by `entry` */
}

static PyObject *
finder_find(Finder *self, PyObject *name)
{
    uint64_t thread = PyThreadState_GetID(PyThreadState_Get());
    CacheEntry *entry = &self->cache[((uintptr_t)name >> 4) % CACHE_SIZE];
    ReadySpan *ready = entry->ready;
    if (entry->name != name || entry->thread != thread) {
        ready = look_up(self, name, entry, thread);
    }
    if (ready == NULL || ready->in_use) {
        Py_RETURN_NONE;
    }
    return Py_NewRef(ready);
}

static int
finder_clear(Finder *self)
{
    for (int i = 0; i < CACHE_SIZE; i++) {
        Py_CLEAR(self->cache[i].name);
        Py_CLEAR(self->cache[i].ready);
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
    for (int i = 0; i < CACHE_SIZE; i++) {
        Py_VISIT(self->cache[i].ready);
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
     "Return the calling thread's span of a name; None if there is none or it is in use."},
    {"forget", (PyCFunction)finder_forget, METH_NOARGS, "Clear the cache."},
    {NULL},
};

static PyTypeObject FinderType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "rankscope.tracer.native._hot.Finder",
    .tp_doc = "Lookup of each thread's ready spans by name.",
    .tp_basicsize = sizeof(Finder),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = finder_new,
    .tp_dealloc = (destructor)finder_dealloc,
    .tp_traverse = (traverseproc)finder_traverse,
    .tp_clear = (inquiry)finder_clear,
    .tp_methods = finder_methods,
};

/* -- tracer.span -------------------------------------------------------------------------- */

static struct {
    Finder *finder;     /* of the present tracer; NULL if plain host spans are not recorded */
    PyObject *disabled; /* `tracer.record.interface.NOOP_SPAN` */
    PyObject *plain;    /* the Python function, for all other arguments */
} tracer_span;

static PyObject *
span_by_name(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t num, PyObject *keywords)
{
    if (num == 1 && keywords == NULL) {
        Finder *finder = tracer_span.finder;
        if (finder == NULL) {
            return Py_NewRef(tracer_span.disabled);
        }
        Py_INCREF(finder); /* another thread may turn recording off at the same time */
        PyObject *ready = finder_find(finder, args[0]);
        Py_DECREF(finder);
        if (ready != Py_None) {
            return ready;
        }
        Py_DECREF(ready);
    }
    return PyObject_Vectorcall(tracer_span.plain, args, (size_t)num, keywords);
}

static PyMethodDef span_method = {
    "span", (PyCFunction)(void (*)(void))span_by_name, METH_FASTCALL | METH_KEYWORDS, NULL};

/* Return the compiled `tracer.span` for its Python function, disabled span and help text. */
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
        span_method.ml_doc = strcpy(help, text); /* never freed, like the function */
        Py_XSETREF(tracer_span.plain, Py_NewRef(args[0])); /* again, if the module is reloaded */
        Py_XSETREF(tracer_span.disabled, Py_NewRef(args[1]));
        Py_CLEAR(tracer_span.finder);
    } else if (!PyErr_Occurred()) {
        PyErr_NoMemory();
    }
    PyObject *span = help == NULL ? NULL : PyCFunction_NewEx(&span_method, NULL, module_name);
    Py_XDECREF(module_name);
    return span;
}

/* Set the finder that `tracer.span` uses; None if nothing is recorded. */
static PyObject *
set_finder(PyObject *Py_UNUSED(module), PyObject *finder)
{
    if (finder != Py_None && !Py_IS_TYPE(finder, &FinderType)) {
        PyErr_SetString(PyExc_TypeError, "set_finder takes a Finder or None");
        return NULL;
    }
    Finder *before = tracer_span.finder;
    tracer_span.finder = finder == Py_None ? NULL : (Finder *)Py_NewRef(finder);
    Py_XDECREF(before);
    Py_RETURN_NONE;
}


static PyObject *
do_nothing(PyObject *Py_UNUSED(module), PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(num))
{
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"do_nothing", (PyCFunction)(void (*)(void))do_nothing, METH_FASTCALL,
     "Accept any arguments and do nothing."},
    {"fast_span", (PyCFunction)(void (*)(void))fast_span, METH_FASTCALL,
     "Return the compiled `tracer.span` for its Python function, disabled span and help text."},
    {"set_finder", (PyCFunction)set_finder, METH_O,
     "Set the finder that `tracer.span` uses; None if nothing is recorded."},
    {NULL},
};

int
add_span_by_name(PyObject *module)
{
    if (PyModule_AddType(module, &FinderType) < 0) {
        return -1;
    }
    return PyModule_AddFunctions(module, functions);
}
