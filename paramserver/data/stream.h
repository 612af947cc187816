/* Copies memory with stores that pass by the caches, and digests it on the way.

An ordinary store reads its cache line from memory before it writes it: a copy of what no cache holds moves three bytes
for each. glibc's memcpy uses streaming stores, too, but only in one call of about a third of what the processor reports of
its last-level cache, 190 MiB on some hosts; tensors are smaller. Its trick is here as well: pages are written side by side,
since one after the other leaves most of the memory's banks idle. It takes four; two are better into huge pages, by a tenth,
and worse into small ones by a thirtieth.

A copy waits for memory, a digest for arithmetic. Here both go on at once: while two pages are copied, the two before
them, which are still in the core's first cache, are digested. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#define LAMINAR_STREAM 1
#define VECTOR __attribute__((target("avx2"))) /* check `has_stream` first */
#define INLINE static inline __attribute__((always_inline, target("avx2")))

enum { LINE = 64, PAGE = 4096, PAGES = 2, GROUP = PAGES * PAGE, AHEAD = 512 };

/* ---- the digest: xxh3_128 of more than 240 bytes, as github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md has it */

enum { STRIPE = 64, STRIPES = 16, SECRET = 192, SHORT = 240 };

static const uint8_t secret[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static const uint64_t PRIME32_1 = 0x9E3779B1, PRIME32_2 = 0x85EBCA77, PRIME32_3 = 0xC2B2AE3D;
static const uint64_t PRIME64_1 = 0x9E3779B185EBCA87, PRIME64_2 = 0xC2B2AE3D27D4EB4F, PRIME64_3 = 0x165667B19E3779F9,
                      PRIME64_4 = 0x85EBCA77C2B2AE63, PRIME64_5 = 0x27D4EB2F165667C5, MIX = 0x165667919E3779F9;

typedef struct {
    __m256i low, high; /* eight lanes of 64 bits */
    size_t num;        /* stripes that were taken in */
} Lanes;

INLINE __m256i load(const void *from) { return _mm256_loadu_si256((const __m256i *)from); }

INLINE __m256i accumulate(__m256i lanes, __m256i data, const uint8_t *key) {
    __m256i mixed = _mm256_xor_si256(data, load(key));
    __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
    __m256i neighbours = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(lanes, _mm256_add_epi64(product, neighbours));
}

INLINE __m256i scramble(__m256i lanes, const uint8_t *key) {
    __m256i prime = _mm256_set1_epi64x((long long)PRIME32_1);
    lanes = _mm256_xor_si256(_mm256_xor_si256(lanes, _mm256_srli_epi64(lanes, 47)), load(key));
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(lanes, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(lanes, prime), _mm256_slli_epi64(high, 32));
}

INLINE Lanes take_stripe(Lanes lanes, const char *from) {
    const uint8_t *key = secret + 8 * (lanes.num++ % STRIPES);
    lanes.low = accumulate(lanes.low, load(from), key);
    lanes.high = accumulate(lanes.high, load(from + 32), key + 32);
    if (lanes.num % STRIPES == 0) {
        lanes.low = scramble(lanes.low, secret + SECRET - STRIPE);
        lanes.high = scramble(lanes.high, secret + SECRET - STRIPE + 32);
    }
    return lanes;
}

INLINE Lanes take_stripes(Lanes lanes, const char *from, size_t end) {
    for (; lanes.num < end; from += STRIPE)
        lanes = take_stripe(lanes, from);
    return lanes;
}

static inline uint64_t word(const void *from) {
    uint64_t found;
    memcpy(&found, from, sizeof found);
    return found;
}

static inline uint64_t fold(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t merge(const uint64_t lanes[8], const uint8_t *key, uint64_t merged) {
    for (int pair = 0; pair < 8; pair += 2)
        merged += fold(lanes[pair] ^ word(key + 8 * pair), lanes[pair + 1] ^ word(key + 8 * pair + 8));
    merged = (merged ^ merged >> 37) * MIX;
    return merged ^ merged >> 32;
}

static void write_big_endian(uint8_t *to, uint64_t number) {
    for (int byte = 0; byte < 8; byte++)
        to[byte] = (uint8_t)(number >> (56 - 8 * byte));
}

/* ---- the copy */

INLINE void copy_line(char *to, const char *from) {
    __m256i low = load(from), high = load(from + 32);
    _mm256_stream_si256((__m256i *)to, low);
    _mm256_stream_si256((__m256i *)(to + 32), high);
}

/* Copies GROUP bytes, and takes in as many from `behind` meanwhile, unless that is null. */
INLINE Lanes copy_group(Lanes lanes, char *to, const char *from, const char *behind) {
    for (size_t at = 0; at < PAGE; at += 2 * LINE) {
        for (size_t page = 0; page < GROUP; page += PAGE) { /* a prefetch beyond the end faults nowhere */
            _mm_prefetch(from + page + at + AHEAD, _MM_HINT_T0);
            _mm_prefetch(from + page + at + AHEAD + LINE, _MM_HINT_T0);
        }
        for (size_t page = 0; page < GROUP; page += PAGE) {
            copy_line(to + page + at, from + page + at);
            copy_line(to + page + at + LINE, from + page + at + LINE);
            for (int stripe = 0; behind != NULL && stripe < 2; stripe++, behind += STRIPE)
                lanes = take_stripe(lanes, behind);
        }
    }
    return lanes;
}

/* Copies whole lines and takes them in, but for the stripes from `end` on. */
INLINE Lanes copy_lines(Lanes lanes, char *to, const char *from, size_t size, size_t end) {
    const char *behind = from;
    if (size >= 2 * GROUP) {
        lanes = copy_group(lanes, to, from, NULL);
        for (to += GROUP, from += GROUP, size -= GROUP; size >= GROUP; to += GROUP, from += GROUP, size -= GROUP) {
            lanes = copy_group(lanes, to, from, behind);
            behind += GROUP;
        }
    }
    for (; size >= LINE; to += LINE, from += LINE, size -= LINE) {
        _mm_prefetch(from + AHEAD, _MM_HINT_T0);
        copy_line(to, from);
        if (behind < from && lanes.num < end) {
            lanes = take_stripe(lanes, behind);
            behind += STRIPE;
        }
    }
    size_t left = (size_t)(from - behind) / STRIPE;
    return take_stripes(lanes, behind, lanes.num + left < end ? lanes.num + left : end);
}

static inline int has_stream(void) { return __builtin_cpu_supports("avx2"); }

/* ---- a chunk of `total` bytes, more than SHORT, that lies or comes to `to`, which begins a line of the cache */

/* The stripes of a chunk that its lanes take in one by one. The last one is taken in otherwise, even if it is whole. */
static inline size_t num_stripes(size_t total) { return (total - 1) / STRIPE; }

INLINE Lanes no_stripe(void) {
    Lanes lanes = {
        _mm256_set_epi64x((long long)PRIME64_3, (long long)PRIME64_2, (long long)PRIME64_1, (long long)PRIME32_3),
        _mm256_set_epi64x((long long)PRIME32_1, (long long)PRIME64_5, (long long)PRIME32_2, (long long)PRIME64_4), 0};
    return lanes;
}

/* Copies the chunk's bytes from `at` on to `to + at`, and takes in every stripe that is whole then. `end`: num_stripes. */
INLINE Lanes copy_piece(Lanes lanes, char *to, size_t at, const char *from, size_t size, size_t end) {
    size_t head = (LINE - at % LINE) % LINE;
    if (head > size)
        head = size;
    memcpy(to + at, from, head);
    at += head, from += head, size -= head;
    if (lanes.num < end && lanes.num < at / STRIPE) /* one that began in an earlier piece: whole only here */
        lanes = take_stripe(lanes, to + at - STRIPE);
    size_t lines = size - size % LINE;
    lanes = copy_lines(lanes, to + at, from, lines, end);
    memcpy(to + at + lines, from + lines, size - lines);
    return lanes;
}

/* Writes the digest of a chunk that lies at `to`, whose stripes are all taken in. */
INLINE void write_digest(Lanes lanes, const char *to, size_t total, uint8_t *digest) {
    const uint8_t *key = secret + SECRET - STRIPE - 7;
    lanes.low = accumulate(lanes.low, load(to + total - STRIPE), key);
    lanes.high = accumulate(lanes.high, load(to + total - 32), key + 32);
    uint64_t all[8];
    _mm256_storeu_si256((__m256i *)all, lanes.low);
    _mm256_storeu_si256((__m256i *)(all + 4), lanes.high);
    write_big_endian(digest, merge(all, secret + SECRET - STRIPE - 11, ~(total * PRIME64_2)));
    write_big_endian(digest + 8, merge(all, secret + 11, total * PRIME64_1));
}

#endif
