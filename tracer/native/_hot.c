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

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <structmember.h>
#include <time.h>

/* `tracer.native.lane_state.PLACE`. */
typedef struct {
    int32_t step;
    int32_t microbatch;
    int32_t chunk;
    uint32_t track_id;
} Place;

/* The first bytes of `tracer.spool.CORE`, up to its commit word. */
typedef struct {
    uint64_t head;
    char place[sizeof(Place)];
    int64_t start_ns;
    int64_t end_ns;
    int64_t depth;
    int64_t commit;
} Core;

/* `tracer.spool.OPEN_ENTRY`. */
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
} OpenLine;

/* `tracer.spool.COMM`: the second half of a communication's record, and of its wait's. */
typedef struct {
    uint64_t group_id;
    int64_t seq;
    int32_t src_rank;
    int32_t dst_rank;
    int64_t num_bytes;
    int64_t interval_id;
    char unused[24];
} Comm;

#define NONE (-1)                /* `tracer.span.NONE` */
#define MAX_DEPTH 65535          /* `tracer.native.lane_state.MAX_DEPTH` */
#define ERROR_HEAD MOVED_BY(64)  /* `tracer.native.lane_state.ERROR_HEAD` */
#define PLACE_BYTES ((Py_ssize_t)sizeof(Place))
#define RECORD_BYTES 128         /* `tracer.spool.RECORD_BYTES` */
#define LAUNCH_OFFSET 56         /* `tracer.spool.LAUNCH_OFFSET` */
#define SECOND_OFFSET 64         /* `tracer.spool.COMM_OFFSET`; to the end of the record */
#define SECOND_BYTES (RECORD_BYTES - SECOND_OFFSET)
#define SPAN 1                   /* `tracer.spool.RecordType.SPAN` */
#define HAS_COMM (1U << 15)      /* `tracer.spool.HAS_COMM` */
#define BLOCKED_NS 50000         /* `tracer.native.host_launch.BLOCKED_NS` */

/* `tracer.span.SpanFlag`. */
#define ASYNC 1U
#define HOST_CLOCK 16U
#define END_BOUND 128U

#define MOVED_BY(flags) ((uint64_t)(flags) << 16) /* to where a head has them */

/* Names of attributes, interned once. */
static PyObject *s_rows, *s_buffer, *s_source, *s_spares, *s_drops, *s_swallow, *s_leave_slowly,
    *s_ready, *s_open_slots, *s_pop, *s_append, *s_sampling, *s_active, *s_comm_lane, *s_group_id,
    *s_track_id, *s_give_back, *s_yes, *s_step_number;

static int64_t
now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* -- Numbers: handed out one by one, so that nobody gets one twice ------------------------ */

typedef struct {
    PyObject_HEAD
    int64_t next;
    int64_t stop;
    int64_t step;
} Numbers;

static PyObject *
numbers_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    long long next, stop, step;
    static char *names[] = {"start", "stop", "step", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "LLL:Numbers", names, &next, &stop, &step)) {
        return NULL;
    }
    if (next < 0 || step <= 0 || stop > INT64_MAX - step) {
        PyErr_SetString(PyExc_ValueError, "numbers begin at 0 or more and go upwards");
        return NULL;
    }
    Numbers *self = (Numbers *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->next = next;
        self->stop = stop;
        self->step = step;
    }
    return (PyObject *)self;
}

static PyObject *
numbers_next(Numbers *self)
{
    if (self->next >= self->stop) {
        return NULL;
    }
    PyObject *number = PyLong_FromLongLong(self->next);
    if (number != NULL) {
        self->next += self->step;
    }
    return number;
}

static PyObject *
numbers_length_hint(Numbers *self, PyObject *Py_UNUSED(ignored))
{
    int64_t left = self->stop - self->next;
    return PyLong_FromLongLong(left <= 0 ? 0 : (left + self->step - 1) / self->step);
}

