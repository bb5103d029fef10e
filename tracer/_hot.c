/* Entering and leaving a span, without a line of Python in between.

   What `tracer.host_span` says in Python, for interpreters that somebody could compile this for;
   `tracer.hot` chooses. Nothing here takes a lock, allocates an object that the garbage collector
   looks at, or calls into the job: no signal handler can run inside.

   All of it runs under the GIL, which is what makes a claim on a row one claim. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <structmember.h>
#include <time.h>

/* The first bytes of `tracer.spool.CORE`, up to its commit word. */
typedef struct {
    uint64_t head;
    char place[16];
    int64_t start_ns;
    int64_t end_ns;
    int64_t depth;
    int64_t commit;
} Core;

#define MAX_DEPTH 65535 /* `tracer.lane.MAX_DEPTH` */
#define PLACE_BYTES ((Py_ssize_t)sizeof(((Core *)0)->place))

/* Names of attributes, interned once. */
static PyObject *s_rows, *s_buffer, *s_source, *s_spares, *s_drops, *s_numbers, *s_process,
    *s_offset, *s_swallow, *s_leave_slowly;

static int64_t
now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* -- LaneState: what a lane and its spans share ------------------------------------------- */

typedef struct {
    PyObject_HEAD
    long depth;
    PyObject *place;
    PyObject *segment;
    PyObject *rows; /* of the segment; NULL once none was left */
} LaneState;

static PyMemberDef lane_members[] = {
    {"depth", T_LONG, offsetof(LaneState, depth), 0, NULL},
    {"place", T_OBJECT_EX, offsetof(LaneState, place), 0, NULL},
    {NULL},
};

static PyObject *
lane_get_segment(LaneState *self, void *Py_UNUSED(closure))
{
    if (self->segment == NULL) {
        PyErr_SetString(PyExc_AttributeError, "segment");
        return NULL;
    }
    return Py_NewRef(self->segment);
}

static int
lane_set_segment(LaneState *self, PyObject *segment, void *Py_UNUSED(closure))
{
    if (segment == NULL) {
        PyErr_SetString(PyExc_TypeError, "a lane always has a segment");
        return -1;
    }
    PyObject *rows = PyObject_GetAttr(segment, s_rows);
    if (rows == NULL) {
        return -1;
    }
    Py_XSETREF(self->rows, rows);
    Py_XSETREF(self->segment, Py_NewRef(segment));
    return 0;
}

static PyGetSetDef lane_getset[] = {
    {"segment", (getter)lane_get_segment, (setter)lane_set_segment, "What it writes to.", NULL},
    {NULL},
};

static int
lane_traverse(LaneState *self, visitproc visit, void *arg)
{
    Py_VISIT(self->place);
    Py_VISIT(self->segment);
    Py_VISIT(self->rows);
    return 0;
}

static int
lane_clear(LaneState *self)
{
    Py_CLEAR(self->place);
    Py_CLEAR(self->segment);
    Py_CLEAR(self->rows);
    return 0;
}

static void
lane_dealloc(LaneState *self)
{
    PyObject_GC_UnTrack(self);
    lane_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject LaneStateType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "tracer._hot.LaneState",
    .tp_doc = "What a lane and its spans share.",
    .tp_basicsize = sizeof(LaneState),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)lane_dealloc,
    .tp_traverse = (traverseproc)lane_traverse,
    .tp_clear = (inquiry)lane_clear,
    .tp_members = lane_members,
    .tp_getset = lane_getset,
};

/* -- ReadySpan ---------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    LaneState *lane;
    PyObject *source;
    PyObject *spares; /* of the source, for good */
    PyObject *place;
    PyObject *span; /* what `with` is given */
    PyObject *drops; /* what `find_drops` found last, with its parts */
    PyObject *numbers;
    PyObject *process;
    int64_t drop_offset;
    uint64_t head;
    int64_t start_ns;
    int in_use;
} ReadySpan;

