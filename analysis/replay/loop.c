/* The replay loop: operations in topological order, with any durations; and other passes over the
   operations of a run that visit each once.

   The oracle in tests/support/analysis/replay_oracle.py says what each function computes. All arrays
   are contiguous; their lengths are checked here, their values (row numbers) by the caller. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>

/* -- arguments ---------------------------------------------------------------------------- */

#define MAX_ARRAYS 32

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

/* -- variants ----------------------------------------------------------------------------- */

#define MAX_WIDTH 32  /* variants replayed together: the bits of a mask */

typedef struct {
    Graph graph;
    int32_t low, high, num_variants, num_changes;
    int32_t base;                /* the first variant of those replayed together */
    const double *duration, *gap, *new_duration, *new_gap;
    const double *ends;          /* of position p, at p - low, as are all columns by position */
    const int32_t *first_change; /* of row r, at r - low: a step's rows are its positions */
    const int32_t *variant;
    const uint8_t *closes;
    double *lanes;               /* of position p, at (p - low) * MAX_WIDTH; where one differs */
    uint32_t *differs;           /* the variants that end at another time */
    int32_t *begin;              /* the first position of the item, less low */
    int32_t *position;           /* of a row */
    int32_t *first_out, *out;    /* the items that wait for a position */
    int32_t *visited, *closing, *changed_row;
    int32_t num_closing;
    uint64_t *pending;           /* a bit for the first position of each item to visit */
} Variants;

/* Fill in what the items of the step are, and which of them wait for each position. */
static void
find_successors(Variants *v)
{
    const Graph *g = &v->graph;
    const int32_t low = v->low, num = v->high - v->low;
    for (int32_t k = 0; k < num; k++) {
        v->begin[k] = k == 0 || g->last[low + k - 1] ? k : v->begin[k - 1];
        v->position[g->order[low + k] - low] = k;
        for (int32_t e = g->first[low + k]; e < g->first[low + k + 1]; e++) {
            v->first_out[g->pred[e] - low + 1]++;
        }
    }
    counts_to_firsts(v->first_out, num);
    for (int32_t k = 0; k < num; k++) {
        for (int32_t c = v->first_change[k]; c < v->first_change[k + 1]; c++) {
            v->changed_row[c] = k;
        }
        if (v->closes[g->order[low + k]]) {
            v->closing[v->num_closing++] = k;
        }
        for (int32_t e = g->first[low + k]; e < g->first[low + k + 1]; e++) {
            v->out[v->first_out[g->pred[e] - low]++] = v->begin[k];
        }
    }
    for (int32_t k = num; k > 0; k--) {
        v->first_out[k] = v->first_out[k - 1];
    }
    v->first_out[0] = 0;
}

static inline void
visit_later(const Variants *v, int32_t item)
{
    v->pending[item >> 6] |= (uint64_t)1 << (item & 63);
}

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
            double end = v->differs[pred] >> w & 1 ? v->lanes[pred * MAX_WIDTH + w] : v->ends[pred];
            arrival = end > arrival ? end : arrival;
        }
        double gap = v->gap == NULL ? 0.0 : v->gap[row];
        for (int32_t c = v->first_change[row - v->low]; c < v->first_change[row - v->low + 1]; c++) {
            gap = v->new_gap != NULL && v->variant[c] == v->base + w ? v->new_gap[c] : gap;
        }
        arrival += gap;
        gate = arrival > gate ? arrival : gate;
    }
    for (int32_t k = at; k < stop; k++) {
        int32_t row = g->order[k];
        double duration = v->duration[row];
        for (int32_t c = v->first_change[row - v->low]; c < v->first_change[row - v->low + 1]; c++) {
            duration = v->variant[c] == v->base + w ? v->new_duration[c] : duration;
        }
        double end = gate + duration;
        if (end != v->ends[k - v->low]) {
            v->lanes[(Py_ssize_t)(k - v->low) * MAX_WIDTH + w] = end;
            v->differs[k - v->low] |= (uint32_t)1 << w;
        }
    }
}

/* Replay an item in all variants in which it may differ; return the position after it. */
static int32_t
replay_variants_of(const Variants *v, int32_t at)
{
    const Graph *g = &v->graph;
    int32_t stop = at;
    uint32_t differs = 0;
    do {
        int32_t row = g->order[stop];
        for (int32_t c = v->first_change[row - v->low]; c < v->first_change[row - v->low + 1]; c++) {
            int32_t w = v->variant[c] - v->base;
            differs |= w >= 0 && w < MAX_WIDTH ? (uint32_t)1 << w : 0;
        }
        for (int32_t e = g->first[stop]; e < g->first[stop + 1]; e++) {
            differs |= v->differs[g->pred[e] - v->low];
        }
    } while (!g->last[stop++]);
    for (int w = 0; w < MAX_WIDTH && differs >> w; w++) {
        if (differs >> w & 1) {
            replay_item(v, at, stop, w);
        }
    }
    return stop;
}

