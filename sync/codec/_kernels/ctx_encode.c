/* Encoding of the `ctx` form (docs/formats/slab.md): tokens, then rANS from the last one to the first. Input is the publisher's own. */
#include <stdlib.h>

#include "core.h"
#include "words.h"

enum { LOW = 1 << 16, BLOCK = 1024 };

typedef struct {
    uint8_t *at; /* the byte that `held` goes to */
    uint64_t held;
    unsigned count; /* bits in `held`, below 8 between calls */
} bit_writer;

static void put_bits(bit_writer *to, uint32_t value, unsigned count) {
    to->held |= (uint64_t)value << to->count;
    to->count += count;
    for (; to->count >= 8; to->count -= 8, to->held >>= 8) *to->at++ = (uint8_t)to->held;
}

/* Tokens of a block, then (in a second look at the few that have them) extra bits, where `extra` is given. */
#define DEFINE(T, name)                                                                                               \
    static void tokens_##name(const uint8_t *fresh, const uint8_t *base, size_t n, T flip, uint8_t *tokens,           \
                              bit_writer *extra) {                                                                    \
        T steps[BLOCK];                                                                                               \
        for (size_t i = 0; i < n; i++) {                                                                              \
            T old_word, new_word;                                                                                     \
            memcpy(&old_word, base + i * sizeof(T), sizeof(T));                                                       \
            memcpy(&new_word, fresh + i * sizeof(T), sizeof(T));                                                      \
            T sign = SIGN(T, old_word), step = (T)(MONOTONE(T, new_word, flip) - (T)(old_word ^ (sign & flip)));      \
            steps[i] = (T)((T)(step ^ sign) - sign);                                                                  \
        }                                                                                                             \
        for (size_t i = 0; i < n; i++) {                                                                              \
            T sign = SIGN(T, steps[i]), m = (T)((T)(steps[i] ^ sign) - sign);                                         \
            m = m < 12 ? m : 12;                                                                                      \
            tokens[i] = (uint8_t)(2 * m - (m && !sign));                                                              \
        }                                                                                                             \
        for (size_t i = 0; i < n; i++) {                                                                              \
            if (n - i >= 8 && !any_extra(tokens + i)) {                                                               \
                i += 7;                                                                                               \
                continue;                                                                                             \
            }                                                                                                         \
            if (tokens[i] < FIRST_EXTRA) continue;                                                                    \
            T sign = SIGN(T, steps[i]), m = (T)((T)(steps[i] ^ sign) - sign);                                         \
            uint32_t above = (uint32_t)m - 12, k = 31 - (uint32_t)__builtin_clz(above / 4 + 1);                       \
            tokens[i] = (uint8_t)(2 * (12 + k) - !sign);                                                              \
            if (extra) put_bits(extra, above - 4 * ((1u << k) - 1), k + 2);                                           \
        }                                                                                                             \
    }                                                                                                                 \
    static void bins_##name(const uint8_t *base, size_t n, unsigned mantissa, const uint8_t *bin_map, uint8_t *bins) { \
        uint32_t mask = field_mask(sizeof(T), mantissa);                                                              \
        for (size_t i = 0; i < n; i++) {                                                                              \
            T word;                                                                                                   \
            memcpy(&word, base + i * sizeof(T), sizeof(T));                                                           \
            bins[i] = bin_map[FIELD(word, mantissa, mask)];                                                           \
        }                                                                                                             \
    }

DEFINE(uint8_t, u8)
DEFINE(uint16_t, u16)
DEFINE(uint32_t, u32)

/* n is at most BLOCK. */
static void block(unsigned width, unsigned mantissa, const uint8_t *bin_map, const uint8_t *fresh, const uint8_t *base,
                  size_t n, uint8_t *tokens, uint8_t *bins, bit_writer *extra) {
    if (width == 1) {
        tokens_u8(fresh, base, n, FLIP(uint8_t, mantissa), tokens, extra);
        bins_u8(base, n, mantissa, bin_map, bins);
    } else if (width == 2) {
        tokens_u16(fresh, base, n, FLIP(uint16_t, mantissa), tokens, extra);
        bins_u16(base, n, mantissa, bin_map, bins);
    } else {
        tokens_u32(fresh, base, n, FLIP(uint32_t, mantissa), tokens, extra);
        bins_u32(base, n, mantissa, bin_map, bins);
    }
}

void ctx_tokens(unsigned width, unsigned mantissa, const uint8_t *bin_map, const uint8_t *fresh, const uint8_t *base,
                size_t n, uint8_t *tokens, uint8_t *bins) {
    for (size_t at = 0; at < n; at += BLOCK) {
        size_t count = n - at < BLOCK ? n - at : BLOCK;
        block(width, mantissa, bin_map, fresh + at * width, base + at * width, count, tokens + at, bins + at, NULL);
    }
}

