/* Receives the bytes of a chunk and digests them piece by piece, while they are in the core's cache.

In one call: a thread of Python that comes back from the kernel waits for the interpreter's lock, and wakes whoever waits
for it next. With every piece in a call of its own, that took a seventh of a hop's time. */

#include <errno.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <time.h>

typedef int (*Update)(void *state, const void *bytes, size_t size);

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + (double)at.tv_nsec * 1e-9;
}

/* Fills `into` from a socket whose calls wait, each for as long as its SO_RCVTIMEO says. Comes back early when one of
them brought nothing, or once `enough_s` have passed, so that the caller can tell how far it is. Returns the bytes that
came; without any 0 at the stream's end, else -errno. */
ssize_t laminar_receive(int sock, char *into, size_t size, size_t piece, double enough_s, Update update, void *state) {
    const double began = now();
    size_t received = 0;
    do {
        size_t wanted = size - received < piece ? size - received : piece;
        ssize_t num;
        do
            num = recv(sock, into + received, wanted, MSG_WAITALL);
        while (num < 0 && errno == EINTR);
        if (num <= 0)
            return received ? (ssize_t)received : num == 0 ? 0 : -errno;
        update(state, into + received, (size_t)num);
        received += (size_t)num;
    } while (received < size && now() - began < enough_s);
    return (ssize_t)received;
}
