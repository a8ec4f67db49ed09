/* Builds OpenCL C with the first device there is, each program in a process of its own: what crashes the
 * compiler or takes it too long costs one program.
 *
 * Reads lines with a path, and for each writes a line once PATH.dump (what the driver printed to its stdout)
 * and PATH.stats (to its stderr) are complete: "built", "refused" (the build log is in PATH.stats), or how
 * the process ended. A program has SECONDS of CPU time.
 */
#define CL_TARGET_OPENCL_VERSION 300
#include <CL/cl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LONGEST = 4096 };

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

static void build_file(const char *path, rlim_t seconds)
{
    char file[LONGEST + 8];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    struct rlimit limit = {seconds, seconds};
    setrlimit(RLIMIT_CPU, &limit);
    snprintf(file, sizeof file, "%s.dump", path);
    if (!freopen(file, "w", stdout))
        _exit(3);
    setvbuf(stdout, NULL, _IOFBF, 1 << 20);
    snprintf(file, sizeof file, "%s.stats", path);
    if (!freopen(file, "w", stderr))
        _exit(3);
    char *source = contents(path);
    int error = source ? build(source) : -1;
    fflush(stdout);
    fflush(stderr);
    _exit(error ? 2 : 0);
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
    /* Once here, so that every program finds the compiler's own library loaded. */
    if (!open_device() || build("__kernel void warm(__global float *a) { a[get_global_id(0)] *= 2; }")) {
        fprintf(stderr, "there is no OpenCL device\n");
        return 1;
    }
    fprintf(answers, "ready\n");
    fflush(answers);
    while (fgets(path, sizeof path, stdin)) {
        int status;
        path[strcspn(path, "\n")] = 0;
        fflush(stderr);
        pid_t pid = fork();
        if (pid == 0)
            build_file(path, seconds ? (rlim_t)atoi(seconds) : 60);
        if (pid < 0 || waitpid(pid, &status, 0) < 0)
            fprintf(answers, "finds no process for it\n");
        else if (WIFSIGNALED(status))
            fprintf(answers, "was ended by %s\n", strsignal(WTERMSIG(status)));
        else
            fprintf(answers, "%s\n", WEXITSTATUS(status) ? "refused" : "built");
        fflush(answers);
    }
    return 0;
}
