/* A disk that is slow to sync. Preloaded into a redis-server, the library delays each fsync and
 * fdatasync by the milliseconds in the file FSYNC_DELAY_FILE. The file holds one native long long
 * and is mapped, so that a test can begin and end a stall while the process runs. With 0 in the
 * file, no call is delayed, and delays under way end. Only the tests compile and use this file. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* A delayed call reads the file again after each of these steps. */
#define STEP_NS 5000000L

static const volatile long long *delay_ms;

__attribute__((constructor)) static void map_delay(void) {
    const char *path = getenv("FSYNC_DELAY_FILE");
    int file = path == NULL ? -1 : open(path, O_RDONLY);
    void *page =
        file < 0 ? MAP_FAILED : mmap(NULL, sizeof *delay_ms, PROT_READ, MAP_SHARED, file, 0);
    /* Without the delay a test could pass without testing anything, so the process ends. */
    if (page == MAP_FAILED) {
        _exit(99);
    }
    close(file);
    delay_ms = page;
}

static long long now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void stall(void) {
    long long began = now_ns();
    while (now_ns() - began < *delay_ms * 1000000LL) {
        struct timespec step = {0, STEP_NS};
        nanosleep(&step, NULL);
    }
}

/* Both functions make the system call itself, so that they need no lookup of the next fsync. */
int fsync(int file) {
    stall();
    return (int)syscall(SYS_fsync, file);
}

int fdatasync(int file) {
    stall();
    return (int)syscall(SYS_fdatasync, file);
}
