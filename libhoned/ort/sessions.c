/* The sessions of the process, and which of their runs are routed. */
#include "ort.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { BUCKETS = 256, MOST_MARKS = 256, LOOK_EVERY = 16 };
static const int64_t FOREVER = INT64_MAX;

struct settings settings = {.allowance = 1.0};

/* ---- The state of this process ---- */

static pthread_mutex_t lock;
static struct account account;
static struct session *table[BUCKETS];
static const void *marks[MOST_MARKS];
static unsigned mark_count;
static uint64_t uses;

/*
 * A page that the kernel clears in a forked child, whichever way it was forked: NEW there, until one thread has made the state
 * anew. What the child inherits belongs to threads that it does not have.
 */
enum { NEW, CHANGING, CURRENT };
static int *page;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void init_state(void)
{
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setprotocol(&attributes, PTHREAD_PRIO_INHERIT);
    memset(&lock, 0, sizeof lock);
    pthread_mutex_init(&lock, &attributes);
    pthread_mutexattr_destroy(&attributes);
    for (size_t i = 0; i < BUCKETS; i++)
        for (; table[i]; table[i] = table[i]->next)
            if (table[i]->bytes >= 0)
                close(table[i]->bytes);
    mark_count = mark_count == MOST_MARKS ? 0 : mark_count;
    account = (struct account){.begun = now()};
    lines_forget();
    worker_forget();
}

static void read_settings(void)
{
    const char *precision = getenv("HONED_ORT_PRECISION"), *logged = getenv("HONED_ORT_LOG");
    const char *allowed = getenv("HONED_ORT_ALLOWANCE");
    double allowance = allowed ? strtod(allowed, NULL) : 1.0;
    settings.half = precision && !strcmp(precision, "auto");
    settings.log = logged && !strcmp(logged, "1");
    if (allowance >= 0.1 && allowance <= 10)
        settings.allowance = allowance;
    snprintf(settings.app, sizeof settings.app, "%s", program_invocation_short_name);
    page = mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED || madvise(page, sizeof *page, MADV_WIPEONFORK))
        page = NULL; /* without it nothing is routed */
}

static bool usable(void)
{
    int expected = NEW;
    pthread_once(&once, read_settings);
    if (!page)
        return false;
    if (__atomic_load_n(page, __ATOMIC_ACQUIRE) == CURRENT)
        return true;
    if (__atomic_compare_exchange_n(page, &expected, CHANGING, false, __ATOMIC_ACQUIRE, __ATOMIC_ACQUIRE)) {
        init_state();
        __atomic_store_n(page, CURRENT, __ATOMIC_RELEASE);
    }
    while (__atomic_load_n(page, __ATOMIC_ACQUIRE) != CURRENT)
        ;
    return true;
}

void enter(void)
{
    pthread_mutex_lock(&lock);
}

void leave(void)
{
    pthread_mutex_unlock(&lock);
}

void wait_entered(pthread_cond_t *condition)
{
    pthread_cond_wait(condition, &lock);
}

/* ---- Options that make a session or a run its app's own ---- */

static unsigned mark_at(const void *options)
{
    unsigned at = 0;
    while (at < mark_count && marks[at] != options)
        at++;
    return at;
}

/* Without room everything is marked. */
bool is_marked(const void *options)
{
    return options && (mark_count == MOST_MARKS || mark_at(options) < mark_count);
}

void mark(const void *options, bool marked)
{
    if (!usable())
        return;
    enter();
    unsigned at = mark_at(options);
    if (marked && at == mark_count && mark_count < MOST_MARKS)
        marks[mark_count++] = options;
    else if (!marked && at < mark_count)
        marks[at] = marks[--mark_count];
    leave();
}

/* ---- The log ---- */

static const char *file_name(const struct session *session)
{
    return session->path ? name_of(session->path) : "a model in memory";
}

static void shape_text(const struct shapes *shapes, char *text, size_t room)
{
    size_t at = 0;
    for (size_t i = 0; i < shapes->count && at < room; i++) {
        at += (size_t)snprintf(text + at, room - at, "%s", i ? ", " : "");
        for (size_t d = 0; d < shapes->ranks[i] && at < room; d++)
            at += (size_t)snprintf(text + at, room - at, "%s%" PRId64, d ? "x" : "", shapes->sizes[i][d]);
    }
}

void say_changes(const struct session *session, const struct kept_kind *kind, const struct route *before, char *line)
{
    const struct route *route = &kind->route;
    char shapes[160];
    *line = 0;
    if (!settings.log || (route->state == before->state && route->why == before->why))
        return;
    shape_text(&kind->shapes, shapes, sizeof shapes);
    snprintf(line, LINE_BYTES, "honed: %.80s (%s): %s; own %.3f ms, routed %.3f ms%s%s\n", file_name(session), shapes,
             route_state_name(route->state), (double)route->own_median / 1e6, (double)route->routed_median / 1e6,
             route->why == WHY_NONE ? "" : "; ",
             route->why == WHY_SERVICE && *kind->why ? kind->why : route_why_text(route->why));
}

