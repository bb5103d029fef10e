/* What the files of the compiled part share: the layout of records, the structures of a lane and a
   ready span, and the few functions that every span runs, inline. */

#ifndef RANKSCOPE_HOT_H
#define RANKSCOPE_HOT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <structmember.h>
#include <time.h>

/* Names that the files share stay inside the library: calls between them go through no table. */
#pragma GCC visibility push(hidden)

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

/* `tracer.span.SpanFlag`. */
#define ASYNC 1U
#define HOST_CLOCK 16U
#define END_BOUND 128U

#define MOVED_BY(flags) ((uint64_t)(flags) << 16) /* to where a head has them */

/* -- module.c ----------------------------------------------------------------------------- */

typedef struct {
    PyObject **at;
    const char *name;
} InternedName;

/* Make the names of attributes that a file looks up: 0 or -1. */
int intern_names(const InternedName *names, size_t num_names);

/* Add what a file holds to the module: 0 or -1. */
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
    Py_buffer buffer; /* in which the count stands at the offset */
} DropCount;

extern PyTypeObject NumbersType, DropCountType;

static inline int64_t
now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Whether a buffer has room for `size` bytes at `offset`, a multiple of eight: 0 or -1. */
static inline int
check_offset(const Py_buffer *buffer, int64_t offset, Py_ssize_t size)
{
    if (offset >= 0 && offset % 8 == 0 && offset <= buffer->len - size) {
        return 0;
    }
    PyErr_Format(PyExc_IndexError, "%lld does not lie in a buffer of %zd bytes",
                 (long long)offset, buffer->len);
    return -1;
}

/* Store what a reader takes for the sign that all before it is there. */
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
count_one(DropCount *self)
{
    self->count++;
    store_last((char *)self->buffer.buf + self->offset, self->count);
}

/* -- lane.c ------------------------------------------------------------------------------- */

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

typedef struct {
    PyObject_HEAD
    PyObject *segment; /* in whose table it stands; NULL once it stands there no more */
    PyObject *slot;    /* where there, in bytes */
    int64_t at;        /* the same */
} OpenEntry;

extern PyTypeObject LaneStateType, OpenEntryType;

int count_drop(PyObject *pool, PyObject *spares);
int put_record(LaneState *lane, uint64_t head, const char *place, int64_t start_ns, int64_t end_ns,
               long depth, int64_t launch_ns, const void *second);
int append_record(LaneState *lane, uint64_t head, const char *place, int64_t start_ns,
                  int64_t end_ns, long depth, int64_t launch_ns, const void *second);
PyObject *open_entry(LaneState *lane, int64_t start_ns, uint64_t head, uint64_t group_id,
                     int64_t seq);
int close_entry(OpenEntry *self);
void write_line(LaneState *lane, int64_t at, int64_t start_ns, uint64_t head, uint64_t group_id,
                int64_t seq);
int put_at(LaneState *self, int32_t step, int32_t microbatch, int32_t chunk);
int read_number(PyObject *number, int32_t *into);

/* The bytes of a place, or NULL with an error. */
static inline const char *
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

/* -- span.c ------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    vectorcallfunc enter; /* calling the span itself enters it: one object less to touch */
    PyObject *leave;      /* its method, bound once */
    LaneState *lane;
    PyObject *place;
    uint64_t head;
    int64_t start_ns;
    int in_use;
    PyObject *pool;
    PyObject *spares; /* of the pool, for good */
} ReadySpan;

extern PyTypeObject ReadySpanType;

#pragma GCC visibility pop

#endif
