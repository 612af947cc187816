/* Copies chunks into a publisher's version, as stream.h does it. */

#include "stream.h"

#ifdef LAMINAR_STREAM

/* Copies the pieces, one after the other, to `to`, and writes the digest of them all. */
INLINE void copy_chunk(char *to, const char *const *pieces, const size_t *sizes, size_t num, size_t total, uint8_t *digest) {
    Lanes lanes = no_stripe();
    size_t at = 0;
    for (size_t piece = 0; piece < num; at += sizes[piece++])
        lanes = copy_piece(lanes, to, at, pieces[piece], sizes[piece], num_stripes(total));
    _mm_sfence(); /* streaming stores are ordered by nothing else */
    write_digest(lanes, to, total, digest);
}

/* Copies chunks to `to`, one after the other, each from as many of the pieces as `counts` has, and writes a digest of 16
bytes for each. Returns 0 where it cannot: for a processor without AVX2, a chunk of few bytes, or one that would begin
within a cache line. Target and pieces do not overlap. When it returns every byte is visible to any thread or process that
sees something written after it. */
VECTOR int laminar_copy_digest(char *to, const char *const *pieces, const size_t *sizes, const size_t *counts,
                               size_t num_chunks, uint8_t *digests) {
    if (!has_stream())
        return 0;
    for (size_t chunk = 0; chunk < num_chunks; chunk++) {
        size_t total = 0;
        for (size_t piece = 0; piece < counts[chunk]; piece++)
            total += sizes[piece];
        if (total <= SHORT || (uintptr_t)to % LINE != 0)
            return 0;
        copy_chunk(to, pieces, sizes, counts[chunk], total, digests);
        to += total, pieces += counts[chunk], sizes += counts[chunk], digests += 16;
    }
    return 1;
}

#else

int laminar_copy_digest(char *to, const char *const *pieces, const size_t *sizes, const size_t *counts, size_t num_chunks,
                        uint8_t *digests) {
    return 0;
}

#endif