/* Replay the variants from `base` on: only the items that differ in one of them. */
static void
replay_block(Variants *v, double *latest)
{
    const int32_t num = v->high - v->low;
    int32_t num_visited = 0, width = v->num_variants - v->base;
    width = width < MAX_WIDTH ? width : MAX_WIDTH;
    for (int32_t c = 0; c < v->num_changes; c++) {
        if (v->variant[c] >= v->base && v->variant[c] < v->base + width) {
            visit_later(v, v->begin[v->position[v->changed_row[c]]]);
        }
    }
    for (int32_t word = 0; word <= num >> 6; word++) {
        while (v->pending[word]) {
            int32_t item = word << 6 | __builtin_ctzll(v->pending[word]);
            v->pending[word] &= v->pending[word] - 1;
            int32_t stop = replay_variants_of(v, v->low + item) - v->low;
            for (int32_t k = item; k < stop; k++) {
                for (int32_t o = v->first_out[k]; v->differs[k] && o < v->first_out[k + 1]; o++) {
                    visit_later(v, v->out[o]);
                }
                v->visited[num_visited++] = k;
            }
        }
    }
    for (int w = 0; w < width; w++) {
        latest[w] = 0.0;
    }
    for (int32_t n = 0; n < v->num_closing; n++) {
        int32_t k = v->closing[n];
        for (int w = 0; w < width; w++) {
            double end = v->differs[k] >> w & 1 ? v->lanes[(Py_ssize_t)k * MAX_WIDTH + w] : v->ends[k];
            latest[w] = end > latest[w] ? end : latest[w];
        }
    }
    while (num_visited) {
        v->differs[v->visited[--num_visited]] = 0;
    }
}

static PyObject *
replay_variants(PyObject *Py_UNUSED(self), PyObject *args)
{
    Variants v;
    Arrays a = {.num = 0};
    PyObject *graph, *duration, *gap, *ends, *closes, *first, *variant, *new_duration, *new_gap;
    PyObject *latest_, *result = NULL;
    double *latest;
    if (!PyArg_ParseTuple(args, "O!iiOOOOOiOOOiO", &PyTuple_Type, &graph, &v.low, &v.high, &duration,
                          &gap, &ends, &closes, &first, &v.num_changes, &variant, &new_duration,
                          &new_gap, &v.num_variants, &latest_)) {
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
        && (latest = borrow(&a, latest_, v.num_variants, 8, 1))) {
        size_t num = (size_t)(v.high - v.low) + 1;
        size_t num_edges = (size_t)(v.graph.first[v.high] - v.graph.first[v.low]);
        v.lanes = PyMem_RawMalloc(num * MAX_WIDTH * sizeof(double));
        v.differs = PyMem_RawCalloc(6 * num + num_edges + (size_t)v.num_changes, sizeof(int32_t));
        v.pending = PyMem_RawCalloc(num / 64 + 1, sizeof(uint64_t));
        if (v.lanes != NULL && v.differs != NULL && v.pending != NULL) {
            Py_BEGIN_ALLOW_THREADS
            v.first_out = (int32_t *)v.differs + num, v.begin = v.first_out + num;
            v.position = v.begin + num, v.visited = v.position + num, v.out = v.visited + num;
            v.closing = v.out + num_edges, v.changed_row = v.closing + num, v.num_closing = 0;
            find_successors(&v);
            for (v.base = 0; v.base < v.num_variants; v.base += MAX_WIDTH) {
                replay_block(&v, latest + v.base);
            }
            Py_END_ALLOW_THREADS
            result = Py_NewRef(Py_None);
        } else {
            (void)PyErr_NoMemory();
        }
        PyMem_RawFree(v.lanes);
        PyMem_RawFree(v.differs);
        PyMem_RawFree(v.pending);
    }
    release(&a);
    return result;
}

/* -- parts put back ----------------------------------------------------------------------- */

#define LANES 8  /* scenarios replayed together: their ends fill a cache line */

typedef struct {
    Graph graph;
    int32_t low, high, num_replicas;
    const double *recorded, *ideal;
    const uint32_t *parts;
    const uint8_t *closes;
    const int32_t *replica;  /* NULL: all are recorded at once */
    double *lanes;           /* of position p, at (p - low) * LANES */
    double *others;          /* likewise, of the replicas that are ideal */
    double *gates, *latest;  /* of each replica */
} Parts;

