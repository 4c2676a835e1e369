/* The extension `sync.codec._kernels.native`: buffers in, bytes out, around core.h. Limited API: one build serves Python 3.11 and later.
 *
 * Inputs are C-contiguous buffers of any type; what does not fit together, and corrupt content, is a ValueError. The GIL is released in
 * everything that takes longer than a look at its arguments.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"

static const char CAPSULE[] = "sync.codec._kernels.native.Tables";
static const size_t MAX_BYTES = (size_t)1 << 30;

static PyObject *refuse(const char *problem) {
    PyErr_SetString(PyExc_ValueError, problem);
    return NULL;
}

static PyObject *output(size_t length, uint8_t **at) {
    PyObject *made = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)length);
    *at = made ? (uint8_t *)PyBytes_AsString(made) : NULL;
    return made;
}

/* Hands `made` on, or drops it and refuses. */
static PyObject *judged(PyObject *made, const char *problem) {
    if (!problem) return made;
    Py_XDECREF(made);
    return refuse(problem);
}

static void release(Py_buffer *buffers, int count) {
    while (count-- > 0)
        if (buffers[count].obj) PyBuffer_Release(&buffers[count]);
}

static size_t length(const Py_buffer *of) { return (size_t)of->len; }
static const uint8_t *bytes(const Py_buffer *of) { return of->buf; }

static const char *lengths_problem(const Py_buffer *first, const Py_buffer *second, unsigned width) {
    if (length(first) != length(second)) return "two buffers that should have one length";
    if (!width || length(first) % width) return "the length is not a multiple of the width";
    return length(first) > MAX_BYTES ? "more than 2^30 bytes at once" : NULL;
}

static void tables_free(PyObject *capsule) { free(PyCapsule_GetPointer(capsule, CAPSULE)); }

static PyObject *py_tables(PyObject *Py_UNUSED(self), PyObject *args) {
    Py_buffer buffer[2] = {{0}};
    unsigned classes, bins, tokens;
    PyObject *made = NULL;
    void *block = NULL;
    if (!PyArg_ParseTuple(args, "IIIy*y*", &classes, &bins, &tokens, &buffer[0], &buffer[1])) goto done;
    const char *problem = tables_problem(classes, bins, tokens);
    if (!problem && length(&buffer[0]) != 2 * (size_t)(classes + 1) * (classes + 1)) problem = "class frequencies of another length";
    if (!problem && length(&buffer[1]) != 2 * (size_t)classes * bins * tokens) problem = "token frequencies of another length";
    if (problem) { refuse(problem); goto done; }
    if (!(block = malloc(tables_bytes(classes, bins, tokens)))) { PyErr_NoMemory(); goto done; }
    if ((problem = tables_fill(block, classes, bins, tokens, bytes(&buffer[0]), bytes(&buffer[1])))) refuse(problem);
    else made = PyCapsule_New(block, CAPSULE, tables_free);
done:
    if (!made) free(block);
    release(buffer, 2);
    return made;
}

static PyObject *py_ctx_decode(PyObject *Py_UNUSED(self), PyObject *args) {
    Py_buffer buffer[3] = {{0}};
    layout as;
    PyObject *capsule, *made = NULL;
    scratch *work = NULL;
    uint8_t *out;
    if (!PyArg_ParseTuple(args, "y*y*IIIy*O", &buffer[0], &buffer[1], &as.width, &as.mantissa, &as.row, &buffer[2], &capsule)) goto done;
    const tables *with = PyCapsule_GetPointer(capsule, CAPSULE);
    if (!with) goto done;
    const char *problem = length(&buffer[2]) != 256 ? "a bin map of other than 256 entries" : lengths_problem(&buffer[1], &buffer[1], as.width);
    as.bin_map = bytes(&buffer[2]);
    if (!problem) problem = ctx_layout_problem(&as, with);
    if (problem) { refuse(problem); goto done; }
    if (!(work = malloc(sizeof(scratch)))) { PyErr_NoMemory(); goto done; }
    if (!(made = output(length(&buffer[1]), &out))) goto done;
    Py_BEGIN_ALLOW_THREADS
    problem = ctx_decode(&as, with, bytes(&buffer[0]), length(&buffer[0]), bytes(&buffer[1]), length(&buffer[1]), work, out);
    Py_END_ALLOW_THREADS
    made = judged(made, problem);
done:
    free(work);
    release(buffer, 3);
    return made;
}

