/*
 * libhoned-ort.so: an app's own ONNX Runtime, with those runs answered by honed that it answers faster.
 *
 * interpose.c writes functions into the table of each ONNX Runtime of the process, sessions.c decides on each run by
 * policy.c, routed.c has the service answer one, and worker.c asks the service in the background.
 *
 * Slots of the table, by ONNX Runtime's promise that they stay; only what is used, declared here by number.
 */
#ifndef HONED_ORT_H
#define HONED_ORT_H

#include <pthread.h>
#include <sys/stat.h>

#include "../src/internal.h"
#include "../src/bring.h"
#include "policy.h"

typedef struct OrtStatus OrtStatus;
typedef struct OrtEnv OrtEnv;
typedef struct OrtSession OrtSession;
typedef struct OrtOptions OrtOptions; /* of sessions and of runs */
typedef struct OrtValue OrtValue;
typedef struct OrtShapeInfo OrtShapeInfo;
typedef struct OrtAllocator OrtAllocator;
typedef struct OrtMemoryInfo OrtMemoryInfo;
typedef struct OrtContainer OrtContainer; /* of prepacked weights */

/*
 * What is replaced, by slot and the minor version of ONNX Runtime it came in, with its parameters and what ours does in the
 * runtime of number n. What makes sessions comes last, when all that they need is there.
 */
#define REPLACED(X, n)                                                                                                       \
    X(n, run, 9, 0, OrtStatus *, (OrtSession *session, const OrtOptions *options, const char *const *input_names,            \
       const OrtValue *const *inputs, size_t input_count, const char *const *output_names, size_t output_count,              \
       OrtValue **outputs),                                                                                                  \
      struct run run = {session, options, input_names, inputs, input_count, output_names, output_count, outputs};            \
      return decide_run(&runtimes[n], &run))                                                                                 \
    X(n, clone_options, 12, 0, OrtStatus *, (const OrtOptions *options, OrtOptions **out),                                   \
      return note_clone(runtimes[n].clone_options(options, out), options, out))                                              \
    X(n, profile, 14, 0, OrtStatus *, (OrtOptions *options, const char *prefix),                                             \
      return note_mark(runtimes[n].profile(options, prefix), options, true))                                                 \
    X(n, terminate, 46, 0, OrtStatus *, (OrtOptions *options),                                                               \
      return note_mark(runtimes[n].terminate(options), options, true))                                                       \
    X(n, unterminate, 47, 0, OrtStatus *, (OrtOptions *options),                                                             \
      return note_mark(runtimes[n].unterminate(options), options, false))                                                    \
    X(n, release_session, 95, 0, void, (OrtSession *session),                                                                \
      session_released(session);                                                                                             \
      runtimes[n].release_session(session))                                                                                  \
    X(n, release_run_options, 97, 0, void, (OrtOptions *options),                                                            \
      mark(options, false);                                                                                                  \
      runtimes[n].release_run_options(options))                                                                              \
    X(n, release_options, 100, 0, void, (OrtOptions *options),                                                               \
      mark(options, false);                                                                                                  \
      runtimes[n].release_options(options))                                                                                  \
    X(n, add_initializer, 150, 5, OrtStatus *, (OrtOptions *options, const char *name, const OrtValue *value),               \
      return note_mark(runtimes[n].add_initializer(options, name, value), options, true))                                    \
    X(n, add_external_initializers, 210, 12, OrtStatus *, (OrtOptions *options, const char *const *names,                    \
       const OrtValue *const *values, size_t count),                                                                         \
      return note_mark(runtimes[n].add_external_initializers(options, names, values, count), options, true))                 \
    X(n, add_external_initializers_in_memory, 279, 18, OrtStatus *, (OrtOptions *options, const char *const *names,          \
       char *const *buffers, const size_t *sizes, size_t count),                                                             \
      return note_mark(runtimes[n].add_external_initializers_in_memory(options, names, buffers, sizes, count),               \
                       options, true))                                                                                       \
    X(n, add_adapter, 283, 20, OrtStatus *, (OrtOptions *options, const void *adapter),                                      \
      return note_mark(runtimes[n].add_adapter(options, adapter), options, true))                                            \
    X(n, create, 7, 0, OrtStatus *, (const OrtEnv *env, const char *path, const OrtOptions *options, OrtSession **out),      \
      return note_session(runtimes[n].create(env, path, options, out), options, out, path, NULL, 0))                         \
    X(n, create_from_bytes, 8, 0, OrtStatus *, (const OrtEnv *env, const void *bytes, size_t size,                           \
       const OrtOptions *options, OrtSession **out),                                                                         \
      return note_session(runtimes[n].create_from_bytes(env, bytes, size, options, out), options, out, NULL, bytes, size))   \
    X(n, create_prepacked, 168, 8, OrtStatus *, (const OrtEnv *env, const char *path, const OrtOptions *options,             \
       OrtContainer *weights, OrtSession **out),                                                                             \
      return note_session(runtimes[n].create_prepacked(env, path, options, weights, out), options, out, path, NULL, 0))      \
    X(n, create_prepacked_from_bytes, 169, 8, OrtStatus *, (const OrtEnv *env, const void *bytes, size_t size,               \
       const OrtOptions *options, OrtContainer *weights, OrtSession **out),                                                  \
      return note_session(runtimes[n].create_prepacked_from_bytes(env, bytes, size, options, weights, out), options, out,    \
                          NULL, bytes, size))

