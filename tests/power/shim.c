/* Everything that a process does to the files under one folder, as a log: LD_PRELOAD with the folder in $POWER_FOLDER
 * and the log, which lies elsewhere, in $POWER_LOG. `log.py` reads it.
 *
 * One record for each call that succeeded, appended with one write while a lock keeps the calls apart, so that the log
 * is in the order in which the kernel saw them. A record names the inode, which outlives a rename, and the path below
 * the folder. Mapped files are not seen: SQLite's -shm, which it makes anew after a crash.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { BEGIN, MARK, CREATE, SIZE, WRITE, GROW, SYNC, MKDIR, REMOVE, RENAME, SYMLINK, LINK, UNKNOWN };

struct __attribute__((packed)) head {
    uint32_t total;
    uint16_t op, path, path2, flags;
    uint32_t pid;
    uint64_t inode;
    int64_t offset;
    uint32_t data;
};

#define MOST_FDS 65536
#define ONLY_DATA 1 /* fdatasync */

static unsigned char is_ours[MOST_FDS];
static char folder[PATH_MAX];
static size_t folder_size;
static int out = -1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static void put(int op, int flags, uint64_t inode, int64_t offset, const char *path, const char *path2, const void *data, size_t size) {
    struct head head = {0, op, path ? strlen(path) : 0, path2 ? strlen(path2) : 0, flags, getpid(), inode, offset, size};
    head.total = sizeof head + head.path + head.path2 + size;
    struct iovec parts[] = {{&head, sizeof head}, {(char *)path, head.path}, {(char *)path2, head.path2}, {(void *)data, size}};
    if (syscall(SYS_writev, out, parts, 4) != (long)head.total) {
        static const char text[] = "the log of writes cannot be written\n";
        syscall(SYS_write, 2, text, sizeof text - 1);
        _exit(99);
    }
}

__attribute__((constructor)) static void begin(void) {
    const char *where = getenv("POWER_FOLDER"), *log = getenv("POWER_LOG");
    if (!where || !log) return;
    snprintf(folder, sizeof folder, "%s", where);
    folder_size = strlen(folder);
    out = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (out >= 0) put(BEGIN, 0, 0, 0, NULL, NULL, NULL, 0);
}

/* What the process itself has to say, between its calls. */
void power_mark(const char *text) {
    if (out < 0) return;
    pthread_mutex_lock(&lock);
    put(MARK, 0, 0, 0, NULL, NULL, text, strlen(text));
    pthread_mutex_unlock(&lock);
}

/* The path below the folder, "" for the folder itself; NULL for one elsewhere. */
static const char *below(int at, const char *path, char *space) {
    if (out < 0 || !path) return NULL;
    if (path[0] == '/') {
        snprintf(space, PATH_MAX, "%s", path);
    } else {
        char link[64], base[PATH_MAX];
        if (at == AT_FDCWD) {
            if (!getcwd(base, sizeof base)) return NULL;
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", at);
            ssize_t size = readlink(link, base, sizeof base - 1);
            if (size < 0) return NULL;
            base[size] = 0;
        }
        if (snprintf(space, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) return NULL;
    }
    size_t size = strlen(space);
    while (size > 1 && (space[size - 1] == '/' || !strcmp(space + size - 2, "/."))) space[size -= space[size - 1] == '/' ? 1 : 2] = 0;
    if (strncmp(space, folder, folder_size)) return NULL;
    if (!space[folder_size]) return space + folder_size;
    return space[folder_size] == '/' ? space + folder_size + 1 : NULL;
}

static uint64_t inode_at(const char *path) {
    struct stat found;
    return lstat(path, &found) ? 0 : found.st_ino;
}

static uint64_t inode_of(int fd) {
    struct stat found;
    return fstat(fd, &found) ? 0 : found.st_ino;
}

static int tracked(int fd) { return fd >= 0 && fd < MOST_FDS && is_ours[fd]; }

#define LOCKED(result, call, ...) do { \
        pthread_mutex_lock(&lock); \
        result = call; \
        int failed_with = errno; \
        __VA_ARGS__ \
        errno = failed_with; \
        pthread_mutex_unlock(&lock); \
    } while (0)

static int opened(int at, const char *path, int flags, mode_t mode) {
    char space[PATH_MAX];
    const char *name = below(at, path, space);
    if (!name) return syscall(SYS_openat, at, path, flags, mode);
    int fd;
    pthread_mutex_lock(&lock);
    uint64_t before = flags & O_CREAT ? inode_at(space) : 1;
    fd = syscall(SYS_openat, at, path, flags, mode);
    int failed_with = errno;
    if (fd >= 0) {
        if (fd >= MOST_FDS || (flags & O_TMPFILE) == O_TMPFILE) put(UNKNOWN, 0, 0, 0, name, NULL, NULL, 0);
        else is_ours[fd] = 1;
        if (!before) put(CREATE, 0, inode_of(fd), 0, name, NULL, NULL, 0);
        else if (flags & O_TRUNC) put(SIZE, 0, inode_of(fd), 0, name, NULL, NULL, 0);
    }
    errno = failed_with;
    pthread_mutex_unlock(&lock);
    return fd;
}

