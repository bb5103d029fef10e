/* `LaneState`: writing records into the lane's segment, and the open table of a segment.

   Invariants:
   - A row is claimed by taking its offset from the segment's `rows`, under the GIL.
   - The commit word of a row and the check word of an open table entry are stored last.
   - The lane holds the export of its segment's buffer, so the mapping cannot be closed under it.
   - `spare_entry` belongs to the present segment; it is dropped when the segment changes.
   - Anything without a free row or entry is handed to Python (`write_in_next_segment`,
     `open_in_first`); a signal handler of the job may run there, and nowhere else in this file
     but in `is_left_out`. */

#include "hot.h"

/* `tracer.spool.OPEN_ENTRY`, and `OPEN_COMM` behind it. */
typedef struct {
    int64_t start_ns;
    uint64_t group_id;
    int64_t seq;
    uint32_t name_id;
    int32_t step;
    uint8_t kind;
    uint8_t depth;
    uint8_t unused[6];
    int64_t check;
    int64_t num_bytes;
    int32_t src_rank;
    int32_t dst_rank;
} OpenTableEntry;

const Comm NO_COMM = {.seq = NONE};

/* -- records ------------------------------------------------------------------------------ */

/* Count a dropped record: 1; if the pool has a spare segment, do nothing: 0; an error: -1.

   In C, because a dropped record must cost no more than a kept one. */
int
count_drop(PyObject *pool, PyObject *spares)
{
    Py_ssize_t num_spares = PyObject_Size(spares);
    if (num_spares) {
        return num_spares < 0 ? -1 : 0;
    }
    PyObject *drops = PyObject_GetAttr(pool, s_drops);
    if (drops == NULL) {
        return -1;
    }
    int status = 1;
    if (Py_IS_TYPE(drops, &DropCountType)) {
        increment((DropCount *)drops);
    } else {
        PyErr_SetString(PyExc_TypeError, "the pool's drops must be a DropCount");
        status = -1;
    }
    Py_DECREF(drops);
    return status;
}

/* `count_drop` for the pool of a lane. */
static int
count_lane_drop(LaneState *lane)
{
    PyObject *pool = PyObject_GetAttr((PyObject *)lane, s_pool);
    PyObject *spares = pool == NULL ? NULL : PyObject_GetAttr(pool, s_spares);
    int status = spares == NULL ? -1 : count_drop(pool, spares);
    Py_XDECREF(pool);
    Py_XDECREF(spares);
    return status;
}

/* Write a record, into the next segment if this one is full, or count it as dropped: 0 or -1. */
int
put_record(LaneState *lane, uint64_t head, const char *place, int64_t start_ns, int64_t end_ns,
           long depth, int64_t launch_ns, const void *second)
{
    if (depth < 0) { /* the lane belongs to another thread by now, which began at 0 */
        lane->depth = depth = 0;
    }
    int status = write_record(lane, head, place, start_ns, end_ns, depth, launch_ns, second);
    if (status == 0) {
        status = count_lane_drop(lane);
    }
    if (status == 0) {
        PyObject *done = PyObject_CallMethod((PyObject *)lane, "write_in_next_segment",
                                             "KLLy#Lly#", head, start_ns, end_ns - start_ns, place,
                                             PLACE_BYTES, launch_ns, depth, second,
                                             (Py_ssize_t)SECOND_BYTES);
        status = done == NULL ? -1 : 0;
        Py_XDECREF(done);
    }
    return status < 0 ? -1 : 0;
}

/* Whether a record is of a span whose kind is left out: 1, 0, or -1. */
static int
is_left_out(LaneState *lane, uint64_t head, const char *place)
{
    PyObject *sampling = PyObject_GetAttr((PyObject *)lane, s_sampling);
    PyObject *active = sampling == NULL ? NULL : PyObject_GetAttr(sampling, s_active);
    int status = active == NULL ? -1 : PyObject_IsTrue(active);
    if (status == 1) {
        PyObject *answer = (head & 0xFF) != SPAN
                               ? Py_NewRef(Py_False)
                               : PyObject_CallMethod(sampling, "leaves_out", "Ky#", head, place,
                                                     PLACE_BYTES);
        status = answer == NULL ? -1 : PyObject_IsTrue(answer);
        Py_XDECREF(answer);
    }
    Py_XDECREF(sampling);
    Py_XDECREF(active);
    return status;
}