static PyObject *py_ctx_encode(PyObject *Py_UNUSED(self), PyObject *args) {
    Py_buffer buffer[4] = {{0}};
    layout as;
    unsigned lanes_log2;
    PyObject *capsule, *made = NULL;
    encoding coded = {0};
    if (!PyArg_ParseTuple(args, "y*y*IIIy*y*OI", &buffer[0], &buffer[1], &as.width, &as.mantissa, &as.row, &buffer[2], &buffer[3],
                          &capsule, &lanes_log2)) goto done;
    const tables *with = PyCapsule_GetPointer(capsule, CAPSULE);
    if (!with) goto done;
    const char *problem = length(&buffer[3]) != 256 ? "a bin map of other than 256 entries" : lengths_problem(&buffer[0], &buffer[1], as.width);
    as.bin_map = bytes(&buffer[3]);
    if (!problem) problem = ctx_layout_problem(&as, with);
    if (!problem && length(&buffer[2]) != (length(&buffer[0]) / as.width + as.row - 1) / as.row) problem = "not one class for each row";
    if (problem) { refuse(problem); goto done; }
    Py_BEGIN_ALLOW_THREADS
    problem = ctx_encode(&as, with, lanes_log2, bytes(&buffer[2]), bytes(&buffer[0]), bytes(&buffer[1]), length(&buffer[0]), &coded);
    Py_END_ALLOW_THREADS
    if (problem) refuse(problem);
    else if (coded.payload) made = PyBytes_FromStringAndSize((const char *)coded.payload, (Py_ssize_t)coded.length);
    else made = Py_NewRef(Py_None);
    free(coded.payload);
done:
    release(buffer, 4);
    return made;
}

static PyObject *py_ctx_tokens(PyObject *Py_UNUSED(self), PyObject *args) {
    Py_buffer buffer[3] = {{0}};
    unsigned width, mantissa;
    PyObject *tokens = NULL, *bins = NULL, *made = NULL;
    uint8_t *tokens_at, *bins_at;
    if (!PyArg_ParseTuple(args, "y*y*IIy*", &buffer[0], &buffer[1], &width, &mantissa, &buffer[2])) goto done;
    const char *problem = length(&buffer[2]) != 256 ? "a bin map of other than 256 entries" : lengths_problem(&buffer[0], &buffer[1], width);
    if (!problem) problem = ctx_kind_problem(width, mantissa);
    if (problem) { refuse(problem); goto done; }
    size_t n = length(&buffer[0]) / width;
    if (!(tokens = output(n, &tokens_at)) || !(bins = output(n, &bins_at))) goto done;
    Py_BEGIN_ALLOW_THREADS
    ctx_tokens(width, mantissa, bytes(&buffer[2]), bytes(&buffer[0]), bytes(&buffer[1]), n, tokens_at, bins_at);
    Py_END_ALLOW_THREADS
    made = PyTuple_Pack(2, tokens, bins);
done:
    Py_XDECREF(tokens);
    Py_XDECREF(bins);
    release(buffer, 3);
    return made;
}

static PyObject *py_ctx_row_histograms(PyObject *Py_UNUSED(self), PyObject *args) {
    Py_buffer buffer[2] = {{0}};
    unsigned row, bins;
    PyObject *made = NULL;
    uint8_t *out;
    if (!PyArg_ParseTuple(args, "y*y*II", &buffer[0], &buffer[1], &row, &bins)) goto done;
    const char *problem = lengths_problem(&buffer[0], &buffer[1], 1);
    if (!problem && (!row || bins < 1 || bins > MAX_BINS)) problem = "rows of no elements, or bins that are not within 1..64";
    if (problem) { refuse(problem); goto done; }
    size_t n = length(&buffer[0]), size = (n + row - 1) / row * bins * GROUPS * 2;
    if (!(made = output(size, &out))) goto done;
    Py_BEGIN_ALLOW_THREADS
    memset(out, 0, size);
    problem = ctx_row_histograms(bytes(&buffer[0]), bytes(&buffer[1]), n, row, bins, out);
    Py_END_ALLOW_THREADS
    made = judged(made, problem);
done:
    release(buffer, 2);
    return made;
}