/* What is called. MemoryInfoGetDeviceType, the last to come, makes 1.14 safe to use. */
enum { LEAST_VERSION = 14 };
enum slot {
    CREATE_TENSOR = 48,
    MUTABLE_DATA = 51,
    ELEMENT_TYPE = 60,
    DIMENSIONS_COUNT = 61,
    DIMENSIONS = 62,
    TYPE_AND_SHAPE = 65,
    VALUE_TYPE = 67,
    DEFAULT_ALLOCATOR = 78,
    RELEASE_STATUS = 93,
    RELEASE_VALUE = 96,
    RELEASE_SHAPE_INFO = 99,
    MEMORY_INFO = 194,
    DEVICE_TYPE = 225
};
enum { ORT_TENSOR = 1, ORT_CPU = 0 };

typedef void slot_function(void);

/* One ONNX Runtime of the process: its table, and what was in the slots that were replaced. */
struct runtime {
    slot_function **table;
#define FIELD(n, name, slot, since, result, parameters, ...) result(*name) parameters;
    REPLACED(FIELD, )
#undef FIELD
};

/* The arguments of a run. */
struct run {
    OrtSession *session;
    const OrtOptions *options;
    const char *const *input_names;
    const OrtValue *const *inputs;
    size_t input_count;
    const char *const *output_names;
    size_t output_count;
    OrtValue **outputs;
};

struct read_kind {
    struct shapes shapes; /* the names are the app's */
    honed_type types[MOST_TENSORS];
    const void *data[MOST_TENSORS];
    uint64_t hash;
};

enum { MOST_KINDS = 8, WHY_BYTES = 256, LINE_BYTES = 640 };

/* A kind of runs of a session: types and shapes of its inputs, and its outputs. */
struct kept_kind {
    uint64_t hash;
    struct route route;
    struct shapes shapes; /* the names are its own */
    unsigned busy;        /* runs under way */
    uint64_t used, reported_own, reported_routed;
    char why[WHY_BYTES]; /* the service's words */
};

struct session {
    struct session *next;
    OrtSession *address;
    char *path; /* NULL for one made of bytes, which lie in `bytes` until the service has them */
    int bytes;
    struct stat file;
    char model[MODEL_NAME_BYTES]; /* as the service knows it; "" until then */
    bool refused, released;
    unsigned references; /* of the table, and of the background */
    int64_t rest_until;
    uint64_t rested, uncounted; /* runs while it rests, and those of them that no kind has counted yet */
    struct kept_kind *kinds[MOST_KINDS];
};

struct settings {
    bool half, log;
    double allowance;
    char app[64];
};
extern struct settings settings;

/* sessions.c. The state of the process is entered and left; it is a new one in a forked child. */
void enter(void);
void leave(void);
void wait_entered(pthread_cond_t *condition); /* leaves while it waits */
bool read_kind(const struct runtime *runtime, const struct run *run, struct read_kind *kind);
OrtStatus *decide_run(const struct runtime *runtime, const struct run *run);
void session_made(OrtSession *session, const OrtOptions *options, const char *path, const void *bytes, size_t size);
void session_released(OrtSession *session);
void mark(const void *options, bool marked); /* whose sessions or runs are left alone */
bool is_marked(const void *options);
void session_drop(struct session *session); /* entered */
bool is_same_file(const struct stat *one, const struct stat *other);
struct session *session_like(const struct session *session); /* one whose file the service has; entered */
void say_changes(const struct session *session, const struct kept_kind *kind, const struct route *before, char *line);
void say(const char *line);

/* routed.c */
struct line; /* a connection to the service */
struct line *line_take(void); /* entered; NULL where all are in use */
void line_give(struct line *line); /* entered */
void lines_forget(void); /* in a forked child, like the next */
void service_forget(honed_service *service); /* may be NULL; its memory may be in any state */
/* Whether the service has answered; else nothing has changed, and the app's session can run. */
bool answer_run(const struct runtime *runtime, const struct run *run, const struct read_kind *kind, struct line *line,
                const char *model, int64_t deadline);

/* worker.c; entered. */
void worker_ask(struct session *session, struct kept_kind *kind, bool reporting);
void worker_forget(void); /* in a forked child */

#endif
