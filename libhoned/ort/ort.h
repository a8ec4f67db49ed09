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
#include "asking.h"
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
 * What is replaced, and in which minor version of ONNX Runtime it came: what makes sessions last, when all that they need is
 * there.
 */
#define REPLACED(X)                                                                                                          \
    X(run, 9, 0)                                                                                                             \
    X(clone_options, 12, 0)                                                                                                  \
    X(profile, 14, 0)                                                                                                        \
    X(terminate, 46, 0)                                                                                                      \
    X(unterminate, 47, 0)                                                                                                    \
    X(release_session, 95, 0)                                                                                                \
    X(release_run_options, 97, 0)                                                                                            \
    X(release_options, 100, 0)                                                                                               \
    X(add_initializer, 150, 5)                                                                                               \
    X(add_external_initializers, 210, 12)                                                                                    \
    X(add_external_initializers_in_memory, 279, 18)                                                                          \
    X(add_adapter, 283, 20)                                                                                                  \
    X(create, 7, 0)                                                                                                          \
    X(create_from_bytes, 8, 0)                                                                                               \
    X(create_prepacked, 168, 8)                                                                                              \
    X(create_prepacked_from_bytes, 169, 8)

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
typedef OrtStatus *create_function(const OrtEnv *, const char *, const OrtOptions *, OrtSession **);
typedef OrtStatus *create_from_bytes_function(const OrtEnv *, const void *, size_t, const OrtOptions *, OrtSession **);
typedef OrtStatus *create_prepacked_function(const OrtEnv *, const char *, const OrtOptions *, OrtContainer *, OrtSession **);
typedef OrtStatus *create_prepacked_from_bytes_function(const OrtEnv *, const void *, size_t, const OrtOptions *,
                                                        OrtContainer *, OrtSession **);
typedef OrtStatus *run_function(OrtSession *, const OrtOptions *, const char *const *, const OrtValue *const *, size_t,
                                const char *const *, size_t, OrtValue **);
typedef OrtStatus *clone_options_function(const OrtOptions *, OrtOptions **);
typedef OrtStatus *profile_function(OrtOptions *, const char *);
typedef OrtStatus *terminate_function(OrtOptions *);
typedef OrtStatus *unterminate_function(OrtOptions *);
typedef void release_session_function(OrtSession *);
typedef void release_run_options_function(OrtOptions *);
typedef void release_options_function(OrtOptions *);
typedef OrtStatus *add_initializer_function(OrtOptions *, const char *, const OrtValue *);
typedef OrtStatus *add_external_initializers_function(OrtOptions *, const char *const *, const OrtValue *const *, size_t);
typedef OrtStatus *add_external_initializers_in_memory_function(OrtOptions *, const char *const *, char *const *,
                                                                const size_t *, size_t);
typedef OrtStatus *add_adapter_function(OrtOptions *, const void *);

/* One ONNX Runtime of the process: its table, and what was in the slots that were replaced. */
struct runtime {
    slot_function **table;
#define FIELD(name, slot, since) name##_function *name;
    REPLACED(FIELD)
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

enum { MOST_KINDS = 8 };

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
    uint64_t skipped; /* runs since one was looked at */
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
void say_changes(const struct session *session, const struct kept_kind *kind, const struct route *before, char *line);
enum { LINE_BYTES = 640 };

/* routed.c */
struct line; /* a connection to the service */
struct line *line_take(void); /* entered; NULL where all are in use */
void line_give(struct line *line); /* entered */
void lines_forget(void);      /* in a forked child */
/* Whether the service has answered; else nothing has changed, and the app's session can run. */
bool answer_run(const struct runtime *runtime, const struct run *run, const struct read_kind *kind, struct line *line,
                const char *model, int64_t deadline);

/* worker.c; entered. */
void worker_ask(struct session *session, struct kept_kind *kind, bool reporting);
void worker_forget(void); /* in a forked child */
/* A session whose file the service has. */
struct session *session_like(const struct session *session);

#endif