static PyObject *py_ctx_row_costs(PyObject *Py_UNUSED(self), PyObject *args) {
    Py_buffer buffer[3] = {{0}};
    unsigned row, classes, bins, tokens;
    PyObject *made = NULL;
    uint8_t *out;
    if (!PyArg_ParseTuple(args, "y*y*Iy*III", &buffer[0], &buffer[1], &row, &buffer[2], &classes, &bins, &tokens)) goto done;
    const char *problem = lengths_problem(&buffer[0], &buffer[1], 1);
    if (!problem) problem = tables_problem(classes, bins, tokens);
    if (!problem && length(&buffer[2]) != (size_t)4 * classes * bins * tokens) problem = "costs of another length";
    if (!problem && !row) problem = "rows of no elements";
    if (problem) { refuse(problem); goto done; }
    if (!(made = output((length(&buffer[0]) + row - 1) / row * classes * 4, &out))) goto done;
    Py_BEGIN_ALLOW_THREADS
    problem = ctx_row_costs(bytes(&buffer[0]), bytes(&buffer[1]), length(&buffer[0]), row, bytes(&buffer[2]), classes, bins, tokens, out);
    Py_END_ALLOW_THREADS
    made = judged(made, problem);
done:
    release(buffer, 3);
    return made;
}

static PyObject *py_ctx_counts(PyObject *Py_UNUSED(self), PyObject *args) {
    Py_buffer buffer[3] = {{0}};
    unsigned row, classes, bins, tokens;
    PyObject *made = NULL;
    uint8_t *out;
    if (!PyArg_ParseTuple(args, "y*y*Iy*III", &buffer[0], &buffer[1], &row, &buffer[2], &classes, &bins, &tokens)) goto done;
    const char *problem = lengths_problem(&buffer[0], &buffer[1], 1);
    if (!problem) problem = tables_problem(classes, bins, 1);
    if (!problem && (tokens < 1 || tokens > 256)) problem = "tokens that are not within 1..256";
    if (!problem && (!row || length(&buffer[2]) != (length(&buffer[0]) + row - 1) / row)) problem = "not one class for each row";
    if (problem) { refuse(problem); goto done; }
    size_t size = (size_t)4 * classes * bins * tokens;
    if (!(made = output(size, &out))) goto done;
    Py_BEGIN_ALLOW_THREADS
    memset(out, 0, size);
    problem = ctx_counts(bytes(&buffer[0]), bytes(&buffer[1]), length(&buffer[0]), row, bytes(&buffer[2]), classes, bins, tokens, out);
    Py_END_ALLOW_THREADS
    made = judged(made, problem);
done:
    release(buffer, 3);
    return made;
}

typedef void two_to_one(unsigned width, unsigned mantissa, const uint8_t *first, const uint8_t *second, size_t n, uint8_t *out);

static PyObject *differences(PyObject *args, two_to_one *run) {
    Py_buffer buffer[2] = {{0}};
    unsigned width, mantissa;
    PyObject *made = NULL;
    uint8_t *out;
    if (!PyArg_ParseTuple(args, "y*y*II", &buffer[0], &buffer[1], &width, &mantissa)) goto done;
    const char *problem = kind_problem(width, mantissa);
    if (!problem) problem = lengths_problem(&buffer[0], &buffer[1], width);
    if (problem) { refuse(problem); goto done; }
    if (!(made = output(length(&buffer[0]), &out))) goto done;
    Py_BEGIN_ALLOW_THREADS
    run(width, mantissa, bytes(&buffer[0]), bytes(&buffer[1]), length(&buffer[0]) / width, out);
    Py_END_ALLOW_THREADS
done:
    release(buffer, 2);
    return made;
}

