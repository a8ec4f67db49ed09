/* Builds OpenCL C with the first device there is, in its own process: Mesa 26's driver does not survive a
 * fork. What crashes the compiler or takes it too long ends the server, and its runner starts another.
 *
 * Reads lines with a path, and for each writes a line once PATH.dump (what the driver printed to its stdout)
 * and PATH.stats (to its stderr) are complete: "built", or "refused" (the build log is in PATH.stats). A
 * program has SECONDS of CPU time.
 */
#define CL_TARGET_OPENCL_VERSION 300
#include <CL/cl.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

enum { LONGEST = 4096 };

/* In place of libdrm's, which the no-op device refuses: the driver waits by them for its uploads of tables. */
int drmSyncobjExportSyncFile(int device, unsigned handle, int *file)
{
    (void)device, (void)handle;
    *file = open("/dev/null", O_RDONLY);
    return *file < 0;
}

int drmSyncobjImportSyncFile(int device, unsigned handle, int file)
{
    (void)device, (void)handle, (void)file;
    return 0;
}

static cl_device_id device;
static cl_context context;

static char *contents(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (!file)
        return NULL;
    fseek(file, 0, SEEK_END);
    long size = ftell(file);
    rewind(file);
    char *text = size < 0 ? NULL : malloc((size_t)size + 1);
    if (text)
        text[fread(text, 1, (size_t)size, file)] = 0;
    fclose(file);
    return text;
}

static int build(const char *source)
{
    cl_int error;
    cl_program program = clCreateProgramWithSource(context, 1, &source, NULL, &error);
    if (!program)
        return error;
    error = clBuildProgram(program, 1, &device, "", NULL, NULL);
    if (error) {
        static char log[1 << 16];
        clGetProgramBuildInfo(program, device, CL_PROGRAM_BUILD_LOG, sizeof log - 1, log, NULL);
        fprintf(stderr, "%s\n", log);
    }
    clReleaseProgram(program);
    return error;
}

/* What is written to `stream` from now on goes to PATH and `end`. */
static int send_to(const char *path, const char *end, FILE *stream)
{
    char file[LONGEST + 8];
    snprintf(file, sizeof file, "%s%s", path, end);
    int opened = open(file, O_CREAT | O_TRUNC | O_WRONLY, 0644);
    int moved = opened < 0 ? -1 : dup2(opened, fileno(stream));
    close(opened);
    return moved;
}

/* The process, which has taken some CPU time already, has so many seconds more. */
static void limit(rlim_t seconds)
{
    struct rusage used;
    struct rlimit most;
    getrusage(RUSAGE_SELF, &used);
    getrlimit(RLIMIT_CPU, &most);
    most.rlim_cur = (rlim_t)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) + 1 + seconds;
    setrlimit(RLIMIT_CPU, &most);
}

static int build_file(const char *path)
{
    if (send_to(path, ".dump", stdout) < 0 || send_to(path, ".stats", stderr) < 0)
        return -1;
    char *source = contents(path);
    int error = source ? build(source) : -1;
    free(source);
    fflush(stdout);
    fflush(stderr);
    return error;
}

static int open_device(void)
{
    cl_platform_id platforms[16];
    cl_uint count = 0;
    if (clGetPlatformIDs(16, platforms, &count) || !count)
        return 0;
    for (cl_uint n = 0; n < count && n < 16; n++)
        if (!clGetDeviceIDs(platforms[n], CL_DEVICE_TYPE_ALL, 1, &device, NULL)) {
            context = clCreateContext(NULL, 1, &device, NULL, NULL, NULL);
            return context != NULL;
        }
    return 0;
}

int main(void)
{
    static char path[LONGEST];
    const char *seconds = getenv("SECONDS");
    FILE *answers = fdopen(dup(STDOUT_FILENO), "w");
    if (!answers || !freopen("/dev/null", "w", stdout))
        return 1;
    setvbuf(stdout, NULL, _IOFBF, 1 << 20);
    /* Once here, so that every program finds the compiler's own library loaded. */
    if (!open_device() || build("__kernel void warm(__global float *a) { a[get_global_id(0)] *= 2; }")) {
        fprintf(stderr, "there is no OpenCL device\n");
        return 1;
    }
    fflush(stdout);
    fprintf(answers, "ready\n");
    fflush(answers);
    while (fgets(path, sizeof path, stdin)) {
        path[strcspn(path, "\n")] = 0;
        limit(seconds ? (rlim_t)atoi(seconds) : 60);
        fprintf(answers, "%s\n", build_file(path) ? "refused" : "built");
        fflush(answers);
    }
    return 0;
}
