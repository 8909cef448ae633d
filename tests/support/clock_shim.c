/* A shifted wall clock. Preloaded into one process, the library shifts CLOCK_REALTIME by
 * CLOCK_SHIM_OFFSET_MS milliseconds and no other clock. Only the tests compile and use this file. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t id, struct timespec *now) {
    /* This is the system call itself. A lookup of the next clock_gettime would run before the dynamic
     * linker is ready. */
    int failed = (int)syscall(SYS_clock_gettime, id, now);
    const char *text = id == CLOCK_REALTIME ? getenv("CLOCK_SHIM_OFFSET_MS") : NULL;
    if (failed == 0 && text != NULL) {
        long offset_ms = strtol(text, NULL, 10);
        long nanos = now->tv_nsec + offset_ms % 1000 * 1000000L;
        now->tv_sec += offset_ms / 1000 + (nanos >= 1000000000L) - (nanos < 0);
        now->tv_nsec = (nanos + 1000000000L) % 1000000000L;
    }
    return failed;
}
