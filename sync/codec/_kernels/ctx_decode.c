/* Decoding of the `ctx` form (docs/formats/slab.md), by chunks of tokens in three passes over memory that stays in the caches:
 * contexts (they hang on the base and the row's class alone), tokens (rANS over all lanes), steps and new words. */
#include "core.h"
#include "words.h"

enum { LOW = 1 << 16 }; /* a state is never less */

typedef struct {
    const uint8_t *at, *end;
} words16;

typedef struct {
    uint32_t lanes[1 << MAX_LANES_LOG2];
    words16 words;
} token_coder;

typedef struct {
    const uint8_t *bytes;
    uint64_t at, end; /* bits */
} bit_reader;

const char *ctx_kind_problem(unsigned width, unsigned mantissa) {
    const char *problem = kind_problem(width, mantissa);
    if (problem) return problem;
    return width == 8 || (width > 1 && !mantissa) ? "elements of this width and mantissa have no ctx form" : NULL;
}

unsigned max_tokens(unsigned width) { return width == 1 ? 33 : width == 2 ? 49 : 81; }

const char *ctx_layout_problem(const layout *as, const tables *with) {
    const char *problem = ctx_kind_problem(as->width, as->mantissa);
    if (problem) return problem;
    if (!as->row) return "ctx: rows of no elements";
    if (with->tokens > max_tokens(as->width)) return "ctx: tables with more tokens than the width has";
    for (unsigned i = 0; i < 256; i++)
        if (as->bin_map[i] >= with->bins) return "ctx: a bin beyond the table set's";
    return NULL;
}

/* Pass 1. The context of each element: its row class's first one and the bin of its base. */
#define DEFINE_CONTEXTS(T, name)                                                                                      \
    static void contexts_##name(const layout *as, const uint8_t *base, size_t n, uint32_t first, uint16_t *out) {     \
        uint32_t mantissa = as->mantissa, mask = field_mask(sizeof(T), mantissa);                                     \
        const uint8_t *bin_map = as->bin_map;                                                                         \
        for (size_t i = 0; i < n; i++) {                                                                              \
            T word;                                                                                                   \
            memcpy(&word, base + i * sizeof(T), sizeof(T));                                                           \
            out[i] = (uint16_t)(first + bin_map[FIELD(word, mantissa, mask)]);                                        \
        }                                                                                                             \
    }

DEFINE_CONTEXTS(uint8_t, u8)
DEFINE_CONTEXTS(uint16_t, u16)
DEFINE_CONTEXTS(uint32_t, u32)

static void contexts(const layout *as, const uint8_t *base, size_t n, uint32_t first, uint16_t *out) {
    if (as->width == 1) contexts_u8(as, base, n, first, out);
    else if (as->width == 2) contexts_u16(as, base, n, first, out);
    else contexts_u32(as, base, n, first, out);
}

/* One symbol out of state `x`. */
#define SYMBOL(x, slots, ranges, symbol)                                                   \
    do {                                                                                   \
        uint32_t slot = (x) & (SCALE - 1);                                                 \
        symbol = (slots)[slot];                                                            \
        uint32_t range = (ranges)[symbol];                                                 \
        (x) = (range >> 16) * ((x) >> SCALE_BITS) + slot - (range & 0xFFFF);               \
    } while (0)

/* Pass 2. While 2 x L words are left no read can pass their end; then each one is checked. */
INLINE const char *decode_lanes(const unsigned count, const tables *with, token_coder *coder, const uint16_t *at,
                                size_t n, uint8_t *out) {
    const uint8_t *slots = with->token_slots, *word = coder->words.at, *end = coder->words.end;
    const uint32_t *ranges = with->token_ranges;
    const size_t stride = with->tokens;
    uint32_t x[1 << MAX_LANES_LOG2];
    size_t j = 0;
    for (unsigned lane = 0; lane < count; lane++) x[lane] = coder->lanes[lane];
    for (; n - j >= count && (size_t)(end - word) >= 2 * count; j += count) {
#pragma GCC unroll 16
        for (unsigned lane = 0; lane < count; lane++) {
            size_t context = at[j + lane];
            uint8_t symbol;
            SYMBOL(x[lane], slots + (context << SCALE_BITS), ranges + context * stride, symbol);
            out[j + lane] = symbol;
            uint32_t more = x[lane] << 16 | load16(word), low = 0 - (uint32_t)(x[lane] < LOW);
            __asm__("" : "+r"(low)); /* or gcc makes it a branch, which data like this mispredicts */
            x[lane] ^= (x[lane] ^ more) & low;
            word += low & 2;
        }
    }
    for (; j < n; j++) {
        unsigned lane = (unsigned)(j & (count - 1));
        size_t context = at[j];
        uint8_t symbol;
        SYMBOL(x[lane], slots + (context << SCALE_BITS), ranges + context * stride, symbol);
        out[j] = symbol;
        if (x[lane] < LOW) {
            if (word == end) return "ctx: words run out";
            x[lane] = x[lane] << 16 | load16(word);
            word += 2;
        }
    }
    for (unsigned lane = 0; lane < count; lane++) coder->lanes[lane] = x[lane];
    coder->words.at = word;
    return NULL;
}

