/* A table set made ready for coding: the symbol of every slot, and each symbol's range (docs/formats/slab.md, "Table set"). */
#include "core.h"
#include "words.h"

const char *tables_problem(uint32_t classes, uint32_t bins, uint32_t tokens) {
    if (classes < 1 || classes > MAX_CLASSES) return "tables: classes are not within 1..64";
    if (bins < 1 || bins > MAX_BINS) return "tables: bins are not within 1..64";
    if (classes * bins > MAX_CONTEXTS) return "tables: more than 512 contexts";
    if (tokens < 1 || tokens > MAX_TOKENS) return "tables: tokens are not within 1..81";
    return NULL;
}

static size_t rounded(size_t bytes) { return (bytes + 63) & ~(size_t)63; }

size_t tables_bytes(uint32_t classes, uint32_t bins, uint32_t tokens) {
    size_t symbols = classes + 1, contexts = classes * bins;
    return rounded(sizeof(tables)) + rounded(4 * symbols * symbols) + rounded(4 * contexts * tokens) + SCALE * symbols +
           SCALE * contexts + 64;
}

static const char *fill(const uint8_t *frequencies, uint32_t symbols, uint8_t *slots, uint32_t *ranges) {
    uint32_t start = 0;
    for (uint32_t symbol = 0; symbol < symbols; symbol++) {
        uint32_t frequency = load16(frequencies + 2 * symbol);
        if (frequency > SCALE - start) return "tables: frequencies add up to more than 4096";
        ranges[symbol] = frequency << 16 | (start & (SCALE - 1)); /* a start of 4096 belongs to frequency 0 */
        memset(slots + start, (int)symbol, frequency);
        start += frequency;
    }
    return start == SCALE ? NULL : "tables: frequencies add up to less than 4096";
}

const char *tables_fill(void *block, uint32_t classes, uint32_t bins, uint32_t tokens, const uint8_t *class_frequencies,
                        const uint8_t *token_frequencies) {
    uint32_t symbols = classes + 1, contexts = classes * bins;
    uint8_t *free_from = (uint8_t *)block + rounded(sizeof(tables));
    tables *made = block;
    memset(block, 0, tables_bytes(classes, bins, tokens));
    made->classes = classes, made->bins = bins, made->tokens = tokens;
    made->class_ranges = (uint32_t *)free_from, free_from += rounded((size_t)4 * symbols * symbols);
    made->token_ranges = (uint32_t *)free_from, free_from += rounded((size_t)4 * contexts * tokens);
    made->class_slots = free_from, free_from += (size_t)SCALE * symbols;
    made->token_slots = free_from;
    for (uint32_t i = 0; i < symbols; i++) {
        const char *problem = fill(class_frequencies + (size_t)2 * symbols * i, symbols, made->class_slots + (size_t)SCALE * i,
                                   made->class_ranges + (size_t)symbols * i);
        if (problem) return problem;
    }
    for (uint32_t i = 0; i < contexts; i++) {
        const char *problem = fill(token_frequencies + (size_t)2 * tokens * i, tokens, made->token_slots + (size_t)SCALE * i,
                                   made->token_ranges + (size_t)tokens * i);
        if (problem) return problem;
    }
    return NULL;
}
