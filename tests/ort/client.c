/*
 * A program that has ONNX Runtime run a model, as any app does; it knows nothing of honed. The model gives y = x, slowly.
 *
 *   client LIBRARY MODEL KEY=VALUE ...
 *
 * LIBRARY is opened with dlopen and asked by dlsym; "-" where the program is linked with it. It prints what came of all runs, of
 * which those are routed that give y = x + 1000, as a service of the tests does. Keys:
 *   until (so many runs of a thread were routed, in at least `runs`, or four minutes have passed), runs (100 without `until`),
 *   threads, sessions (each thread has one of its own, or all share them), bytes=1 (sessions out of memory), kinds (of
 *   shapes, in turns), rows (of the first), milliseconds (runs go on for so long; -1: until standard input ends), pause (ms between
 *   two runs), and case, one of
 *   given (outputs), misfit (outputs of another shape), twice (one output asked for twice), profile, initializer, clone (of
 *   options with an initializer), terminate, fork, release (a session made anew again and again).
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef void *status;
typedef void function(void);
struct base {
    function **(*table)(uint32_t);
    const char *(*version)(void);
};
const struct base *OrtGetApiBase(void) __attribute__((weak));

static function **api;
#define ORT(slot, result, ...) ((result(*)(__VA_ARGS__))api[slot])
static void *env;
static char *model;
static const char *scenario = "";
static long runs, threads = 1, sessions = 1, from_bytes, kinds = 1, rows = 1, milliseconds, rest, until;
static void *shared[1024];

struct result {
    long runs, routed, failed, wrong;
    int64_t slowest, total;
};

static int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void must(status failed)
{
    if (!failed)
        return;
    fprintf(stderr, "%s\n", ORT(2, const char *, status)(failed));
    exit(3);
}

static void *tensor(const int64_t *shape, size_t rank, float **data)
{
    void *allocator, *value;
    must(ORT(78, status, void **)(&allocator));
    must(ORT(48, status, void *, const int64_t *, size_t, int, void **)(allocator, shape, rank, 1, &value));
    must(ORT(51, status, void *, void **)(value, (void **)data));
    return value;
}

static void *options(void)
{
    void *made, *copy;
    must(ORT(10, status, void **)(&made));
    must(ORT(24, status, void *, int)(made, 1));
    if (!strcmp(scenario, "profile"))
        must(ORT(14, status, void *, const char *)(made, "/tmp/honed-profile"));
    if (!strcmp(scenario, "initializer") || !strcmp(scenario, "clone")) {
        static float data[1];
        void *memory, *scale;
        must(ORT(69, status, int, int, void **)(1, 0, &memory));
        must(ORT(49, status, void *, void *, size_t, const int64_t *, size_t, int, void **)(memory, data, sizeof data,
                                                                                        (int64_t[]){1}, 1, 1, &scale));
        must(ORT(150, status, void *, const char *, void *)(made, "zero", scale));
    }
    if (!strcmp(scenario, "clone")) {
        must(ORT(12, status, void *, void **)(made, &copy));
        ORT(100, void, void *)(made);
        made = copy;
    }
    return made;
}

static void *session(void)
{
    void *made, *of = options();
    if (from_bytes) {
        FILE *file = fopen(model, "rb");
        char *bytes = malloc(64 << 20);
        size_t size = fread(bytes, 1, 64 << 20, file);
        fclose(file);
        must(ORT(8, status, void *, const void *, size_t, void *, void **)(env, bytes, size, of, &made));
        memset(bytes, 0, size);
        free(bytes);
    } else {
        must(ORT(7, status, void *, const char *, void *, void **)(env, model, of, &made));
    }
    ORT(100, void, void *)(of);
    return made;
}

static void release(void *session)
{
    ORT(95, void, void *)(session);
}

static void run(void *session, long number, struct result *result)
{
    static const char *const names[] = {"x", "y", "y"};
    int64_t shape[2] = {rows + number % kinds, 512}, begun, took;
    size_t count = !strcmp(scenario, "twice") ? 2 : 1;
    float *x, *y = NULL;
    void *input = tensor(shape, 2, &x), *outputs[2] = {NULL, NULL}, *run_options = NULL;
    status failed;
    for (int64_t i = 0; i < shape[0] * 512; i++)
        x[i] = (float)(number % 100) + (float)(i % 7);
    if (!strcmp(scenario, "given"))
        outputs[0] = tensor(shape, 2, &y);
    if (!strcmp(scenario, "misfit"))
        outputs[0] = tensor((int64_t[]){3, 3}, 2, &y);
    if (!strcmp(scenario, "terminate")) {
        must(ORT(39, status, void **)(&run_options));
        must(ORT(46, status, void *)(run_options));
    }
    begun = now();
    failed = ORT(9, status, void *, void *, const char *const *, void *const *, size_t, const char *const *, size_t,
                 void **)(session, run_options, names, &input, 1, names + 1, count, outputs);
    took = now() - begun;
    result->runs++;
    result->total += took;
    if (took > result->slowest)
        result->slowest = took;
    if (failed) {
        result->failed++;
        ORT(93, void, status)(failed);
    } else {
        int routed = 0, wrong = 0;
        must(ORT(51, status, void *, void **)(outputs[0], (void **)&y));
        routed = y[0] == x[0] + 1000;
        for (int64_t i = 0; i < shape[0] * 512; i++)
            wrong |= y[i] != x[i] + (routed ? 1000 : 0);
        result->routed += routed;
        result->wrong += wrong;
    }
    for (int i = 0; i < 2; i++)
        if (outputs[i])
            ORT(96, void, void *)(outputs[i]);
    if (run_options)
        ORT(97, void, void *)(run_options);
    ORT(96, void, void *)(input);
    if (rest)
        usleep((useconds_t)rest * 1000);
}

static int input_ended(void)
{
    struct pollfd input = {.fd = 0, .events = POLLIN};
    char byte;
    return poll(&input, 1, 0) > 0 && read(0, &byte, 1) <= 0;
}

static int goes_on(long count, int64_t end, const struct result *result)
{
    if (milliseconds < 0)
        return !input_ended();
    if (until)
        return now() < end && (result->routed < until || count < runs);
    return milliseconds ? now() < end : count < runs;
}

static void *work(void *argument)
{
    struct result *result = argument;
    int64_t end = now() + (until ? 240000 : milliseconds) * 1000000;
    for (long i = 0; goes_on(i, end, result); i++) {
        if (!strcmp(scenario, "release") && i % 25 == 24) {
            void *mine = session();
            for (int j = 0; j < 30; j++)
                run(mine, i + j, result);
            release(mine);
        }
        run(shared[i % sessions], i, result);
    }
    return NULL;
}

static long read_kib(const char *key)
{
    char line[256];
    long value = 0;
    FILE *file = fopen("/proc/self/status", "r");
    while (fgets(line, sizeof line, file))
        if (!strncmp(line, key, strlen(key)))
            value = atol(line + strlen(key) + 1);
    fclose(file);
    return value;
}

static int open_files(void)
{
    int count = 0;
    for (int i = 0; i < 4096; i++)
        count += fcntl(i, F_GETFD) >= 0;
    return count;
}

static struct result all(void)
{
    pthread_t running[256];
    static struct result each[256];
    struct result sum = {0};
    memset(each, 0, sizeof each);
    for (long i = 0; i < threads; i++)
        pthread_create(&running[i], NULL, work, &each[i]);
    for (long i = 0; i < threads; i++) {
        pthread_join(running[i], NULL);
        sum.runs += each[i].runs;
        sum.routed += each[i].routed;
        sum.failed += each[i].failed;
        sum.wrong += each[i].wrong;
        sum.total += each[i].total;
        if (each[i].slowest > sum.slowest)
            sum.slowest = each[i].slowest;
    }
    return sum;
}

static void print(const char *who, struct result result)
{
    printf("{\"who\": \"%s\", \"runs\": %ld, \"routed\": %ld, \"failed\": %ld, \"wrong\": %ld, "
           "\"slowest_us\": %ld, \"mean_us\": %ld, \"rss_kib\": %ld, \"files\": %d}\n",
           who, result.runs, result.routed, result.failed, result.wrong, (long)(result.slowest / 1000),
           (long)(result.total / (result.runs ? result.runs : 1) / 1000), read_kib("VmRSS"), open_files());
    fflush(stdout);
}

int main(int count, char **arguments)
{
    const struct base *base;
    model = arguments[2];
    for (int i = 3; i < count; i++) {
        char *value = strchr(arguments[i], '=');
        *value++ = 0;
        if (!strcmp(arguments[i], "case"))
            scenario = value;
        const struct {
            const char *name;
            long *number;
        } numbers[] = {{"runs", &runs},   {"threads", &threads}, {"sessions", &sessions},         {"bytes", &from_bytes},
                       {"kinds", &kinds}, {"pause", &rest},      {"milliseconds", &milliseconds},
                       {"until", &until}, {"rows", &rows}};
        for (size_t j = 0; j < sizeof numbers / sizeof *numbers; j++)
            if (!strcmp(arguments[i], numbers[j].name))
                *numbers[j].number = atol(value);
    }
    if (!runs && !until)
        runs = 100;
    if (strcmp(arguments[1], "-")) {
        void *library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
        const struct base *(*get)(void);
        if (!library) {
            fprintf(stderr, "%s\n", dlerror());
            return 4;
        }
        *(void **)&get = dlsym(library, "OrtGetApiBase");
        base = get();
    } else {
        base = OrtGetApiBase();
    }
    api = base->table(14);
    must(ORT(3, status, int, const char *, void **)(3, "client", &env));
    for (long i = 0; i < sessions; i++)
        shared[i] = session();
    print("first", all());
    if (!strcmp(scenario, "fork")) {
        pid_t child = fork();
        if (!child) {
            for (long i = 0; i < sessions; i++) /* ONNX Runtime's own threads are not in a child: new sessions */
                shared[i] = session();
            print("child", all());
            fflush(NULL);
            _exit(0);
        }
        print("parent", all());
        waitpid(child, NULL, 0);
    }
    print("second", all());
    for (long i = 0; i < sessions; i++)
        release(shared[i]);
    ORT(92, void, void *)(env);
    return 0;
}
