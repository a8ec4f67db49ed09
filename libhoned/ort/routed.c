/* A run that the service answers. */
#include "ort.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../src/request.h"
#include "../src/transport.h"

enum { MOST_LINES = 16, MOST_REQUESTS = 8, MOST_OUTPUTS = MOST_TENSORS, LEAST_SHARED = 1 << 16 };

/* ---- Connections: each belongs to one run at a time ---- */

struct line {
    honed_service *service;
    honed_buffer *buffer; /* may be NULL */
    honed_request *requests[MOST_REQUESTS]; /* of the latest kinds, which the service has prepared */
    uint64_t kinds[MOST_REQUESTS];
    size_t made;
    bool taken;
};
static struct line lines[MOST_LINES];

struct line *line_take(void)
{
    struct line *unused = NULL;
    for (struct line *line = lines; line < lines + MOST_LINES; line++) {
        if (line->taken)
            continue;
        if (line->service) {
            line->taken = true;
            return line;
        }
        unused = unused ? unused : line;
    }
    if (unused)
        unused->taken = true;
    return unused;
}

void line_give(struct line *line)
{
    line->taken = false;
}

void service_forget(honed_service *service)
{
    if (!service)
        return;
    close_descriptor(&service->socket);
    close_descriptor(&service->epoll);
    close_descriptor(&service->timer);
}

/* Another thread of the parent may have used them. */
void lines_forget(void)
{
    for (struct line *line = lines; line < lines + MOST_LINES; line++) {
        service_forget(line->service);
        if (line->buffer)
            close_descriptor(&line->buffer->descriptor);
        *line = (struct line){0};
    }
}

/* ---- Tensors ---- */

/* ONNX Runtime's numbers of element types. */
static const honed_type types[] = {HONED_UNKNOWN, HONED_FP32,  HONED_UINT8, HONED_INT8,   HONED_UINT16,
                                   HONED_INT16,   HONED_INT32, HONED_INT64, HONED_UNKNOWN, HONED_BOOL,
                                   HONED_FP16,    HONED_FP64,  HONED_UINT32, HONED_UINT64};
enum { TYPES = sizeof types / sizeof *types };

static int ort_type(honed_type type)
{
    for (int i = 1; i < TYPES; i++)
        if (types[i] == type)
            return i;
    return 0;
}

static bool fine(const struct runtime *runtime, OrtStatus *status)
{
    if (status)
        ((void (*)(OrtStatus *))runtime->table[RELEASE_STATUS])(status);
    return !status;
}

#define CALL(runtime, slot, arguments, ...) fine(runtime, ((OrtStatus * (*)arguments)(runtime)->table[slot])(__VA_ARGS__))

/* Type and shape of a tensor; false where it is none, or one that does not travel. */
static bool read_tensor(const struct runtime *runtime, const OrtValue *value, honed_type *type, size_t *rank, int64_t *sizes)
{
    OrtShapeInfo *info;
    int kind = 0, element = 0;
    bool read;
    if (!value || !CALL(runtime, VALUE_TYPE, (const OrtValue *, int *), value, &kind) || kind != ORT_TENSOR ||
        !CALL(runtime, TYPE_AND_SHAPE, (const OrtValue *, OrtShapeInfo **), value, &info))
        return false;
    read = CALL(runtime, ELEMENT_TYPE, (const OrtShapeInfo *, int *), info, &element) && element > 0 && element < TYPES &&
           types[element] && CALL(runtime, DIMENSIONS_COUNT, (const OrtShapeInfo *, size_t *), info, rank) &&
           *rank <= MOST_SIZES && CALL(runtime, DIMENSIONS, (const OrtShapeInfo *, int64_t *, size_t), info, sizes, *rank);
    ((void (*)(OrtShapeInfo *))runtime->table[RELEASE_SHAPE_INFO])(info);
    if (read)
        *type = types[element];
    return read;
}

static void *data_of(const struct runtime *runtime, const OrtValue *value)
{
    const OrtMemoryInfo *memory;
    int device = -1;
    void *data;
    if (!CALL(runtime, MEMORY_INFO, (const OrtValue *, const OrtMemoryInfo **), value, &memory))
        return NULL;
    ((void (*)(const OrtMemoryInfo *, int *))runtime->table[DEVICE_TYPE])(memory, &device);
    return device == ORT_CPU && CALL(runtime, MUTABLE_DATA, (const OrtValue *, void **), value, &data) ? data : NULL;
}

static uint64_t mix(uint64_t hash, const void *data, size_t size)
{
    const unsigned char *bytes = data;
    for (uint64_t word; size; size -= size < 8 ? size : 8, bytes += 8) {
        word = 0;
        memcpy(&word, bytes, size < 8 ? size : 8);
        hash = (hash ^ word) * 0x9e3779b97f4a7c15;
        hash ^= hash >> 29;
    }
    return hash;
}

bool read_kind(const struct runtime *runtime, const struct run *run, struct read_kind *kind)
{
    struct shapes *shapes = &kind->shapes;
    if (run->input_count > MOST_TENSORS || run->output_count > MOST_OUTPUTS || !run->output_count)
        return false;
    shapes->count = run->input_count;
    kind->hash = run->output_count;
    for (size_t i = 0; i < run->input_count; i++) {
        shapes->names[i] = run->input_names[i];
        if (!read_tensor(runtime, run->inputs[i], &kind->types[i], &shapes->ranks[i], shapes->sizes[i]))
            return false;
        for (size_t d = 0; d < shapes->ranks[i]; d++)
            if (shapes->sizes[i][d] <= 0) /* nothing is compiled for these */
                return false;
        if (!(kind->data[i] = data_of(runtime, run->inputs[i])))
            return false;
        kind->hash = mix(kind->hash, shapes->names[i], strlen(shapes->names[i]) + 1);
        kind->hash = mix(kind->hash, &kind->types[i], sizeof kind->types[i]);
        kind->hash = mix(kind->hash, shapes->sizes[i], shapes->ranks[i] * sizeof(int64_t));
    }
    for (size_t i = 0; i < run->output_count; i++) {
        for (size_t j = 0; j < i; j++)
            if (!strcmp(run->output_names[i], run->output_names[j]))
                return false;
        kind->hash = mix(kind->hash, run->output_names[i], strlen(run->output_names[i]) + 1);
    }
    return true;
}

