/* The module `_hot`, the compiled part of the tracer:

   - numbers.c: row claims and drop counts;
   - lane.c: writing records, and the open table;
   - span.c: spans that `with` enters and leaves;
   - span_by_name.c: finding a thread's span by its name;
   - communication.c: communications and waits by the host clock;
   - frames.c: the stacks of other threads.

   The Python modules of this folder do the same without a compiler; `choice.py` chooses.

   Invariants of all files:
   - Everything runs under the GIL, which makes the claim of a row atomic.
   - Nothing takes a lock or calls code of the job.
   - A span makes no object that the garbage collector tracks.
   - Between two spans the job streams its weights through the caches, so the cost of a span is the
     memory that it touches: docs/decisions/0050-span-cost.md. */

#include "hot.h"

#define DEFINE_NAME(name) PyObject *s_##name;
INTERNED_NAMES(DEFINE_NAME)

#define INTERN_NAME(name)                                         \
    if ((s_##name = PyUnicode_InternFromString(#name)) == NULL) { \
        return -1;                                                \
    }

/* Intern the attribute names: 0 or -1. */
static int
intern_names(void)
{
    INTERNED_NAMES(INTERN_NAME)
    return 0;
}

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "rankscope.tracer.native._hot",
    .m_doc = "The compiled part of the tracer.",
    .m_size = -1,
};

PyMODINIT_FUNC
PyInit__hot(void)
{
#ifdef Py_GIL_DISABLED
    PyErr_SetString(PyExc_ImportError, "_hot needs the GIL: without it a row is claimed twice");
    return NULL;
#elif __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
    PyErr_SetString(PyExc_ImportError, "_hot needs a little-endian machine");
    return NULL;
#else
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) {
        return NULL;
    }
    if (intern_names() < 0 || add_numbers(module) < 0 || add_lane(module) < 0 ||
        add_span(module) < 0 || add_span_by_name(module) < 0 || add_communication(module) < 0 ||
        add_frames(module) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
#endif
}
