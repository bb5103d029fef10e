/* The spans that `with` enters and leaves: `ReadySpan`, a reusable one, and `ComputeSpan`, of a
   forward or backward, which also sets its lane's place.

   Invariants:
   - Entering and leaving runs no Python code, so no signal handler of the job either, except for:
     a span that an error leaves, a full segment or open table, and an error of the tracer. So an
     exception of a handler comes before a span begins or after it has ended.
   - Leaving always decreases the lane's depth and ends the use of the span, also after an error.
   - An error of the tracer is counted by `Lane.swallow`, one of the job is passed on. The traceback
     decides which it is, so it is kept. */

#include "hot.h"

/* -- ReadySpan ---------------------------------------------------------------------------- */

/* Hand the current error to the lane, which counts it; NULL if it is the job's. */
static PyObject *
swallow(LaneState *lane)
{
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        return NULL; /* KeyboardInterrupt, SystemExit */
    }
    PyObject *type, *problem, *traceback;
    PyErr_Fetch(&type, &problem, &traceback);
    PyErr_NormalizeException(&type, &problem, &traceback);
    if (traceback != NULL) { /* decides whether the error is the tracer's or the job's */
        PyException_SetTraceback(problem, traceback);
    }
    PyObject *done = PyObject_CallMethodOneArg((PyObject *)lane, s_swallow, problem);
    Py_XDECREF(type);
    Py_XDECREF(problem);
    Py_XDECREF(traceback);
    return done;
}

/* Decrease the depth of a lane; return it. */
static long
pop_depth(LaneState *lane)
{
    long depth = lane->depth - 1;
    if (depth < 0) { /* the lane belongs to another thread by now, which began at 0 */
        depth = 0;
    }
    return lane->depth = depth;
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
    if (num_args == 4) { /* from `ExitStack`, which passes the span itself first */
        args++;
    }
    int was_in_use = self->in_use, in_error = num_args > 0 && args[0] != Py_None;
    int64_t start_ns = self->start_ns;
    self->in_use = 0;
    LaneState *lane = self->lane;
    long depth = pop_depth(lane);
    if (!was_in_use) { /* never entered, or entered twice and already left */
        Py_RETURN_NONE;
    }
    if (!in_error) {
        /* No clock read if the lane has no row for the record. */
        int status = lane->rows == NULL ? 0
                                        : write_record(lane, self->head, read_place(self->place),
                                                       start_ns, now_ns(), depth, start_ns, NULL);
        if (status == 0) {
            status = count_drop(self->pool, self->spares);
        }
        if (status == 1) {
            Py_RETURN_NONE;
        }
        if (status < 0) {
            return swallow(lane);
        }
    }
    PyObject *start = PyLong_FromLongLong(start_ns);
    if (start == NULL) {
        return swallow(lane);
    }
    PyObject *done = PyObject_CallMethodObjArgs((PyObject *)lane, s_leave_slowly, (PyObject *)self,
                                                start, in_error ? Py_True : Py_False, NULL);
    Py_DECREF(start);
    return done == NULL ? swallow(lane) : done;
}

static PyObject *
span_call(ReadySpan *self, PyObject *const *Py_UNUSED(args), size_t flags, PyObject *names)
{
    if (PyVectorcall_NARGS(flags) || names != NULL) {
        PyErr_SetString(PyExc_TypeError, "a span is entered without arguments");
        return NULL;
    }
    return span_enter(self, NULL, 0);
}

static PyObject *
span_get_itself(ReadySpan *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(self);
}

static PyMethodDef leave_method = {"leave", (PyCFunction)(void (*)(void))span_leave, METH_FASTCALL,
                                   "End the span."};

