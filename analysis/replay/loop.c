/* The replay loop: operations in topological order, with any durations.

   The Python counterparts in loop.py say what each function computes, and do the same. All arrays
   are contiguous; their lengths are checked here, their values (row numbers) by the caller. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>

/* -- arguments ---------------------------------------------------------------------------- */

#define MAX_ARRAYS 16

typedef struct {
    Py_buffer views[MAX_ARRAYS];
    int num;
} Arrays;

static void
release(Arrays *arrays)
{
    while (arrays->num) {
        PyBuffer_Release(&arrays->views[--arrays->num]);
    }
}

/* Borrow an array of `count` items of `size` bytes; NULL with an error if it has another length. */
static void *
borrow(Arrays *arrays, PyObject *source, Py_ssize_t count, size_t size, int is_output)
{
    Py_buffer *view = &arrays->views[arrays->num];
    int flags = PyBUF_C_CONTIGUOUS | (is_output ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(source, view, flags) < 0) {
        return NULL;
    }
    arrays->num++;
    if (view->len != count * (Py_ssize_t)size) {
        PyErr_Format(PyExc_ValueError, "an array has %zd bytes, expected %zd items of %zu bytes",
                     view->len, count, size);
        return NULL;
    }
    return view->buf ? view->buf : "";
}

/* -- order -------------------------------------------------------------------------------- */

/* Turn counts per key, at counts[key + 1], into the index of each key's first entry. */
static void
counts_to_firsts(int32_t *counts, int32_t num)
{
    for (int32_t key = 0; key < num; key++) {
        counts[key + 1] += counts[key];
    }
}

/* Entries in the order of their keys. `first` has one entry more than there are keys. */
static void
group_by(int32_t *found, int32_t *first, const int32_t *key, int32_t num_keys, int32_t num)
{
    for (int32_t k = 0; k < num; k++) {
        if (key[k] >= 0) {
            first[key[k] + 1]++;
        }
    }
    counts_to_firsts(first, num_keys);
    for (int32_t k = 0; k < num; k++) {
        if (key[k] >= 0) {
            found[first[key[k]]++] = k;
        }
    }
    for (int32_t k = num_keys; k > 0; k--) {  /* each first has moved to the next one's place */
        first[k] = first[k - 1];
    }
    first[0] = 0;
}

typedef struct {
    int32_t num_rows, num_edges, num_groups;
    const int32_t *src, *dst, *group;
    int32_t *order, *first, *pred;
    uint8_t *last;
} Order;

