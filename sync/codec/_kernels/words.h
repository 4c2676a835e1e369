/* Elements as integers: unaligned little-endian loads, the order-preserving mapping of floats, zigzag (docs/formats/slab.md, "Words"). */
#ifndef OUTRIDER_WORDS_H
#define OUTRIDER_WORDS_H

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

INLINE uint16_t load16(const uint8_t *at) {
    uint16_t word;
    memcpy(&word, at, 2);
    return word;
}

INLINE uint32_t load32(const uint8_t *at) {
    uint32_t word;
    memcpy(&word, at, 4);
    return word;
}

INLINE uint64_t load64(const uint8_t *at) {
    uint64_t word;
    memcpy(&word, at, 8);
    return word;
}

INLINE void store16(uint8_t *at, uint16_t word) { memcpy(at, &word, 2); }
INLINE void store32(uint8_t *at, uint32_t word) { memcpy(at, &word, 4); }

/* All ones where the top bit is set, in the word's own type. */
#define SIGN(T, word) ((T)(0 - (T)((T)(word) >> (8 * sizeof(T) - 1))))
/* `flip`: the bits below the top one for floats, 0 for integers. Its own inverse. */
#define MONOTONE(T, word, flip) ((T)((word) ^ (SIGN(T, word) & (flip))))
#define FLIP(T, mantissa) ((T)((mantissa) ? (T) ~(T)0 >> 1 : 0))
#define ZIGZAG(T, step) ((T)((T)((T)(step) << 1) ^ SIGN(T, step)))
#define UNZIGZAG(T, folded) ((T)((T)((T)(folded) >> 1) ^ (T)(0 - (T)((folded) & 1))))

/* The number of bytes equal at the start of two runs, in steps of `width`: elements before the first that differs. */
INLINE size_t equal_run(const uint8_t *left, const uint8_t *right, size_t at, size_t n, unsigned width) {
    size_t byte = at * width, end = n * width;
    while (end - byte >= 8) {
        uint64_t other = load64(left + byte) ^ load64(right + byte);
        if (other) return (byte + (unsigned)__builtin_ctzll(other) / 8) / width;
        byte += 8;
    }
    while (byte < end && left[byte] == right[byte]) byte++;
    return byte / width;
}

/* Whether any of 8 tokens (each below 128) has extra bits. */
INLINE int any_extra(const uint8_t *tokens) {
    return ((load64(tokens) + 0x6969696969696969u) & 0x8080808080808080u) != 0; /* 0x69 = 128 - FIRST_EXTRA */
}

/* What the context's bin is looked up with: the exponent field of floats, the whole byte of integers. */
#define FIELD(word, mantissa, mask) ((uint8_t)(((word) >> (mantissa)) & (mask)))

INLINE uint32_t field_mask(unsigned width, unsigned mantissa) {
    return mantissa ? (1u << (8 * width - 1 - mantissa)) - 1 : 0xFF;
}

#endif