static PyMethodDef numbers_methods[] = {
    {"__length_hint__", (PyCFunction)numbers_length_hint, METH_NOARGS, "How many are left."},
    {NULL},
};

static PyTypeObject NumbersType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "rankscope.tracer.native._hot.Numbers",
    .tp_doc = "An iterator over a `range`; who takes a number has claimed it.",
    .tp_basicsize = sizeof(Numbers),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = numbers_new,
    .tp_iter = PyObject_SelfIter,
    .tp_iternext = (iternextfunc)numbers_next,
    .tp_methods = numbers_methods,
};

/* -- buffers ------------------------------------------------------------------------------ */

/* Whether a buffer has room for `size` bytes at `offset`, a multiple of eight: 0 or -1. */
static int
check_offset(const Py_buffer *buffer, int64_t offset, Py_ssize_t size)
{
    if (offset >= 0 && offset % 8 == 0 && offset <= buffer->len - size) {
        return 0;
    }
    PyErr_Format(PyExc_IndexError, "%lld does not lie in a buffer of %zd bytes",
                 (long long)offset, buffer->len);
    return -1;
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
    if (status == 0 && check_offset(view, offset, size) < 0) {
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

/* -- DropCount: what was lost for one reason ---------------------------------------------- */

typedef struct {
    PyObject_HEAD
    int64_t count;
    int64_t offset;
    Py_buffer buffer; /* in which the count stands at the offset */
} DropCount;

static void
count_one(DropCount *self)
{
    self->count++;
    store_last((char *)self->buffer.buf + self->offset, self->count);
}

static PyObject *
drops_add(DropCount *self, PyObject *Py_UNUSED(ignored))
{
    count_one(self);
    Py_RETURN_NONE;
}

static PyObject *
drops_write_to(DropCount *self, PyObject *bytes)
{
    Py_buffer buffer;
    if (PyObject_GetBuffer(bytes, &buffer, PyBUF_WRITABLE) < 0) {
        return NULL;
    }
    if (check_offset(&buffer, self->offset, sizeof(self->count)) < 0) {
        PyBuffer_Release(&buffer);
        return NULL;
    }
    PyBuffer_Release(&self->buffer);
    self->buffer = buffer;
    Py_RETURN_NONE;
}

static PyObject *
drops_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *bytes;
    long long offset;
    static char *names[] = {"buffer", "offset", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OL:DropCount", names, &bytes, &offset)) {
        return NULL;
    }
    DropCount *self = (DropCount *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->offset = offset;
    PyObject *done = drops_write_to(self, bytes);
    if (done == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    Py_DECREF(done);
    return (PyObject *)self;
}

static void
drops_dealloc(DropCount *self)
{
    PyBuffer_Release(&self->buffer);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef drops_methods[] = {
    {"add", (PyCFunction)drops_add, METH_NOARGS, "Count one more."},
    {"write_to", (PyCFunction)drops_write_to, METH_O, "Let the count stand in another buffer."},
    {NULL},
};

static PyMemberDef drops_members[] = {
    {"count", T_LONGLONG, offsetof(DropCount, count), READONLY, NULL},
    {"offset", T_LONGLONG, offsetof(DropCount, offset), READONLY, NULL},
    {NULL},
};

static PyTypeObject DropCountType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "rankscope.tracer.native._hot.DropCount",
    .tp_doc = "What was lost for one reason.",
    .tp_basicsize = sizeof(DropCount),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = drops_new,
    .tp_dealloc = (destructor)drops_dealloc,
    .tp_methods = drops_methods,
    .tp_members = drops_members,
};

/* -- LaneState: what a lane and its spans share ------------------------------------------- */

typedef struct {
    PyObject_HEAD
    long depth;
    PyObject *place; /* `at` as bytes */
    Place at;
    PyObject *segment;
    PyObject *rows;   /* of the segment; NULL once none was left */
    Py_buffer buffer; /* of the segment, which cannot be unmapped while it is held */
    PyObject *kept;   /* an `OpenEntry` of the segment that nobody uses; NULL where none is kept */
} LaneState;

/* Take the next number of an iterator: 1; none left: 0; an error: -1. */
static int
take_next(PyObject *iterator, int64_t *number)
{
    if (Py_IS_TYPE(iterator, &NumbersType)) {
        Numbers *own = (Numbers *)iterator;
        if (own->next >= own->stop) {
            return 0;
        }
        *number = own->next;
        own->next += own->step;
        return 1;
    }
    PyObject *item = PyIter_Next(iterator);
    if (item == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    *number = PyLong_AsLongLong(item);
    Py_DECREF(item);
    return *number == -1 && PyErr_Occurred() ? -1 : 1;
}

/* The bytes of a place, or NULL with an error. */
static const char *
read_place(PyObject *place)
{
    if (place != NULL && PyBytes_Check(place) && PyBytes_GET_SIZE(place) == PLACE_BYTES) {
        return PyBytes_AS_STRING(place);
    }
    PyErr_SetString(PyExc_TypeError, "a place is not 16 bytes");
    return NULL;
}

/* Write a record: 1; where the segment is full: 0; an error: -1. `second` may be NULL. Inline: so
   nothing is left of either for a span that has neither a launch of its own nor a second half. */
static inline __attribute__((always_inline)) int
write_record(LaneState *lane, uint64_t head, const char *place, int64_t start_ns, int64_t end_ns,
             long depth, int64_t launch_ns, const void *second)
{
    if (place == NULL) {
        return -1;
    }
    if (lane->rows == NULL) {
        return 0;
    }
    int64_t offset;
    int status = take_next(lane->rows, &offset);
    if (status != 1) {
        if (status == 0) {
            Py_CLEAR(lane->rows);
        }
        return status;
    }
    Py_ssize_t num_bytes = second == NULL && launch_ns == start_ns ? sizeof(Core) : RECORD_BYTES;
    if (check_offset(&lane->buffer, offset, num_bytes) < 0) {
        return -1;
    }
    if (depth > MAX_DEPTH) {
        depth = MAX_DEPTH;
    }
    Core core = {.head = head, .start_ns = start_ns, .end_ns = end_ns, .depth = depth};
    memcpy(core.place, place, PLACE_BYTES);
    char *row = (char *)lane->buffer.buf + offset;
    if (launch_ns != start_ns) {
        memcpy(row + LAUNCH_OFFSET, &launch_ns, sizeof(launch_ns));
    }
    if (second != NULL) {
        memcpy(row + SECOND_OFFSET, second, SECOND_BYTES);
    }
    memcpy(row, &core, offsetof(Core, commit));
    store_last(row + offsetof(Core, commit), offset);
    return 1;
}

/* Count a record for which there is no room: 1; where there is a spare segment: 0; an error: -1.
   Here and not in Python: what is dropped must cost no more than what is kept. */
static int
count_drop(PyObject *source, PyObject *spares)
{
    Py_ssize_t num_spares = PyObject_Size(spares);
    if (num_spares) {
        return num_spares < 0 ? -1 : 0;
    }
    PyObject *drops = PyObject_GetAttr(source, s_drops);
    if (drops == NULL) {
        return -1;
    }
    int status = 1;
    if (Py_IS_TYPE(drops, &DropCountType)) {
        count_one((DropCount *)drops);
    } else {
        PyErr_SetString(PyExc_TypeError, "drops are no DropCount");
        status = -1;
    }
    Py_DECREF(drops);
    return status;
}

/* `count_drop` for a lane. */
static int
count_drop_of(LaneState *lane)
{
    PyObject *source = PyObject_GetAttr((PyObject *)lane, s_source);
    PyObject *spares = source == NULL ? NULL : PyObject_GetAttr(source, s_spares);
    int status = spares == NULL ? -1 : count_drop(source, spares);
    Py_XDECREF(source);
    Py_XDECREF(spares);
    return status;
}

/* Write a record, in the next segment where this one is full; or count it as lost: 0 or -1. */
static int
put_record(LaneState *lane, uint64_t head, const char *place, int64_t start_ns, int64_t end_ns,
           long depth, int64_t launch_ns, const void *second)
{
    if (depth < 0) { /* the lane is another thread's by now, who began anew */
        lane->depth = depth = 0;
    }
    int status = write_record(lane, head, place, start_ns, end_ns, depth, launch_ns, second);
    if (status == 0) {
        status = count_drop_of(lane);
    }
    if (status == 0) {
        PyObject *done = PyObject_CallMethod((PyObject *)lane, "write_in_next", "KLLy#Lly#", head,
                                             start_ns, end_ns - start_ns, place, PLACE_BYTES,
                                             launch_ns, depth, second, (Py_ssize_t)SECOND_BYTES);
        status = done == NULL ? -1 : 0;
        Py_XDECREF(done);
    }
    return status < 0 ? -1 : 0;
}

/* Whether a record is one of a span that is not wanted: 1, 0, or -1. */
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

/* `put_record`, but for a span that is not wanted: 0 or -1. */
static int
append_record(LaneState *lane, uint64_t head, const char *place, int64_t start_ns, int64_t end_ns,
              long depth, int64_t launch_ns, const void *second)
{
    int left_out = place == NULL ? -1 : is_left_out(lane, head, place);
    if (left_out) {
        return left_out < 0 ? -1 : 0;
    }
    return put_record(lane, head, place, start_ns, end_ns, depth, launch_ns, second);
}

typedef int (*WayToWrite)(LaneState *, uint64_t, const char *, int64_t, int64_t, long, int64_t,
                          const void *);

/* Write by the arguments of `tracer.native.lane_state.LaneState.write`. */
static PyObject *
write_by(WayToWrite way, LaneState *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 6 && num_args != 7) {
        PyErr_SetString(PyExc_TypeError, "a record is of head, start, duration, place, launch,"
                                         " depth and maybe a second half");
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
        PyErr_SetString(PyExc_OverflowError, "a span ends past the end of time");
        return NULL;
    }
    if (second != NULL && (!PyBytes_Check(second) || PyBytes_GET_SIZE(second) != SECOND_BYTES)) {
        PyErr_SetString(PyExc_TypeError, "the second half of a record is not 64 bytes");
        return NULL;
    }
    const char *half = second == NULL ? NULL : PyBytes_AS_STRING(second);
    if (way(self, head, read_place(args[3]), start_ns, end_ns, depth, launch_ns, half) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
lane_write(LaneState *self, PyObject *const *args, Py_ssize_t num_args)
{
    return write_by(put_record, self, args, num_args);
}

static PyObject *
lane_append(LaneState *self, PyObject *const *args, Py_ssize_t num_args)
{
    return write_by(append_record, self, args, num_args);
}

/* -- OpenEntry: a line of the open table --------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *segment; /* in whose table it stands; NULL once it stands there no more */
    PyObject *slot;    /* where there, in bytes */
    int64_t at;        /* the same */
} OpenEntry;

/* Take it off: 0 or -1. */
static int
close_entry(OpenEntry *self)
{
    PyObject *segment = self->segment, *done = NULL;
    if (segment == NULL) {
        return 0;
    }
    self->segment = NULL;
    Py_buffer buffer;
    if (open_buffer(segment, self->at, sizeof(OpenLine), &buffer) == 0) {
        store_last((char *)buffer.buf + self->at, 0);
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
    {"close", (PyCFunction)entry_close, METH_NOARGS, "Free the line, once."},
    {NULL},
};

static PyTypeObject OpenEntryType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "rankscope.tracer.native._hot.OpenEntry",
    .tp_doc = "A line of the open table: something that has begun and not ended.",
    .tp_basicsize = sizeof(OpenEntry),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)entry_dealloc,
    .tp_methods = entry_methods,
};

/* Take a line of the segment's table: where it begins; NULL without an error where none is free. */
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

/* Write the line of a begun span into the table of the lane's segment. */
static void
write_line(LaneState *lane, int64_t at, int64_t start_ns, uint64_t head, uint64_t group_id,
           int64_t seq)
{
    OpenLine line = {.start_ns = start_ns,
                     .group_id = group_id,
                     .seq = seq,
                     .name_id = (uint32_t)(head >> 32),
                     .step = lane->at.step,
                     .kind = (uint8_t)(head >> 8)};
    char *to = (char *)lane->buffer.buf + at;
    memcpy(to, &line, offsetof(OpenLine, check));
    store_last(to + offsetof(OpenLine, check), start_ns);
}

/* Show a begun span: its line; None where the table is full; NULL is an error. */
static PyObject *
open_entry(LaneState *lane, int64_t start_ns, uint64_t head, uint64_t group_id, int64_t seq)
{
    if (lane->segment == NULL) { /* the collector has cleared it */
        Py_RETURN_NONE;
    }
    PyObject *slot = take_slot(lane->segment);
    if (slot == NULL) { /* the table is full, or the lane has no segment yet */
        return PyErr_Occurred() ? NULL
                                : PyObject_CallMethod((PyObject *)lane, "open_in_first", "LK(KL)",
                                                      start_ns, head, group_id, seq);
    }
    int64_t at = PyLong_AsLongLong(slot);
    OpenEntry *entry = NULL;
    if (!PyErr_Occurred() && check_offset(&lane->buffer, at, sizeof(OpenLine)) == 0) {
        entry = PyObject_New(OpenEntry, &OpenEntryType);
    }
    if (entry == NULL) {
        Py_DECREF(slot);
        return NULL;
    }
    entry->segment = Py_NewRef(lane->segment);
    entry->slot = slot;
    entry->at = at;
    write_line(lane, at, start_ns, head, group_id, seq);
    return (PyObject *)entry;
}

static PyObject *
lane_open(LaneState *self, PyObject *const *args, Py_ssize_t num_args)
{
    uint64_t group_id = 0;
    int64_t seq = NONE;
    if (num_args != 2 && num_args != 3) {
        PyErr_SetString(PyExc_TypeError, "open takes start, head and maybe group and seq");
        return NULL;
    }
    int64_t start_ns = PyLong_AsLongLong(args[0]);
    uint64_t head = PyLong_AsUnsignedLongLong(args[1]);
    if (num_args == 3) {
        if (!PyTuple_Check(args[2]) || PyTuple_GET_SIZE(args[2]) != 2) {
            PyErr_SetString(PyExc_TypeError, "a communication is a group and a number");
            return NULL;
        }
        group_id = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(args[2], 0));
        seq = PyLong_AsLongLong(PyTuple_GET_ITEM(args[2], 1));
    }
    return PyErr_Occurred() ? NULL : open_entry(self, start_ns, head, group_id, seq);
}

/* -- what a lane does ---------------------------------------------------------------------- */

static PyMemberDef lane_members[] = {
    {"depth", T_LONG, offsetof(LaneState, depth), 0, NULL},
    {"place", T_OBJECT_EX, offsetof(LaneState, place), READONLY, NULL},
    {"step", T_INT, offsetof(LaneState, at.step), READONLY, NULL},
    {"microbatch", T_INT, offsetof(LaneState, at.microbatch), READONLY, NULL},
    {"chunk", T_INT, offsetof(LaneState, at.chunk), READONLY, NULL},
    {"track_id", T_UINT, offsetof(LaneState, at.track_id), 0, NULL},
    {NULL},
};

/* Set what spans that say nothing else belong to: 0 or -1. */
static int
put_at(LaneState *self, int32_t step, int32_t microbatch, int32_t chunk)
{
    Place at = {step, microbatch, chunk, self->at.track_id};
    PyObject *place = PyBytes_FromStringAndSize((char *)&at, sizeof(at));
    if (place == NULL) {
        return -1;
    }
    self->at = at;
    Py_XSETREF(self->place, place);
    return 0;
}

/* Read a number of four bytes: 0 or -1. */
static int
read_number(PyObject *number, int32_t *into)
{
    long value = PyLong_AsLong(number);
    if (value == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (value < INT32_MIN || value > INT32_MAX) {
        PyErr_Format(PyExc_OverflowError, "%ld does not fit into four bytes", value);
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
        PyErr_SetString(PyExc_TypeError, "a place is a step, a micro-batch and a chunk");
        return NULL;
    }
    if (read_number(args[0], &step) < 0 || read_number(args[1], &microbatch) < 0 ||
        read_number(args[2], &chunk) < 0 || put_at(self, step, microbatch, chunk) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef lane_methods[] = {
    {"set_place", (PyCFunction)(void (*)(void))lane_set_place, METH_FASTCALL,
     "Set what spans that say nothing else belong to."},
    {"append", (PyCFunction)(void (*)(void))lane_append, METH_FASTCALL,
     "Write one record, unless it is of a span that is not wanted."},
    {"write", (PyCFunction)(void (*)(void))lane_write, METH_FASTCALL, "Write one record."},
    {"open", (PyCFunction)(void (*)(void))lane_open, METH_FASTCALL,
     "Show a begun span to whoever looks at the process from outside."},
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
    PyObject *bytes = rows == NULL ? NULL : PyObject_GetAttr(segment, s_buffer);
    Py_buffer buffer, former = self->buffer;
    if (bytes == NULL || PyObject_GetBuffer(bytes, &buffer, PyBUF_WRITABLE) < 0) {
        Py_XDECREF(rows);
        Py_XDECREF(bytes);
        return -1;
    }
    Py_DECREF(bytes);
    self->buffer = buffer;
    Py_CLEAR(self->kept); /* which the former segment takes with it */
    Py_XSETREF(self->rows, rows);
    Py_XSETREF(self->segment, Py_NewRef(segment));
    PyBuffer_Release(&former);
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
    Py_VISIT(self->buffer.obj);
    return 0;
}

static int
lane_clear(LaneState *self)
{
    Py_CLEAR(self->place);
    Py_CLEAR(self->segment);
    Py_CLEAR(self->rows);
    Py_CLEAR(self->kept);
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

static PyTypeObject LaneStateType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "rankscope.tracer.native._hot.LaneState",
    .tp_doc = "What a lane and its spans share.",
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

/* -- ReadySpan ---------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    vectorcallfunc enter; /* calling the span itself enters it: one object less to touch */
    PyObject *leave;      /* its method, bound once */
    LaneState *lane;
    PyObject *place;
    uint64_t head;
    int64_t start_ns;
    int in_use;
    PyObject *source;
    PyObject *spares; /* of the source, for good */
} ReadySpan;

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
            status = count_drop(self->source, self->spares);
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
    self->source = PyObject_GetAttr(lane, s_source);
    self->spares = self->source == NULL ? NULL : PyObject_GetAttr(self->source, s_spares);
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
    Py_VISIT(self->source);
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
    Py_XDECREF(self->source);
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

static PyTypeObject ReadySpanType = {
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
        status = PyObject_SetAttr(self->inside, s_yes, Py_True);
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
    int status = PyObject_SetAttr(self->inside, s_yes, Py_False);
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
    int status = PyObject_SetAttr(self->inside, s_yes, Py_False);
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

/* -- HostLaunch: a communication, as the host's clock sees it ------------------------------ */

typedef struct {
    PyObject_HEAD
    PyObject *recorder;
    PyObject *group;
    PyObject *device; /* marks on its device; None or NULL where it has none */
    PyObject *entry;  /* its line in the open table; None or NULL where it has none */
    LaneState *lane;  /* that of all communications */
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

/* Read an attribute of a number of eight bytes: 0 or -1. */
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
        PyErr_SetString(PyExc_TypeError, "a launch takes no keywords");
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
        PyErr_SetString(PyExc_OverflowError, "a track does not fit into four bytes");
        return NULL;
    }
    PyObject *lane = PyObject_GetAttr(recorder, s_comm_lane);
    if (lane == NULL || !PyObject_TypeCheck(lane, &LaneStateType)) {
        if (lane != NULL) {
            PyErr_SetString(PyExc_TypeError, "the lane of communications is none");
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
    self->place = caller->at;
    self->place.track_id = (uint32_t)track_id;
    self->thread_id = PyThread_get_thread_ident();
    self->start_ns = now_ns();
    return (PyObject *)self;
}

/* Take it off the open table: 0 or -1. */
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

/* Write its record, once: 0 or -1. */
static int
end_launch(HostLaunch *self, int64_t end_ns, unsigned int flags)
{
    if (self->is_over) {
        return 0;
    }
    self->is_over = self->has_end = 1;
    self->end_ns = end_ns;
    if (self->device != NULL && self->device != Py_None) {
        PyObject *done = PyObject_CallMethodNoArgs(self->device, s_give_back);
        if (done == NULL) {
            return -1;
        }
        Py_DECREF(done);
    }
    uint64_t head = self->head | MOVED_BY(self->flags | flags | HAS_COMM);
    if (append_record(self->lane, head, (char *)&self->place, self->start_ns, end_ns, 0,
                      self->start_ns, &self->comm) < 0) {
        return -1;
    }
    return hide_launch(self);
}

/* Write the span of a thread that was blocked on it: 0 or -1. */
static int
end_wait(HostLaunch *self, LaneState *lane, int64_t start_ns, int64_t end_ns, unsigned int flags)
{
    uint64_t head = self->wait_head | MOVED_BY(HOST_CLOCK | flags | HAS_COMM);
    return append_record(lane, head, read_place(lane->place), start_ns, end_ns, lane->depth,
                         start_ns, &self->comm);
}

static PyObject *
launch_end(HostLaunch *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 1 && num_args != 2) {
        PyErr_SetString(PyExc_TypeError, "an end is a moment and maybe flags");
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
        PyErr_SetString(PyExc_TypeError, "a wait is of a lane, its begin, its end and flags");
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
        PyErr_SetString(PyExc_TypeError, "a return is of a lane and its moment");
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
        PyObject *entry = open_entry(self->lane, self->start_ns, self->head, self->comm.group_id,
                                     self->comm.seq);
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
launch_came_from(HostLaunch *self, PyObject *args)
{
    int src_rank;
    long long seq;
    if (!PyArg_ParseTuple(args, "iL:came_from", &src_rank, &seq)) {
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

/* Its lane stays: what ends it may come after the collector. Other cycles go through these. */
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
     "Write the communication's span by the host's clock, once."},
    {"waited_on_host", (PyCFunction)(void (*)(void))launch_waited, METH_FASTCALL,
     "Note that a thread was blocked on this over the interval."},
    {"returned_on_host", (PyCFunction)(void (*)(void))launch_returned, METH_FASTCALL,
     "Note that the call has returned, which waited by itself."},
    {"show", (PyCFunction)launch_show, METH_NOARGS, "Put the communication into the open table."},
    {"hide", (PyCFunction)launch_hide, METH_NOARGS, "Take it off the open table."},
    {"claim", (PyCFunction)launch_claim, METH_NOARGS,
     "Return whether the caller is the one to write the record."},
    {"came_from", (PyCFunction)launch_came_from, METH_VARARGS,
     "Say from whom a receive from any source came, and which of that pair's it is."},
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
    {"end_ns", (getter)launch_get_end, NULL, "End, monotonic; None while nobody knows it.", NULL},
    {"place", (getter)launch_get_place, NULL, "Where it belongs.", NULL},
    {"second", (getter)launch_get_second, NULL, "Second half of its record.", NULL},
    {NULL},
};

static PyTypeObject HostLaunchType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "rankscope.tracer.native._hot.HostLaunch",
    .tp_doc = "A communication that this rank has entered, as the host's clock sees it.",
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

/* -- frames of other threads --------------------------------------------------------------- */

/* Add what runs in a frame and in those that called it, `most` in all: 0 or -1. */
static int
add_lines(PyObject *lines, PyFrameObject *frame, Py_ssize_t most)
{
    int status = 0;
    Py_INCREF(frame);
    while (frame != NULL && status == 0 && PyList_GET_SIZE(lines) < most) {
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

/* The stacks of all threads but this one. From the first frame to the last nothing is let go of
   and the collector rests: no thread moves. */
static PyObject *
frames_of_threads(PyObject *Py_UNUSED(module), PyObject *number)
{
    Py_ssize_t most = PyLong_AsSsize_t(number), at = 0;
    PyObject *current = PySys_GetObject("_current_frames"), *found = NULL, *ident, *frame;
    if (current == NULL && !PyErr_Occurred()) {
        PyErr_SetString(PyExc_RuntimeError, "sys._current_frames is gone");
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
            add_lines(lines, (PyFrameObject *)frame, most) < 0 || PyList_Append(found, pair) < 0) {
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
quick_span(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t num)
{
    if (num != 3 || !PyCallable_Check(args[0]) || !PyUnicode_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "quick_span takes a function, a span and a text");
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
find_with(PyObject *Py_UNUSED(module), PyObject *finder)
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
nothing(PyObject *Py_UNUSED(module), PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(num))
{
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"nothing", (PyCFunction)(void (*)(void))nothing, METH_FASTCALL,
     "Take any arguments and do nothing."},
    {"frames_of_threads", (PyCFunction)frames_of_threads, METH_O,
     "Return the Python stack of each thread but the calling one."},
    {"quick_span", (PyCFunction)(void (*)(void))quick_span, METH_FASTCALL,
     "Take `tracer.span` in Python; return it in compiled lines, with the help that is given."},
    {"find_with", (PyCFunction)find_with, METH_O,
     "Say whose spans are asked for from now on; None: nobody's."},
    {"compute_span", (PyCFunction)(void (*)(void))make_compute_span, METH_FASTCALL,
     "Return a span that also sets its lane's place."},
    {NULL},
};

/* -- the module --------------------------------------------------------------------------- */

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "rankscope.tracer.native._hot",
    .m_doc = "The hottest lines of the tracer.",
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
        {&s_rows, "rows"},
        {&s_buffer, "buffer"},
        {&s_source, "source"},
        {&s_spares, "spares"},
        {&s_drops, "drops"},
        {&s_swallow, "swallow"},
        {&s_leave_slowly, "leave_slowly"},
        {&s_ready, "ready"},
        {&s_open_slots, "open_slots"},
        {&s_pop, "pop"},
        {&s_append, "append"},
        {&s_sampling, "sampling"},
        {&s_active, "active"},
        {&s_comm_lane, "comm_lane"},
        {&s_group_id, "group_id"},
        {&s_track_id, "track_id"},
        {&s_give_back, "give_back"},
        {&s_yes, "yes"},
        {&s_step_number, "step_number"},
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
    static PyTypeObject *const types[] = {&NumbersType, &DropCountType, &LaneStateType,
                                          &ReadySpanType, &FinderType, &HostLaunchType};
    if (intern_names() < 0 || PyType_Ready(&DoorType) < 0 ||
        PyType_Ready(&OpenEntryType) < 0 || PyType_Ready(&ComputeSpanType) < 0) {
        return NULL;
    }
    PyObject *self = PyModule_Create(&module);
    for (size_t i = 0; self != NULL && i < sizeof(types) / sizeof(types[0]); i++) {
        if (PyModule_AddType(self, types[i]) < 0) {
            Py_CLEAR(self);
        }
    }
    if (self != NULL && (add_door("__enter__", 0) < 0 || add_door("__exit__", 1) < 0)) {
        Py_CLEAR(self);
    }
    PyType_Modified(&ReadySpanType);
    return self;
#endif
}
