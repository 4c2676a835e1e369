/* Kernels of the slab codec (docs/formats/slab.md) in plain C: no Python, no allocation in decoders, no alignment assumed.
 *
 * A function that can be refused returns NULL, or what is wrong as a string that lives for ever. Decoders take hostile input: every
 * read is within the lengths given, every write within the declared output. `width` and `mantissa` have to be a known pair:
 * callers ask `kind_problem` first. Lengths are bytes, `n` counts elements.
 */
#ifndef OUTRIDER_CORE_H
#define OUTRIDER_CORE_H

#include <stddef.h>
#include <stdint.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the kernels read little-endian words as they are"
#endif

#ifndef OUTRIDER_CHUNK /* a fuzz target takes a small one */
#define OUTRIDER_CHUNK 8192
#endif

enum {
    SCALE_BITS = 12,
    SCALE = 1 << SCALE_BITS,
    MAX_CLASSES = 64,
    MAX_BINS = 64,
    MAX_CONTEXTS = 512,
    MAX_TOKENS = 81,
    FIRST_EXTRA = 23, /* tokens from here on have extra bits */
    MAX_LANES_LOG2 = 4,
    GROUPS = 8,
    CHUNK = OUTRIDER_CHUNK, /* tokens decoded at a time: their contexts, tokens and steps stay in the first caches */
};

/* A table set made ready. All pointers lie in the one block that begins with this struct (`tables_bytes` long). */
typedef struct {
    uint32_t classes, bins, tokens; /* C, B, T */
    uint8_t *class_slots;           /* [C + 1][SCALE]: the symbol of a slot */
    uint32_t *class_ranges;         /* [C + 1][C + 1]: frequency << 16 | start */
    uint8_t *token_slots;           /* [C * B][SCALE], and 3 bytes more */
    uint32_t *token_ranges;         /* [C * B][T] */
} tables;

typedef struct {
    uint32_t at, n; /* elements */
} segment;

/* All memory that decoding needs besides its output. */
typedef struct {
    uint32_t steps[CHUNK];
    segment segments[CHUNK];
    uint16_t contexts[CHUNK];
    uint8_t tokens[CHUNK + 8];
} scratch;

typedef struct {
    unsigned width, mantissa;
    uint32_t row;           /* elements per row */
    const uint8_t *bin_map; /* 256 entries */
} layout;

typedef struct {
    uint8_t *payload; /* to be freed by the caller; NULL where a token or class has frequency 0 */
    size_t length;
} encoding;

const char *kind_problem(unsigned width, unsigned mantissa);
const char *ctx_kind_problem(unsigned width, unsigned mantissa);
unsigned max_tokens(unsigned width);

const char *tables_problem(uint32_t classes, uint32_t bins, uint32_t tokens);
size_t tables_bytes(uint32_t classes, uint32_t bins, uint32_t tokens);
/* `block`: tables_bytes(...) bytes, aligned for any type. Frequencies are little-endian u16, [C + 1][C + 1] and [C * B][T]. */
const char *tables_fill(void *block, uint32_t classes, uint32_t bins, uint32_t tokens, const uint8_t *class_frequencies,
                        const uint8_t *token_frequencies);

const char *ctx_layout_problem(const layout *as, const tables *with);
const char *ctx_decode(const layout *as, const tables *with, const uint8_t *payload, size_t length, const uint8_t *base,
                       size_t raw, scratch *work, uint8_t *out);

const char *ctx_encode(const layout *as, const tables *with, unsigned lanes_log2, const uint8_t *row_classes,
                       const uint8_t *fresh, const uint8_t *base, size_t raw, encoding *made);
/* `bins` and `tokens`: n bytes each. */
void ctx_tokens(unsigned width, unsigned mantissa, const uint8_t *bin_map, const uint8_t *fresh, const uint8_t *base,
                size_t n, uint8_t *tokens, uint8_t *bins);
/* `out`: u16 [rows][bins][GROUPS], zeroed; saturates. */
const char *ctx_row_histograms(const uint8_t *tokens, const uint8_t *bins, size_t n, uint32_t row, uint32_t bin_count,
                               uint8_t *out);
/* `out`: u32 [classes * bins][token_count], zeroed. */
const char *ctx_counts(const uint8_t *tokens, const uint8_t *bins, size_t n, uint32_t row, const uint8_t *row_classes,
                       uint32_t classes, uint32_t bin_count, uint32_t token_count, uint8_t *out);
/* `costs`: u32 [classes * bins][token_count]; `out`: u32 [rows][classes], sums that stop at 2^32 - 1. */
const char *ctx_row_costs(const uint8_t *tokens, const uint8_t *bins, size_t n, uint32_t row, const uint8_t *costs,
                          uint32_t classes, uint32_t bin_count, uint32_t token_count, uint8_t *out);

void to_planes(unsigned width, const uint8_t *raw, size_t n, uint8_t *planes);
void from_planes(unsigned width, const uint8_t *planes, size_t n, uint8_t *raw);
void planes_diff(unsigned width, unsigned mantissa, const uint8_t *fresh, const uint8_t *base, size_t n, uint8_t *planes);
void planes_undo(unsigned width, unsigned mantissa, const uint8_t *planes, const uint8_t *base, size_t n, uint8_t *raw);

/* Bytes of a sparse form's content, 0 where that is not less than raw; then writes exactly those. */
size_t sparse_size(unsigned width, const uint8_t *fresh, const uint8_t *base, size_t n);
void sparse_gather(unsigned width, unsigned mantissa, const uint8_t *fresh, const uint8_t *base, size_t n, uint8_t *content);
const char *sparse_apply(unsigned width, unsigned mantissa, const uint8_t *content, size_t length, const uint8_t *base,
                         size_t n, uint8_t *raw);

#endif