/* The number of rows in order; -1 without memory. */
static int32_t
sort_rows(Order *g)
{
    int32_t n = g->num_rows, num_done = 0;
    size_t rows = (size_t)n + 1, edges = (size_t)g->num_edges + 1, groups = (size_t)g->num_groups + 1;
    int32_t *memory = PyMem_RawCalloc(5 * rows + edges + 2 * groups, sizeof(int32_t));
    if (memory == NULL) {
        return -1;
    }
    int32_t *first_out = memory, *members = first_out + rows, *missing = members + rows;
    int32_t *queue = missing + rows, *position = queue + rows, *out = position + rows;
    int32_t *first_member = out + edges, *group_missing = first_member + groups;

    group_by(out, first_out, g->src, n, g->num_edges);
    group_by(members, first_member, g->group, g->num_groups, n);
    for (int32_t e = 0; e < g->num_edges; e++) {
        int32_t row = g->dst[e];
        missing[row]++;
        if (g->group[row] >= 0) {
            group_missing[g->group[row]]++;
        }
    }
    for (int32_t root = 0; root < n; root++) {
        /* A root and all that it makes ready come before the next root, so that the rows of a
           step, and of a rank within it, stay together. The queue has one row of each item. */
        int32_t own = g->group[root], head = 0, tail = 0;
        if (own < 0 ? missing[root] : group_missing[own] || members[first_member[own]] != root) {
            continue;
        }
        queue[tail++] = root;
        missing[root] = group_missing[own < 0 ? g->num_groups : own] = -1;
        while (head < tail) {
            int32_t item = queue[head++], k = g->group[item];
            int32_t begin = k < 0 ? 0 : first_member[k], end = k < 0 ? 1 : first_member[k + 1];
            for (int32_t m = begin; m < end; m++) {
                int32_t row = k < 0 ? item : members[m];
                position[row] = num_done;
                g->last[num_done] = m + 1 == end;
                g->order[num_done++] = row;
            }
            for (int32_t m = begin; m < end; m++) {
                int32_t row = k < 0 ? item : members[m];
                for (int32_t o = first_out[row]; o < first_out[row + 1]; o++) {
                    int32_t next = g->dst[out[o]], to = g->group[next];
                    int32_t *left = to < 0 ? &missing[next] : &group_missing[to];
                    if (--*left == 0) {
                        *left = -1;
                        queue[tail++] = next;
                    }
                }
            }
        }
    }
    for (int32_t e = 0; num_done == n && e < g->num_edges; e++) {
        g->first[position[g->dst[e]] + 1]++;
    }
    if (num_done == n) {
        counts_to_firsts(g->first, n);
        for (int32_t e = 0; e < g->num_edges; e++) {
            g->pred[g->first[position[g->dst[e]]]++] = position[g->src[e]];
        }
        for (int32_t k = n; k > 0; k--) {
            g->first[k] = g->first[k - 1];
        }
        g->first[0] = 0;
    }
    PyMem_RawFree(memory);
    return num_done;
}

static PyObject *
sort(PyObject *Py_UNUSED(self), PyObject *args)
{
    Order g;
    Arrays a = {.num = 0};
    PyObject *graph, *src, *dst, *group, *order, *last, *first, *pred, *result = NULL;
    if (!PyArg_ParseTuple(args, "O!iOOO", &PyTuple_Type, &graph, &g.num_groups, &src, &dst, &group)
        || !PyArg_ParseTuple(graph, "iiOOOO", &g.num_rows, &g.num_edges, &order, &last, &first,
                             &pred)) {
        return NULL;
    }
    if ((g.src = borrow(&a, src, g.num_edges, 4, 0)) && (g.dst = borrow(&a, dst, g.num_edges, 4, 0))
        && (g.group = borrow(&a, group, g.num_rows, 4, 0))
        && (g.order = borrow(&a, order, g.num_rows, 4, 1))
        && (g.last = borrow(&a, last, g.num_rows, 1, 1))
        && (g.first = borrow(&a, first, (Py_ssize_t)g.num_rows + 1, 4, 1))
        && (g.pred = borrow(&a, pred, g.num_edges, 4, 1))) {
        int32_t num_done;
        Py_BEGIN_ALLOW_THREADS
        num_done = sort_rows(&g);
        Py_END_ALLOW_THREADS
        result = num_done < 0 ? PyErr_NoMemory() : PyLong_FromLong(num_done);
    }
    release(&a);
    return result;
}

/* -- replay ------------------------------------------------------------------------------- */

typedef struct {
    int32_t num_rows, num_edges;
    const int32_t *order, *first, *pred;
    const uint8_t *last;
} Graph;

static int
borrow_graph(Arrays *a, Graph *g, PyObject *graph)
{
    PyObject *order, *last, *first, *pred;
    return PyArg_ParseTuple(graph, "iiOOOO", &g->num_rows, &g->num_edges, &order, &last, &first,
                            &pred)
        && (g->order = borrow(a, order, g->num_rows, 4, 0))
        && (g->last = borrow(a, last, g->num_rows, 1, 0))
        && (g->first = borrow(a, first, (Py_ssize_t)g->num_rows + 1, 4, 0))
        && (g->pred = borrow(a, pred, g->num_edges, 4, 0));
}

static int
has_positions(const Graph *g, int32_t low, int32_t high)
{
    if (low < 0 || low > high || high > g->num_rows) {
        PyErr_SetString(PyExc_ValueError, "the positions are not in the graph");
        return 0;
    }
    return 1;
}