/* Take the next number of an iterator: 1; none left: 0; an error: -1. */
static int
take_next(PyObject *iterator, int64_t *number)
{
    PyObject *item = PyIter_Next(iterator);
    if (item == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    *number = PyLong_AsLongLong(item);
    Py_DECREF(item);
    return *number == -1 && PyErr_Occurred() ? -1 : 1;
}

/* Get the buffer of `owner` with room for `size` bytes at `offset`, a multiple of eight: 0 or -1. */
static int
open_buffer(PyObject *owner, int64_t offset, Py_ssize_t size, Py_buffer *view)
{
    PyObject *buffer = PyObject_GetAttr(owner, s_buffer);
    if (buffer == NULL) {
        return -1;
    }
    int status = PyObject_GetBuffer(buffer, view, PyBUF_WRITABLE);
    Py_DECREF(buffer);
    if (status == 0 && (offset < 0 || offset % 8 || offset > view->len - size)) {
        PyErr_Format(PyExc_IndexError, "%lld does not lie in a buffer of %zd bytes",
                     (long long)offset, view->len);
        PyBuffer_Release(view);
        status = -1;
    }
    return status;
}

/* Store what a reader takes for the sign that all before it is there. */
static void
store_last(char *at, int64_t word)
{
    __atomic_store_n((int64_t *)at, word, __ATOMIC_RELEASE);
}

/* Write a record that ends now: 1; where the segment is full: 0; an error: -1. */
static int
write_record(ReadySpan *self, int64_t start_ns, long depth)
{
    int64_t end_ns = now_ns();
    LaneState *lane = self->lane;
    if (self->place == NULL || !PyBytes_Check(self->place) ||
        PyBytes_GET_SIZE(self->place) != PLACE_BYTES) {
        PyErr_SetString(PyExc_TypeError, "a place is not 16 bytes");
        return -1;
    }
    int64_t offset;
    int status = take_next(lane->rows, &offset);
    if (status != 1) {
        if (status == 0) {
            Py_CLEAR(lane->rows);
        }
        return status;
    }
    Py_buffer view;
    if (open_buffer(lane->segment, offset, sizeof(Core), &view) < 0) {
        return -1;
    }
    if (depth > MAX_DEPTH) {
        depth = MAX_DEPTH;
    }
    Core core = {.head = self->head, .start_ns = start_ns, .end_ns = end_ns, .depth = depth};
    memcpy(core.place, PyBytes_AS_STRING(self->place), PLACE_BYTES);
    char *row = (char *)view.buf + offset;
    memcpy(row, &core, offsetof(Core, commit));
    store_last(row + offsetof(Core, commit), offset);
    PyBuffer_Release(&view);
    return 1;
}

/* Look up what a `tracer.process_file.DropCount` holds, unless it is the one of the last time. */
static int
find_drops(ReadySpan *self)
{
    PyObject *drops = PyObject_GetAttr(self->source, s_drops);
    if (drops == NULL) {
        return -1;
    }
    if (drops == self->drops) {
        Py_DECREF(drops);
        return 0;
    }
    Py_CLEAR(self->drops);
    PyObject *numbers = PyObject_GetAttr(drops, s_numbers);
    PyObject *process = numbers == NULL ? NULL : PyObject_GetAttr(drops, s_process);
    PyObject *offset = process == NULL ? NULL : PyObject_GetAttr(drops, s_offset);
    self->drop_offset = offset == NULL ? -1 : PyLong_AsLongLong(offset);
    Py_XDECREF(offset);
    Py_XSETREF(self->numbers, numbers);
    Py_XSETREF(self->process, process);
    if (PyErr_Occurred()) {
        Py_DECREF(drops);
        return -1;
    }
    self->drops = drops;
    return 0;
}

/* Count a record for which there is no room: 1; where there is a spare segment: 0; an error: -1.
   Here and not in Python: what is dropped must cost no more than what is kept. */
static int
count_drop(ReadySpan *self)
{
    Py_ssize_t num_spares = PyObject_Size(self->spares);
    if (num_spares) {
        return num_spares < 0 ? -1 : 0;
    }
    int64_t number;
    Py_buffer view;
    if (find_drops(self) < 0 || take_next(self->numbers, &number) != 1 ||
        open_buffer(self->process, self->drop_offset, sizeof(number), &view) < 0) {
        return -1;
    }
    store_last((char *)view.buf + self->drop_offset, number);
    PyBuffer_Release(&view);
    return 1;
}

/* Hand the error that is set to the lane, which counts it: NULL where it is the job's. */
static PyObject *
swallow(ReadySpan *self)
{
    PyObject *type, *problem, *traceback;
    PyErr_Fetch(&type, &problem, &traceback);
    PyErr_NormalizeException(&type, &problem, &traceback);
    PyObject *done = PyObject_CallMethodOneArg((PyObject *)self->lane, s_swallow, problem);
    Py_XDECREF(type);
    Py_XDECREF(problem);
    Py_XDECREF(traceback);
    return done;
}

static PyObject *
span_enter(ReadySpan *self, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(num_args))
{
    LaneState *lane = self->lane;
    Py_XINCREF(lane->place);
    Py_XSETREF(self->place, lane->place);
    lane->depth++;
    self->in_use = 1;
    self->start_ns = now_ns();
    Py_RETURN_NONE;
}

static PyObject *
span_leave(ReadySpan *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args == 4) { /* of `ExitStack`, which passes the span itself first */
        args++;
    }
    int was_in_use = self->in_use, in_error = num_args > 0 && args[0] != Py_None;
    int64_t start_ns = self->start_ns;
    self->in_use = 0;
    long depth = self->lane->depth - 1;
    if (depth < 0) { /* the lane is another thread's by now, who began anew */
        depth = 0;
    }
    self->lane->depth = depth;
    if (!was_in_use) { /* never entered, or entered twice and left before */
        Py_RETURN_NONE;
    }
    if (!in_error) {
        int status = self->lane->rows == NULL ? 0 : write_record(self, start_ns, depth);
        if (status == 0) {
            status = count_drop(self);
        }
        if (status == 1) {
            Py_RETURN_NONE;
        }
        if (status < 0) {
            return swallow(self);
        }
    }
    PyObject *start = PyLong_FromLongLong(start_ns);
    if (start == NULL) {
        return swallow(self);
    }
    PyObject *done = PyObject_CallMethodObjArgs((PyObject *)self->lane, s_leave_slowly,
                                                (PyObject *)self, start,
                                                in_error ? Py_True : Py_False, NULL);
    Py_DECREF(start);
    return done == NULL ? swallow(self) : done;
}

