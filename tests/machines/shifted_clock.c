/* A wrong clock for one process: LD_PRELOAD this, and SHIFTED_CLOCK_S has the seconds by which the day's time is off.
 *
 * Clocks that only measure durations stay as they are. A wait until a moment of the day is a wait until the same moment
 * by the machine's clock: a moment is told from a duration's clock by its size. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>

enum { OF_THE_DAY = 1000000000 };

static long shift(void) {
    const char *text = getenv("SHIFTED_CLOCK_S");
    return text ? atol(text) : 0;
}

static const struct timespec *true_time(const struct timespec *told, struct timespec *room) {
    if (!told || told->tv_sec < OF_THE_DAY) return told;
    *room = *told;
    room->tv_sec -= shift();
    return room;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*next)(clockid_t, struct timespec *);
    if (!next) next = dlsym(RTLD_NEXT, "clock_gettime");
    int result = next(clock, now);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += shift();
    return result;
}

int gettimeofday(struct timeval *now, void *zone) {
    (void)zone;
    struct timespec told;
    clock_gettime(CLOCK_REALTIME, &told);
    now->tv_sec = told.tv_sec;
    now->tv_usec = told.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec told;
    clock_gettime(CLOCK_REALTIME, &told);
    if (now) *now = told.tv_sec;
    return told.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    static int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    struct timespec room;
    if (!next) next = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    return next(condition, mutex, true_time(until, &room));
}

int pthread_cond_clockwait(pthread_cond_t *condition, pthread_mutex_t *mutex, clockid_t clock,
                           const struct timespec *until) {
    static int (*next)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
    struct timespec room;
    if (!next) next = dlsym(RTLD_NEXT, "pthread_cond_clockwait");
    return next(condition, mutex, clock, true_time(until, &room));
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
    static int (*next)(sem_t *, const struct timespec *);
    struct timespec room;
    if (!next) next = dlsym(RTLD_NEXT, "sem_timedwait");
    return next(semaphore, true_time(until, &room));
}

int sem_clockwait(sem_t *semaphore, clockid_t clock, const struct timespec *until) {
    static int (*next)(sem_t *, clockid_t, const struct timespec *);
    struct timespec room;
    if (!next) next = dlsym(RTLD_NEXT, "sem_clockwait");
    return next(semaphore, clock, true_time(until, &room));
}

long syscall(long number, ...) {
    static long (*next)(long, ...);
    long told[6];
    struct timespec room;
    va_list arguments;
    va_start(arguments, number);
    for (int i = 0; i < 6; i++) told[i] = va_arg(arguments, long);
    va_end(arguments);
    if (!next) next = dlsym(RTLD_NEXT, "syscall");
    if (number == SYS_futex && (told[1] & FUTEX_CLOCK_REALTIME))
        told[3] = (long)true_time((const struct timespec *)told[3], &room);
    return next(number, told[0], told[1], told[2], told[3], told[4], told[5]);
}