static PyObject *
span_get_leave(ReadySpan *self, void *Py_UNUSED(closure))
{
    if (self->leave == NULL) { /* cleared by the garbage collector */
        self->leave = PyCFunction_New(&leave_method, (PyObject *)self);
    }
    return Py_XNewRef(self->leave);
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
    self->pool = PyObject_GetAttr(lane, s_pool);
    self->spares = self->pool == NULL ? NULL : PyObject_GetAttr(self->pool, s_spares);
    if (self->spares == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    self->enter = (vectorcallfunc)span_call;
    self->lane = (LaneState *)Py_NewRef(lane);
    self->place = Py_XNewRef(self->lane->place);
    self->head = head;
    self->leave = PyCFunction_New(&leave_method, (PyObject *)self);
    if (self->leave == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int
span_traverse(ReadySpan *self, visitproc visit, void *arg)
{
    Py_VISIT(self->lane);
    Py_VISIT(self->pool);
    Py_VISIT(self->spares);
    Py_VISIT(self->place);
    Py_VISIT(self->leave);
    return 0;
}

/* Clear this reference only: without its lane a span in use could not be left. All other cycles
   through a span go through its lane, which the collector clears. */
static int
span_clear(ReadySpan *self)
{
    Py_CLEAR(self->leave);
    return 0;
}

static void
span_dealloc(ReadySpan *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->lane);
    Py_XDECREF(self->pool);
    Py_XDECREF(self->spares);
    Py_XDECREF(self->place);
    Py_XDECREF(self->leave);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef span_methods[] = {
    {"enter", (PyCFunction)(void (*)(void))span_enter, METH_FASTCALL, "Begin the span."},
    {NULL},
};

static PyMemberDef span_members[] = {
    {"head", T_ULONGLONG, offsetof(ReadySpan, head), READONLY, NULL},
    {"place", T_OBJECT_EX, offsetof(ReadySpan, place), READONLY, NULL},
    {NULL},
};

static PyGetSetDef span_getset[] = {
    {"leave", (getter)span_get_leave, NULL, "End the span.", NULL},
    {"span", (getter)span_get_itself, NULL, "The object for `with`: the span itself.", NULL},
    {"start_ns", (getter)span_get_start, NULL,
     "Start, monotonic; None while the span is not in use.", NULL},
    {NULL},
};

PyTypeObject ReadySpanType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "rankscope.tracer.native._hot.ReadySpan",
    .tp_doc = "A reusable span of one name in one thread, entered at most once at a time.",
    .tp_basicsize = sizeof(ReadySpan),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(ReadySpan, enter),
    .tp_call = PyVectorcall_Call,
    .tp_new = span_new,
    .tp_dealloc = (destructor)span_dealloc,
    .tp_traverse = (traverseproc)span_traverse,
    .tp_clear = (inquiry)span_clear,
    .tp_methods = span_methods,
    .tp_members = span_members,
    .tp_getset = span_getset,
};

/* -- SpanMethod: a descriptor by which `with` finds `__enter__` and `__exit__` without making a
   bound method ---------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    int is_exit;
} SpanMethod;

static PyObject *
method_get(SpanMethod *self, PyObject *span, PyObject *Py_UNUSED(type))
{
    if (span == NULL || span == Py_None) {
        return Py_NewRef(self);
    }
    if (!Py_IS_TYPE(span, &ReadySpanType)) {
        PyErr_SetString(PyExc_TypeError, "the method needs a ReadySpan");
        return NULL;
    }
    return self->is_exit ? span_get_leave((ReadySpan *)span, NULL) : Py_NewRef(span);
}

/* For `ExitStack`, which looks the method up on the class and passes the span first. */
static PyObject *
method_call(SpanMethod *self, PyObject *args, PyObject *kwargs)
{
    Py_ssize_t num_args = PyTuple_GET_SIZE(args);
    if ((kwargs != NULL && PyDict_GET_SIZE(kwargs)) || num_args != (self->is_exit ? 4 : 1) ||
        !Py_IS_TYPE(PyTuple_GET_ITEM(args, 0), &ReadySpanType)) {
        PyErr_SetString(PyExc_TypeError, "a span's method takes the arguments that `with` passes");
        return NULL;
    }
    ReadySpan *span = (ReadySpan *)PyTuple_GET_ITEM(args, 0);
    return self->is_exit ? span_leave(span, &PyTuple_GET_ITEM(args, 1), num_args - 1)
                        : span_enter(span, NULL, 0);
}

static PyTypeObject SpanMethodType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "rankscope.tracer.native._hot.SpanMethod",
    .tp_doc = "`__enter__` or `__exit__` of a ReadySpan.",
    .tp_basicsize = sizeof(SpanMethod),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_descr_get = (descrgetfunc)method_get,
    .tp_call = (ternaryfunc)method_call,
};

/* Add `__enter__` or `__exit__` to `ReadySpan`: 0 or -1. */
static int
add_method(const char *name, int is_exit)
{
    SpanMethod *method = PyObject_New(SpanMethod, &SpanMethodType);
    if (method == NULL) {
        return -1;
    }
    method->is_exit = is_exit;
    int status = PyDict_SetItemString(ReadySpanType.tp_dict, name, (PyObject *)method);
    Py_DECREF(method);
    return status;
}

/* -- ComputeSpan -------------------------------------------------------------------------- */

/* Not tracked by the garbage collector: nothing that it refers to refers back to it. */
typedef struct {
    PyObject_HEAD
    LaneState *lane;
    PyObject *state;
    PyObject *recorder;
    PyObject *place;
    uint64_t head;
    int64_t start_ns;
    int in_use;
    int32_t microbatch;
    int32_t chunk;
    PyObject *entry; /* its `OpenEntry`; None or NULL if it has none */
} ComputeSpan;

/* Enter the span into the open table, unless that is full: 0 or -1. */
static int
show(ComputeSpan *self)
{
    LaneState *lane = self->lane;
    OpenEntry *spare = (OpenEntry *)lane->spare_entry;
    if (spare != NULL) { /* the entry of the previous compute span: nothing to look up */
        lane->spare_entry = NULL;
        self->entry = (PyObject *)spare;
        write_open_entry(lane, spare->offset, self->start_ns, self->head, &NO_COMM);
        return 0;
    }
    self->entry = open_entry(lane, self->start_ns, self->head, &NO_COMM);
    return self->entry == NULL ? -1 : 0;
}

/* Free the span's entry of the open table, or keep it for the next span of the lane: 0 or -1. */
static int
hide(ComputeSpan *self)
{
    LaneState *lane = self->lane;
    PyObject *held = self->entry;
    self->entry = NULL;
    if (held == NULL || !Py_IS_TYPE(held, &OpenEntryType)) {
        Py_XDECREF(held);
        return 0;
    }
    OpenEntry *entry = (OpenEntry *)held;
    if (entry->segment != NULL && entry->segment == lane->segment && lane->spare_entry == NULL) {
        store_last((char *)lane->buffer.buf + entry->offset, 0);
        lane->spare_entry = held;
        return 0;
    }
    int status = close_entry(entry);
    Py_DECREF(held);
    return status;
}

/* Write the span's record with the present time as its end: 0 or -1. */
static int
end_compute(ComputeSpan *self, int in_error)
{
    LaneState *lane = self->lane;
    int64_t end_ns = now_ns();
    uint64_t head = in_error ? self->head | ERROR_HEAD : self->head;
    long depth = pop_depth(lane);
    self->in_use = 0;
    return put_record(lane, head, read_place(self->place), self->start_ns, end_ns, depth,
                      self->start_ns, NULL);
}

/* Set the lane's place to the step, without micro-batch and chunk: 0 or -1. */
static int
reset_place(ComputeSpan *self)
{
    int32_t step;
    PyObject *number = PyObject_GetAttr(self->recorder, s_step_number);
    int status = number == NULL ? -1 : read_number(number, &step);
    Py_XDECREF(number);
    return status < 0 ? -1 : set_place(self->lane, step, NONE, NONE);
}

/* If `status` is -1, have the lane count the current error: 0; -1 if the error is the job's. */
static int
count_error(LaneState *lane, int status)
{
    if (status == 0) {
        return 0;
    }
    PyObject *done = swallow(lane);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static PyObject *
compute_enter(ComputeSpan *self, PyObject *Py_UNUSED(ignored))
{
    LaneState *lane = self->lane;
    int status = set_place(lane, lane->fields.step, self->microbatch, self->chunk);
    if (status == 0) {
        Py_XSETREF(self->place, Py_NewRef(lane->place));
        self->start_ns = now_ns();
        status = lane->depth ? 0 : show(self);
    }
    if (status == 0) {
        status = PyObject_SetAttr(self->state, s_in_span, Py_True);
    }
    if (status == 0) {
        lane->depth++;
        self->in_use = 1;
    }
    return count_error(lane, status) < 0 ? NULL : Py_NewRef(self);
}

static PyObject *
compute_leave(ComputeSpan *self, PyObject *const *args, Py_ssize_t num_args)
{
    LaneState *lane = self->lane;
    int in_error = num_args > 0 && args[0] != Py_None;
    int status = PyObject_SetAttr(self->state, s_in_span, Py_False);
    if (status == 0 && self->in_use) { /* if not in use, entering failed, which was counted */
        status = end_compute(self, in_error);
    }
    PyObject *type = NULL, *problem = NULL, *traceback = NULL;
    if (count_error(lane, status) < 0) { /* the job's: passed on after the rest is undone */
        PyErr_Fetch(&type, &problem, &traceback);
    }
    if (count_error(lane, hide(self)) < 0 || count_error(lane, reset_place(self)) < 0) {
        Py_XDECREF(type);
        Py_XDECREF(problem);
        Py_XDECREF(traceback);
        return NULL;
    }
    if (type != NULL) {
        PyErr_Restore(type, problem, traceback);
        return NULL;
    }
    Py_RETURN_NONE;
}

/* Leave the span without recording it. */
static PyObject *
compute_cancel(ComputeSpan *self, PyObject *Py_UNUSED(ignored))
{
    LaneState *lane = self->lane;
    int status = PyObject_SetAttr(self->state, s_in_span, Py_False);
    if (self->in_use) {
        self->in_use = 0;
        pop_depth(lane);
    }
    if (count_error(lane, status) < 0 || count_error(lane, hide(self)) < 0 ||
        count_error(lane, reset_place(self)) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static void
compute_dealloc(ComputeSpan *self)
{
    Py_XDECREF(self->lane);
    Py_XDECREF(self->state);
    Py_XDECREF(self->recorder);
    Py_XDECREF(self->place);
    Py_XDECREF(self->entry);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef compute_methods[] = {
    {"__enter__", (PyCFunction)compute_enter, METH_NOARGS, "Begin the span."},
    {"__exit__", (PyCFunction)(void (*)(void))compute_leave, METH_FASTCALL, "End the span."},
    {"cancel", (PyCFunction)compute_cancel, METH_NOARGS, "Leave the span without recording it."},
    {NULL},
};

static PyTypeObject ComputeSpanType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "rankscope.tracer.native._hot.ComputeSpan",
    .tp_doc = "A span timed by the host clock that also sets its lane's place.",
    .tp_basicsize = sizeof(ComputeSpan),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)compute_dealloc,
    .tp_methods = compute_methods,
};

static PyObject *
make_compute_span(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t num_args)
{
    int32_t microbatch, chunk;
    if (num_args != 6 || !PyObject_TypeCheck(args[2], &LaneStateType)) {
        PyErr_SetString(PyExc_TypeError,
                        "ComputeSpan takes state, recorder, lane, head, microbatch and chunk");
        return NULL;
    }
    uint64_t head = PyLong_AsUnsignedLongLong(args[3]);
    if (PyErr_Occurred() || read_number(args[4], &microbatch) < 0 ||
        read_number(args[5], &chunk) < 0) {
        return NULL;
    }
    ComputeSpan *self = PyObject_New(ComputeSpan, &ComputeSpanType);
    if (self == NULL) {
        return NULL;
    }
    self->state = Py_NewRef(args[0]);
    self->recorder = Py_NewRef(args[1]);
    self->lane = (LaneState *)Py_NewRef(args[2]);
    self->head = head;
    self->microbatch = microbatch;
    self->chunk = chunk;
    self->place = self->entry = NULL;
    self->start_ns = 0;
    self->in_use = 0;
    return (PyObject *)self;
}

static PyMethodDef functions[] = {
    {"ComputeSpan", (PyCFunction)(void (*)(void))make_compute_span, METH_FASTCALL,
     "Return a span that also sets its lane's place."},
    {NULL},
};

int
add_span(PyObject *module)
{
    if (PyType_Ready(&SpanMethodType) < 0 || PyType_Ready(&ComputeSpanType) < 0 ||
        PyModule_AddType(module, &ReadySpanType) < 0 || add_method("__enter__", 0) < 0 ||
        add_method("__exit__", 1) < 0) {
        return -1;
    }
    PyType_Modified(&ReadySpanType);
    return PyModule_AddFunctions(module, functions);
}