void say(const char *line)
{
    if (*line && write(STDERR_FILENO, line, strlen(line)) < 0)
        return; /* nobody reads it */
}

/* How many runs of each kind, but for those that failed, were routed; those not looked at count as of the first. */
static void total_text(const struct session *session, char *text)
{
    char shapes[160];
    *text = 0;
    for (size_t i = 0; settings.log && i < MOST_KINDS && session->kinds[i]; i++) {
        const struct route *route = &session->kinds[i]->route;
        uint64_t runs = route->own_runs + route->routed_runs + (i ? 0 : session->uncounted);
        shape_text(&session->kinds[i]->shapes, shapes, sizeof shapes);
        text += snprintf(text, LINE_BYTES, "honed: %.80s (%s): %" PRIu64 " of %" PRIu64 " runs routed\n", file_name(session),
                         shapes, route->routed_runs, runs);
    }
}

/* ---- Sessions ---- */

static struct session **bucket(const OrtSession *address)
{
    return &table[((uintptr_t)address >> 4) % BUCKETS];
}

static struct session *find_session(const OrtSession *address)
{
    struct session *session = *bucket(address);
    while (session && session->address != address)
        session = session->next;
    return session;
}

static char *absolute(const char *path)
{
    char folder[4096], *joined;
    if (*path == '/')
        return strdup(path);
    if (!getcwd(folder, sizeof folder) || !(joined = malloc(strlen(folder) + strlen(path) + 2)))
        return NULL;
    sprintf(joined, "%s/%s", folder, path);
    return joined;
}

/* A file of these bytes, which the app may free; -1 where there is no memory. */
static int keep_bytes(const void *bytes, size_t size)
{
    int descriptor = memfd_create("honed-model", MFD_CLOEXEC);
    for (size_t at = 0; descriptor >= 0 && at < size;) {
        ssize_t written = write(descriptor, (const char *)bytes + at, size - at);
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0) {
            close(descriptor);
            return -1;
        }
        at += (size_t)written;
    }
    return descriptor;
}

static void free_kind(struct kept_kind *kind)
{
    for (size_t i = 0; i < kind->shapes.count; i++)
        free((char *)(uintptr_t)kind->shapes.names[i]);
    free(kind);
}

static void free_session(struct session *session)
{
    for (size_t i = 0; i < MOST_KINDS && session->kinds[i]; i++)
        free_kind(session->kinds[i]);
    if (session->bytes >= 0)
        close(session->bytes);
    free(session->path);
    free(session);
}

void session_drop(struct session *session)
{
    if (!--session->references)
        free_session(session);
}

void session_made(OrtSession *address, const OrtOptions *options, const char *path, const void *bytes, size_t size)
{
    struct session *session = usable() ? calloc(1, sizeof *session) : NULL;
    bool kept;
    if (!session)
        return;
    session->address = address;
    session->references = 1;
    session->path = path ? absolute(path) : NULL;
    session->bytes = path ? -1 : keep_bytes(bytes, size);
    kept = path ? session->path && !stat(session->path, &session->file) && S_ISREG(session->file.st_mode)
                : session->bytes >= 0;
    enter();
    if (kept && !is_marked(options)) {
        session->next = *bucket(address);
        *bucket(address) = session;
        session = NULL;
    }
    leave();
    if (session)
        free_session(session);
}

void session_released(OrtSession *address)
{
    char text[MOST_KINDS * LINE_BYTES] = "";
    if (!usable())
        return;
    enter();
    for (struct session **at = bucket(address); *at; at = &(*at)->next)
        if ((*at)->address == address) {
            struct session *session = *at;
            *at = session->next;
            session->released = true;
            total_text(session, text);
            session_drop(session);
            break;
        }
    leave();
    say(text);
}

/* Of sessions that the program leaves to its end, and of all. */
__attribute__((destructor)) static void say_totals(void)
{
    char text[MOST_KINDS * LINE_BYTES];
    if (!settings.log || !uses || !usable())
        return;
    for (size_t i = 0; i < BUCKETS; i++) {
        enter();
        for (struct session *session = table[i]; session; session = session->next) {
            total_text(session, text);
            say(text);
        }
        leave();
    }
    snprintf(text, sizeof text, "honed: switching has cost %.1f ms in %.1f s\n", (double)account.excess / 1e6,
             (double)(now() - account.begun) / 1e9);
    say(text);
}

bool is_same_file(const struct stat *one, const struct stat *other)
{
    return one->st_dev == other->st_dev && one->st_ino == other->st_ino && one->st_size == other->st_size &&
           !memcmp(&one->st_mtim, &other->st_mtim, sizeof one->st_mtim);
}