#define MODE mode_t mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }

int open(const char *path, int flags, ...) { MODE return opened(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE return opened(AT_FDCWD, path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { MODE return opened(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE return opened(at, path, flags, mode); }
int creat(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int __open_2(const char *path, int flags) { return opened(AT_FDCWD, path, flags, 0); }
int __open64_2(const char *path, int flags) { return opened(AT_FDCWD, path, flags, 0); }
int __openat_2(int at, const char *path, int flags) { return opened(at, path, flags, 0); }
int __openat64_2(int at, const char *path, int flags) { return opened(at, path, flags, 0); }

int close(int fd) {
    REAL(close);
    if (!tracked(fd)) return real(fd);
    int result;
    LOCKED(result, (is_ours[fd] = 0, real(fd)), {});
    return result;
}

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    if (!tracked(fd)) return real(fd, data, size);
    ssize_t result;
    LOCKED(result, real(fd, data, size), {
        if (result > 0) put(WRITE, 0, inode_of(fd), lseek(fd, 0, SEEK_CUR) - result, NULL, NULL, data, result);
    });
    return result;
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    REAL(pwrite);
    if (!tracked(fd)) return real(fd, data, size, offset);
    ssize_t result;
    LOCKED(result, real(fd, data, size, offset), {
        if (result > 0) put(WRITE, 0, inode_of(fd), offset, NULL, NULL, data, result);
    });
    return result;
}

ssize_t pwrite64(int fd, const void *data, size_t size, off_t offset) { return pwrite(fd, data, size, offset); }

static void put_parts(int fd, const struct iovec *parts, int count, off_t offset, ssize_t left) {
    uint64_t inode = inode_of(fd);
    for (int i = 0; i < count && left > 0; i++) {
        ssize_t size = (ssize_t)parts[i].iov_len < left ? (ssize_t)parts[i].iov_len : left;
        if (size) put(WRITE, 0, inode, offset, NULL, NULL, parts[i].iov_base, size);
        offset += size, left -= size;
    }
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(writev);
    if (!tracked(fd)) return real(fd, parts, count);
    ssize_t result;
    LOCKED(result, real(fd, parts, count), { put_parts(fd, parts, count, lseek(fd, 0, SEEK_CUR) - result, result); });
    return result;
}

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) {
    REAL(pwritev);
    if (!tracked(fd)) return real(fd, parts, count, offset);
    ssize_t result;
    LOCKED(result, real(fd, parts, count, offset), { put_parts(fd, parts, count, offset, result); });
    return result;
}

ssize_t pwritev64(int fd, const struct iovec *parts, int count, off_t offset) { return pwritev(fd, parts, count, offset); }

int ftruncate(int fd, off_t size) {
    REAL(ftruncate);
    if (!tracked(fd)) return real(fd, size);
    int result;
    LOCKED(result, real(fd, size), { if (!result) put(SIZE, 0, inode_of(fd), size, NULL, NULL, NULL, 0); });
    return result;
}

int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }

int truncate(const char *path, off_t size) {
    REAL(truncate);
    char space[PATH_MAX];
    const char *name = below(AT_FDCWD, path, space);
    if (!name) return real(path, size);
    int result;
    LOCKED(result, real(path, size), { if (!result) put(SIZE, 0, inode_at(space), size, NULL, NULL, NULL, 0); });
    return result;
}

int truncate64(const char *path, off_t size) { return truncate(path, size); }

int posix_fallocate(int fd, off_t offset, off_t size) {
    REAL(posix_fallocate);
    if (!tracked(fd)) return real(fd, offset, size);
    int result;
    LOCKED(result, real(fd, offset, size), { if (!result) put(GROW, 0, inode_of(fd), offset + size, NULL, NULL, NULL, 0); });
    return result;
}

int posix_fallocate64(int fd, off_t offset, off_t size) { return posix_fallocate(fd, offset, size); }

int fallocate(int fd, int mode, off_t offset, off_t size) {
    REAL(fallocate);
    if (!tracked(fd)) return real(fd, mode, offset, size);
    int result;
    LOCKED(result, real(fd, mode, offset, size), {
        if (!result && mode != FALLOC_FL_KEEP_SIZE) put(mode ? UNKNOWN : GROW, 0, inode_of(fd), offset + size, NULL, NULL, NULL, 0);
    });
    return result;
}

int fallocate64(int fd, int mode, off_t offset, off_t size) { return fallocate(fd, mode, offset, size); }

/* The path is for people: what it was called when it was synced, by /proc, which follows renames. With it the time that
 * it took, in nanoseconds. */
static int synced(int (*real)(int), int fd, int flags) {
    int result;
    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    LOCKED(result, real(fd), {
        clock_gettime(CLOCK_MONOTONIC, &end);
        int64_t took = (end.tv_sec - start.tv_sec) * 1000000000LL + end.tv_nsec - start.tv_nsec;
        char link[64], base[PATH_MAX], space[PATH_MAX];
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t size = readlink(link, base, sizeof base - 1);
        base[size < 0 ? 0 : size] = 0;
        if (!result) put(SYNC, flags, inode_of(fd), took, below(AT_FDCWD, base, space), NULL, NULL, 0);
    });
    return result;
}

int fsync(int fd) {
    REAL(fsync);
    return tracked(fd) ? synced(real, fd, 0) : real(fd);
}

int fdatasync(int fd) {
    REAL(fdatasync);
    return tracked(fd) ? synced(real, fd, ONLY_DATA) : real(fd);
}

static int made(int at, const char *path, mode_t mode) {
    char space[PATH_MAX];
    const char *name = below(at, path, space);
    if (!name) return syscall(SYS_mkdirat, at, path, mode);
    int result;
    LOCKED(result, syscall(SYS_mkdirat, at, path, mode), { if (!result) put(MKDIR, 0, inode_at(space), 0, name, NULL, NULL, 0); });
    return result;
}

int mkdir(const char *path, mode_t mode) { return made(AT_FDCWD, path, mode); }
int mkdirat(int at, const char *path, mode_t mode) { return made(at, path, mode); }

static int removed(int at, const char *path, int flags) {
    char space[PATH_MAX];
    const char *name = below(at, path, space);
    if (!name) return syscall(SYS_unlinkat, at, path, flags);
    int result;
    LOCKED(result, syscall(SYS_unlinkat, at, path, flags), { if (!result) put(REMOVE, 0, 0, 0, name, NULL, NULL, 0); });
    return result;
}

int unlink(const char *path) { return removed(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return removed(AT_FDCWD, path, AT_REMOVEDIR); }
int unlinkat(int at, const char *path, int flags) { return removed(at, path, flags); }
int remove(const char *path) {
    int result = unlink(path);
    return result && (errno == EISDIR || errno == EPERM) ? rmdir(path) : result;
}

static int renamed(int at, const char *old, int at2, const char *path, unsigned flags) {
    char space[PATH_MAX], space2[PATH_MAX];
    const char *from = below(at, old, space), *to = below(at2, path, space2);
    if (!from && !to) return syscall(SYS_renameat2, at, old, at2, path, flags);
    int result;
    LOCKED(result, syscall(SYS_renameat2, at, old, at2, path, flags), {
        if (!result) put(from && to && !(flags & RENAME_EXCHANGE) ? RENAME : UNKNOWN, 0, 0, 0, from, to, NULL, 0);
    });
    return result;
}

int rename(const char *old, const char *path) { return renamed(AT_FDCWD, old, AT_FDCWD, path, 0); }
int renameat(int at, const char *old, int at2, const char *path) { return renamed(at, old, at2, path, 0); }
int renameat2(int at, const char *old, int at2, const char *path, unsigned flags) { return renamed(at, old, at2, path, flags); }

static int pointed(const char *target, int at, const char *path) {
    char space[PATH_MAX];
    const char *name = below(at, path, space);
    if (!name) return syscall(SYS_symlinkat, target, at, path);
    int result;
    LOCKED(result, syscall(SYS_symlinkat, target, at, path), {
        if (!result) put(SYMLINK, 0, inode_at(space), 0, name, NULL, target, strlen(target));
    });
    return result;
}

int symlink(const char *target, const char *path) { return pointed(target, AT_FDCWD, path); }
int symlinkat(const char *target, int at, const char *path) { return pointed(target, at, path); }

static int linked(int at, const char *old, int at2, const char *path, int flags) {
    char space[PATH_MAX], space2[PATH_MAX];
    const char *from = below(at, old, space), *to = below(at2, path, space2);
    if (!to) return syscall(SYS_linkat, at, old, at2, path, flags);
    int result;
    LOCKED(result, syscall(SYS_linkat, at, old, at2, path, flags), {
        if (!result) put(from ? LINK : UNKNOWN, 0, 0, 0, from, to, NULL, 0);
    });
    return result;
}

int link(const char *old, const char *path) { return linked(AT_FDCWD, old, AT_FDCWD, path, 0); }
int linkat(int at, const char *old, int at2, const char *path, int flags) { return linked(at, old, at2, path, flags); }
