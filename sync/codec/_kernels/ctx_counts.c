/* What a table set is made from and rows are classed by: counts and costs of tokens, by context and by row (sync/codec/model.py). */
#include <stdlib.h>

#include "core.h"
#include "words.h"

static uint8_t group(unsigned token) {
    if (token < 3) return (uint8_t)token;
    if (token < 7) return token & 1 ? 3 : 4;
    if (token < FIRST_EXTRA) return token & 1 ? 5 : 6;
    return 7;
}

const char *ctx_row_histograms(const uint8_t *tokens, const uint8_t *bins, size_t n, uint32_t row, uint32_t bin_count,
                               uint8_t *out) {
    uint8_t groups[256];
    for (unsigned token = 0; token < 256; token++) groups[token] = group(token);
    for (size_t at = 0, left = row; at < n; at++, left--) {
        if (!left) out += (size_t)2 * GROUPS * bin_count, left = row;
        if (bins[at] >= bin_count) return "ctx: a bin beyond those counted";
        uint8_t *cell = out + 2 * (bins[at] * (size_t)GROUPS + groups[tokens[at]]);
        uint16_t count = load16(cell);
        store16(cell, (uint16_t)(count + (count != UINT16_MAX)));
    }
    return NULL;
}

const char *ctx_counts(const uint8_t *tokens, const uint8_t *bins, size_t n, uint32_t row, const uint8_t *row_classes,
                       uint32_t classes, uint32_t bin_count, uint32_t token_count, uint8_t *out) {
    for (size_t at = 0; at < n; row_classes++) {
        size_t end = n - at < row ? n : at + row;
        if (*row_classes > classes) return "ctx: a row class beyond the table set's";
        if (!*row_classes) at = end;
        uint8_t *first = out + (size_t)4 * token_count * bin_count * (*row_classes ? *row_classes - 1u : 0);
        for (; at < end; at++) {
            if (bins[at] >= bin_count || tokens[at] >= token_count) return "ctx: a bin or token beyond those counted";
            uint8_t *cell = first + 4 * (bins[at] * (size_t)token_count + tokens[at]);
            store32(cell, load32(cell) + 1);
        }
    }
    return NULL;
}

/* Costs are u32 [classes * bins][token_count]; they are turned to [bins][token_count][LANES] first, so that one element adds to all
 * classes at once. Sums stop at 2^32 - 1. */
const char *ctx_row_costs(const uint8_t *tokens, const uint8_t *bins, size_t n, uint32_t row, const uint8_t *costs,
                          uint32_t classes, uint32_t bin_count, uint32_t token_count, uint8_t *out) {
    enum { LANES = 8 };
    size_t cells = (size_t)bin_count * token_count, groups = (classes + LANES - 1) / LANES;
    uint32_t *turned = calloc(cells * LANES, 4);
    if (!turned) return "ctx: no memory for costs";
    for (size_t at = 0; at < n; at++)
        if (bins[at] >= bin_count || tokens[at] >= token_count) {
            free(turned);
            return "ctx: a bin or token beyond those with costs";
        }
    for (size_t one = 0; one < groups; one++) {
        uint32_t first = (uint32_t)one * LANES, count = classes - first < LANES ? classes - first : LANES;
        for (uint32_t lane = 0; lane < count; lane++)
            for (size_t cell = 0; cell < cells; cell++)
                turned[cell * LANES + lane] = load32(costs + 4 * ((first + lane) * cells + cell));
        uint8_t *to = out + 4 * (size_t)first;
        for (size_t at = 0; at < n; to += 4 * (size_t)classes) {
            size_t end = n - at < row ? n : at + row;
            uint64_t sums[LANES] = {0};
            for (; at < end; at++) {
                const uint32_t *cell = turned + (bins[at] * (size_t)token_count + tokens[at]) * LANES;
                for (unsigned lane = 0; lane < LANES; lane++) sums[lane] += cell[lane];
            }
            for (uint32_t lane = 0; lane < count; lane++)
                store32(to + 4 * lane, sums[lane] < UINT32_MAX ? (uint32_t)sums[lane] : UINT32_MAX);
        }
    }
    free(turned);
    return NULL;
}
