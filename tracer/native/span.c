/* Spans that are entered and left by `with`. */

#include "hot.h"

static PyObject *s_pool, *s_spares, *s_swallow, *s_leave_slowly, *s_in_span, *s_step_number;

/* -- ReadySpan ---------------------------------------------------------------------------- */

/* Hand the error that is set to the lane, which counts it: NULL where it is the job's. */
static PyObject *
swallow(LaneState *lane)
{
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        return NULL; /* an interrupt, an exit */
    }
    PyObject *type, *problem, *traceback;
    PyErr_Fetch(&type, &problem, &traceback);
    PyErr_NormalizeException(&type, &problem, &traceback);
    if (traceback != NULL) { /* by it an error of ours is told from the job's */
        PyException_SetTraceback(problem, traceback);
    }
    PyObject *done = PyObject_CallMethodOneArg((PyObject *)lane, s_swallow, problem);
    Py_XDECREF(type);
    Py_XDECREF(problem);
    Py_XDECREF(traceback);
    return done;
}

/* Leave one level of a lane; return which level that is. */
static long
one_less_deep(LaneState *lane)
{
    long depth = lane->depth - 1;
    if (depth < 0) { /* the lane is another thread's by now, who began anew */
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
    if (num_args == 4) { /* of `ExitStack`, which passes the span itself first */
        args++;
    }
    int was_in_use = self->in_use, in_error = num_args > 0 && args[0] != Py_None;
    int64_t start_ns = self->start_ns;
    self->in_use = 0;
    LaneState *lane = self->lane;
    long depth = one_less_deep(lane);
    if (!was_in_use) { /* never entered, or entered twice and left before */
        Py_RETURN_NONE;
    }
    if (!in_error) {
        /* Without a clock read for a record that nothing can hold. */
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
    if (self->leave == NULL) { /* the collector has cleared it */
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

/* Of its references only this one: a span whose lane is gone could not be left. Each other cycle
   that it is in goes through its lane, which can be cleared. */
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
    {"span", (getter)span_get_itself, NULL, "What `with` is given: itself.", NULL},
    {"start_ns", (getter)span_get_start, NULL, "Begin, monotonic; None while it is not in use.",
     NULL},
    {NULL},
};

PyTypeObject ReadySpanType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "rankscope.tracer.native._hot.ReadySpan",
    .tp_doc = "A span of one name in one thread, entered at most once at a time.",
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

/* -- Door: how `with` finds what enters and leaves a span, without making a bound method --- */

typedef struct {
    PyObject_HEAD
    int is_out;
} Door;

static PyObject *
door_get(Door *self, PyObject *span, PyObject *Py_UNUSED(type))
{
    if (span == NULL || span == Py_None) {
        return Py_NewRef(self);
    }
    if (!Py_IS_TYPE(span, &ReadySpanType)) {
        PyErr_SetString(PyExc_TypeError, "this is of a ReadySpan alone");
        return NULL;
    }
    return self->is_out ? span_get_leave((ReadySpan *)span, NULL) : Py_NewRef(span);
}

/* As `ExitStack` does it: found on the class, called with the span first. */
static PyObject *
door_call(Door *self, PyObject *args, PyObject *kwargs)
{
    Py_ssize_t num_args = PyTuple_GET_SIZE(args);
    if ((kwargs != NULL && PyDict_GET_SIZE(kwargs)) || num_args != (self->is_out ? 4 : 1) ||
        !Py_IS_TYPE(PyTuple_GET_ITEM(args, 0), &ReadySpanType)) {
        PyErr_SetString(PyExc_TypeError, "called with other arguments than `with` does");
        return NULL;
    }
    ReadySpan *span = (ReadySpan *)PyTuple_GET_ITEM(args, 0);
    return self->is_out ? span_leave(span, &PyTuple_GET_ITEM(args, 1), num_args - 1)
                        : span_enter(span, NULL, 0);
}

static PyTypeObject DoorType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "rankscope.tracer.native._hot.Door",
    .tp_doc = "`__enter__` or `__exit__` of a ReadySpan.",
    .tp_basicsize = sizeof(Door),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_descr_get = (descrgetfunc)door_get,
    .tp_call = (ternaryfunc)door_call,
};

/* Give `ReadySpan` a way in or out: 0 or -1. */
static int
add_door(const char *name, int is_out)
{
    Door *door = PyObject_New(Door, &DoorType);
    if (door == NULL) {
        return -1;
    }
    door->is_out = is_out;
    int status = PyDict_SetItemString(ReadySpanType.tp_dict, name, (PyObject *)door);
    Py_DECREF(door);
    return status;
}

/* -- ComputeSpan -------------------------------------------------------------------------- */

/* Not looked at by the garbage collector: nothing that it refers to refers to it. */
typedef struct {
    PyObject_HEAD
    LaneState *lane;
    PyObject *inside;
    PyObject *recorder;
    PyObject *place;
    uint64_t head;
    int64_t start_ns;
    int in_use;
    int32_t microbatch;
    int32_t chunk;
    PyObject *shown; /* its line in the open table, None or NULL where it has none */
} ComputeSpan;

/* Show the span from outside: 0 or -1. It is not, where the table is full. */
static int
show(ComputeSpan *self)
{
    LaneState *lane = self->lane;
    OpenEntry *kept = (OpenEntry *)lane->kept;
    if (kept != NULL) { /* where the compute span before this one stood: nothing to look up */
        lane->kept = NULL;
        self->shown = (PyObject *)kept;
        write_line(lane, kept->at, self->start_ns, self->head, 0, NONE);
        return 0;
    }
    self->shown = open_entry(lane, self->start_ns, self->head, 0, NONE);
    return self->shown == NULL ? -1 : 0;
}

/* Show it no more: 0 or -1. */
static int
hide(ComputeSpan *self)
{
    LaneState *lane = self->lane;
    PyObject *shown = self->shown;
    self->shown = NULL;
    if (shown == NULL || !Py_IS_TYPE(shown, &OpenEntryType)) {
        Py_XDECREF(shown);
        return 0;
    }
    OpenEntry *entry = (OpenEntry *)shown;
    if (entry->segment != NULL && entry->segment == lane->segment && lane->kept == NULL) {
        store_last((char *)lane->buffer.buf + entry->at, 0);
        lane->kept = shown;
        return 0;
    }
    int status = close_entry(entry);
    Py_DECREF(shown);
    return status;
}

/* Write the record that ends now: 0 or -1. */
static int
end_compute(ComputeSpan *self, int in_error)
{
    LaneState *lane = self->lane;
    int64_t end_ns = now_ns();
    uint64_t head = in_error ? self->head | ERROR_HEAD : self->head;
    long depth = one_less_deep(lane);
    self->in_use = 0;
    return put_record(lane, head, read_place(self->place), self->start_ns, end_ns, depth,
                      self->start_ns, NULL);
}

/* Let what follows belong to the step alone: 0 or -1. */
static int
leave_place(ComputeSpan *self)
{
    int32_t step;
    PyObject *number = PyObject_GetAttr(self->recorder, s_step_number);
    int status = number == NULL ? -1 : read_number(number, &step);
    Py_XDECREF(number);
    return status < 0 ? -1 : put_at(self->lane, step, NONE, NONE);
}

/* Have the lane count an error of ours: 0; -1 where it is the job's. */
static int
settle(LaneState *lane, int status)
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
    int status = put_at(lane, lane->at.step, self->microbatch, self->chunk);
    if (status == 0) {
        Py_XSETREF(self->place, Py_NewRef(lane->place));
        self->start_ns = now_ns();
        status = lane->depth ? 0 : show(self);
    }
    if (status == 0) {
        status = PyObject_SetAttr(self->inside, s_in_span, Py_True);
    }
    if (status == 0) {
        lane->depth++;
        self->in_use = 1;
    }
    return settle(lane, status) < 0 ? NULL : Py_NewRef(self);
}

static PyObject *
compute_leave(ComputeSpan *self, PyObject *const *args, Py_ssize_t num_args)
{
    LaneState *lane = self->lane;
    int in_error = num_args > 0 && args[0] != Py_None;
    int status = PyObject_SetAttr(self->inside, s_in_span, Py_False);
    if (status == 0 && self->in_use) { /* else an error of ours, counted as it was entered */
        status = end_compute(self, in_error);
    }
    PyObject *type = NULL, *problem = NULL, *traceback = NULL;
    if (settle(lane, status) < 0) { /* the job's, who shall find all as it should be */
        PyErr_Fetch(&type, &problem, &traceback);
    }
    if (settle(lane, hide(self)) < 0 || settle(lane, leave_place(self)) < 0) {
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
    int status = PyObject_SetAttr(self->inside, s_in_span, Py_False);
    if (self->in_use) {
        self->in_use = 0;
        one_less_deep(lane);
    }
    if (settle(lane, status) < 0 || settle(lane, hide(self)) < 0 ||
        settle(lane, leave_place(self)) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static void
compute_dealloc(ComputeSpan *self)
{
    Py_XDECREF(self->lane);
    Py_XDECREF(self->inside);
    Py_XDECREF(self->recorder);
    Py_XDECREF(self->place);
    Py_XDECREF(self->shown);
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
    .tp_doc = "A span by the host's clock that also sets its lane's place.",
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
                        "compute_span takes inside, recorder, lane, head, microbatch and chunk");
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
    self->inside = Py_NewRef(args[0]);
    self->recorder = Py_NewRef(args[1]);
    self->lane = (LaneState *)Py_NewRef(args[2]);
    self->head = head;
    self->microbatch = microbatch;
    self->chunk = chunk;
    self->place = self->shown = NULL;
    self->start_ns = 0;
    self->in_use = 0;
    return (PyObject *)self;
}

static PyMethodDef functions[] = {
    {"compute_span", (PyCFunction)(void (*)(void))make_compute_span, METH_FASTCALL,
     "Return a span that also sets its lane's place."},
    {NULL},
};

int
add_span(PyObject *module)
{
    static const InternedName names[] = {
        {&s_pool, "pool"},
        {&s_spares, "spares"},
        {&s_swallow, "swallow"},
        {&s_leave_slowly, "leave_slowly"},
        {&s_in_span, "in_span"},
        {&s_step_number, "step_number"},
    };
    if (intern_names(names, Py_ARRAY_LENGTH(names)) < 0 || PyType_Ready(&DoorType) < 0 ||
        PyType_Ready(&ComputeSpanType) < 0 || PyModule_AddType(module, &ReadySpanType) < 0 ||
        add_door("__enter__", 0) < 0 || add_door("__exit__", 1) < 0) {
        return -1;
    }
    PyType_Modified(&ReadySpanType);
    return PyModule_AddFunctions(module, functions);
}