static inline double
latest(const Graph *g, int32_t position, const double *ends)
{
    int32_t p = g->first[position], stop = g->first[position + 1];
    double found = p < stop ? ends[g->pred[p++]] : 0.0;
    for (; p < stop; p++) {
        double end = ends[g->pred[p]];
        found = end > found ? end : found;
    }
    return found;
}

static PyObject *
replay(PyObject *Py_UNUSED(self), PyObject *args)
{
    Graph g;
    Arrays a = {.num = 0};
    PyObject *graph, *duration_, *gap_, *arrivals_, *ends_, *result = NULL;
    int32_t low, high;
    if (!PyArg_ParseTuple(args, "O!iiOOOO", &PyTuple_Type, &graph, &low, &high, &duration_, &gap_,
                          &arrivals_, &ends_)) {
        return NULL;
    }
    const double *duration, *gap = NULL;
    double *ends, *arrivals = NULL;
    if (borrow_graph(&a, &g, graph) && has_positions(&g, low, high)
        && (duration = borrow(&a, duration_, g.num_rows, 8, 0))
        && (gap_ == Py_None || (gap = borrow(&a, gap_, g.num_rows, 8, 0)))
        && (arrivals_ == Py_None || (arrivals = borrow(&a, arrivals_, high - low, 8, 1)))
        && (ends = borrow(&a, ends_, high - low, 8, 1))) {
        Py_BEGIN_ALLOW_THREADS
        ends -= low;  /* by position */
        for (int32_t at = low; at < high;) {
            double gate = -INFINITY;
            int32_t stop = at;
            do {
                double arrival = latest(&g, stop, ends);
                arrival += gap == NULL ? 0.0 : gap[g.order[stop]];
                if (arrivals != NULL) {
                    arrivals[stop - low] = arrival;
                }
                gate = arrival > gate ? arrival : gate;
            } while (!g.last[stop++]);
            for (; at < stop; at++) {
                ends[at] = gate + duration[g.order[at]];
            }
        }
        Py_END_ALLOW_THREADS
        result = Py_NewRef(Py_None);
    }
    release(&a);
    return result;
}

static PyObject *
replay_alone(PyObject *Py_UNUSED(self), PyObject *args)
{
    Graph g;
    Arrays a = {.num = 0};
    PyObject *graph, *recorded_, *ideal_, *replica_, *own_, *others_, *result = NULL;
    int32_t low, high, num_replicas;
    if (!PyArg_ParseTuple(args, "O!iiOOOiOO", &PyTuple_Type, &graph, &low, &high, &recorded_,
                          &ideal_, &replica_, &num_replicas, &own_, &others_)) {
        return NULL;
    }
    const double *recorded, *ideal;
    const int32_t *replica;
    double *own, *others;
    if (borrow_graph(&a, &g, graph) && has_positions(&g, low, high)
        && (recorded = borrow(&a, recorded_, g.num_rows, 8, 0))
        && (ideal = borrow(&a, ideal_, g.num_rows, 8, 0))
        && (replica = borrow(&a, replica_, g.num_rows, 4, 0))
        && (own = borrow(&a, own_, high - low, 8, 1))
        && (others = borrow(&a, others_, high - low, 8, 1))) {
        double *gates = PyMem_RawMalloc(((size_t)num_replicas + 1) * sizeof(double));
        if (gates == NULL) {
            (void)PyErr_NoMemory();
        } else {
            Py_BEGIN_ALLOW_THREADS
            own -= low, others -= low;  /* by position */
            for (int32_t at = low; at < high;) {
                double gate = -INFINITY, others_gate = -INFINITY;
                int32_t stop = at, is_shared = 0;
                do {
                    own[stop] = latest(&g, stop, own);
                    others[stop] = latest(&g, stop, others);
                    gate = own[stop] > gate ? own[stop] : gate;
                    others_gate = others[stop] > others_gate ? others[stop] : others_gate;
                    is_shared |= replica[g.order[stop]] != replica[g.order[at]];
                } while (!g.last[stop++]);
                for (int32_t k = at; is_shared && k < stop; k++) {
                    gates[replica[g.order[k]]] = -INFINITY;
                }
                for (int32_t k = at; is_shared && k < stop; k++) {
                    double *found = &gates[replica[g.order[k]]];
                    double arrival = own[k] > others[k] ? own[k] : others[k];
                    *found = arrival > *found ? arrival : *found;
                }
                for (; at < stop; at++) {
                    int32_t row = g.order[at];
                    own[at] = (is_shared ? gates[replica[row]] : gate) + recorded[row];
                    others[at] = (is_shared ? gates[replica[row]] : others_gate) + ideal[row];
                }
            }
            Py_END_ALLOW_THREADS
            result = Py_NewRef(Py_None);
        }
        PyMem_RawFree(gates);
    }
    release(&a);
    return result;
}

