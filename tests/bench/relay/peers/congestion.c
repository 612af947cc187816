/* Preloaded into every contender: its TCP sockets begin under the congestion control named in BENCH_CONGESTION, as this
 * project's own do, whatever the host's default is. What listens passes it on. A host that does not allow it to this
 * user leaves all of them, ours too, at its default. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

int socket(int domain, int type, int protocol) {
    int (*real)(int, int, int) = (int (*)(int, int, int))dlsym(RTLD_NEXT, "socket");
    int fd = real(domain, type, protocol);
    const char *name = getenv("BENCH_CONGESTION");
    int stream = (type & 0xf) == SOCK_STREAM && (domain == AF_INET || domain == AF_INET6);
    if (fd >= 0 && stream && name != NULL) {
        int error = errno;
        setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, strlen(name));
        errno = error;
    }
    return fd;
}
