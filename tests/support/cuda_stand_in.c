/* A stand-in for the CUDA driver library: it page-locks nothing, and notes each call that a real one would not forgive.

   Loaded as a library it answers the calls of `loaderpool/system/cuda_driver.py`. Preloaded (LD_PRELOAD) it also sees
   each munmap, mmap, mremap, madvise, fallocate and ftruncate of the process, and with that whether memory is taken from
   under a registration: a GPU would go on with the old pages. What must not be is written to stderr and counted. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MOST_RANGES 4096
#define MOST_DEVICES 8
#define PAGE 4096ul
#define POPULATE_WRITE 23 /* since Linux 5.14: a device that is to write needs each page, as this does */
#define CACHESTAT 451 /* the same on all of its platforms */

typedef struct {
    uintptr_t start;
    size_t size;
    ino_t inode; /* of the file that is mapped there, 0: of none */
    size_t offset;
} Range;

typedef struct {
    const char *name;
    int calls, fail_code, fail_after;
} Call;

enum { COUNT, GET, STATE, RETAIN, RELEASE, PUSH, POP, EXCHANGE, REGISTER, UNREGISTER, CALLS };
static Call calls[CALLS] = {
    [COUNT] = {.name = "cuDeviceGetCount"},
    [GET] = {.name = "cuDeviceGet"},
    [STATE] = {.name = "cuDevicePrimaryCtxGetState"},
    [RETAIN] = {.name = "cuDevicePrimaryCtxRetain"},
    [RELEASE] = {.name = "cuDevicePrimaryCtxRelease_v2"},
    [PUSH] = {.name = "cuCtxPushCurrent_v2"},
    [POP] = {.name = "cuCtxPopCurrent_v2"},
    [EXCHANGE] = {.name = "cuThreadExchangeStreamCaptureMode"},
    [REGISTER] = {.name = "cuMemHostRegister_v2"},
    [UNREGISTER] = {.name = "cuMemHostUnregister"},
};

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static Range ranges[MOST_RANGES];
static int range_count, violations, devices, initialised, us_per_gib;
static int active[MOST_DEVICES], retained[MOST_DEVICES];
static pid_t owner; /* who made the first call */
static size_t most_bytes;
static __thread int stack[64], depth, capture_mode;

static void hold(void) { pthread_mutex_lock(&lock); }
static void let_go(void) { pthread_mutex_unlock(&lock); }

/* The thread of a child has another number than the one that holds the lock. */
static void let_go_in_child(void) { lock = (pthread_mutex_t)PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP; }

__attribute__((constructor)) static void begin(void) {
    pthread_atfork(hold, let_go, let_go_in_child);
    devices = initialised = 1;
}

static void violated(const char *format, ...) {
    char text[400];
    va_list arguments;
    va_start(arguments, format);
    int length = snprintf(text, sizeof text, "STAND-IN: pid %d: ", getpid());
    length += vsnprintf(text + length, sizeof text - length - 2, format, arguments);
    va_end(arguments);
    text[length++] = '\n';
    if (write(2, text, length) < 0) abort();
    violations++;
}

/* ---- what tests say and ask ---- */

void stand_in_reset(void) {
    hold();
    range_count = violations = us_per_gib = 0;
    devices = initialised = 1;
    owner = 0;
    most_bytes = 0;
    memset(active, 0, sizeof active);
    memset(retained, 0, sizeof retained);
    for (int i = 0; i < CALLS; i++) calls[i].calls = calls[i].fail_code = calls[i].fail_after = 0;
    depth = capture_mode = 0;
    let_go();
}
void stand_in_set_devices(int count) { devices = count; }
void stand_in_set_initialised(int is_initialised) { initialised = is_initialised; }
void stand_in_set_active(int device, int is_active) { active[device] = is_active; }
void stand_in_set_us_per_gib(int us) { us_per_gib = us; }
int stand_in_violations(void) { return violations; }
int stand_in_ranges(void) { return range_count; }
int stand_in_retained(int device) { return retained[device]; }
int stand_in_depth(void) { return depth; }
int stand_in_capture_mode(void) { return capture_mode; }
size_t stand_in_most_bytes(void) { return most_bytes; }

size_t stand_in_bytes(void) {
    size_t sum = 0;
    for (int i = 0; i < range_count; i++) sum += ranges[i].size;
    return sum;
}
int stand_in_fail(const char *name, int code, int after) {
    for (int i = 0; i < CALLS; i++)
        if (!strcmp(calls[i].name, name)) {
            calls[i].fail_code = code;
            calls[i].fail_after = after;
            return 1;
        }
    return 0;
}
int stand_in_calls(const char *name) {
    for (int i = 0; i < CALLS; i++)
        if (!strcmp(calls[i].name, name)) return calls[i].calls;
    return -1;
}
/* Whether a copy from there could be one that the host does not wait for. */
int stand_in_is_registered(uintptr_t start, size_t size) {
    hold();
    int found = 0;
    for (int i = 0; i < range_count; i++)
        found |= start >= ranges[i].start && start + size <= ranges[i].start + ranges[i].size;
    let_go();
    return found;
}