/* -- variants ----------------------------------------------------------------------------- */

#define MAX_WIDTH 32  /* variants replayed together: the bits of a mask */

typedef struct {
    Graph graph;
    int32_t low, high, width, num_changes;
    const double *duration, *gap, *new_duration, *new_gap;
    const double *ends;          /* of position p, at p - low */
    const int32_t *first_change; /* of row r, at r - low: a step's rows are its positions */
    const int32_t *variant;
    const uint8_t *closes;
    double *lanes;      /* of position p, at (p - low) * width; only of the variants that differ */
    uint32_t *differs;  /* of position p, at p - low: the variants that end at another time */
    double *latest;
} Variants;

/* Replay an item in one variant; set its bit at the positions that end at another time. */
static void
replay_item(const Variants *v, int32_t at, int32_t stop, int w)
{
    const Graph *g = &v->graph;
    double gate = -INFINITY;
    for (int32_t k = at; k < stop; k++) {
        int32_t row = g->order[k];
        double arrival = g->first[k] < g->first[k + 1] ? -INFINITY : 0.0;
        for (int32_t e = g->first[k]; e < g->first[k + 1]; e++) {
            Py_ssize_t pred = g->pred[e] - v->low;
            double end = v->differs[pred] >> w & 1 ? v->lanes[pred * v->width + w]
                                                   : v->ends[pred];
            arrival = end > arrival ? end : arrival;
        }
        double gap = v->gap == NULL ? 0.0 : v->gap[row];
        for (int32_t c = v->first_change[row - v->low]; c < v->first_change[row - v->low + 1]; c++) {
            gap = v->new_gap != NULL && v->variant[c] == w ? v->new_gap[c] : gap;
        }
        arrival += gap;
        gate = arrival > gate ? arrival : gate;
    }
    for (int32_t k = at; k < stop; k++) {
        int32_t row = g->order[k];
        double duration = v->duration[row];
        for (int32_t c = v->first_change[row - v->low]; c < v->first_change[row - v->low + 1]; c++) {
            duration = v->variant[c] == w ? v->new_duration[c] : duration;
        }
        double end = gate + duration;
        if (end != v->ends[k - v->low]) {
            v->lanes[(Py_ssize_t)(k - v->low) * v->width + w] = end;
            v->differs[k - v->low] |= (uint32_t)1 << w;
        }
    }
}

static void
replay_all_variants(const Variants *v)
{
    const int32_t width = v->width;
    const Graph *g = &v->graph;
    for (int w = 0; w < width; w++) {
        v->latest[w] = 0.0;
    }
    for (int32_t at = v->low; at < v->high;) {
        int32_t stop = at;
        uint32_t differs = 0;
        do {
            int32_t row = g->order[stop];
            for (int32_t c = v->first_change[row - v->low]; c < v->first_change[row - v->low + 1]; c++) {
                differs |= (uint32_t)1 << v->variant[c];
            }
            for (int32_t e = g->first[stop]; e < g->first[stop + 1]; e++) {
                differs |= v->differs[g->pred[e] - v->low];
            }
        } while (!g->last[stop++]);
        for (int w = 0; differs >> w && w < width; w++) {
            if (differs >> w & 1) {
                replay_item(v, at, stop, w);
            }
        }
        for (; at < stop; at++) {
            if (!v->closes[g->order[at]]) {
                continue;
            }
            for (int w = 0; w < width; w++) {
                double end = v->differs[at - v->low] >> w & 1
                    ? v->lanes[(Py_ssize_t)(at - v->low) * width + w] : v->ends[at - v->low];
                v->latest[w] = end > v->latest[w] ? end : v->latest[w];
            }
        }
    }
}

