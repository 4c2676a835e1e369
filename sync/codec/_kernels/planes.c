/* Byte planes of words and of differences, and the sparse list of differences. */
#include "core.h"
#include "words.h"

enum { BLOCK = 1024 };

const char *kind_problem(unsigned width, unsigned mantissa) {
    switch (width << 8 | mantissa) {
    case 0x100: case 0x102: case 0x103: case 0x200: case 0x207: case 0x20A: case 0x400: case 0x417: case 0x800: case 0x834:
        return width < 256 ? NULL : "elements of this width and mantissa are not known";
    default:
        return "elements of this width and mantissa are not known";
    }
}

#define DEFINE(T, name)                                                                                                         \
    static void split_##name(const T *words, size_t count, uint8_t *planes, size_t n) {                                         \
        for (unsigned plane = 0; plane < sizeof(T); plane++) {                                                                  \
            uint8_t *restrict out = planes + plane * n;                                                                         \
            for (size_t i = 0; i < count; i++) out[i] = (uint8_t)(words[i] >> (8 * plane));                                     \
        }                                                                                                                       \
    }                                                                                                                           \
    static void join_##name(const uint8_t *planes, size_t n, size_t count, T *restrict words) {                                 \
        for (size_t i = 0; i < count; i++) words[i] = planes[i];                                                                \
        for (unsigned plane = 1; plane < sizeof(T); plane++) {                                                                  \
            const uint8_t *in = planes + plane * n;                                                                             \
            for (size_t i = 0; i < count; i++) words[i] = (T)(words[i] | (T)((T)in[i] << (8 * plane)));                         \
        }                                                                                                                       \
    }                                                                                                                           \
    static void to_##name(const uint8_t *raw, size_t n, uint8_t *planes) {                                                      \
        T words[BLOCK];                                                                                                         \
        for (size_t at = 0; at < n; at += BLOCK) {                                                                              \
            size_t count = n - at < BLOCK ? n - at : BLOCK;                                                                     \
            memcpy(words, raw + at * sizeof(T), count * sizeof(T));                                                             \
            split_##name(words, count, planes + at, n);                                                                         \
        }                                                                                                                       \
    }                                                                                                                           \
    static void from_##name(const uint8_t *planes, size_t n, uint8_t *raw) {                                                    \
        T words[BLOCK];                                                                                                         \
        for (size_t at = 0; at < n; at += BLOCK) {                                                                              \
            size_t count = n - at < BLOCK ? n - at : BLOCK;                                                                     \
            join_##name(planes + at, n, count, words);                                                                          \
            memcpy(raw + at * sizeof(T), words, count * sizeof(T));                                                             \
        }                                                                                                                       \
    }                                                                                                                           \
    static void diff_##name(const uint8_t *fresh, const uint8_t *base, size_t n, T flip, uint8_t *planes) {                     \
        T news[BLOCK], olds[BLOCK];                                                                                             \
        for (size_t at = 0; at < n; at += BLOCK) {                                                                              \
            size_t count = n - at < BLOCK ? n - at : BLOCK;                                                                     \
            memcpy(news, fresh + at * sizeof(T), count * sizeof(T));                                                            \
            memcpy(olds, base + at * sizeof(T), count * sizeof(T));                                                             \
            for (size_t i = 0; i < count; i++) {                                                                                \
                T step = (T)(MONOTONE(T, news[i], flip) - MONOTONE(T, olds[i], flip));                                          \
                news[i] = ZIGZAG(T, step);                                                                                      \
            }                                                                                                                   \
            split_##name(news, count, planes + at, n);                                                                          \
        }                                                                                                                       \
    }                                                                                                                           \
    static void undo_##name(const uint8_t *planes, const uint8_t *base, size_t n, T flip, uint8_t *raw) {                       \
        T words[BLOCK], olds[BLOCK];                                                                                            \
        for (size_t at = 0; at < n; at += BLOCK) {                                                                              \
            size_t count = n - at < BLOCK ? n - at : BLOCK;                                                                     \
            join_##name(planes + at, n, count, words);                                                                          \
            memcpy(olds, base + at * sizeof(T), count * sizeof(T));                                                             \
            for (size_t i = 0; i < count; i++) {                                                                                \
                T moved = (T)(MONOTONE(T, olds[i], flip) + UNZIGZAG(T, words[i]));                                              \
                words[i] = MONOTONE(T, moved, flip);                                                                            \
            }                                                                                                                   \
            memcpy(raw + at * sizeof(T), words, count * sizeof(T));                                                             \
        }                                                                                                                       \
    }                                                                                                                           \
    static uint8_t *gather_##name(const uint8_t *fresh, const uint8_t *base, size_t n, T flip, uint8_t *gap, size_t planes_at,  \
                                  size_t changed) {                                                                             \
        uint8_t *planes = gap + planes_at;                                                                                      \
        size_t before = 0;                                                                                                      \
        for (size_t i = 0, at; (at = equal_run(fresh, base, before, n, sizeof(T))) < n; i++, before = at + 1) {                 \
            size_t distance = at - before;                                                                                      \
            for (; distance >= 255; distance -= 255) *gap++ = 255;                                                              \
            *gap++ = (uint8_t)distance;                                                                                         \
            T new_word, old_word;                                                                                               \
            memcpy(&new_word, fresh + at * sizeof(T), sizeof(T));                                                               \
            memcpy(&old_word, base + at * sizeof(T), sizeof(T));                                                                \
            T step = (T)(MONOTONE(T, new_word, flip) - MONOTONE(T, old_word, flip));                                            \
            T folded = ZIGZAG(T, step);                                                                                         \
            for (unsigned plane = 0; plane < sizeof(T); plane++) planes[plane * changed + i] = (uint8_t)(folded >> (8 * plane)); \
        }                                                                                                                       \
        return gap;                                                                                                             \
    }                                                                                                                           \
    static const char *apply_##name(const uint8_t *gap, const uint8_t *planes, size_t changed, T flip, size_t n, uint8_t *raw) { \
        size_t at = 0;                                                                                                          \
        for (size_t i = 0; i < changed; i++, at++) {                                                                            \
            uint8_t byte;                                                                                                       \
            do {                                                                                                                \
                if (gap == planes) return "sparse: fewer gaps than elements";                                                   \
                byte = *gap++;                                                                                                  \
                at += byte;                                                                                                     \
            } while (byte == 255);                                                                                              \
            if (at >= n) return "sparse: a position beyond the last element";                                                   \
            T folded = 0, old_word;                                                                                             \
            for (unsigned plane = 0; plane < sizeof(T); plane++) folded = (T)(folded | (T)((T)planes[plane * changed + i] << (8 * plane))); \
            memcpy(&old_word, raw + at * sizeof(T), sizeof(T));                                                                 \
            T moved = (T)(MONOTONE(T, old_word, flip) + UNZIGZAG(T, folded));                                                   \
            moved = MONOTONE(T, moved, flip);                                                                                   \
            memcpy(raw + at * sizeof(T), &moved, sizeof(T));                                                                    \
        }                                                                                                                       \
        return gap == planes ? NULL : "sparse: more gaps than elements";                                                        \
    }

