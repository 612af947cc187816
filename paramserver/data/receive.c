/* Receives chunks from a socket, and digests them on the way.

A chunk comes in pieces into a buffer that stays in the core's cache; from there its bytes pass by the caches into their
place (stream.h). The kernel's copy then writes no memory, and neither it nor the digest reads any but the sender's: what
is received straight into its place, and digested there, takes a quarter more of processor time.

In one call for many pieces: a thread of Python that comes back from the kernel waits for the interpreter's lock, and wakes
whoever waits for it next. With every piece in a call of its own, that took a seventh of a hop's time. */

#include <errno.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <time.h>

#include "stream.h"

#ifdef LAMINAR_STREAM

/* A chunk on its way: its place, how long it is, how far it is there; and its digest, once it is whole. */
typedef struct {
    char *place;
    uint64_t total, upto;
    uint64_t lanes[8], num; /* of the stripes that are there */
    uint8_t digest[16];
} Chunk;

INLINE Lanes lanes_of(const Chunk *chunk) {
    Lanes lanes = {load(chunk->lanes), load(chunk->lanes + 4), chunk->num};
    return lanes;
}

INLINE void keep_lanes(Chunk *chunk, Lanes lanes) {
    _mm256_storeu_si256((__m256i *)chunk->lanes, lanes.low);
    _mm256_storeu_si256((__m256i *)(chunk->lanes + 4), lanes.high);
    chunk->num = lanes.num;
}

/* Takes in what lies in its place already, those stripes that are whole. */
INLINE Lanes take_place(Lanes lanes, const Chunk *chunk) {
    size_t whole = chunk->upto / STRIPE, end = num_stripes(chunk->total);
    return take_stripes(lanes, chunk->place + lanes.num * STRIPE, whole < end ? whole : end);
}

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + (double)at.tv_nsec * 1e-9;
}

/* Begins a chunk of which `upto` bytes are there. Returns 0 where it cannot: see laminar_copy_digest. */
VECTOR int laminar_receive_begin(Chunk *chunk) {
    if (!has_stream() || chunk->total <= SHORT)
        return 0;
    keep_lanes(chunk, take_place(no_stripe(), chunk));
    return 1;
}

/* Goes on with a chunk, from a socket whose calls wait, each for its SO_RCVTIMEO. Comes back early when
one of them brought nothing, or once `enough_s` have passed, so that the caller can report how far it is. Returns the bytes
that came; without any 0 at the stream's end, else -errno. */
VECTOR ssize_t laminar_receive(int sock, Chunk *chunk, size_t piece, double enough_s) {
    const double began = now();
    const size_t from = chunk->upto, total = chunk->total, end = num_stripes(total);
    char room[piece + LINE], *buffer = room + (LINE - (uintptr_t)room % LINE) % LINE;
    const int streamed = (uintptr_t)chunk->place % LINE == 0; /* a place elsewhere is received into */
    Lanes lanes = lanes_of(chunk);
    ssize_t num;
    do {
        size_t wanted = piece - chunk->upto % LINE; /* so that the next one begins with a line */
        if (wanted > total - chunk->upto)
            wanted = total - chunk->upto;
        do
            num = recv(sock, streamed ? buffer : chunk->place + chunk->upto, wanted, MSG_WAITALL);
        while (num < 0 && errno == EINTR);
        if (num <= 0)
            break;
        if (streamed)
            lanes = copy_piece(lanes, chunk->place, chunk->upto, buffer, (size_t)num, end);
        chunk->upto += (size_t)num;
        if (!streamed)
            lanes = take_place(lanes, chunk);
    } while (chunk->upto < total && now() - began < enough_s);
    const int error = errno;
    _mm_sfence(); /* streaming stores are ordered by nothing else */
    keep_lanes(chunk, lanes);
    if (chunk->upto == total)
        write_digest(lanes, chunk->place, total, chunk->digest);
    return chunk->upto > from ? (ssize_t)(chunk->upto - from) : num == 0 ? 0 : -error;
}

#else

int laminar_receive_begin(void *chunk) { return 0; }

ssize_t laminar_receive(int sock, void *chunk, size_t piece, double enough_s) { return -ENOSYS; }

#endif
