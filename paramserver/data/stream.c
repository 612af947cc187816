/* Copies memory with stores that pass by the caches.

An ordinary store reads its cache line from memory before it writes it: a copy of what no cache holds moves three bytes
for each. glibc's memcpy uses streaming stores, too, but only in one call of about a third of what the processor says of
its last-level cache, 190 MiB on some hosts; tensors are smaller. Its trick is here as well: four pages are written side
by side, since one page after the other leaves most of the memory's banks idle. SSE2 is enough (every x86-64 has it; wider
registers gained nothing). */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>

enum { LINE = 64, PAGE = 4096, PAGES = 4, AHEAD = 512 };

static inline void copy_line(char *to, const char *from) {
    __m128i a = _mm_loadu_si128((const __m128i *)from), b = _mm_loadu_si128((const __m128i *)(from + 16));
    __m128i c = _mm_loadu_si128((const __m128i *)(from + 32)), d = _mm_loadu_si128((const __m128i *)(from + 48));
    _mm_stream_si128((__m128i *)to, a);
    _mm_stream_si128((__m128i *)(to + 16), b);
    _mm_stream_si128((__m128i *)(to + 32), c);
    _mm_stream_si128((__m128i *)(to + 48), d);
}

static inline void copy_pages(char *to, const char *from) {
    for (size_t at = 0; at < PAGE; at += 2 * LINE) {
        for (size_t page = 0; page < PAGES * PAGE; page += PAGE) { /* a prefetch beyond the end faults nowhere */
            _mm_prefetch(from + page + at + AHEAD, _MM_HINT_T0);
            _mm_prefetch(from + page + at + AHEAD + LINE, _MM_HINT_T0);
        }
        for (size_t page = 0; page < PAGES * PAGE; page += PAGE) {
            copy_line(to + page + at, from + page + at);
            copy_line(to + page + at + LINE, from + page + at + LINE);
        }
    }
}

/* `to` and `from` do not overlap. When it returns every byte is visible to all who see anything written after it. */
void laminar_stream_copy(char *to, const char *from, size_t size) {
    size_t head = (LINE - ((uintptr_t)to & (LINE - 1))) & (LINE - 1);
    if (head > size)
        head = size;
    memcpy(to, from, head);
    to += head, from += head, size -= head;
    for (; size >= PAGES * PAGE; to += PAGES * PAGE, from += PAGES * PAGE, size -= PAGES * PAGE)
        copy_pages(to, from);
    for (; size >= LINE; to += LINE, from += LINE, size -= LINE)
        copy_line(to, from);
    _mm_sfence(); /* streaming stores are ordered by nothing else */
    memcpy(to, from, size);
}

#else

void laminar_stream_copy(char *to, const char *from, size_t size) { memcpy(to, from, size); }

#endif