static PyObject *py_planes_diff(PyObject *Py_UNUSED(self), PyObject *args) { return differences(args, planes_diff); }
static PyObject *py_planes_undo(PyObject *Py_UNUSED(self), PyObject *args) { return differences(args, planes_undo); }

typedef void one_to_one(unsigned width, const uint8_t *in, size_t n, uint8_t *out);

static PyObject *turned(PyObject *args, one_to_one *run) {
    Py_buffer buffer[1] = {{0}};
    unsigned width;
    PyObject *made = NULL;
    uint8_t *out;
    if (!PyArg_ParseTuple(args, "y*I", &buffer[0], &width)) goto done;
    const char *problem = kind_problem(width, 0);
    if (!problem) problem = lengths_problem(&buffer[0], &buffer[0], width);
    if (problem) { refuse(problem); goto done; }
    if (!(made = output(length(&buffer[0]), &out))) goto done;
    Py_BEGIN_ALLOW_THREADS
    run(width, bytes(&buffer[0]), length(&buffer[0]) / width, out);
    Py_END_ALLOW_THREADS
done:
    release(buffer, 1);
    return made;
}

static PyObject *py_to_planes(PyObject *Py_UNUSED(self), PyObject *args) { return turned(args, to_planes); }
static PyObject *py_from_planes(PyObject *Py_UNUSED(self), PyObject *args) { return turned(args, from_planes); }

static PyObject *py_sparse_gather(PyObject *Py_UNUSED(self), PyObject *args) {
    Py_buffer buffer[2] = {{0}};
    unsigned width, mantissa;
    PyObject *made = NULL;
    uint8_t *out;
    if (!PyArg_ParseTuple(args, "y*y*II", &buffer[0], &buffer[1], &width, &mantissa)) goto done;
    const char *problem = kind_problem(width, mantissa);
    if (!problem) problem = lengths_problem(&buffer[0], &buffer[1], width);
    if (problem) { refuse(problem); goto done; }
    size_t n = length(&buffer[0]) / width, size;
    Py_BEGIN_ALLOW_THREADS
    size = sparse_size(width, bytes(&buffer[0]), bytes(&buffer[1]), n);
    Py_END_ALLOW_THREADS
    if (!size) { made = Py_NewRef(Py_None); goto done; }
    if (!(made = output(size, &out))) goto done;
    Py_BEGIN_ALLOW_THREADS
    sparse_gather(width, mantissa, bytes(&buffer[0]), bytes(&buffer[1]), n, out);
    Py_END_ALLOW_THREADS
done:
    release(buffer, 2);
    return made;
}

static PyObject *py_sparse_apply(PyObject *Py_UNUSED(self), PyObject *args) {
    Py_buffer buffer[2] = {{0}};
    unsigned width, mantissa;
    PyObject *made = NULL;
    uint8_t *out;
    if (!PyArg_ParseTuple(args, "y*y*II", &buffer[0], &buffer[1], &width, &mantissa)) goto done;
    const char *problem = kind_problem(width, mantissa);
    if (!problem) problem = lengths_problem(&buffer[1], &buffer[1], width);
    if (problem) { refuse(problem); goto done; }
    if (!(made = output(length(&buffer[1]), &out))) goto done;
    Py_BEGIN_ALLOW_THREADS
    problem = sparse_apply(width, mantissa, bytes(&buffer[0]), length(&buffer[0]), bytes(&buffer[1]), length(&buffer[1]) / width, out);
    Py_END_ALLOW_THREADS
    made = judged(made, problem);
done:
    release(buffer, 2);
    return made;
}

#define METHOD(name) {#name, py_##name, METH_VARARGS, NULL}
static PyMethodDef methods[] = {
    METHOD(tables),      METHOD(ctx_decode),  METHOD(ctx_encode), METHOD(ctx_tokens),  METHOD(ctx_row_histograms), METHOD(ctx_counts), METHOD(ctx_row_costs),
    METHOD(planes_diff), METHOD(planes_undo), METHOD(to_planes),  METHOD(from_planes), METHOD(sparse_gather),      METHOD(sparse_apply),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "native", "The codec's compiled kernels (core.h); sync.codec.kernels says what each does.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_native(void) { return PyModuleDef_Init(&definition); }
