/* `HostLaunch`: a communication timed by the host clock, and the records of it and of its waits.

   Invariants:
   - Its own record is written once: `is_over` is tested and set under the GIL, by the completion
     callback, the waiting thread or `claim`.
   - It inherits the place of the thread that launched it; a wait has the place of the thread
     that waits. */

#include "hot.h"

#define BLOCKED_NS 50000 /* `tracer.native.host_launch.BLOCKED_NS` */

typedef struct {
    PyObject_HEAD
    PyObject *recorder;
    PyObject *group;
    PyObject *device; /* its marks on a device; None or NULL if it has none */
    PyObject *entry;  /* its `OpenEntry`; None or NULL if it has none */
    LaneState *lane;  /* the lane of all communications */
    uint64_t head;
    uint64_t wait_head;
    int64_t start_ns;
    int64_t end_ns;
    unsigned long thread_id;
    Place place;
    Comm comm;
    unsigned int flags;
    char is_over;
    char has_end;
    char on_device;
    char is_lost;
    char is_collective;
} HostLaunch;

/* Read an attribute that is an unsigned 64-bit integer: 0 or -1. */
static int
read_attribute(PyObject *owner, PyObject *name, uint64_t *into)
{
    PyObject *number = PyObject_GetAttr(owner, name);
    if (number == NULL) {
        return -1;
    }
    *into = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *
launch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *recorder, *group;
    LaneState *caller;
    Comm comm = {0};
    long long seq, num_bytes, interval_id;
    unsigned long long head, wait_head;
    unsigned int flags;
    if (kwargs != NULL && PyDict_GET_SIZE(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "HostLaunch takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "OOO!(LiiLL)(KK)I:HostLaunch", &recorder, &group, &LaneStateType,
                          &caller, &seq, &comm.src_rank, &comm.dst_rank, &num_bytes, &interval_id,
                          &head, &wait_head, &flags)) {
        return NULL;
    }
    comm.seq = seq;
    comm.num_bytes = num_bytes;
    comm.interval_id = interval_id;
    uint64_t track_id;
    if (read_attribute(group, s_group_id, &comm.group_id) < 0 ||
        read_attribute(group, s_track_id, &track_id) < 0) {
        return NULL;
    }
    if (track_id > UINT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "the group's track_id must fit into 32 bits");
        return NULL;
    }
    PyObject *lane = PyObject_GetAttr(recorder, s_comm_lane);
    if (lane == NULL || !PyObject_TypeCheck(lane, &LaneStateType)) {
        if (lane != NULL) {
            PyErr_SetString(PyExc_TypeError, "the recorder's comm_lane must be a LaneState");
        }
        Py_XDECREF(lane);
        return NULL;
    }
    HostLaunch *self = (HostLaunch *)type->tp_alloc(type, 0);
    if (self == NULL) {
        Py_DECREF(lane);
        return NULL;
    }
    self->recorder = Py_NewRef(recorder);
    self->group = Py_NewRef(group);
    self->lane = (LaneState *)lane;
    self->head = head;
    self->wait_head = wait_head;
    self->flags = flags;
    self->comm = comm;
    self->is_collective = comm.dst_rank == NONE;
    self->place = caller->fields;
    self->place.track_id = (uint32_t)track_id;
    self->thread_id = PyThread_get_thread_ident();
    self->start_ns = now_ns();
    return (PyObject *)self;
}

/* Free its entry of the open table: 0 or -1. */
static int
hide_launch(HostLaunch *self)
{
    PyObject *entry = self->entry;
    self->entry = NULL;
    int status = entry != NULL && Py_IS_TYPE(entry, &OpenEntryType)
                     ? close_entry((OpenEntry *)entry)
                     : 0;
    Py_XDECREF(entry);
    return status;
}

/* Write its record, unless it was written or claimed before: 0 or -1. */
static int
end_launch(HostLaunch *self, int64_t end_ns, unsigned int flags)
{
    if (self->is_over) {
        return 0;
    }
    self->is_over = self->has_end = 1;
    self->end_ns = end_ns;
    if (self->device != NULL && self->device != Py_None) {
        PyObject *done = PyObject_CallMethodNoArgs(self->device, s_release);
        if (done == NULL) {
            return -1;
        }
        Py_DECREF(done);
    }
    uint64_t head = self->head | IN_HEAD(self->flags | flags | HAS_COMM);
    if (append_record(self->lane, head, (char *)&self->place, self->start_ns, end_ns, 0,
                      self->start_ns, &self->comm) < 0) {
        return -1;
    }
    return hide_launch(self);
}

