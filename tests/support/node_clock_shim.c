/* The wall clock of a redis-server. Preloaded into one process, the library shifts gettimeofday, time
 * and CLOCK_REALTIME by the milliseconds in the file NODE_CLOCK_FILE, and no other clock. The file holds
 * one native long long and is mapped, so that a test can make the clock jump while the process runs.
 * Only the tests compile and use this file. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long long *shift;

static long long shift_ms(void) {
    if (shift == NULL) {
        const char *path = getenv("NODE_CLOCK_FILE");
        int file = path == NULL ? -1 : open(path, O_RDONLY);
        void *page = file < 0 ? MAP_FAILED : mmap(NULL, sizeof *shift, PROT_READ, MAP_SHARED, file, 0);
        /* Without the shift a test could pass without testing anything, so the process ends. */
        if (page == MAP_FAILED) {
            _exit(99);
        }
        close(file);
        shift = page;
    }
    return *shift;
}

int clock_gettime(clockid_t id, struct timespec *now) {
    /* This is the system call itself. A lookup of the next clock_gettime would run before the dynamic
     * linker is ready. */
    int failed = (int)syscall(SYS_clock_gettime, id, now);
    if (failed == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) {
        long long ms = shift_ms();
        long nanos = now->tv_nsec + (long)(ms % 1000) * 1000000L;
        now->tv_sec += ms / 1000 + (nanos >= 1000000000L) - (nanos < 0);
        now->tv_nsec = (nanos + 1000000000L) % 1000000000L;
    }
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &exact) != 0) {
        return -1;
    }
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec exact;
    time_t now = clock_gettime(CLOCK_REALTIME, &exact) == 0 ? exact.tv_sec : (time_t)-1;
    if (out != NULL) {
        *out = now;
    }
    return now;
}
