/* A file of the program's own, handed to the service: ModelBring. */
#include "bring.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "transport.h"

void put_shapes(struct frame *frame, const struct shapes *shapes, bool scalars)
{
    size_t count = 0;
    for (size_t i = 0; i < shapes->count; i++)
        count += scalars || shapes->ranks[i];
    put_text(frame, "shapes");
    put_map(frame, count);
    for (size_t i = 0; i < shapes->count; i++) {
        if (!scalars && !shapes->ranks[i])
            continue;
        put_text(frame, shapes->names[i]);
        put_array(frame, shapes->ranks[i]);
        for (size_t d = 0; d < shapes->ranks[i]; d++)
            put_int(frame, shapes->sizes[i][d]);
    }
}

void copy_text(char *into, size_t room, const struct message *message, const struct value *text)
{
    size_t size = plain_text(message, text) ? text->size : 0;
    if (size >= room)
        size = room - 1;
    if (size)
        memcpy(into, message->bytes + text->at, size);
    into[size] = 0;
}

struct bringing {
    struct call call;
    size_t count;
    int descriptors[MOST_DESCRIPTORS];
    char *names[MOST_DESCRIPTORS];
    char digests[MOST_DESCRIPTORS][DIGEST_BYTES];
    char *missing[MOST_DESCRIPTORS]; /* external data that the service needs */
    size_t missing_count;
    char *model;
};

static void take_model(struct call *call, const struct message *message, const struct value *result)
{
    struct bringing *bringing = (struct bringing *)call;
    const struct value *name = find(message, result, "model_name");
    copy_text(bringing->model, MODEL_NAME_BYTES, message, name);
    if (!name || name->kind != TEXT || !*bringing->model || name->size >= MODEL_NAME_BYTES)
        fail_nonsense(&call->failure, "a model without a name");
}

static void take_missing(struct call *call, const struct message *message, const struct value *error)
{
    struct bringing *bringing = (struct bringing *)call;
    const struct value *names = find(message, error, "external_data");
    if (!is_text(message, find(message, error, "type"), "MissingFiles") || !names || names->kind != ARRAY)
        return;
    for (uint32_t i = 0; i < names->size && bringing->missing_count < MOST_DESCRIPTORS; i++) {
        const struct value *name = item(message, names, i);
        char *copied = plain_text(message, name) && name->size ? malloc(name->size + 1) : NULL;
        if (!copied)
            continue;
        copy_text(copied, name->size + 1, message, name);
        bringing->missing[bringing->missing_count++] = copied;
    }
}

static bool leads_out(const char *name)
{
    if (*name == '/')
        return true;
    for (const char *at = name; at; at = strchr(at, '/') ? strchr(at, '/') + 1 : NULL)
        if (!strncmp(at, "..", 2) && (!at[2] || at[2] == '/'))
            return true;
    return false;
}

static bool add_file(struct bringing *bringing, int descriptor, const char *name)
{
    if (descriptor < 0 || bringing->count == MOST_DESCRIPTORS)
        return false;
    bringing->descriptors[bringing->count] = descriptor;
    bringing->names[bringing->count] = strdup(name);
    return digest_file(descriptor, bringing->digests[bringing->count]) && bringing->names[bringing->count++];
}

/* False where a file is not there, or not to be sent. */
static bool add_missing(struct bringing *bringing, int folder)
{
    for (size_t i = 0; i < bringing->missing_count; i++) {
        const char *name = bringing->missing[i];
        int opened = folder < 0 || leads_out(name) ? -1 : openat(folder, name, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
        if (!add_file(bringing, opened, name)) {
            if (opened >= 0)
                close(opened);
            return false;
        }
    }
    return bringing->missing_count;
}

static void forget_missing(struct bringing *bringing)
{
    while (bringing->missing_count)
        free(bringing->missing[--bringing->missing_count]);
}

static honed_code send_files(honed_service *service, struct bringing *bringing, const struct bring_options *options)
{
    struct frame *frame = frame_new(1024);
    bringing->call = (struct call){.take = take_model, .refused = take_missing, .msgid = ++service->msgids};
    if (frame) {
        frame->descriptors = bringing->descriptors;
        frame->descriptor_count = bringing->count;
        put_request(frame, bringing->call.msgid, "ModelBring");
        put_map(frame, 3);
        put_text(frame, "files");
        put_array(frame, bringing->count);
        for (size_t i = 0; i < bringing->count; i++)
            put_text(frame, bringing->names[i]);
        put_text(frame, "sha256");
        put_array(frame, bringing->count);
        for (size_t i = 0; i < bringing->count; i++)
            put_text(frame, bringing->digests[i]);
        put_text(frame, "parameters");
        put_map(frame, options->shapes ? 3 : 1);
        put_text(frame, "precision");
        put_text(frame, options->precision);
        if (options->shapes) { /* the program runs it by itself */
            put_text(frame, "engine");
            put_text(frame, "opencl");
            put_shapes(frame, options->shapes, false);
        }
    }
    return ask(service, &bringing->call, frame);
}

honed_code bring(honed_service *service, int descriptor, const char *name, int folder, const struct bring_options *options,
                 char *model)
{
    struct bringing *bringing = calloc(1, sizeof *bringing);
    honed_code code;
    if (!bringing)
        return fail_memory(&service->failure);
    bringing->model = model;
    if (!add_file(bringing, descriptor, name)) {
        code = fail(&service->failure, HONED_FAILED_PRECONDITION, "%s cannot be read; give an ONNX file that this user may read", name);
    } else {
        code = send_files(service, bringing, options);
        if (code && add_missing(bringing, folder)) {
            forget_missing(bringing);
            code = send_files(service, bringing, options);
        }
    }
    forget_missing(bringing);
    for (size_t i = 0; i < MOST_DESCRIPTORS; i++) {
        free(bringing->names[i]);
        if (i && i < bringing->count)
            close(bringing->descriptors[i]);
    }
    free(bringing);
    return code;
}

/* ---- For programs ---- */

const char *name_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

int open_folder_of(const char *path)
{
    char *folder = strdup(path);
    int descriptor = -1;
    if (folder) {
        folder[name_of(path) - path] = 0;
        descriptor = open(*folder ? folder : ".", O_PATH | O_DIRECTORY | O_CLOEXEC);
    }
    free(folder);
    return descriptor;
}

honed_code honed_bring(honed_service *service, const char *path, const char *precision, honed_model **found)
{
    struct bring_options options = {.precision = precision};
    char model[MODEL_NAME_BYTES];
    int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY), folder = open_folder_of(path);
    honed_code code = bring(service, descriptor, name_of(path), folder, &options, model);
    *found = NULL;
    close_descriptor(&descriptor);
    close_descriptor(&folder);
    return code ? code : honed_describe(service, model, found);
}
