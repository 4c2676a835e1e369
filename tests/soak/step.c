/* A step of the wall clock for one process: LD_PRELOAD with the offset in seconds, as text, in the file $STEP_FILE.
 *
 * CLOCK_REALTIME is shifted; so is, the other way, every wait with a deadline on it, which the kernel compares with its
 * own clock. Deadlines on the monotonic clock are left alone: they are told apart by their size (nobody has been up
 * since 2001). libfaketime (0.9.10) does not do: its clock_nanosleep refuses every call, and it misses gRPC's futexes.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define WALL 1000000000L /* 2001-09-09 as seconds since 1970 */

static long cached_at = -1, cached;

static long kernel_gettime(clockid_t clock, struct timespec *at) {
    static long (*gettime)(clockid_t, struct timespec *);
    if (!gettime) gettime = dlsym(RTLD_NEXT, "clock_gettime");
    return gettime(clock, at);
}

/* The offset now: the file is read again ten times a second. */
static long offset(void) {
    struct timespec now;
    kernel_gettime(CLOCK_MONOTONIC, &now);
    long tick = now.tv_sec * 10 + now.tv_nsec / 100000000;
    if (tick != cached_at) {
        cached_at = tick;
        const char *path = getenv("STEP_FILE");
        int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        if (file >= 0) {
            char text[32];
            ssize_t size = read(file, text, sizeof text - 1);
            close(file);
            if (size > 0) {
                text[size] = 0;
                cached = strtol(text, NULL, 10);
            }
        }
    }
    return cached;
}

static const struct timespec *shifted(const struct timespec *deadline, struct timespec *space) {
    if (!deadline || deadline->tv_sec < WALL) return deadline;
    *space = *deadline;
    space->tv_sec -= offset();
    return space;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    int failed = kernel_gettime(clock, at);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += offset();
    return failed;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}

#define REAL(name) static typeof(&name) real; if (!real) real = dlsym(RTLD_NEXT, #name)

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict lock, const struct timespec *restrict deadline) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!real) real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!real) real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec space;
    return real(cond, lock, shifted(deadline, &space));
}

int pthread_cond_clockwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict lock, clockid_t clock, const struct timespec *restrict deadline) {
    REAL(pthread_cond_clockwait);
    struct timespec space;
    return real(cond, lock, clock, shifted(deadline, &space));
}

int sem_timedwait(sem_t *restrict sem, const struct timespec *restrict deadline) {
    REAL(sem_timedwait);
    struct timespec space;
    return real(sem, shifted(deadline, &space));
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict lock, const struct timespec *restrict deadline) {
    REAL(pthread_mutex_timedlock);
    struct timespec space;
    return real(lock, shifted(deadline, &space));
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left) {
    REAL(clock_nanosleep);
    struct timespec space;
    return real(clock, flags, flags & TIMER_ABSTIME ? shifted(until, &space) : until, left);
}

long syscall(long number, ...) {
    static long (*real)(long, ...);
    if (!real) real = dlsym(RTLD_NEXT, "syscall");
    va_list rest;
    long a[6];
    va_start(rest, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(rest, long);
    va_end(rest);
    struct timespec space;
    if (number == SYS_clock_gettime) return clock_gettime((clockid_t)a[0], (struct timespec *)a[1]);
    if (number == SYS_futex && (a[1] & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET)
        a[3] = (long)shifted((const struct timespec *)a[3], &space);
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
