/* A slow disk for one process: loaded with LD_PRELOAD, it makes every fsync wait SLOW_FSYNC_SECONDS and every pwrite
 * as long as its bytes take at SLOW_BYTES_PER_SECOND, which is how SQLite writes. The bytes really are written. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/types.h>
#include <time.h>

static __thread double owed; /* seconds of writes too short to be slept one by one */

static double setting(const char *name) {
    const char *text = getenv(name);
    return text ? atof(text) : 0;
}

static void wait_seconds(double seconds) {
    struct timespec time = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
    nanosleep(&time, NULL);
}

static void wait_for_bytes(ssize_t bytes) {
    double speed = setting("SLOW_BYTES_PER_SECOND");
    if (speed <= 0 || bytes <= 0) return;
    owed += bytes / speed;
    if (owed > 0.001) {
        wait_seconds(owed);
        owed = 0;
    }
}

#define WRITE(name, offset_type)                                                               \
    ssize_t name(int file, const void *data, size_t bytes, offset_type offset) {              \
        static ssize_t (*real)(int, const void *, size_t, offset_type);                       \
        if (!real) real = (ssize_t(*)(int, const void *, size_t, offset_type))dlsym(RTLD_NEXT, #name); \
        ssize_t written = real(file, data, bytes, offset);                                     \
        wait_for_bytes(written);                                                               \
        return written;                                                                        \
    }
WRITE(pwrite, off_t)
WRITE(pwrite64, off64_t)

#define SYNC(name)                                                      \
    int name(int file) {                                                \
        static int (*real)(int);                                        \
        if (!real) real = (int (*)(int))dlsym(RTLD_NEXT, #name);        \
        wait_seconds(setting("SLOW_FSYNC_SECONDS"));                    \
        return real(file);                                              \
    }
SYNC(fsync)
SYNC(fdatasync)
