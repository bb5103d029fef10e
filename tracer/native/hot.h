/* Shared declarations of the compiled part: the layout of records, the structures of a lane and a
   ready span, and the functions that every span runs, inline.

   Layouts are those of `tracer/spool.py`; a constant that has a Python counterpart names it. */

#ifndef RANKSCOPE_HOT_H
#define RANKSCOPE_HOT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <structmember.h>
#include <time.h>

/* Symbols that the files share are hidden: a call to one needs no procedure linkage table. */
#pragma GCC visibility push(hidden)

/* `tracer.native.lane_state.PLACE`. */
typedef struct {
    int32_t step;
    int32_t microbatch;
    int32_t chunk;
    uint32_t track_id;
} Place;

/* The first bytes of `tracer.spool.CORE`, up to the commit word. */
typedef struct {
    uint64_t head;
    char place[sizeof(Place)];
    int64_t start_ns;
    int64_t end_ns;
    int64_t depth;
    int64_t commit;
} Core;

/* `tracer.spool.COMM`: the second half of the records of a communication and of its wait. */
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
#define ERROR_HEAD IN_HEAD(64)   /* `tracer.native.lane_state.ERROR_HEAD` */
#define PLACE_BYTES ((Py_ssize_t)sizeof(Place))
#define RECORD_BYTES 128         /* `tracer.spool.RECORD_BYTES` */
#define LAUNCH_OFFSET 56         /* `tracer.spool.LAUNCH_OFFSET` */
#define SECOND_OFFSET 64         /* `tracer.spool.COMM_OFFSET`; up to the end of the record */
#define SECOND_BYTES (RECORD_BYTES - SECOND_OFFSET)
#define SPAN 1                   /* `tracer.spool.RecordType.SPAN` */
#define HAS_COMM (1U << 15)      /* `tracer.spool.HAS_COMM` */

/* `tracer.span.SpanFlag`. */
#define ASYNC 1U
#define HOST_CLOCK 16U
#define END_BOUND 128U

#define IN_HEAD(flags) ((uint64_t)(flags) << 16) /* flags at their position in a head word */

/* -- module.c ----------------------------------------------------------------------------- */

/* Attribute names that the files look up, interned once: `s_active` and so on. */
#define INTERNED_NAMES(X) \
    X(active) X(append) X(buffer) X(comm_lane) X(drops) X(group_id) X(in_span) X(leave_slowly)   \
    X(open_slots) X(pool) X(pop) X(ready) X(release) X(rows) X(sampling) X(spares)               \
    X(step_number) X(swallow) X(track_id)
#define DECLARE_NAME(name) extern PyObject *s_##name;
INTERNED_NAMES(DECLARE_NAME)

/* Add the types and functions of one file to the module: 0 or -1. */
int add_numbers(PyObject *module);
int add_lane(PyObject *module);
int add_span(PyObject *module);
int add_span_by_name(PyObject *module);
int add_communication(PyObject *module);
int add_frames(PyObject *module);

/* -- numbers.c ---------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    int64_t next;
    int64_t stop;
    int64_t step;
} Numbers;

typedef struct {
    PyObject_HEAD
    int64_t count;
    int64_t offset;
    Py_buffer buffer; /* holds the count at the offset */
} DropCount;

extern PyTypeObject NumbersType, DropCountType;

static inline int64_t
now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Check that `size` bytes at `offset`, a multiple of eight, lie inside a buffer: 0 or -1. */
static inline int
check_offset(const Py_buffer *buffer, int64_t offset, Py_ssize_t size)
{
    if (offset >= 0 && offset % 8 == 0 && offset <= buffer->len - size) {
        return 0;
    }
    PyErr_Format(PyExc_IndexError,
                 "offset %lld is not a multiple of 8 inside a buffer of %zd bytes",
                 (long long)offset, buffer->len);
    return -1;
}

/* Store the word by which a reader sees that everything before it was written. */
static inline void
store_last(char *at, int64_t word)
{
    __atomic_store_n((int64_t *)at, word, __ATOMIC_RELEASE);
}

/* Take the next number of an iterator: 1; none left: 0; an error: -1. */
static inline int
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

static inline void
increment(DropCount *self)
{
    self->count++;
    store_last((char *)self->buffer.buf + self->offset, self->count);
}

/* -- lane.c ------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    long depth;
    PyObject *place; /* `fields` as bytes */
    Place fields;
    PyObject *segment;
    PyObject *rows;        /* of the segment; NULL once none is left */
    Py_buffer buffer;      /* of the segment, which cannot be unmapped while this is held */
    PyObject *spare_entry; /* an unused `OpenEntry` of the segment, or NULL */
} LaneState;

typedef struct {
    PyObject_HEAD
    PyObject *segment; /* whose table has the entry; NULL once it was freed */
    PyObject *slot;    /* offset of the entry, in bytes */
    int64_t offset;    /* the same as an integer */
} OpenEntry;

extern PyTypeObject LaneStateType, OpenEntryType;
extern const Comm NO_COMM; /* of a span that is no communication */

int count_drop(PyObject *pool, PyObject *spares);
int put_record(LaneState *lane, uint64_t head, const char *place, int64_t start_ns, int64_t end_ns,
               long depth, int64_t launch_ns, const void *second);
int append_record(LaneState *lane, uint64_t head, const char *place, int64_t start_ns,
                  int64_t end_ns, long depth, int64_t launch_ns, const void *second);
PyObject *open_entry(LaneState *lane, int64_t start_ns, uint64_t head, const Comm *comm);
int close_entry(OpenEntry *self);
void write_open_entry(LaneState *lane, int64_t offset, int64_t start_ns, uint64_t head,
                      const Comm *comm);
int set_place(LaneState *self, int32_t step, int32_t microbatch, int32_t chunk);
int read_number(PyObject *number, int32_t *into);

/* The bytes of a place, or NULL with an error. */
static inline const char *
read_place(PyObject *place)
{
    if (place != NULL && PyBytes_Check(place) && PyBytes_GET_SIZE(place) == PLACE_BYTES) {
        return PyBytes_AS_STRING(place);
    }
    PyErr_SetString(PyExc_TypeError, "a place must be 16 bytes");
    return NULL;
}

/* Write a record: 1; the segment is full: 0; an error: -1. `second` may be NULL.

   Always inline: for a span without a launch time and a second half, the compiler then removes
   the code for both. */
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

/* -- span.c ------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    vectorcallfunc enter; /* the span itself is callable and enters: one object less to touch */
    PyObject *leave;      /* the bound method, made once */
    LaneState *lane;
    PyObject *place;
    uint64_t head;
    int64_t start_ns;
    int in_use;
    PyObject *pool;
    PyObject *spares; /* of the pool, the same object for good */
} ReadySpan;

extern PyTypeObject ReadySpanType;

#pragma GCC visibility pop

#endif