/* Write the wait of a thread that was blocked on it: 0 or -1. */
static int
end_wait(HostLaunch *self, LaneState *lane, int64_t start_ns, int64_t end_ns, unsigned int flags)
{
    uint64_t head = self->wait_head | IN_HEAD(HOST_CLOCK | flags | HAS_COMM);
    return append_record(lane, head, read_place(lane->place), start_ns, end_ns, lane->depth,
                         start_ns, &self->comm);
}

static PyObject *
launch_end(HostLaunch *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 1 && num_args != 2) {
        PyErr_SetString(PyExc_TypeError, "end takes end_ns and optionally flags");
        return NULL;
    }
    int64_t end_ns = PyLong_AsLongLong(args[0]);
    unsigned long flags = num_args == 2 ? PyLong_AsUnsignedLong(args[1]) : 0;
    if (PyErr_Occurred() || end_launch(self, end_ns, (unsigned int)flags) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
launch_waited(HostLaunch *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 4 || !PyObject_TypeCheck(args[0], &LaneStateType)) {
        PyErr_SetString(PyExc_TypeError, "waited_on_host takes lane, start_ns, end_ns and flags");
        return NULL;
    }
    LaneState *lane = (LaneState *)args[0];
    int64_t start_ns = PyLong_AsLongLong(args[1]), end_ns = PyLong_AsLongLong(args[2]);
    unsigned long given = PyLong_AsUnsignedLong(args[3]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    unsigned int flags = (unsigned int)given, bound = 0;
    if (!self->has_end) {
        bound = end_ns - start_ns < BLOCKED_NS && self->flags & ASYNC ? END_BOUND : 0;
        if (end_launch(self, end_ns, flags | bound) < 0) {
            return NULL;
        }
    }
    if (end_wait(self, lane, start_ns, end_ns, flags) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
launch_returned(HostLaunch *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 2 || !PyObject_TypeCheck(args[0], &LaneStateType)) {
        PyErr_SetString(PyExc_TypeError, "returned_on_host takes lane and end_ns");
        return NULL;
    }
    int64_t end_ns = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred() || end_launch(self, end_ns, 0) < 0 ||
        end_wait(self, (LaneState *)args[0], self->start_ns, end_ns, 0) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
launch_show(HostLaunch *self, PyObject *Py_UNUSED(ignored))
{
    if (!self->is_lost) {
        PyObject *entry = open_entry(self->lane, self->start_ns, self->head, &self->comm);
        if (entry == NULL) {
            return NULL;
        }
        Py_XSETREF(self->entry, entry);
    }
    Py_RETURN_NONE;
}

static PyObject *
launch_hide(HostLaunch *self, PyObject *Py_UNUSED(ignored))
{
    if (hide_launch(self) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
launch_claim(HostLaunch *self, PyObject *Py_UNUSED(ignored))
{
    int was_over = self->is_over;
    self->is_over = 1;
    return PyBool_FromLong(!was_over);
}

static PyObject *
launch_set_source(HostLaunch *self, PyObject *args)
{
    int src_rank;
    long long seq;
    if (!PyArg_ParseTuple(args, "iL:set_source", &src_rank, &seq)) {
        return NULL;
    }
    self->comm.src_rank = src_rank;
    self->comm.seq = seq;
    Py_RETURN_NONE;
}

static PyObject *
launch_get_end(HostLaunch *self, void *Py_UNUSED(closure))
{
    if (!self->has_end) {
        Py_RETURN_NONE;
    }
    return PyLong_FromLongLong(self->end_ns);
}

static PyObject *
launch_get_place(HostLaunch *self, void *Py_UNUSED(closure))
{
    return PyBytes_FromStringAndSize((char *)&self->place, sizeof(self->place));
}

static PyObject *
launch_get_second(HostLaunch *self, void *Py_UNUSED(closure))
{
    return PyBytes_FromStringAndSize((char *)&self->comm, sizeof(self->comm));
}

static int
launch_traverse(HostLaunch *self, visitproc visit, void *arg)
{
    Py_VISIT(self->recorder);
    Py_VISIT(self->group);
    Py_VISIT(self->device);
    Py_VISIT(self->lane);
    return 0;
}

/* Its lane remains: a callback may end it after the collector ran. All cycles go through these. */
static int
launch_clear(HostLaunch *self)
{
    Py_CLEAR(self->recorder);
    Py_CLEAR(self->group);
    Py_CLEAR(self->device);
    return 0;
}

static void
launch_dealloc(HostLaunch *self)
{
    PyObject_GC_UnTrack(self);
    launch_clear(self);
    Py_XDECREF(self->entry);
    Py_XDECREF(self->lane);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef launch_methods[] = {
    {"end", (PyCFunction)(void (*)(void))launch_end, METH_FASTCALL,
     "Write the communication's record with an end by the host clock; once."},
    {"waited_on_host", (PyCFunction)(void (*)(void))launch_waited, METH_FASTCALL,
     "Record that a thread was blocked on the communication over an interval."},
    {"returned_on_host", (PyCFunction)(void (*)(void))launch_returned, METH_FASTCALL,
     "Record that the call returned without a work object: it waited by itself."},
    {"show", (PyCFunction)launch_show, METH_NOARGS,
     "Enter the communication into the open table."},
    {"hide", (PyCFunction)launch_hide, METH_NOARGS, "Free its entry of the open table."},
    {"claim", (PyCFunction)launch_claim, METH_NOARGS,
     "Return whether the caller may write the record; True for one caller only."},
    {"set_source", (PyCFunction)launch_set_source, METH_VARARGS,
     "Set the source of a receive from any source, once it is known."},
    {NULL},
};

static PyMemberDef launch_members[] = {
    {"recorder", T_OBJECT_EX, offsetof(HostLaunch, recorder), READONLY, NULL},
    {"group", T_OBJECT_EX, offsetof(HostLaunch, group), READONLY, NULL},
    {"device", T_OBJECT, offsetof(HostLaunch, device), 0, NULL},
    {"head", T_ULONGLONG, offsetof(HostLaunch, head), READONLY, NULL},
    {"wait_head", T_ULONGLONG, offsetof(HostLaunch, wait_head), READONLY, NULL},
    {"start_ns", T_LONGLONG, offsetof(HostLaunch, start_ns), READONLY, NULL},
    {"seq", T_LONGLONG, offsetof(HostLaunch, comm.seq), READONLY, NULL},
    {"thread_id", T_ULONG, offsetof(HostLaunch, thread_id), READONLY, NULL},
    {"flags", T_UINT, offsetof(HostLaunch, flags), READONLY, NULL},
    {"on_device", T_BOOL, offsetof(HostLaunch, on_device), 0, NULL},
    {"is_lost", T_BOOL, offsetof(HostLaunch, is_lost), 0, NULL},
    {"is_collective", T_BOOL, offsetof(HostLaunch, is_collective), READONLY, NULL},
    {NULL},
};

static PyGetSetDef launch_getset[] = {
    {"end_ns", (getter)launch_get_end, NULL, "End, monotonic; None if unknown.", NULL},
    {"place", (getter)launch_get_place, NULL, "Its place, as `PLACE`.", NULL},
    {"second", (getter)launch_get_second, NULL, "Second half of its record.", NULL},
    {NULL},
};

static PyTypeObject HostLaunchType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "rankscope.tracer.native._hot.HostLaunch",
    .tp_doc = "A communication that this rank has entered, timed by the host clock.",
    .tp_basicsize = sizeof(HostLaunch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = launch_new,
    .tp_dealloc = (destructor)launch_dealloc,
    .tp_traverse = (traverseproc)launch_traverse,
    .tp_clear = (inquiry)launch_clear,
    .tp_methods = launch_methods,
    .tp_members = launch_members,
    .tp_getset = launch_getset,
};

int
add_communication(PyObject *module)
{
    return PyModule_AddType(module, &HostLaunchType);
}
