/*
 * How runs come here: the functions that ask for ONNX Runtime are ours, and write ours into the table where it lies. Every
 * holder of the table sees that, whenever he got it, and nothing need be known of its length.
 */
#include <dlfcn.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ort.h"

#define EXPORTED __attribute__((visibility("default")))

struct api_base {
    slot_function **(*table)(uint32_t version);
    const char *(*version)(void);
};
typedef const struct api_base *base_function(void);
typedef void *dlsym_function(void *, const char *);

/* A function does not learn through which table it was called: each runtime of the process has its own. Later ones are left. */
enum { MOST_RUNTIMES = 4 };
static struct runtime runtimes[MOST_RUNTIMES];
static pthread_mutex_t patching = PTHREAD_MUTEX_INITIALIZER;

/* ---- What is in the slots ---- */

static OrtStatus *note_session(OrtStatus *status, const OrtOptions *options, OrtSession *const *out, const char *path,
                       const void *bytes, size_t size)
{
    if (!status)
        session_made(*out, options, path, bytes, size);
    return status;
}

static OrtStatus *note_mark(OrtStatus *status, const OrtOptions *options, bool own)
{
    if (!status)
        mark(options, own);
    return status;
}

static OrtStatus *note_clone(OrtStatus *status, const OrtOptions *options, OrtOptions *const *out)
{
    if (!status && is_marked(options))
        mark(*out, true);
    return status;
}

#define FUNCTION(n, name, slot, since, result, parameters, ...)                                                              \
    static result name##_##n parameters                                                                                      \
    {                                                                                                                        \
        __VA_ARGS__;                                                                                                         \
    }
REPLACED(FUNCTION, 0)
REPLACED(FUNCTION, 1)
REPLACED(FUNCTION, 2)
REPLACED(FUNCTION, 3)

/* ---- Writing them ---- */

/* The protection of a page, and whether it is known. */
static bool read_protection(uintptr_t address, int *protection)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[4352], mode[5];
    uintptr_t from, to;
    bool found = false;
    while (maps && !found && fgets(line, sizeof line, maps))
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %4s", &from, &to, mode) == 3 && from <= address && address < to) {
            *protection = (mode[0] == 'r' ? PROT_READ : 0) | (mode[1] == 'w' ? PROT_WRITE : 0) |
                          (mode[2] == 'x' ? PROT_EXEC : 0);
            found = true;
        }
    if (maps)
        fclose(maps);
    return found;
}

static bool write_slot(slot_function **slot, slot_function *function)
{
    uintptr_t size = (uintptr_t)sysconf(_SC_PAGESIZE), at = (uintptr_t)slot / size * size;
    int protection;
    if (!read_protection(at, &protection) ||
        (!(protection & PROT_WRITE) && mprotect((void *)at, size, protection | PROT_WRITE)))
        return false;
    __atomic_store_n(slot, function, __ATOMIC_RELEASE);
    if (!(protection & PROT_WRITE))
        mprotect((void *)at, size, protection);
    return true;
}

#define OURS(name) {(slot_function *)name##_0, (slot_function *)name##_1, (slot_function *)name##_2, (slot_function *)name##_3}

/* A table that was loaded again where one was before has its own functions in it. */
static void write_table(struct runtime *runtime, slot_function **table, int version)
{
    bool written = true;
    runtime->table = table;
#define WRITE(n, name, slot, since, result, parameters, ...)                                                                 \
    if (version >= (since)) {                                                                                                \
        static slot_function *const ours[] = OURS(name);                                                                     \
        slot_function *function = ours[runtime - runtimes];                                                                  \
        if (written && table[slot] != function) {                                                                            \
            runtime->name = (result(*) parameters)table[slot];                                                                   \
            written = write_slot(&table[slot], function);                                                                    \
        }                                                                                                                    \
    }
    REPLACED(WRITE, )
}

/* ONNX Runtime says so on stderr when it is asked for a table that it does not have: its version is read first. */
static void take(const struct api_base *base)
{
    int major = 0, minor = 0;
    const char *version = base ? base->version() : NULL;
    slot_function **table;
    if (!version || sscanf(version, "%d.%d", &major, &minor) != 2 || major != 1 || minor < LEAST_VERSION ||
        !(table = base->table(LEAST_VERSION)))
        return;
    pthread_mutex_lock(&patching);
    for (struct runtime *runtime = runtimes; runtime < runtimes + MOST_RUNTIMES; runtime++)
        if (!runtime->table || runtime->table == table) {
            write_table(runtime, table, minor);
            break;
        }
    pthread_mutex_unlock(&patching);
}

/* ---- Where ONNX Runtime is asked for ---- */

static dlsym_function *real_dlsym(void)
{
    static dlsym_function *cached;
    static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"};
    dlsym_function *real = __atomic_load_n(&cached, __ATOMIC_RELAXED);
    for (size_t i = 0; !real && i < sizeof versions / sizeof *versions; i++) {
        void *symbol = dlvsym(RTLD_NEXT, "dlsym", versions[i]);
        memcpy(&real, &symbol, sizeof symbol);
        __atomic_store_n(&cached, real, __ATOMIC_RELAXED);
    }
    return real;
}

EXPORTED const struct api_base *OrtGetApiBase(void);

static base_function *as_function(void *symbol)
{
    base_function *function = NULL;
    if (symbol != (void *)(uintptr_t)OrtGetApiBase)
        memcpy(&function, &symbol, sizeof symbol);
    return function;
}

/* ONNX Runtime as the library at that address is linked with it, else the next after this library. */
static base_function *next_for(void *caller)
{
    static const char name[] = "OrtGetApiBase";
    base_function *next = NULL;
    Dl_info info;
    if (dladdr(caller, &info)) {
        void *handle = dlopen(info.dli_fname, RTLD_NOLOAD | RTLD_LAZY);
        if (handle) {
            next = as_function(real_dlsym()(handle, name));
            dlclose(handle);
        }
    }
    return next ? next : as_function(real_dlsym()(RTLD_NEXT, name));
}

EXPORTED const struct api_base *OrtGetApiBase(void)
{
    base_function *next = next_for(__builtin_return_address(0));
    const struct api_base *base = next ? next() : NULL;
    take(base);
    return base;
}

static void *found_base(void *handle, void *caller)
{
    void *symbol = handle == RTLD_NEXT || handle == RTLD_DEFAULT ? NULL : real_dlsym()(handle, "OrtGetApiBase");
    base_function *next = symbol ? as_function(symbol) : next_for(caller);
    void *result = NULL;
    if (next) {
        take(next());
        memcpy(&result, &next, sizeof next);
    }
    return result;
}

/* Without strcmp, which a sanitizer may have replaced by one that is not ready when it asks for others. */
static bool is_equal(const char *a, const char *b)
{
    while (*a && *a == *b)
        a++, b++;
    return *a == *b;
}

/* All other names are looked up as if their caller had called the real one, which looks at where it returns to. */
EXPORTED void *dlsym(void *restrict handle, const char *restrict name)
{
    if (is_equal(name, "OrtGetApiBase"))
        return found_base(handle, __builtin_return_address(0));
    return real_dlsym()(handle, name);
}