DEFINE(uint8_t, u8)
DEFINE(uint16_t, u16)
DEFINE(uint32_t, u32)
DEFINE(uint64_t, u64)

void to_planes(unsigned width, const uint8_t *raw, size_t n, uint8_t *planes) {
    switch (width) {
    case 1: to_u8(raw, n, planes); break;
    case 2: to_u16(raw, n, planes); break;
    case 4: to_u32(raw, n, planes); break;
    case 8: to_u64(raw, n, planes); break;
    }
}

void from_planes(unsigned width, const uint8_t *planes, size_t n, uint8_t *raw) {
    switch (width) {
    case 1: from_u8(planes, n, raw); break;
    case 2: from_u16(planes, n, raw); break;
    case 4: from_u32(planes, n, raw); break;
    case 8: from_u64(planes, n, raw); break;
    }
}

void planes_diff(unsigned width, unsigned mantissa, const uint8_t *fresh, const uint8_t *base, size_t n, uint8_t *planes) {
    switch (width) {
    case 1: diff_u8(fresh, base, n, FLIP(uint8_t, mantissa), planes); break;
    case 2: diff_u16(fresh, base, n, FLIP(uint16_t, mantissa), planes); break;
    case 4: diff_u32(fresh, base, n, FLIP(uint32_t, mantissa), planes); break;
    case 8: diff_u64(fresh, base, n, FLIP(uint64_t, mantissa), planes); break;
    }
}