static const char *decode_tokens(unsigned lanes_log2, const tables *with, token_coder *coder, const uint16_t *at, size_t n,
                                 uint8_t *out) {
    switch (lanes_log2) {
    case 0: return decode_lanes(1, with, coder, at, n, out);
    case 1: return decode_lanes(2, with, coder, at, n, out);
    case 2: return decode_lanes(4, with, coder, at, n, out);
    case 3: return decode_lanes(8, with, coder, at, n, out);
    default: return decode_lanes(16, with, coder, at, n, out);
    }
}

/* `count` (at most 30) bits; 0 beyond the end, which `at` then shows. */
static uint32_t take_bits(bit_reader *from, unsigned count) {
    uint64_t at = from->at, byte = at / 8, left = from->end / 8 - byte, word = 0;
    from->at = at + count;
    if (from->at > from->end) return 0;
    if (left >= 8) word = load64(from->bytes + byte);
    else memcpy(&word, from->bytes + byte, (size_t)left);
    return (uint32_t)(word >> (at & 7)) & ((1u << count) - 1);
}

/* Magnitude of a token with extra bits, or an error where it is beyond what the word holds. */
static const char *large_step(uint8_t token, unsigned width, bit_reader *extra, uint32_t *step) {
    unsigned k = (token + 1u) / 2 - 12, is_up = token & 1;
    uint32_t magnitude = 12 + 4 * ((1u << k) - 1) + take_bits(extra, k + 2), limit = 1u << (8 * width - 1);
    if (extra->at > extra->end) return "ctx: extra bits run out";
    if (magnitude > limit - is_up) return "ctx: a step beyond the width";
    *step = is_up ? magnitude : 0 - magnitude;
    return NULL;
}

/* Pass 3. Steps as the tokens have them, in words of the element's width. */
#define DEFINE_STEPS(T, name)                                                                                         \
    static const char *steps_##name(const uint8_t *tokens, size_t n, bit_reader *extra, T *restrict steps) {          \
        for (size_t i = 0; i < n; i++) {                                                                              \
            uint8_t token = tokens[i], m = (uint8_t)((token + 1) >> 1);                                               \
            T is_down = (T)((token & 1) - 1);                                                                         \
            steps[i] = (T)((T)(m ^ is_down) - is_down);                                                               \
        }                                                                                                             \
        for (size_t i = 0; i < n; i += 8) {                                                                           \
            if (!any_extra(tokens + i)) continue;                                                                     \
            for (size_t j = i; j < i + 8; j++) {                                                                      \
                uint32_t step;                                                                                        \
                if (tokens[j] < FIRST_EXTRA) continue;                                                                \
                const char *problem = large_step(tokens[j], sizeof(T), extra, &step);                                 \
                if (problem) return problem;                                                                          \
                steps[j] = (T)step;                                                                                   \
            }                                                                                                         \
        }                                                                                                             \
        return NULL;                                                                                                  \
    }                                                                                                                 \
    static void move_##name(const uint8_t *base, const T *steps, size_t n, T flip, uint8_t *restrict out) {           \
        for (size_t i = 0; i < n; i++) {                                                                              \
            T word;                                                                                                   \
            memcpy(&word, base + i * sizeof(T), sizeof(T));                                                           \
            T sign = SIGN(T, word), moved = (T)((T)(word ^ (sign & flip)) + (T)((T)(steps[i] ^ sign) - sign));        \
            moved = MONOTONE(T, moved, flip);                                                                         \
            memcpy(out + i * sizeof(T), &moved, sizeof(T));                                                           \
        }                                                                                                             \
    }                                                                                                                 \
    static const char *rebuild_##name(scratch *work, size_t n, const segment *to, size_t segments, T flip,            \
                                      bit_reader *extra, const uint8_t *base, uint8_t *out) {                         \
        T *steps = (T *)(void *)work->steps;                                                                          \
        const char *problem = steps_##name(work->tokens, n, extra, steps);                                            \
        if (problem) return problem;                                                                                  \
        for (size_t i = 0; i < segments; steps += to[i].n, i++) {                                                     \
            size_t at = (size_t)to[i].at * sizeof(T);                                                                 \
            move_##name(base + at, steps, to[i].n, flip, out + at);                                                   \
        }                                                                                                             \
        return NULL;                                                                                                  \
    }

DEFINE_STEPS(uint8_t, u8)
DEFINE_STEPS(uint16_t, u16)
DEFINE_STEPS(uint32_t, u32)

