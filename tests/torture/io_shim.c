/* Faults in the I/O calls of one process, for files in one folder. Preloaded; steered by the test through ctypes.

   Each call of a kind with a rule fails (errno), is cut short, or sleeps first: with a probability, after a number of
   calls that go well, and so many times at most. What is random comes from a seed. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

/* The order is that of CALLS in faulty_store.py. */
enum call { READ, WRITE, SYNC, MSYNC, TRUNCATE, ALLOCATE, MMAP, NUM_CALLS };
enum kind { NOTHING, FAIL, SHORT, SLEEP };

struct rule {
    int kind;
    int error;
    unsigned per_million;
    long after, most;
    unsigned sleep_us;
};

static struct rule rules[NUM_CALLS];
static atomic_long num_calls[NUM_CALLS], num_hits[NUM_CALLS], dice;
static uint64_t seed;
static char folder[4096];

void torture_watch(const char *path, uint64_t new_seed) {
    strncpy(folder, path, sizeof folder - 1);
    seed = new_seed;
    atomic_store(&dice, 0);
}

void torture_rule(int call, int kind, int error, unsigned per_million, long after, long most, unsigned sleep_us) {
    rules[call].kind = NOTHING;
    rules[call] = (struct rule){NOTHING, error, per_million, after + num_calls[call], most + num_hits[call], sleep_us};
    rules[call].kind = kind;
}

long torture_calls(int call) { return num_calls[call]; }
long torture_hits(int call) { return num_hits[call]; }

static int is_ours(int file) {
    char link[64], path[4096];
    size_t length = strlen(folder);
    if (file < 0 || length == 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t got = readlink(link, path, sizeof path - 1);
    return got >= (ssize_t)length && memcmp(path, folder, length) == 0;
}

static uint64_t roll(void) { /* splitmix64 */
    uint64_t x = seed + 0x9E3779B97F4A7C15u * (uint64_t)(atomic_fetch_add(&dice, 1) + 1);
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* What is to happen to this call; sleeps are done here. FAIL sets errno. */
static int fate(enum call call, int file) {
    if (call != MSYNC && !is_ours(file)) return NOTHING;
    struct rule rule = rules[call];
    long before = atomic_fetch_add(&num_calls[call], 1);
    if (rule.kind == NOTHING || before < rule.after || roll() % 1000000 >= rule.per_million) return NOTHING;
    if (num_hits[call] >= rule.most) return NOTHING;
    atomic_fetch_add(&num_hits[call], 1);
    if (rule.kind == SLEEP) usleep(rule.sleep_us);
    if (rule.kind == FAIL) errno = rule.error;
    return rule.kind;
}

static size_t part_of(size_t length) { return length < 2 ? length : 1 + roll() % (length - 1); }

#define COUNTED(name, call, buffer_type, extra_parameters, extra_arguments)                                            \
    ssize_t name(int file, buffer_type data, size_t length extra_parameters) {                                         \
        static ssize_t (*real)(int, buffer_type, size_t extra_parameters);                                             \
        if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name);                                                          \
        int fated = fate(call, file);                                                                                  \
        if (fated == FAIL) return -1;                                                                                  \
        return real(file, data, fated == SHORT ? part_of(length) : length extra_arguments);                           \
    }

#define COMMA ,
COUNTED(read, READ, void *, , )
COUNTED(pread, READ, void *, COMMA off_t offset, COMMA offset)
COUNTED(pread64, READ, void *, COMMA off_t offset, COMMA offset)
COUNTED(write, WRITE, const void *, , )
COUNTED(pwrite, WRITE, const void *, COMMA off_t offset, COMMA offset)
COUNTED(pwrite64, WRITE, const void *, COMMA off_t offset, COMMA offset)

/* Vectors are cut after their first part, or within it if that is all: past the page cache a page at a time. */
#define VECTOR(name, call, extra_parameters, extra_arguments)                                                          \
    ssize_t name(int file, const struct iovec *parts, int num_parts extra_parameters) {                                \
        static ssize_t (*real)(int, const struct iovec *, int extra_parameters);                                       \
        if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name);                                                          \
        int fated = fate(call, file);                                                                                  \
        if (fated == FAIL) return -1;                                                                                  \
        if (fated != SHORT || num_parts < 1) return real(file, parts, num_parts extra_arguments);                      \
        struct iovec first = parts[0];                                                                                 \
        if (num_parts == 1 && !is_direct(file)) first.iov_len = part_of(first.iov_len);                                \
        if (num_parts == 1 && is_direct(file) && first.iov_len > 4096) first.iov_len = 4096;                           \
        return real(file, &first, 1 extra_arguments);                                                                  \
    }

static int is_direct(int file) { return fcntl(file, F_GETFL) & O_DIRECT; }

VECTOR(writev, WRITE, , )
VECTOR(pwritev, WRITE, COMMA off_t offset, COMMA offset)
VECTOR(pwritev64, WRITE, COMMA off_t offset, COMMA offset)
VECTOR(pwritev2, WRITE, COMMA off_t offset COMMA int flags, COMMA offset COMMA flags)
VECTOR(pwritev64v2, WRITE, COMMA off_t offset COMMA int flags, COMMA offset COMMA flags)
VECTOR(preadv, READ, COMMA off_t offset, COMMA offset)
VECTOR(preadv64, READ, COMMA off_t offset, COMMA offset)
VECTOR(preadv2, READ, COMMA off_t offset COMMA int flags, COMMA offset COMMA flags)
VECTOR(preadv64v2, READ, COMMA off_t offset COMMA int flags, COMMA offset COMMA flags)

#define PLAIN(name, call, parameters, file, arguments, failure)                                                        \
    int name parameters {                                                                                              \
        static int(*real) parameters;                                                                                  \
        if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name);                                                          \
        if (fate(call, file) == FAIL) return failure;                                                                  \
        return real arguments;                                                                                         \
    }

PLAIN(fsync, SYNC, (int file), file, (file), -1)
PLAIN(fdatasync, SYNC, (int file), file, (file), -1)
PLAIN(msync, MSYNC, (void *start, size_t length, int flags), -1, (start, length, flags), -1)
PLAIN(ftruncate, TRUNCATE, (int file, off_t length), file, (file, length), -1)
PLAIN(ftruncate64, TRUNCATE, (int file, off_t length), file, (file, length), -1)
PLAIN(fallocate, ALLOCATE, (int file, int mode, off_t start, off_t length), file, (file, mode, start, length), -1)
PLAIN(fallocate64, ALLOCATE, (int file, int mode, off_t start, off_t length), file, (file, mode, start, length), -1)
PLAIN(posix_fallocate, ALLOCATE, (int file, off_t start, off_t length), file, (file, start, length), errno)
PLAIN(posix_fallocate64, ALLOCATE, (int file, off_t start, off_t length), file, (file, start, length), errno)

#define MAP(name)                                                                                                      \
    void *name(void *start, size_t length, int protection, int flags, int file, off_t offset) {                        \
        static void *(*real)(void *, size_t, int, int, int, off_t);                                                    \
        if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name);                                                          \
        if (file >= 0 && fate(MMAP, file) == FAIL) return MAP_FAILED;                                                  \
        return real(start, length, protection, flags, file, offset);                                                   \
    }

MAP(mmap)
MAP(mmap64)