/* ---- The answer ---- */

static size_t aligned(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

/* Memory shared with the service, for inputs that are better copied once than sent. */
static bool make_room(struct line *line, size_t bytes)
{
    if (line->buffer && honed_buffer_bytes(line->buffer) >= bytes)
        return true;
    honed_buffer_free(line->buffer);
    return !honed_buffer_new(line->service, bytes, &line->buffer);
}

static bool fill_request(const struct run *run, const struct read_kind *kind, struct line *line, honed_request *request)
{
    const struct shapes *shapes = &kind->shapes;
    size_t bytes[MOST_TENSORS], total = 0, at = 0;
    for (size_t i = 0; i < shapes->count; i++) {
        bytes[i] = (size_t)count_bytes(kind->types[i], shapes->sizes[i], shapes->ranks[i]);
        total += aligned(bytes[i]);
    }
    if (total >= LEAST_SHARED && !make_room(line, total))
        return false;
    for (size_t i = 0; i < shapes->count; i++, at += aligned(bytes[i])) {
        const char *name = shapes->names[i];
        if (total < LEAST_SHARED) {
            if (honed_request_input(request, name, kind->types[i], shapes->sizes[i], shapes->ranks[i], kind->data[i]))
                return false;
            continue;
        }
        memcpy((char *)honed_buffer_data(line->buffer) + at, kind->data[i], bytes[i]);
        if (honed_request_input_shared(request, name, kind->types[i], shapes->sizes[i], shapes->ranks[i], line->buffer, at))
            return false;
    }
    for (size_t i = 0; i < run->output_count; i++)
        if (honed_request_want(request, run->output_names[i]))
            return false;
    return true;
}

/* Where an output of the answer goes: into the app's tensor, or a new one, which `made` gets. */
static void *place_output(const struct runtime *runtime, const honed_tensor *tensor, const OrtValue *given, OrtValue **made)
{
    OrtAllocator *allocator;
    honed_type type;
    size_t rank;
    int64_t sizes[MOST_SIZES];
    if (given) {
        bool equal = read_tensor(runtime, given, &type, &rank, sizes) && type == tensor->type && rank == tensor->rank &&
                     !memcmp(sizes, tensor->shape, rank * sizeof *sizes);
        return equal ? data_of(runtime, given) : NULL;
    }
    if (!CALL(runtime, DEFAULT_ALLOCATOR, (OrtAllocator **), &allocator) ||
        !CALL(runtime, CREATE_TENSOR, (OrtAllocator *, const int64_t *, size_t, int, OrtValue **), allocator, tensor->shape,
              tensor->rank, ort_type(tensor->type), made))
        return NULL;
    return data_of(runtime, *made);
}

/* All outputs are there before one is filled: until then the app's session can run. */
static bool take_outputs(const struct runtime *runtime, const struct run *run, const honed_request *request)
{
    OrtValue *made[MOST_OUTPUTS] = {0};
    void *places[MOST_OUTPUTS];
    bool whole = honed_request_output_count(request) == run->output_count;
    for (size_t i = 0; whole && i < run->output_count; i++) {
        const honed_tensor *tensor = honed_request_output(request, i);
        whole = ort_type(tensor->type) && !strcmp(tensor->name, run->output_names[i]) &&
                ((places[i] = place_output(runtime, tensor, run->outputs[i], &made[i])) || !tensor->bytes);
    }
    for (size_t i = 0; i < run->output_count; i++) {
        const honed_tensor *tensor = whole ? honed_request_output(request, i) : NULL;
        if (tensor && tensor->bytes)
            memcpy(places[i], tensor->data, (size_t)tensor->bytes);
        if (tensor && made[i])
            run->outputs[i] = made[i];
        else if (made[i])
            ((void (*)(OrtValue *))runtime->table[RELEASE_VALUE])(made[i]);
    }
    return whole;
}

/* One for runs of this kind, which those before left; NULL where memory is short. */
static honed_request *request_for(struct line *line, const char *model, uint64_t kind)
{
    size_t at = line->made % MOST_REQUESTS;
    for (size_t i = 0; i < MOST_REQUESTS; i++)
        if (line->requests[i] && line->kinds[i] == kind && !strcmp(line->requests[i]->model, model))
            return line->requests[i];
    honed_request_free(line->requests[at]);
    line->requests[at] = honed_request_new(line->service, model);
    if (!line->requests[at])
        return NULL;
    line->requests[at]->compiled = true;
    line->kinds[at] = kind;
    line->made++;
    return line->requests[at];
}

bool answer_run(const struct runtime *runtime, const struct run *run, const struct read_kind *kind, struct line *line,
                const char *model, int64_t deadline)
{
    honed_request *request;
    if (!line->service)
        line->service = honed_service_new(NULL);
    request = line->service ? request_for(line, model, kind->hash) : NULL;
    if (!request)
        return false;
    honed_request_timeout(request, (int)((deadline + 999999) / 1000000));
    return fill_request(run, kind, line, request) && !honed_infer(request) && take_outputs(runtime, run, request);
}