/* One symbol into state `x`; words go down from `*word`. Returns 0 where its frequency is 0. */
INLINE int put_symbol(uint32_t *x, uint32_t range, uint8_t **word) {
    uint32_t frequency = range >> 16, state = *x;
    if (!frequency) return 0;
    if (state >= (uint64_t)frequency << (32 - SCALE_BITS)) {
        *word -= 2;
        store16(*word, (uint16_t)state);
        state >>= 16;
    }
    *x = (state / frequency << SCALE_BITS) + state % frequency + (range & 0xFFFF);
    return 1;
}

typedef struct {
    uint8_t *tokens, *contexts, *words, *extra; /* words: of tokens and classes */
} workspace;

static const char *collect(const layout *as, const tables *with, const uint8_t *row_classes, const uint8_t *fresh,
                           const uint8_t *base, size_t n, const workspace *work, size_t *active, bit_writer *extra) {
    uint8_t bins[BLOCK];
    for (size_t at = 0; at < n; row_classes++) {
        size_t end = n - at < as->row ? n : at + as->row;
        if (*row_classes > with->classes) return "ctx: a row class beyond the table set's";
        if (!*row_classes) {
            if (memcmp(base + at * as->width, fresh + at * as->width, (end - at) * as->width)) return "ctx: a row of class 0 that changed";
            at = end;
        }
        while (at < end) {
            size_t count = end - at < BLOCK ? end - at : BLOCK;
            block(as->width, as->mantissa, as->bin_map, fresh + at * as->width, base + at * as->width, count,
                  work->tokens + *active, bins, extra);
            for (size_t i = 0; i < count; i++)
                store16(work->contexts + 2 * (*active + i), (uint16_t)((*row_classes - 1u) * with->bins + bins[i]));
            *active += count, at += count;
        }
    }
    return NULL;
}

/* The payload, from the last symbol to the first. Returns 0 where a frequency is 0. */
static int write_payload(const tables *with, unsigned lanes_log2, const uint8_t *row_classes, size_t rows, size_t active,
                         const workspace *work, const bit_writer *extra, encoding *made) {
    uint32_t lanes[1 << MAX_LANES_LOG2], count = 1u << lanes_log2;
    uint8_t *word_end = work->words + 2 * (active + rows), *word = word_end;
    for (uint32_t lane = 0; lane < count; lane++) lanes[lane] = LOW;
    for (size_t j = active; j-- > 0;) {
        size_t context = load16(work->contexts + 2 * j);
        uint8_t token = work->tokens[j];
        if (token >= with->tokens) return 0;
        if (!put_symbol(&lanes[j & (count - 1)], with->token_ranges[context * with->tokens + token], &word)) return 0;
    }
    for (size_t row = rows; row-- > 0;) {
        size_t before = row ? row_classes[row - 1] : 0;
        if (!put_symbol(&lanes[0], with->class_ranges[before * (with->classes + 1) + row_classes[row]], &word)) return 0;
    }
    size_t word_bytes = (size_t)(word_end - word), extra_bytes = (size_t)(extra->at - work->extra) + (extra->count > 0);
    if (extra->count) *extra->at = (uint8_t)extra->held;
    made->length = 1 + 4 + 4 * count + word_bytes + extra_bytes;
    uint8_t *to = made->payload = malloc(made->length);
    if (!to) return 0;
    *to++ = (uint8_t)lanes_log2;
    for (size_t left = word_bytes / 2;; left >>= 7) {
        *to++ = (uint8_t)((left & 0x7F) | (left > 0x7F) << 7);
        if (left <= 0x7F) break;
    }
    for (uint32_t lane = 0; lane < count; lane++, to += 4) store32(to, lanes[lane]);
    memcpy(to, word, word_bytes);
    memcpy(to + word_bytes, work->extra, extra_bytes);
    made->length = (size_t)(to + word_bytes + extra_bytes - made->payload);
    return 1;
}

const char *ctx_encode(const layout *as, const tables *with, unsigned lanes_log2, const uint8_t *row_classes,
                       const uint8_t *fresh, const uint8_t *base, size_t raw, encoding *made) {
    size_t n = raw / as->width, rows = (n + as->row - 1) / as->row, active = 0;
    size_t bytes = n + 2 * n + 2 * n + 2 * rows + n * as->width + 16; /* a token has at most 8 x width - 2 extra bits */
    made->payload = NULL, made->length = 0;
    if (lanes_log2 > MAX_LANES_LOG2) return "ctx: more than 16 lanes";
    uint8_t *held = malloc(bytes);
    if (!held) return "ctx: no memory to encode with";
    workspace work = {held, held + n, held + 3 * n, held + 5 * n + 2 * rows};
    bit_writer extra = {work.extra, 0, 0};
    const char *problem = collect(as, with, row_classes, fresh, base, n, &work, &active, &extra);
    if (!problem && !write_payload(with, lanes_log2, row_classes, rows, active, &work, &extra, made) && made->length)
        problem = "ctx: no memory for the payload";
    free(held);
    return problem;
}