/* Compiled for each width of vectors: the widest takes a fifth less time. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) \
    && __GNUC__ >= 12
#define VECTORIZED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VECTORIZED
#endif

static inline void
latest_lanes(const Parts *v, const double *lanes, int32_t position, double *arrival)
{
    const Graph *g = &v->graph;
    int32_t p = g->first[position], end = g->first[position + 1];
    for (int w = 0; w < LANES; w++) {
        arrival[w] = p < end ? -INFINITY : 0.0;
    }
    for (; p < end; p++) {
        const double *ends = lanes + (Py_ssize_t)(g->pred[p] - v->low) * LANES;
        for (int w = 0; w < LANES; w++) {
            arrival[w] = ends[w] > arrival[w] ? ends[w] : arrival[w];
        }
    }
}

static inline void
keep_latest(double *latest, const double *value)
{
    for (int w = 0; w < LANES; w++) {
        latest[w] = value[w] > latest[w] ? value[w] : latest[w];
    }
}

VECTORIZED static void
replay_lanes(const Parts *v, int shift)
{
    const Graph *g = &v->graph;
    for (int32_t at = v->low; at < v->high;) {
        double gate[LANES];
        int32_t stop = at;
        for (int w = 0; w < LANES; w++) {
            gate[w] = -INFINITY;
        }
        do {
            double arrival[LANES];
            latest_lanes(v, v->lanes, stop, arrival);
            keep_latest(gate, arrival);
        } while (!g->last[stop++]);
        for (; at < stop; at++) {
            int32_t row = g->order[at];
            double *ends = v->lanes + (Py_ssize_t)(at - v->low) * LANES;
            const double ideal = v->ideal[row], recorded = v->recorded[row];
            const uint32_t parts = v->parts[row] >> shift;
            for (int w = 0; w < LANES; w++) {
                ends[w] = gate[w] + (parts & (uint32_t)1 << w ? recorded : ideal);
            }
            if (v->closes[row]) {
                keep_latest(v->latest, ends);
            }
        }
    }
}

VECTORIZED static void
replay_alone_lanes(const Parts *v, int shift)
{
    const Graph *g = &v->graph;
    for (int32_t at = v->low; at < v->high;) {
        int32_t stop = at, is_shared = 0;
        do {
            Py_ssize_t place = (Py_ssize_t)(stop - v->low) * LANES;
            latest_lanes(v, v->lanes, stop, v->lanes + place);
            latest_lanes(v, v->others, stop, v->others + place);
            is_shared |= v->replica[g->order[stop]] != v->replica[g->order[at]];
        } while (!g->last[stop++]);
        /* An item of one replica has a gate in each of its two runs, a shared one in each replica. */
        double gate[2 * LANES];
        for (int32_t k = at; k < stop; k++) {
            double *gates = is_shared ? v->gates + (Py_ssize_t)v->replica[g->order[k]] * LANES : gate;
            for (int w = 0; w < LANES; w++) {
                gates[w] = gate[LANES + w] = -INFINITY;
            }
        }
        for (int32_t k = at; k < stop; k++) {
            Py_ssize_t place = (Py_ssize_t)(k - v->low) * LANES;
            double *gates = is_shared ? v->gates + (Py_ssize_t)v->replica[g->order[k]] * LANES : gate;
            keep_latest(gates, v->lanes + place);
            keep_latest(is_shared ? gates : gate + LANES, v->others + place);
        }
        for (; at < stop; at++) {
            int32_t row = g->order[at];
            Py_ssize_t place = (Py_ssize_t)(at - v->low) * LANES;
            const double *own = is_shared ? v->gates + (Py_ssize_t)v->replica[row] * LANES : gate;
            const double *other = is_shared ? own : gate + LANES;
            const double ideal = v->ideal[row], recorded = v->recorded[row];
            const uint32_t parts = v->parts[row] >> shift;
            for (int w = 0; w < LANES; w++) {
                v->lanes[place + w] = own[w] + (parts & (uint32_t)1 << w ? recorded : ideal);
                v->others[place + w] = other[w] + ideal;
            }
            if (v->closes[row]) {
                double *latest = v->latest + (Py_ssize_t)v->replica[row] * LANES;
                keep_latest(latest, v->lanes + place);
                keep_latest(latest, v->others + place);
            }
        }
    }
}