struct session *session_like(const struct session *session)
{
    for (size_t i = 0; session->path && i < BUCKETS; i++)
        for (struct session *other = table[i]; other; other = other->next)
            if (*other->model && other->path && is_same_file(&other->file, &session->file))
                return other;
    return NULL;
}

/* ---- Kinds of runs ---- */

/* Whether a kind may be forgotten for another. */
static bool is_idle(const struct kept_kind *kind)
{
    return !kind->busy && !kind->route.asking && kind->route.state == ROUTE_OWN;
}

static struct kept_kind *make_kind(const struct read_kind *read)
{
    struct kept_kind *kind = calloc(1, sizeof *kind);
    if (!kind)
        return NULL;
    kind->hash = read->hash;
    kind->shapes = read->shapes;
    for (size_t i = 0; i < kind->shapes.count; i++)
        if (!(kind->shapes.names[i] = strdup(read->shapes.names[i])))
            kind->shapes.count = i;
    route_init(&kind->route, &account, settings.allowance, settings.half, now());
    return kind;
}

static struct kept_kind *find_kind(struct session *session, const struct read_kind *read)
{
    struct kept_kind **oldest = NULL;
    for (size_t i = 0; i < MOST_KINDS; i++) {
        struct kept_kind **at = &session->kinds[i];
        if (!*at || (*at)->hash == read->hash) {
            oldest = at;
            break;
        }
        if (is_idle(*at) && (!oldest || (*at)->used < (*oldest)->used))
            oldest = at;
    }
    if (!oldest)
        return NULL;
    if (*oldest && (*oldest)->hash != read->hash) {
        free_kind(*oldest);
        *oldest = NULL;
    }
    if (!*oldest)
        *oldest = make_kind(read);
    if (*oldest)
        (*oldest)->used = ++uses;
    return *oldest;
}

/* Until when runs of the session need not be looked at, if all its kinds rest. */
static int64_t rests_until(const struct session *session, int64_t time)
{
    int64_t until = FOREVER;
    for (size_t i = 0; i < MOST_KINDS && session->kinds[i]; i++) {
        const struct route *route = &session->kinds[i]->route;
        if (!route_rests(route, time))
            return 0;
        if (!route->asking && route->ask_at < until)
            until = route->ask_at;
    }
    return until;
}

/* ---- A run ---- */

static OrtStatus *run_own(const struct runtime *runtime, const struct run *run)
{
    return runtime->run(run->session, run->options, run->input_names, run->inputs, run->input_count, run->output_names,
                        run->output_count, run->outputs);
}

/* The session where this run is to be looked at. */
static struct session *look_at(const struct run *run, int64_t began)
{
    struct session *session;
    enter();
    session = find_session(run->session);
    if (session && mark_count && is_marked(run->options)) {
        session = NULL;
    } else if (session && began < session->rest_until && ++session->rested % LOOK_EVERY) {
        session->uncounted++;
        session = NULL;
    }
    leave();
    return session;
}

/* What is left to do when a run has ended; entered. */
static void finish(struct session *session, struct kept_kind *kind, int64_t time)
{
    enum route_ask ask = route_ask(&kind->route, time);
    if (ask)
        worker_ask(session, kind, ask == ASK_REPORTING);
    kind->busy--;
    session->rest_until = rests_until(session, time);
}

OrtStatus *decide_run(const struct runtime *runtime, const struct run *run)
{
    struct read_kind read;
    struct route before;
    struct kept_kind *kind;
    struct line *line = NULL;
    OrtStatus *status = NULL;
    bool answered = false;
    int64_t began = now(), ended, deadline = 0;
    struct session *session = usable() ? look_at(run, began) : NULL;
    char model[MODEL_NAME_BYTES], text[LINE_BYTES];
    if (!session || !read_kind(runtime, run, &read))
        return run_own(runtime, run);

    enter();
    kind = find_kind(session, &read);
    if (kind) {
        before = kind->route;
        kind->busy++;
        kind->route.own_runs += session->uncounted;
        session->uncounted = 0;
        if (kind->route.state != ROUTE_OWN && (line = line_take()) && !(deadline = route_begin(&kind->route, began))) {
            line_give(line);
            line = NULL;
        }
        memcpy(model, session->model, sizeof model);
        say_changes(session, kind, &before, text);
    }
    leave();
    if (!kind)
        return run_own(runtime, run);
    say(text);

    if (line)
        answered = answer_run(runtime, run, &read, line, model, deadline);
    else
        began = now(), status = run_own(runtime, run);
    ended = now();
    enter();
    before = kind->route;
    if (line) {
        line_give(line);
        (answered ? route_ran_routed : route_failed)(&kind->route, ended, ended - began);
    } else if (!status) {
        route_ran_own(&kind->route, ended, ended - began);
    }
    finish(session, kind, ended);
    say_changes(session, kind, &before, text);
    leave();
    say(text);
    return line && !answered ? run_own(runtime, run) : status;
}