/* `put_record`, unless the record is of a span whose kind is left out: 0 or -1. */
int
append_record(LaneState *lane, uint64_t head, const char *place, int64_t start_ns, int64_t end_ns,
              long depth, int64_t launch_ns, const void *second)
{
    int left_out = place == NULL ? -1 : is_left_out(lane, head, place);
    if (left_out) {
        return left_out < 0 ? -1 : 0;
    }
    return put_record(lane, head, place, start_ns, end_ns, depth, launch_ns, second);
}

typedef int (*WriteFunction)(LaneState *, uint64_t, const char *, int64_t, int64_t, long, int64_t,
                             const void *);

/* Write a record from the Python arguments of `LaneState.write`. */
static PyObject *
write_arguments(WriteFunction write, LaneState *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 6 && num_args != 7) {
        PyErr_SetString(PyExc_TypeError, "a record takes head, start, duration, place, launch,"
                                         " depth and optionally a second half");
        return NULL;
    }
    uint64_t head = PyLong_AsUnsignedLongLong(args[0]);
    int64_t start_ns = PyLong_AsLongLong(args[1]), duration_ns = PyLong_AsLongLong(args[2]);
    int64_t launch_ns = PyLong_AsLongLong(args[4]), end_ns;
    long depth = PyLong_AsLong(args[5]);
    PyObject *second = num_args == 7 && args[6] != Py_None ? args[6] : NULL;
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (__builtin_add_overflow(start_ns, duration_ns, &end_ns)) {
        PyErr_SetString(PyExc_OverflowError, "start + duration must fit into 64 bits");
        return NULL;
    }
    if (second != NULL && (!PyBytes_Check(second) || PyBytes_GET_SIZE(second) != SECOND_BYTES)) {
        PyErr_SetString(PyExc_TypeError, "the second half of a record must be 64 bytes");
        return NULL;
    }
    const char *half = second == NULL ? NULL : PyBytes_AS_STRING(second);
    if (write(self, head, read_place(args[3]), start_ns, end_ns, depth, launch_ns, half) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
lane_write(LaneState *self, PyObject *const *args, Py_ssize_t num_args)
{
    return write_arguments(put_record, self, args, num_args);
}

static PyObject *
lane_append(LaneState *self, PyObject *const *args, Py_ssize_t num_args)
{
    return write_arguments(append_record, self, args, num_args);
}

/* -- OpenEntry ---------------------------------------------------------------------------- */

/* Get the buffer of `owner` if it holds `size` bytes at `offset`, a multiple of eight: 0 or -1. */
static int
open_buffer(PyObject *owner, int64_t offset, Py_ssize_t size, Py_buffer *view)
{
    PyObject *buffer = PyObject_GetAttr(owner, s_buffer);
    if (buffer == NULL) {
        return -1;
    }
    int status = PyObject_GetBuffer(buffer, view, PyBUF_WRITABLE);
    Py_DECREF(buffer);
    if (status == 0 && check_offset(view, offset, size) < 0) {
        PyBuffer_Release(view);
        status = -1;
    }
    return status;
}

/* Free an entry of the open table; do nothing if it was freed before: 0 or -1. */
int
close_entry(OpenEntry *self)
{
    PyObject *segment = self->segment, *done = NULL;
    if (segment == NULL) {
        return 0;
    }
    self->segment = NULL;
    Py_buffer buffer;
    if (open_buffer(segment, self->offset, sizeof(OpenTableEntry), &buffer) == 0) {
        store_last((char *)buffer.buf + self->offset, 0);
        PyBuffer_Release(&buffer);
        PyObject *slots = PyObject_GetAttr(segment, s_open_slots);
        done = slots == NULL ? NULL : PyObject_CallMethodOneArg(slots, s_append, self->slot);
        Py_XDECREF(slots);
    }
    Py_DECREF(segment);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static PyObject *
entry_close(OpenEntry *self, PyObject *Py_UNUSED(ignored))
{
    if (close_entry(self) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static void
entry_dealloc(OpenEntry *self)
{
    Py_XDECREF(self->segment);
    Py_XDECREF(self->slot);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef entry_methods[] = {
    {"close", (PyCFunction)entry_close, METH_NOARGS, "Free the entry; once."},
    {NULL},
};

PyTypeObject OpenEntryType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "rankscope.tracer.native._hot.OpenEntry",
    .tp_doc = "An entry of the open table: a span that has begun and not ended.",
    .tp_basicsize = sizeof(OpenEntry),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)entry_dealloc,
    .tp_methods = entry_methods,
};

/* Take a free slot of the segment's open table; NULL without an error if there is none. */
static PyObject *
take_slot(PyObject *segment)
{
    PyObject *slots = PyObject_GetAttr(segment, s_open_slots);
    PyObject *slot = slots == NULL ? NULL : PyObject_CallMethodNoArgs(slots, s_pop);
    Py_XDECREF(slots);
    if (slot == NULL && PyErr_ExceptionMatches(PyExc_IndexError)) {
        PyErr_Clear();
    }
    return slot;
}

/* Write an entry into the open table of the lane's segment. */
void
write_open_entry(LaneState *lane, int64_t offset, int64_t start_ns, uint64_t head,
                 const Comm *comm)
{
    OpenTableEntry entry = {.start_ns = start_ns,
                            .group_id = comm->group_id,
                            .seq = comm->seq,
                            .num_bytes = comm->num_bytes,
                            .src_rank = comm->src_rank,
                            .dst_rank = comm->dst_rank,
                            .name_id = (uint32_t)(head >> 32),
                            .step = lane->fields.step,
                            .kind = (uint8_t)(head >> 8)};
    char *to = (char *)lane->buffer.buf + offset;
    memcpy(to + offsetof(OpenTableEntry, num_bytes), &entry.num_bytes,
           sizeof(entry) - offsetof(OpenTableEntry, num_bytes));
    memcpy(to, &entry, offsetof(OpenTableEntry, check));
    store_last(to + offsetof(OpenTableEntry, check), start_ns);
}

/* Enter a span that has begun into the open table: its `OpenEntry`; None if the table is full;
   NULL is an error. */
PyObject *
open_entry(LaneState *lane, int64_t start_ns, uint64_t head, const Comm *comm)
{
    if (lane->segment == NULL) { /* cleared by the garbage collector */
        Py_RETURN_NONE;
    }
    PyObject *slot = take_slot(lane->segment);
    if (slot == NULL) { /* the table is full, or the lane has no segment yet */
        return PyErr_Occurred() ? NULL
                                : PyObject_CallMethod((PyObject *)lane, "open_in_first",
                                                      "LK(KLLii)", start_ns, head, comm->group_id,
                                                      comm->seq, comm->num_bytes, comm->src_rank,
                                                      comm->dst_rank);
    }
    int64_t offset = PyLong_AsLongLong(slot);
    OpenEntry *entry = NULL;
    if (!PyErr_Occurred() && check_offset(&lane->buffer, offset, sizeof(OpenTableEntry)) == 0) {
        entry = PyObject_New(OpenEntry, &OpenEntryType);
    }
    if (entry == NULL) {
        Py_DECREF(slot);
        return NULL;
    }
    entry->segment = Py_NewRef(lane->segment);
    entry->slot = slot;
    entry->offset = offset;
    write_open_entry(lane, offset, start_ns, head, comm);
    return (PyObject *)entry;
}

static PyObject *
lane_open(LaneState *self, PyObject *const *args, Py_ssize_t num_args)
{
    Comm comm = NO_COMM;
    if (num_args != 2 && num_args != 3) {
        PyErr_SetString(PyExc_TypeError, "open takes start, head and optionally a communication");
        return NULL;
    }
    int64_t start_ns = PyLong_AsLongLong(args[0]);
    uint64_t head = PyLong_AsUnsignedLongLong(args[1]);
    if (num_args == 3) {
        long long seq = NONE, num_bytes = 0;
        if (!PyTuple_Check(args[2])) {
            PyErr_SetString(PyExc_TypeError, "a communication must be a tuple");
            return NULL;
        }
        if (!PyArg_ParseTuple(args[2], "KL|Lii", &comm.group_id, &seq, &num_bytes, &comm.src_rank,
                              &comm.dst_rank)) {
            return NULL;
        }
        comm.seq = seq;
        comm.num_bytes = num_bytes;
    }
    return PyErr_Occurred() ? NULL : open_entry(self, start_ns, head, &comm);
}

/* -- LaneState ---------------------------------------------------------------------------- */

static PyMemberDef lane_members[] = {
    {"depth", T_LONG, offsetof(LaneState, depth), 0, NULL},
    {"place", T_OBJECT_EX, offsetof(LaneState, place), READONLY, NULL},
    {"step", T_INT, offsetof(LaneState, fields.step), READONLY, NULL},
    {"microbatch", T_INT, offsetof(LaneState, fields.microbatch), READONLY, NULL},
    {"chunk", T_INT, offsetof(LaneState, fields.chunk), READONLY, NULL},
    {"track_id", T_UINT, offsetof(LaneState, fields.track_id), 0, NULL},
    {NULL},
};

/* Set the place of spans that name none of their own: 0 or -1. */
int
set_place(LaneState *self, int32_t step, int32_t microbatch, int32_t chunk)
{
    Place fields = {step, microbatch, chunk, self->fields.track_id};
    PyObject *place = PyBytes_FromStringAndSize((char *)&fields, sizeof(fields));
    if (place == NULL) {
        return -1;
    }
    self->fields = fields;
    Py_XSETREF(self->place, place);
    return 0;
}

/* Read a 32-bit integer: 0 or -1. */
int
read_number(PyObject *number, int32_t *into)
{
    long value = PyLong_AsLong(number);
    if (value == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (value < INT32_MIN || value > INT32_MAX) {
        PyErr_Format(PyExc_OverflowError, "%ld does not fit into 32 bits", value);
        return -1;
    }
    *into = (int32_t)value;
    return 0;
}

static PyObject *
lane_set_place(LaneState *self, PyObject *const *args, Py_ssize_t num_args)
{
    int32_t step, microbatch, chunk;
    if (num_args != 3) {
        PyErr_SetString(PyExc_TypeError, "set_place takes step, microbatch and chunk");
        return NULL;
    }
    if (read_number(args[0], &step) < 0 || read_number(args[1], &microbatch) < 0 ||
        read_number(args[2], &chunk) < 0 || set_place(self, step, microbatch, chunk) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef lane_methods[] = {
    {"set_place", (PyCFunction)(void (*)(void))lane_set_place, METH_FASTCALL,
     "Set the place of spans that name none of their own."},
    {"append", (PyCFunction)(void (*)(void))lane_append, METH_FASTCALL,
     "Write one record, unless it is of a span whose kind is left out."},
    {"write", (PyCFunction)(void (*)(void))lane_write, METH_FASTCALL, "Write one record."},
    {"open", (PyCFunction)(void (*)(void))lane_open, METH_FASTCALL,
     "Enter a span that has begun into the open table."},
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
        PyErr_SetString(PyExc_TypeError, "the segment of a lane cannot be deleted");
        return -1;
    }
    PyObject *rows = PyObject_GetAttr(segment, s_rows);
    PyObject *bytes = rows == NULL ? NULL : PyObject_GetAttr(segment, s_buffer);
    Py_buffer buffer, former = self->buffer;
    if (bytes == NULL || PyObject_GetBuffer(bytes, &buffer, PyBUF_WRITABLE) < 0) {
        Py_XDECREF(rows);
        Py_XDECREF(bytes);
        return -1;
    }
    Py_DECREF(bytes);
    self->buffer = buffer;
    Py_CLEAR(self->spare_entry); /* an entry of the former segment */
    Py_XSETREF(self->rows, rows);
    Py_XSETREF(self->segment, Py_NewRef(segment));
    PyBuffer_Release(&former);
    return 0;
}

static PyGetSetDef lane_getset[] = {
    {"segment", (getter)lane_get_segment, (setter)lane_set_segment,
     "The segment that the lane writes to.", NULL},
    {NULL},
};

static int
lane_traverse(LaneState *self, visitproc visit, void *arg)
{
    Py_VISIT(self->place);
    Py_VISIT(self->segment);
    Py_VISIT(self->rows);
    Py_VISIT(self->buffer.obj);
    return 0;
}

static int
lane_clear(LaneState *self)
{
    Py_CLEAR(self->place);
    Py_CLEAR(self->segment);
    Py_CLEAR(self->rows);
    Py_CLEAR(self->spare_entry);
    PyBuffer_Release(&self->buffer);
    return 0;
}

static void
lane_dealloc(LaneState *self)
{
    PyObject_GC_UnTrack(self);
    lane_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

PyTypeObject LaneStateType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "rankscope.tracer.native._hot.LaneState",
    .tp_doc = "The state that a lane shares with its spans.",
    .tp_basicsize = sizeof(LaneState),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)lane_dealloc,
    .tp_traverse = (traverseproc)lane_traverse,
    .tp_clear = (inquiry)lane_clear,
    .tp_methods = lane_methods,
    .tp_members = lane_members,
    .tp_getset = lane_getset,
};

int
add_lane(PyObject *module)
{
    if (PyType_Ready(&OpenEntryType) < 0) {
        return -1;
    }
    return PyModule_AddType(module, &LaneStateType);
}