static PyObject *
replay_parts(PyObject *Py_UNUSED(self), PyObject *args)
{
    Parts v;
    Arrays a = {.num = 0};
    PyObject *graph, *recorded, *ideal, *parts, *closes, *replica, *latest_, *result = NULL;
    int32_t width;
    double *latest_ends;
    if (!PyArg_ParseTuple(args, "O!iiOOOOOiiO", &PyTuple_Type, &graph, &v.low, &v.high, &recorded,
                          &ideal, &parts, &closes, &replica, &v.num_replicas, &width, &latest_)) {
        return NULL;
    }
    v.replica = NULL;
    if (borrow_graph(&a, &v.graph, graph) && has_positions(&v.graph, v.low, v.high)
        && (v.recorded = borrow(&a, recorded, v.graph.num_rows, 8, 0))
        && (v.ideal = borrow(&a, ideal, v.graph.num_rows, 8, 0))
        && (v.parts = borrow(&a, parts, v.graph.num_rows, 4, 0))
        && (v.closes = borrow(&a, closes, v.graph.num_rows, 1, 0))
        && (replica == Py_None || (v.replica = borrow(&a, replica, v.graph.num_rows, 4, 0)))
        && (latest_ends = borrow(&a, latest_, (Py_ssize_t)width * v.num_replicas, 8, 1))) {
        size_t num = ((size_t)(v.high - v.low) + 1) * LANES, num_replicas = (size_t)v.num_replicas;
        if (width > MAX_WIDTH || v.num_replicas < 1) {
            PyErr_SetString(PyExc_ValueError, "too many scenarios");
        } else if ((v.lanes = PyMem_RawMalloc(((v.replica ? 2 : 1) * num + 2 * num_replicas * LANES)
                                              * sizeof(double))) == NULL) {
            (void)PyErr_NoMemory();
        } else {
            Py_BEGIN_ALLOW_THREADS
            v.latest = v.lanes + num, v.gates = v.latest + num_replicas * LANES;
            v.others = v.gates + num_replicas * LANES;
            for (int32_t begin = 0; begin < width; begin += LANES) {
                for (size_t k = 0; k < num_replicas * LANES; k++) {
                    v.latest[k] = 0.0;
                }
                (v.replica == NULL ? replay_lanes : replay_alone_lanes)(&v, begin);
                for (int32_t w = begin; w < width && w < begin + LANES; w++) {
                    for (int32_t r = 0; r < v.num_replicas; r++) {
                        latest_ends[(Py_ssize_t)w * v.num_replicas + r]
                            = v.latest[(Py_ssize_t)r * LANES + w - begin];
                    }
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

/* -- replicas ----------------------------------------------------------------------------- */

typedef struct {
    int32_t subgraph, lead, first_lead, num;  /* of the last subgraph, of the first; subgraphs */
    int32_t is_uneven;
} Spread;

typedef struct {
    Graph graph;
    int32_t num_replicas;
    const int32_t *first, *label, *group;
    const uint8_t *closes;
    int32_t *lead, *position;
    Spread *spread;
} Replicas;

/* Note the first member of each row's group in its subgraph. */
static void
find_leads(const Replicas *v, int32_t subgraph)
{
    for (int32_t row = v->first[subgraph]; row < v->first[subgraph + 1]; row++) {
        Spread *s = v->group[row] < 0 ? NULL : &v->spread[v->group[row]];
        int32_t local = row - v->first[subgraph];
        if (s != NULL && (s->num == 0 || s->subgraph != subgraph)) {
            s->first_lead = s->num ? s->first_lead : local;
            s->is_uneven |= s->first_lead != local;
            s->subgraph = subgraph, s->lead = local, s->num++;
        }
        v->lead[row] = s == NULL ? -1 : s->lead;
    }
}

/* A hash of what a row waits for in its replica, in any order; another one if it is outside. */
static uint64_t
hash_predecessors(const Replicas *v, int32_t row, int32_t begin, int32_t end)
{
    const Graph *g = &v->graph;
    int32_t position = v->position[row];
    uint64_t sum = 0;
    for (int32_t p = g->first[position]; p < g->first[position + 1]; p++) {
        int32_t src = g->order[g->pred[p]];
        if (src < begin || src >= end) {
            return UINT64_MAX - (uint64_t)row;  /* equal to that of no other row */
        }
        /* The finaliser of splitmix64. */
        uint64_t hash = ((uint64_t)(src - begin) + 1) * UINT64_C(0x9E3779B97F4A7C15);
        hash = (hash ^ hash >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
        hash = (hash ^ hash >> 27) * UINT64_C(0x94D049BB133111EB);
        sum += hash ^ hash >> 31;
    }
    return sum;
}

/* Does a row of a replica do the same as the one in its place in the first replica? */
static int
is_alike(const Replicas *v, int32_t row, int32_t model)
{
    const Spread *s = v->group[row] < 0 ? NULL : &v->spread[v->group[row]];
    const Spread *t = v->group[model] < 0 ? NULL : &v->spread[v->group[model]];
    if (v->label[row] != v->label[model] || v->closes[row] != v->closes[model]
        || v->lead[row] != v->lead[model] || (s == NULL) != (t == NULL)) {
        return 0;
    }
    return s == NULL
        || (s->num == t->num && (s->num == 1 || (s->num == v->num_replicas && !s->is_uneven)));
}

static PyObject *
compare_replicas(PyObject *Py_UNUSED(self), PyObject *args)
{
    Replicas v;
    Arrays a = {.num = 0};
    PyObject *graph, *first, *label, *group, *closes, *equal_, *result = NULL;
    int32_t num_steps, num_groups;
    uint8_t *equal;
    if (!PyArg_ParseTuple(args, "O!iiOOOiOO", &PyTuple_Type, &graph, &num_steps, &v.num_replicas,
                          &first, &label, &group, &num_groups, &closes, &equal_)) {
        return NULL;
    }
    if (borrow_graph(&a, &v.graph, graph)
        && (v.first = borrow(&a, first, (Py_ssize_t)num_steps * v.num_replicas + 1, 4, 0))
        && (v.label = borrow(&a, label, v.graph.num_rows, 4, 0))
        && (v.group = borrow(&a, group, v.graph.num_rows, 4, 0))
        && (v.closes = borrow(&a, closes, v.graph.num_rows, 1, 0))
        && (equal = borrow(&a, equal_, num_steps, 1, 1))) {
        size_t num = (size_t)v.graph.num_rows + 1;
        v.lead = PyMem_RawMalloc(2 * num * sizeof(int32_t));
        v.spread = PyMem_RawCalloc((size_t)num_groups + 1, sizeof(Spread));
        if (v.lead == NULL || v.spread == NULL) {
            (void)PyErr_NoMemory();
        } else {
            Py_BEGIN_ALLOW_THREADS
            v.position = v.lead + num;
            for (int32_t k = 0; k < v.graph.num_rows; k++) {
                v.position[v.graph.order[k]] = k;
            }
            for (int32_t s = 0; s < num_steps; s++) {
                int32_t base = v.first[s * v.num_replicas];
                for (int32_t r = 0; r < v.num_replicas; r++) {
                    find_leads(&v, s * v.num_replicas + r);
                }
                for (int32_t r = 0; r < v.num_replicas; r++) {
                    int32_t begin = v.first[s * v.num_replicas + r];
                    int32_t end = v.first[s * v.num_replicas + r + 1];
                    for (int32_t row = begin; equal[s] && row < end; row++) {
                        int32_t model = base + row - begin;
                        equal[s] = is_alike(&v, row, model)
                            && hash_predecessors(&v, row, begin, end)
                                == hash_predecessors(&v, model, base, base + end - begin);
                    }
                }
            }
            Py_END_ALLOW_THREADS
            result = Py_NewRef(Py_None);
        }
        PyMem_RawFree(v.lead);
        PyMem_RawFree(v.spread);
    }
    release(&a);
    return result;
}

/* -- waits -------------------------------------------------------------------------------- */

static PyObject *
last_members(PyObject *Py_UNUSED(self), PyObject *args)
{
    Arrays a = {.num = 0};
    PyObject *group_, *start_, *rank_, *last_, *result = NULL;
    int32_t num, num_groups, *last, *best;
    const int32_t *group, *rank;
    const int64_t *start;
    if (!PyArg_ParseTuple(args, "iiOOOO", &num, &num_groups, &group_, &start_, &rank_, &last_)) {
        return NULL;
    }
    if ((group = borrow(&a, group_, num, 4, 0)) && (start = borrow(&a, start_, num, 8, 0))
        && (rank = borrow(&a, rank_, num, 4, 0)) && (last = borrow(&a, last_, num, 4, 1))) {
        if ((best = PyMem_RawMalloc(((size_t)num_groups + 1) * sizeof(int32_t))) == NULL) {
            (void)PyErr_NoMemory();
        } else {
            Py_BEGIN_ALLOW_THREADS
            for (int32_t k = 0; k < num_groups; k++) {
                best[k] = -1;
            }
            for (int32_t row = 0; row < num; row++) {
                int32_t *found = group[row] < 0 ? NULL : &best[group[row]];
                if (found != NULL
                    && (*found < 0 || start[row] > start[*found]
                        || (start[row] == start[*found] && rank[row] <= rank[*found]))) {
                    *found = row;
                }
            }
            for (int32_t row = 0; row < num; row++) {
                last[row] = group[row] < 0 ? row : best[group[row]];
            }
            Py_END_ALLOW_THREADS
            result = Py_NewRef(Py_None);
        }
        PyMem_RawFree(best);
    }
    release(&a);
    return result;
}

typedef struct {
    const int32_t *before, *last, *rank, *owner, *operation;
    const int64_t *start, *end, *begin, *until;
    const double *duration, *ideal, *gap, *ideal_gap;
    double min_ratio, min_ns;
    int32_t max_hops, num_shares, room;
    int64_t *chain;   /* the excess of an operation and of all before it; -1: not known yet */
    int32_t *source;  /* the nearest of these that has any */
    int32_t *path, *wait_of, *on;
    int64_t *share_ns;
} Walk;

static int64_t
excess(const Walk *w, double recorded, double ideal)
{
    double above = recorded - ideal, least = w->min_ratio * ideal;
    return above > (least > w->min_ns ? least : w->min_ns) ? (int64_t)above : 0;
}

static int64_t
gap_excess(const Walk *w, int32_t row)
{
    return excess(w, w->gap[row], w->ideal_gap[row]);
}

static int64_t
own_excess(const Walk *w, int32_t row)
{
    return excess(w, w->duration[row], w->ideal[row]);
}

/* The excess of an operation and of all before it; 0 without an operation. */
static int64_t
chain_excess(Walk *w, int32_t row)
{
    int32_t length = 0, at = row;
    while (at >= 0 && w->chain[at] == -1) {
        w->chain[at] = -2;  /* on the path: a cycle ends here */
        w->path[length++] = at;
        at = w->before[w->last[at]];
    }
    at = at >= 0 && w->chain[at] >= 0 ? at : -1;
    while (length) {
        int32_t next = w->path[--length];
        int64_t own = own_excess(w, next) + gap_excess(w, w->last[next]);
        w->chain[next] = own + (at < 0 ? 0 : w->chain[at]);
        w->source[next] = own > 0 ? next : at < 0 ? -1 : w->source[at];
        at = next;
    }
    return row < 0 ? 0 : w->chain[row];
}

/* Add time to a rank's share of a wait, in order of ranks; 0 if there is no room. */
static int
charge(Walk *w, int32_t first, int32_t wait, int32_t on, int64_t ns)
{
    int32_t k = w->num_shares;
    if (ns == 0) {
        return 1;
    }
    while (k > first && w->on[k - 1] > on) {
        k--;
    }
    if (k > first && w->on[k - 1] == on) {
        w->share_ns[k - 1] += ns;
        return 1;
    }
    if (w->num_shares == w->room) {
        return 0;
    }
    for (int32_t m = w->num_shares++; m > k; m--) {
        w->on[m] = w->on[m - 1], w->share_ns[m] = w->share_ns[m - 1];
    }
    w->on[k] = on, w->share_ns[k] = ns, w->wait_of[w->num_shares - 1] = wait;
    return 1;
}

/* Attribute one wait; 0 if there is no room. */
static int
attribute_wait(Walk *w, int32_t wait)
{
    const int32_t first = w->num_shares, operation = w->operation[wait];
    int32_t member = w->last[operation], at = w->before[member];
    int64_t since = w->begin[wait], until = w->until[wait], own = gap_excess(w, member);
    int64_t left = own + chain_excess(w, at) - gap_excess(w, operation)
        - chain_excess(w, w->before[operation]);
    left = left < 0 ? 0 : left > until - since ? until - since : left;
    since += left;
    int32_t on = w->rank[member];
    int has_room = charge(w, first, wait, on, left < own ? left : own);
    left -= left < own ? left : own;
    at = at < 0 ? -1 : w->source[at];
    for (int32_t hop = 0; has_room && left > 0 && at >= 0 && hop < w->max_hops; hop++) {
        int32_t late = w->last[at];
        own = own_excess(w, at), own = left < own ? left : own;
        has_room = charge(w, first, wait, w->owner[at], own);
        left -= own;
        own = gap_excess(w, late), own = left < own ? left : own;
        has_room = has_room && charge(w, first, wait, w->rank[late], own);
        left -= own;
        at = w->before[late];
        at = at < 0 ? -1 : w->source[at];
    }
    since -= left;
    /* The rest is the time of what the last member followed on, and of what was before that. */
    int32_t mark = -1;
    int64_t hops = 0, limit = 1;
    at = w->before[member], on = w->rank[member];
    while (has_room) {
        int64_t done = at < 0 || w->end[at] < since ? since : w->end[at];
        done = done < until ? done : until;
        has_room = charge(w, first, wait, on, until - done);
        if (at < 0 || done <= since || !has_room) {
            break;
        }
        member = w->last[at], on = w->rank[member];
        int64_t began = w->start[member] > since ? w->start[member] : since;
        began = began < done ? began : done;
        has_room = charge(w, first, wait, on, done - began);
        if (began < until) {
            hops = 0, limit = 1, mark = -1;
        } else if (at == mark) {  /* a cycle (Brent's method): clocks contradict each other */
            return has_room && charge(w, first, wait, on, until - since);
        } else if (++hops == limit) {
            hops = 0, limit *= 2, mark = at;
        }
        until = began, at = w->before[member];
    }
    w->num_shares = has_room ? w->num_shares : first;
    return has_room;
}

static PyObject *
attribute(PyObject *Py_UNUSED(self), PyObject *args)
{
    Walk w;
    Arrays a = {.num = 0};
    PyObject *before, *last, *rank, *owner, *start, *end, *duration, *ideal, *gap, *ideal_gap, *operation;
    PyObject *begin, *until, *wait_of, *on, *share_ns, *result = NULL;
    int32_t num, num_waits, wait;
    if (!PyArg_ParseTuple(args, "iOOOOOOOOOOiiOOOddiiOOO", &num, &before, &last, &rank, &owner, &start,
                          &end, &duration, &ideal, &gap, &ideal_gap, &num_waits, &wait, &operation,
                          &begin, &until, &w.min_ratio, &w.min_ns, &w.max_hops, &w.room, &wait_of,
                          &on, &share_ns)) {
        return NULL;
    }
    w.num_shares = 0;
    if ((w.before = borrow(&a, before, num, 4, 0)) && (w.last = borrow(&a, last, num, 4, 0))
        && (w.rank = borrow(&a, rank, num, 4, 0)) && (w.owner = borrow(&a, owner, num, 4, 0))
        && (w.start = borrow(&a, start, num, 8, 0))
        && (w.end = borrow(&a, end, num, 8, 0)) && (w.duration = borrow(&a, duration, num, 8, 0))
        && (w.ideal = borrow(&a, ideal, num, 8, 0)) && (w.gap = borrow(&a, gap, num, 8, 0))
        && (w.ideal_gap = borrow(&a, ideal_gap, num, 8, 0))
        && (w.operation = borrow(&a, operation, num_waits, 4, 0))
        && (w.begin = borrow(&a, begin, num_waits, 8, 0))
        && (w.until = borrow(&a, until, num_waits, 8, 0))
        && (w.wait_of = borrow(&a, wait_of, w.room, 4, 1)) && (w.on = borrow(&a, on, w.room, 4, 1))
        && (w.share_ns = borrow(&a, share_ns, w.room, 8, 1))) {
        size_t rows = (size_t)num + 1;
        w.chain = PyMem_RawMalloc(rows * sizeof(int64_t));
        w.source = PyMem_RawMalloc(2 * rows * sizeof(int32_t));
        if (w.chain == NULL || w.source == NULL) {
            (void)PyErr_NoMemory();
        } else {
            Py_BEGIN_ALLOW_THREADS
            w.path = w.source + rows;
            for (int32_t row = 0; row < num; row++) {
                w.chain[row] = -1;
            }
            while (wait < num_waits && attribute_wait(&w, wait)) {
                wait++;
            }
            Py_END_ALLOW_THREADS
            result = Py_BuildValue("ii", wait, w.num_shares);
        }
        PyMem_RawFree(w.chain);
        PyMem_RawFree(w.source);
    }
    release(&a);
    return result;
}

/* -- occupancy ---------------------------------------------------------------------------- */

typedef struct {
    int32_t num, at;
    const int32_t *row;   /* in the order of (rank, start) */
    const int32_t *rank;  /* of a row, as start and end are */
    const int64_t *start, *end;
} Intervals;

/* Go on to the first interval that is left at this moment, or is of a later rank. */
static int
seek(Intervals *list, int32_t rank, int64_t now)
{
    for (; list->at < list->num; list->at++) {
        int32_t row = list->row[list->at];
        if (list->rank[row] > rank) {
            return 0;
        }
        if (list->rank[row] == rank && list->end[row] > now && list->end[row] > list->start[row]) {
            return 1;
        }
    }
    return 0;
}

typedef struct {
    int32_t num_steps, num_kinds;
    const int32_t *rank, *step;      /* of each rank step, in the order of (rank, start) */
    const int64_t *start, *end;
    const int16_t *kind;             /* of an operation */
    const int32_t *step_of;
    const uint8_t *is_compute, *is_launched;  /* of a kind */
    Intervals own, waits, transfers, idle, next;
    int64_t *spent;                  /* before the first compute, then after it */
    int64_t *waited;
    int32_t *of_compute, *of_wait;
} Fill;

/* The column of time in which a rank does nothing: is the operation that begins next launched? */
static int32_t
free_column(Fill *f, int32_t s, int64_t until)
{
    Intervals *next = &f->next;
    for (; next->at < next->num; next->at++) {
        int32_t row = next->row[next->at];
        if (next->rank[row] > f->rank[s]
            || (next->rank[row] == f->rank[s] && next->start[row] >= until)) {
            int is_known = next->rank[row] == f->rank[s] && f->step_of[row] == f->step[s];
            return f->num_kinds + (is_known && f->is_launched[f->kind[row]] ? 1 : 2);
        }
    }
    return f->num_kinds + 2;
}

static void
fill_step(Fill *f, int32_t s, int64_t now)
{
    Intervals *lists[] = {&f->own, &f->waits, &f->transfers, &f->idle};
    enum { OWN, WAITS, TRANSFERS, IDLE, NOTHING };
    const int32_t width = f->num_kinds + 3;
    int64_t *spent = f->spent + (Py_ssize_t)s * width;
    while (now < f->end[s]) {
        int64_t until = f->end[s];
        int32_t owner = NOTHING, row = -1;
        for (int32_t k = IDLE; k >= OWN; k--) {
            Intervals *list = lists[k];
            if (!seek(list, f->rank[s], now)) {
                continue;
            }
            int32_t found = list->row[list->at];
            int64_t border = list->start[found] > now ? list->start[found] : list->end[found];
            until = border < until ? border : until;
            if (list->start[found] <= now) {
                owner = k, row = found;
            }
        }
        int32_t column = f->num_kinds;  /* a transfer */
        if (owner == IDLE) {
            column = f->kind[row];
        } else if (owner == OWN) {
            column = f->kind[row];
            if (f->is_compute[column]) {
                f->of_compute[row] = s;
                spent = f->spent + ((Py_ssize_t)f->num_steps + s) * width;
            }
        } else if (owner == WAITS) {
            f->waited[row] += until - now;
            f->of_wait[row] = s;
        } else if (owner == NOTHING) {
            column = free_column(f, s, until);
        }
        if (owner != WAITS) {
            spent[column] += until - now;
        }
        now = until;
    }
}

static int
borrow_intervals(Arrays *a, Intervals *list, PyObject *source)
{
    PyObject *row, *rank, *start, *end;
    int32_t num_rows;
    list->at = 0;
    return PyArg_ParseTuple(source, "iiOOOO", &list->num, &num_rows, &row, &rank, &start, &end)
        && (list->row = borrow(a, row, list->num, 4, 0))
        && (list->rank = borrow(a, rank, num_rows, 4, 0))
        && (list->start = borrow(a, start, num_rows, 8, 0))
        && (list->end = borrow(a, end, num_rows, 8, 0));
}

static PyObject *
fill(PyObject *Py_UNUSED(self), PyObject *args)
{
    Fill f;
    Arrays a = {.num = 0};
    PyObject *rank, *step, *start, *end, *kind, *step_of, *is_compute, *is_launched;
    PyObject *own, *waits, *transfers, *idle, *next, *spent, *waited, *of_compute, *of_wait;
    PyObject *result = NULL;
    int32_t num_rows, num_waits;
    if (!PyArg_ParseTuple(args, "iOOOOiOOiOOO!O!O!O!O!OOiOO", &f.num_steps, &rank, &step, &start, &end,
                          &num_rows, &kind, &step_of, &f.num_kinds, &is_compute, &is_launched,
                          &PyTuple_Type, &own, &PyTuple_Type, &waits, &PyTuple_Type, &transfers,
                          &PyTuple_Type, &idle, &PyTuple_Type, &next, &spent, &of_compute, &num_waits, &waited, &of_wait)) {
        return NULL;
    }
    if ((f.rank = borrow(&a, rank, f.num_steps, 4, 0))
        && (f.step = borrow(&a, step, f.num_steps, 4, 0))
        && (f.start = borrow(&a, start, f.num_steps, 8, 0))
        && (f.end = borrow(&a, end, f.num_steps, 8, 0))
        && (f.kind = borrow(&a, kind, num_rows, 2, 0))
        && (f.step_of = borrow(&a, step_of, num_rows, 4, 0))
        && (f.is_compute = borrow(&a, is_compute, f.num_kinds, 1, 0))
        && (f.is_launched = borrow(&a, is_launched, f.num_kinds, 1, 0))
        && borrow_intervals(&a, &f.own, own) && borrow_intervals(&a, &f.waits, waits)
        && borrow_intervals(&a, &f.transfers, transfers) && borrow_intervals(&a, &f.idle, idle)
        && borrow_intervals(&a, &f.next, next)
        && (f.spent = borrow(&a, spent, (Py_ssize_t)2 * f.num_steps * (f.num_kinds + 3), 8, 1))
        && (f.of_compute = borrow(&a, of_compute, num_rows, 4, 1))
        && (f.waited = borrow(&a, waited, num_waits, 8, 1))
        && (f.of_wait = borrow(&a, of_wait, num_waits, 4, 1))) {
        Py_BEGIN_ALLOW_THREADS
        int64_t reach = 0;
        for (int32_t s = 0; s < f.num_steps; s++) {
            int is_first = s == 0 || f.rank[s] != f.rank[s - 1];
            fill_step(&f, s, is_first || f.start[s] > reach ? f.start[s] : reach);
            reach = is_first || f.end[s] > reach ? f.end[s] : reach;
        }
        Py_END_ALLOW_THREADS
        result = Py_NewRef(Py_None);
    }
    release(&a);
    return result;
}

/* -- module ------------------------------------------------------------------------------- */

static PyMethodDef functions[] = {
    {"attribute", attribute, METH_VARARGS, "See replay_oracle.attribute of the tests."},
    {"compare_replicas", compare_replicas, METH_VARARGS, "See replay_oracle.compare_replicas of the tests."},
    {"fill", fill, METH_VARARGS, "See replay_oracle.fill of the tests."},
    {"last_members", last_members, METH_VARARGS, "See replay_oracle.last_members of the tests."},
    {"sort", sort, METH_VARARGS, "See replay_oracle.sort of the tests."},
    {"replay", replay, METH_VARARGS, "See replay_oracle.replay of the tests."},
    {"replay_parts", replay_parts, METH_VARARGS, "See replay_oracle.replay_parts of the tests."},
    {"replay_variants", replay_variants, METH_VARARGS, "See replay_oracle.replay_variants of the tests."},
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
