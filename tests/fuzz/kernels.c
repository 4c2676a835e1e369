/* libFuzzer target over the C decoders (sync/codec/_kernels): no read or write outside what they were given, and what the encoder
 * makes of anything comes back. `tests/fuzz/kernels` builds and runs it, `tests/fuzz/kernels_corpus.py` makes the seeds.
 *
 * Input: u8 what (0 ctx payload, 1 sparse content, 2 planes and encoders), u8 kind, u16 n; for ctx and encoders: u8 C, u8 B, u8 T,
 * u8 lanes, u32 row, 256 bytes of bin map, frequencies; then the base, then the payload (or the new slab). Sizes are cut to small
 * ones and tables are made to sum to 4,096, so that most mutations get as far as the decoders.
 */
#include <stdlib.h>
#include <string.h>

#include "core.h"

static const unsigned KINDS[][2] = {{1, 0}, {1, 2}, {1, 3}, {2, 7}, {2, 10}, {4, 23}, {2, 0}, {4, 0}, {8, 0}, {8, 52}};
enum { CTX_KINDS = 6, ALL_KINDS = 10, MAX_N = 2000 };

typedef struct {
    const uint8_t *at;
    size_t left;
} input;

static void take(input *from, void *to, size_t length) {
    size_t given = length < from->left ? length : from->left;
    memset(to, 0, length);
    memcpy(to, from->at, given);
    from->at += given, from->left -= given;
}

/* A copy of exactly this length, so that a read beyond it is seen. */
static uint8_t *taken(input *from, size_t length) {
    uint8_t *made = malloc(length ? length : 1);
    take(from, made, length);
    return made;
}

static void check(int holds) {
    if (!holds) abort();
}

static void summed(uint8_t *frequencies, size_t rows, size_t symbols) {
    for (size_t row = 0; row < rows; row++)
        for (size_t symbol = 0, left = SCALE; symbol < symbols; symbol++, frequencies += 2) {
            uint16_t frequency;
            memcpy(&frequency, frequencies, 2);
            if (frequency > left || symbol == symbols - 1) frequency = (uint16_t)left;
            left -= frequency;
            memcpy(frequencies, &frequency, 2);
        }
}

static void round_trip(const layout *as, const tables *with, unsigned lanes_log2, uint8_t *fresh, const uint8_t *base, size_t raw,
                       scratch *work, uint8_t *out) {
    size_t n = raw / as->width, rows = (n + as->row - 1) / as->row;
    uint8_t *classes = malloc(rows + 1), *tokens = malloc(n + 1), *bins = malloc(n + 1);
    encoding made;
    ctx_tokens(as->width, as->mantissa, as->bin_map, fresh, base, n, tokens, bins);
    for (size_t row = 0; row < rows; row++) {
        classes[row] = 0;
        for (size_t i = row * as->row; i < n && i < (row + 1) * (size_t)as->row; i++)
            if (tokens[i]) classes[row] = (uint8_t)(1 + i % with->classes);
    }
    check(!ctx_encode(as, with, lanes_log2, classes, fresh, base, raw, &made));
    if (made.payload) {
        check(!ctx_decode(as, with, made.payload, made.length, base, raw, work, out));
        check(!memcmp(out, fresh, raw));
    }
    free(made.payload), free(classes), free(tokens), free(bins);
}

static void ctx(input *from, int is_payload, const unsigned *kind, size_t n) {
    uint8_t sizes[4], bin_map[256];
    layout as = {kind[0], kind[1], 0, bin_map};
    take(from, sizes, sizeof sizes);
    take(from, &as.row, 4);
    take(from, bin_map, sizeof bin_map);
    uint32_t classes = 1 + sizes[0] % 8, bins = 1 + sizes[1] % 8, tokens = 1 + sizes[2] % max_tokens(as.width);
    for (int i = 0; i < 256; i++) bin_map[i] = (uint8_t)(bin_map[i] % bins);
    if (!as.row) as.row = 1;
    size_t class_cells = (size_t)(classes + 1) * (classes + 1), token_cells = (size_t)classes * bins * tokens, raw = n * as.width;
    uint8_t *class_frequencies = taken(from, 2 * class_cells), *token_frequencies = taken(from, 2 * token_cells);
    summed(class_frequencies, classes + 1, classes + 1);
    summed(token_frequencies, (size_t)classes * bins, tokens);
    tables *with = malloc(tables_bytes(classes, bins, tokens));
    check(!tables_fill(with, classes, bins, tokens, class_frequencies, token_frequencies));
    check(!ctx_layout_problem(&as, with));
    uint8_t *base = taken(from, raw), *out = malloc(raw ? raw : 1);
    size_t length = is_payload ? from->left : raw;
    uint8_t *rest = taken(from, length);
    scratch *work = malloc(sizeof *work);
    if (is_payload) ctx_decode(&as, with, rest, length, base, raw, work, out);
    else round_trip(&as, with, sizes[3] % 5, rest, base, raw, work, out);
    free(work), free(rest), free(out), free(base), free(with), free(token_frequencies), free(class_frequencies);
}

static void sparse(input *from, const unsigned *kind, size_t n) {
    size_t raw = n * kind[0];
    uint8_t *base = taken(from, raw), *out = malloc(raw ? raw : 1);
    size_t length = from->left;
    uint8_t *content = taken(from, length);
    sparse_apply(kind[0], kind[1], content, length, base, n, out);
    free(content), free(out), free(base);
}

static void planes(input from, const unsigned *kind, size_t n) {
    size_t raw = n * kind[0];
    uint8_t *base = taken(&from, raw), *fresh = taken(&from, raw), *moved = malloc(raw ? raw : 1), *out = malloc(raw ? raw : 1);
    planes_diff(kind[0], kind[1], fresh, base, n, moved);
    planes_undo(kind[0], kind[1], moved, base, n, out);
    check(!memcmp(out, fresh, raw));
    to_planes(kind[0], fresh, n, moved);
    from_planes(kind[0], moved, n, out);
    check(!memcmp(out, fresh, raw));
    size_t length = sparse_size(kind[0], fresh, base, n);
    if (length) {
        uint8_t *content = malloc(length);
        sparse_gather(kind[0], kind[1], fresh, base, n, content);
        check(!sparse_apply(kind[0], kind[1], content, length, base, n, out));
        check(!memcmp(out, fresh, raw));
        free(content);
    }
    free(out), free(moved), free(fresh), free(base);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    input from = {data, size};
    uint8_t what[2];
    uint16_t count;
    take(&from, what, sizeof what);
    take(&from, &count, sizeof count);
    size_t n = count % MAX_N;
    switch (what[0] % 3) {
    case 0: ctx(&from, 1, KINDS[what[1] % CTX_KINDS], n); break;
    case 1: sparse(&from, KINDS[what[1] % ALL_KINDS], n); break;
    default:
        planes(from, KINDS[what[1] % ALL_KINDS], n);
        ctx(&from, 0, KINDS[what[1] % CTX_KINDS], n);
    }
    return 0;
}