static PyObject *
span_get_start(ReadySpan *self, void *Py_UNUSED(closure))
{
    if (!self->in_use) {
        Py_RETURN_NONE;
    }
    return PyLong_FromLongLong(self->start_ns);
}

static PyObject *
span_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *lane;
    unsigned long long head;
    static char *names[] = {"lane", "head", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!K:ReadySpan", names, &LaneStateType, &lane,
                                     &head)) {
        return NULL;
    }
    ReadySpan *self = (ReadySpan *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->source = PyObject_GetAttr(lane, s_source);
    self->spares = self->source == NULL ? NULL : PyObject_GetAttr(self->source, s_spares);
    if (self->spares == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    self->lane = (LaneState *)Py_NewRef(lane);
    self->place = Py_XNewRef(self->lane->place);
    self->head = head;
    return (PyObject *)self;
}

static int
span_traverse(ReadySpan *self, visitproc visit, void *arg)
{
    Py_VISIT(self->lane);
    Py_VISIT(self->source);
    Py_VISIT(self->spares);
    Py_VISIT(self->place);
    Py_VISIT(self->span);
    Py_VISIT(self->drops);
    Py_VISIT(self->numbers);
    Py_VISIT(self->process);
    return 0;
}

/* Without `tp_clear`: a span whose lane is gone could not be left. Each cycle that it is in goes
   through its lane or the class of its `span`, and those can be cleared. */

static void
span_dealloc(ReadySpan *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->lane);
    Py_XDECREF(self->source);
    Py_XDECREF(self->spares);
    Py_XDECREF(self->place);
    Py_XDECREF(self->span);
    Py_XDECREF(self->drops);
    Py_XDECREF(self->numbers);
    Py_XDECREF(self->process);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef span_methods[] = {
    {"enter", (PyCFunction)(void (*)(void))span_enter, METH_FASTCALL, "Begin the span."},
    {"leave", (PyCFunction)(void (*)(void))span_leave, METH_FASTCALL, "End the span."},
    {NULL},
};

static PyMemberDef span_members[] = {
    {"head", T_ULONGLONG, offsetof(ReadySpan, head), READONLY, NULL},
    {"place", T_OBJECT_EX, offsetof(ReadySpan, place), READONLY, NULL},
    {"span", T_OBJECT_EX, offsetof(ReadySpan, span), 0, NULL},
    {NULL},
};

static PyGetSetDef span_getset[] = {
    {"start_ns", (getter)span_get_start, NULL, "Begin, monotonic; None while it is not in use.",
     NULL},
    {NULL},
};

static PyTypeObject ReadySpanType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "tracer._hot.ReadySpan",
    .tp_doc = "A span of one name in one thread, entered at most once at a time.",
    .tp_basicsize = sizeof(ReadySpan),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = span_new,
    .tp_dealloc = (destructor)span_dealloc,
    .tp_traverse = (traverseproc)span_traverse,
    .tp_methods = span_methods,
    .tp_members = span_members,
    .tp_getset = span_getset,
};

/* -- nothing ------------------------------------------------------------------------------ */

static PyObject *
nothing(PyObject *Py_UNUSED(module), PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(num))
{
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"nothing", (PyCFunction)(void (*)(void))nothing, METH_FASTCALL,
     "Take any arguments and do nothing."},
    {NULL},
};

/* -- the module --------------------------------------------------------------------------- */

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "tracer._hot",
    .m_doc = "Entering and leaving a span, without a line of Python in between.",
    .m_size = -1,
    .m_methods = module_methods,
};

static int
intern_names(void)
{
    static const struct {
        PyObject **at;
        const char *name;
    } names[] = {
        {&s_rows, "rows"},       {&s_buffer, "buffer"},   {&s_source, "source"},
        {&s_spares, "spares"},   {&s_drops, "drops"},     {&s_numbers, "numbers"},
        {&s_process, "process"}, {&s_offset, "offset"},   {&s_swallow, "swallow"},
        {&s_leave_slowly, "leave_slowly"},
    };
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        *names[i].at = PyUnicode_InternFromString(names[i].name);
        if (*names[i].at == NULL) {
            return -1;
        }
    }
    return 0;
}

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
    if (intern_names() < 0 || PyType_Ready(&LaneStateType) < 0 ||
        PyType_Ready(&ReadySpanType) < 0) {
        return NULL;
    }
    PyObject *self = PyModule_Create(&module);
    if (self == NULL || PyModule_AddObjectRef(self, "LaneState", (PyObject *)&LaneStateType) < 0 ||
        PyModule_AddObjectRef(self, "ReadySpan", (PyObject *)&ReadySpanType) < 0) {
        Py_XDECREF(self);
        return NULL;
    }
    return self;
#endif
}