/* ---- the driver ---- */

static int called(int which, int needs_device_state) {
    Call *call = &calls[which];
    call->calls++;
    if (!owner) owner = getpid();
    if (getpid() != owner) violated("%s is called in a forked child of process %d", call->name, owner);
    if (call->fail_code && call->fail_after-- <= 0) {
        call->fail_after = 0;
        return call->fail_code;
    }
    return needs_device_state && !initialised ? 3 : 0;
}

int cuGetErrorName(int code, const char **name) {
    static const struct { int code; const char *name; } names[] = {
        {1, "CUDA_ERROR_INVALID_VALUE"}, {2, "CUDA_ERROR_OUT_OF_MEMORY"}, {3, "CUDA_ERROR_NOT_INITIALIZED"},
        {4, "CUDA_ERROR_DEINITIALIZED"}, {100, "CUDA_ERROR_NO_DEVICE"}, {201, "CUDA_ERROR_INVALID_CONTEXT"},
        {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED"}, {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
        {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"}, {800, "CUDA_ERROR_NOT_PERMITTED"},
        {801, "CUDA_ERROR_NOT_SUPPORTED"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].code == code) { *name = names[i].name; return 0; }
    *name = NULL;
    return 1;
}

int cuDeviceGetCount(int *count) {
    int code = called(COUNT, 1);
    if (!code) *count = devices;
    return code;
}
int cuDeviceGet(int *device, int ordinal) {
    int code = called(GET, 1);
    if (!code && (ordinal < 0 || ordinal >= devices)) { violated("device %d is asked for", ordinal); code = 101; }
    if (!code) *device = ordinal;
    return code;
}
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
    int code = called(STATE, 1);
    if (!code) { *flags = 0; *is_active = active[device] || retained[device]; }
    return code;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    hold();
    int code = called(RETAIN, 1);
    if (!code) {
        if (!active[device] && !retained[device]) violated("a context is made on device %d", device);
        retained[device]++;
        *context = (void *)(uintptr_t)(0x1000 + device);
    }
    let_go();
    return code;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
    hold();
    int code = called(RELEASE, 1);
    if (!code && --retained[device] < 0) violated("the context of device %d is released and was not retained", device);
    let_go();
    return code;
}
int cuCtxPushCurrent_v2(void *context) {
    int code = called(PUSH, 1), device = (int)(uintptr_t)context - 0x1000;
    if (!code && (device < 0 || device >= MOST_DEVICES || !retained[device])) {
        violated("%p is pushed, which is no context that was retained", context);
        code = 201;
    }
    if (!code) stack[depth++] = device;
    return code;
}
int cuCtxPopCurrent_v2(void **context) {
    int code = called(POP, 1);
    if (!code && !depth) { violated("there is no context to pop"); code = 201; }
    if (!code) *context = (void *)(uintptr_t)(0x1000 + stack[--depth]);
    return code;
}
int cuThreadExchangeStreamCaptureMode(int *mode) {
    int code = called(EXCHANGE, 1), old = capture_mode;
    if (!code) { capture_mode = *mode; *mode = old; }
    return code;
}

static void find_file(Range *range) {
    char line[600];
    FILE *maps = fopen("/proc/self/maps", "re");
    while (maps && fgets(line, sizeof line, maps)) {
        unsigned long first, last, offset, inode;
        if (sscanf(line, "%lx-%lx %*s %lx %*s %lu", &first, &last, &offset, &inode) == 4 && first <= range->start &&
            range->start < last) {
            range->inode = inode;
            range->offset = offset + (range->start - first);
            if (range->start + range->size > last) violated("%#lx is mapped only in part", (long)range->start);
        }
    }
    if (maps) fclose(maps);
}

/* How much memory a file has, as far as it is open; of other memory nothing is known. */
static long blocks_of(ino_t inode) {
    struct stat status;
    for (int descriptor = 3; inode && descriptor < 1024; descriptor++)
        if (!fstat(descriptor, &status) && status.st_ino == inode) return status.st_blocks;
    return 0;
}

/* Whether the range has all its memory already; -1: the kernel cannot tell (cachestat(2) is there from Linux 6.5 on). What
   the file takes elsewhere meanwhile, as workers write to it, does not count. */
static int has_memory(const Range *range) {
    struct { uint64_t offset, bytes; } wanted = {range->offset, range->size};
    struct { uint64_t cached, dirty, writeback, evicted, recently_evicted; } found;
    struct stat status;
    for (int descriptor = 3; range->inode && descriptor < 1024; descriptor++)
        if (!fstat(descriptor, &status) && status.st_ino == range->inode)
            return syscall(CACHESTAT, descriptor, &wanted, &found, 0) ? -1 : found.cached * PAGE >= range->size;
    return 1;
}

int cuMemHostRegister_v2(void *pointer, size_t size, unsigned flags) {
    hold();
    int code = called(REGISTER, 1);
    Range range = {(uintptr_t)pointer, size, 0, 0};
    if (!depth) violated("memory is registered without a context");
    if (capture_mode != 2) violated("memory is registered while a graph may be captured");
    if (flags != 1) violated("memory is registered with flags %u", flags);
    if (range.start % PAGE || size % PAGE || !size) violated("no whole pages are registered: %p, %zu", pointer, size);
    for (int i = 0; i < range_count && !code; i++)
        if (range.start < ranges[i].start + ranges[i].size && ranges[i].start < range.start + size) {
            violated("%p is registered already", pointer);
            code = 712;
        }
    if (!code) {
        find_file(&range);
        int is_there = has_memory(&range);
        long before = blocks_of(range.inode);
        if (syscall(SYS_madvise, pointer, size, POPULATE_WRITE)) violated("memory that is not mapped is registered");
        if (is_there < 0) is_there = blocks_of(range.inode) == before;
        if (!is_there) violated("%p takes memory only now that it is registered", pointer);
        syscall(SYS_madvise, pointer, size, MADV_DONTFORK); /* as drivers may */
        ranges[range_count++] = range;
        size_t bytes = stand_in_bytes();
        if (bytes > most_bytes) most_bytes = bytes;
    }
    let_go();
    if (!code && us_per_gib) usleep((useconds_t)((double)size * us_per_gib / (1u << 30)));
    return code;
}

int cuMemHostUnregister(void *pointer) {
    hold();
    int code = called(UNREGISTER, 1);
    if (!depth) violated("memory is unregistered without a context");
    if (capture_mode != 2) violated("memory is unregistered while a graph may be captured");
    if (!code) {
        int found = -1;
        for (int i = 0; i < range_count; i++)
            if (ranges[i].start == (uintptr_t)pointer) found = i;
        if (found < 0) {
            violated("%p is unregistered, which was not registered", pointer);
            code = 713;
        } else {
            if (syscall(SYS_madvise, pointer, ranges[found].size, MADV_DOFORK))
                violated("%p is unregistered only after it was unmapped", pointer);
            ranges[found] = ranges[--range_count];
        }
    }
    let_go();
    return code;
}

/* ---- what the process does with its memory; seen where this is preloaded ---- */

static void look(const char *what, uintptr_t start, size_t size) {
    hold();
    for (int i = 0; i < range_count && getpid() == owner; i++)
        if (start < ranges[i].start + ranges[i].size && ranges[i].start < start + size)
            violated("%s of %#lx (%zu bytes) takes registered memory away, %#lx (%zu bytes)", what, (long)start, size,
                     (long)ranges[i].start, ranges[i].size);
    let_go();
}

/* Of the file, so that a child of the owner may not do it either. */
static void look_in_file(const char *what, int descriptor, size_t offset, size_t size) {
    struct stat status;
    if (!range_count || fstat(descriptor, &status)) return;
    hold();
    for (int i = 0; i < range_count; i++)
        if (ranges[i].inode == status.st_ino && offset < ranges[i].offset + ranges[i].size &&
            ranges[i].offset < offset + size)
            violated("%s of a file at %zu (%zu bytes) takes registered pages away", what, offset, size);
    let_go();
}

int munmap(void *address, size_t size) {
    look("munmap", (uintptr_t)address, size);
    return syscall(SYS_munmap, address, size);
}
void *mmap(void *address, size_t size, int protection, int flags, int descriptor, off_t offset) {
    if (flags & MAP_FIXED) look("mmap", (uintptr_t)address, size);
    return (void *)syscall(SYS_mmap, address, size, protection, flags, descriptor, offset);
}
void *mmap64(void *address, size_t size, int protection, int flags, int descriptor, off_t offset) {
    return mmap(address, size, protection, flags, descriptor, offset);
}
void *mremap(void *address, size_t size, size_t wanted, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    void *place = flags & MREMAP_FIXED ? va_arg(arguments, void *) : NULL;
    va_end(arguments);
    look("mremap", (uintptr_t)address, size);
    return (void *)syscall(SYS_mremap, address, size, wanted, flags, place);
}
int madvise(void *address, size_t size, int advice) {
    if (advice == MADV_REMOVE || advice == MADV_DONTNEED || advice == MADV_FREE)
        look("madvise", (uintptr_t)address, size);
    return syscall(SYS_madvise, address, size, advice);
}
int fallocate(int descriptor, int mode, off_t offset, off_t size) {
    if (mode & FALLOC_FL_PUNCH_HOLE) look_in_file("fallocate", descriptor, offset, size);
    return syscall(SYS_fallocate, descriptor, mode, offset, size);
}
int fallocate64(int descriptor, int mode, off_t offset, off_t size) { return fallocate(descriptor, mode, offset, size); }
int ftruncate(int descriptor, off_t size) {
    look_in_file("ftruncate", descriptor, size, SIZE_MAX / 2);
    return syscall(SYS_ftruncate, descriptor, size);
}
int ftruncate64(int descriptor, off_t size) { return ftruncate(descriptor, size); }
