/* Finding, entering and leaving a span, without a line of Python in between; what is written of a
   communication; and where other threads stand.

   What `tracer.native.host_span`, `tracer.native.lane_state`, `tracer.native.compute_span`, `tracer.native.host_launch` and
   `tracer.native.thread_frames` say in Python, for interpreters that somebody could compile this for;
   `tracer.native.choice` chooses. Nothing here takes a lock or calls into the job, and spans make no object
   that the garbage collector looks at. Nor does a signal handler run inside, but where Python is
   asked: by a span that an error leaves, one for which the segment has no room, one that the open
   table has no line for, a record while something is left out, an error of ours.

   Between two spans the job streams its weights through the caches, so what counts is how much
   memory a span touches: docs/decisions/0066-what-a-span-touches.md.

   All of it runs under the GIL, which is what makes a claim on a row one claim. */

#include "hot.h"

int
intern_names(const InternedName *names, size_t num_names)
{
    for (size_t i = 0; i < num_names; i++) {
        *names[i].at = PyUnicode_InternFromString(names[i].name);
        if (*names[i].at == NULL) {
            return -1;
        }
    }
    return 0;
}

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "rankscope.tracer.native._hot",
    .m_doc = "The hottest lines of the tracer.",
    .m_size = -1,
};

PyMODINIT_FUNC
PyInit__hot(void)
{
#ifdef Py_GIL_DISABLED
    PyErr_SetString(PyExc_ImportError, "without the GIL a row could be claimed twice");
    return NULL;
#elif __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
    PyErr_SetString(PyExc_ImportError, "records are little-endian");
    return NULL;
#else
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) {
        return NULL;
    }
    if (add_numbers(module) < 0 || add_lane(module) < 0 || add_span(module) < 0 ||
        add_span_by_name(module) < 0 || add_communication(module) < 0 || add_frames(module) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
#endif
}
