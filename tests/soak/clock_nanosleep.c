/* Loaded before libfaketime 0.9.10, whose own clock_nanosleep fails with EINVAL for every clock that it does not fake:
   Python's time.sleep waits by the monotonic one. */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left) {
    return syscall(SYS_clock_nanosleep, clock, flags, until, left) == 0 ? 0 : errno;
}