void planes_undo(unsigned width, unsigned mantissa, const uint8_t *planes, const uint8_t *base, size_t n, uint8_t *raw) {
    switch (width) {
    case 1: undo_u8(planes, base, n, FLIP(uint8_t, mantissa), raw); break;
    case 2: undo_u16(planes, base, n, FLIP(uint16_t, mantissa), raw); break;
    case 4: undo_u32(planes, base, n, FLIP(uint32_t, mantissa), raw); break;
    case 8: undo_u64(planes, base, n, FLIP(uint64_t, mantissa), raw); break;
    }
}

/* Gap bytes and changed elements, counted up to what is still shorter than raw. */
static int sparse_count(unsigned width, const uint8_t *fresh, const uint8_t *base, size_t n, size_t *changed, size_t *gaps) {
    size_t before = 0;
    *changed = *gaps = 0;
    for (size_t at; (at = equal_run(fresh, base, before, n, width)) < n; before = at + 1) {
        *gaps += (at - before) / 255 + 1;
        *changed += 1;
        if (8 + *gaps + *changed * width >= n * width) return 0;
    }
    return 8 < n * width;
}

size_t sparse_size(unsigned width, const uint8_t *fresh, const uint8_t *base, size_t n) {
    size_t changed, gaps;
    return sparse_count(width, fresh, base, n, &changed, &gaps) ? 8 + gaps + changed * width : 0;
}

void sparse_gather(unsigned width, unsigned mantissa, const uint8_t *fresh, const uint8_t *base, size_t n, uint8_t *content) {
    size_t changed, gaps;
    if (!sparse_count(width, fresh, base, n, &changed, &gaps)) return;
    store32(content, (uint32_t)changed);
    store32(content + 4, (uint32_t)gaps);
    switch (width) {
    case 1: gather_u8(fresh, base, n, FLIP(uint8_t, mantissa), content + 8, gaps, changed); break;
    case 2: gather_u16(fresh, base, n, FLIP(uint16_t, mantissa), content + 8, gaps, changed); break;
    case 4: gather_u32(fresh, base, n, FLIP(uint32_t, mantissa), content + 8, gaps, changed); break;
    case 8: gather_u64(fresh, base, n, FLIP(uint64_t, mantissa), content + 8, gaps, changed); break;
    }
}

const char *sparse_apply(unsigned width, unsigned mantissa, const uint8_t *content, size_t length, const uint8_t *base,
                         size_t n, uint8_t *raw) {
    if (length < 8) return "sparse: content of less than 8 bytes";
    size_t changed = load32(content), gaps = load32(content + 4);
    if (length > n * width + 8) return "sparse: content longer than the slab";
    if ((uint64_t)gaps + (uint64_t)changed * width != length - 8) return "sparse: counts do not give the content's length";
    const uint8_t *gap = content + 8, *planes = gap + gaps;
    memcpy(raw, base, n * width);
    switch (width) {
    case 1: return apply_u8(gap, planes, changed, FLIP(uint8_t, mantissa), n, raw);
    case 2: return apply_u16(gap, planes, changed, FLIP(uint16_t, mantissa), n, raw);
    case 4: return apply_u32(gap, planes, changed, FLIP(uint32_t, mantissa), n, raw);
    case 8: return apply_u64(gap, planes, changed, FLIP(uint64_t, mantissa), n, raw);
    }
    return "elements of this width are not known";
}