static PyObject *
replay_variants(PyObject *Py_UNUSED(self), PyObject *args)
{
    Variants v;
    Arrays a = {.num = 0};
    PyObject *graph, *duration, *gap, *ends, *closes, *first, *variant, *new_duration, *new_gap;
    PyObject *latest, *result = NULL;
    if (!PyArg_ParseTuple(args, "O!iiOOOOOiOOOiO", &PyTuple_Type, &graph, &v.low, &v.high, &duration,
                          &gap, &ends, &closes, &first, &v.num_changes, &variant, &new_duration,
                          &new_gap, &v.width, &latest)) {
        return NULL;
    }
    v.gap = v.new_gap = NULL;
    if (borrow_graph(&a, &v.graph, graph) && has_positions(&v.graph, v.low, v.high)
        && (v.duration = borrow(&a, duration, v.graph.num_rows, 8, 0))
        && (gap == Py_None || (v.gap = borrow(&a, gap, v.graph.num_rows, 8, 0)))
        && (v.ends = borrow(&a, ends, v.high - v.low, 8, 0))
        && (v.closes = borrow(&a, closes, v.graph.num_rows, 1, 0))
        && (v.first_change = borrow(&a, first, (Py_ssize_t)(v.high - v.low) + 1, 4, 0))
        && (v.variant = borrow(&a, variant, v.num_changes, 4, 0))
        && (v.new_duration = borrow(&a, new_duration, v.num_changes, 8, 0))
        && (new_gap == Py_None || (v.new_gap = borrow(&a, new_gap, v.num_changes, 8, 0)))
        && (v.latest = borrow(&a, latest, v.width, 8, 1))) {
        if (v.width > MAX_WIDTH) {
            PyErr_SetString(PyExc_ValueError, "too many variants");
        } else {
            size_t num = (size_t)(v.high - v.low) + 1;
            v.lanes = PyMem_RawMalloc(num * v.width * sizeof(double));
            v.differs = PyMem_RawCalloc(num, sizeof(uint32_t));
            if (v.lanes != NULL && v.differs != NULL) {
                Py_BEGIN_ALLOW_THREADS
                replay_all_variants(&v);
                Py_END_ALLOW_THREADS
                result = Py_NewRef(Py_None);
            } else {
                (void)PyErr_NoMemory();
            }
            PyMem_RawFree(v.lanes);
            PyMem_RawFree(v.differs);
        }
    }
    release(&a);
    return result;
}

/* -- parts put back ----------------------------------------------------------------------- */

#define LANES 8  /* scenarios replayed together: their ends fill a cache line */

typedef struct {
    Graph graph;
    int32_t low, high;
    const double *recorded, *ideal;
    const uint32_t *parts;
    const uint8_t *closes;
    double *lanes;  /* of position p, at (p - low) * LANES */
} Parts;

