/* Loaded before libfaketime 0.9.10, for two calls that wait by the monotonic clock, which is not faked here. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* libfaketime's own fails with EINVAL for every clock that it does not fake: Python's time.sleep waits by the monotonic one. */
int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left) {
    return syscall(SYS_clock_nanosleep, clock, flags, until, left) == 0 ? 0 : errno;
}

/* libfaketime's own takes the time that is waited for as one of the real clock, and returns at once: each thread that waited
   for Python's GIL kept a processor as busy as the one that held it. So the C library's is called, past libfaketime. A
   condition that waits by the real clock would end at the wrong time; Python's and gRPC's wait by the monotonic one. */
int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    typedef int call(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    static call *wait;
    call *found = __atomic_load_n(&wait, __ATOMIC_ACQUIRE);
    if (found == NULL) {
        void *library = dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD);
        found = library == NULL ? NULL : (call *)dlsym(library, "pthread_cond_timedwait");
        if (found == NULL) abort();
        __atomic_store_n(&wait, found, __ATOMIC_RELEASE);
    }
    return found(condition, mutex, until);
}
