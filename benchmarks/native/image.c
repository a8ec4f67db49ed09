/*
 * Runs a model on an image by ONNX Runtime's C API, for each line of standard input once: image MODEL [LIBRARY]. Without LIBRARY
 * it is linked with ONNX Runtime, else built with -DOPENED, and opens it.
 */
#include <dlfcn.h>
#include <onnxruntime_c_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { SIDE = 160, PIXELS = 3 * SIDE * SIDE, SHOWN = 1000 };
static const OrtApi *ort;

static void must(OrtStatus *status)
{
    if (!status)
        return;
    fprintf(stderr, "%s\n", ort->GetErrorMessage(status));
    exit(1);
}

static const OrtApiBase *base_of(const char *library)
{
#ifdef OPENED
    const OrtApiBase *(*get)(void);
    void *opened = dlopen(library, RTLD_NOW);
    if (!opened) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    *(void **)&get = dlsym(opened, "OrtGetApiBase");
    return get();
#else
    (void)library;
    return OrtGetApiBase();
#endif
}

int main(int count, char **arguments)
{
    static float pixels[PIXELS];
    static const char *const inputs[] = {"x"}, *const outputs[] = {"y"};
    const int64_t shape[] = {1, 3, SIDE, SIDE};
    OrtEnv *env;
    OrtSessionOptions *options;
    OrtSession *session;
    OrtMemoryInfo *memory;
    OrtValue *image;
    char line[64];
    ort = base_of(count > 2 ? arguments[2] : NULL)->GetApi(ORT_API_VERSION);
    for (int i = 0; i < PIXELS; i++)
        pixels[i] = (float)(i * 7919LL % 1000) / 1000;
    must(ort->CreateEnv(ORT_LOGGING_LEVEL_ERROR, "image", &env));
    must(ort->CreateSessionOptions(&options));
    must(ort->SetIntraOpNumThreads(options, 1));
    must(ort->CreateSession(env, arguments[1], options, &session));
    must(ort->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory));
    must(ort->CreateTensorWithDataAsOrtValue(memory, pixels, sizeof pixels, shape, 4, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, &image));
    do {
        OrtValue *found = NULL;
        float *y;
        struct timespec begun, ended;
        clock_gettime(CLOCK_MONOTONIC, &begun);
        must(ort->Run(session, NULL, inputs, (const OrtValue *const *)&image, 1, outputs, 1, &found));
        clock_gettime(CLOCK_MONOTONIC, &ended);
        must(ort->GetTensorMutableData(found, (void **)&y));
        printf("{\"found\": [");
        for (int i = 0; i < SHOWN; i++)
            printf("%s%.6f", i ? ", " : "", (double)y[i]);
        printf("], \"ms\": %.6f}\n", (double)(ended.tv_sec - begun.tv_sec) * 1e3 + (double)(ended.tv_nsec - begun.tv_nsec) / 1e6);
        fflush(stdout);
        ort->ReleaseValue(found);
    } while (fgets(line, sizeof line, stdin));
    ort->ReleaseValue(image);
    ort->ReleaseSession(session);
    ort->ReleaseSessionOptions(options);
    ort->ReleaseMemoryInfo(memory);
    ort->ReleaseEnv(env);
    return 0;
}