/* Compiled for each width of vectors: the widest takes a fifth less time. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) \
    && __GNUC__ >= 12
__attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif
static void
replay_lanes(const Parts *v, int shift, double *latest_end)
{
    const Graph *g = &v->graph;
    for (int w = 0; w < LANES; w++) {
        latest_end[w] = 0.0;
    }
    for (int32_t at = v->low; at < v->high;) {
        double gate[LANES];
        int32_t stop = at;
        for (int w = 0; w < LANES; w++) {
            gate[w] = -INFINITY;
        }
        do {
            double arrival[LANES];
            int32_t p = g->first[stop], end = g->first[stop + 1];
            for (int w = 0; w < LANES; w++) {
                arrival[w] = p < end ? -INFINITY : 0.0;
            }
            for (; p < end; p++) {
                const double *ends = v->lanes + (Py_ssize_t)(g->pred[p] - v->low) * LANES;
                for (int w = 0; w < LANES; w++) {
                    arrival[w] = ends[w] > arrival[w] ? ends[w] : arrival[w];
                }
            }
            for (int w = 0; w < LANES; w++) {
                gate[w] = arrival[w] > gate[w] ? arrival[w] : gate[w];
            }
        } while (!g->last[stop++]);
        for (; at < stop; at++) {
            int32_t row = g->order[at];
            double *ends = v->lanes + (Py_ssize_t)(at - v->low) * LANES;
            const double ideal = v->ideal[row], recorded = v->recorded[row];
            const uint32_t parts = v->parts[row] >> shift;
            for (int w = 0; w < LANES; w++) {
                ends[w] = gate[w] + (parts & (uint32_t)1 << w ? recorded : ideal);
            }
            for (int w = 0; v->closes[row] && w < LANES; w++) {
                latest_end[w] = ends[w] > latest_end[w] ? ends[w] : latest_end[w];
            }
        }
    }
}

static PyObject *
replay_parts(PyObject *Py_UNUSED(self), PyObject *args)
{
    Parts v;
    Arrays a = {.num = 0};
    PyObject *graph, *recorded, *ideal, *parts, *closes, *latest_, *result = NULL;
    int32_t width;
    double *latest_ends;
    if (!PyArg_ParseTuple(args, "O!iiOOOOiO", &PyTuple_Type, &graph, &v.low, &v.high, &recorded,
                          &ideal, &parts, &closes, &width, &latest_)) {
        return NULL;
    }
    if (borrow_graph(&a, &v.graph, graph) && has_positions(&v.graph, v.low, v.high)
        && (v.recorded = borrow(&a, recorded, v.graph.num_rows, 8, 0))
        && (v.ideal = borrow(&a, ideal, v.graph.num_rows, 8, 0))
        && (v.parts = borrow(&a, parts, v.graph.num_rows, 4, 0))
        && (v.closes = borrow(&a, closes, v.graph.num_rows, 1, 0))
        && (latest_ends = borrow(&a, latest_, width, 8, 1))) {
        if (width > MAX_WIDTH) {
            PyErr_SetString(PyExc_ValueError, "too many scenarios");
        } else if ((v.lanes = PyMem_RawMalloc(((size_t)(v.high - v.low) + 1) * LANES
                                              * sizeof(double))) == NULL) {
            (void)PyErr_NoMemory();
        } else {
            Py_BEGIN_ALLOW_THREADS
            for (int32_t begin = 0; begin < width; begin += LANES) {
                double found[LANES];
                replay_lanes(&v, begin, found);
                for (int32_t w = begin; w < width && w < begin + LANES; w++) {
                    latest_ends[w] = found[w - begin];
                }
            }
            Py_END_ALLOW_THREADS
            PyMem_RawFree(v.lanes);
            result = Py_NewRef(Py_None);
        }
    }
    release(&a);
    return result;
}

/* -- module ------------------------------------------------------------------------------- */

static PyMethodDef functions[] = {
    {"sort", sort, METH_VARARGS, "See loop.sort."},
    {"replay", replay, METH_VARARGS, "See loop.replay."},
    {"replay_alone", replay_alone, METH_VARARGS, "See loop.replay_alone."},
    {"replay_parts", replay_parts, METH_VARARGS, "See loop.replay_parts."},
    {"replay_variants", replay_variants, METH_VARARGS, "See loop.replay_variants."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_loop", "The compiled replay loop; see loop.", 0, functions,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC
PyInit__loop(void)
{
    return PyModule_Create(&definition);
}