static const char *rebuild(const layout *as, scratch *work, size_t n, size_t segments, bit_reader *extra,
                           const uint8_t *base, uint8_t *out) {
    const segment *to = work->segments;
    memset(work->tokens + n, 0, 8);
    if (as->width == 1) return rebuild_u8(work, n, to, segments, FLIP(uint8_t, as->mantissa), extra, base, out);
    if (as->width == 2) return rebuild_u16(work, n, to, segments, FLIP(uint16_t, as->mantissa), extra, base, out);
    return rebuild_u32(work, n, to, segments, FLIP(uint32_t, as->mantissa), extra, base, out);
}

/* The classes of all rows, by lane 0, which goes on with tokens from there. */
static const char *decode_classes(const tables *with, token_coder *coder, size_t rows, uint8_t *row_classes) {
    uint32_t x = coder->lanes[0];
    const uint8_t *word = coder->words.at;
    uint8_t before = 0;
    for (size_t row = 0; row < rows; row++) {
        const uint8_t *slots = with->class_slots + (size_t)SCALE * before;
        const uint32_t *ranges = with->class_ranges + (size_t)(with->classes + 1) * before;
        SYMBOL(x, slots, ranges, before);
        row_classes[row] = before;
        if (x < LOW) {
            if (word == coder->words.end) return "ctx: words run out";
            x = x << 16 | load16(word);
            word += 2;
        }
    }
    coder->lanes[0] = x, coder->words.at = word;
    return NULL;
}

/* A number below 2^28 in groups of 7 bits; NULL where it is longer, or its last group is an empty one. */
static const uint8_t *read_varint(const uint8_t *at, const uint8_t *end, uint64_t *value) {
    *value = 0;
    for (unsigned shift = 0; at < end && shift < 28; shift += 7) {
        uint8_t byte = *at++;
        *value |= (uint64_t)(byte & 0x7F) << shift;
        if (byte < 0x80) return byte || !shift ? at : NULL;
    }
    return NULL;
}

const char *ctx_decode(const layout *as, const tables *with, const uint8_t *payload, size_t length, const uint8_t *base,
                       size_t raw, scratch *work, uint8_t *out) {
    const uint8_t *end = payload + length;
    if (!length || payload[0] > MAX_LANES_LOG2) return "ctx: no lanes, or more than 16";
    unsigned lanes_log2 = payload[0], count = 1u << lanes_log2;
    uint64_t words;
    const uint8_t *states = read_varint(payload + 1, end, &words);
    if (!states || 4 * (uint64_t)count + 2 * words > (uint64_t)(end - states)) return "ctx: payload shorter than its sections";

    const uint8_t *first = states + 4 * (size_t)count, *rest = first + 2 * words;
    token_coder coder = {.words = {first, rest}};
    bit_reader extra = {rest, 0, 8 * (uint64_t)(end - rest)};
    for (unsigned lane = 0; lane < count; lane++)
        if ((coder.lanes[lane] = load32(states + 4 * lane)) < LOW) return "ctx: a state below 2^16";

    /* Classes wait at the end of the output: it has a byte for each row, and no row reaches the class of a later one. */
    size_t n = raw / as->width, rows = (n + as->row - 1) / as->row, at = 0, left = 0; /* left: of the row that `at` is in */
    const uint8_t *row_classes = out + raw - rows;
    uint8_t row_class = 0;
    const char *bad = decode_classes(with, &coder, rows, out + raw - rows);
    if (bad) return bad;
    while (at < n) {
        size_t filled = 0, segments = 0;
        while (at < n && filled < CHUNK) {
            if (!left) {
                row_class = *row_classes++;
                left = n - at < as->row ? n - at : as->row;
            }
            size_t taken = left;
            if (!row_class) {
                memcpy(out + at * as->width, base + at * as->width, taken * as->width);
            } else {
                if (taken > CHUNK - filled) taken = CHUNK - filled;
                contexts(as, base + at * as->width, taken, (row_class - 1u) * with->bins, work->contexts + filled);
                segment *last = work->segments + (segments ? segments - 1 : 0);
                if (segments && last->at + last->n == at) last->n += (uint32_t)taken;
                else work->segments[segments++] = (segment){(uint32_t)at, (uint32_t)taken};
                filled += taken;
            }
            at += taken, left -= taken;
        }
        const char *problem = decode_tokens(lanes_log2, with, &coder, work->contexts, filled, work->tokens);
        if (!problem) problem = rebuild(as, work, filled, segments, &extra, base, out);
        if (problem) return problem;
    }

    for (unsigned lane = 0; lane < count; lane++)
        if (coder.lanes[lane] != LOW) return "ctx: a coder does not end where it began";
    if (coder.words.at != coder.words.end) return "ctx: words are left over";
    if ((extra.at + 7) / 8 * 8 != extra.end) return "ctx: extra bits are left over";
    if (extra.at & 7 && rest[extra.at / 8] >> (extra.at & 7)) return "ctx: extra bits are filled up with ones";
    return NULL;
}
